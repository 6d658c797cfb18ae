"""Much at once is done in lots, each bounded: a past, a queue, and what a replica has left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.core.context import STUCK
from agent_sandbox.service.core.queue import Share
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.replicas import burial
from agent_sandbox.service.replicas.places import SharedPlaces
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.values import EXITED, FAILED, RUNNING, Execution, Sandbox

from .ground import Ground, Replica, ending, go, made

GONE = "rep-gone"


@pytest.fixture
def pg(database: Database, tmp_path: Path) -> Iterator[PgStore]:
    made = PgStore(database, data=str(tmp_path / "pg"), home="me")
    yield made
    made.close()


def _ended(number: int, owner: str = "alice") -> Execution:
    return Execution(
        id=f"exc-{number:026d}", sandbox="s", owner=owner, command=("x",), state=EXITED,
        started=1.0, ended=2.0 + number, stdout_bytes=10,
    )  # fmt: skip


def _service(replica: Replica) -> Any:
    assert replica.app._service is not None
    return replica.app._service


# --- the past


def test_the_past_is_forgotten_in_lots(pg: PgStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PgStore, "lot", 3)
    for number in range(8):
        pg.put_execution(_ended(number))
        pg.claim("alice", f"k{number}", "h", now=float(number))
    # The oldest first; whatever there is, a statement takes no more than a lot.
    assert sorted(pg.forget_executions(9.0)) == [f"exc-{number:026d}" for number in range(3)]
    assert [len(pg.forget_executions(9.0)) for _ in range(3)] == [3, 1, 0]
    assert [pg.forget_keys(7.0) for _ in range(4)] == [3, 3, 1, 0]
    assert pg.one("SELECT count(*) FROM executions") == pg.one("SELECT count(*) FROM keys") == (1,)


def test_a_lot_that_another_replica_forgets_at_this_moment_is_no_wait(
    pg: PgStore, database: Database
) -> None:
    for number in range(4):
        pg.put_execution(_ended(number))
    other = PgStore(database, home="other")
    try:
        with other.transaction("x"):
            other.rows("SELECT 1 FROM executions WHERE ended < 4 FOR UPDATE")
            assert len(pg.forget_executions(99.0)) == 2
    finally:
        other.close()


def test_a_start_does_not_wait_for_the_count_of_the_past(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, go_on = threading.Event(), threading.Event()
    real = PgStore.kept

    def slowly(self: PgStore, most: int) -> dict[str, tuple[int, int]]:
        found = real(self, most)
        counting.set()
        assert go_on.wait(20)
        return found

    monkeypatch.setattr(PgStore, "kept", slowly)

    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            try:
                while not counting.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                kept = _service(first)._executions.kept
                box = await made(first.client())
                await first.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
            finally:
                go_on.set()
            await kept._counting
            # What has ended meanwhile is not forgotten by the count.
            assert kept._have["alice"][0] == 1

    go(work())


def test_a_count_that_fails_is_no_failed_start(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: PgStore, _most: int) -> Any:
        raise Problem("STATE_UNAVAILABLE", "it takes too long")

    monkeypatch.setattr(PgStore, "kept", fail)

    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            await made(first.client())

    go(work())


def test_the_count_is_ended_with_the_store(pg: PgStore) -> None:
    """A process that stops does not wait for it."""
    caught: list[BaseException] = []

    def count() -> None:
        try:
            pg._aside.rows("SELECT pg_sleep(%s)", (60,), 60.0)
        except Problem as problem:
            caught.append(problem)

    thread = threading.Thread(target=count)
    thread.start()
    sleeping = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(%' AND pid <> ?"
    while pg.one(sleeping, 0) is None:
        time.sleep(0.01)
    pg._aside.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(caught) == 1


def test_one_chore_that_fails_does_not_keep_others_from_being_done(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise Problem("STATE_UNAVAILABLE", "it takes too long")

    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            store = first.shared.store
            store.claim("alice", "old", "h", now=1.0)
            store.change("INSERT INTO rates VALUES ('old', 1, 1)")
            for name in ("forget_executions", "kept"):
                monkeypatch.setattr(PgStore, name, fail)
            monkeypatch.setattr(burial, "unknown", fail)
            await _service(first)._reaper.tidy()
            assert store.rows("SELECT 1 FROM keys WHERE key = 'old'") == []
            assert store.rows("SELECT 1 FROM rates WHERE key = 'old'") == []

    go(work())


# --- what a replica has left


def _leave(store: PgStore, count: int) -> list[str]:
    """So many sandboxes of a replica that is gone, with a command in each."""
    store.home, own = GONE, store.home
    ids = [f"sbx-{number:026d}" for number in range(count)]
    for number, box in enumerate(ids):
        store.put_sandbox(
            Sandbox(id=box, owner="alice", backend="cloud", state=RUNNING, created=1.0 + number,
                    expires=9e9)
        )  # fmt: skip
        store.put_execution(
            Execution(id=f"exc-{number:026d}", sandbox=box, owner="alice", command=("x",),
                      state=RUNNING, started=1.0)
        )  # fmt: skip
    store.home = own
    return ids


def test_a_takeover_costs_as_many_statements_for_many_as_for_few(
    pg: PgStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    real = pg.link.run
    for number in (3, burial.LOT):
        _leave(pg, number)
        asked: list[object] = []

        def run(*given: Any, asked: list[object] = asked, **named: Any) -> Any:
            asked.append(given)
            return real(*given, **named)

        monkeypatch.setattr(pg.link, "run", run)
        estate = burial.bury(pg, GONE, {"cloud"}, 5.0)
        monkeypatch.undo()
        assert estate is not None
        assert (len(estate.lost), len(estate.adopted), estate.more) == (number, number, False)
        counts.append(len(asked))
        for table in ("sandboxes", "executions"):
            assert pg.one(f"SELECT count(*) FROM {table} WHERE home = 'me'") == (number,)
            pg.change(f"DELETE FROM {table}")
    assert counts[0] == counts[1]


def test_what_somebody_waits_for_is_in_the_first_lot(
    pg: PgStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burial, "LOT", 2)
    ids = _leave(pg, 5)
    pg.change(
        "INSERT INTO keys (owner, key, body_hash, made, status, body, home)"
        " SELECT 'alice', id, 'h', 1, 0, id, ? FROM sandboxes", (GONE,)
    )  # fmt: skip
    pg.change("INSERT INTO keys (owner, key, body_hash, made, status, body, home)"
              " VALUES ('alice', 'never', 'h', 1, 0, 'sbx-never', ?)", (GONE,))  # fmt: skip
    estate = burial.bury(pg, GONE, {"cloud"}, 5.0, ids[4])
    assert estate is not None
    assert estate.more
    assert {one.id for one in estate.adopted} == {ids[4], ids[0]}
    # Its key stands for it; one whose sandbox is in a later lot waits; one of nothing is free.
    found = dict(pg.rows("SELECT key, status FROM keys"))
    assert found == {ids[4]: 201, ids[0]: 201, ids[1]: 0, ids[2]: 0, ids[3]: 0}
    assert [burial.bury(pg, GONE, {"cloud"}, 5.0) is None for _ in range(3)] == [False, False, True]
    assert set(dict(pg.rows("SELECT key, status FROM keys")).values()) == {201}


def test_a_large_estate_is_taken_over_with_turns_for_others(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burial, "LOT", 2)

    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            await _service(first)._reaper.stop()
            _leave(first.shared.store, 7)
            lots: list[int] = []
            real = first.shared.bury

            def bury(home: str, first: str = "") -> bool:
                asyncio.get_running_loop().call_soon(lots.append, 1)
                lots.append(0)
                return real(home, first)

            monkeypatch.setattr(first.shared, "bury", bury)
            await first.shared.sweep()
            assert len(_service(first)._context.live) == 7
            # A turn of the loop between any two lots.
            assert lots[:6] == [0, 1, 0, 1, 0, 1]
            answer = await first.client("chief").get("/v1/audit", params={"limit": "200"})
            lines = [one for one in answer.json()["items"] if one["action"] == "replica.bury"]
            assert [one["result"]["adopted"] for one in lines] == [7]

    go(work())


def test_words_of_a_client_do_not_make_a_sandbox_count(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            words = {"reason": STUCK}
            for number, reason in enumerate(("it is gone", STUCK)):
                first.shared.store.put_sandbox(
                    Sandbox(id=f"sbx-{number}", owner="alice", backend="cloud", state=FAILED,
                            reason=reason, metadata=words)
                )  # fmt: skip
            assert first.shared.used("alice") == first.shared.used(None) == 1

    go(work())


# --- a queue

# As it was: the owner's share is counted anew for each that waits.
FOR_EACH = (
    "SELECT p.number FROM places p WHERE NOT p.taken AND"
    " (SELECT count(*) FROM places t WHERE t.taken AND t.owner = p.owner) < p.most"
    " ORDER BY p.turn, p.number LIMIT 1"
)


def test_a_full_queue_does_not_make_each_end_dear(pg: PgStore) -> None:
    """The control is the same question with a count for each of those who wait."""
    pg.change(
        "INSERT INTO places SELECT g, 'o' || g % 20, 'me', g <= 64, 16, g"
        " FROM generate_series(1, 4000) g"
    )
    queue = SharedPlaces(pg, "me", 64)
    queue._held[1] = "o1", 16
    began = time.perf_counter()
    queue.give("o1")
    ours = time.perf_counter() - began
    began = time.perf_counter()
    pg.rows(FOR_EACH)
    assert time.perf_counter() - began > 3 * ours
    assert pg.one("SELECT count(*) FROM places WHERE taken") == (64,)


def test_a_sequence_that_is_set_back_gives_no_number_twice(pg: PgStore) -> None:
    """As after a failover to a standby that lags; the table is empty there, too."""

    async def work() -> None:
        share = Share(running=100, queued=10, patience=5)
        queue = SharedPlaces(pg, "me", 100)
        for _ in range(2):
            for _ in range(20):
                await queue.take("alice", share)
            pg.rows("SELECT setval('turns', 1)")
        assert len(queue._held) == 40
        pg.change("TRUNCATE places")
        for _ in range(20):
            await queue.take("alice", share)
        assert len(queue._held) == 60
        for _ in range(60):
            queue.give("alice")
        # One too many breaks nothing.
        queue.give("alice")
        assert pg.rows("SELECT * FROM places") == []

    go(work())


def test_those_who_wait_come_in_the_order_in_which_they_came(pg: PgStore) -> None:
    async def work() -> None:
        share = Share(running=1, queued=10, patience=20)
        queue, order = SharedPlaces(pg, "me", 10), []
        await queue.take("alice", share)

        async def wait(number: int) -> None:
            await queue.take("alice", share)
            order.append(number)
            queue.give("alice")

        tasks = []
        for number in range(6):
            tasks.append(asyncio.ensure_future(wait(number)))
            await asyncio.sleep(0)
        queue.give("alice")
        await asyncio.gather(*tasks)
        assert order == list(range(6))

    go(work())
