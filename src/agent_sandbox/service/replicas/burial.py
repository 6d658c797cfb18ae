"""What becomes of the things of a replica that is gone: one other takes over, exactly once.

Its executions are Lost. A sandbox that others can reach too (Kubernetes) gets a new home and goes
on. One that was on the replica's own machine is Failed while the replica is away: it comes back
with it, if its data directory does.
"""

from __future__ import annotations

import logging

from ...record import Record
from .. import store_rows
from ..store_postgres import plain
from ..values import FAILED, LOST, PAUSED, RUNNING
from . import places
from .lease import about, away

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

    from ..store_postgres import PgStore
    from ..values import Execution, Sandbox

log = logging.getLogger(__name__)
GONE = "the replica that ran it is gone"
ADOPTED = "the replica that had it is gone"
# The reasons of sandboxes that wait for their replica, by the state that they come back to.
AWAY = {
    RUNNING: "the replica on whose machine it is is away",
    PAUSED: "the replica on whose machine it is is away; it was paused",
}
BACK = {reason: state for state, reason in AWAY.items()}
# What a request with such a key has made is there: a command that was started must not be started
# again by a repeated request, though it is lost. One half made was removed before this.
# Of a sandbox that is in a later lot nothing is known yet.
SETTLED = (
    " WHERE home = ? AND status = 0 AND NOT EXISTS"
    " (SELECT 1 FROM sandboxes s WHERE s.id = keys.body AND s.home = keys.home)"
)
MADE = (
    f"UPDATE keys SET status = 201{SETTLED} AND (EXISTS (SELECT 1 FROM"  # noqa: S608 - ours
    " executions e WHERE e.id = keys.body) OR EXISTS (SELECT 1 FROM sandboxes s WHERE"
    " s.id = keys.body))"
)
FREE = f"DELETE FROM keys{SETTLED}"  # noqa: S608 - ours
# A lot at a time, and each in few statements: a replica may have left thousands, and others wait.
# What somebody waits for goes first.
LOT = 50
EXECUTIONS = (
    "SELECT body FROM executions WHERE home = ? AND ended = 0"
    " ORDER BY id <> ?, started, id LIMIT ? FOR UPDATE"
)
SANDBOXES = (
    "SELECT body FROM sandboxes WHERE home = ? ORDER BY id <> ?, created, id LIMIT ? FOR UPDATE"
)
# They are ours now: the one that ran them cannot write another end, should it wake up.
LOSE = (
    "UPDATE executions e SET state = ?, ended = ?, body = v.body, home = ?"
    " FROM unnest(?::text[], ?::text[]) AS v (id, body) WHERE e.id = v.id"
)
ADOPT = "UPDATE sandboxes SET home = ? WHERE id = ANY (?) AND home = ?"
REMOVE = "DELETE FROM sandboxes WHERE id = ANY (?) AND home = ?"
SET_ASIDE = (
    "UPDATE sandboxes s SET state = ?, reason = v.reason, body = v.body, home = ?"
    " FROM unnest(?::text[], ?::text[], ?::text[]) AS v (id, reason, body)"
    " WHERE s.id = v.id AND s.home = ?"
)
# Behind the name of a replica that stops: what it has let go, for whoever comes first.
LEFT = "/left"
STOPS = "the replica that had it stops"


class Estate(Record):
    """What a replica has left, and what became of it."""

    lost: tuple[Execution, ...] = ()
    adopted: tuple[Sandbox, ...] = ()
    away: tuple[Sandbox, ...] = ()
    # Half made, half removed, or for one command.
    removed: tuple[Sandbox, ...] = ()
    # Whether there is another lot.
    more: bool = False


def heir(sandbox: Sandbox, shared: Container[str]) -> str:
    """What becomes of a sandbox: "removed", "adopted" or "away". Pure."""
    if sandbox.one_shot or sandbox.state not in (RUNNING, PAUSED, FAILED):
        return "removed"
    if sandbox.backend in shared:
        return "adopted"
    return "away"


