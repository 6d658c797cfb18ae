"""What a sandbox is as a pod. Pure: values in, a manifest out.

Nothing that a client of the service says becomes a volume, a label, a variable, a host or a
capability: of its wishes only the image's pin, the runtime's name, the network's mode and three
numbers reach the API server. Nothing in a pod is secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime

from ...policy.docker import images
from ...record import Record
from ..problems import Problem
from ..values import REQUIRED
from . import pod_env
from .kube_objects import (
    CLAIMED,
    CLAIMED_AT,
    CONTAINER,
    INSTALLATION,
    NETWORK,
    OWNER,
    SANDBOX,
    SHAPE,
    STATE,
    WARM,
)  # fmt: skip
from .kube_settings import ENFORCED, LOCALHOST, RUNTIME_DEFAULT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..values import Network, Resources, Sandbox
    from .kube_settings import KubeSettings

    Json = dict[str, Any]

# Uids of pods: beyond those of people, of services, and of the ranges for user namespaces of most
# distributions. RLIMIT_NPROC counts by uid on a node, so each pod has its own.
FIRST_UID, UIDS = 2_000_000, 1 << 30
# A pod with a user namespace has 0 to 65535, and the kubelet gives each a range of its own.
FIRST_INNER, INNER_UIDS = 1000, 64000
# The agent itself is in the pod's memory, too.
OVERHEAD = 48 << 20
# The kubelet measures every ten seconds and ends the whole pod; the service looks more often and
# only refuses or ends commands. So the kubelet's bound lies a little above.
DISK_SLACK = 64 << 20
AGENT_DISK = 160 << 20
NAME = "agent-sandbox"
APP = "app.kubernetes.io"
FILES_VOLUME = "files"
AGENT_VOLUME, AGENT_TARGET = "agent", "/agent"
ROOT_DIGITS = 24
GRACE_SECONDS = 2
# What may stand for "network: off" in what an agent says; "pod" alone would be nothing.
CLOSED = frozenset({"netns", "seccomp"})
BEHIND = "bwrap"
# Kubernetes takes no more.
MOST_SECONDS = (1 << 31) - 1


class Shape(Record):
    """What makes one pod as good as another: pods of one shape can stand for each other."""

    # name@sha256:…
    image: str
    # The agent is in the image; otherwise an init container brings it.
    agent: bool = False
    runtime: str = ""
    network: str = "off"
    memory: int | None = None
    cpus: float | None = None
    disk: int | None = None
    # Of the settings, the agent's variables and this module: another release makes other pods.
    hash: str = ""


class Surroundings(Record):
    """What is the same for all pods of a service."""

    settings: KubeSettings
    namespace: str
    installation: str
    # The public certificate by which the agent knows the service.
    authority: str
    # What nobody outside of the service can guess paths without.
    secret: bytes = b""
    # The ConfigMap that pods belong to.
    owner_name: str = ""
    owner_uid: str = ""


def shape_of(
    image: str, *, agent: bool, runtime: str, network: str, resources: Resources,
    around: Surroundings,
) -> Shape:  # fmt: skip
    """The shape of a sandbox's pod."""
    if "@" not in image or not images.DIGEST.fullmatch(image.partition("@")[2]):
        raise Problem("INVALID", "the image is not pinned by its content", field="image",
                      rule="image.digest")  # fmt: skip
    bare = Shape(
        image=image, agent=agent, runtime=runtime, network=network, memory=resources.memory,
        cpus=resources.cpus, disk=resources.disk,
    )  # fmt: skip
    return bare.replace(hash=shape_hash(bare, around))


def choose_uid(settings: KubeSettings, number: Callable[[int], int]) -> int:
    """The uid of one pod; `number(n)` is a random one below n."""
    if settings.user_namespaces:
        return FIRST_INNER + number(INNER_UIDS)
    return FIRST_UID + number(UIDS)


