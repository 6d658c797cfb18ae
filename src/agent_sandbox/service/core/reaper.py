"""What has to happen by itself: ends of sandboxes, of what is kept, and writes to the disk."""

from __future__ import annotations

import asyncio
import logging

from ..values import FAILED, PAUSED, RUNNING
from . import reconcile
from .keys import KEEP_SECONDS
from .sandboxes import target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .context import Context, Live
    from .kept import Kept
    from .sandboxes import Sandboxes

log = logging.getLogger(__name__)
TICK = 1.0
# Every so many ticks: what is old, and what a disk has to write.
TIDY_EVERY = 10
# A sandbox that could not be removed is tried again after this many seconds.
RETRY = 30.0


class Reaper:
    """Looks around once a second."""

    def __init__(self, context: Context, sandboxes: Sandboxes, kept: Kept) -> None:
        self._context = context
        self._sandboxes = sandboxes
        self._kept = kept
        self._task: asyncio.Task[None] | None = None
        self._failed: dict[str, float] = {}
        # The last line of the audit that is on the disk.
        self._synced = 0

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """End, after what is being done."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    async def _loop(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK)
            tick += 1
            for work in (self.sweep, self.tidy) if tick % TIDY_EVERY == 0 else (self.sweep,):
                try:
                    await work()
                except Exception:
                    log.exception("the reaper goes on after an error")

    # --- sandboxes

    async def sweep(self) -> None:
        """Remove what has expired or is idle; ask backends that were away."""
        await self._reconcile()
        now = self._context.clock()
        for live in tuple(self._context.live.values()):
            if live.removal is not None:
                continue
            verdict = self._verdict(live, now)
            if verdict is not None:
                action, reason = verdict
                self._context.note(None, action, target(live.sandbox), reason=reason)
                self._sandboxes.remove(live).add_done_callback(_seen)
        audit = self._context.audit
        if audit.seq != self._synced:
            seq = audit.seq
            await asyncio.to_thread(audit.sync)
            self._synced = seq

    def _verdict(self, live: Live, now: float) -> tuple[str, str] | None:
        """What is to become of a sandbox, and why; None: it stays."""
        sandbox = live.sandbox
        if sandbox.backend not in self._context.reconciled:
            return None
        if sandbox.state == FAILED and live.counted:
            if now < self._failed.get(sandbox.id, 0.0):
                return None
            self._failed[sandbox.id] = now + RETRY
            return "sandbox.reap", "it could not be removed before"
        if now >= sandbox.expires and sandbox.state in (RUNNING, PAUSED, FAILED):
            return "sandbox.expire", "its time is over"
        if sandbox.state == RUNNING and not live.jobs and now >= sandbox.last_used + live.idle:
            return "sandbox.reap", f"it was not used for {live.idle:g} s"
        return None

    async def _reconcile(self) -> None:
        context = self._context
        for name in context.backends:
            if name not in context.reconciled:
                await reconcile.backend(context, name)

    # --- what is kept

    async def tidy(self) -> None:
        """Drop what is old, write what only memory has, and let the disk follow."""
        context = self._context
        now = context.clock()
        self.save()
        self._kept.expire(now - context.limits.keep_executions)
        context.store.forget_keys(now - KEEP_SECONDS)
        self._failed = {i: at for i, at in self._failed.items() if i in context.live}
        await asyncio.to_thread(context.store.tidy)

    def save(self) -> None:
        """Write down when sandboxes were used last."""
        for live in self._context.live.values():
            if live.dirty:
                self._context.update(live)


def _seen(task: asyncio.Task[None]) -> None:
    """A failure is in the log and in the sandbox's reason already."""
    if not task.cancelled():
        task.exception()
