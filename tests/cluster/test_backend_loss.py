"""Losses before a real API server: what is lost, what is not, and with which words."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_sandbox.service.backend import (
    kube_loss,
)
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from agent_sandbox.service.problems import Problem

from . import ground
from .hand import Hand
from .scenes import gone, play, sandbox, until


class Told:
    """What was told to be lost."""

    def __init__(self, one: KubernetesBackend) -> None:
        self.lost: dict[str, str] = {}
        self._event = asyncio.Event()
        one.attend(self._tell)

    def _tell(self, sandbox_id: str, reason: str) -> None:
        assert sandbox_id not in self.lost
        self.lost[sandbox_id] = reason
        self._event.set()

    async def until(self, sandbox_id: str) -> str:
        while sandbox_id not in self.lost:
            self._event.clear()
            await self._event.wait()
        return self.lost[sandbox_id]


def test_a_pod_that_somebody_removes_is_lost_and_one_that_we_remove_is_not(
    apiserver: ground.Cluster,
) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        told, ours, theirs = Told(one), sandbox(1), sandbox(2)
        await asyncio.gather(one.create(ours), one.create(theirs))
        pod = one.cache.of_sandbox(theirs.id)
        assert pod is not None
        link: Any = one.links.get(pod.uid)
        await one.delete(ours)
        await one.api.delete(one.api.path("pods", pod.name))
        assert "removed" in await told.until(theirs.id)
        assert "removed" in link.reason
        await gone(one, hand)
        assert set(told.lost) == {theirs.id}

    play(apiserver, story)


def test_an_evicted_pod_is_lost_with_the_clusters_words(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        told, mine = Told(one), sandbox()
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        await hand.status(pod.name, phase="Failed", reason="Evicted", message="low on memory")
        assert await told.until(mine.id) == "its pod has ended: Evicted: low on memory"
        with pytest.raises(Problem, match="gone"):
            await one.renewed(mine)

    play(apiserver, story)


def test_a_node_that_is_not_ready_loses_only_what_does_not_answer(
    apiserver: ground.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_loss, "AGAIN_SECONDS", 0.05)

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        told, answers, silent = Told(one), sandbox(1), sandbox(2)
        await hand.node("n1", "True")
        await asyncio.gather(one.create(answers), one.create(silent))
        pod = one.cache.of_sandbox(silent.id)
        assert pod is not None
        one.links.agents.silent.add(pod.uid)  # type: ignore[attr-defined]
        await hand.node("n1", "Unknown", "NodeStatusUnknown")
        assert "NodeStatusUnknown" in await told.until(silent.id)
        # The other one is asked again and again, until its node is well.
        assert set(told.lost) == {silent.id}
        other = one.cache.of_sandbox(answers.id)
        assert other is not None
        one.links.agents.silent.add(other.uid)  # type: ignore[attr-defined]
        await told.until(answers.id)
        await hand.node("n1", "True")

    play(apiserver, story)


def test_a_quiet_agent_is_asked_about_before_it_is_lost(
    apiserver: ground.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_loss, "AGAIN_SECONDS", 0.05)

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        told, mine = Told(one), sandbox()
        await hand.node("n1", "True")
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        # It answers: nothing happens.
        one.links.quiet(pod.uid)
        await until(lambda: _idle(one))
        assert told.lost == {}
        # It does not, and its node is well: the cluster has some time to notice, then it is ours.
        one.links.agents.silent.add(pod.uid)  # type: ignore[attr-defined]
        began = time.monotonic()
        one.links.quiet(pod.uid)
        assert "does not answer, though its node is well" in await told.until(mine.id)
        assert time.monotonic() - began >= 1

    play(apiserver, story, KUBERNETES_QUIET_SECONDS="1")


async def _idle(one: KubernetesBackend) -> bool:
    return not one._losses._tasks
