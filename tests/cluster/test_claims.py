"""Claims against a real API server with the published schemas; the controller is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.service.backend import kube_claim_objects as resources
from agent_sandbox.service.backend import kube_claims
from agent_sandbox.service.backend.kube_api import MERGE_PATCH, Api
from agent_sandbox.service.backend.kube_cache import Cache
from agent_sandbox.service.backend.kube_claims import CLAIMS, POOLS, TEMPLATES, Claims
from agent_sandbox.service.backend.kube_credentials import Credentials, find
from agent_sandbox.service.backend.kube_http import Http
from agent_sandbox.service.backend.kube_objects import SANDBOX, STATE
from agent_sandbox.service.backend.kube_pods import Surroundings, shape_of
from agent_sandbox.service.backend.kube_seal import Seal
from agent_sandbox.service.backend.kube_settings import KubeSettings
from agent_sandbox.service.backend.kube_source import Order, Wanted
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import RUNNING, Resources, Sandbox
from conftest import ROOT, must_work

from . import ground
from .standin import PODS, StandIn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from agent_sandbox.service.backend.kube_pods import Shape

CRDS = ROOT / "tests" / "cluster" / "crds"
IMAGE = "registry.example/base@sha256:" + "a" * 64
SECONDS = 60.0
SEAL = Seal(b"k" * 32)


@pytest.fixture(scope="module")
def server() -> Iterator[ground.Cluster]:
    must_work(not ground.missing(alone=True), ground.missing(alone=True))
    with ground.running(alone=True) as cluster:
        yield cluster


@pytest.fixture(params=resources.VERSIONS)
def version(server: ground.Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster that serves one version of the published resources."""
    kinds = CRDS / request.param
    server.kubectl("apply", "-f", str(kinds))
    server.kubectl("wait", "--for=condition=Established", "crd", "--all")
    yield str(request.param)
    server.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
    server.kubectl("delete", "-f", str(kinds))


class NoLinks:
    """No agent is in these pods."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    async def open(self, pod: Any) -> None:
        self.opened.append(pod.uid)

    def drop(self, uid: str) -> None:
        """There is none."""


class World:
    """The source under test, and what surrounds it."""

    def __init__(self, claims: Claims, cache: Cache, api: Api, around: Surroundings) -> None:
        self.claims = claims
        self.cache = cache
        self.api = api
        self.around = around
        self.stand_in: StandIn

    def shape(self, memory: int = 1 << 28) -> Shape:
        bounds = Resources(memory=memory, cpus=1.0, pids=64, disk=1 << 28)
        return shape_of(
            IMAGE, agent=True, runtime="", network="off", resources=bounds, around=self.around
        )

    def order(self, name: str, *, ends: float = 3600.0, memory: int = 1 << 28) -> Order:
        sandbox = Sandbox(id=name, owner="me", backend="kubernetes", state=RUNNING)
        return Order(
            sandbox=sandbox, shape=self.shape(memory), ends=time.time() + ends, manifest=dict
        )

    async def all(self, plural: str) -> list[Any]:
        found, _ = await self.api.list(self.stand_in.path(plural))
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]  # type: ignore[index]


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask the API server again until it holds: what is awaited is another program's doing."""
    async with asyncio.timeout(SECONDS):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def client(server: ground.Cluster) -> AsyncIterator[Api]:
    access = find(KubeSettings(kubeconfig=str(server.kubeconfig)), {})
    http = Http(access, Credentials(access, {}))
    try:
        yield Api(http, "default")
    finally:
        await http.close()


