"""Limits hold for all replicas together, to the unit; each with a control without the lock."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from agent_sandbox.service.problems import Problem
from agent_sandbox.service.replicas import places
from agent_sandbox.service.values import RUNNING, Sandbox

from .ground import Ground, Replica, ending, go, made


def _codes(answers: list[httpx.Response]) -> Counter[int]:
    return Counter(answer.status_code for answer in answers)


async def _create_many(replicas: tuple[Replica, ...], number: int) -> Counter[int]:
    clients = [replica.client() for replica in replicas]
    return _codes(
        await asyncio.gather(
            *(clients[n % len(clients)].post("/v1/sandboxes", json={}) for n in range(number))
        )
    )


def test_many_creates_at_once_stop_at_the_limit(ground: Ground) -> None:
    ground.env["MAX_SANDBOXES_PER_AGENT"] = "10"

    async def work() -> None:
        async with ending(ground):
            pair = await ground.pair()
            assert await _create_many(pair, 50) == {201: 10, 429: 40}
            for replica in pair:
                client = replica.client()
                assert len((await client.get("/v1/sandboxes")).json()["items"]) == 10
                assert (await client.get("/v1/whoami")).json()["usage"]["sandboxes"] == 10
            # One that goes makes room for one, at either.
            box = (await pair[0].client().get("/v1/sandboxes")).json()["items"][0]["id"]
            assert (await pair[1].client().delete(f"/v1/sandboxes/{box}")).status_code == 204
            assert await _create_many(pair, 4) == {201: 1, 429: 3}
            ground.verify()

    go(work())


def test_the_limit_of_all_agents_holds_for_all_replicas(ground: Ground) -> None:
    ground.env["MAX_SANDBOXES"] = "3"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            await made(first.client())
            await made(second.client("bob"))
            await made(second.client())
            for replica in (first, second):
                for name in ("alice", "bob"):
                    refused = await replica.client(name).post("/v1/sandboxes", json={})
                    assert refused.json()["code"] == "QUOTA_EXCEEDED"

    go(work())


def test_a_sandbox_for_one_command_counts_at_every_replica(ground: Ground) -> None:
    ground.env["MAX_SANDBOXES_PER_AGENT"] = "1"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            run = asyncio.ensure_future(first.client().post("/v1/run", json={"cmd": ["hold"]}))
            while not ground.backend.boxes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            refused = await second.client().post("/v1/sandboxes", json={})
            assert refused.json()["code"] == "QUOTA_EXCEEDED"
            listed = (await second.client().get("/v1/sandboxes")).json()["items"]
            assert len(listed) == 1
            (box,) = ground.backend.boxes.values()
            while not box.running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            next(iter(box.running.values())).released.set()
            assert (await run).status_code == 200
            while ground.backend.boxes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await made(second.client())

    go(work())


def test_the_same_key_at_both_replicas_makes_one_thing(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            pair = await ground.pair()
            clients = [replica.client(headers={"Idempotency-Key": "k1"}) for replica in pair]
            answers = await asyncio.gather(
                *(clients[n % 2].post("/v1/sandboxes", json={}) for n in range(20))
            )
            assert _codes(answers) == {201: 20}
            assert len({answer.json()["id"] for answer in answers}) == 1
            assert len(ground.backend.boxes) == 1
            clients = [replica.client(headers={"Idempotency-Key": "k2"}) for replica in pair]
            answers = await asyncio.gather(
                *(clients[n % 2].post("/v1/run", json={"cmd": ["sleep", "0.3"]}) for n in range(20))
            )
            assert _codes(answers) == {200: 20}
            assert len({answer.json()["execId"] for answer in answers}) == 1
            assert sum(verb == "start" for verb, _ in ground.backend.calls) == 1
            # Later, and with another body.
            again = await clients[1].post("/v1/run", json={"cmd": ["sleep", "0.3"]})
            assert again.json()["execId"] == answers[0].json()["execId"]
            for client in clients:
                other = await client.post("/v1/run", json={"cmd": ["true"]})
                assert other.json()["code"] == "IDEMPOTENCY_CONFLICT"
            ground.verify()

    go(work())


def test_a_key_whose_request_was_refused_is_free_at_every_replica(ground: Ground) -> None:
    ground.env["MAX_SANDBOXES_PER_AGENT"] = "1"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            key = {"Idempotency-Key": "k"}
            for replica in (first, second):
                refused = await replica.client(headers=key).post("/v1/sandboxes", json={})
                assert refused.status_code == 429
            await first.client().delete(f"/v1/sandboxes/{box}")
            answer = await second.client(headers=key).post("/v1/sandboxes", json={})
            assert answer.status_code == 201
            again = await first.client(headers=key).post("/v1/sandboxes", json={})
            assert again.json()["id"] == answer.json()["id"]

    go(work())


async def _run_many(ground: Ground, number: int, seconds: str) -> Counter[int]:
    pair = await ground.pair()
    clients = [replica.client() for replica in pair]
    boxes = [await made(client) for client in clients]
    return _codes(
        await asyncio.gather(
            *(
                clients[n % 2].post(
                    f"/v1/sandboxes/{boxes[n // 2 % 2]}/exec", json={"cmd": ["sleep", seconds]}
                )
                for n in range(number)
            )
        )
    )


def test_never_more_commands_at_once_than_the_limit(ground: Ground) -> None:
    ground.env["MAX_CONCURRENT_EXECS_PER_AGENT"] = "3"

    async def work() -> None:
        async with ending(ground):
            assert await _run_many(ground, 24, "0.05") == {200: 24}
            assert ground.backend.most_running == 3

    go(work())


def test_the_queue_is_as_long_as_it_may_be_for_all_replicas(ground: Ground) -> None:
    ground.env |= {"MAX_CONCURRENT_EXECS_PER_AGENT": "2", "MAX_QUEUED_EXECS_PER_AGENT": "4"}

    async def work() -> None:
        async with ending(ground):
            pair = await ground.pair()
            box, client = await made(pair[0].client()), pair[0].client()
            asked = [
                asyncio.ensure_future(
                    replica.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"]})
                )
                for replica in pair * 10
            ]
            # Nothing ends before all others were refused.
            while sum(one.done() for one in asked) < 14:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert _codes([one.result() for one in asked if one.done()]) == {429: 14}
            while not all(one.done() for one in asked):
                for one in (await client.get("/v1/execs?state=Running")).json()["items"]:
                    await client.post(f"/v1/execs/{one['id']}/kill", json={})
            assert _codes([one.result() for one in asked]) == {200: 6, 429: 14}

    go(work())


def test_agents_take_turns_across_replicas(ground: Ground) -> None:
    ground.env["MAX_CONCURRENT_EXECS"] = "1"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            order: list[str] = []

            async def run(client: httpx.AsyncClient, box: str, name: str) -> None:
                answer = await client.post(
                    f"/v1/sandboxes/{box}/exec", json={"cmd": ["sleep", "0.1"]}
                )
                assert answer.status_code == 200, answer.text
                order.append(name)

            alice, bob = first.client(), second.client("bob")
            own, others = await made(alice), await made(bob)
            tasks = [asyncio.ensure_future(run(alice, own, "a")) for _ in range(4)]
            await asyncio.sleep(0.05)
            tasks += [asyncio.ensure_future(run(bob, others, "b")) for _ in range(2)]
            await asyncio.gather(*tasks)
            # One of alice's runs when bob comes; from then on one each.
            assert "".join(order) in {"ababaa", "aababa"}

    go(work())


def test_a_rate_is_one_for_all_replicas(ground: Ground) -> None:
    ground.env |= {"RATE_CREATE_PER_MIN": "7"}

    async def work() -> None:
        async with ending(ground):
            pair = await ground.pair()
            assert await _create_many(pair, 30) == {201: 7, 429: 23}
            answer = await pair[0].client().post("/v1/sandboxes", json={})
            assert answer.json()["code"] == "RATE_LIMITED"
            assert 1 <= int(answer.headers["retry-after"]) <= 9

    go(work())


# --- the controls: the same without the one lock


def test_control_without_the_lock_two_who_count_at_once_both_pass(ground: Ground) -> None:
    """What the lock is for, shown step by step: both count before either has written."""

    async def work() -> None:
        async with ending(ground):
            first, second = (replica.shared for replica in await ground.pair())
            box = Sandbox(id="a", owner="alice", backend="fake", state=RUNNING)
            # As `counting` without its lock.
            assert first.used("alice") == second.used("alice") == 0
            first.entered(box)
            second.entered(box.replace(id="b"))
            assert first.used("alice") == second.used("alice") == 2
            # With it the second waits for the first, and gives up after its time.
            with first.counting(), pytest.raises(Problem, match="database"), second.counting():
                pytest.fail("both count")

    go(work())


def test_places_that_the_database_has_forgotten_are_written_again(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            client = first.client()
            box = await made(client)
            await client.post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            store = second.shared.store
            rows = store.rows("SELECT * FROM places")
            # As after a crash of the server; and one that nobody has any more.
            store.change("DELETE FROM places")
            store.change("INSERT INTO places VALUES (999, 'x', ?, true, 1, 1)", (first.shared.id,))
            first.shared.beat()
            assert [row[:4] for row in store.rows("SELECT * FROM places")] == [
                row[:4] for row in rows
            ]
            places.bury(store, first.shared.id)
            assert store.rows("SELECT * FROM places") == []

    go(work())
