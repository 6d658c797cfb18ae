"""deploy/ on a real API server with RBAC: it takes the manifests, and keeps the service's rights.

Kubernetes 1.20 has PodDisruptionBudget in policy/v1beta1 alone; there it is taken as that. The
Prometheus operator's resources are not applied: their schemas are not Kubernetes'.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.service.backend import kube_claim_objects as resources
from agent_sandbox.service.backend.kube_api import MERGE_PATCH, Api
from agent_sandbox.service.backend.kube_config import Access
from agent_sandbox.service.backend.kube_credentials import Credentials
from agent_sandbox.service.backend.kube_http import Http, Refusal
from agent_sandbox.service.backend.kube_pods import Surroundings, manifest, named, shape_of
from agent_sandbox.service.backend.kube_settings import KubeSettings
from agent_sandbox.service.values import Resources
from conftest import ROOT, must_work

from . import calls, ground
from .manifests import BASE, DEPLOY, PODS, SERVICE, documents, kustomized, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BACKEND = ROOT / "src" / "agent_sandbox" / "service" / "backend"
ACCOUNT = f"/api/v1/namespaces/{SERVICE}/serviceaccounts/agent-sandbox/token"
GROUPS = {
    "sandboxclaims": resources.EXTENSIONS, "sandboxtemplates": resources.EXTENSIONS,
    "sandboxwarmpools": resources.EXTENSIONS, "sandboxes": resources.CORE,
    "deployments": "apps", "roles": "rbac.authorization.k8s.io",
    "rolebindings": "rbac.authorization.k8s.io", "clusterroles": "rbac.authorization.k8s.io",
    "networkpolicies": "networking.k8s.io", "jobs": "batch",
    "customresourcedefinitions": "apiextensions.k8s.io", "*": "*",
}  # fmt: skip
# What somebody with more rights than ours would like to have.
OTHERS = (
    "secrets", "services", "serviceaccounts", "serviceaccounts/token", "namespaces", "events",
    "persistentvolumes", "pods/ephemeralcontainers", "pods/attach", "pods/portforward",
    "pods/status", "pods/eviction", "nodes/proxy", "deployments", "roles", "rolebindings",
    "clusterroles", "networkpolicies", "jobs", "customresourcedefinitions", "*",
)  # fmt: skip
VERBS = (
    "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "bind",
    "escalate", "impersonate", "*",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ground.Cluster]:
    must_work(not ground.missing(alone=True), ground.missing(alone=True))
    with ground.running(alone=True) as cluster:
        yield cluster


def taken(found: list[dict[str, Any]]) -> str:
    """As this API server knows it."""
    for one in found:
        if one["kind"] == "PodDisruptionBudget":
            assert one["apiVersion"] == "policy/v1"
            one["apiVersion"] = "policy/v1beta1"
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": found})


@pytest.fixture(scope="module")
def installed(server: ground.Cluster) -> ground.Cluster:
    """The base, applied."""
    found = kustomized(BASE)
    spaces = [one for one in found if one["kind"] == "Namespace"]
    server.kubectl("apply", "-f", "-", input=taken(spaces))
    text = taken(found)
    server.kubectl("apply", "--dry-run=server", "-f", "-", input=text)
    server.kubectl("apply", "-f", "-", input=text)
    return server


def test_the_api_server_takes_the_chart_and_all_options(
    installed: ground.Cluster, tmp_path: Path
) -> None:
    found = rendered("--set", "quota.enabled=true,autoscaling.enabled=true", home=tmp_path)
    said = installed.kubectl("apply", "--dry-run=server", "-f", "-", input=taken(found))
    assert said.count("server dry run") == len(found)
    assert "horizontalpodautoscaler" in said
    assert "resourcequota" in said
    # A control: a field that nobody knows, and a value that is wrong, are refused.
    for where, wrong in (("replicaz", 2), ("replicas", "many")):
        broken = [one for one in found if one["kind"] == "Deployment"]
        broken[0]["spec"][where] = wrong
        with pytest.raises(RuntimeError):
            installed.kubectl("apply", "--dry-run=server", "-f", "-", input=taken(broken))
        del broken[0]["spec"][where]


def test_the_api_server_takes_profile_and_runtimes(installed: ground.Cluster) -> None:
    found = kustomized(DEPLOY / "seccomp")
    spaces = [one for one in found if one["kind"] == "Namespace"]
    installed.kubectl("apply", "-f", "-", input=taken(spaces))
    examples = documents((DEPLOY / "examples" / "runtimeclasses.yaml").read_text())
    text = taken([*found, *examples])
    said = installed.kubectl("apply", "--dry-run=server", "-f", "-", input=text)
    assert said.count("server dry run") == len(found) + len(examples)


# --- rights


@pytest.fixture(scope="module")
def token(installed: ground.Cluster) -> str:
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(installed.api("POST", ACCOUNT, request)["status"]["token"])


class Reviews:
    """What the API server says that a token may do. No certificate: the token tells who asks."""

    def __init__(self, server: ground.Cluster, token: str) -> None:
        trust = ssl.create_default_context(cafile=str(server.keys / "ca.crt"))
        self.line = http.client.HTTPSConnection(server.net.control, context=trust, timeout=30)
        self.token = token

    def allowed(self, namespace: str, resource: str, verb: str) -> bool:
        plural, _, sub = resource.partition("/")
        asked = {"namespace": namespace, "verb": verb, "resource": plural, "subresource": sub,
                 "group": GROUPS.get(plural, "")}  # fmt: skip
        if plural == "configmaps":
            asked["name"] = "agent-sandbox-owner"
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        self.line.request("POST", path, json.dumps(review), headers)
        answer = self.line.getresponse()
        data = answer.read()
        assert answer.status == 201, data
        return bool(json.loads(data)["status"]["allowed"])


def test_what_the_code_asks_for_is_allowed_and_nothing_else(
    installed: ground.Cluster, token: str
) -> None:
    used = calls.made(BACKEND) - {("configmaps", "create")}
    nodes = {call for call in used if call[0] == "nodes"}
    tried = {*(resource for resource, _ in used), *OTHERS}
    reviews = Reviews(installed, token)
    with contextlib.closing(reviews.line):
        for namespace in (PODS, SERVICE, "kube-system", ""):
            here = used if namespace == PODS else nodes
            every = {(r, v) for r in tried for v in VERBS if reviews.allowed(namespace, r, v)}
            assert every == here, namespace


def pod(name: str) -> dict[str, Any]:
    around = Surroundings(
        settings=KubeSettings(), namespace=PODS, installation="abcdefghij", authority="CA"
    )
    shape = shape_of(
        "registry.example/base@sha256:" + "a" * 64, agent=True, runtime="", network="off",
        resources=Resources(memory=1 << 28, cpus=1.0, pids=64, disk=1 << 28), around=around,
    )  # fmt: skip
    return named(manifest(shape, around, uid=2_000_001), name, {}, {})


def test_the_services_own_client_does_its_work_with_its_own_token(
    installed: ground.Cluster, token: str
) -> None:
    access = Access(
        host=installed.net.control, port=443, token=token, namespace=PODS,
        authority=(installed.keys / "ca.crt").read_text(),
    )  # fmt: skip

    async def work() -> None:
        wire = Http(access, Credentials(access, {}))
        api = Api(wire, PODS)
        try:
            await api.get(api.path("configmaps", "agent-sandbox-owner"))
            await api.create(api.path("pods"), pod("one"))
            found, version = await api.list(api.path("pods"))
            assert len(found) == 1
            await api.patch(
                api.path("pods", "one"), {"metadata": {"labels": {"a": "b"}}}, kind=MERGE_PATCH
            )
            async for event in api.watch(api.path("pods"), version):
                assert event.kind == "MODIFIED"
                break
            await api.list("/api/v1/nodes")
            # No kubelet is there; but nobody says that we may not ask.
            assert await api.log("one", "agent", 100) == ""
            assert await api.delete(api.path("pods", "one"), grace=0)
            for path in (
                api.path("secrets"), f"/api/v1/namespaces/{SERVICE}/secrets", "/api/v1/secrets",
                f"/api/v1/namespaces/{SERVICE}/pods", "/api/v1/namespaces/kube-system/pods",
                api.path("configmaps"), api.path("configmaps", "other"),
            ):  # fmt: skip
                with pytest.raises(Refusal) as caught:
                    await api.get(path)
                assert caught.value.status == 403, path
        finally:
            await wire.close()

    asyncio.run(asyncio.wait_for(work(), 60))
