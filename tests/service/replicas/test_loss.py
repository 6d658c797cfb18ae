"""A replica that is gone: what it had goes on, or says why not; nothing is done twice."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agent_sandbox.service.problems import Problem
from agent_sandbox.service.replicas import burial
from agent_sandbox.service.values import FAILED, PAUSED, PENDING, RUNNING, STOPPING, Sandbox

from .ground import Cloud, Ground, ending, go, made, use


class Machine(Cloud):
    """A backend of one machine alone."""

    name = "machine"
    shared = False


async def _hold(client: httpx.AsyncClient, box: str) -> str:
    answer = await client.post(
        f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["execId"])


def _sandbox(**fields: Any) -> Sandbox:
    return Sandbox(**{"id": "s", "owner": "o", "backend": "cloud", "state": RUNNING, **fields})


@pytest.mark.parametrize(("fields", "fate"), [
    ({}, "adopted"), ({"state": PAUSED}, "adopted"), ({"state": FAILED}, "adopted"),
    ({"state": PENDING}, "removed"), ({"state": STOPPING}, "removed"),
    ({"one_shot": True}, "removed"), ({"backend": "bwrap"}, "away"),
    ({"backend": "bwrap", "state": PENDING}, "removed"),
])  # fmt: skip
def test_what_becomes_of_a_sandbox_depends_on_its_state_and_backend(
    fields: dict[str, Any], fate: str
) -> None:
    assert burial.heir(_sandbox(**fields), {"cloud"}) == fate


def test_another_replica_goes_on_with_the_sandbox_and_the_command_is_lost(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here)
            done = await here.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "kept"]})
            exec_id = await _hold(here, box)
            follower = asyncio.ensure_future(_follow(there, exec_id))
            waiting = asyncio.ensure_future(
                there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"]})
            )
            while len(ground.backend.boxes[box].running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            # At once, on a request.
            lost = (await there.get(f"/v1/execs/{exec_id}")).json()
            assert (lost["state"], lost["exitCode"]) == ("Lost", None)
            assert "gone" in lost["error"]
            answer = await there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "on"]})
            assert answer.json()["stdout"] == "on\n"
            assert (await there.get(f"/v1/execs/{done.json()['execId']}")).json()["stdout"] == (
                "kept\n"
            )
            # Who waited through the other is told, and does not wait for ever.
            assert (await waiting).json()["code"] == "REPLICA_UNAVAILABLE"
            with pytest.raises(httpx.RemoteProtocolError):
                await follower
            states = {one["state"] for one in (await there.get("/v1/execs")).json()["items"]}
            assert states == {"Lost", "Exited"}
            chief = second.client("chief")
            actions = [
                line["action"]
                for line in (await chief.get("/v1/audit", params={"limit": "100"})).json()["items"]
            ]
            assert actions.count("sandbox.adopt") == 1
            assert actions.count("replica.bury") == 1
            ground.verify()

    go(work())


async def _follow(client: httpx.AsyncClient, exec_id: str) -> None:
    async with client.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
        async for _ in stream.aiter_lines():
            pass


def test_nobody_need_ask_for_what_a_replica_has_left(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            await _hold(first.client(), box)
            await first.die()
            context = second.app._service._context  # type: ignore[union-attr]
            while box not in context.live:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert context.places.running("alice") == 0

    go(work())


def test_only_one_of_those_who_are_left_takes_over(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            third = await ground.replica()
            boxes = [await made(first.client()) for _ in range(5)]
            await first.die()
            await asyncio.gather(
                *(
                    one.client().get(f"/v1/sandboxes/{box}")
                    for one in (second, third)
                    for box in boxes
                )
            )
            owners = [
                [box in one.app._service._context.live for box in boxes]  # type: ignore[union-attr]
                for one in (second, third)
            ]
            assert all(a != b for a, b in zip(*owners, strict=True))
            for one in (second, third):
                for box in boxes:
                    answer = await one.client().get(f"/v1/sandboxes/{box}")
                    assert answer.json()["state"] == "Running"

    go(work())


def test_a_sandbox_of_one_machine_fails_with_its_replica_and_comes_back_with_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.backend = Machine()
    use(monkeypatch, ground.backend)

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.replica("one"), await ground.replica("two")
            here, there = first.client(), second.client()
            box, other, paused = await made(here), await made(here), await made(here)
            await here.post(f"/v1/sandboxes/{paused}/pause")
            exec_id = await _hold(here, box)
            await first.die()
            gone = (await there.get(f"/v1/sandboxes/{box}")).json()
            assert gone["state"] == "Failed"
            assert "away" in gone["reason"]
            assert (await there.get(f"/v1/execs/{exec_id}")).json()["state"] == "Lost"
            for method, path, body in (
                ("POST", "exec", {"cmd": ["true"]}), ("GET", "files/list", None),
                ("POST", "renew", {"timeout": 60}), ("POST", "pause", {}),
            ):  # fmt: skip
                refused = await there.request(method, f"/v1/sandboxes/{box}/{path}", json=body)
                assert refused.json()["code"] == "WRONG_STATE", path
            assert len((await there.get("/v1/sandboxes?state=Failed")).json()["items"]) == 3
            # They take up no room; and one may be given up.
            assert (await there.get("/v1/whoami")).json()["usage"]["sandboxes"] == 0
            assert (await there.delete(f"/v1/sandboxes/{other}")).status_code == 204
            assert (await there.get(f"/v1/sandboxes/{other}")).status_code == 404
            # Its data directory comes back, with what the machine still has.
            await first.close()
            ground.replicas.remove(first)
            back = await ground.replica("one")
            for client in (back.client(), there):
                assert (await client.get(f"/v1/sandboxes/{box}")).json()["state"] == "Running"
                assert (await client.get(f"/v1/sandboxes/{paused}")).json()["state"] == "Paused"
                done = await client.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
                assert done.json()["exitCode"] == 0
            assert other not in ground.backend.boxes
            assert (await there.get("/v1/whoami")).json()["usage"]["sandboxes"] == 2

    go(work())


def test_a_replica_that_stops_in_order_hands_over_at_once(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            await first.close()
            ground.replicas.remove(first)
            assert second.shared.store.rows("SELECT id FROM replicas") == [(second.shared.id,)]
            answer = await second.client().get(f"/v1/sandboxes/{box}")
            assert answer.json()["state"] == "Running"

    go(work())


def test_cannot_act_after_the_lease_is_over(ground: Ground) -> None:
    """It was stopped and goes on: others have what it had. The control is the check switched off.

    Without the check it would start a command in a sandbox that another replica runs.
    """

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            service = first.app._service
            assert service is not None
            context = service._context
            live = context.live[box]
            # The time passes without a sign of life.
            await first.shared.lease.stop()
            first.shared.lease._until = -1.0
            second.shared.store.change(
                "UPDATE replicas SET ends = 0 WHERE id = ?", (first.shared.id,)
            )
            assert (await second.client().get(f"/v1/sandboxes/{box}")).json()["state"] == "Running"
            # It would still answer, had it not looked at the clock.
            for method, path, body in (
                ("POST", f"/v1/sandboxes/{box}/exec", {"cmd": ["true"]}),
                ("DELETE", f"/v1/sandboxes/{box}", None), ("POST", "/v1/sandboxes", {}),
                ("GET", f"/v1/sandboxes/{box}", None),
            ):  # fmt: skip
                refused = await first.client().request(method, path, json=body)
                assert (refused.status_code, refused.json()["rule"]) == (503, "replica.lease")
            starts = [call for call in ground.backend.calls if call[0] == "start"]
            assert starts == []
            assert not first.shared.lease.renew()
            # What runs on inside finds every door closed, too: the store's as well as ours.
            for act in (
                lambda: context.update(live, state=PAUSED),
                lambda: context.store.put_sandbox(live.sandbox),
            ):
                with pytest.raises(Problem, match="lease"):
                    act()
            # A clock that is wrong does not help it: the database knows whose the sandbox is.
            first.shared.lease._until = float("inf")
            with pytest.raises(Problem, match="another replica"):
                context.store.put_sandbox(live.sandbox)
            command = {"cmd": ["true"]}
            done = await first.client().post(f"/v1/sandboxes/{box}/exec", json=command)
            assert (done.status_code, done.json()["code"]) == (409, "CONFLICT")
            assert ("start", box) not in ground.backend.calls
            # The control: without either it would act.
            first.shared.begin = first.shared.store.put_execution  # type: ignore[method-assign]
            done = await first.client().post(f"/v1/sandboxes/{box}/exec", json=command)
            assert done.status_code == 200
            assert ("start", box) in ground.backend.calls
            first.shared.lease._until = -1.0

    go(work())


def test_a_lost_lease_ends_commands_as_lost_and_tells_the_app(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here = first.client()
            box = await made(here)
            waiting = asyncio.ensure_future(
                here.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"]})
            )
            while not ground.backend.boxes[box].running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (running,) = ground.backend.boxes[box].running.values()
            second.shared.store.change(
                "UPDATE replicas SET ends = 0 WHERE id = ?", (first.shared.id,)
            )
            await first.app.fenced.wait()
            # Who asks can be told only as long as an earlier look at its token stands.
            told = (await waiting).json()
            assert told.get("state", "Lost") == "Lost"
            assert "state" in told or told["rule"] == "replica.lease"
            assert running.killed
            ready = await first.client(None).get("/readyz")
            assert ready.status_code == 503
            found = await second.client().get(f"/v1/sandboxes/{box}")
            assert found.json()["state"] == "Running"
            (one,) = (await second.client().get("/v1/execs")).json()["items"]
            assert one["state"] == "Lost"

    go(work())


def test_a_home_that_does_not_listen_yet_is_waited_for(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            store = second.shared.store
            (row,) = store.rows("SELECT address FROM replicas WHERE id = ?", first.shared.id)
            store.change("UPDATE replicas SET address = '' WHERE id = ?", (first.shared.id,))
            asked = asyncio.ensure_future(second.client().get(f"/v1/sandboxes/{box}"))
            await asyncio.sleep(0.3)
            assert not asked.done()
            store.change("UPDATE replicas SET address = ? WHERE id = ?", (row[0], first.shared.id))
            assert (await asked).json()["state"] == "Running"

    go(work())


def test_a_key_under_way_at_a_replica_that_is_gone_is_free(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            stuck = asyncio.Event()
            ground.backend.before["create"] = stuck.wait  # type: ignore[assignment]
            key = {"Idempotency-Key": "k"}
            first_try = asyncio.ensure_future(
                first.client(headers=key).post("/v1/sandboxes", json={})
            )
            while not ground.backend.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            del ground.backend.before["create"]
            made_now = await second.client(headers=key).post("/v1/sandboxes", json={})
            assert made_now.status_code == 201, made_now.text
            stuck.set()
            await asyncio.gather(first_try, return_exceptions=True)
            listed = (await second.client().get("/v1/sandboxes")).json()["items"]
            assert [one["id"] for one in listed] == [made_now.json()["id"]]

    go(work())
