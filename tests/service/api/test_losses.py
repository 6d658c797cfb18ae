"""What a client sees of a sandbox that is lost: an answer at once, and never a second run."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.asyncio.client as websocket

from agent_sandbox.client import AsyncClient, CommandFailed
from agent_sandbox.service import app as apps
from agent_sandbox.service.api import answers
from agent_sandbox.service.app import App, Settings
from agent_sandbox.service.logs import JSON, Log
from agent_sandbox.service.tokens import Tokens
from agent_sandbox.service.values import ADMIN, AUDIT, DEFAULT_SCOPES

from ..core.lab import go, until
from ..fake_backend import FakeBackend, FakeRunning

WHY = "node n1 does not answer"
# Far less than what the commands would take.
AT_ONCE = 8.0
EVENTS = {"Accept": "text/event-stream"}


class World:
    """A service over the fake backend, and clients of it."""

    def __init__(self, app: App, backend: FakeBackend, token: str) -> None:
        self.backend = backend
        self.url = next(one for one in app.addresses if one.startswith("http"))
        self.token = token
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=AT_ONCE)

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **more: Any) -> Any:
        answer = await self.http.post(path, json=body, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def box(self) -> str:
        return str((await self.post("/v1/sandboxes", {}, 201))["id"])

    async def command(self, after: FakeRunning | None = None) -> FakeRunning:
        """What runs; or what runs after that."""

        def others() -> list[FakeRunning]:
            every = (one for box in self.backend.boxes.values() for one in box.running.values())
            return [one for one in every if one is not after]

        await until(others)
        return others()[0]

    async def lose(self, after: FakeRunning | None = None) -> FakeRunning:
        """Lose the sandbox in which something runs."""
        running = await self.command(after)
        self.backend.lost(running.box.sandbox.id, WHY)
        return running

    async def twice(self) -> tuple[FakeRunning, FakeRunning]:
        """Lose the first start of a command, and let the second end."""
        first = await self.command()
        first.sink(1, b"first")
        await self.lose()
        second = await self.command(after=first)
        second.sink(1, b"second")
        second.released.set()
        return first, second


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    @asynccontextmanager
    async def made() -> AsyncIterator[World]:
        backend = FakeBackend()
        monkeypatch.setitem(apps.BACKENDS, "fake", lambda *_: backend)
        settings = Settings(
            data=str(tmp_path), listen=(("127.0.0.1", 0),), backends=("fake",),
            environ={"RATE_REQUESTS_PER_SEC": "100000"},
        )  # fmt: skip
        app = App(settings, Log(JSON, io.StringIO()))
        await app.start()
        try:
            assert app._service is not None
            tokens = app._service.tokens
            assert isinstance(tokens, Tokens)
            token, _ = tokens.new("boss", scopes=(*DEFAULT_SCOPES, ADMIN, AUDIT))
            one = World(app, backend, token)
            yield one
            await one.http.aclose()
        finally:
            await app.stop(0)

    return made


def play(world: Callable[[], Any], scene: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with world() as one:
            await scene(one)

    go(whole())


def test_the_answer_of_a_lost_command_is_there_at_once(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        box = await one.box()
        asked = asyncio.ensure_future(one.post(f"/v1/sandboxes/{box}/exec", {"cmd": ["immortal"]}))
        await one.lose()
        found = await asked
        assert (found["state"], found["exitCode"], found["error"]) == ("Lost", None, WHY)
        assert found["attempts"] == 1
        assert set(found) == set(answers.RESULT.needed)
        shown = await one.get(f"/v1/sandboxes/{box}")
        assert (shown["state"], shown["reason"]) == ("Failed", WHY)
        assert set(shown) == set(answers.SANDBOX.needed)
        assert (await one.get("/v1/whoami"))["usage"]["sandboxes"] == 0
        lines = (await one.get("/v1/audit?action=sandbox.lost"))["items"]
        assert [line["reason"] for line in lines] == [WHY]
        assert "sandbox_lost_total 1" in (await one.http.get("/metrics")).text.splitlines()

    play(world, scene)


def test_one_in_the_background_shows_its_loss(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        box = await one.box()
        body = {"cmd": ["immortal"], "background": True}
        started = await one.post(f"/v1/sandboxes/{box}/exec", body, 202)
        await one.lose()
        await until(lambda: not one.backend.boxes)
        found = await one.get(f"/v1/execs/{started['id']}")
        assert (found["state"], found["exitCode"], found["error"]) == ("Lost", None, WHY)
        listed = await one.get("/v1/execs?state=Lost")
        assert [item["id"] for item in listed["items"]] == [started["id"]]

    play(world, scene)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_streams_end_with_the_loss(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        box = await one.box()
        body = {"cmd": ["immortal"], "background": True, "tty": True}
        started = await one.post(f"/v1/sandboxes/{box}/exec", body, 202)
        path = f"/v1/execs/{started['id']}"
        follower = asyncio.ensure_future(one.http.get(f"{path}/events"))
        address = f"{one.url.replace('http', 'ws')}{path}/ws"
        head = {"Authorization": f"Bearer {one.token}"}
        async with websocket.connect(address, additional_headers=head) as terminal:
            one.backend.running(started["id"]).sink(1, b"so far")
            assert await terminal.recv() == b"so far"
            await one.lose()
            last = json.loads(await asyncio.wait_for(terminal.recv(), AT_ONCE))
            assert (last["type"], last["state"], last["exitCode"]) == ("exit", "Lost", None)
            await asyncio.wait_for(terminal.wait_closed(), AT_ONCE)
        names = events((await follower).text)
        assert [name for name, _ in names] == ["start", "stdout", "exit"]
        assert (names[-1][1]["state"], names[-1][1]["error"]) == ("Lost", WHY)

    play(world, scene)


def test_cannot_get_a_second_run_without_asking_for_it(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        for body, state, attempts in (
            ({"cmd": ["hold"]}, "Lost", 1),
            ({"cmd": ["hold"], "retry": False}, "Lost", 1),
            # The control.
            ({"cmd": ["hold"], "retry": True}, "Exited", 2),
        ):
            begun = [verb for verb, _ in one.backend.calls].count("start")
            asked = asyncio.ensure_future(one.post("/v1/run", body))
            first = await one.lose()
            if attempts == 2:
                second = await one.command(after=first)
                second.sink(1, b"second")
                second.released.set()
            found = await asked
            assert (found["state"], found["attempts"]) == (state, attempts)
            starts = [verb for verb, _ in one.backend.calls].count("start") - begun
            assert starts == attempts
            await until(lambda: not one.backend.boxes)

    play(world, scene)


def test_the_answer_of_a_retried_command_has_the_output_of_the_second_time(
    world: Callable[[], Any],
) -> None:
    async def scene(one: World) -> None:
        asked = asyncio.ensure_future(one.post("/v1/run", {"cmd": ["hold"], "retry": True}))
        first, second = await one.twice()
        found = await asked
        assert (found["stdout"], found["stdoutBytes"], found["exitCode"]) == ("second", 6, 0)
        assert found["sandboxId"] == second.box.sandbox.id != first.box.sandbox.id
        # Whoever reads its output later gets the same, wherever it begins: the rest is dropped.
        path = f"/v1/execs/{found['id']}"
        assert (await one.get(path))["stdout"] == "second"
        logs = await one.get(f"{path}/logs")
        assert (logs["stdout"], logs["attempts"]) == ("second", 2)
        assert (await one.get(f"{path}/logs?since=0"))["stdout"] == "second"
        seen = events((await one.http.get(f"{path}/events")).text)
        assert [name for name, _ in seen] == ["start", "retry", "stdout", "exit"]
        assert seen[1][1]["attempts"] == 2

    play(world, scene)


@pytest.mark.parametrize("says", [(b"", b""), (b"a", b""), (b"", b"b"), (b"a", b"b")])
def test_a_reader_is_told_of_the_retry_wherever_it_begins(
    world: Callable[[], Any], says: tuple[bytes, bytes]
) -> None:
    async def scene(one: World) -> None:
        first_said, second_said = (["stdout"] if text else [] for text in says)
        body, text = {"cmd": ["hold"], "retry": True}, ""
        async with one.http.stream("POST", "/v1/run", json=body, headers=EVENTS) as answer:
            read = answer.aiter_text()
            first = await one.command()
            first.sink(1, says[0])
            # Who has not read it by then never does.
            while len(events(text.rpartition("\n\n")[0])) < 1 + len(first_said):
                text += await anext(read)
            await one.lose()
            second = await one.command(after=first)
            second.sink(1, says[1])
            second.released.set()
            text += "".join([part async for part in read])
        wanted = ["start", *first_said, "retry", *second_said, "exit"]
        assert [name for name, _ in events(text)] == wanted
        # One that was cut off behind the output of the first time hears of it, too.
        frame = 5 + len(says[0]) if says[0] else 0
        again = await one.http.get(
            f"{answer.headers['location']}/events", headers={"Last-Event-ID": str(frame)}
        )
        assert [name for name, _ in events(again.text)] == ["start", "retry", *second_said, "exit"]

    play(world, scene)


def test_a_retry_under_a_key_is_one_request_for_all_who_ask(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        body, key = {"cmd": ["hold"], "retry": True}, {"Idempotency-Key": "k"}
        asked = [asyncio.ensure_future(one.post("/v1/run", body, headers=key)) for _ in range(3)]
        first = await one.lose()
        asked.append(asyncio.ensure_future(one.post("/v1/run", body, headers=key)))
        second = await one.command(after=first)
        second.released.set()
        found = await asyncio.gather(*asked)
        assert len({item["id"] for item in found}) == 1
        assert {(item["attempts"], item["exitCode"]) for item in found} == {(2, 0)}
        assert [verb for verb, _ in one.backend.calls].count("start") == 2

    play(world, scene)


@pytest.mark.parametrize("more", [{"tty": True}, {"keepStdin": True}])
def test_input_that_comes_later_excludes_a_retry(
    world: Callable[[], Any], more: dict[str, Any]
) -> None:
    async def scene(one: World) -> None:
        found = await one.post("/v1/run", {"cmd": ["hold"], "retry": True, **more}, 422)
        assert (found["code"], found["field"]) == ("INVALID", "retry")
        box = await one.box()
        found = await one.post(f"/v1/sandboxes/{box}/exec", {"cmd": ["true"], "retry": True}, 422)
        assert found["field"] == "retry"

    play(world, scene)


def test_a_sandbox_that_is_lost_while_it_is_made_is_a_503_that_may_be_asked_again(
    world: Callable[[], Any],
) -> None:
    async def scene(one: World) -> None:
        reached, opened = asyncio.Event(), asyncio.Event()

        async def hook() -> None:
            reached.set()
            await opened.wait()

        one.backend.before["create"] = hook
        asked = asyncio.ensure_future(one.post("/v1/sandboxes", {}, 503))
        await reached.wait()
        listed = await one.get("/v1/sandboxes?state=Pending")
        one.backend.lost(listed["items"][0]["id"], WHY)
        opened.set()
        found = await asked
        assert (found["code"], found["rule"]) == ("BACKEND_UNAVAILABLE", "sandbox.lost")

    play(world, scene)


def test_what_keeps_what_is_told_of_each_sandbox_and_backend(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        one.backend.keeps = {"filesystem": "bwrap", "network": "netns", "pids": "rlimit"}
        found = await one.post("/v1/sandboxes", {}, 201)
        assert found["guarantees"]["filesystem"] == "bwrap"
        assert found["effective"]["pids"]["enforcedBy"] == "rlimit"
        assert found["inner"] == "preferred"
        policy = await one.get("/v1/policy")
        assert policy["backends"][0]["inner"] is False
        checked = await one.post("/v1/policy/check", {})
        assert checked["effective"]["inner"] == "preferred"

    play(world, scene)


def test_numbers_of_a_backend_are_among_the_metrics(world: Callable[[], Any]) -> None:
    async def scene(one: World) -> None:
        one.backend.numbers = {
            'pool_size{template="b"}': 2, 'pool_size{template="a"}': 1, "pool_hits_total": 3.5,
            "pool": 7, 'pool{zone="z"}': 8,
        }  # fmt: skip
        lines = (await one.http.get("/metrics")).text.splitlines()
        start = lines.index("# HELP sandbox_fake_pool Of the backend fake.")
        assert lines[start:] == [
            "# HELP sandbox_fake_pool Of the backend fake.",
            "# TYPE sandbox_fake_pool gauge",
            "sandbox_fake_pool 7",
            'sandbox_fake_pool{zone="z"} 8',
            "# HELP sandbox_fake_pool_hits_total Of the backend fake.",
            "# TYPE sandbox_fake_pool_hits_total counter",
            "sandbox_fake_pool_hits_total 3.5",
            "# HELP sandbox_fake_pool_size Of the backend fake.",
            "# TYPE sandbox_fake_pool_size gauge",
            'sandbox_fake_pool_size{template="a"} 1',
            'sandbox_fake_pool_size{template="b"} 2',
        ]

    play(world, scene)


# --- our own client


def test_our_client_tells_of_a_loss_and_takes_the_output_of_the_last_time(
    world: Callable[[], Any],
) -> None:
    async def scene(one: World) -> None:
        async with AsyncClient(one.url, token=one.token) as client:
            asked = asyncio.ensure_future(client.run(["hold"], retry=True))
            await one.twice()
            result = await asked
            assert (result.stdout, result.attempts, result.ok, result.lost) == (
                "second", 2, True, False,
            )  # fmt: skip
            await until(lambda: not one.backend.boxes)
            asked = asyncio.ensure_future(client.run(["hold"]))
            await one.lose()
            result = await asked
            assert (result.lost, result.ok, result.attempts) == (True, False, 1)
            assert (result.code, result.error) == (125, WHY)
            await until(lambda: not one.backend.boxes)
            asked = asyncio.ensure_future(client.run(["hold"], check=True))
            await one.lose()
            with pytest.raises(CommandFailed, match=f"lost: {WHY}"):
                await asked
            sandbox = await client.sandboxes.create()
            assert sandbox.info.guarantees["memory"] == "cgroup"

    play(world, scene)
