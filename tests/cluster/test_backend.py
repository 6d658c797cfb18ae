"""The backend before a real API server: what is made, what fails, what is removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_sandbox.service.backend import (
    kube_pods,
    kubernetes,
)
from agent_sandbox.service.backend.kube_objects import SANDBOX
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network
from service.backend_kubernetes import scene

from . import ground
from .hand import Agents, Hand, Kept, backend, container
from .scenes import SECONDS, gone, labels, play, sandbox, until, waiting, warm

# --- one sandbox


def test_a_sandbox_is_a_pod_that_the_api_server_takes_and_keeps_as_it_was(
    apiserver: ground.Cluster,
) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        mine = sandbox()
        kept = await one.create(mine)
        assert kept["network"] == "seccomp"
        (made,) = await hand.pods(one.installation)
        assert labels(made)[SANDBOX] == mine.id
        spec = made["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["containers"][0]["image"] == scene.BASE
        assert spec["securityContext"]["runAsUser"] >= kube_pods.FIRST_UID
        # Nothing was defaulted to what would open it.
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (owner,) = made["metadata"]["ownerReferences"]
        held: Any = await one.api.get(one.api.path("configmaps", owner["name"]))
        assert owner["uid"] == held["metadata"]["uid"]
        await one.delete(mine)
        assert await hand.pods(one.installation) == []
        # Once more is no error.
        await one.delete(mine)

    play(apiserver, story)


def test_the_agent_is_told_whose_it_is_and_when_it_ends(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, _hand: Hand) -> None:
        mine = sandbox(expires=time.time() + 100)
        await one.create(mine)
        pod = one.cache.of_sandbox(mine.id)
        assert pod is not None
        claim = one.links.agents.claimed[pod.uid]  # type: ignore[attr-defined]
        assert (claim.sandbox, claim.pids, claim.network) == (mine.id, 64, "off")
        # A little longer than the sandbox: who is alive removes it before.
        assert 100 < claim.lease_seconds <= 100 + kubernetes.LEASE_GRACE
        await one.renewed(mine.replace(expires=time.time() + 1000))
        assert 1000 < one.links.agents.renewed[pod.uid] <= 1020  # type: ignore[attr-defined]

    play(apiserver, story)


def test_a_renewal_beyond_the_pods_own_end_is_refused(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, _hand: Hand) -> None:
        mine = sandbox()
        await one.create(mine)
        with pytest.raises(Problem, match="ends within") as caught:
            await one.renewed(mine.replace(expires=time.time() + 7200))
        assert caught.value.rule == "kubernetes.hard_seconds"

    play(apiserver, story, KUBERNETES_HARD_SECONDS="1h", KUBERNETES_WARM_SECONDS="60")


def test_a_sandbox_that_would_outlive_its_pod_is_not_made(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        with pytest.raises(Problem, match="may live for 3540 s"):
            await one.create(sandbox(expires=time.time() + 3600))
        assert hand.made == {}

    play(apiserver, story, KUBERNETES_HARD_SECONDS="1h", KUBERNETES_WARM_SECONDS="60")


WISHES: dict[str, tuple[dict[str, Any], str]] = {
    "a network that nothing keeps": ({"network": Network(mode="public")}, "own network"),
    "a list of hosts": ({"network": Network(mode="allow", allow=("a.example",))}, "without lists"),
    "a list of forbidden hosts": (
        {"network": Network(mode="public", deny=("a.example",))},
        "without lists",
    ),
    "an image without a digest": ({"digest": "registry.example/base:latest"}, "not pinned"),
}


@pytest.mark.parametrize("name", WISHES)
def test_what_a_pod_cannot_keep_is_refused_before_anything_is_made(
    apiserver: ground.Cluster, name: str
) -> None:
    wish, words = WISHES[name]

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        with pytest.raises(Problem, match=words):
            await one.create(sandbox(**wish))
        assert hand.made == {}

    play(apiserver, story)


# --- failures leave nothing


def test_a_pod_that_never_runs_is_given_up(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        hand.works = False
        with pytest.raises(Problem, match="does not run after 1 s"):
            await one.create(sandbox())
        await gone(one, hand)

    play(apiserver, story, KUBERNETES_START_SECONDS="1")


FATES: dict[str, dict[str, Any]] = {
    "an image that cannot be pulled": {
        "containerStatuses": [container(waiting={"reason": "ImagePullBackOff", "message": "no"})]
    },
    "a container that cannot be made": {
        "containerStatuses": [container(waiting={"reason": "CreateContainerConfigError"})]
    },
    "an agent that ends at once": {
        "phase": "Failed",
        "containerStatuses": [container(terminated={"exitCode": 2, "reason": "Error"})],
    },
}


def nothing_seen(one: KubernetesBackend) -> Callable[[], Awaitable[object]]:
    """Until the watch has told of every removal."""

    async def empty() -> bool:
        return not one.cache.pods

    return empty


@pytest.mark.parametrize("name", FATES)
def test_a_pod_that_cannot_run_is_given_up_at_once(apiserver: ground.Cluster, name: str) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        hand.works = False
        making = asyncio.ensure_future(one.create(sandbox()))
        await until(lambda: hand.pods(one.installation))
        (made,) = await hand.pods(one.installation)
        await hand.status(made["metadata"]["name"], **FATES[name])
        # What we give up ourselves is no loss, and another try is not undone by it.
        lost: list[str] = []
        one.attend(lambda id_, _why: lost.append(id_))
        with pytest.raises(Problem, match="does not start"):
            await making
        await gone(one, hand)
        await until(nothing_seen(one))
        assert lost == []

    play(apiserver, story)


def test_whoever_gives_up_leaves_no_pod(apiserver: ground.Cluster) -> None:
    """At whatever moment it is."""

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        for number, seconds in enumerate((0.0, 0.001, 0.004, 0.01, 0.03)):
            making = asyncio.ensure_future(one.create(sandbox(number)))
            await asyncio.sleep(seconds)
            if not making.cancel():
                # It was faster.
                await one.delete(sandbox(number))
            await asyncio.wait((making,))
            await gone(one, hand)

    play(apiserver, story)


def test_an_agent_that_keeps_too_little_is_no_sandbox(apiserver: ground.Cluster) -> None:
    agents = Agents()
    agents.kept = {"network": "pod", "filesystem": "pod"}

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        with pytest.raises(Problem, match="keeps a command from the network"):
            await one.create(sandbox())
        await gone(one, hand)

    play(apiserver, story, agents=agents)


def test_a_second_sandbox_of_one_id_is_refused_and_the_first_one_stays(
    apiserver: ground.Cluster,
) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.create(sandbox())
        with pytest.raises(Problem) as caught:
            await one.create(sandbox())
        assert caught.value.code == "CONFLICT"
        assert len(await hand.pods(one.installation)) == 1

    play(apiserver, story)


# --- the view


def test_a_removal_is_of_one_pod_and_not_of_its_name(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        mine = sandbox()
        await one.create(mine)
        old = one.cache.of_sandbox(mine.id)
        assert old is not None
        path = one.api.path("pods", old.name)
        assert await one.api.delete(path, uid="another") is False
        assert len(await hand.pods(one.installation)) == 1
        assert await one.api.delete(path, uid=old.uid, grace=0) is True

    play(apiserver, story)


# --- order


def test_pods_without_a_sandbox_are_removed_and_nobody_elses(apiserver: ground.Cluster) -> None:
    async def main() -> None:
        config = str(apiserver.kubeconfig)
        async with (
            asyncio.timeout(SECONDS), backend(config, Kept(shared=False)) as one,
            backend(config, Kept(shared=False)) as other, Hand(one.api).working() as hand,
        ):  # fmt: skip
            await one.prepare(warm(1))
            await waiting(one, 1)
            mine, left, theirs = sandbox(1), sandbox(2), sandbox(3)
            await asyncio.gather(one.create(mine), one.create(left), other.create(theirs))
            await waiting(one, 1)
            assert await one.reconcile({mine.id: mine}) == {mine.id}

            async def removed() -> bool:
                there = {labels(pod).get(SANDBOX) for pod in await hand.pods()}
                return there == {mine.id, theirs.id, None}

            await until(removed)
            # One that has ended is not there, and its pod goes.
            pod = one.cache.of_sandbox(mine.id)
            assert pod is not None
            await hand.status(pod.name, phase="Failed", reason="Evicted")

            async def ended() -> bool:
                seen = one.cache.of_sandbox(mine.id)
                return seen is None or seen.over

            await until(ended)
            assert await one.reconcile({mine.id: mine}) == frozenset()

    asyncio.run(main())


def test_a_pod_that_another_replica_has_just_made_is_not_removed(
    apiserver: ground.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in the store a moment later than we have looked there."""

    async def story(one: KubernetesBackend, hand: Hand) -> None:
        await one.create(sandbox())
        assert await one.reconcile({}) == frozenset()
        assert len(await hand.pods(one.installation)) == 1
        monkeypatch.setattr(kubernetes, "YOUNG_SECONDS", -10.0)
        await one.reconcile({})
        await gone(one, hand)

    play(apiserver, story)


