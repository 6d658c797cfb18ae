"""The custom resources of kubernetes-sigs/agent-sandbox: what we write there, and read. Pure.

The names of fields are those of `extensions.agents.x-k8s.io` v1beta1, and of v1alpha1 before it:
a SandboxTemplate holds our pod, a SandboxWarmPool keeps some of them running, a SandboxClaim takes
one. The project's controller binds claim → Sandbox → pod. A pod of it differs from one of ours:

- All pods of a template have one uid: it is in the template, and a claim changes no spec. So
  RLIMIT_NPROC would count the processes of all of them on a node.
- There is no activeDeadlineSeconds: it counts from the pod's start, and a pod may wait long in a
  pool. The claim's shutdownTime is the hard end instead; the agent keeps the lease as ever.
- It does not end by itself while nobody claims it: not every release of the controller replaces a
  pod that has ended.
- A claim may give a pod annotations, but labels only of domains that the controller's operator has
  allowed. So the id is an annotation first, and the service adds its labels when it has the pod.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network

from ...pod import terms
from ...policy import addresses
from ...record import Record
from ..problems import Problem
from . import kube_pods as pods
from .kube_objects import INSTALLATION, MOST_TEXT, SANDBOX, items, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .kube_pods import Shape, Surroundings

    Json = dict[str, Any]

EXTENSIONS, CORE = "extensions.agents.x-k8s.io", "agents.x-k8s.io"
# Newest first. v1beta1 claims name a pool, v1alpha1 claims a template.
BETA, ALPHA = "v1beta1", "v1alpha1"
VERSIONS = (BETA, ALPHA)
NEEDED = ("sandboxclaims", "sandboxtemplates", "sandboxwarmpools")
SANDBOXES = "sandboxes"

# Where the controller tells which pod a Sandbox has; without it the pod has the Sandbox's name.
POD_NAME = "agents.x-k8s.io/pod-name"
# How long the agent of a pod waits for its claim.
UNCLAIMED_SECONDS = 30 * 86400
# The agent ends with its lease; the controller's clock, and its queue, may be behind by this much.
LATER = 60.0
# How long a claim stays whose pod has ended: we read from the pod why, then delete it ourselves.
FINISHED_SECONDS = 60
# Reasons of the condition Ready that no waiting changes, with what helps.
HOPELESS: Mapping[str, str] = {
    "InvalidMetadata": "the controller refuses what a claim says about its pod",
    "EnvVarsInjectionRejected": "the controller refuses variables of a claim",
    "VolumeClaimTemplatesError": "the controller refuses volumes of a claim",
    "ClaimExpired": "the claim's end has passed: compare the clocks of service and cluster",
    "SandboxExpired": "its Sandbox has a time of its own that has passed",
}


# Reasons that mean: make template and pool again. Another replica thought that nobody needs them.
UNFOUNDED = frozenset({"WarmPoolNotFound", "TemplateNotFound"})


class Served(Record):
    """The versions that a cluster serves: of the extensions, and of Sandbox itself."""

    extensions: str
    core: str

    def path(self, namespace: str, plural: str, name: str = "") -> str:
        """Where a resource is; with a name, one object."""
        group, version = (CORE, self.core) if plural == SANDBOXES else (EXTENSIONS, self.extensions)
        base = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        return f"{base}/{name}" if name else base


# --- discovery


def version_of(group: object) -> str:
    """The newest version of an APIGroup document that we know; "" without one."""
    names = {text(one, "version") for one in items(group, "versions")}
    return next((version for version in VERSIONS if version in names), "")


def missing(resources: object, needed: Sequence[str] = NEEDED) -> tuple[str, ...]:
    """What an APIResourceList lacks of what we need."""
    names = {text(one, "name") for one in items(resources, "resources")}
    return tuple(name for name in needed if name not in names)


def absent(why: str) -> Problem:
    """Claims are asked for, and the cluster has none."""
    return Problem(
        "BACKEND_UNAVAILABLE", f"KUBERNETES_CLAIMS=on, but the cluster has no SandboxClaims: {why}",
        hint="install kubernetes-sigs/agent-sandbox with its extensions (SandboxTemplate, "
        "SandboxWarmPool, SandboxClaim), or set KUBERNETES_CLAIMS=auto",
    )  # fmt: skip


# --- objects


def pod_spec(shape: Shape, around: Surroundings, *, uid: int) -> Json:
    """The spec of our pod, as a template has it."""
    spec: Json = pods.manifest(shape, around, uid=uid)["spec"]
    del spec["activeDeadlineSeconds"]
    for container in spec["containers"]:
        container["env"] = [
            {**one, "value": str(UNCLAIMED_SECONDS)} if one["name"] == terms.UNCLAIMED else one
            for one in container["env"]
        ]
    return spec


def source(shape: Shape, around: Surroundings) -> tuple[str, int]:
    """The name of a shape's template and pool, and the uid of its pods: of all that is in them.

    A name stands for one content, whichever replica or release makes it first.
    """
    held = [around.installation, shape.network, pod_spec(shape, around, uid=pods.FIRST_UID)]
    written = json.dumps(held, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(written.encode())
    name = f"sandbox-{around.installation[:8]}-{digest.hexdigest()[:16]}"
    number = int.from_bytes(digest.digest()[:8])
    return name, pods.choose_uid(around.settings, lambda most: number % most)


def template(name: str, version: str, shape: Shape, around: Surroundings, *, uid: int) -> Json:
    """A SandboxTemplate.

    Network policies are ours (deploy/), by labels: with `Managed`, the controller's default would
    let every pod reach the whole Internet, since policies add up. Releases before that field drop
    it, and read `networkPolicy`, which therefore says the same; the others ignore it.
    """
    labels = labels_of(shape, around)
    return {
        "apiVersion": f"{EXTENSIONS}/{version}", "kind": "SandboxTemplate",
        "metadata": _metadata(name, labels, around),
        "spec": {
            "podTemplate": {
                "metadata": {"labels": labels}, "spec": pod_spec(shape, around, uid=uid),
            },
            "networkPolicyManagement": "Unmanaged",
            "networkPolicy": {
                "ingress": [{"ports": [{"protocol": "TCP", "port": terms.PORT}]}],
                "egress": egress(shape.network),
            },
            # Nothing of a claim gets into a pod's environment, and no Service leads to a pod.
            "envVarsInjectionPolicy": "Disallowed",
            "service": False,
        },
    }  # fmt: skip


def labels_of(shape: Shape, around: Surroundings) -> dict[str, str]:
    """The labels of all pods of a shape; the controller keeps them as they are here."""
    labels: dict[str, str] = pods.manifest(shape, around, uid=pods.FIRST_UID)["metadata"]["labels"]
    return labels


def _metadata(name: str, labels: Mapping[str, str], around: Surroundings) -> Json:
    return {
        "name": name, "namespace": around.namespace, "labels": dict(labels),
        "ownerReferences": pods.owners(around),
    }  # fmt: skip


def pool(name: str, version: str, shape: Shape, around: Surroundings, *, replicas: int) -> Json:
    """A SandboxWarmPool. Also without warm pods: a v1beta1 claim finds its template by it."""
    return {
        "apiVersion": f"{EXTENSIONS}/{version}", "kind": "SandboxWarmPool",
        "metadata": _metadata(name, labels_of(shape, around), around),
        "spec": {
            "replicas": replicas, "sandboxTemplateRef": {"name": name},
            # A name stands for one content, so there is never a stale pod to replace.
            "updateStrategy": {"type": "OnReplenish"},
        },
    }  # fmt: skip


def claim(
    name: str, version: str, around: Surroundings, *, source: str, warm: bool, sandbox: str,
    expires: float,
) -> Json:  # fmt: skip
    """A SandboxClaim on the template and pool `source`."""
    wanted: Json = (
        {"warmPoolRef": {"name": source}} if version == BETA
        else {"sandboxTemplateRef": {"name": source}, "warmpool": source if warm else "none"}
    )  # fmt: skip
    labels = {**pods.base_labels(around), SANDBOX: sandbox}
    return {
        "apiVersion": f"{EXTENSIONS}/{version}", "kind": "SandboxClaim",
        "metadata": _metadata(name, labels, around),
        "spec": {
            **wanted,
            "lifecycle": lifecycle(expires),
            "additionalPodMetadata": {"annotations": {SANDBOX: sandbox}},
        },
    }  # fmt: skip


def selector(around: Surroundings) -> tuple[tuple[str, str], ...]:
    """The query for what is this installation's."""
    return (("labelSelector", f"{INSTALLATION}={around.installation}"),)