def shape_hash(shape: Shape, around: Surroundings) -> str:
    """A label's worth of everything in a manifest but its name, labels and uid."""
    whole = manifest(shape, around, uid=FIRST_UID)
    written = json.dumps(whole["spec"], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()[:20]


def owner_hash(owner: str) -> str:
    """An agent's name as a label: names may be longer, and need not be public."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


# --- names and labels


def warm_name(around: Surroundings, shape: Shape, number: int) -> str:
    """The name of a warm pod. All replicas count alike, so that they never make one too many."""
    return f"sandbox-{around.installation[:8]}-{shape.hash[:8]}-{number}"


def warm_number(name: str) -> int:
    """The number in it; -1: it has none."""
    last = name.rpartition("-")[2]
    return int(last) if last.isascii() and last.isdecimal() and len(last) < 18 else -1


def cold_name(around: Surroundings, sandbox: str, number: int = 1) -> str:
    """One name for one sandbox, and for each try to make it: another one is refused."""
    return f"sandbox-{around.installation[:8]}-{sandbox}" + (f"-{number}" if number > 1 else "")


def base_labels(around: Surroundings) -> dict[str, str]:
    """Of everything that a service has made."""
    return {
        f"{APP}/name": NAME, f"{APP}/component": "sandbox", f"{APP}/managed-by": NAME,
        INSTALLATION: around.installation,
    }  # fmt: skip


def claim_labels(sandbox: Sandbox) -> dict[str, str]:
    """What the labels of a claimed pod say; metadata never becomes a label."""
    return {STATE: CLAIMED, SANDBOX: sandbox.id, OWNER: owner_hash(sandbox.owner)}


def claim_notes(now: float) -> dict[str, str]:
    """The annotations of a claimed pod."""
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {CLAIMED_AT: stamp}


def named(body: Json, name: str, labels: Mapping[str, str], notes: Mapping[str, str]) -> Json:
    """A manifest with the name and the labels of one pod."""
    metadata = body["metadata"]
    return {
        **body,
        "metadata": {
            **metadata, "name": name, "labels": {**metadata["labels"], **labels},
            "annotations": {**metadata["annotations"], **notes},
        },
    }  # fmt: skip


def claim_patch(uid: str, sandbox: Sandbox, now: float) -> list[Json]:
    """The JSON patch that takes a warm pod.

    The API server applies it to the newest version, and again if another write came between; so
    of two replicas the second one finds `claimed`, and its test fails. A test of resourceVersion
    would also fail after every status that a kubelet reports.
    """
    labels, notes = claim_labels(sandbox), claim_notes(now)
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"/metadata/labels/{pointer(STATE)}", "value": WARM},
        *({"op": "add", "path": f"/metadata/labels/{pointer(k)}", "value": v}
          for k, v in labels.items()),
        *({"op": "add", "path": f"/metadata/annotations/{pointer(k)}", "value": v}
          for k, v in notes.items()),
    ]  # fmt: skip


def pointer(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


# --- the pod


def manifest(shape: Shape, around: Surroundings, *, uid: int) -> Json:
    """A pod without a name."""
    settings = around.settings
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # The lease is the agent's to keep: this field can only be made smaller.
        "activeDeadlineSeconds": min(int(settings.hard_seconds), MOST_SECONDS),
        "hostNetwork": False, "hostPID": False, "hostIPC": False, "shareProcessNamespace": False,
        "hostname": "sandbox",
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": uid, "runAsGroup": uid, "fsGroup": uid,
            "seccompProfile": seccomp(settings.seccomp),
        },
        **names(shape.network, settings.nameservers),
        "tolerations": tolerations(settings),
        "topologySpreadConstraints": spread(around),
        "volumes": volumes(shape),
        "containers": [container(shape, around)],
        **optional(shape, settings),
    }  # fmt: skip
    if not shape.agent:
        spec["initContainers"] = [installer(settings)]
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": around.namespace,
            "labels": {**base_labels(around), NETWORK: shape.network, SHAPE: shape.hash},
            "annotations": {},
            "ownerReferences": owners(around),
        },
        "spec": spec,
    }  # fmt: skip


def owners(around: Surroundings) -> list[Json]:
    """What the pod goes with: whoever removes the installation removes its pods."""
    if not around.owner_uid:
        return []
    return [{
        "apiVersion": "v1", "kind": "ConfigMap", "name": around.owner_name,
        "uid": around.owner_uid, "controller": False, "blockOwnerDeletion": False,
    }]  # fmt: skip


def container(shape: Shape, around: Surroundings) -> Json:
    """The agent. `command` is also what keeps the image's own entry point from running."""
    settings = around.settings
    mounts: list[Json] = [*pod_env.volume_mounts(FILES_VOLUME)]
    root = bundle_root(shape, around)
    if not shape.agent:
        mounts.append({"name": AGENT_VOLUME, "mountPath": root, "readOnly": True})
    environment = pod_env.env(around.authority, int(settings.warm_seconds))
    return {
        "name": CONTAINER, "image": shape.image, "imagePullPolicy": "IfNotPresent",
        "command": list(pod_env.command(root)), "args": [], "workingDir": "/",
        "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
        "ports": [{"name": "agent", "containerPort": pod_env.PORT, "protocol": "TCP"}],
        "stdin": False, "tty": False,
        "securityContext": confined(settings),
        "resources": resources(shape, settings),
        "volumeMounts": mounts,
    }  # fmt: skip


def bundle_root(shape: Shape, around: Surroundings) -> str:
    """Where the agent's files are in a pod.

    An image says with VOLUME where directories of its own are mounted: if it knew this path, it
    could put its files over ours, and be the pod's first process. It cannot know: the path is of
    its own content, by a key that is in the service's state.
    """
    if shape.agent:
        return pod_env.ROOT
    digits = hmac.new(around.secret, f"root {shape.image}".encode(), hashlib.sha256).hexdigest()
    return f"{pod_env.ROOT}-{digits[:ROOT_DIGITS]}"


def confined(settings: KubeSettings) -> Json:
    """What Pod Security calls restricted, and a read-only root."""
    return {
        "allowPrivilegeEscalation": False, "privileged": False, "readOnlyRootFilesystem": True,
        "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": seccomp(settings.seccomp),
    }  # fmt: skip


def installer(settings: KubeSettings) -> Json:
    """Copies the agent into the pod, for images without it."""
    if not settings.agent_image:
        raise Problem(
            "UNSUPPORTED", "the image has no agent of this service",
            hint="the operator can set KUBERNETES_AGENT_IMAGE, or say `agent = true` of an image "
            "in KUBERNETES_IMAGES", field="image", rule="image.agent",
        )  # fmt: skip
    bounds = {"cpu": "500m", "memory": "64Mi", "ephemeral-storage": str(AGENT_DISK)}
    return {
        "name": "install", "image": settings.agent_image, "imagePullPolicy": "IfNotPresent",
        "command": [*pod_env.INSTALL, AGENT_TARGET], "args": [], "workingDir": "/",
        "securityContext": confined(settings),
        "resources": {"limits": bounds, "requests": {"cpu": "10m", "memory": "16Mi"}},
        "volumeMounts": [{"name": AGENT_VOLUME, "mountPath": AGENT_TARGET}],
    }  # fmt: skip


def seccomp(setting: str) -> Json:
    """The filter of system calls that the runtime loads."""
    if setting == RUNTIME_DEFAULT:
        return {"type": RUNTIME_DEFAULT}
    return {"type": "Localhost", "localhostProfile": setting.removeprefix(LOCALHOST)}


def names(network: str, servers: tuple[str, ...]) -> Json:
    """Who is asked for names: never the cluster's server, which knows all of its services."""
    chosen = servers if network != "off" else ("127.0.0.1",)
    if not chosen:
        return {"dnsPolicy": "Default"}
    return {"dnsPolicy": "None", "dnsConfig": {"nameservers": list(chosen), "searches": []}}


def tolerations(settings: KubeSettings) -> list[Json]:
    """How long a pod stays on a node that is lost: five minutes without these."""
    kept = int(settings.node_seconds)
    lost = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": kept}
        for key in ("not-ready", "unreachable")
    ]  # fmt: skip
    own = [
        {"key": key, "operator": "Equal", "value": value}
        for key, value in sorted(settings.tolerate.items())
    ]
    return [*lost, *own]


