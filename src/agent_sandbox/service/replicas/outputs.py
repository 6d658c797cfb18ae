"""The output of ended executions in the database, so that it outlives the replica that ran them.

In parts, so that neither a write nor a read holds up the loop. The first part is written last:
where it is, all are.
"""

from __future__ import annotations

import asyncio
import logging

from ..core.journal import Journal
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..store_postgres import PgStore
    from ..values import Execution

log = logging.getLogger(__name__)
PART = 256 * 1024
GONE = "its output is gone with the replica that ran it"
# Not for one that was forgotten meanwhile.
ADD = (
    "INSERT INTO outputs (execution, part, data) SELECT id, ?, ? FROM executions WHERE id = ?"
    " ON CONFLICT DO NOTHING"
)


class SavedJournal(Journal):
    """A journal in the database. It has ended."""

    def __init__(self, store: PgStore, execution: str, begins: int = 0) -> None:
        super().__init__("", limit=0, begins=begins)
        self._store = store
        self._execution = execution
        self.ended = True
        row = store.one(
            "SELECT sum(length(data)), bool_or(part = 0) FROM outputs WHERE execution = ?",
            execution,
        )
        # Without the first part the others are of no use: nobody will write it any more.
        self._start += int(row[0]) if row and row[1] else 0

    def read(self, offset: int) -> bytes:
        """As much as a part has behind an offset; the next one, too, where that ends."""
        if not self.begins <= offset < self._start:
            return b""
        first, at = divmod(offset - self.begins, PART)
        rows = self._store.rows(
            "SELECT data FROM outputs WHERE execution = ? AND part IN (?, ?) ORDER BY part",
            self._execution, first, first + 1,
        )  # fmt: skip
        return b"".join(bytes(row[0]) for row in rows)[at : at + PART]

    def remove(self) -> None:
        """It goes with its execution."""


def told(execution: Execution, journal: Journal) -> Execution:
    """One whose output is gone says so: it must not look as if it had printed nothing. Pure."""
    written = execution.stdout_bytes + execution.stderr_bytes
    if not (execution.ended and written) or journal.size:
        return execution
    return execution.replace(truncated=True, error=execution.error or GONE)


def add(store: PgStore, execution: str, part: int, data: bytes) -> None:
    """Write one part."""
    store.change(ADD, (part, data, execution))


async def save(store: PgStore, execution: str, journal: Journal) -> None:
    """Write all parts of a journal that has ended, the first one last."""
    parts = range(-(-journal.size // PART))
    try:
        for part in reversed(parts):
            add(store, execution, part, piece(journal, part))
            # Others have their turn between two of them.
            await asyncio.sleep(0)
    except Problem as problem:
        # It is in its file, and others ask us for it.
        log.warning("the output of %s is only here: %s", execution, problem.message)


def piece(journal: Journal, part: int) -> bytes:
    """A part of the raw bytes of a journal. `read` gives less than that at once."""
    pieces: list[bytes] = []
    offset, size = journal.begins + part * PART, PART
    while size > 0 and (data := journal.read(offset)[:size]):
        pieces.append(data)
        offset += len(data)
        size -= len(data)
    return b"".join(pieces)