@contextlib.asynccontextmanager
async def world(server: ground.Cluster, **settings: Any) -> AsyncIterator[World]:
    around = Surroundings(
        settings=KubeSettings(start_seconds=20.0).replace(**settings), namespace="default",
        installation="abcdefghij", authority="CA",
    )  # fmt: skip
    async with client(server) as api, client(server) as theirs:
        served = await kube_claims.discover(api, "on")
        assert served is not None
        cache = Cache(api, around.installation)
        await cache.start()
        links: Any = NoLinks()
        claims = Claims(api, cache, links, around, served, seal=SEAL)
        await claims.open()
        made = World(claims, cache, api, around)
        try:
            async with StandIn(theirs, served).running() as made.stand_in:
                yield made
        finally:
            await claims.close()
            await cache.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS * 2):
            await work()

    asyncio.run(bounded())


def test_without_the_resources_there_are_no_claims(server: ground.Cluster) -> None:
    async def work() -> None:
        async with client(server) as api:
            assert await kube_claims.discover(api, "auto") is None
            with pytest.raises(Problem, match="has no SandboxClaims"):
                await kube_claims.discover(api, "on")

    run(work)


def test_a_sandbox_gets_a_pod_of_its_own_and_all_of_it_goes(
    server: ground.Cluster, version: str
) -> None:
    async def work() -> None:
        async with world(server) as here:
            pod = await here.claims.take(here.order("sbx-a"))
            assert pod.ready
            assert pod.sandbox == "sbx-a"
            assert here.cache.of_sandbox("sbx-a") == pod
            (claim,) = await here.all(CLAIMS)
            assert claim["apiVersion"].endswith(version)
            assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
            (document,) = await here.all(PODS)
            labels, spec = document["metadata"]["labels"], document["spec"]
            assert (labels[SANDBOX], labels[STATE]) == ("sbx-a", "claimed")
            assert spec["automountServiceAccountToken"] is False
            assert "activeDeadlineSeconds" not in spec
            assert spec["securityContext"]["runAsUser"] >= 2_000_000
            with pytest.raises(Problem, match="already") as caught:
                await here.claims.take(here.order("sbx-a"))
            assert caught.value.code == "CONFLICT"
            # The second attempt has not touched the first one's claim.
            assert await here.all(CLAIMS)
            await here.claims.remove(pod)
            for kind in (CLAIMS, "sandboxes", PODS):
                await until(partial(_none, here, kind))

    run(work)


def test_the_published_schemas_have_every_field_that_is_written(
    server: ground.Cluster, version: str
) -> None:
    """An API server drops fields that a schema does not have, and says nothing of it."""

    async def work() -> None:
        async with world(server) as here:
            shape, around = here.shape(), here.around
            written = (
                (TEMPLATES, resources.template("x", version, shape, around, uid=2_000_001)),
                (POOLS, resources.pool("x", version, shape, around, replicas=0)),
                (CLAIMS, resources.claim(
                    "x", version, around, source="x", warm=True, sandbox="x", expires=time.time()
                )),
            )  # fmt: skip
            for plural, document in written:
                # A control: a field that nobody has published is dropped.
                document["spec"]["unheard"] = "of"
                got: Any = await here.api.create(here.stand_in.path(plural), document)
                assert "unheard" not in got["spec"]
                del document["spec"]["unheard"]
                assert _within(document["spec"], got["spec"]), plural

    run(work)


def _within(ours: Any, theirs: Any) -> bool:
    """Whether all that is in ours came back; defaults may have been added."""
    if isinstance(ours, dict):
        return set(ours) <= set(theirs) and all(_within(ours[k], theirs[k]) for k in ours)
    return bool(ours == theirs)


async def _none(here: World, kind: str) -> bool:
    return not await here.all(kind)


