"""The state of the service in PostgreSQL, for several replicas at once.

What was answered is committed: how safe that is against a power cut is the server's
`synchronous_commit`. Calls are short and made on the loop, as SQLite's are.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager

import psycopg

from . import store_postgres_schema, store_private, store_rows
from .problems import Problem
from .state import State
from .store_postgres_link import Aside, Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from .state import Where
    from .store_address import Database
    from .values import Execution, Sandbox

PUT_SANDBOX = (
    "INSERT INTO sandboxes (id, owner, state, reason, created, body, labels, home)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = excluded.owner,"
    " state = excluded.state, reason = excluded.reason, created = excluded.created,"
    " body = excluded.body,"
    " labels = excluded.labels WHERE sandboxes.home = excluded.home"
)
PUT_EXECUTION = (
    "INSERT INTO executions (id, sandbox, owner, state, started, ended, body, size, home)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
    " state = excluded.state, started = excluded.started, ended = excluded.ended,"
    " body = excluded.body, size = excluded.size WHERE executions.home = excluded.home"
)


# A lot at a time: each statement is bounded, whatever has piled up. Another replica does the same.
FORGET = (
    "DELETE FROM executions WHERE id IN (SELECT id FROM executions WHERE ended > 0 AND ended < ?"
    " ORDER BY ended LIMIT ? FOR UPDATE SKIP LOCKED) RETURNING id"
)
FORGET_KEYS = (
    "DELETE FROM keys WHERE (owner, key) IN (SELECT owner, key FROM keys WHERE made < ?"
    " ORDER BY made LIMIT ? FOR UPDATE SKIP LOCKED)"
)
# For a thread of its own: it looks at every row.
KEPT = (
    "SELECT owner, count(*), sum(least(%s, size) + length(body))"
    " FROM executions WHERE ended > 0 GROUP BY owner"
)
COUNT_SECONDS = 60.0


class PgStore(State):
    """A database that replicas share. `data`: this replica's own directory; "": none is needed."""

    shared = True
    lot = 500

    def __init__(
        self, database: Database, *, data: str = "", home: str = "", tables: str = "migrate"
    ) -> None:
        """`tables`: see `opened`."""
        self.database = database
        # The replica that writes. A row of another's is left alone.
        self.home = home
        self.data = store_private.make_directory(data) if data else ""
        self._lock = store_private.lock(self.data) if data else -1
        self._aside = Aside(database)
        try:
            self._link = opened(database, tables)
        except BaseException:
            self._unlock()
            raise

    @property
    def link(self) -> Link:
        """Its connection, for who decides whether it may be used."""
        return self._link

    def close(self) -> None:
        """Leave the database and the data directory to others."""
        self._aside.close()
        self._link.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            store_private.unlock(self._lock)
            self._lock = -1

    def tidy(self) -> None:
        """The server has processes of its own for that."""

    def change(self, sql: str, values: Iterable[object] = ()) -> int:
        """Run one statement as a transaction of its own; how many rows it changed."""
        try:
            return self._link.run(sql, values).rowcount
        except (UnicodeEncodeError, psycopg.DataError) as error:
            raise Problem(
                "INVALID", "a text has a character that cannot be kept", rule="store"
            ) from error

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Every row. A text that cannot be in the database (half a character, NUL) finds none."""
        try:
            return self._link.run(sql, values, again=True).fetchall()
        except (UnicodeEncodeError, psycopg.DataError):
            return []

    def returning(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a statement that changes something: never sent twice."""
        return self._link.run(sql, values).fetchall()

    @contextmanager
    def transaction(self, about: str = "") -> Iterator[None]:
        """Several statements as one; two with the same `about` do not overlap anywhere."""
        with self._link.transaction(number(about)):
            yield

    def put_sandbox(self, sandbox: Sandbox) -> None:
        """Add or replace; CONFLICT if another replica has it by now."""
        changed = self.change(
            PUT_SANDBOX,
            (sandbox.id, sandbox.owner, sandbox.state, plain(sandbox.reason), sandbox.created,
             store_rows.sandbox_text(sandbox),
             [label(key, value) for key, value in sandbox.metadata.items()], self.home),
        )  # fmt: skip
        _ours(changed, "sandbox")

    def delete_sandbox(self, id: str) -> None:
        """Forget one; its executions stay. Another replica's stays, too."""
        self.change("DELETE FROM sandboxes WHERE id = ? AND home = ?", (id, self.home))

    def _labelled(self, key: str, value: str) -> Where:
        return "labels @> ?", ([label(key, value)],)

    def put_execution(self, execution: Execution) -> None:
        """Add or replace; CONFLICT if another replica has it by now."""
        changed = self.change(
            PUT_EXECUTION,
            (execution.id, execution.sandbox, execution.owner, execution.state,
             execution.started, execution.ended, store_rows.execution_text(execution),
             execution.stdout_bytes + execution.stderr_bytes, self.home),
        )  # fmt: skip
        _ours(changed, "execution")

    def kept(self, most: int) -> dict[str, tuple[int, int]]:
        """By owner: how many have ended, and their bytes: of output, at most `most` of each.

        For a thread: it takes the longer the more there are, over a connection of its own.
        """
        rows = self._aside.rows(KEPT, (most,), COUNT_SECONDS)
        return {str(owner): (int(count), int(size)) for owner, count, size in rows}

    def forget_executions(self, before: float) -> list[str]:
        """Remove some of those that ended before a moment; their ids."""
        return [str(row[0]) for row in self.returning(FORGET, before, self.lot)]

    def forget_keys(self, before: float) -> int:
        """Remove some of those that were claimed before a moment; how many."""
        return self.change(FORGET_KEYS, (before, self.lot))

    def claim(self, owner: str, key: str, body_hash: str, now: float | None = None) -> bool:
        """Take a key for a request of this replica; False: it is taken, see `idempotent`."""
        changed = self.change(
            "INSERT INTO keys (owner, key, body_hash, made, home) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (owner, key, body_hash, time.time() if now is None else now, self.home),
        )
        return changed == 1

    def release_unanswered(self) -> int:
        """For the start: an earlier life of this replica, which was killed, claimed these."""
        return self.change("DELETE FROM keys WHERE status IS NULL AND home = ?", (self.home,))


def opened(database: Database, tables: str) -> Link:
    """A connection to a database with all tables: `tables` says what may be done for that."""
    link = Link(database)
    try:
        link.prepare(store_postgres_schema.PREPARE[tables])
    except BaseException:
        link.close()
        raise
    return link


# --- pure


def number(about: str) -> int:
    """The advisory lock of a name: any number, but the same everywhere."""
    digest = hashlib.sha256(f"agent-sandbox {about}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def label(key: str, value: str) -> str:
    """A pair of metadata as a word without special characters."""
    pair = f"{len(key)}:{key}{value}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(pair).hexdigest()


def plain(text: str) -> str:
    """A text that can be kept, whatever a machine has said."""
    return text.encode("ascii", "replace").decode().replace("\0", "?")


def _ours(changed: int, what: str) -> None:
    if changed == 0:
        raise Problem(
            "CONFLICT", f"another replica has this {what} by now", rule="replica",
            hint="ask again: it is sent there",
        )  # fmt: skip
