"""One connection to PostgreSQL: bounded in time, and honest about what is not known.

A statement that was sent is never sent again if it may have changed something: nobody knows
whether the server has done it. So a connection is looked at before each statement, and a dead one
is replaced then. While the database is away callers get STATE_UNAVAILABLE at once; a thread dials.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import lru_cache

import psycopg

from ..errors import HostError
from .problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    from .store_address import Database

    Connection = psycopg.Connection[tuple[Any, ...]]
    Cursor = psycopg.Cursor[tuple[Any, ...]]
    Patience = Callable[[Connection], AbstractContextManager[None]]

log = logging.getLogger(__name__)
SCHEMA = "agent_sandbox"
# By the server, then by us: one that is frozen keeps no bound of its own.
STATEMENT_SECONDS, ANSWER_SECONDS = 3.0, 4.0
CONNECT_SECONDS = 5
# A change of the tables may have to wait for those who use them, and takes its time.
CHANGE_SECONDS = 600.0
# So long the loop waits for a new connection; then again only after a while.
GRACE, PAUSE = 0.5, 1.0
WATCH_SECONDS = 0.5
# What is not in the address. A machine that vanished is noticed by unanswered packets.
DEFAULTS = {
    "application_name": "agent-sandbox", "client_encoding": "utf8",
    "connect_timeout": str(CONNECT_SECONDS), "keepalives": "1", "keepalives_idle": "5",
    "keepalives_interval": "2", "keepalives_count": "3", "tcp_user_timeout": "5000",
}  # fmt: skip
# Nobody else's functions or tables are found by our names: our schema and the catalog alone.
SESSION = (
    f"SET search_path TO {SCHEMA}, pg_temp;"
    f" SET statement_timeout TO {int(STATEMENT_SECONDS * 1000)};"
    f" SET lock_timeout TO {int(STATEMENT_SECONDS * 1000)};"
    f" SET idle_in_transaction_session_timeout TO {int(ANSWER_SECONDS * 1000)}"
)
# Codes of errors (SQLSTATE) that say: not now. A read-only server was the primary once.
LATER = frozenset({"57014", "55P03", "40001", "40P01", "25006", "25P03"})
FULL = frozenset({"53100"})
# So long a text may be in a message; what a server says is not ours.
MOST_WORDS = 200


class Link:
    """A connection that is made again when it breaks. For one thread at a time."""

    def __init__(self, database: Database, *, answer: float | None = None) -> None:
        """`answer`: seconds until a statement is given up, if not as for others."""
        self._database = database
        self._answer = answer
        # Raises a Problem when nothing may be asked any more.
        self.check: Callable[[], None] = _always
        self._mutex = threading.RLock()
        # Held to end a statement, and to say that one is under way.
        self._guard = threading.Lock()
        self._deadline = 0.0
        self._inside = False
        self._dialing: _Dialing | None = None
        self._not_before = 0.0
        self._closed = threading.Event()
        try:
            self._connection: Connection | None = dial(database)
        except psycopg.Error as error:
            raise HostError(
                f"cannot use {database.shown}: {words(error)}",
                hint="see that the server runs, and that this user may use the database",
                code="database-away",
            ) from error
        self._poll = _poll(self._connection)
        threading.Thread(target=self._watch, name="database", daemon=True).start()

    def close(self) -> None:
        """No more statements."""
        self._closed.set()
        with self._mutex:
            self._drop()

    def cut(self) -> None:
        """End the statement that is under way, if there is one. For another thread."""
        with self._guard:
            if self._deadline:
                self._shut()

    def prepare(self, work: Callable[[Connection, Database, Patience], None]) -> None:
        """Something for the start, bounded as any statement but where `work` asks for patience."""
        with self._mutex, self._bounded(self._answer_seconds()):
            work(self._ready(), self._database, self._patience)

    @contextmanager
    def _patience(self, connection: Connection) -> Iterator[None]:
        """What follows may take long; but not for ever, also when the server freezes."""
        with self._bounded(CHANGE_SECONDS):
            least = int(CHANGE_SECONDS * 1000)
            connection.execute(f"SET statement_timeout TO {least}; SET lock_timeout TO {least}")
            yield
        connection.execute(SESSION)

    # --- statements

    def run(self, sql: str, values: Iterable[object] = (), *, again: bool = False) -> Cursor:
        """Run a statement with `?` for values. `again`: it only reads, and may be sent twice."""
        with self._mutex:
            given = tuple(values)
            # Without values it may be several statements, and `%` is a sign as any.
            text = translated(sql) if given else sql
            try:
                return self._run(self._ready(), text, given)
            except psycopg.Error as error:
                if not again or self._inside or self._connection is not None:
                    raise problem_of(error) from error
            try:
                return self._run(self._ready(), text, given)
            except psycopg.Error as error:
                raise problem_of(error) from error

    @contextmanager
    def transaction(self, lock: int) -> Iterator[None]:
        """All or nothing, while no other holds the lock with this number."""
        with self._mutex:
            if self._inside:
                raise RuntimeError("a transaction in a transaction")
            try:
                # In one message; READ COMMITTED, so what follows sees what came before the lock.
                self.run(f"BEGIN; SELECT pg_advisory_xact_lock({lock:d})")
                self._inside = True
                yield
                done = self.run("COMMIT").statusmessage
            except BaseException:
                self._inside = False
                self._roll_back()
                raise
            self._inside = False
            if done != "COMMIT":
                raise RuntimeError("a statement of the transaction had failed")

    def _roll_back(self) -> None:
        if self._connection is None:
            # The server does it, when the connection is gone.
            return
        try:
            self.check()
        except Problem:
            # Not another statement.
            self._drop()
            return
        try:
            self._run(self._connection, "ROLLBACK", ())
        except psycopg.Error:
            self._drop()

    def _run(self, connection: Connection, text: str, values: tuple[object, ...]) -> Cursor:
        try:
            with self._bounded(self._answer_seconds()):
                # Now that `cut` would find us: who forbids it does so first, and then cuts.
                self.check()
                return connection.execute(text, values or None)
        except psycopg.Error as error:
            if connection.closed or error.sqlstate == "25006":
                self._drop()
            raise

    def _answer_seconds(self) -> float:
        return ANSWER_SECONDS if self._answer is None else self._answer

    @contextmanager
    def _bounded(self, seconds: float) -> Iterator[None]:
        """The connection is ended under what takes longer: see `_watch`."""
        with self._guard:
            before, self._deadline = self._deadline, time.monotonic() + seconds
        try:
            yield
        finally:
            with self._guard:
                # One within another has used up its time, which begins anew.
                again = time.monotonic() + self._answer_seconds()
                self._deadline = again if before else 0.0

    # --- the connection

    def _ready(self) -> Connection:
        """A connection that lives, as far as can be seen without asking."""
        self.check()
        connection = self._connection
        if connection is not None and self._lives(connection):
            return connection
        self._drop()
        if self._inside:
            # A new connection would know nothing of what was done before.
            raise away("the connection was lost")
        self._connection = self._dialled()
        self._poll = _poll(self._connection)
        return self._connection

    def _lives(self, connection: Connection) -> bool:
        if connection.closed:
            return False
        # A server that goes says so, and closes: then there is something to read, up to the end.
        for _ in range(3):
            if not self._poll.poll(0):
                return True
            try:
                connection.pgconn.consume_input()
                connection.pgconn.is_busy()
            except psycopg.Error:
                return False
        return not connection.closed

    def _dialled(self) -> Connection:
        """A new connection, or STATE_UNAVAILABLE soon."""
        wait = 0.0
        if self._dialing is None:
            if self._closed.is_set() or time.monotonic() < self._not_before:
                raise away("it could not be reached a moment ago")
            self._dialing, wait = _Dialing(self._database), GRACE
        if not self._dialing.done.wait(wait):
            raise away("it does not answer")
        found, self._dialing = self._dialing, None
        if found.connection is None:
            self._not_before = time.monotonic() + PAUSE
            # Names of machines and users are for the operator, not for whoever asks.
            log.warning("the database cannot be reached: %s", found.error)
            raise away("it cannot be reached")
        return found.connection

    def _drop(self) -> None:
        if self._connection is not None:
            with self._guard:
                self._connection.close()
                self._connection = None

    def _watch(self) -> None:
        """End the connection under a statement that has no answer: the server may be frozen."""
        while not self._closed.wait(WATCH_SECONDS):
            with self._guard:
                if self._deadline and time.monotonic() > self._deadline:
                    self._shut()

    def _shut(self) -> None:
        if self._connection is not None and not self._connection.closed:
            shut(self._connection)


class Aside:
    """Questions that take long, each over a connection of its own. For any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._mutex = threading.Lock()
        self._open: set[Connection] = set()
        self._closed = False

    def rows(self, sql: str, values: tuple[object, ...], seconds: float) -> list[tuple[Any, ...]]:
        """Every row; STATE_UNAVAILABLE after so many seconds."""
        try:
            connection = dial(self._database)
        except psycopg.Error as error:
            raise problem_of(error) from error
        # A frozen server keeps no bound of its own.
        bound = threading.Timer(seconds + 1.0, shut, (connection,))
        bound.daemon = True
        try:
            with self._mutex:
                if self._closed:
                    raise away("the service stops")
                self._open.add(connection)
            bound.start()
            connection.execute(f"SET statement_timeout TO {int(seconds * 1000)}")
            return connection.execute(sql, values).fetchall()
        except psycopg.Error as error:
            raise problem_of(error) from error
        finally:
            bound.cancel()
            with self._mutex:
                self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End what is under way: nobody waits for it at the end."""
        with self._mutex:
            self._closed = True
            for connection in self._open:
                shut(connection)


class _Dialing:
    """An attempt to connect, in a thread: the loop has other things to do."""

    def __init__(self, database: Database) -> None:
        self.connection: Connection | None = None
        self.error = ""
        self.done = threading.Event()
        self._database = database
        threading.Thread(target=self._run, name="database-dial", daemon=True).start()

    def _run(self) -> None:
        try:
            self.connection = dial(self._database)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.error = words(error)
        finally:
            self.done.set()


def dial(database: Database) -> Connection:
    """A connection with its bounds; psycopg.Error."""
    connection = psycopg.connect(
        "", autocommit=True, **{**DEFAULTS, **database.parameters}  # type: ignore[arg-type]
    )  # fmt: skip
    # The bound on connecting does not hold for this: the server may freeze in between.
    bound = threading.Timer(CONNECT_SECONDS, shut, (connection,))
    bound.daemon = True
    bound.start()
    try:
        connection.execute(SESSION)
    except BaseException:
        bound.cancel()
        connection.close()
        raise
    bound.cancel()
    return connection


def shut(connection: Connection) -> None:
    """Whoever waits for an answer is told that none comes. For another thread."""
    with (
        suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as sock,
    ):
        sock.shutdown(socket.SHUT_RDWR)


def _always() -> None:
    """Nothing forbids it."""


def _poll(connection: Connection) -> select.poll:
    found = select.poll()
    found.register(connection.fileno(), select.POLLIN)
    return found


# --- pure


@lru_cache(maxsize=512)
def translated(sql: str) -> str:
    """The same with psycopg's placeholders. No text of ours has a `?` for anything else."""
    return sql.replace("%", "%%").replace("?", "%s")


def words(error: BaseException) -> str:
    """What the server said, in one line."""
    return " ".join(str(error).split())[:MOST_WORDS] or type(error).__name__


def away(why: str) -> Problem:
    """Nothing is done without the state."""
    return Problem(
        "STATE_UNAVAILABLE", "the database of the service cannot be used now",
        hint=f"try again soon: {why}", rule="state", retry_after=1.0,
    )  # fmt: skip


def problem_of(error: psycopg.Error) -> Exception:
    """What to tell a client; an error of ours stays what it is."""
    code = error.sqlstate or ""
    if code in FULL:
        return Problem("DISK_FULL", "the service has no room left for its state", rule="store")
    if code == "42501":
        return away("its user lacks a right there; see the grants in docs/service.md")
    lost = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    if code in LATER or (lost and code[:2] in ("", "08", "53", "57", "58")):
        return away("the statement was not finished, or its answer was lost")
    return error
