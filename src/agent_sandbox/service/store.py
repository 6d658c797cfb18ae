"""The state of the service in SQLite: sandboxes, executions, tokens, idempotency keys.

WAL with synchronous=NORMAL: what was committed is in the page cache of the kernel, so a kill of
the process loses nothing. A power cut may take the last moments, never the whole: the database
stays consistent. Calls are short and made on the loop; `tidy` is for a thread.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager

from ..errors import HostError
from . import store_private, store_rows
from .problems import Problem
from .state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from .state import Where
    from .values import Execution, Sandbox

# Each entry moves the database from its index to the next version. Entries are never changed.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL,
        body TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX sandboxes_in_order ON sandboxes (created, id);
    CREATE INDEX sandboxes_of_owner ON sandboxes (owner, created, id);
    CREATE TABLE executions (
        id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, owner TEXT NOT NULL, state TEXT NOT NULL,
        started REAL NOT NULL, ended REAL NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX executions_in_order ON executions (started, id);
    CREATE INDEX executions_of_owner ON executions (owner, started, id);
    CREATE INDEX executions_of_sandbox ON executions (sandbox, started, id);
    CREATE INDEX executions_by_end ON executions (ended) WHERE ended > 0;
    CREATE TABLE keys (
        owner TEXT NOT NULL, key TEXT NOT NULL, body_hash TEXT NOT NULL, made REAL NOT NULL,
        status INTEGER, body TEXT, PRIMARY KEY (owner, key)) WITHOUT ROWID;
    CREATE INDEX keys_by_age ON keys (made);
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY, hash BLOB NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
        uid INTEGER, created REAL NOT NULL, expires REAL, revoked REAL,
        body TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX tokens_by_name ON tokens (name);
    CREATE INDEX tokens_by_uid ON tokens (uid) WHERE uid IS NOT NULL;
    """,
    """
    CREATE TABLE kept (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    """,
)
SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    # A checkpoint syncs the disk. `tidy` makes them in a thread; this is only for when it does not.
    "PRAGMA wal_autocheckpoint = 8000",
    # Commands and variables of a deleted sandbox are wiped, not only unlinked.
    "PRAGMA secure_delete = ON",
    "PRAGMA trusted_schema = OFF",
)
# `sandboxctl token` holds the write lock for less than a millisecond.
BUSY_SECONDS = 5.0


class Store(State):
    """The database of one data directory. `own`: as its one service; False: beside it."""

    def __init__(self, data: str, *, own: bool = True) -> None:
        self.data = store_private.make_directory(data)
        self._lock = store_private.lock(self.data) if own else -1
        self.path = f"{self.data}/{store_private.DATABASE}"
        try:
            self.db = _connect(self.path)
            _migrate(self.db, self.path)
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Leave the data directory to others."""
        self.db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            store_private.unlock(self._lock)
            self._lock = -1

    def tidy(self) -> None:
        """Move what was written from the log to the database, with syncs. For a thread."""
        beside = _open(self.path)
        try:
            beside.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            beside.close()

    def change(self, sql: str, values: Iterable[object] = ()) -> int:
        """Run one statement as a transaction of its own; how many rows it changed."""
        try:
            return self.db.execute(sql, tuple(values)).rowcount
        except sqlite3.OperationalError as error:
            raise _translated(error) from error

    def one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        """The first row. A text that cannot be in the database (half a character) finds none."""
        try:
            found: tuple[Any, ...] | None = self.db.execute(sql, values).fetchone()
        except UnicodeEncodeError:
            return None
        return found

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Every row; as `one`."""
        try:
            return self.db.execute(sql, values).fetchall()
        except UnicodeEncodeError:
            return []

    @contextmanager
    def transaction(self, about: str = "") -> Iterator[None]:  # noqa: ARG002 - there is one lock
        """Several statements as one; nothing else may use the store meanwhile (no `await`)."""
        self.change("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.change("COMMIT")

    def put_sandbox(self, sandbox: Sandbox) -> None:
        """Add or replace."""
        self.change(
            "INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?, ?)",
            (sandbox.id, sandbox.owner, sandbox.state, sandbox.created,
             store_rows.sandbox_text(sandbox)),
        )  # fmt: skip

    def _labelled(self, key: str, value: str) -> Where:
        """Keys come from clients: as values, not as JSON paths."""
        return (
            "EXISTS (SELECT 1 FROM json_each(body, '$.metadata') WHERE key = ? AND value = ?)",
            (key, value),
        )

    def put_execution(self, execution: Execution) -> None:
        """Add or replace."""
        self.change(
            "INSERT OR REPLACE INTO executions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (execution.id, execution.sandbox, execution.owner, execution.state,
             execution.started, execution.ended, store_rows.execution_text(execution)),
        )  # fmt: skip

    def kept(self, most: int) -> dict[str, tuple[int, int]]:
        """By owner: how many have ended, and their bytes: of output, at most `most` of each."""
        rows = self.rows(
            "SELECT owner, count(*), sum(min(?, coalesce(body ->> '$.stdout_bytes', 0)"
            " + coalesce(body ->> '$.stderr_bytes', 0)) + length(body))"
            " FROM executions WHERE ended > 0 GROUP BY owner",
            most,
        )
        return {str(owner): (int(count), int(size)) for owner, count, size in rows}


def _connect(path: str) -> sqlite3.Connection:
    """The database, made for its owner alone. SQLite gives its other files the same mode.

    Only for the first connection of a process. To close a file, by whatever descriptor, drops all
    of the process's locks on it (fcntl(2)): the next who closes the database elsewhere would take
    itself for the last, and remove the log into which we write.
    """
    os.close(store_private.open_file(path, os.O_RDWR | os.O_CREAT))
    for suffix in store_private.BESIDE:
        store_private.check_file(path + suffix)
    return _open(path)


def _open(path: str) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False,
            cached_statements=256,
        )  # fmt: skip
        try:
            for setting in SETTINGS:
                db.execute(setting)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise _broken(path, error) from error
    return db


def _migrate(db: sqlite3.Connection, path: str) -> None:
    """Bring the tables to this version; a later one is not touched."""
    try:
        version = _version(db)
        if version < len(MIGRATIONS):
            # Somebody else may do it at this moment: look again, with the write lock.
            db.execute("BEGIN IMMEDIATE")
            for step in MIGRATIONS[_version(db) :]:
                for statement in step.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
            db.execute("COMMIT")
    except sqlite3.Error as error:
        db.close()
        raise _broken(path, error) from error
    if version > len(MIGRATIONS):
        db.close()
        raise HostError(
            f"cannot use '{path}': a later version of agent-sandbox has written it",
            hint="use that version, or another --data DIR",
            code="data-newer",
        )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _broken(path: str, error: sqlite3.Error) -> HostError:
    return HostError(
        f"cannot use '{path}': {error}",
        hint="restore it from a backup, or move it away; tokens and sandboxes are lost with it",
        code="data-broken",
    )


def _translated(error: sqlite3.OperationalError) -> Exception:
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
        return Problem("DISK_FULL", "the service has no room left for its state", rule="store")
    return error
