"""SandboxTemplate, SandboxWarmPool and SandboxClaim as we write them; against no API server."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from agent_sandbox.policy import addresses
from agent_sandbox.service.backend import kube_claim_objects as resources
from agent_sandbox.service.backend import kube_claims, pod_env
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_pods import Surroundings, manifest, shape_of
from agent_sandbox.service.backend.kube_settings import KubeSettings
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Resources
from conftest import ROOT

CRDS = ROOT / "tests" / "cluster" / "crds"
AROUND = Surroundings(
    settings=KubeSettings(), namespace="pods", installation="abcdefghij", authority="CA",
    owner_name="agent-sandbox", owner_uid="u-1",
)  # fmt: skip
IMAGE = "registry.example/base@sha256:" + "a" * 64


def shape(network: str = "off", memory: int = 1 << 28) -> Any:
    return shape_of(
        IMAGE, agent=True, runtime="", network=network,
        resources=Resources(memory=memory, cpus=1.0, pids=64, disk=1 << 28), around=AROUND,
    )  # fmt: skip


def objects(version: str) -> dict[str, Any]:
    one = shape()
    name, uid = resources.source(one, AROUND)
    return {
        "sandboxtemplates": resources.template(name, version, one, AROUND, uid=uid),
        "sandboxwarmpools": resources.pool(name, version, one, AROUND, replicas=3),
        "sandboxclaims": resources.claim(
            "sbx-1", version, AROUND, source=name, warm=True, sandbox="sbx-1", expires=1000.5
        ),
    }


# --- discovery


class Served:
    """An API server that has these documents."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents

    async def get(self, path: str) -> object:
        if path not in self.documents:
            raise Refusal(404, "NotFound", path)
        return self.documents[path]


def discovery(*versions: str, without: str = "") -> Any:
    found: dict[str, Any] = {}
    for group, names in (
        (resources.EXTENSIONS, resources.NEEDED), (resources.CORE, (resources.SANDBOXES,)),
    ):  # fmt: skip
        found[f"/apis/{group}"] = {"versions": [{"version": v} for v in versions]}
        for version in versions:
            found[f"/apis/{group}/{version}"] = {
                "resources": [{"name": name} for name in names if name != without]
            }
    return Served(found)


def discover(api: Any, setting: str = "auto") -> resources.Served | None:
    return asyncio.run(kube_claims.discover(api, setting))


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (("v1beta1",), "v1beta1"),
        (("v1alpha1",), "v1alpha1"),
        (("v1alpha1", "v1beta1", "v9"), "v1beta1"),
    ],
)
def test_the_newest_version_that_we_know_is_used(versions: tuple[str, ...], chosen: str) -> None:
    assert discover(discovery(*versions)) == resources.Served(extensions=chosen, core=chosen)


@pytest.mark.parametrize(
    "api",
    [
        Served({}),
        discovery("v9"),
        discovery("v1beta1", without="sandboxwarmpools"),
        discovery("v1beta1", without="sandboxes"),
    ],
)
def test_without_all_of_it_auto_does_without_and_on_says_what_is_missing(api: Any) -> None:
    assert discover(api) is None
    with pytest.raises(Problem, match="has no SandboxClaims: sandbox") as caught:
        discover(api, "on")
    assert "kubernetes-sigs/agent-sandbox" in caught.value.hint


def test_off_asks_nothing() -> None:
    assert discover(None, "off") is None


def test_a_cluster_that_does_not_answer_is_no_cluster_without_claims() -> None:
    class Broken:
        async def get(self, path: str) -> object:
            raise Refusal(500, "InternalError", path)

    with pytest.raises(Refusal):
        discover(Broken())


# --- objects


