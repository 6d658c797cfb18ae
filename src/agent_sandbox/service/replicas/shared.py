"""This process as one of several over one database: the `Replicas` of the core and the API."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial

from ...errors import SandboxError
from .. import store_rows
from ..audit.postgres import PgAudit
from ..core import access
from ..core.context import STUCK
from ..core.keys import CHOSEN
from ..core.later import Later
from ..problems import Problem
from ..values import FAILED
from . import burial, claims, identity, outputs, rates
from .forwarding import Forwarder
from .lease import Lease, is_away, peer_of
from .outputs import SavedJournal
from .places import SharedPlaces
from .rates import SharedBuckets
from .upstream import Upstream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from ..core.context import Context, Live
    from ..core.journal import Journal
    from ..store_postgres import PgStore
    from ..values import Agent, Execution, Sandbox
    from .burial import Estate
    from .interface import Peer

    # An action of the audit, what it is about, and the rest.
    Line = tuple[str, dict[str, str], dict[str, Any]]

log = logging.getLogger(__name__)
# Who counts sandboxes does so alone: what passes is counted for the next one, wherever that is.
COUNTING = "sandboxes"
# A sandbox that failed takes up no room, unless it is one that could not be removed.
USED = "SELECT count(*) FROM sandboxes WHERE (state <> ? OR reason = ?)"
SANDBOX = (
    "SELECT s.owner, s.home, r.address, r.fingerprint, r.ends > seconds(), true"
    " FROM sandboxes s LEFT JOIN replicas r ON r.id = s.home WHERE s.id = ?"
)
# What has ended, and whose output is in the database, is here as much as anywhere.
EXECUTION = (
    "SELECT e.owner, e.home, r.address, r.fingerprint, r.ends > seconds(), e.ended = 0 OR"
    " e.size > 0 AND NOT EXISTS (SELECT 1 FROM outputs o WHERE o.execution = e.id AND o.part = 0)"
    " FROM executions e LEFT JOIN replicas r ON r.id = e.home WHERE e.id = ?"
)  # fmt: skip
BEGIN = (
    "INSERT INTO executions (id, sandbox, owner, state, started, ended, body, size, home)"
    " SELECT ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE EXISTS"
    " (SELECT 1 FROM sandboxes WHERE id = ? AND home = ?)"
)
# To look again after a burial, at most.
LOOKS = 3
LOST_ANSWER = "the database was away when it changed"


class Shared:
    """One of several replicas. Only the loop may use it."""

    shared = True

    def __init__(self, store: PgStore, id: str) -> None:
        self.id = id
        self.store = store
        store.home = id
        self.lease = Lease(store, id, place=identity.place(store.data))
        self.upstream = Upstream()
        self.key = store.keep(claims.KEY, claims.make_key)
        self.forwarder = Forwarder(self.upstream, self.key)
        # What was taken over so far of a replica that had much.
        self._taken: dict[str, Counter[str]] = {}
        # Lines of the audit about what was taken over.
        self._later = Later()
        self._context: Context | None = None
        self._places: SharedPlaces | None = None

    def bind(self, context: Context) -> None:
        """What takes over what others leave. From here on nothing is asked without the lease."""
        self._context = context
        audit = context.audit
        self.lease.fence(self.store.link, *([audit.link] if isinstance(audit, PgAudit) else []))

    # --- our own life

    def check(self) -> None:
        """Refuse to act without the lease."""
        self.lease.check()

    def fenced(self) -> bool:
        """Whether others may have taken over."""
        return not self.lease.held()

    def beat(self) -> None:
        """With each sign of life."""
        if self._places is not None:
            self._places.heal()

    async def close(self) -> None:
        """An orderly end: others take over at once."""
        await self.lease.stop()
        self.upstream.close()
        if self.lease.held():
            try:
                self.lease.leave()
            except SandboxError:
                log.warning("the database is away: others wait for the end of our lease")
        self.lease.close()

    # --- counts that are exact for all replicas together

    def places(self, total: int) -> SharedPlaces:
        """Places for executions."""
        self._places = SharedPlaces(self.store, self.id, total)
        return self._places

    def buckets(self, name: str) -> SharedBuckets:
        """Rates."""
        return SharedBuckets(self.store, name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is counted and entered meanwhile is so for all."""
        with self.store.transaction(COUNTING):
            yield

    def entered(self, sandbox: Sandbox) -> None:
        """Write down what was counted, in the same transaction."""
        self.store.put_sandbox(sandbox)

    def used(self, owner: str | None) -> int | None:
        """How many sandboxes there are, of one owner or of all."""
        if owner is None:
            row = self.store.one(USED, FAILED, STUCK)
        else:
            row = self.store.one(f"{USED} AND owner = ?", FAILED, STUCK, owner)
        return int(row[0]) if row else 0

    def begin(self, execution: Execution) -> None:
        """Write down that it starts, if its sandbox is still ours: whatever our clock says."""
        changed = self.store.change(BEGIN, (
            execution.id, execution.sandbox, execution.owner, execution.state, execution.started,
            execution.ended, store_rows.execution_text(execution), 0, self.id, execution.sandbox,
            self.id,
        ))  # fmt: skip
        if not changed:
            raise _moved()

    # --- idempotency keys

    def claim(self, owner: str, key: str, body: str, now: float, id: str) -> bool:
        """Take a key, with the id of what will be made; False: another replica was faster."""
        return bool(self.store.change(
            "INSERT INTO keys (owner, key, body_hash, made, status, body, home)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (owner, key, body, now, CHOSEN, id, self.id),
        ))  # fmt: skip

    def claimed(self, owner: str, key: str) -> Peer | None:
        """The replica that has a key under way; None: none, or ourselves."""
        row = self.store.one(
            "SELECT home, body FROM keys WHERE owner = ? AND key = ? AND status = ?",
            owner, key, CHOSEN,
        )  # fmt: skip
        if row is None or row[0] == self.id:
            return None
        found = self.peer(str(row[0]))
        if found is None:
            # With it goes its claim.
            self.bury(str(row[0]), str(row[1]))
        return found

    # --- who has what

    def whereabouts(self, agent: Agent | None, sandbox: str, execution: str) -> Peer | None:
        """The other replica that has to be asked; None: nobody else, whatever the answer is.

        For what is another agent's nobody is asked: it takes the steps of what does not exist.
        """
        for _ in range(LOOKS):
            row = self.store.one(SANDBOX if sandbox else EXECUTION, sandbox or execution)
            if row is None or not (agent is None or access.may_see(agent, str(row[0]))):
                return None
            home, address, fingerprint, alive, needed = row[1:]
            if home == self.id or not needed or is_away(str(home)):
                if sandbox and home == self.id:
                    self._recall()
                return None
            if alive:
                return peer_of(str(home), str(address), str(fingerprint))
            self.bury(str(home), sandbox or execution)
        return None

    def peer(self, id: str) -> Peer | None:
        """A replica that lives."""
        row = self.store.one(
            "SELECT id, address, fingerprint FROM replicas WHERE id = ? AND ends > seconds()", id
        )  # fmt: skip
        return peer_of(*map(str, row)) if row else None

    # --- taking over

    def bury(self, home: str, first: str = "") -> bool:
        """Take over what a replica has left, if it is gone and nobody has done so.

        A lot of it, with what somebody waits for; whether there is more.
        """
        context = self._context
        if context is None or home == self.id or context.draining:
            return False
        self.check()
        shared = {name for name, one in context.backends.items() if one.shared}
        # Before anything is ours: what fails after that is told nobody.
        idle = context.idle_times()
        estate = burial.bury(self.store, home, shared, context.clock(), first)
        if estate is None:
            return False
        for sandbox in estate.adopted:
            context.adopt(sandbox, idle)
        counts = self._taken.setdefault(home, Counter())
        counts.update(
            lost=len(estate.lost), adopted=len(estate.adopted), away=len(estate.away),
            removed=len(estate.removed),
        )  # fmt: skip
        is_left = home.endswith(burial.LEFT)
        self._tell(_lines(estate, burial.STOPS if is_left else burial.ADOPTED))
        for sandbox in estate.removed:
            if sandbox.backend in shared:
                context.spawn(_discard(context, sandbox))
        if not estate.more:
            del self._taken[home]
            if not is_left:
                log.warning("replica %s is gone", home)
                target = {"type": "replica", "id": home}
                said = {"reason": burial.GONE, "result": dict(counts)}
                self._tell([("replica.bury", target, said)])
        return estate.more

    def _tell(self, lines: Iterable[Line]) -> None:
        """It is done, whether the audit can be written now or later."""
        context = self._context
        if context is None:
            return
        try:
            self._later.do(*(partial(context.note, None, *line[:2], **line[2]) for line in lines))
        except (Problem, OSError) as error:
            log.warning("lines of the audit wait to be written: %s", error)

    def _recall(self) -> None:
        """Go on with what is ours by the database alone: the answer to a change was lost."""
        context = self._context
        if context is None or context.draining or self.fenced():
            return
        shared = {name for name, one in context.backends.items() if one.shared}
        found = burial.unknown(self.store, list(context.live))
        idle = context.idle_times() if found else {}
        for sandbox in found:
            target = {"type": "sandbox", "id": sandbox.id}
            if burial.heir(sandbox, shared) == "removed":
                log.warning("sandbox %s was never made, and is forgotten", sandbox.id)
                self.store.delete_sandbox(sandbox.id)
                self._tell([("sandbox.reap", target, {"reason": LOST_ANSWER})])
                if sandbox.backend in shared:
                    context.spawn(_discard(context, sandbox))
                continue
            context.adopt(sandbox, idle)
            self._tell([("sandbox.adopt", target, {"reason": LOST_ANSWER})])

    def let_go(self, live: Live) -> bool:
        """Leave an idle sandbox to another replica, if there is one and all of them reach it."""
        context = self._context
        if context is None or self.fenced() or not context.backends[live.sandbox.backend].shared:
            return False
        others = self.lease.look().keys() - {self.id}
        return bool(others) and burial.let_go(self.store, live.sandbox.id)

    # --- the start

    def stored(self) -> Iterable[Sandbox] | None:
        """Those of an earlier life of ours."""
        rows = self.store.rows(
            "SELECT body FROM sandboxes WHERE home = ? ORDER BY created, id", self.id
        )
        return [store_rows.sandbox_of(str(row[0])) for row in rows]

    def under_way(self) -> list[Execution] | None:
        """Those of an earlier life of ours, of which nobody has seen the end."""
        rows = self.store.rows("SELECT body FROM executions WHERE home = ? AND ended = 0", self.id)
        return [store_rows.execution_of(str(row[0])) for row in rows]

    def returned(self, sandbox: Sandbox) -> Sandbox:
        """One that others took for failed while we were away: the backend says whether it is."""
        state = burial.BACK.get(sandbox.reason)
        return sandbox if state is None else sandbox.replace(state=state, reason="")

    def known(self, backend: str, own: Mapping[str, Sandbox]) -> Mapping[str, Sandbox]:
        """For a backend that others use too: theirs are known as well."""
        context = self._context
        if context is None or not context.backends[backend].shared:
            return own
        return Known(self.store, backend, own)

    # --- output

    def saved(self, execution: Execution, path: str) -> tuple[Execution, Journal | None]:
        """An execution as it is now, with its output; None: the file is here."""
        execution = self.store.get_execution(execution.id) or execution
        if os.path.exists(path):
            return execution, None
        journal = SavedJournal(self.store, execution.id, execution.begins)
        return outputs.told(execution, journal), journal

    def save(self, execution: Execution, journal: Journal) -> None:
        """Keep it for when we are gone: at once what is short, by and by what is long."""
        if self._context is None or not journal.size:
            return
        try:
            if journal.size <= outputs.PART:
                outputs.add(self.store, execution.id, 0, outputs.piece(journal, 0))
            else:
                self._context.spawn(outputs.save(self.store, execution.id, journal))
        except Problem:
            # It is in its file, and others ask us for it.
            log.warning("the output of %s is only here", execution.id)

    # --- from time to time

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox whose replica is away."""
        if not burial.drop(self.store, sandbox_id):
            raise _moved()

    async def sweep(self) -> None:
        """Take over from those who are gone; let go what nobody waits for."""
        if self.fenced():
            return
        for home in burial.abandoned(self.store):
            while not self.fenced() and self.bury(home):  # noqa: ASYNC110 - it is no wait
                # Others have their turn between two lots.
                await asyncio.sleep(0)
        self._taken.clear()
        self._later.again()
        if self._places is not None:
            self._places.turn()

    def tidy(self) -> None:
        """Forget full buckets, and sandboxes that expired while their replica was away."""
        for part in (partial(rates.tidy, self.store), self._recall, self._expire):
            try:
                part()
            except Problem as problem:
                # The next one may be possible all the same.
                log.warning("not all can be tidied now: %s", problem.message)

    def _expire(self) -> None:
        context = self._context
        now = context.clock() if context is not None else 0.0
        for sandbox in burial.orphans(self.store):
            if context is not None and now >= sandbox.expires:
                context.note(None, "sandbox.expire", {"type": "sandbox", "id": sandbox.id},
                             reason="its time is over")  # fmt: skip
                burial.drop(self.store, sandbox.id)


class Known(Mapping[str, "Sandbox"]):
    """All sandboxes of a backend, of every replica.

    Whether one is known is asked at the moment of the question: another replica may make it while
    the backend looks at what there is.
    """

    def __init__(self, store: PgStore, backend: str, own: Mapping[str, Sandbox]) -> None:
        self._store = store
        self._backend = backend
        self._own = own

    def __getitem__(self, key: str) -> Sandbox:
        if key in self._own:
            return self._own[key]
        found = self._store.get_sandbox(key)
        if found is None or found.backend != self._backend or found.state == FAILED:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        rows = self._store.rows("SELECT body FROM sandboxes WHERE state <> ?", FAILED)
        found = (store_rows.sandbox_of(str(row[0])) for row in rows)
        theirs = {one.id for one in found if one.backend == self._backend}
        return iter(sorted(theirs | set(self._own)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


async def _discard(context: Context, sandbox: Sandbox) -> None:
    """What a replica has half made. A backend's own comparison finds what this one leaves."""
    try:
        await context.backend(sandbox.backend).delete(sandbox)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        log.warning("sandbox %s of a replica that is gone stays for now: %s", sandbox.id, error)


def _lines(estate: Estate, why: str) -> Iterator[Line]:
    """What the audit is told of a burial. Pure."""
    for one in estate.lost:
        about = {"type": "execution", "id": one.id, "sandbox": one.sandbox}
        yield "exec.end", about, {"reason": burial.GONE, "result": {"state": one.state}}
    actions = (("sandbox.adopt", estate.adopted, why),
               ("sandbox.lost", estate.away, burial.AWAY["Running"]),
               ("sandbox.reap", estate.removed, why))  # fmt: skip
    for action, sandboxes, reason in actions:
        for sandbox in sandboxes:
            yield action, {"type": "sandbox", "id": sandbox.id}, {"reason": reason}


def _moved() -> Problem:
    return Problem("CONFLICT", "another replica has this sandbox by now", rule="replica",
                   hint="ask again: it is sent there")  # fmt: skip
