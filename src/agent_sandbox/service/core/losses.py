"""Sandboxes that are gone without our doing: their machine failed, or somebody removed them.

What ran in one has no end that anybody has seen: it is Lost, at once, and nobody waits for what
will not come. It is never run again by itself: only a request that asked for `retry` is.
"""

from __future__ import annotations

import asyncio
import logging

from ..problems import Problem
from ..values import FAILED, PAUSED, PENDING, RUNNING
from .sandboxes import target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..values import Sandbox
    from .context import Context, Live
    from .jobs import Job

log = logging.getLogger(__name__)
# Between two tries to remove what a backend may still have of one, in seconds.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# What the state says of a sandbox that another replica has by now.
TAKEN_OVER = ("CONFLICT", "REPLICA_UNAVAILABLE")


class Losses:
    """Takes what backends tell of losses. Only the loop may use it."""

    def __init__(self, context: Context, lose: Callable[[Job, str], None]) -> None:
        """`lose` ends one command as lost."""
        self._context = context
        self._lose = lose
        self._removals: set[asyncio.Task[None]] = set()

    def attend(self) -> None:
        """Listen to all backends."""
        for backend in self._context.backends.values():
            backend.attend(self.lost)

    async def stop(self) -> None:
        """Leave the rest to the next start: what the store does not know, a backend removes."""
        for task in self._removals:
            task.cancel()
        if self._removals:
            await asyncio.wait(tuple(self._removals))

    def lost(self, sandbox_id: str, reason: str) -> None:
        """A sandbox is gone. A second word about it changes nothing, nor one about its past."""
        live = self._context.live.get(sandbox_id)
        if live is None or live.lost or self._context.replicas.fenced():
            # Without a lease it may be another replica's by now, which sees for itself.
            return
        live.lost = reason or "it is gone"
        state = live.sandbox.state
        if state in (RUNNING, PAUSED):
            if self._fail(live):
                self._remove(live.sandbox)
        elif state == PENDING:
            # Whoever makes it looks at `lost` at the end, and undoes it.
            self._note(live)
        # One that is being removed still is. But its commands must not wait for a machine that
        # does not answer.
        for job in tuple(live.jobs.values()):
            self._lose(job, live.lost)

    def _note(self, live: Live) -> None:
        self._context.lost += 1
        try:
            self._context.note(None, "sandbox.lost", target(live.sandbox), reason=live.lost)
        except (Problem, OSError):
            # It is gone all the same: to go on as if it were there would be the greater lie.
            log.exception("sandbox %s: its loss is not in the audit", live.sandbox.id)

    def _fail(self, live: Live) -> bool:
        """Only its reason is left. It takes up no room any more. False: it is another's by now."""
        context = self._context
        self._note(live)
        if live.look is not None:
            live.look.cancel()
            live.look = None
        ours = True
        # In memory first: whether the store can be written or not, nothing may start in it.
        live.sandbox = live.sandbox.replace(state=FAILED, reason=live.lost)
        try:
            context.update(live)
            if live.sandbox.one_shot:
                context.leave(live)
        except Exception as error:
            log.exception("sandbox %s: its loss cannot be stored yet", live.sandbox.id)
            live.dirty = True
            ours = not (isinstance(error, Problem) and error.code in TAKEN_OVER)
        context.uncount(live)
        return ours

    def _remove(self, sandbox: Sandbox) -> None:
        # Not a task of the context: the service does not wait for it when it stops.
        task = asyncio.get_running_loop().create_task(self._removal(sandbox))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _removal(self, sandbox: Sandbox) -> None:
        """Have the backend remove what is left, whenever it can: the machine may come back."""
        pause = FIRST_PAUSE
        while not self._context.replicas.fenced():
            try:
                await self._context.backend(sandbox.backend).delete(sandbox)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                log.warning("lost sandbox %s cannot be removed yet: %s", sandbox.id, error)
            else:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
