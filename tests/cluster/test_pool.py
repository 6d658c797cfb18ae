"""Warm pods before a real API server: who wins, and whose are taken."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_sandbox.service.backend import (
    kube_pods,
    kube_pool,
    kube_seal,
)
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_objects import CLAIMED, SANDBOX, STATE, WARM
from agent_sandbox.service.backend.kube_objects import pod as read_pod
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from agent_sandbox.service.problems import Problem
from service.backend_kubernetes import scene

from . import ground
from .hand import Agents, Hand, Kept, backend
from .scenes import SECONDS, gone, labels, play, sandbox, until, waiting, warm


def test_the_pool_is_filled_and_a_claim_is_a_hit_and_it_is_filled_again(
    apiserver: ground.Cluster,
) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.prepare(warm(3))
        await waiting(one, 3)
        before = set(hand.made)
        mine = sandbox()
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        assert pod.uid in before
        await waiting(one, 3)
        found = one.gauges()
        assert found['pool_hits_total{template="t"}'] == 1
        assert found['pool_misses_total{template="t"}'] == 0
        # A wish that differs gets a pod of its own.
        await one.create(sandbox(2, resources=scene.RESOURCES.replace(memory=1 << 30)))
        assert one.gauges()['pool_hits_total{template="t"}'] == 1

    play(apiserver, story)


def test_a_pool_that_is_wanted_no_more_is_removed(
    apiserver: ground.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_pool, "STRANGE_SECONDS", -10.0)

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.prepare(warm(2))
        await waiting(one, 2)
        await one.prepare(())
        await gone(one, hand)

    play(apiserver, story)


def test_a_warm_pod_whose_agent_is_dead_is_replaced(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.prepare(warm(1))
        await waiting(one, 1)
        (bad,) = hand.made
        one.links.agents.broken.add(bad)  # type: ignore[attr-defined]
        mine = sandbox()
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        assert pod.uid != bad
        assert bad not in {p["metadata"]["uid"] for p in await hand.pods(one.installation)}

    play(apiserver, story)


async def race(one: KubernetesBackend, pod: Any, *, tests: bool) -> list[str]:
    """Ten claims of one pod at once; those that think that they have it."""

    async def claim(number: int) -> str:
        patch = kube_pods.claim_patch(pod.uid, sandbox(number), time.time())
        steps = patch if tests else [step for step in patch if step["op"] != "test"]
        try:
            await one.api.patch(one.api.path("pods", pod.name), steps)
        except Refusal as error:
            return "" if error.status in kube_pool.LOST_RACE else str(error)
        return str(sandbox(number).id)

    return [won for won in await asyncio.gather(*map(claim, range(10))) if won]


def test_cannot_happen_that_two_take_one_pod(apiserver: ground.Cluster) -> None:
    """By the patch's tests alone: without them, all ten think that it is theirs."""

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.prepare(warm(2))
        await waiting(one, 2)
        first, second = (read_pod(pod) for pod in await hand.pods(one.installation))
        one._source.want({})  # type: ignore[union-attr]
        (winner,) = await race(one, first, tests=True)
        found = read_pod(await one.api.get(one.api.path("pods", first.name)))
        assert (found.sandbox, found.state) == (winner, CLAIMED)
        assert len(await race(one, second, tests=False)) == 10

    play(apiserver, story)


