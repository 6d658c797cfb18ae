"""What a sandbox is as a pod: whole manifests, and what may never be in one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_objects, kube_pods, pod_env
from agent_sandbox.service.backend.kube_objects import SANDBOX, STATE, WARM
from agent_sandbox.service.backend.kube_pods import Surroundings
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network, Resources

from .scene import AGENT, BASE, around, sandbox, shape

GOLDEN = Path(__file__).parent / "golden"
# name → (settings, what the shape has)
MANIFESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "foreign": ({"agent_image": AGENT}, {"agent": False}),
    "everything": (
        {
            "seccomp": "localhost/agent-sandbox.json", "user_namespaces": True,
            "service_account": "nobody", "priority_class": "low", "pull_secrets": ("pull",),
            "node_selector": {"pool": "sandboxes"}, "tolerate": {"dedicated": "sandboxes"},
            "nameservers": ("9.9.9.9",), "network_policy": "enforced", "cpu_share": 1.0,
            "memory_share": 1.0, "hard_seconds": 7200.0, "warm_seconds": 600.0,
        },
        {"runtime": "gvisor", "network": "public"},
    ),
    "unbounded": ({}, {"resources": Resources()}),
}  # fmt: skip


def made(name: str) -> dict[str, Any]:
    settings, wish = MANIFESTS[name]
    surroundings = around(**settings)
    uid = kube_pods.choose_uid(surroundings.settings, lambda _most: 1)
    return kube_pods.manifest(shape(surroundings, **wish), surroundings, uid=uid)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_as_it_was_when_somebody_read_it(name: str) -> None:
    """A change shows in review: AGENT_SANDBOX_GOLDEN=write makes the files anew."""
    found = json.dumps(made(name), indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("AGENT_SANDBOX_GOLDEN") == "write":
        path.write_text(found)
    assert found == path.read_text()


def containers(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*body["spec"]["containers"], *body["spec"].get("initContainers", [])]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_pod_is_what_pod_security_calls_restricted(name: str) -> None:
    """By the published table of the standard, not by our own words."""
    body = made(name)
    spec = body["spec"]
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} == {"emptyDir"}
    for one in containers(body):
        context = one["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert context["privileged"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in one.get("ports", []))
        assert "procMount" not in context


@pytest.mark.parametrize("number", [0, 1 << 62])
def test_a_uid_is_no_persons_and_one_that_the_pod_has(number: int) -> None:
    """With `hostUsers: false` a pod has 65536 of them; a start with any other fails."""

    def below(most: int) -> int:
        return min(number, most - 1)

    assert 2_000_000 <= kube_pods.choose_uid(around().settings, below) < 1 << 31
    assert 1000 <= kube_pods.choose_uid(around(user_namespaces=True).settings, below) < 65534


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_holds_no_credential_and_cannot_outlive_its_installation(name: str) -> None:
    body = made(name)
    spec = body["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert 0 < spec["activeDeadlineSeconds"] <= 7 * 86400
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("ConfigMap", "0b5e-owner")
    for one in containers(body):
        assert "envFrom" not in one
        assert not any("valueFrom" in variable for variable in one.get("env", []))
        assert "@sha256:" in one["image"]


def test_only_public_values_are_in_the_environment() -> None:
    (one,) = made("plain")["spec"]["containers"]
    assert {v["name"]: v["value"] for v in one["env"]} == pod_env.env(around().authority, 3600)
    assert "PRIVATE" not in json.dumps(made("plain"))


def test_what_an_agent_says_never_becomes_a_label_or_a_variable() -> None:
    """Its name is hashed, its metadata and variables stay with the service."""
    mine = sandbox(
        owner="alice; rm -rf", metadata={"team": "secret-team"}, env={"TOKEN": "secret-token"}
    )
    labels, notes = kube_pods.claim_labels(mine), kube_pods.claim_notes(0.0)
    body = kube_pods.named(made("plain"), "sandbox-1", labels, notes)
    written = json.dumps(body)
    assert mine.id in written
    assert not any(word in written for word in ("rm -rf", "secret-team", "secret-token"))
    assert all(
        len(value) <= 63 and value.replace("-", "").replace("_", "").isalnum()
        for value in labels.values()
    )


def test_an_image_without_a_digest_is_refused() -> None:
    with pytest.raises(Problem, match="pinned"):
        shape(around(), image="registry.example/base:latest")


def test_an_image_without_the_agent_is_refused_where_nobody_brings_it() -> None:
    surroundings = around()
    with pytest.raises(Problem, match="has no agent"):
        shape(surroundings, agent=False)


HASHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image": ({}, {"image": BASE.replace("ab", "ac")}),
    "runtime": ({}, {"runtime": "kata"}),
    "network": ({}, {"network": "public"}),
    "memory": ({}, {"resources": Resources(memory=1 << 30, cpus=0.5, disk=128 << 20)}),
    "disk": ({}, {"resources": Resources(memory=256 << 20, cpus=0.5, disk=1 << 30)}),
    "cpus": ({}, {"resources": Resources(memory=256 << 20, cpus=2, disk=128 << 20)}),
    "seccomp": ({"seccomp": "localhost/a.json"}, {}),
    "deadline": ({"hard_seconds": 10.0}, {}),
}


@pytest.mark.parametrize("name", HASHED)
def test_pods_that_differ_never_stand_for_each_other(name: str) -> None:
    settings, wish = HASHED[name]
    plain = around()
    assert shape(plain).hash == shape(plain).hash
    assert shape(around(**settings), **wish).hash != shape(plain).hash


def test_the_number_of_processes_is_told_to_the_agent_and_not_to_the_pod() -> None:
    plain = around()
    fewer = Resources(memory=256 << 20, cpus=0.5, pids=8, disk=128 << 20)
    assert shape(plain, resources=fewer) == shape(plain)


def test_another_service_makes_other_pods() -> None:
    plain = around()
    other: Surroundings = plain.replace(authority="another")
    assert shape(plain).hash != shape(other).hash


def test_a_claim_tests_the_pod_and_its_state_before_it_changes_anything() -> None:
    patch = kube_pods.claim_patch("uid-1", sandbox(), 0.0)
    tests = [step for step in patch if step["op"] == "test"]
    assert patch[: len(tests)] == tests
    assert [step["value"] for step in tests] == ["uid-1", WARM]
    assert {step["path"] for step in patch[2:]} >= {
        f"/metadata/labels/{STATE.replace('/', '~1')}",
        f"/metadata/labels/{SANDBOX.replace('/', '~1')}",
    }


def test_names_fit_into_a_label_of_dns() -> None:
    surroundings = around()
    names = (
        kube_pods.cold_name(surroundings, sandbox().id),
        kube_pods.warm_name(surroundings, shape(surroundings), 10**9),
    )
    for name in names:
        assert len(name) <= 63
        assert name.replace("-", "").isalnum()
        assert name == name.lower()
    assert kube_pods.warm_number(names[1]) == 10**9
    assert kube_pods.warm_number("sandbox-a-b") == -1


def test_requests_are_a_share_and_limits_are_whole() -> None:
    surroundings = around(cpu_share=0.5, memory_share=0.25)
    found = kube_pods.resources(shape(surroundings), surroundings.settings)
    memory = 256 << 20
    assert found["limits"]["cpu"] == "500m"
    assert found["requests"]["cpu"] == "250m"
    assert int(found["limits"]["memory"]) == memory + kube_pods.OVERHEAD
    assert int(found["requests"]["memory"]) == memory // 4 + kube_pods.OVERHEAD
    # The service's bound comes first: the kubelet's ends the whole pod.
    assert int(found["limits"]["ephemeral-storage"]) > 128 << 20


def test_a_pod_without_a_network_has_nobody_to_ask_for_names() -> None:
    assert kube_pods.names(Network().mode, ("9.9.9.9",))["dnsConfig"]["nameservers"] == [
        "127.0.0.1"
    ]
    assert kube_pods.names("public", ("9.9.9.9",))["dnsConfig"]["nameservers"] == ["9.9.9.9"]
    assert kube_pods.names("public", ()) == {"dnsPolicy": "Default"}


def test_no_image_can_know_where_the_agents_files_are() -> None:
    """It could have a volume mounted over them."""

    def root(image: str, secret: bytes, *, agent: bool = False) -> str:
        here = around(agent_image=AGENT).replace(secret=secret)
        body = kube_pods.manifest(shape(here, image=image, agent=agent), here, uid=1)
        (one,) = body["spec"]["containers"]
        found = pod_env.root_of(one["command"][0])
        mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
        assert (found in mounts) is not agent
        assert one["command"] == list(pod_env.command(found))
        return found

    other = BASE.replace("ab", "ac")
    assert root(BASE, b"k") == root(BASE, b"k")
    assert len({root(BASE, b"k"), root(other, b"k"), root(BASE, b"l")}) == 3
    # The operator says of an image that the agent is in it, and where is known.
    assert root(BASE, b"k", agent=True) == pod_env.ROOT


def test_the_bridge_is_of_the_pods_own_files() -> None:
    here = around(agent_image=AGENT).replace(secret=b"k")
    body = kube_pods.manifest(shape(here, agent=False), here, uid=1)
    pod = kube_objects.pod(body)
    root = pod_env.root_of(pod.entry)
    assert root.startswith(f"{pod_env.ROOT}-")
    assert pod_env.connect(root)[0] == f"{root}/bin/enter"
    assert pod_env.connect(pod_env.root_of("")) == pod_env.CONNECT