def test_a_pod_that_is_being_made_here_is_known(apiserver: ground.Cluster) -> None:
    async def story(one: KubernetesBackend, hand: Hand) -> None:
        hand.works = False
        making = asyncio.ensure_future(one.create(sandbox()))
        await until(lambda: hand.pods(one.installation))
        await one.reconcile({})
        (made,) = await hand.pods(one.installation)
        await hand.run(made["metadata"]["name"])
        await making

    play(apiserver, story, store=Kept(shared=False))


def test_another_replica_goes_on_with_a_sandbox(apiserver: ground.Cluster) -> None:
    """It finds the pod, and the agent says whose it is."""

    async def main() -> None:
        store, agents = Kept(), Agents()
        config, mine = str(apiserver.kubeconfig), sandbox()
        async with (
            asyncio.timeout(SECONDS), backend(config, store, agents=agents) as two,
            Hand(two.api).working(),
        ):  # fmt: skip
            async with backend(config, store, agents=agents) as one:
                await one.create(mine)
            assert await two.reconcile({mine.id: mine}) == {mine.id}
            await two.renewed(mine.replace(expires=time.time() + 1000))
            with pytest.raises(Problem, match="gone"):
                await two.renewed(sandbox(2))
            pod = two.cache.of_sandbox(mine.id)
            assert pod is not None
            # An agent that says that it is another's is not spoken to.
            await two.links.drop(pod.uid).close()  # type: ignore[union-attr]
            agents.claimed[pod.uid] = agents.claimed[pod.uid].replace(sandbox="sbx-other")
            with pytest.raises(Problem, match="does not know it"):
                await two.renewed(mine)

    asyncio.run(main())
