"""How many ended executions an agent's past may fill. Age is the reaper's; this is about room.

Without it, an agent that prints as much as it may, again and again, fills the disk of all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

from ..problems import Problem
from ..values import RUNNING
from .journal import Journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..values import Execution
    from .context import Context

log = logging.getLogger(__name__)
# Per agent: results, and bytes of their output.
MOST_RESULTS = 100_000
MOST_BYTES = 1 << 30
# So many lots of what is old go at once; what is left goes the next time.
LOTS = 20
# To count all takes the longer the more there are. It may take this part of the time.
COUNT_SHARE = 0.05
# What a record weighs without its command.
ROW = 1024
# The oldest go in lots, so that a full past does not cost every new execution a search.
_LOT = 200


class Kept:
    """Counts what is kept, by owner."""

    def __init__(
        self, context: Context, *, results: int = MOST_RESULTS, size: int = MOST_BYTES
    ) -> None:
        self._context = context
        self._results = results
        self._size = size
        self._have: dict[str, tuple[int, int]] = {}
        # While all are counted: what has come and gone since.
        self._since: dict[str, tuple[int, int]] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._not_before = 0.0

    def load(self) -> None:
        """Count what is kept: now, or by and by where others keep it for us as well."""
        store, most = self._context.store, self._context.limits.max_output_bytes
        if not store.shared:
            self._have = store.kept(most)
        elif self._since is None and time.monotonic() >= self._not_before:
            self._since = {}
            # Not a task of the context: the service does not wait for it when it stops.
            self._counting = asyncio.get_running_loop().create_task(self._count(most))

    async def _count(self, most: int) -> None:
        """Off the loop. What cannot be counted now is counted later: it is about room alone."""
        begun = time.monotonic()
        try:
            found = await asyncio.to_thread(self._context.store.kept, most)
            since = self._since or {}
            for owner, more in since.items():
                have = found.get(owner, (0, 0))
                found[owner] = max(have[0] + more[0], 0), max(have[1] + more[1], 0)
            self._have = found
        except Problem as problem:
            log.warning("what is kept cannot be counted now: %s", problem.message)
        except Exception:
            log.exception("what is kept cannot be counted")
        finally:
            self._since = None
            self._not_before = time.monotonic() + (time.monotonic() - begun) / COUNT_SHARE

    def _change(self, owner: str, results: int, size: int) -> tuple[int, int]:
        """So many more, or less, than we know of; how many there are then."""
        for counts in (self._have, self._since):
            if counts is not None:
                have = counts.get(owner, (0, 0))
                counts[owner] = have[0] + results, have[1] + size
        return self._have[owner]

    def add(self, execution: Execution) -> None:
        """One more has ended; the oldest go when there are too many."""
        results, size = self._change(execution.owner, 1, self._weight(execution))
        if results > self._results or size > self._size:
            self._shed(execution)

    def _weight(self, execution: Execution) -> int:
        written = execution.stdout_bytes + execution.stderr_bytes
        record = ROW + sum(map(len, execution.command))
        return min(written, self._context.limits.max_output_bytes) + record

    def _shed(self, newest: Execution) -> None:
        results, size = was = self._have[newest.owner]
        for old in self._context.store.executions(owner=newest.owner, limit=_LOT):
            if results <= self._results * 0.99 and size <= self._size * 0.9:
                break
            if old.state == RUNNING or old.id == newest.id:
                continue
            self._drop(old.id)
            results, size = results - 1, max(size - self._weight(old), 0)
        self._change(newest.owner, results - was[0], size - was[1])

    def forget(self, execution: Execution) -> None:
        """Forget one at its owner's wish."""
        results, size = self._have.get(execution.owner, (1, 0))
        self._change(execution.owner, -min(results, 1), -min(size, self._weight(execution)))
        self._drop(execution.id)

    def _drop(self, exec_id: str) -> None:
        self._context.store.delete_execution(exec_id)
        Journal.stored(path_of(self._context, exec_id)).remove()

    async def expire(self, before: float) -> int:
        """Forget those that ended before a moment; others have their turn between two lots."""
        store, count = self._context.store, 0
        for _ in range(LOTS):
            gone = store.forget_executions(before)
            for exec_id in gone:
                Journal.stored(path_of(self._context, exec_id)).remove()
            count += len(gone)
            if not store.lot or len(gone) < store.lot:
                break
            await asyncio.sleep(0)
        if count:
            self.load()
        return count


def path_of(context: Context, exec_id: str) -> str:
    """The file of an execution's output. Ids are ours: they have no slash."""
    return os.path.join(context.journals, exec_id)
