"""A loss that is found in two ways at the same moment is one loss: one word, one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_loss
from agent_sandbox.service.backend.kube_cache import Cache
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_loss import Losses
from agent_sandbox.service.backend.kube_objects import Node, Pod
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import FAILED, LOST

from ..core.lab import ALICE, cmd, go, lab, until

UID = "u1"
WELL = Node(name="n1", ready=True)
UNWELL = Node(name="n1", ready=False, reason="NodeStatusUnknown")


class World:
    """A cluster that answers when a test says so, with one pod in it."""

    namespace = "sandboxes"

    def __init__(self, sandbox: str, tell: Callable[[str, str], None]) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        # Pods that we remove ourselves.
        self.ours: set[str] = set()
        self.told: list[str] = []
        itself: Any = self
        self.cache = Cache(itself, "i")
        self.pod = Pod(
            name="p", uid=UID, version="1", sandbox=sandbox, node="n1", ip="10.0.0.9",
            phase="Running", running=True,
        )  # fmt: skip
        self.cache.put(self.pod)
        self.cache._node(WELL)

        def lost(pod: Pod, why: str) -> None:
            self.told.append(why)
            tell(pod.sandbox, why)

        self.losses = Losses(
            itself, self.cache, itself, quiet_seconds=0.0, lost=lost,
            mine=lambda pod: pod.uid not in self.ours,
        )  # fmt: skip
        self.losses.start()

    # --- as an Api

    def path(self, *words: str) -> str:
        return "/".join(words)

    async def get(self, _path: str) -> object:
        self.asked.set()
        await self.answer.wait()
        raise Refusal(404, "NotFound", "no such pod")

    # --- as Links

    async def open(self, _pod: Pod) -> object:
        self.asked.set()
        await self.answer.wait()
        raise Problem("BACKEND_UNAVAILABLE", "no answer")

    # --- what happens

    def watch(self) -> None:
        """The watch tells that the pod is gone."""
        self.cache.drop(UID)

    def ends(self) -> None:
        """The watch tells that it has ended, and that it is gone."""
        self.cache.put(self.pod.replace(version="2", phase="Failed", reason="Evicted"))
        self.cache.drop(UID)

    async def over(self) -> None:
        await until(lambda: not self.losses._tasks)


def by_silence(world: World) -> None:
    """The line to the agent is quiet, so the API server is asked."""
    world.losses.quiet(UID)


def by_node(world: World) -> None:
    """The node is not ready, so the agent is asked."""
    world.cache._node(UNWELL)


def watch_first(world: World) -> None:
    world.watch()
    world.answer.set()


def end_first(world: World) -> None:
    world.ends()
    world.answer.set()


def answer_first(world: World) -> None:
    world.answer.set()
    asyncio.get_running_loop().call_soon(world.watch)


def same_turn(world: World) -> None:
    """Both before anybody who waits goes on."""
    world.answer.set()
    world.watch()


async def answer_alone(world: World) -> None:
    """And the watch is late."""
    world.answer.set()
    await world.over()
    world.watch()


ORDERS: tuple[Callable[[World], Awaitable[None] | None], ...] = (
    watch_first, end_first, answer_first, same_turn, answer_alone,
)  # fmt: skip


@pytest.mark.parametrize("begin", [by_silence, by_node])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loss_that_is_seen_twice_at_the_same_moment_is_told_once(
    tmp_path: Path, begin: Callable[[World], None], order: Callable[[World], Any]
) -> None:
    async def scene() -> None:
        async with lab(tmp_path) as around:
            box = await around.service.create(ALICE, Wish())
            job = await around.service.execute(ALICE, box.id, cmd("hold"))
            world = World(box.id, around.backend.lost)
            begin(world)
            async with asyncio.timeout(5):
                await world.asked.wait()
                if (more := order(world)) is not None:
                    await more
                await world.over()
                ended = await job.wait()
            assert len(world.told) == 1, world.told
            assert (ended.state, ended.error) == (LOST, world.told[0])
            assert around.service.get(ALICE, box.id).state == FAILED
            (line,) = around.lines("sandbox.lost")
            assert (line["target"]["id"], line["reason"]) == (box.id, world.told[0])
            assert len(around.lines("exec.end")) == 1

    go(scene())


@pytest.mark.parametrize("begin", [by_silence, by_node])
def test_what_we_remove_ourselves_is_no_loss_however_late_an_answer_comes(
    begin: Callable[[World], None],
) -> None:
    async def scene() -> None:
        world = World("sbx-1", lambda _sandbox, _why: None)
        begin(world)
        await world.asked.wait()
        world.ours.add(UID)
        world.watch()
        # Nobody remembers it any more.
        world.ours.clear()
        world.answer.set()
        await world.over()
        assert world.told == []

    asyncio.run(scene())


def test_an_answer_that_nobody_else_has_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: silence alone is told too, though no watch ever says a word."""
    monkeypatch.setattr(kube_loss, "AGAIN_SECONDS", 0.01)

    async def scene() -> None:
        world = World("sbx-1", lambda _sandbox, _why: None)
        by_node(world)
        world.answer.set()
        await world.over()
        assert world.told == ["its node does not answer (NodeStatusUnknown)"]

    asyncio.run(scene())
