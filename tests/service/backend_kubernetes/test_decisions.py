"""What the cluster says, read and judged: pods, nodes, losses, and the number of warm pods."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_objects as objects
from agent_sandbox.service.backend import kube_pods
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_loss import node_verdict, verdict
from agent_sandbox.service.backend.kube_objects import CLAIMED, WARM, Node, Pod
from agent_sandbox.service.backend.kube_pods import check
from agent_sandbox.service.backend.kube_pool import Plan, Pool, not_made, plan
from agent_sandbox.service.backend.kube_seal import Seal
from agent_sandbox.service.backend.kube_source import Wanted
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network

from .scene import around, sandbox, shape

RUNS = {"name": "agent", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


def document(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "uid": "u", "resourceVersion": "7", **metadata},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running", "podIP": "10.0.0.9", "containerStatuses": [RUNS], **(status or {}),
        },
    }  # fmt: skip


def waiting(reason: str, **more: str) -> dict[str, Any]:
    return {
        "phase": "Pending",
        "containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": reason, **more}}}],
    }


# --- pods


def test_a_pod_that_runs_is_ready() -> None:
    found = objects.pod(document(labels={objects.STATE: WARM, objects.SHAPE: "s"}))
    assert found.ready
    assert (found.node, found.ip, found.state, found.shape) == ("n1", "10.0.0.9", WARM, "s")
    assert not verdict(found)


@pytest.mark.parametrize(
    ("status", "metadata"),
    [
        ({"podIP": ""}, {}),
        ({"containerStatuses": []}, {}),
        (waiting("ContainerCreating"), {}),
        ({"phase": "Succeeded"}, {}),
        ({"phase": "Failed"}, {}),
        ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        # A second container of that pod, from somebody who changes pods, is not the agent.
        ({"containerStatuses": [{**RUNS, "name": "sidecar"}]}, {}),
    ],
)
def test_a_pod_that_does_not_run_is_not_ready(
    status: dict[str, Any], metadata: dict[str, Any]
) -> None:
    assert not objects.pod(document(status, **metadata)).ready


@pytest.mark.parametrize("reason", objects.HOPELESS)
def test_what_no_waiting_ends_is_told_with_the_engines_words(reason: str) -> None:
    found = objects.pod(document(waiting(reason, message="words")))
    assert found.hopeless
    assert reason in found.reason
    assert found.reason.endswith("words")


def test_an_init_container_that_cannot_start_is_told_too() -> None:
    init = {"name": "install", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    assert objects.pod(
        document({**waiting("PodInitializing"), "initContainerStatuses": [init]})
    ).hopeless


def test_no_room_is_told_by_the_scheduler() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2",
    }
    assert objects.pod(document({"phase": "Pending", "conditions": [condition]})).unplaced == "0/2"


def test_the_id_is_a_label_or_where_a_controller_owns_labels_an_annotation() -> None:
    assert objects.pod(document(labels={objects.SANDBOX: "a"})).sandbox == "a"
    assert objects.pod(document(annotations={objects.SANDBOX: "b"})).sandbox == "b"


@pytest.mark.parametrize(
    "bad", [None, [], "x", 3, {}, {"metadata": []}, {"metadata": {"labels": 3}, "status": "x"}]
)
def test_nonsense_is_a_pod_that_is_not_ready(bad: object) -> None:
    assert not objects.pod(bad).ready
    assert not objects.node(bad).ready


# --- losses

LOST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
        {}, "ended: Evicted: The node was low",
    ),
    "killed for its memory": (
        {"phase": "Failed", "containerStatuses": [
            {"name": "agent", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
        {}, "OOMKilled, code 137",
    ),
    "its lease ended": (
        {"phase": "Succeeded", "containerStatuses": [
            {"name": "agent", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}]},
        {}, "has ended",
    ),
    "its deadline": ({"phase": "Failed", "reason": "DeadlineExceeded"}, {}, "DeadlineExceeded"),
    "deleted by somebody": ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "being removed"),
    "its node lost": (
        {"reason": "NodeLost"}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "removed: NodeLost",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_a_loss_says_why(name: str) -> None:
    status, metadata, words = LOST[name]
    assert words in verdict(objects.pod(document(status, **metadata)))


def test_a_pod_that_is_not_there_is_lost() -> None:
    assert verdict(None)


def ready(status: str, **more: str) -> dict[str, Any]:
    conditions = [
        {"type": "MemoryPressure", "status": "False"},
        {"type": "Ready", "status": status, **more},
    ]
    return {"metadata": {"name": "n1"}, "status": {"conditions": conditions}}


def test_a_node_is_judged_by_its_condition_ready() -> None:
    assert not node_verdict(objects.node(ready("True")))
    assert "NodeStatusUnknown" in node_verdict(
        objects.node(ready("Unknown", reason="NodeStatusUnknown"))
    )
    assert node_verdict(objects.node({"metadata": {"name": "n1"}, "status": {}}))
    assert "removed" in node_verdict(None)


def test_a_callers_reason_does_not_name_nodes() -> None:
    assert "n1" not in node_verdict(Node(name="n1", ready=False, reason="NodeStatusUnknown"))


# --- the warm pool

AROUND = around()
SHAPE = shape(AROUND)
NAME = partial(kube_pods.warm_name, AROUND, SHAPE)


def warm(number: int, *, running: bool = True, made: float = 100.0, **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "name": NAME(number), "uid": f"u{number}", "state": WARM, "shape": SHAPE.hash,
        "phase": "Running" if running else "Pending", "running": running, "ip": "10.0.0.1",
        "made": made, **changes,
    }  # fmt: skip
    return Pod(**values)


def decided(wanted: int, *found: Pod, now: float = 200.0, old: float = 1000.0) -> Plan:
    return plan(wanted, list(found), NAME, now, old)


def removed(made: Plan) -> list[str]:
    return sorted(pod.uid for pod in made.remove)


def test_what_is_missing_is_made_with_names_that_all_replicas_count_alike() -> None:
    assert decided(2).make == (NAME(0), NAME(1))
    assert decided(3, warm(4)).make == (NAME(5), NAME(6))
    # A claimed pod keeps its name.
    claimed = warm(7, state=CLAIMED, sandbox="sbx")
    assert decided(2, warm(4), claimed).make == (NAME(8),)


def test_two_replicas_that_see_different_moments_never_make_one_too_many() -> None:
    """The one that is behind asks for names that are taken."""
    early = decided(3, warm(0))
    late = decided(3, warm(0), warm(1, running=False))
    assert set(late.make) <= set(early.make)


def test_pods_that_come_up_count_already() -> None:
    found = decided(2, warm(0), warm(1, running=False))
    assert (found.make, found.remove) == ((), ())


def test_too_many_are_removed_first_those_that_nobody_could_use_yet() -> None:
    pods = (warm(0), warm(1, running=False, made=90.0), warm(2, made=110.0))
    assert removed(decided(2, *pods)) == ["u1"]
    assert removed(decided(1, *pods)) == ["u1", "u2"]
    assert removed(decided(0, *pods)) == ["u0", "u1", "u2"]


def test_claimed_pods_are_never_removed_by_the_pool() -> None:
    pods = [warm(n, state=CLAIMED, sandbox=f"s{n}") for n in range(3)]
    assert decided(0, *pods).remove == ()
    # Nor one whose label says warm while its id says otherwise.
    assert decided(0, warm(0, sandbox="s")).remove == ()


def test_pods_that_have_ended_are_removed_and_replaced() -> None:
    found = decided(1, warm(0, phase="Failed", running=False))
    assert (removed(found), found.make) == (["u0"], (NAME(1),))


def test_old_pods_stay_until_another_one_is_ready() -> None:
    old = warm(0, made=0.0)
    first = decided(1, old, now=2000.0)
    assert (first.make, first.remove) == ((NAME(1),), ())
    coming = decided(1, old, warm(1, running=False, made=1999.0), now=2000.0)
    assert (coming.make, coming.remove) == ((), ())
    there = decided(1, old, warm(1, made=1999.0), now=2000.0)
    assert removed(there) == ["u0"]


def test_a_pod_that_is_being_removed_counts_no_more_but_keeps_its_name() -> None:
    found = decided(1, warm(0, deleting=True))
    assert (found.make, found.remove) == ((NAME(1),), ())


# --- refusals


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (409, "already exists", "CONFLICT"),
        (403, "exceeded quota: pods", "BUSY"),
        (403, "violates PodSecurity", "BACKEND_UNAVAILABLE"),
        (422, "invalid", "BACKEND_UNAVAILABLE"),
        (500, "oops", "BACKEND_UNAVAILABLE"),
    ],
)
def test_why_a_pod_was_not_made(status: int, message: str, code: str) -> None:
    assert not_made(Refusal(status, "", message)).code == code


def test_cannot_run_with_an_agent_that_keeps_less_than_was_asked_for() -> None:
    """The agent was told; what it says of itself decides."""
    off, public = sandbox(), sandbox(network=Network(mode="public"))
    check({"network": "netns", "filesystem": "bwrap"}, off)
    check({"network": "seccomp"}, off)
    check({"network": "pod"}, public)
    for kept in ({}, {"network": "pod"}, {"network": ""}):
        with pytest.raises(Problem, match="network"):
            check(kept, off)
    required = sandbox(inner="required")
    check({"network": "netns", "filesystem": "bwrap"}, required)
    with pytest.raises(Problem, match="bwrap"):
        check({"network": "seccomp", "filesystem": "pod"}, required)


def test_a_warm_pod_counts_as_ready_when_it_can_be_taken() -> None:
    """One that runs before it has its seal is still coming up: nobody would be given it."""
    surroundings, seal = around(), Seal(b"k" * 32)
    wanted = shape(surroundings)
    runs = Pod(
        name="a", uid="a", state=WARM, shape=wanted.hash, phase="Running", running=True, ip="::1"
    )
    sealed = runs.replace(uid="b", seal=seal.of("b"))
    copied = runs.replace(uid="c", seal=sealed.seal)
    comes = runs.replace(uid="d", seal=seal.of("d"), running=False)
    cache: Any = SimpleNamespace(pods={pod.uid: pod for pod in (runs, sealed, copied, comes)})
    nothing: Any = None
    pool = Pool(nothing, cache, nothing, surroundings, nothing, seal=seal)
    pool._wanted = {wanted: Wanted(count=4, templates=("t",))}
    found = pool.gauges()
    assert found['pool_ready{template="t"}'] == 1
    assert found['pool_starting{template="t"}'] == 3
    assert cache.trusts(sealed)
    assert not cache.trusts(copied)


@pytest.mark.parametrize("strangers", [0, 1])
def test_cannot_jam_the_pool_with_pods_that_say_they_are_warm(strangers: int) -> None:
    """Their labels are right, their seal is not; one has the last number that a name can have."""
    surroundings, seal = around(), Seal(b"k" * 32)
    wanted = shape(surroundings)
    named = partial(kube_pods.warm_name, surroundings, wanted)
    made: list[str] = []

    async def create(_path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        made.append(name)
        if name in taken:
            raise Refusal(409, "AlreadyExists", "no")
        return {**body, "metadata": {**body["metadata"], "uid": name}}

    async def patch(path: str, _body: object, **_: object) -> dict[str, Any]:
        return {"metadata": {"name": path, "uid": path}}

    # The second has no label of ours, so that nobody sees it.
    taken = {named(1)}
    foreign = [
        Pod(name=named(10**17 - 1), uid=f"f{n}", state=WARM, shape=wanted.hash, made=1e12, ip="::1")
        for n in range(strangers)
    ]
    mine = Pod(name=named(0), uid="m", state=WARM, shape=wanted.hash, made=1e12, seal=seal.of("m"))
    cache: Any = SimpleNamespace(
        pods={pod.uid: pod for pod in (*foreign, mine)}, current=True, put=lambda _pod: None
    )
    api: Any = SimpleNamespace(create=create, patch=patch, path=lambda _plural, name="": name)
    nothing: Any = None
    pool = Pool(
        api, cache, nothing, surroundings,
        lambda one: kube_pods.manifest(one, surroundings, uid=2_000_001), seal=seal,
    )  # fmt: skip
    pool._wanted = {wanted: Wanted(count=2, templates=("t",))}
    for _ in range(3):
        asyncio.run(pool.tend())
    # The first name is somebody's; the next one is free, and is what every replica would take.
    assert made[:2] == [named(1), named(2)]