def test_two_replicas_share_a_pool_and_never_a_pod(apiserver: ground.Cluster) -> None:
    """Twice as many claims as pods, half of them from each replica, all at once."""
    count, claims = 6, 12

    async def main() -> None:
        store, agents = Kept(), Agents()
        config = str(apiserver.kubeconfig)
        async with (
            asyncio.timeout(SECONDS), backend(config, store, agents=agents) as one,
            backend(config, store, agents=agents) as two, Hand(one.api).working() as hand,
        ):  # fmt: skip
            assert one.installation == two.installation
            await asyncio.gather(one.prepare(warm(count)), two.prepare(warm(count)))
            await asyncio.gather(waiting(one, count), waiting(two, count))
            # Both were told to make them, and there is none too many.
            assert len(hand.made) == count
            mine = [sandbox(n) for n in range(claims)]
            await asyncio.gather(
                *((one if n % 2 else two).create(each) for n, each in enumerate(mine))
            )
            # The stand-in for an agent has refused a second claim, had there been one.
            assert {claim.sandbox for claim in agents.claimed.values()} == {s.id for s in mine}
            assert len(agents.claimed) == claims
            await asyncio.gather(waiting(one, count), waiting(two, count))
            found = await hand.pods(one.installation)
            assert [labels(pod)[STATE] for pod in found].count(WARM) == count
            assert [labels(pod)[STATE] for pod in found].count(CLAIMED) == claims
            hits = sum(b.gauges()['pool_hits_total{template="t"}'] for b in (one, two))
            assert hits >= count
            # What one has made, the other one can remove.
            await asyncio.gather(
                *((two if n % 2 else one).delete(each) for n, each in enumerate(mine))
            )

    asyncio.run(main())


# --- pods that somebody else has made in the namespace


async def forged(one: KubernetesBackend, like: Any, name: str, changed: dict[str, str]) -> str:
    """A pod with all labels and notes of ours, by somebody who may see and make pods; its uid."""
    metadata = like["metadata"]
    body = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": {**metadata["labels"], **changed},
            "annotations": metadata.get("annotations", {}),
        },
        "spec": {"containers": [{"name": "agent", "image": "evil"}]},
    }  # fmt: skip
    made: Any = await one.api.create(one.api.path("pods"), body)
    return str(made["metadata"]["uid"])


@pytest.mark.parametrize("guarded", [True, False], ids=["", "control"])
def test_cannot_be_given_a_warm_pod_that_is_not_ours(
    apiserver: ground.Cluster, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.create(sandbox(1))
        (ours,) = await hand.pods(one.installation)
        if not guarded:
            monkeypatch.setattr(kube_seal.Seal, "fits", lambda *_: True)
        evil = await forged(one, ours, "evil-0", {STATE: WARM, SANDBOX: ""})

        async def seen() -> bool:
            pod = one.cache.pods.get(evil)
            return pod is not None and pod.ready

        await until(seen)
        mine = sandbox(2)
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        assert (pod.uid == evil) is not guarded

    play(apiserver, story)


def test_cannot_be_led_to_another_pod_by_a_label(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        lost: list[str] = []
        one.attend(lambda sandbox_id, _reason: lost.append(sandbox_id))
        mine = sandbox()
        await one.create(mine)
        (ours,) = await hand.pods(one.installation)
        uid = ours["metadata"]["uid"]
        evil = await forged(one, ours, "evil-1", {})

        async def seen() -> bool:
            return evil in one.cache.pods and one.cache.pods[evil].ready

        await until(seen)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        assert pod.uid == uid
        # Nor is the sandbox lost with it.
        await one.api.delete(one.api.path("pods", "evil-1"), grace=0)

        async def away() -> bool:
            return evil not in one.cache.pods

        await until(away)
        assert lost == []
        await one.renewed(mine)
        # Also not by one who comes first: another replica, or this one after a restart.
        claim = one.links.agents.claimed[uid]  # type: ignore[attr-defined]
        await one.api.delete(one.api.path("pods", ours["metadata"]["name"]), grace=0)
        await until(lambda: _no_pod(one, uid))
        evil = await forged(one, ours, "evil-2", {})
        await until(seen)
        one.links.agents.claimed[evil] = claim  # type: ignore[attr-defined]
        with pytest.raises(Problem, match="not ours"):
            await one.renewed(mine)

    play(apiserver, story)


async def _no_pod(one: KubernetesBackend, uid: str) -> bool:
    return uid not in one.cache.pods
