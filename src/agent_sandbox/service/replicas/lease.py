"""The lease of a replica: who lives, by the clock of the database.

A replica writes every few seconds that it lives. One that cannot knows so itself, before others
take over what it had: its own deadline is earlier than the one in the database, and counted from
before the write was sent. A process that was stopped and goes on (SIGSTOP, a suspended machine)
finds its time over at its next act: the clock that it looks at went on.

Neither the sign of life nor the end waits for the loop, which waits for the database in each of
its statements: one thread renews over a connection of its own, another watches the deadline. At
the end that one cuts the statement that the loop waits for, and every other is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from contextlib import suppress

from ...errors import HostError, SandboxError
from ..problems import Problem
from .interface import Peer
from .upstream import Address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..store_postgres import PgStore
    from ..store_postgres_link import Link

log = logging.getLogger(__name__)
# Seconds: between two signs of life, of a lease, and by which a replica ends its own earlier.
# Commands are killed within that time.
BEAT, LEASE, MARGIN = 2.0, 10.0, 3.0
# So long a sign may wait for its answer: there must be time for a second one.
ANSWER = 3.0
# While the database is away.
RETRY = 0.25
# A process that was stopped looks at the clock again after so long.
LOOK_AGAIN = 0.25
# A sign that takes longer than this says that the database is slow.
SLOW = 1.0
# So long the end waits for the threads.
STOP = 1.0
# A loop that has not taken a turn for so long hangs: others shall take over.
HANGS = 30.0

# One that lives is an earlier life of ours if it was at the same place; else it is a copy.
JOIN = (
    "INSERT INTO replicas (id, address, fingerprint, beat, ends, term, place)"
    " VALUES (?, '', '', seconds(), seconds() + ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
    " address = '', fingerprint = '', beat = excluded.beat, ends = excluded.ends,"
    " term = excluded.term, place = excluded.place"
    " WHERE replicas.ends <= seconds() OR replicas.place = excluded.place"
)  # fmt: skip
RENEW = (
    "UPDATE replicas SET beat = seconds(), ends = seconds() + ?"
    " WHERE id = ? AND term = ? AND ends > seconds()"
)  # fmt: skip
LOOK = "SELECT id, address, fingerprint FROM replicas WHERE ends > seconds()"


def boot_time() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def peer_of(id: str, address: str, fingerprint: str) -> Peer:
    """A row; the address is ADDR:PORT, or "" while it does not listen yet."""
    host, _, port = address.rpartition(":")
    # One that nobody of us has written leads nowhere, and breaks nothing.
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    where = Address(host=host.strip("[]"), port=number, fingerprint=fingerprint)
    return Peer(id, where)


class Lease:
    """Our own life, and what we know of others'. Only the loop may use it, but for its threads."""

    def __init__(
        self, store: PgStore, id: str, clock: Callable[[], float] = boot_time, *, place: str = ""
    ) -> None:
        """`place`: where its data directory is; see `identity.place`."""
        self.id = id
        self._place = place
        self._store = store
        self._clock = clock
        self._term = secrets.token_hex(8)
        self._until = -1.0
        self._gone: dict[str, asyncio.Future[None]] = {}
        # Of the thread that renews; made when it is needed.
        self._link: Link | None = None
        self._links: tuple[Link, ...] = ()
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        # When the loop was told of a sign of life that it has not seen yet; 0: it has.
        self._told = 0.0
        # Set when the lease is lost: nothing may be done any more.
        self.lost = threading.Event()

    # --- our own

    def join(self) -> None:
        """Begin to live. An earlier life of this id is over: the data directory has one lock."""
        before = self._clock()
        with self._store.transaction(about(self.id)):
            if not self._store.change(JOIN, (self.id, LEASE, self._term, self._place)):
                # Each would end the other for ever, and all that runs with it.
                raise HostError(
                    f"another service lives as {self.id}, from another data directory",
                    hint=f"if this directory is a copy, remove the file 'replica' in it; if that "
                    f"one was just ended, start again in {LEASE:g} s", code="replica-twin",
                )  # fmt: skip
            # What others have put aside for us.
            self._store.change(
                "UPDATE sandboxes SET home = ? WHERE home = ?", (self.id, away(self.id))
            )
        self._until = before + LEASE - MARGIN

    def announce(self, address: str, fingerprint: str) -> None:
        """Where others reach us."""
        self._store.change(
            "UPDATE replicas SET address = ?, fingerprint = ? WHERE id = ? AND term = ?",
            (address, fingerprint, self.id, self._term),
        )

    def fence(self, *links: Link) -> None:
        """Statements over these are refused without the lease, and cut when it ends."""
        self._links = links
        for link in links:
            link.check = self.check

    def held(self) -> bool:
        """Whether nobody else can have taken over by now. For any thread."""
        return self._clock() < self._until and not self.lost.is_set()

    def check(self) -> None:
        """Refuse to act without the lease."""
        if not self.held():
            raise Problem(
                "REPLICA_UNAVAILABLE", "this replica has lost its lease", rule="replica.lease",
                hint="ask again: another replica answers", retry_after=2.0,
            )  # fmt: skip

    def renew(self) -> bool:
        """A sign of life; False: it is too late, others have taken over or may do so."""
        before = self._clock()
        if not self._own().run(RENEW, (LEASE, self.id, self._term)).rowcount:
            return False
        self._until = before + LEASE - MARGIN
        return True

    def leave(self) -> None:
        """An orderly end: nobody has to wait for the end of the lease."""
        self._until = -1.0
        self._own().run(
            "DELETE FROM replicas WHERE id = ? AND term = ?", (self.id, self._term)
        )  # fmt: skip

    def close(self) -> None:
        """No more statements of the lease itself."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _own(self) -> Link:
        """Our own connection: neither the loop's statements nor a takeover's are in its way."""
        if self._link is None:
            # Its driver is not there where state is in SQLite.
            from ..store_postgres_link import Link

            self._link = Link(self._store.database, answer=ANSWER)
        return self._link

    # --- the threads

    def start(self, beat: Callable[[], None], lost: Callable[[], None]) -> None:
        """Live. On the loop `beat` is called after each sign of life, `lost` once."""
        loop = asyncio.get_running_loop()
        for work, call in ((self._renew, beat), (self._watch, lost)):
            thread = threading.Thread(
                target=work, args=(loop, call), name="lease", daemon=True
            )  # fmt: skip
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """No more signs, and no end."""
        self._stopping.set()
        if self._link is not None:
            # Nobody needs the answer any more.
            self._link.cut()
        for thread in self._threads:
            # One that waits for a new connection ends after it, and does nothing more.
            await asyncio.to_thread(thread.join, STOP)
        self._threads = []

    def _renew(self, loop: asyncio.AbstractEventLoop, beat: Callable[[], None]) -> None:
        """Until the end: one sign after the other. The first one soon: it needs a connection."""
        pause = RETRY
        while not (self._stopping.wait(pause) or self.lost.is_set()):
            pause = RETRY
            if self._told and self._clock() - self._told > HANGS:
                # No sign of life, but the watch goes on: it ends with the lease.
                log.error("the loop hangs: the lease is not renewed")
                pause = BEAT
                continue
            begun = self._clock()
            try:
                if not self.renew():
                    self._end()
                    return
                # With a slow database there is time for the next sign alone.
                quick = self._clock() - begun < SLOW
                found = self._own().run(LOOK, again=True).fetchall() if quick else None
            except SandboxError as error:
                log.warning("the lease cannot be renewed: %s", error.hint or error.message)
            except Exception:
                log.exception("the lease could not be renewed")
            else:
                pause = max(BEAT - (self._clock() - begun), RETRY)
                if not self._told:
                    # A loop that is busy gets the next one when it has done this.
                    self._told = self._clock()
                    _tell(loop, self._after, found, beat)

    def _after(self, found: list[tuple[Any, ...]] | None, beat: Callable[[], None]) -> None:
        """On the loop, after a sign of life."""
        self._told = 0.0
        if not self.held() or self._stopping.is_set():
            return
        try:
            if found is not None:
                self._part(found)
            beat()
        except Problem as problem:
            log.warning("not all is done that comes with a beat: %s", problem.message)
        except Exception:
            log.exception("not all is done that comes with a beat")

    def _watch(self, loop: asyncio.AbstractEventLoop, lost: Callable[[], None]) -> None:
        """Wait for the end. It depends on nothing but the clock."""
        while self.held():
            left = max(self._until - self._clock(), 0.0)
            if self._stopping.wait(min(max(left, 0.01), LOOK_AGAIN)):
                return
        self._end()
        log.error("the lease is lost: this replica stops acting")
        _tell(loop, lost)

    def _end(self) -> None:
        """Refuse first, then cut: no statement gets through in between."""
        self.lost.set()
        for link in self._links:
            link.cut()

    # --- others

    def look(self) -> dict[str, Peer]:
        """Those who live. Who waits for one that does not is told."""
        return self._part(self._store.rows(LOOK))

    def _part(self, rows: list[tuple[Any, ...]]) -> dict[str, Peer]:
        found = {str(row[0]): peer_of(*map(str, row)) for row in rows}
        for name in [name for name in self._gone if name not in found]:
            future = self._gone.pop(name)
            if not future.done():
                future.set_result(None)
        return found

    def gone(self, id: str) -> asyncio.Future[None]:
        """Done when this replica's lease is over."""
        if id not in self._gone:
            self._gone[id] = asyncio.get_running_loop().create_future()
        return self._gone[id]


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *values: object) -> None:
    """Have the loop do something. One that is closed has nothing to do any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *values)


def about(id: str) -> str:
    """The lock for the life and the burial of a replica."""
    return f"replica {id}"


def away(id: str) -> str:
    """The home of what waits for a replica. Nobody writes under this name, not even that one."""
    return f"{id}!"


def is_away(home: str) -> bool:
    """Whether a home is such a name."""
    return home.endswith("!")