def test_a_template_has_our_pod_but_for_what_is_one_pods_own() -> None:
    one = shape()
    name, uid = resources.source(one, AROUND)
    found = resources.template(name, "v1beta1", one, AROUND, uid=uid)["spec"]
    ours = manifest(one, AROUND, uid=uid)
    spec = found["podTemplate"]["spec"]
    waits = {"AGENT_SANDBOX_UNCLAIMED": str(resources.UNCLAIMED_SECONDS)}
    given = {e["name"]: e["value"] for e in ours["spec"]["containers"][0]["env"]}
    assert {e["name"]: e["value"] for e in spec["containers"][0]["env"]} == {**given, **waits}
    for whole in (spec, ours["spec"]):
        whole["containers"][0].pop("env")
    ours["spec"].pop("activeDeadlineSeconds")
    assert spec == ours["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert found["podTemplate"]["metadata"]["labels"] == ours["metadata"]["labels"]
    assert found["networkPolicyManagement"] == "Unmanaged"
    assert found["envVarsInjectionPolicy"] == "Disallowed"
    assert found["networkPolicy"]["egress"] == []
    assert found["networkPolicy"]["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": pod_env.PORT}]}
    ]


def test_a_pool_and_a_claim_in_both_versions() -> None:
    beta, alpha = objects("v1beta1"), objects("v1alpha1")
    name = beta["sandboxtemplates"]["metadata"]["name"]
    assert beta["sandboxwarmpools"]["spec"] == {
        "replicas": 3, "sandboxTemplateRef": {"name": name},
        "updateStrategy": {"type": "OnReplenish"},
    }  # fmt: skip
    # The end is rounded up, and later than the agent's own.
    shared = {
        "lifecycle": {
            "shutdownTime": "1970-01-01T00:17:41Z", "shutdownPolicy": "Delete",
            "ttlSecondsAfterFinished": 60,
        },
        "additionalPodMetadata": {"annotations": {"agent-sandbox.dev/sandbox": "sbx-1"}},
    }  # fmt: skip
    assert beta["sandboxclaims"]["spec"] == {"warmPoolRef": {"name": name}, **shared}
    assert alpha["sandboxclaims"]["spec"] == {
        "sandboxTemplateRef": {"name": name}, "warmpool": name, **shared,
    }  # fmt: skip
    cold = resources.claim(
        "c", "v1alpha1", AROUND, source=name, warm=False, sandbox="c", expires=0.0
    )
    assert cold["spec"]["warmpool"] == "none"
    for one in (*beta.values(), *alpha.values()):
        assert one["metadata"]["ownerReferences"][0]["uid"] == "u-1"
        assert one["metadata"]["labels"]["agent-sandbox.dev/installation"] == "abcdefghij"


def test_another_pod_has_another_name_and_the_same_pod_the_same() -> None:
    names = {
        resources.source(one, around)
        for one in (shape(), shape("public"), shape(memory=1 << 29))
        for around in (AROUND, AROUND.replace(installation="zzzzzzzzzz"))
    }
    assert len({name for name, _ in names}) == 6
    assert resources.source(shape(), AROUND) == resources.source(shape(), AROUND)
    later = AROUND.replace(settings=KubeSettings(seccomp="localhost/x.json"))
    assert resources.source(shape(), later)[0] not in {name for name, _ in names}