def test_a_warm_pod_is_taken_and_the_pool_is_filled_again(
    server: ground.Cluster, version: str
) -> None:
    async def work() -> None:
        async with world(server) as here:
            here.claims.want({here.shape(): Wanted(count=2, templates=("base",))})

            async def full() -> bool:
                return here.claims.gauges()['pool_ready{template="base"}'] == 2

            await until(full)
            waiting = {pod.uid for pod in here.cache.pods.values()}
            one = await here.claims.take(here.order("sbx-a"))
            two = await here.claims.take(here.order("sbx-b"))
            assert {one.uid, two.uid} == waiting
            await until(full)
            gauges = here.claims.gauges()
            assert gauges['pool_hits_total{template="base"}'] == 2
            assert gauges['pool_misses_total{template="base"}'] == 0
            # Each had a connection before it was taken.
            assert waiting <= set(here.claims._links.opened)  # type: ignore[attr-defined]
            # A shape that nobody keeps warm is made.
            cold = await here.claims.take(here.order("sbx-c", memory=1 << 29))
            assert cold.uid not in waiting
            assert cold.shape != one.shape

    run(work)


def test_two_replicas_never_get_one_pod(server: ground.Cluster, version: str) -> None:
    async def work() -> None:
        async with world(server) as here:
            here.claims.want({here.shape(): Wanted(count=3)})
            links: Any = NoLinks()
            other = Claims(here.api, here.cache, links, here.around, here.claims._served, seal=SEAL)
            await other.open()
            try:
                orders = [here.order(f"sbx-{i}") for i in range(8)]
                found = await asyncio.gather(
                    *((here.claims, other)[i % 2].take(one) for i, one in enumerate(orders))
                )
            finally:
                await other.close()
            assert len({pod.uid for pod in found}) == 8
            assert [pod.sandbox for pod in found] == [one.sandbox.id for one in orders]

    run(work)


