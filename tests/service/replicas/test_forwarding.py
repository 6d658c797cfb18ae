"""A request at the wrong replica is answered as by the right one."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import websockets.asyncio.client as websocket

from .ground import Ground, ending, go, made

WORK = "/workspace"


def test_whatever_a_sandbox_has_is_had_at_every_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here, metadata={"a": "b"})
            found = await there.get(f"/v1/sandboxes/{box}")
            assert found.status_code == 200
            assert found.json() == (await here.get(f"/v1/sandboxes/{box}")).json()
            (listed,) = (await there.get("/v1/sandboxes")).json()["items"]
            assert listed["id"] == box
            # A command, its record, its output.
            done = await there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "hello"]})
            assert done.status_code == 200, done.text
            assert done.json()["stdout"] == "hello\n"
            exec_id = done.json()["execId"]
            for client in (here, there):
                assert (await client.get(f"/v1/execs/{exec_id}")).json()["stdout"] == "hello\n"
                logs = await client.get(f"/v1/execs/{exec_id}/logs")
                assert logs.json()["stdout"] == "hello\n"
                (command,) = (await client.get(f"/v1/sandboxes/{box}/execs")).json()["items"]
                assert command["execId"] == exec_id
            # Files, metadata, life.
            put = await there.put(f"/v1/sandboxes/{box}/files", params={"path": "a"}, content=b"x")
            assert put.status_code == 200, put.text
            got = await there.get(f"/v1/sandboxes/{box}/files", params={"path": "a"})
            assert (got.content, got.headers["x-file-size"]) == (b"x", "1")
            listing = await there.get(f"/v1/sandboxes/{box}/files/list")
            assert [one["path"] for one in listing.json()["items"]] == [f"{WORK}/a"]
            await there.patch(f"/v1/sandboxes/{box}/metadata", json={"a": None, "c": "d"})
            assert (await here.get(f"/v1/sandboxes/{box}")).json()["metadata"] == {"c": "d"}
            for verb, state in (("pause", "Paused"), ("resume", "Running")):
                changed = await there.post(f"/v1/sandboxes/{box}/{verb}")
                assert changed.json()["state"] == state
            assert (
                await there.post(f"/v1/sandboxes/{box}/renew", json={"timeout": 60})
            ).status_code == 200
            assert (await there.get(f"/v1/sandboxes/{box}/metrics")).status_code == 200
            assert (await there.delete(f"/v1/sandboxes/{box}")).status_code == 204
            for client in (here, there):
                assert (await client.get(f"/v1/sandboxes/{box}")).status_code == 404
                # What a command has said outlives its sandbox.
                assert (await client.get(f"/v1/execs/{exec_id}")).json()["stdout"] == "hello\n"
            ground.verify()

    go(work())


def test_a_command_that_runs_is_talked_to_through_another_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here)
            started = await here.post(
                f"/v1/sandboxes/{box}/exec",
                json={"cmd": ["cat"], "background": True, "keepStdin": True},
            )
            assert started.status_code == 202, started.text
            exec_id = started.json()["execId"]
            assert (await there.get(f"/v1/execs/{exec_id}")).json()["state"] == "Running"
            fed = await there.post(f"/v1/execs/{exec_id}/stdin", json={"data": "one"})
            assert fed.status_code == 204, fed.text
            seen: list[tuple[str, str]] = []
            async with there.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
                assert stream.headers["content-type"] == "text/event-stream"
                async for name, data in _events(stream):
                    seen.append((name, data.get("data", "")))
                    if seen[-1] == ("stdout", "one"):
                        await there.post(
                            f"/v1/execs/{exec_id}/stdin", json={"data": "two", "eof": True}
                        )
            assert seen == [("start", ""), ("stdout", "one"), ("stdout", "two"), ("exit", "")]
            # From where a reader was, at either.
            first_id = json.loads((await here.get(f"/v1/execs/{exec_id}/logs")).text)["next"] // 2
            async with there.stream(
                "GET", f"/v1/execs/{exec_id}/events", headers={"Last-Event-ID": str(first_id)}
            ) as stream:
                rest = [
                    data.get("data") async for name, data in _events(stream) if name == "stdout"
                ]
            assert rest == ["two"]

    go(work())


async def _events(stream: httpx.Response):
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_a_kill_and_a_signal_reach_the_command_of_another_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here)
            for path, body in (("kill", {}), ("signal", {"signal": "SIGTERM"})):
                started = await here.post(
                    f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
                )
                exec_id = started.json()["execId"]
                done = await there.post(f"/v1/execs/{exec_id}/{path}", json=body)
                assert done.status_code in {200, 204}, done.text
                async with there.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
                    names = [name async for name, _ in _events(stream)]
                assert names[-1] == "exit"

    go(work())


def test_a_terminal_goes_through_another_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here = first.client()
            box = await made(here)
            started = await here.post(
                f"/v1/sandboxes/{box}/exec",
                json={"cmd": ["tty"], "tty": True, "rows": 24, "cols": 80, "background": True},
            )
            assert started.status_code == 202, started.text
            url = f"{second.url}/v1/execs/{started.json()['execId']}/ws".replace("http", "ws")
            head = {"Authorization": f"Bearer {ground.tokens['alice']}"}
            async with websocket.connect(url, additional_headers=head) as ws:
                await ws.send(b"x")
                assert await ws.recv() == b"24x80"
                await ws.send(json.dumps({"type": "resize", "rows": 50, "cols": 100}))
                await ws.send(b"x")
                assert await ws.recv() == b"50x100"
                await ws.send(b"y" * 300_000)
                assert await ws.recv() == b"50x100"
                await ws.send(json.dumps({"type": "nonsense"}))
                assert json.loads(await ws.recv())["type"] == "error"
                await ws.send(json.dumps({"type": "eof"}))
                assert json.loads(await ws.recv())["type"] == "exit"
                await ws.wait_closed()
                assert ws.close_code == 1000
            # Another agent's terminal is nobody's.
            other = {"Authorization": f"Bearer {ground.tokens['bob']}"}
            with pytest.raises(Exception, match="404"):
                await websocket.connect(url, additional_headers=other)

    go(work())


def test_large_bodies_flow_through_both_ways_without_being_held(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here)
            data = bytes(range(256)) * 40_000

            async def parts():
                for at in range(0, len(data), 100_000):
                    yield data[at : at + 100_000]

            # With a length, and in chunks.
            for name, content in (("a", data), ("b", parts())):
                put = await there.put(
                    f"/v1/sandboxes/{box}/files", params={"path": name}, content=content
                )
                assert put.status_code == 200, put.text
                got = await there.get(f"/v1/sandboxes/{box}/files", params={"path": name})
                assert got.content == data
                part = await there.get(
                    f"/v1/sandboxes/{box}/files", params={"path": name},
                    headers={"Range": "bytes=10000000-"},
                )  # fmt: skip
                assert (part.status_code, part.content) == (206, data[10_000_000:])
            flood = await there.post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["flood", "3000000"]}
            )
            assert flood.json()["stdoutBytes"] == 3_000_000
            # A body that is too large is refused by whoever counts first.
            small = await ground.replica()
            assert (await small.client().get(f"/v1/sandboxes/{box}")).status_code == 200

    go(work())


def test_a_body_beyond_the_limit_is_refused_on_the_way(ground: Ground) -> None:
    ground.env["MAX_UPLOAD_BYTES"] = "1M"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())

            async def parts():
                for _ in range(20):
                    yield bytes(100_000)

            for content in (bytes(2_000_000), parts()):
                answer = await second.client().put(
                    f"/v1/sandboxes/{box}/files", params={"path": "a"}, content=content
                )
                assert answer.status_code == 413, answer.text
            assert (await second.client().get(f"/v1/sandboxes/{box}")).status_code == 200

    go(work())


def test_what_is_anothers_stays_absent_through_every_replica(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, bob = first.client(), second.client("bob")
            box = await made(here)
            started = await here.post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            exec_id = started.json()["execId"]
            none, never = "sbx-" + "a" * 26, "exc-" + "a" * 26
            for method, path in (
                ("GET", "/v1/sandboxes/{box}"), ("DELETE", "/v1/sandboxes/{box}"),
                ("POST", "/v1/sandboxes/{box}/pause"), ("GET", "/v1/sandboxes/{box}/execs"),
                ("GET", "/v1/sandboxes/{box}/files/list"), ("GET", "/v1/sandboxes/{box}/archive"),
                ("GET", "/v1/execs/{exec}"), ("GET", "/v1/execs/{exec}/events"),
                ("POST", "/v1/execs/{exec}/kill"), ("DELETE", "/v1/execs/{exec}"),
            ):  # fmt: skip
                theirs = await bob.request(method, path.format(box=box, exec=exec_id))
                nothing = await bob.request(method, path.format(box=none, exec=never))
                assert theirs.status_code == 404, (path, theirs.text)
                words, others = theirs.json(), nothing.json()
                del words["requestId"], others["requestId"]
                assert words == others
            # Nobody was asked: the home has no line about it.
            assert (await second.client("chief").get(f"/v1/sandboxes/{box}")).status_code == 200
            assert (await bob.get("/v1/sandboxes")).json()["items"] == []
            await here.post(f"/v1/execs/{exec_id}/kill", json={})

    go(work())


def test_a_revoked_token_is_refused_by_the_home_too(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            there, chief = second.client(), first.client("chief")
            started = await there.post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["hold"], "background": True}
            )
            async with there.stream(
                "GET", f"/v1/execs/{started.json()['execId']}/events"
            ) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                assert (await chief.delete("/v1/tokens/alice")).status_code == 204
                # The stream that was open ends, as it would at the home itself.
                rest = [line async for line in lines]
            assert any("UNAUTHENTICATED" in line for line in rest)
            assert (await there.get(f"/v1/sandboxes/{box}")).status_code == 401

    go(work())


def test_a_tool_over_mcp_is_used_where_its_sandbox_is(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            asked = {
                "jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "write_file",
                           "arguments": {"sandbox": box, "path": "a", "content": "by mcp"}},
            }  # fmt: skip
            accepts = {"Accept": "application/json, text/event-stream"}
            answer = await second.client(headers=accepts).post("/mcp", json=asked)
            assert answer.status_code == 200, answer.text
            assert not answer.json()["result"]["isError"]
            assert ground.backend.boxes[box].content == {f"{WORK}/a": b"by mcp"}
            # Another agent's is none, by the same words as here.
            refused = await second.client("bob", headers=accepts).post("/mcp", json=asked)
            assert "NOT_FOUND" in refused.text

    go(work())


def test_a_long_output_is_read_at_another_replica_after_its_home_is_gone(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            here, there = first.client(), second.client()
            box = await made(here)
            done = await here.post(
                f"/v1/sandboxes/{box}/exec", json={"cmd": ["flood", "2000000"], "background": True}
            )
            exec_id = done.json()["execId"]
            async with there.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
                before = [data.get("data") async for _, data in _events(stream)]
            store = second.shared.store
            while not store.rows("SELECT 1 FROM outputs WHERE part = 0"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.die()
            async with there.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
                after = [data.get("data") async for _, data in _events(stream)]
            assert after == before
            assert sum(len(piece or "") for piece in after) == 2_000_000

    go(work())