def lifecycle(expires: float) -> Json:
    """The end of a claim, should the service be gone by then: claim, Sandbox and pod go."""
    return {
        "shutdownTime": moment(expires + LATER), "shutdownPolicy": "Delete",
        "ttlSecondsAfterFinished": FINISHED_SECONDS,
    }  # fmt: skip


def renewal(expires: float) -> Json:
    """The merge patch of a claim that lives longer."""
    return {"spec": {"lifecycle": {"shutdownTime": moment(expires + LATER)}}}


def moment(seconds: float) -> str:
    """A time as the API server writes it: whole seconds, rounded up."""
    whole = datetime.fromtimestamp(-(-seconds // 1), UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%SZ")


# --- what the controller says


def sandbox_of(found: object) -> str:
    """The Sandbox that a claim has got, or "". Early v1alpha1 wrote the field with a capital."""
    held = ("status", "sandbox")
    return text(found, *held, "name") or text(found, *held, "Name")


def source_of(found: object) -> str:
    """The pool or template that a claim names."""
    spec = ("spec", "warmPoolRef", "name"), ("spec", "sandboxTemplateRef", "name")
    return next(filter(None, (text(found, *path) for path in spec)), "")


def pod_of(sandbox: object) -> str:
    """The name of a Sandbox's pod."""
    return text(sandbox, "metadata", "annotations", POD_NAME) or text(sandbox, "metadata", "name")


def ready(found: object) -> tuple[str, str, str]:
    """The condition Ready: its status, reason and message."""
    for one in items(found, "status", "conditions"):
        if text(one, "type") == "Ready":
            return text(one, "status"), text(one, "reason"), text(one, "message")[:MOST_TEXT]
    return "", "", ""


def hopeless(found: object) -> Problem | None:
    """Why a claim will never have a pod; None while it may."""
    status, reason, message = ready(found)
    if status == "True" or reason not in HOPELESS:
        return None
    return Problem(
        "BACKEND_UNAVAILABLE", f"the SandboxClaim was refused ({reason}): {message}",
        hint=HOPELESS[reason],
    )  # fmt: skip


# --- what `public` may reach


def closed() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ranges that are not public: v4, and v6 below 2000::/3."""
    four = [text for text, kind in addresses.V4_ROWS if kind != addresses.PUBLIC]
    held = [ip_network(text) for text in four]
    # Metadata services in ranges that look public: Azure's.
    four += sorted(
        f"{text}/32" for text in addresses.METADATA_ADDRESSES
        if ":" not in text and not any(ip_address(text) in network for network in held)
    )  # fmt: skip
    public = ip_network("2000::/3")
    rows = ((ip_network(text), kind) for text, kind in addresses.V6_ROWS if text != addresses.REST)
    six = [
        str(network) for network, kind in rows
        if kind != addresses.PUBLIC and network != public and network.subnet_of(public)  # type: ignore[arg-type]
    ]  # fmt: skip
    # 6to4: the gateway sends to the v4 address inside, whatever that is.
    return tuple(four), (*six, "2002::/16")


def egress(network: str) -> list[Json]:
    """The egress rules of a NetworkPolicy: nothing, or what is public."""
    if network == "off":
        return []
    four, six = closed()
    return [
        {
            "to": [
                {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(four)}},
                {"ipBlock": {"cidr": "2000::/3", "except": list(six)}},
            ]
        }
    ]
