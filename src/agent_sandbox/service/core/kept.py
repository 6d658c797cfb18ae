"""How many ended executions an agent's past may fill. Age is the reaper's; this is about room.

Without it, an agent that prints as much as it may, again and again, fills the disk of all.
"""

from __future__ import annotations

import os

from ..values import RUNNING
from .journal import Journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..values import Execution
    from .context import Context

# Per agent: results, and bytes of their output.
MOST_RESULTS = 100_000
MOST_BYTES = 1 << 30
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

    def load(self) -> None:
        """Count what an earlier process has kept."""
        self._have = self._context.store.kept(self._context.limits.max_output_bytes)

    def add(self, execution: Execution) -> None:
        """One more has ended; the oldest go when there are too many."""
        results, size = self._have.get(execution.owner, (0, 0))
        results, size = results + 1, size + self._weight(execution)
        self._have[execution.owner] = results, size
        if results > self._results or size > self._size:
            self._shed(execution)

    def _weight(self, execution: Execution) -> int:
        written = execution.stdout_bytes + execution.stderr_bytes
        record = ROW + sum(map(len, execution.command))
        return min(written, self._context.limits.max_output_bytes) + record

    def _shed(self, newest: Execution) -> None:
        results, size = self._have[newest.owner]
        for old in self._context.store.executions(owner=newest.owner, limit=_LOT):
            if results <= self._results * 0.99 and size <= self._size * 0.9:
                break
            if old.state == RUNNING or old.id == newest.id:
                continue
            self._drop(old.id)
            results, size = results - 1, size - self._weight(old)
        self._have[newest.owner] = results, max(size, 0)

    def forget(self, execution: Execution) -> None:
        """Forget one at its owner's wish."""
        results, size = self._have.get(execution.owner, (1, 0))
        self._have[execution.owner] = results - 1, max(size - self._weight(execution), 0)
        self._drop(execution.id)

    def _drop(self, exec_id: str) -> None:
        self._context.store.delete_execution(exec_id)
        Journal.stored(path_of(self._context, exec_id)).remove()

    def expire(self, before: float) -> int:
        """Forget those that ended before a moment."""
        gone = self._context.store.forget_executions(before)
        for exec_id in gone:
            Journal.stored(path_of(self._context, exec_id)).remove()
        if gone:
            self.load()
        return len(gone)


def path_of(context: Context, exec_id: str) -> str:
    """The file of an execution's output. Ids are ours: they have no slash."""
    return os.path.join(context.journals, exec_id)
