"""The backend before an engine that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend.docker import DockerBackend, instance_id
from agent_sandbox.service.backend.interface import Ended, Start
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import RUNNING, Sandbox
from docker.fake import FakeEngine, Handler, place

PIN = "sha256:" + "b" * 64
INSTANCE = "0123456789abcdef"
NAME = f"agent-sandbox-{INSTANCE}-sbx-1"
SANDBOX = Sandbox(id="sbx-1", owner="alice", backend="docker", state=RUNNING, digest=PIN)
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    base = place()
    engine = FakeEngine(base / "e.sock")
    engine.start()
    imported = json.dumps({"status": PIN}).encode()
    engine.answers["POST", "/images/create"] = (200, imported)
    engine.answers["GET", f"/images/{PIN}/json"] = (200, {"Id": PIN})
    engine.answers["POST", f"/containers/{NAME}/attach"] = (0, stays(frame(1, b"ready\n")))
    yield engine
    engine.stop()
    shutil.rmtree(base, ignore_errors=True)


def stays(data: bytes) -> Callable[[Handler], None]:
    """A stream that says something and stays open until the other side goes."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(UPGRADED + data)
        handler.rfile.read()

    return answer


def play(fake: FakeEngine, story: Callable[[DockerBackend], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        backend = DockerBackend(str(fake.path), instance=INSTANCE)
        try:
            return await story(backend)
        finally:
            await backend.close()

    return asyncio.run(main())


def paths(fake: FakeEngine, method: str) -> list[str]:
    return [
        s.path.partition("?")[0].partition("/v1.41")[2] for s in fake.seen if s.method == method
    ]


# --- life


def test_a_sandbox_is_made_with_a_name_of_its_own_and_from_its_pin(fake: FakeEngine) -> None:
    play(fake, lambda backend: backend.create(SANDBOX))
    (made,) = [s for s in fake.seen if s.path.endswith(f"/containers/create?name={NAME}")]
    assert json.loads(made.body)["Image"] == PIN
    # The input is held before anything runs: nothing can run that would outlive us.
    order = [p for p in paths(fake, "POST") if p.startswith(f"/containers/{NAME}/")]
    assert order == [f"/containers/{NAME}/attach", f"/containers/{NAME}/start"]


REFUSALS = [
    (409, "CONFLICT"),
    (404, "INVALID"),
    (500, "BACKEND_UNAVAILABLE"),
    (400, "BACKEND_UNAVAILABLE"),
]


@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_a_container_that_is_refused_leaves_nothing(
    fake: FakeEngine, status: int, code: str
) -> None:
    async def story(backend: DockerBackend) -> tuple[str, tuple[str, ...]]:
        taken = await backend._shelf.take()
        backend._shelf._ready.append(taken)
        fake.answers["POST", "/containers/create"] = (status, {"message": "no"})
        with pytest.raises(Problem) as caught:
            await backend.create(SANDBOX)
        return caught.value.code, taken.names

    found, volumes = play(fake, story)
    assert found == code
    assert {f"/volumes/{name}" for name in volumes} <= {*paths(fake, "DELETE")}


def test_a_container_that_does_not_start_is_removed(fake: FakeEngine) -> None:
    fake.answers["POST", f"/containers/{NAME}/start"] = (500, {"message": "runc: no"})
    with pytest.raises(Problem) as caught:
        play(fake, lambda backend: backend.create(SANDBOX))
    assert caught.value.code == "BACKEND_UNAVAILABLE"
    assert f"/containers/{NAME}" in paths(fake, "DELETE")


def test_an_image_without_a_shell_is_told(fake: FakeEngine) -> None:
    fake.answers["POST", f"/containers/{NAME}/attach"] = (0, lambda h: h.wfile.write(UPGRADED))
    with pytest.raises(Problem) as caught:
        play(fake, lambda backend: backend.create(SANDBOX))
    assert (caught.value.code, caught.value.rule) == ("UNSUPPORTED", "image.shell")
    assert f"/containers/{NAME}" in paths(fake, "DELETE")


def test_what_is_gone_can_be_deleted(fake: FakeEngine) -> None:
    fake.answers["DELETE", f"/containers/{NAME}"] = (404, {"message": "no such container"})
    play(fake, lambda backend: backend.delete(SANDBOX))


def test_an_engine_that_is_not_there_is_told_and_not_an_error(tmp_path: Path) -> None:
    async def story() -> tuple[Any, str]:
        backend = DockerBackend(str(tmp_path / "none.sock"), instance=INSTANCE)
        with pytest.raises(Problem) as caught:
            await backend.resolve("busybox")
        return await backend.probe(), caught.value.code

    support, code = asyncio.run(story())
    assert not support.ok
    assert "engine" in support.reason
    assert code == "BACKEND_UNAVAILABLE"


NONSENSE: list[Any] = [b"", b"not json", ["list"], {"message": 1}, 5]


@pytest.mark.parametrize("answer", NONSENSE)
def test_an_engine_that_answers_nonsense_is_unavailable(fake: FakeEngine, answer: Any) -> None:
    fake.answers["GET", "/images/x:1/json"] = (200, answer)
    with pytest.raises(Problem) as caught:
        play(fake, lambda backend: backend.resolve("x:1"))
    assert caught.value.code == "BACKEND_UNAVAILABLE"


def test_an_image_that_is_not_there_is_told_with_a_remedy(fake: FakeEngine) -> None:
    with pytest.raises(Problem) as caught:
        play(fake, lambda backend: backend.resolve("missing:1"))
    assert (caught.value.code, caught.value.hint) == ("INVALID", "docker pull missing:1")


def test_reconcile_asks_for_this_service_alone_and_keeps_what_is_known(fake: FakeEngine) -> None:
    label = "org.agent-sandbox.service"
    common = {f"{label}.instance": INSTANCE, f"{label}.work": "w", f"{label}.home": "h"}
    listed = [
        {"Id": "1" * 64, "State": "running", "Labels": {**common, f"{label}.sandbox": "sbx-1"}},
        {"Id": "2" * 64, "State": "running", "Labels": {**common, f"{label}.sandbox": "sbx-2"}},
        {"Id": "3" * 64, "State": "created", "Labels": {f"{label}.instance": INSTANCE}},
    ]
    fake.answers["GET", "/containers/json"] = (200, listed)
    fake.answers["GET", "/volumes"] = (200, {"Volumes": [{"Name": "lost"}]})
    kept = play(fake, lambda backend: backend.reconcile({"sbx-1": SANDBOX}))
    assert kept == {"sbx-1"}
    asked = [s.path for s in fake.seen if "/containers/json" in s.path or "/volumes?" in s.path]
    assert all(f"{label}.instance%3D{INSTANCE}" in path for path in asked)
    assert f"/containers/{'1' * 64}/kill" in paths(fake, "POST")
    removed = {f"/containers/{'2' * 64}", f"/containers/{'3' * 64}", "/volumes/lost"}
    assert {*paths(fake, "DELETE")} == removed


# --- executions


def run(
    fake: FakeEngine, *pieces: bytes, cut: bool = False
) -> tuple[Ended, list[tuple[int, bytes]]]:
    """Run a command whose stream says these pieces; TOKEN stands for its token."""

    def answer(handler: Handler) -> None:
        (asked,) = [s for s in fake.seen if s.path.endswith(f"/containers/{NAME}/exec")][:1]
        token = json.loads(asked.body)["Cmd"][5].encode()
        handler.wfile.write(UPGRADED)
        for piece in pieces:
            handler.wfile.write(piece.replace(b"T" * 32, token))
            handler.wfile.flush()

    fake.answers["POST", f"/containers/{NAME}/exec"] = (201, {"Id": "e1"})
    fake.answers["POST", "/exec/e1/start"] = (0, answer)
    fake.answers["GET", "/exec/e1/json"] = (200, {"Running": False, "ExitCode": 9})
    said: list[tuple[int, bytes]] = []

    async def story(backend: DockerBackend) -> Ended:
        await backend.create(SANDBOX)
        start = Start(execution="exc-1", argv=("x",))
        running = await backend.start(SANDBOX, start, lambda n, data: said.append((n, data)))
        return await running.wait()

    return play(fake, story), said


TOKEN = b"T" * 32


def test_output_that_overtakes_the_first_words_is_not_lost(fake: FakeEngine) -> None:
    ended, said = run(fake, frame(1, b"early"), frame(2, TOKEN + b" 5 0\n"), frame(1, b"late"),
                      frame(2, TOKEN + b" 3 0\n"))  # fmt: skip
    assert (ended.code, ended.started) == (3, True)
    assert said == [(1, b"early"), (1, b"late")]


def test_a_complaint_of_the_engine_is_no_output(fake: FakeEngine) -> None:
    ended, said = run(fake, frame(1, b"OCI runtime exec failed: no\r\n"))
    assert (ended.started, said) == (False, [])
    assert "OCI runtime exec failed" in ended.error


def test_a_stream_that_breaks_off_asks_the_engine_for_the_end(fake: FakeEngine) -> None:
    ended, said = run(fake, frame(2, TOKEN + b" 5 0\n"), frame(1, b"abc")[:-1])
    assert (ended.code, ended.started) == (9, True)
    assert said == [(1, b"ab")]


def test_kills_for_memory_count_only_if_they_are_new(fake: FakeEngine) -> None:
    old, _ = run(fake, frame(2, TOKEN + b" 5 2\n" + TOKEN + b" 137 2\n"))
    assert (old.exceeded, old.signal) == ("", "SIGKILL")


def test_a_kill_for_memory_is_told(fake: FakeEngine) -> None:
    new, _ = run(fake, frame(2, TOKEN + b" 5 2\n" + TOKEN + b" 137 3\n"))
    assert new.exceeded == "memory"


def test_a_command_that_survives_the_kill_of_a_child_was_not_ended_by_it(fake: FakeEngine) -> None:
    new, _ = run(fake, frame(2, TOKEN + b" 5 2\n" + TOKEN + b" 0 3\n"))
    assert new.exceeded == ""


def test_a_stream_of_something_else_is_an_engine_that_cannot_be_used(fake: FakeEngine) -> None:
    with pytest.raises(Problem) as caught:
        run(fake, frame(2, TOKEN + b" 5 0\n"), b"\x07\x07\x07\x07\x07\x07\x07\x07")
    assert caught.value.code == "BACKEND_UNAVAILABLE"


# --- which service it is


def test_a_data_directory_has_one_instance_for_ever(tmp_path: Path) -> None:
    first = instance_id(str(tmp_path))
    assert instance_id(str(tmp_path)) == first
    assert (tmp_path / "docker-instance").stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert instance_id(str(other)) != first


def test_a_damaged_instance_is_an_error_and_no_new_one(tmp_path: Path) -> None:
    (tmp_path / "docker-instance").write_text("../../x\n")
    with pytest.raises(Problem):
        instance_id(str(tmp_path))


def test_cannot_lead_the_instance_elsewhere_by_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("0" * 16)
    (tmp_path / "docker-instance").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        instance_id(str(tmp_path))


@pytest.mark.parametrize(
    ("declared", "together"),
    [(("/data",), ["in", "out", "in", "out"]), ((), ["in", "in", "out", "out"])],
)
def test_one_container_alone_fills_the_volumes_of_an_image(
    declared: tuple[str, ...], together: list[str]
) -> None:
    async def story() -> None:
        backend = DockerBackend("/nowhere", instance="0" * 16)
        seen: list[str] = []

        async def make() -> None:
            async with backend._filling(PIN, declared):
                seen.append("in")
                await asyncio.sleep(0)
                seen.append("out")

        await asyncio.gather(make(), make())
        assert seen == together
        # Once they are full nobody waits.
        seen.clear()
        await asyncio.gather(make(), make())
        assert seen == ["in", "in", "out", "out"]

    asyncio.run(story())
