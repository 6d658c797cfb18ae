"""Settings of the kubernetes backend: one table, from the environment. Pure."""

from __future__ import annotations

import re
from ipaddress import ip_address

from ...errors import UsageError
from ...policy.docker import images
from ...record import Record
from .. import limits_units as units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

AUTO, ON, OFF = "auto", "on", "off"
DIRECT, EXEC = "direct", "exec"
ENFORCED, NONE = "enforced", "none"
RUNTIME_DEFAULT, LOCALHOST = "RuntimeDefault", "localhost/"
# A name of Kubernetes: a DNS label, and labels with dots between them.
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(?:\.{LABEL.pattern})*")
_KEY = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[\w.-]{0,61}\w)?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)?")
_PROFILE = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")


class KubeSettings(Record):
    """How pods are made and reached."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    images: str = ""
    agent_image: str = ""
    transport: str = AUTO
    network_policy: str = NONE
    nameservers: tuple[str, ...] = ()
    seccomp: str = RUNTIME_DEFAULT
    runtimes: tuple[str, ...] = ()
    user_namespaces: bool = False
    claims: str = AUTO
    owner: str = ""
    service_account: str = ""
    priority_class: str = ""
    pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = {}
    tolerate: Mapping[str, str] = {}
    cpu_share: float = 0.1
    memory_share: float = 0.5
    start_seconds: float = 120.0
    warm_seconds: float = 3600.0
    hard_seconds: float = 7 * 86400.0
    node_seconds: float = 30.0
    quiet_seconds: float = 90.0


# --- what people write; `ValueError` has the words for a mistake


def _choice(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"it must be one of: {', '.join(words)}")
        return text

    return read


def _switch(text: str) -> bool:
    return _choice(ON, OFF)(text) == ON


def _name(text: str) -> str:
    if not SUBDOMAIN.fullmatch(text) or len(text) > 253:
        raise ValueError("it must be a name of Kubernetes, such as sandboxes")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(one) for one in units.listed(text))


def _addresses(text: str) -> tuple[str, ...]:
    try:
        return tuple(str(ip_address(one)) for one in units.listed(text))
    except ValueError as error:
        raise ValueError("it must be addresses such as 9.9.9.9") from error


def pinned(text: str) -> str:
    """An image by its content, `name@sha256:…`, as it goes into a pod."""
    try:
        name = images.parse(text)
    except Exception as error:
        raise ValueError(f"{text[:80]!r} is not the name of an image") from error
    if not name.digest:
        raise ValueError("it must name its content: name@sha256:…")
    # With its registry: a node may complete a short name in its own way.
    return f"{name.domain}/{name.path}@{name.digest}"


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in units.listed(text):
        key, equals, value = word.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ValueError("it must be pairs such as pool=sandboxes")
        found[key] = value
    return found


def _seccomp(text: str) -> str:
    if text == RUNTIME_DEFAULT:
        return text
    profile = text.removeprefix(LOCALHOST)
    parts = profile.split("/")
    if profile == text or not _PROFILE.fullmatch(profile) or {".", ".."} & {*parts}:
        raise ValueError(f"it must be {RUNTIME_DEFAULT} or localhost/PROFILE.json")
    return text


def _share(text: str) -> float:
    found = units.number(text)
    if found > 1:
        raise ValueError("it must be a number above 0, and at most 1")
    return found


def _text(text: str) -> str:
    return text


class Row(Record):
    """One setting."""

    name: str
    read: Callable[[str], object]
    help: str
    # The variable, where it is not KUBERNETES_ and the name.
    own: str = ""
    # What a person sees as the default, where it is not the value.
    shown: str = ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return self.own or f"KUBERNETES_{self.name.upper()}"

    @property
    def default(self) -> str:
        """The default, for people."""
        value = KubeSettings.__defaults__[self.name]
        if self.shown or value in ("", (), {}):
            return self.shown
        if isinstance(value, bool):
            return ON if value else OFF
        kind = units.SECONDS if self.name.endswith("_seconds") else units.NUMBER
        return units.shown(kind, value)


def _row(
    name: str, read: Callable[[str], object], help: str, *, own: str = "", shown: str = ""
) -> Row:
    return Row(name=name, read=read, help=help, own=own, shown=shown)


TABLE: tuple[Row, ...] = (
    _row("kubeconfig", _text, "the file with address and credentials (`--kubeconfig`); without it "
         "those of the pod that the service runs in, else `~/.kube/config`", own="KUBECONFIG",
         shown="the pod's"),
    _row("context", _text, "the context of it (`--kube-context`)", own="KUBE_CONTEXT",
         shown="its current one"),
    _row("namespace", _name, "where pods are made (`--kube-namespace`)", own="KUBE_NAMESPACE",
         shown="of the context, or the service's own"),
    _row("images", _text, "a TOML file with the images that have short names, by digest"),
    _row("agent_image", pinned, "the image that brings the agent into images without it"),
    _row("transport", _choice(AUTO, DIRECT, EXEC), "how the agent in a pod is reached: by the "
         "pod's address, through the API server, or what works"),
    _row("network_policy", _choice(ENFORCED, NONE), "`enforced`: the cluster keeps "
         "NetworkPolicies, and those of the chart are there; opens network `public`"),
    _row("nameservers", _addresses, "name servers of sandboxes with network `public`",
         shown="the node's"),
    _row("seccomp", _seccomp, f"`{RUNTIME_DEFAULT}`, or a profile on the nodes that lets bwrap "
         "work: `localhost/NAME.json`"),
    _row("runtimes", _names, "runtimeClassNames that sandboxes may ask for"),
    _row("user_namespaces", _switch, "`on`: `hostUsers: false` (Kubernetes 1.33, containerd 2)"),
    _row("claims", _choice(AUTO, ON, OFF), "SandboxClaims of kubernetes-sigs/agent-sandbox"),
    _row("owner", _name, "a ConfigMap that all pods belong to: they go with it", shown="made"),
    _row("service_account", _name, "of the pods; its token is never mounted"),
    _row("priority_class", _name, "of the pods"),
    _row("pull_secrets", _names, "imagePullSecrets of the pods"),
    _row("node_selector", _pairs, "labels that a node must have, `a=b,c=d`"),
    _row("tolerate", _pairs, "taints `key=value` that pods tolerate"),
    _row("cpu_share", _share, "how much of a sandbox's processors is reserved on a node"),
    _row("memory_share", _share, "how much of its memory is"),
    _row("start_seconds", units.seconds, "how long a pod may take to run"),
    _row("warm_seconds", units.seconds, "how long a pod of the warm pool waits before it is "
         "replaced, and ends by itself"),
    _row("hard_seconds", units.seconds, "the longest life of a pod, renewals included"),
    _row("node_seconds", units.seconds, "after a node is lost, so long until the cluster removes "
         "its pods"),
    _row("quiet_seconds", units.seconds, "an agent that says nothing for this long is lost, "
         "though the cluster has not noticed"),
)  # fmt: skip


def load(environ: Mapping[str, str]) -> KubeSettings:
    """The settings. A variable that is set to nothing counts as not set."""
    given: dict[str, object] = {}
    for row in TABLE:
        text = environ.get(row.variable, "").strip()
        if not text:
            continue
        try:
            given[row.name] = row.read(text)
        except ValueError as error:
            raise UsageError(
                f"cannot use {row.variable}={text!r}: {error}", hint=row.help, code="bad-kubernetes"
            ) from error
    made = KubeSettings().replace(**given)
    if made.warm_seconds >= made.hard_seconds:
        raise UsageError(
            "KUBERNETES_WARM_SECONDS is not below KUBERNETES_HARD_SECONDS",
            hint="a pod would end while it waits", code="bad-kubernetes",
        )  # fmt: skip
    return made
