"""Places for executions that all replicas share: taken, waited for and given in the database.

As `core.queue`: agents in turn, whoever waits the longest. Every step is one transaction under one
lock, so that no two replicas give the same place away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from ..core.queue import busy, draining
from ..problems import Problem
from ..store_postgres import number as lock_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..core.queue import Share
    from ..store_postgres import PgStore

log = logging.getLogger(__name__)
LOCK = "places"
# Who waits looks so often whether another replica has given it a place.
POLL = 0.05
COUNT = (
    "SELECT count(*) FILTER (WHERE taken), count(*) FILTER (WHERE taken AND owner = ?),"
    " count(*) FILTER (WHERE NOT taken AND owner = ?) FROM places"
)
# Each in one round trip, under the lock: see `tables`.
TAKE = "SELECT place, free FROM place_taken(?, ?, ?, ?, ?, ?, ?)"
LEAVE = "SELECT place_left(?, ?, ?, ?)"
GIVE = "SELECT places_given(?)"


class SharedPlaces:
    """A number of places for all replicas. Only the loop may use it."""

    def __init__(self, store: PgStore, replica: str, total: int) -> None:
        self._store = store
        self._replica = replica
        self._total = total
        # By number of the row: what is ours, and who waits here.
        self._held: dict[int, tuple[str, int]] = {}
        self._waiting: dict[int, tuple[str, int, asyncio.Future[None]]] = {}
        self._poll: asyncio.Task[None] | None = None
        self._closed = False

    def running(self, agent: str | None = None) -> int:
        """Of an agent, at all replicas; of all agents, only here: for this replica's gauges."""
        if agent is None:
            return len(self._held)
        row = self._store.one(COUNT, agent, agent)
        return int(row[1]) if row else 0

    def queued(self, agent: str | None = None) -> int:
        """As `running`."""
        if agent is None:
            return len(self._waiting)
        row = self._store.one(COUNT, agent, agent)
        return int(row[2]) if row else 0

    async def take(self, agent: str, share: Share) -> None:
        """Wait for a place. BUSY when the queue is full, or for too long."""
        if self._closed:
            raise draining()
        number, taken = self._enter(agent, share)
        if taken:
            self._held[number] = agent, share.running
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = agent, share.running, place
        self._watch()
        try:
            async with asyncio.timeout(share.patience):
                await place
        except BaseException as error:
            self._abandon(number)
            if isinstance(error, TimeoutError):
                words = f"no place for the command in {share.patience:g} s"
                raise busy(words, "MAX_QUEUE_SECONDS") from None
            raise

    def _enter(self, agent: str, share: Share) -> tuple[int, bool]:
        lock = lock_number(LOCK)
        (place, free), *_ = self._store.returning(
            TAKE, lock, secrets.randbits(62), agent, self._replica, self._total, share.running,
            share.queued,
        )  # fmt: skip
        if place is None:
            raise busy(f"{share.queued} commands wait already", "MAX_QUEUED_EXECS_PER_AGENT")
        return int(place), bool(free)

    def give(self, agent: str) -> None:
        """Give a place back, to whoever is next."""
        number = next((n for n, (owner, _) in self._held.items() if owner == agent), None)
        if number is None:
            # Whoever has it tells `heal`; nobody may be kept from going on by this.
            log.error("a place is given back that nobody holds")
            return
        del self._held[number]
        try:
            self._remove(number)
        except Problem:
            # The next beat removes what is not ours any more.
            log.warning("a place cannot be given back now: the database is away")

    def close(self) -> None:
        """Send everybody away who waits, and who comes."""
        self._closed = True
        for _, _, place in tuple(self._waiting.values()):
            if not place.done():
                place.set_exception(draining())

    def _remove(self, number: int) -> None:
        lock = lock_number(LOCK)
        rows = self._store.returning(LEAVE, lock, number, self._replica, self._total)
        self._wake([int(row[0]) for row in rows])

    def _grant(self) -> list[int]:
        """Give away what is free, within the caller's transaction; the numbers."""
        return [int(row[0]) for row in self._store.returning(GIVE, self._total)]

    def _wake(self, given: list[int]) -> None:
        for number in given:
            if number in self._waiting:
                agent, most, place = self._waiting.pop(number)
                # It is ours from here on; one that gives up at this moment gives it back.
                self._held[number] = agent, most
                if not place.done():
                    place.set_result(None)

    def _abandon(self, number: int) -> None:
        """One who waited goes, also with a place that came at the same moment."""
        self._waiting.pop(number, None)
        self._held.pop(number, None)
        try:
            self._remove(number)
        except Problem:
            log.warning("a place in the queue cannot be given up now: the database is away")

    # --- what others give us

    def _watch(self) -> None:
        if self._poll is None or self._poll.done():
            self._poll = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(POLL)
            try:
                rows = self._store.rows(
                    "SELECT number FROM places WHERE replica = ? AND taken", self._replica
                )
            except Problem:
                continue
            self._wake([int(row[0]) for row in rows if int(row[0]) in self._waiting])

    def turn(self) -> None:
        """Give away what a replica has left behind."""
        if self._waiting:
            with self._store.transaction(LOCK):
                given = self._grant()
            self._wake(given)

    def heal(self) -> None:
        """Bring the table and what we know into agreement: either may have lost something."""
        store = self._store
        known = self._held.keys() | self._waiting.keys()
        with store.transaction(LOCK):
            rows = store.rows("SELECT number FROM places WHERE replica = ?", self._replica)
            there = {int(row[0]) for row in rows}
            for number in there - known:
                store.change("DELETE FROM places WHERE number = ?", (number,))
            for number in known - there:
                taken = number in self._held
                owner, most = self._held.get(number) or self._waiting[number][:2]
                store.change(
                    "INSERT INTO places VALUES (?, ?, ?, ?, ?, nextval('turns'))"
                    " ON CONFLICT DO NOTHING", (number, owner, self._replica, taken, most),
                )  # fmt: skip
            given = self._grant() if there - known else []
        self._wake(given)


def bury(store: PgStore, replica: str) -> None:
    """Free the places of a replica that is gone; `turn` gives them away."""
    store.change("DELETE FROM places WHERE replica = ?", (replica,))
