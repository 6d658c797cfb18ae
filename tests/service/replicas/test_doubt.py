"""What is left when the database's answer is lost, or a replica dies, between two statements."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from agent_sandbox.service.core import reaper
from agent_sandbox.service.core.queue import Share
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.replicas import burial, places
from agent_sandbox.service.store_address import read
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.values import DEFAULT_SCOPES, PENDING, RUNNING, Execution

from ..postgres import Cluster
from .ground import Ground, Replica, ending, go, made

T = TypeVar("T")
KEY = {"Idempotency-Key": "k"}


def _gone(*_: object, **__: object) -> Any:
    raise Problem("STATE_UNAVAILABLE", "the answer was lost")


def _deaf(work: Callable[..., object]) -> Callable[..., Any]:
    """It is done, but nobody hears of it."""

    def act(*given: Any, **named: Any) -> Any:
        work(*given, **named)
        _gone()

    return act


def _context(replica: Replica) -> Any:
    assert replica.app._service is not None
    return replica.app._service._context


async def _actions(replica: Replica) -> list[str]:
    answer = await replica.client("chief").get("/v1/audit", params={"limit": "200"})
    return [line["action"] for line in answer.json()["items"]]


# --- keys


def test_a_key_that_another_has_taken_meanwhile_is_not_given_up(ground: Ground) -> None:
    """Two find at once that the one with the key is gone; the slower must not undo the faster."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            third = await ground.replica()
            keys = second.app._service._sandboxes._keys  # type: ignore[union-attr]
            assert first.shared.claim("alice", "k", "sandbox:x", 0.0, "sbx-first")
            await first.die()
            look = second.shared.claimed

            def faster(owner: str, key: str) -> object:
                found = look(owner, key)
                assert third.shared.claim(owner, key, "sandbox:x", 0.0, "sbx-third")
                return found

            second.shared.claimed = faster  # type: ignore[method-assign,assignment]
            assert keys._made("alice", "k", "sandbox:x") is None
            assert second.shared.store.rows("SELECT home, body FROM keys") == [
                (third.shared.id, "sbx-third")
            ]

    go(work())