def spread(around: Surroundings) -> list[Json]:
    """Not all on one node, if it can be helped: it would take them all along."""
    return [{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {INSTALLATION: around.installation}},
    }]  # fmt: skip


def volumes(shape: Shape) -> list[Json]:
    """Everything that can be written. It is gone with the pod."""
    bound = {} if shape.disk is None else {"sizeLimit": str(disk_bound(shape.disk))}
    found: list[Json] = [{"name": FILES_VOLUME, "emptyDir": bound}]
    if not shape.agent:
        found.append({"name": AGENT_VOLUME, "emptyDir": {"sizeLimit": str(AGENT_DISK)}})
    return found


def disk_bound(disk: int) -> int:
    """Where the kubelet ends the pod."""
    return disk + max(disk // 4, DISK_SLACK)


def resources(shape: Shape, settings: KubeSettings) -> Json:
    """The bounds that the kernel and the kubelet keep, and what a node sets aside."""
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    if shape.memory is not None:
        limits["memory"] = str(shape.memory + OVERHEAD)
        requests["memory"] = str(int(shape.memory * settings.memory_share) + OVERHEAD)
    if shape.cpus is not None:
        limits["cpu"] = milli(shape.cpus)
        requests["cpu"] = milli(shape.cpus * settings.cpu_share)
    if shape.disk is not None:
        # The installed agent is in it, too.
        extra = 0 if shape.agent else AGENT_DISK
        limits["ephemeral-storage"] = str(disk_bound(shape.disk) + extra)
        # Without a request it would be the limit: nodes would be full of what nobody has written.
        requests["ephemeral-storage"] = str(min(DISK_SLACK, shape.disk))
    return {"limits": limits, "requests": requests}


def milli(cpus: float) -> str:
    """Processors as Kubernetes writes them; it knows no less than a thousandth."""
    return f"{max(1, round(cpus * 1000))}m"


def optional(shape: Shape, settings: KubeSettings) -> Json:
    """Fields that are left out when nobody has set them."""
    found: Json = {
        "runtimeClassName": shape.runtime,
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "nodeSelector": {"kubernetes.io/os": "linux", **settings.node_selector},
        "imagePullSecrets": [{"name": one} for one in settings.pull_secrets],
    }
    if settings.user_namespaces:
        found["hostUsers"] = False
    return {name: value for name, value in found.items() if value not in ("", {}, [])}


# --- what a pod keeps


def is_open_to_commands(kept: Mapping[str, str]) -> bool:
    """Whether a command could take over a program that the engine starts in its pod.

    It has the same user, the pod's network, and no filter yet. Only a process namespace or Landlock
    keeps it apart: until it has closed itself, /proc/PID/mem is open (proc(5)).
    """
    return kept.get("network") == "seccomp" and kept.get("processes") == "pod"


# --- refusals


def check_network(network: Network, settings: KubeSettings) -> None:
    """Refuse a network that nothing in this cluster would keep."""
    if network.mode not in ("off", "public") or network.deny or network.allow:
        raise Problem(
            "UNSUPPORTED", "the kubernetes backend knows network off and public, without lists",
            hint="leave `allowOut` and `denyOut` out", field="network", rule="backend.support",
        )  # fmt: skip
    if network.mode == "public" and settings.network_policy != ENFORCED:
        raise Problem(
            "UNSUPPORTED", "nothing in this cluster keeps sandboxes from its own network",
            hint="KUBERNETES_NETWORK_POLICY=enforced, where NetworkPolicies are kept",
            field="network", rule="backend.support",
        )  # fmt: skip


def check_time(seconds: float, settings: KubeSettings) -> None:
    """Refuse a sandbox that would outlive its pod. A warm one has spent some time already."""
    most = settings.hard_seconds - settings.warm_seconds
    if seconds > most:
        raise Problem(
            "LIMIT_EXCEEDED", f"a pod of this cluster may live for {most:g} s",
            hint="the limits are KUBERNETES_HARD_SECONDS and KUBERNETES_WARM_SECONDS",
            rule="kubernetes.hard_seconds", field="timeout",
        )  # fmt: skip


def check(kept: Mapping[str, str], sandbox: Sandbox) -> None:
    """Refuse a pod that does not keep what was asked for, whatever it was told."""
    if sandbox.network.mode == "off" and kept.get("network") not in CLOSED:
        raise Problem(
            "UNSUPPORTED", "nothing in a pod of this cluster keeps a command from the network",
            hint="see `When something does not work` in docs/kubernetes.md", field="network",
            rule="kubernetes.network",
        )  # fmt: skip
    if sandbox.inner == REQUIRED and kept.get("filesystem") != BEHIND:
        raise Problem(
            "UNSUPPORTED", "bwrap does not work in a pod of this cluster",
            hint="KUBERNETES_SECCOMP=localhost/…, or a template that does not require it",
            rule="kubernetes.inner",
        )  # fmt: skip