def bury(
    store: PgStore, home: str, shared: Container[str], now: float, first: str = ""
) -> Estate | None:
    """Take over a lot from a replica whose lease is over; None: it lives, or has left nothing.

    `shared`: backends whose sandboxes we can reach as well. `first`: what somebody waits for.
    """
    with store.transaction(about(home)):
        ended = store.change("DELETE FROM replicas WHERE id = ? AND ends <= seconds()", (home,))
        if store.one("SELECT 1 FROM replicas WHERE id = ?", home) is not None:
            return None
        # One more than a lot tells whether there is another.
        running = [str(row[0]) for row in store.rows(EXECUTIONS, home, first, LOT + 1)]
        found = [str(row[0]) for row in store.rows(SANDBOXES, home, first, LOT + 1)]
        lost = _lose(store, running[:LOT], now)
        fates: dict[str, list[Sandbox]] = {"removed": [], "adopted": [], "away": []}
        for text in found[:LOT]:
            sandbox = store_rows.sandbox_of(text)
            fates[heir(sandbox, shared)].append(sandbox)
        _settle(store, home, fates)
        # What was to be made under these keys never will be; unless it was, and nobody said so.
        store.change(MADE, (home,))
        store.change(FREE, (home,))
        places.bury(store, home)
    if not (ended or lost or any(fates.values())):
        # Somebody else has done so. Its ended executions are still called after it.
        return None
    return Estate(
        lost=lost, adopted=tuple(fates["adopted"]), away=tuple(fates["away"]),
        removed=tuple(fates["removed"]), more=max(len(running), len(found)) > LOT,
    )  # fmt: skip


def _lose(store: PgStore, texts: list[str], now: float) -> tuple[Execution, ...]:
    lost = tuple(
        store_rows.execution_of(text).replace(state=LOST, ended=now, error=GONE) for text in texts
    )
    if lost:
        bodies = [store_rows.execution_text(one) for one in lost]
        store.change(LOSE, (LOST, now, store.home, [one.id for one in lost], bodies))
    return lost


def _settle(store: PgStore, home: str, fates: dict[str, list[Sandbox]]) -> None:
    ids = {fate: [one.id for one in sandboxes] for fate, sandboxes in fates.items()}
    if ids["removed"]:
        store.change(REMOVE, (ids["removed"], home))
    if ids["adopted"]:
        store.change(ADOPT, (store.home, ids["adopted"], home))
    if ids["away"]:
        # One that has failed keeps its reason.
        failed = [
            one.replace(state=FAILED, reason=AWAY.get(one.state, one.reason))
            for one in fates["away"]
        ]
        bodies = [store_rows.sandbox_text(one) for one in failed]
        reasons = [plain(one.reason) for one in failed]
        store.change(SET_ASIDE, (FAILED, away(home), ids["away"], reasons, bodies, home))


def let_go(store: PgStore, sandbox_id: str) -> bool:
    """Leave one of ours to others; False: it is not ours any more."""
    return bool(store.change(
        "UPDATE sandboxes SET home = ? WHERE id = ? AND home = ?",
        (store.home + LEFT, sandbox_id, store.home),
    ))  # fmt: skip


def unknown(store: PgStore, known: list[str]) -> list[Sandbox]:
    """Sandboxes that are ours by the database, and that we do not know."""
    rows = store.rows(
        "SELECT body FROM sandboxes WHERE home = ? AND id <> ALL (?)", store.home, known
    )
    return [store_rows.sandbox_of(str(row[0])) for row in rows]


def abandoned(store: PgStore) -> list[str]:
    """Replicas that are gone, and have left something that nobody has taken over."""
    rows = store.rows(
        "SELECT id FROM replicas WHERE ends <= seconds()"
        " UNION SELECT home FROM executions e WHERE ended = 0 AND NOT EXISTS"
        " (SELECT 1 FROM replicas r WHERE r.id = e.home)"
        " UNION SELECT home FROM sandboxes s WHERE right(home, 1) <> '!' AND NOT EXISTS"
        " (SELECT 1 FROM replicas r WHERE r.id = s.home)"
    )
    return [str(row[0]) for row in rows]


def orphans(store: PgStore) -> list[Sandbox]:
    """Sandboxes whose replica is away."""
    rows = store.rows("SELECT body FROM sandboxes WHERE right(home, 1) = '!'")
    return [store_rows.sandbox_of(str(row[0])) for row in rows]


def drop(store: PgStore, sandbox_id: str) -> bool:
    """Forget a sandbox whose replica is away; False: it is back."""
    sql = "DELETE FROM sandboxes WHERE id = ? AND right(home, 1) = '!'"
    return bool(store.change(sql, (sandbox_id,)))