def test_a_replica_that_wakes_up_does_not_give_up_the_key_of_another(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            stuck = asyncio.Event()
            ground.backend.before["create"] = stuck.wait  # type: ignore[assignment]
            late = asyncio.ensure_future(first.client(headers=KEY).post("/v1/sandboxes", json={}))
            while not ground.backend.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            del ground.backend.before["create"]
            answer = await second.client(headers=KEY).post("/v1/sandboxes", json={})
            stuck.set()
            await asyncio.gather(late, return_exceptions=True)
            await _context(first).settle()
            again = await second.client(headers=KEY).post("/v1/sandboxes", json={})
            assert again.json()["id"] == answer.json()["id"]

    go(work())


def test_cannot_run_twice_under_one_key_though_the_replica_died_at_the_start(
    ground: Ground,
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            stuck = asyncio.Event()
            ground.backend.before["start"] = stuck.wait  # type: ignore[assignment]
            run = {"cmd": ["true"]}
            late = asyncio.ensure_future(first.client(headers=KEY).post("/v1/run", json=run))
            while not any(verb == "start" for verb, _ in ground.backend.calls):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            del ground.backend.before["start"]
            # Somebody else has looked before the request is repeated.
            second.shared.bury(first.shared.id)
            answer = await second.client(headers=KEY).post("/v1/run", json=run)
            assert answer.json()["state"] == "Lost", answer.text
            assert sum(verb == "start" for verb, _ in ground.backend.calls) == 1
            stuck.set()
            await asyncio.gather(late, return_exceptions=True)

    go(work())


def test_a_sandbox_whose_key_was_not_answered_is_found_after_its_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            answer = await first.client(headers=KEY).post("/v1/sandboxes", json={})
            # It was killed before it had said so.
            first.shared.store.change("UPDATE keys SET status = 0")
            await first.die()
            second.shared.bury(first.shared.id)
            again = await second.client(headers=KEY).post("/v1/sandboxes", json={})
            assert again.json()["id"] == answer.json()["id"]
            assert len(ground.backend.boxes) == 1

    go(work())


# --- records that nobody knows of


def test_a_sandbox_whose_entry_was_not_answered_takes_up_no_room(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            (first,) = [await ground.replica()]
            put = first.shared.store.put_sandbox
            box = await made(first.client())
            sandbox = _context(first).live[box].sandbox
            # Committed, but the answer did not come: it was never entered.
            put(sandbox.replace(id="sbx-x", state=PENDING))
            assert first.shared.used("alice") == 2
            first.shared.tidy()
            assert first.shared.used("alice") == 1
            assert (await first.client().get("/v1/sandboxes")).json()["items"][0]["id"] == box

    go(work())


def test_a_burial_whose_answer_was_lost_is_not_the_end_of_sandboxes(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            await _context(second).replicas.sweep()
            await second.app._service._reaper.stop()  # type: ignore[union-attr]
            await first.die()
            with monkeypatch.context() as patch:
                patch.setattr(burial, "bury", _deaf(burial.bury))
                refused = await second.client().get(f"/v1/sandboxes/{box}")
                assert refused.status_code == 503
            assert box not in _context(second).live
            answer = await second.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
            assert answer.json()["exitCode"] == 0
            # It is watched over, and ends with its time.
            assert box in _context(second).live

    go(work())


def test_one_that_could_not_be_removed_still_counts_and_is_tried_again_by_the_next(
    ground: Ground,
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())

            async def fail() -> None:
                raise OSError("its machine does not answer")

            ground.backend.before["delete"] = fail
            assert (await first.client().delete(f"/v1/sandboxes/{box}")).status_code == 500
            await first.die()
            second.shared.bury(first.shared.id)
            assert second.shared.used("alice") == 1
            del ground.backend.before["delete"]
            while second.shared.used("alice"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert ground.backend.boxes == {}

    go(work())


def test_an_adopted_sandbox_keeps_the_idle_time_of_its_owner(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            tokens = first.app._service.tokens  # type: ignore[union-attr]
            ground.tokens["carol"] = tokens.new(
                "carol", scopes=DEFAULT_SCOPES, quotas={"idle_timeout": 77.0}
            )[0]
            box = await made(first.client("carol"))
            await first.die()
            second.shared.bury(first.shared.id)
            assert _context(second).live[box].idle == 77.0

    go(work())


def test_a_start_whose_answer_was_lost_leaves_no_command_that_runs_for_ever(
    ground: Ground,
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            first.shared.begin = _deaf(first.shared.begin)  # type: ignore[method-assign]
            refused = await first.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
            assert refused.status_code == 503
            assert (await second.client().get("/v1/execs")).json()["items"] == []

    go(work())


def test_nobody_waits_for_an_end_that_is_not_written(ground: Ground) -> None:
    """Its record says that it runs, and nobody would ever tell those who wait."""

    async def work() -> None:
        async with ending(ground):
            (first,) = [await ground.replica()]
            box = await made(first.client())
            running = Execution(
                id="exc-" + "a" * 26, sandbox=box, owner="alice", command=("true",),
                state=RUNNING, started=1.0,
            )  # fmt: skip
            first.shared.store.put_execution(running)
            answer = await first.client().get(f"/v1/execs/{running.id}")
            assert answer.json()["state"] == "Running"
            answer = await first.client().post(f"/v1/execs/{running.id}/kill", json={})
            assert (answer.status_code, answer.json()["code"]) == (503, "STATE_UNAVAILABLE")
            answer = await first.client().get(f"/v1/execs/{running.id}/events")
            assert "STATE_UNAVAILABLE" in answer.text

    go(work())


# --- the audit


def test_output_that_died_with_its_replica_is_not_a_burial_for_each_request(
    ground: Ground,
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            done = await first.client().post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "x"]}
            )
            first.shared.store.change("DELETE FROM outputs")
            await first.die()
            for _ in range(5):
                answer = await second.client().get(f"/v1/execs/{done.json()['execId']}")
                assert answer.json()["state"] == "Exited"
                # It must not look like a command that has printed nothing.
                assert answer.json()["truncated"]
                assert "output is gone" in answer.json()["error"]
            assert (await _actions(second)).count("replica.bury") == 1

    go(work())


def test_an_end_is_not_told_before_its_output_is_saved(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies between the two leaves a command without an end, not one without output."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            saved: list[tuple[object, ...] | None] = []
            store = first.shared.store
            real = store.put_execution

            def put(execution: Execution) -> None:
                if execution.ended:
                    sql = "SELECT part FROM outputs WHERE execution = ?"
                    saved.append(second.shared.store.one(sql, execution.id))
                real(execution)

            monkeypatch.setattr(store, "put_execution", put)
            await first.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "x"]})
            assert saved == [(0,)]

    go(work())


def test_what_cannot_be_written_down_has_not_half_happened(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            client = first.client()
            box = await made(client, metadata={"k": "old"})
            with monkeypatch.context() as patch:
                patch.setattr(first.shared.store, "put_sandbox", _gone)
                refused = [
                    await client.patch(f"/v1/sandboxes/{box}/metadata", json={"k": "new"}),
                    await client.post(f"/v1/sandboxes/{box}/pause"),
                ]
            assert [one.status_code for one in refused] == [503, 503]
            for one in (first, second):
                found = (await one.client().get(f"/v1/sandboxes/{box}")).json()
                assert (found["state"], found["metadata"]) == ("Running", {"k": "old"})

    go(work())


def test_what_was_taken_over_is_told_when_the_audit_is_back(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            answer = await first.client().post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            assert answer.status_code == 202
            await first.die()
            context = _context(second)
            with monkeypatch.context() as patch:
                patch.setattr(context.audit, "write", _gone)
                second.shared.bury(first.shared.id)
            assert box in context.live
            await second.shared.sweep()
            found = await _actions(second)
            assert (found.count("sandbox.adopt"), found.count("exec.end")) == (1, 1)
            ground.verify()

    go(work())


def test_an_end_without_a_lease_is_left_to_whoever_takes_over(ground: Ground) -> None:
    """Else it would be ended in the database, and nobody would ever write its line."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            begun = await first.client().post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            first.shared.lease._until = -1.0
            first.app._fence()
            context = _context(first)
            while context.jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            answer = await second.client().get(f"/v1/execs/{begun.json()['execId']}")
            assert answer.json()["state"] == "Lost"
            assert (await _actions(second)).count("exec.end") == 1

    go(work())


# --- places


def test_a_crash_of_the_database_gives_no_number_of_a_place_twice(own_postgres: Cluster) -> None:
    """The table is empty afterwards, and its own numbers would begin anew."""
    url = own_postgres.new()
    stores = [PgStore(read(url, "test"), home=name) for name in ("one", "two")]
    try:
        one, two = (places.SharedPlaces(store, store.home, 10) for store in stores)

        async def take(some: places.SharedPlaces) -> None:
            await some.take("alice", Share(running=10, queued=1, patience=1.0))

        asyncio.run(take(one))
        own_postgres.stop(signal.SIGQUIT)
        own_postgres.start()
        asyncio.run(take(two))
        one.heal()
        two.heal()
        assert stores[0].rows("SELECT count(*) FROM places") == [(2,)]
        one.give("alice")
        assert stores[0].rows("SELECT replica FROM places") == [("two",)]
    finally:
        for store in stores:
            store.close()


# --- an orderly end


def test_idle_sandboxes_go_to_another_replica_while_commands_still_run(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            idle, busy = await made(here), await made(here)
            begun = await here.post(
                f"/v1/sandboxes/{busy}/exec", json={"cmd": ["hold"], "background": True}
            )
            stopping = asyncio.ensure_future(first.app.stop(20))
            while idle in _context(first).live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            done = await there.post(f"/v1/sandboxes/{idle}/exec", json={"cmd": ["echo", "on"]})
            assert done.json()["stdout"] == "on\n"
            assert busy in _context(first).live
            assert first.shared.used("alice") == 2
            # The other one follows when its command has ended.
            ground.backend.running(begun.json()["execId"]).released.set()
            await stopping
            assert (await there.get(f"/v1/sandboxes/{busy}")).json()["state"] == "Running"
            found = await _actions(second)
            assert (found.count("sandbox.adopt"), found.count("replica.bury")) == (2, 1)

    go(work())


def test_the_last_replica_keeps_its_sandboxes(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first = await ground.replica("one")
            box = await made(first.client())
            await first.close()
            ground.replicas.remove(first)
            back = await ground.replica("one")
            assert box in _context(back).live

    go(work())


def test_a_stop_while_the_database_is_away_is_a_stop_all_the_same(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            closed: list[bool] = []

            async def close() -> None:
                closed.append(True)

            ground.backend.close = close  # type: ignore[method-assign]
            _context(first).live[box].touch(1.0)
            first.shared.store.put_sandbox = _gone  # type: ignore[method-assign]
            first.shared.lease.look = dict  # type: ignore[method-assign]
            await first.app.stop(0)
            assert closed == [True]
            assert (await second.client().get(f"/v1/sandboxes/{box}")).json()["state"] == "Running"

    go(work())


# --- who asks for what is another's


def test_what_is_anothers_takes_as_many_statements_as_what_does_not_exist(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            begun = await first.client().post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            for replica in (first, second):
                link, bob = replica.shared.store._link, replica.client("bob")
                run = link.run
                said: list[str] = []

                def heard(
                    sql: str, *given: Any, run: Any = run, said: list[str] = said, **named: Any
                ) -> Any:
                    said.append(sql)
                    return run(sql, *given, **named)

                link.run = heard  # type: ignore[method-assign]
                seen = {}
                for path in (
                    f"/v1/sandboxes/{box}", f"/v1/sandboxes/sbx-{'a' * 26}",
                    f"/v1/execs/{begun.json()['execId']}", f"/v1/execs/exc-{'a' * 26}",
                ):  # fmt: skip
                    said.clear()
                    assert (await bob.get(path)).status_code == 404
                    # Others of this process come between: the beat, the reaper.
                    marks = (" e LEFT JOIN", " s LEFT JOIN", "SELECT body")
                    seen[path] = [sql for sql in said if any(mark in sql for mark in marks)]
                link.run = run  # type: ignore[method-assign]
                sandbox, no_sandbox, execution, no_execution = map(len, seen.values())
                assert (sandbox, execution) == (no_sandbox, no_execution)
                assert sandbox
                assert execution

    go(work())


def test_the_reaper_says_in_one_line_that_the_database_is_away(
    ground: Ground, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            monkeypatch.setattr(burial, "abandoned", _gone)
            while "the reaper goes on" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert reaper.log.name in caplog.text
            assert "Traceback" not in caplog.text
            assert first.shared.lease.held()

    go(work())