@pytest.mark.parametrize("guarded", [True, False], ids=["", "control"])
def test_cannot_be_led_to_another_pod_by_a_label(
    server: ground.Cluster, version: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who may make pods, and has read all that is in ours."""

    async def work() -> None:
        async with world(server) as here:
            pod = await here.claims.take(here.order("sbx-a"))
            if not guarded:
                monkeypatch.setattr(here.cache, "trusts", lambda _pod: True)
            (document,) = await here.all(PODS)
            held = document["metadata"]
            forged: Any = await here.api.create(here.api.path(PODS), {
                "apiVersion": "v1", "kind": "Pod", "spec": document["spec"],
                "metadata": {
                    "name": "evil", "labels": held["labels"], "annotations": held["annotations"],
                },
            })  # fmt: skip
            evil = str(forged["metadata"]["uid"])

            async def seen() -> bool:
                return evil in here.cache.pods

            await until(seen)
            found = here.cache.of_sandbox("sbx-a")
            assert found is not None
            assert (found.uid == pod.uid) is guarded
            assert here.cache.trusts(here.cache.pods[evil]) is not guarded

    run(work)


def test_a_claim_ends_by_itself_when_nobody_is_there(server: ground.Cluster, version: str) -> None:
    async def work() -> None:
        async with world(server) as here:
            pod = await here.claims.take(here.order("sbx-a", ends=-resources.LATER + 3))
            kept = await here.claims.take(here.order("sbx-b", ends=-resources.LATER + 3))
            await here.claims.extend(kept, time.time() + 3600)
            await here.claims.close()

            async def gone() -> bool:
                return {one["metadata"]["name"] for one in await here.all(CLAIMS)} == {"sbx-b"}

            await until(gone)

            async def only() -> bool:
                return {one["metadata"]["uid"] for one in await here.all(PODS)} == {kept.uid}

            await until(only)
            assert pod.uid != kept.uid

    run(work)


def test_whatever_fails_leaves_no_claim(server: ground.Cluster, version: str) -> None:
    async def work() -> None:
        async with world(server, start_seconds=1.5) as here:
            here.stand_in.adopts = False
            with pytest.raises(Problem, match=r"no pod runs after 1\.5 s: its SandboxClaim"):
                await here.claims.take(here.order("sbx-slow"))
            assert await here.all(CLAIMS) == []
            task = asyncio.ensure_future(here.claims.take(here.order("sbx-cancelled")))
            await until(lambda: here.all(CLAIMS))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await here.all(CLAIMS) == []
        # Longer: the stand-in has to make the pod by then, on a busy machine, too.
        async with world(server, start_seconds=6.0) as here:
            here.stand_in.runs = False
            with pytest.raises(Problem, match=r"no pod runs after 6 s: its pod is Pending"):
                await here.claims.take(here.order("sbx-pending"))
            assert await here.all(CLAIMS) == []

    run(work)


def test_a_pod_that_has_ended_in_its_pool_is_not_a_sandbox(
    server: ground.Cluster, version: str
) -> None:
    async def work() -> None:
        async with world(server) as here:
            here.stand_in.runs = False
            here.claims.want({here.shape(): Wanted(count=1)})
            await until(lambda: here.all(PODS))
            (dead,) = await here.all(PODS)
            # As if the agent's time had been over: its controller may still think it ready.
            sandbox = dead["metadata"]["name"]
            said = {"type": "Ready", "status": "True", "reason": "x", "message": "it runs",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
            await here.api.patch(
                f"{here.stand_in.path('sandboxes', sandbox)}/status",
                {"status": {"conditions": [said]}}, kind=MERGE_PATCH,
            )  # fmt: skip
            here.stand_in.runs = True
            path = f"{here.api.path('pods', sandbox)}/status"
            await here.api.patch(path, {"status": {"phase": "Succeeded"}}, kind=MERGE_PATCH)
            pod = await here.claims.take(here.order("sbx-a"))
            assert pod.uid != dead["metadata"]["uid"]
            assert pod.ready

    run(work)


def test_what_nobody_knows_is_swept_and_what_is_under_way_is_not(
    server: ground.Cluster, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(kube_claims, "IDLE_SECONDS", -5.0)
        async with world(server) as here:
            here.claims.want({here.shape(): Wanted(count=1)})
            for name, memory in (("sbx-a", 1 << 28), ("sbx-b", 1 << 29), ("sbx-c", 1 << 30)):
                await here.claims.take(here.order(name, memory=memory))
            # Times of the API server are whole seconds.
            await here.claims.sweep(frozenset({"sbx-a"}), before=time.time() - 60)
            assert len(await here.all(CLAIMS)) == 3
            await here.claims.sweep(frozenset({"sbx-a", "sbx-b"}), before=time.time() + 5)

            async def left() -> bool:
                names = {one["metadata"]["name"] for one in await here.all(CLAIMS)}
                return names == {"sbx-a", "sbx-b"}

            await until(left)
            # A template lives as long as a claim or a pool needs it.
            await until(lambda: _known_without(here, "sbx-c"))
            await here.claims.sweep(frozenset({"sbx-a", "sbx-b"}), before=time.time() + 5)
            assert len(await here.all(POOLS)) == len(await here.all(TEMPLATES)) == 2
            # What was removed too early, by another replica, is made again.
            for plural in (POOLS, TEMPLATES):
                for one in await here.all(plural):
                    await here.api.delete(here.stand_in.path(plural, one["metadata"]["name"]))
            pod = await here.claims.take(here.order("sbx-d", memory=1 << 29))
            assert pod.ready

    run(work)


async def _known_without(here: World, name: str) -> bool:
    return name not in here.claims._known


def test_a_refusal_of_the_controller_is_told(
    server: ground.Cluster, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same that it says of labels: the reason why we give a claim annotations alone."""
    real = resources.claim

    def labelled(*words: Any, **more: Any) -> Any:
        document = real(*words, **more)
        document["spec"]["additionalPodMetadata"]["labels"] = {SANDBOX: "x"}
        return document

    async def work() -> None:
        async with world(server) as here:
            monkeypatch.setattr(resources, "claim", labelled)
            with pytest.raises(Problem, match="InvalidMetadata"):
                await here.claims.take(here.order("sbx-a"))
            assert await here.all(CLAIMS) == []

    run(work)
