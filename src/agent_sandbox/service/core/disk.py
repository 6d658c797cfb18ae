"""The bound of a sandbox's files where no kernel limit keeps it: looked at while something runs.

A look walks a tree, so it is taken only when a command has run for a moment, and no more often
than a tenth of the time would allow. A fast writer can be over its bound by what it writes between
two looks; then it is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ..problems import Problem
from .jobs import DISK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from typing import TypeVar

    from .context import Context, Live
    from .jobs import Job

    T = TypeVar("T")

log = logging.getLogger(__name__)
FIRST_LOOK = 0.2
# The pause between two looks, in durations of a look.
PAUSE = 10.0
# What a backend says of a bound that we have to keep.
SERVER = "server"


def bound(live: Live) -> int | None:
    """The bytes that a sandbox may have where we have to see to it."""
    sandbox = live.sandbox
    # Several may keep it: "kubelet+server".
    kept = sandbox.enforced.get("disk", "").split("+")
    return sandbox.resources.disk if SERVER in kept else None


def left(live: Live, most: int) -> int:
    """How many bytes an upload may come to: no more than `most`, and than the sandbox has left."""
    limit = bound(live)
    return most if limit is None else max(0, min(most, limit - (live.disk or 0)))


class Disks:
    """Watches over the sandboxes in which something runs."""

    def __init__(self, context: Context, end: Callable[[Job, str], None]) -> None:
        self._context = context
        self._end = end

    def watch(self, live: Live) -> None:
        """Look soon, and go on while something runs; once more after the last one."""
        if live.look is None and bound(live) is not None:
            self._later(live, FIRST_LOOK)

    def unwatch(self, live: Live) -> None:
        """It will be removed."""
        if live.look is not None:
            live.look.cancel()
            live.look = None

    def _later(self, live: Live, seconds: float) -> None:
        live.look = asyncio.get_running_loop().call_later(seconds, self._look, live)

    def _look(self, live: Live) -> None:
        live.look = None
        if self._context.draining and not live.jobs:
            # Nobody would wait for it any more.
            return
        self._context.spawn(self._round(live))

    async def _round(self, live: Live) -> None:
        running, begun = bool(live.jobs), time.monotonic()
        used, most = await self.measure(live), bound(live)
        if used is not None and most is not None and used > most:
            for job in tuple(live.jobs.values()):
                self._end(job, DISK)
        if running and live.look is None and live.sandbox.id in self._context.live:
            self._later(live, max(FIRST_LOOK, PAUSE * (time.monotonic() - begun)))

    async def measure(self, live: Live) -> int | None:
        """How much it has now. Those who ask at the same time share one look."""
        if live.looking is None:
            live.looking = self._context.spawn(self._measure(live))
        return await asyncio.shield(live.looking)

    async def _measure(self, live: Live) -> int | None:
        try:
            backend = self._context.backend(live.sandbox.backend)
            live.disk = (await backend.usage(live.sandbox)).disk
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            # It may be on its way out. What is not known is measured before the next use.
            live.disk = None
            there = live.removal is None and live.sandbox.id in self._context.live
            if there and not (self._context.draining or live.lost):
                words = getattr(error, "message", "") or repr(error)
                log.warning("sandbox %s: its files cannot be measured: %s", live.sandbox.id, words)
        finally:
            live.looking = None
        return live.disk

    async def check(self, live: Live, *, exact: bool = False) -> None:
        """Refuse to add to a sandbox that has more than it may."""
        most = bound(live)
        if most is None or (live.disk is not None and live.disk <= most):
            return
        if live.disk is None and live.look is not None and not exact:
            # It is looked at soon, and what runs is ended if need be.
            return
        used = await self.measure(live)
        if used is not None and used > most:
            raise full(most)

    async def upload(
        self,
        live: Live,
        data: AsyncIterator[bytes],
        work: Callable[[AsyncIterator[bytes]], Awaitable[T]],
    ) -> T:
        """Do an upload, counted as it comes: several at once share what is left."""
        await self.check(live, exact=True)
        size = 0

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal size
            async for part in data:
                size += len(part)
                live.uploading += len(part)
                await self._fits(live)
                yield part

        parts = counted()
        try:
            answer = await work(parts)
            live.disk = (live.disk or 0) + size
        finally:
            live.uploading -= size
            await parts.aclose()
            # What was replaced is counted twice, what was unpacked is not, until the next look.
            self.watch(live)
        return answer

    async def _fits(self, live: Live) -> None:
        most = bound(live)
        if most is None or (live.disk or 0) + live.uploading <= most:
            return
        used = await self.measure(live)
        if (used or 0) + live.uploading > most:
            raise full(most)


def full(most: int) -> Problem:
    """The refusal of a full sandbox."""
    return Problem("DISK_FULL", f"the sandbox may have {most} bytes of files", hint="delete some",
                   rule="resources.disk")  # fmt: skip
