"""An agent that says too much, or nothing, holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from agent_sandbox.pod import frames
from agent_sandbox.service.backend import pod_files, pod_link, pod_running
from agent_sandbox.service.backend.interface import Start
from agent_sandbox.service.backend.pod_wire import TURN, Broken, Wire
from agent_sandbox.service.problems import Problem

from .liar import Talk

COUNT = 10_000


def wire(data: bytes) -> Wire:
    """A connection on which all of this has come."""
    reader = asyncio.StreamReader(limit=1 << 30)
    reader.feed_data(data)

    class Writer:
        transport = None

    return Wire(reader, cast("asyncio.StreamWriter", Writer()))


def test_cannot_hold_the_loop_by_small_frames() -> None:
    async def scene() -> int:
        one = wire(frames.frame(frames.ALIVE) * COUNT)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(others())
        for _ in range(COUNT):
            await one.next()
        task.cancel()
        return turns

    assert asyncio.run(scene()) >= COUNT // TURN - 1


@pytest.mark.parametrize("kind", [frames.OUT, frames.ERR, frames.DATA])
def test_an_empty_piece_ends_the_connection(kind: bytes) -> None:
    async def scene() -> None:
        assert await wire(frames.frame(kind, b"x")).next() == (kind, b"x")
        with pytest.raises(Broken):
            await wire(frames.frame(kind)).next()

    asyncio.run(scene())


async def silent(_: Talk) -> None:
    await asyncio.sleep(1000)


@pytest.mark.parametrize("operation", ["entry", "read", "list", "pack", "write"])
def test_cannot_keep_a_question_about_files_for_ever(
    lie: Any, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(pod_files, "SECONDS", 0.2)

    async def content() -> Any:
        yield b"x"

    async def scene(link: Any) -> str:
        files = link.files()
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "entry": lambda: files.entry("/workspace"),
            "read": lambda: files.read("/workspace/a"),
            "list": lambda: files.list("/workspace", depth=1, most=10),
            "pack": lambda: files.pack("/workspace"),
            "write": lambda: files.write("/workspace/a", content(), limit=10),
        }
        with pytest.raises(Problem) as caught:
            await asked[operation]()
        return str(caught.value.message)

    assert "no answer" in lie(scene, {f"files.{operation}": silent})[0]


def test_a_kill_that_nobody_heeds_is_insisted_on(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_running, "KILL_SECONDS", 0.1)

    async def deaf(talk: Talk) -> None:
        await talk.answer({})
        while True:
            await talk.next()

    killed: list[object] = []
    seen = asyncio.Event()

    async def kill(talk: Talk) -> None:
        killed.append(talk.request["execution"])
        await talk.answer({})
        seen.set()

    async def scene(link: Any) -> None:
        running = await link.start(Start(execution="exc-1", argv=("true",)), lambda *_: None)
        assert not killed
        await running.kill()
        await asyncio.wait_for(seen.wait(), 20)

    lie(scene, {"exec": deaf, "kill": kill})
    assert set(killed) == {"exc-1"}


def test_a_command_that_began_without_an_answer_is_ended(
    lie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor may have been stopped before it could answer."""
    monkeypatch.setattr(pod_link, "ANSWER_SECONDS", 0.2)
    killed: list[object] = []

    async def running(talk: Talk) -> None:
        await talk.answer({"state": "running"})

    async def kill(talk: Talk) -> None:
        killed.append(talk.request["execution"])
        await talk.answer({})

    async def scene(link: Any) -> None:
        with pytest.raises(Problem):
            await link.start(Start(execution="exc-1", argv=("true",)), lambda *_: None)

    _, liar = lie(scene, {"exec": silent, "fate": running, "kill": kill})
    assert killed == ["exc-1"]
    # Never twice: it is running.
    assert liar.asked.count("exec") == 1
