"""The audit trail in PostgreSQL: the same lines and hashes, for several replicas at once.

The server seals each line, in one statement, under a lock on the end of the chain. So the lock is
held for no time of a client's: one that is killed or frozen has written a whole line or none, and
keeps nobody waiting. A line counts when it is committed.
"""

from __future__ import annotations

import threading
import time

from ...errors import HostError
from ..problems import Problem
from ..store_postgres import opened
from . import places
from .lines import Head, stamp, unsealed
from .trail import ROTATE_BYTES, AuditTrail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..store_address import Database
    from ..store_postgres_link import Link

APPEND = "SELECT seq, hash FROM audit_append(?, ?, ?)"
FORWARD = (
    "SELECT ends, line FROM audit_lines WHERE file = ? AND ends > ? AND seq <= ?"
    " ORDER BY ends LIMIT ?"
)
BACKWARD = (
    "SELECT ends, line FROM audit_lines WHERE file = ? AND ends < ? AND seq <= ?"
    " ORDER BY ends DESC LIMIT ?"
)
PAGE = 500
# Beyond the end of any file.
FAR = 1 << 62


class PgAudit(AuditTrail):
    """The audit trail of a database."""

    def __init__(
        self, database: Database, *, rotate_bytes: int = ROTATE_BYTES,
        clock: Callable[[], float] = time.time, tables: str = "migrate",
    ) -> None:  # fmt: skip
        self._database = database
        self._rotate = rotate_bytes
        self._clock = clock
        self._link = opened(database, tables)
        self._reader: Link | None = None
        self._opening = threading.Lock()
        row = self._link.run("SELECT seq, hash FROM audit_head", again=True).fetchone()
        self._seq, self._hash = (int(row[0]), str(row[1])) if row else (0, "")

    @property
    def link(self) -> Link:
        """The connection that lines are written over, for who decides whether it may be used."""
        return self._link

    @property
    def seq(self) -> int:
        """The number of the last line that this process knows."""
        return self._seq

    @property
    def head(self) -> str:
        """The end of the chain as this process knows it."""
        return f"{self._seq}:{self._hash}"

    def _write(self, record: Mapping[str, object]) -> int:
        values = (stamp(self._clock()), unsealed(record), self._rotate)
        try:
            row = self._link.run(APPEND, values).fetchone()
        except Problem as problem:
            if problem.code == "REPLICA_UNAVAILABLE":
                raise
            raise places.unavailable(problem.hint or problem.message) from problem
        if row is None:
            raise places.unavailable("it has no end")
        seq, digest = int(row[0]), str(row[1])
        if seq > self._seq:
            # Threads may come back in another order.
            self._seq, self._hash = seq, digest
        return seq

    def snapshot(self) -> PgTrail:
        """What there is now."""
        return PgTrail(self._reading())

    def check_removal(self) -> None:
        """Only who owns the tables may remove lines."""
        sql = "SELECT has_function_privilege('audit_prune(integer)', 'EXECUTE')"
        if self._link.run(sql, again=True).fetchone() != (True,):
            raise HostError(
                "this user of the database may not remove lines of the audit",
                hint="use the one that owns the tables", code="audit-owner",
            )  # fmt: skip

    def remove(self, number: int) -> None:
        """Remove a file."""
        self._link.run("SELECT audit_prune(?)", (number,))

    def sync(self) -> None:
        """A committed line is as safe as the server is told to make it."""

    def close(self) -> None:
        """No more lines from here."""
        self._link.close()
        with self._opening:
            if self._reader is not None:
                self._reader.close()

    def _reading(self) -> Link:
        """A connection for readers, who may take long: a line never waits for them."""
        with self._opening:
            if self._reader is None:
                try:
                    self._reader = opened(self._database, "look")
                except HostError as error:
                    raise places.unavailable(error.message) from error
            return self._reader


class PgTrail:
    """The trail at one moment. Lines never change, so a last number is enough to keep it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # One statement sees one moment.
        row = link.run(
            "SELECT h.seq, h.hash, h.file, h.ends, l.least, l.most, l.last FROM (SELECT"
            " min(file) AS least, max(file) AS most, max(seq) AS last FROM audit_lines) l"
            " LEFT JOIN audit_head h ON true",
            again=True,
        ).fetchone()
        self.head: Head | None = None
        self.sizes: dict[int, int] = {}
        self._last = 0
        if row is None:
            return
        seq, digest, file, ends, least, most, last = row
        if seq is not None:
            self.head = Head(seq=seq, hash=digest, file=file, end=ends)
        if last is not None:
            self._last = int(last)
            # One that is missing in between shows by its lines.
            self.sizes = dict.fromkeys(range(least, most + 1), 0)

    def lines(self, number: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each line of a file with where it ends, counted from what is there."""
        at = end = start
        while page := self._page(FORWARD, number, at):
            for at, line in page:  # noqa: B007 - the last one is where the next page begins
                end += len(line)
                yield end, line

    def backwards(self, number: int) -> Iterator[bytes]:
        """The lines of a file from its end to its beginning."""
        at = FAR
        while page := self._page(BACKWARD, number, at):
            for at, line in page:  # noqa: B007
                yield line.removesuffix(b"\n")

    def _page(self, sql: str, number: int, at: int) -> list[tuple[int, bytes]]:
        found = self._link.run(sql, (number, at, self._last, PAGE), again=True).fetchall()
        return [(int(ends), str(line).encode()) for ends, line in found]
