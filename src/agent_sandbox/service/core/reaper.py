"""What has to happen by itself: ends of sandboxes, of what is kept, and writes to the disk."""

from __future__ import annotations

import asyncio
import logging

from ..problems import Problem
from ..values import FAILED, PAUSED, RUNNING, STOPPING
from . import reconcile
from .kept import LOTS
from .keys import KEEP_SECONDS
from .sandboxes import target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .context import Context, Live
    from .executions import Executions
    from .losses import Losses
    from .sandboxes import Sandboxes

log = logging.getLogger(__name__)
TICK = 1.0
# Every so many ticks: what is old, and what a disk has to write.
TIDY_EVERY = 10
# With replicas, every so many times of that: a count of results, and a look at files of output.
COUNT_EVERY, SWEEP_EVERY = 6, 360
# A sandbox that could not be removed is tried again after this many seconds.
RETRY = 30.0


class Reaper:
    """Looks around once a second."""

    def __init__(
        self, context: Context, sandboxes: Sandboxes, executions: Executions, losses: Losses
    ) -> None:
        self._context = context
        self._losses = losses
        # Of each backend that wants to be compared now and then: the next time, and who does it.
        self._next: dict[str, float] = {}
        self._comparing: dict[str, asyncio.Task[None]] = {}
        self._sandboxes = sandboxes
        self._kept = executions.kept
        self._later = executions.later
        self._task: asyncio.Task[None] | None = None
        self._failed: dict[str, float] = {}
        # The last line of the audit that is on the disk.
        self._synced = 0
        self._tidied = 0

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """End, after what is being done."""
        if self._task is not None:
            tasks = (self._task, *self._comparing.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._task = None

    async def _loop(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK)
            tick += 1
            for work in (self.sweep, self.tidy) if tick % TIDY_EVERY == 0 else (self.sweep,):
                await _tried(work)

    # --- sandboxes

    async def sweep(self) -> None:
        """Remove what has expired or is idle; ask backends that were away."""
        await self._context.replicas.sweep()
        self._later.again()
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
        # Nobody removes it at the moment, but somebody has begun to: the state was away at its end.
        if sandbox.state == STOPPING or (sandbox.state == FAILED and live.counted):
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
            else:
                self._compare(name, context.backends[name].reconcile_seconds)

    def _compare(self, name: str, every: float) -> None:
        """Begin to compare a backend again, if it is time, and not while that goes on."""
        now = asyncio.get_running_loop().time()
        if not every or name in self._comparing or now < self._next.setdefault(name, now + every):
            return

        def over(task: asyncio.Task[None]) -> None:
            del self._comparing[name]
            self._next[name] = asyncio.get_running_loop().time() + every
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("backend %s cannot be compared with the store: %s", name, error)

        # Not a task of the context: the service does not wait for it when it stops.
        work = reconcile.again(self._context, name, self._losses.lost)
        task = self._comparing[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(over)

    # --- what is kept

    async def tidy(self) -> None:
        """Drop what is old, write what only memory has, and let the disk follow."""
        context = self._context
        self._failed = {i: at for i, at in self._failed.items() if i in context.live}
        parts = (self._save, self._expire, self._forget_keys, self._follow_others)
        for part in parts:
            # One that fails again and again must not keep the others from being done.
            await _tried(part)
        await asyncio.to_thread(context.store.tidy)

    async def _save(self) -> None:
        self.save()

    async def _expire(self) -> None:
        context = self._context
        await self._kept.expire(context.clock() - context.limits.keep_executions)

    async def _forget_keys(self) -> None:
        context = self._context
        before = context.clock() - KEEP_SECONDS
        for _ in range(LOTS):
            gone = context.store.forget_keys(before)
            if not context.store.lot or gone < context.store.lot:
                break
            await asyncio.sleep(0)

    async def _follow_others(self) -> None:
        """Other replicas add results and forget them, too. To count them all takes a while."""
        self._context.replicas.tidy()
        if not self._context.replicas.shared:
            return
        self._tidied += 1
        if self._tidied % COUNT_EVERY == 0:
            self._kept.load()
        if self._tidied % SWEEP_EVERY == 0:
            self._context.spawn(reconcile.sweep_journals(self._context))

    def save(self) -> None:
        """Write down when sandboxes were used last."""
        for live in self._context.live.values():
            if live.dirty:
                self._context.update(live)


async def _tried(work: Callable[[], Awaitable[None]]) -> None:
    """Do it; the reaper goes on whatever becomes of it."""
    try:
        await work()
    except Problem as problem:
        # The state or the audit is away: others have said so, and say when it is back.
        log.warning("the reaper goes on later: %s", problem.message)
    except Exception:
        log.exception("the reaper goes on after an error")


def _seen(task: asyncio.Task[None]) -> None:
    """A failure is in the log and in the sandbox's reason already."""
    if not task.cancelled():
        task.exception()
