"""What the API server says of pods and nodes, read into small values. Pure.

Of a pod's 5 to 10 kilobytes only what decides is kept: there may be thousands.
"""

from __future__ import annotations

from datetime import datetime

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DOMAIN = "agent-sandbox.dev"
INSTALLATION, STATE, SHAPE = f"{DOMAIN}/installation", f"{DOMAIN}/state", f"{DOMAIN}/template-hash"
# A label of our own pods; an annotation where a controller makes the pods and owns their labels.
SANDBOX = f"{DOMAIN}/sandbox"
OWNER, NETWORK = f"{DOMAIN}/owner-hash", f"{DOMAIN}/network"
# An annotation: when a pod was claimed.
CLAIMED_AT = f"{DOMAIN}/claimed-at"
# An annotation: that we have made it (`kube_seal`).
SEAL = f"{DOMAIN}/seal"
WARM, CLAIMED = "warm", "claimed"
# Our one container.
CONTAINER = "agent"
# Reasons why a container waits that no waiting ends. ErrImagePull is tried again; then it is this.
HOPELESS: Mapping[str, str] = {
    "ErrImageNeverPull": "the node does not have the image",
    "InvalidImageName": "the image's name is not valid",
    "CreateContainerConfigError": "the container cannot be made",
    "CreateContainerError": "the container cannot be made",
    "RunContainerError": "the container cannot be started",
    "ImagePullBackOff": "the image cannot be pulled",
    "ImageInspectError": "the image cannot be read",
}
MOST_TEXT = 300


class Pod(Record):
    """A pod of ours."""

    name: str
    uid: str
    version: str = ""
    state: str = ""
    shape: str = ""
    sandbox: str = ""
    node: str = ""
    ip: str = ""
    phase: str = ""
    # The agent's container runs.
    running: bool = False
    # Somebody has asked for its removal.
    deleting: bool = False
    # Why it is not there, or does not come up; "" is well.
    reason: str = ""
    # It will not come up by itself.
    hopeless: bool = False
    # The scheduler finds no place.
    unplaced: str = ""
    made: float = 0.0
    claimed: float = 0.0
    seal: str = ""
    # The first word of the agent's command.
    entry: str = ""

    @property
    def over(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.deleting or self.ended

    @property
    def ended(self) -> bool:
        """Whether its agent has ended, of itself or by the engine."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def ready(self) -> bool:
        """Whether its agent can be spoken to."""
        return self.running and bool(self.ip) and not self.over


class Node(Record):
    """A node."""

    name: str
    ready: bool
    reason: str = ""


def at(document: object, *path: str | int) -> object:
    """The value at a path; None where there is none."""
    for key in path:
        if isinstance(key, int):
            document = document[key] if isinstance(document, list) and key < len(document) else None
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def text(document: object, *path: str | int) -> str:
    """The text at a path, or ""."""
    found = at(document, *path)
    return found if isinstance(found, str) else ""


def items(document: object, *path: str | int) -> list[object]:
    """The list at a path, or []."""
    found = at(document, *path)
    return found if isinstance(found, list) else []


def moment(stamp: str) -> float:
    """Seconds since the epoch of a time as Kubernetes writes it; 0.0: none."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def pod(document: object) -> Pod:
    """A pod."""
    agent = _container(document)
    waiting, words = _waiting(document)
    labels, notes = ("metadata", "labels"), ("metadata", "annotations")
    return Pod(
        name=text(document, "metadata", "name"), uid=text(document, "metadata", "uid"),
        version=text(document, "metadata", "resourceVersion"),
        state=text(document, *labels, STATE), shape=text(document, *labels, SHAPE),
        sandbox=text(document, *labels, SANDBOX) or text(document, *notes, SANDBOX),
        node=text(document, "spec", "nodeName"), ip=text(document, "status", "podIP"),
        phase=text(document, "status", "phase"),
        running=at(agent, "state", "running") is not None,
        deleting=bool(text(document, "metadata", "deletionTimestamp")),
        reason=_reason(document, agent, waiting, words), hopeless=bool(waiting),
        unplaced=_unplaced(document),
        made=moment(text(document, "metadata", "creationTimestamp")),
        claimed=moment(text(document, *notes, CLAIMED_AT)), seal=text(document, *notes, SEAL),
        entry=_entry(document),
    )  # fmt: skip


def _entry(document: object) -> str:
    for one in items(document, "spec", "containers"):
        if text(one, "name") == CONTAINER:
            return text(one, "command", 0)
    return ""


def _container(document: object) -> object:
    for one in items(document, "status", "containerStatuses"):
        if text(one, "name") == CONTAINER:
            return one
    return None


def _waiting(document: object) -> tuple[str, str]:
    """For what a container waits in vain, and the engine's words; "" without one."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in items(document, "status", kind):
            if (reason := text(one, "state", "waiting", "reason")) in HOPELESS:
                return reason, text(one, "state", "waiting", "message")
    return "", ""


def _reason(document: object, agent: object, waiting: str, words: str) -> str:
    """Why it ended or cannot start, in the engine's words."""
    if waiting:
        return f"{HOPELESS[waiting]} ({waiting})" + (f": {words[:MOST_TEXT]}" if words else "")
    reason, message = text(document, "status", "reason"), text(document, "status", "message")
    if reason or message:
        return ": ".join(filter(None, (reason, message[:MOST_TEXT])))
    ended = at(agent, "state", "terminated")
    if ended is None:
        return ""
    code = at(ended, "exitCode")
    return f"its agent ended ({text(ended, 'reason') or 'no reason'}, code {code})"


def _unplaced(document: object) -> str:
    for one in items(document, "status", "conditions"):
        if text(one, "type") == "PodScheduled" and text(one, "reason") == "Unschedulable":
            return text(one, "message")[:MOST_TEXT] or "no node has room"
    return ""


def node(document: object) -> Node:
    """A node. One that says nothing of being ready is not."""
    for one in items(document, "status", "conditions"):
        if text(one, "type") == "Ready":
            ready = text(one, "status") == "True"
            words = text(one, "reason") or text(one, "status")
            return Node(
                name=text(document, "metadata", "name"), ready=ready, reason="" if ready else words
            )
    return Node(name=text(document, "metadata", "name"), ready=False, reason="no condition Ready")