def published(version: str, plural: str) -> Any:
    paths = [*(CRDS / version).glob(f"*_{plural}.yaml")]
    assert len(paths) == 1
    document = YAML(typ="safe").load(paths[0])
    return document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def check(value: Any, schema: Any, path: str) -> None:
    """Every field is one of the schema's: an API server would drop others without a word."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value), path
        for name, one in value.items():
            assert name in schema["properties"], f"{path}.{name}"
            check(one, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        for one in value:
            check(one, schema["items"], f"{path}[]")
    elif isinstance(value, dict):
        assert schema["additionalProperties"]["type"] == "string"
    else:
        kinds = {"string": str, "integer": int, "boolean": bool}
        assert isinstance(value, kinds[schema["type"]]), path
        assert value in schema.get("enum", (value,)), path


@pytest.mark.parametrize("version", resources.VERSIONS)
@pytest.mark.parametrize("plural", resources.NEEDED)
def test_only_published_fields_are_used(version: str, plural: str) -> None:
    document = objects(version)[plural]
    schema = published(version, plural)["properties"]["spec"]
    check(document["spec"], schema, plural)
    # A control: the check sees a field that nobody knows.
    with pytest.raises(AssertionError, match=r"\.nonsense"):
        check({**document["spec"], "nonsense": 1}, schema, plural)


def test_nothing_secret_is_in_any_object() -> None:
    settings = AROUND.settings.replace(pull_secrets=("registry",))
    written = json.dumps(objects("v1beta1")) + json.dumps(
        manifest(shape(), AROUND.replace(settings=settings), uid=1)
    )
    assert "secretKeyRef" not in written
    assert "valueFrom" not in written


# --- what the controller says


def test_how_claim_sandbox_and_pod_hang_together() -> None:
    assert resources.sandbox_of(None) == ""
    assert resources.sandbox_of({"status": {"sandbox": {"name": "a"}}}) == "a"
    assert resources.sandbox_of({"status": {"sandbox": {"Name": "b"}}}) == "b"
    assert resources.sandbox_of({"status": {"sandbox": {"name": ["x"]}}}) == ""
    assert resources.pod_of({"metadata": {"name": "s"}}) == "s"
    noted = {"metadata": {"name": "s", "annotations": {"agents.x-k8s.io/pod-name": "p"}}}
    assert resources.pod_of(noted) == "p"


@pytest.mark.parametrize("reason", sorted(resources.HOPELESS))
def test_what_no_waiting_changes_is_said(reason: str) -> None:
    said = {"type": "Ready", "status": "False", "reason": reason, "message": "words"}
    problem = resources.hopeless({"status": {"conditions": [said]}})
    assert problem is not None
    assert "words" in problem.message
    assert reason in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    "reason",
    ["SandboxMissing", "ReconcilerError", "AdoptionConflict", *sorted(resources.UNFOUNDED)],
)
def test_what_may_still_change_is_waited_for(reason: str) -> None:
    said = {"type": "Ready", "status": "False", "reason": reason, "message": ""}
    assert resources.hopeless({"status": {"conditions": [said]}}) is None


# --- addresses


def test_public_reaches_no_private_link_local_or_metadata_address() -> None:
    (rule,) = resources.egress("public")
    blocks = [
        (ipaddress.ip_network(one["ipBlock"]["cidr"]),
         [ipaddress.ip_network(text) for text in one["ipBlock"]["except"]])
        for one in rule["to"]
    ]  # fmt: skip

    def reaches(text: str) -> bool:
        found = ipaddress.ip_address(text)
        return any(
            found.version == whole.version and found in whole
            and not any(found in part for part in parts if part.version == found.version)
            for whole, parts in blocks
        )  # fmt: skip

    closed = [
        *addresses.METADATA_ADDRESSES, "10.0.0.1", "172.31.255.255", "192.168.1.1", "127.0.0.1",
        "100.64.0.1", "169.254.1.1", "224.0.0.1", "fd00::1", "fe80::1", "::1", "::ffff:10.0.0.1",
        "64:ff9b::a00:1", "2002:a00:1::1", "0.0.0.0",
    ]  # fmt: skip
    assert [text for text in closed if reaches(text)] == []
    assert all(map(reaches, ("1.1.1.1", "8.8.8.8", "2606:4700::1111", "168.63.129.17")))
    # What an API server asks for: each exception lies within its block.
    assert all(part.subnet_of(whole) for whole, parts in blocks for part in parts)  # type: ignore[arg-type]


def test_the_schemas_say_which_release_they_follow() -> None:
    for path in sorted(CRDS.glob("*/*.yaml")):
        assert "docs/api.md at commit" in path.read_text(), path
    assert {Path(p).parent.name for p in CRDS.glob("*/*.yaml")} == set(resources.VERSIONS)
