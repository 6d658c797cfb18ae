"""What each rule looks for. A finder yields hits: a place and what stands there."""

from __future__ import annotations

from ..policy import paths
from ..record import Record
from . import sources
from .merge import names
from .model import BIND, FROM_ENV_FILE, FROM_FILE, SECRET, VOLUME, canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .model import Mount, Project, Service, Variable
    from .nodes import Node, Place

# With one of these a process leaves its container, or takes the host down with it.
BAD_CAPS = frozenset(
    "ALL SYS_ADMIN SYS_PTRACE SYS_MODULE SYS_RAWIO SYS_BOOT SYS_TIME SYS_CHROOT_HOST NET_ADMIN "
    "DAC_READ_SEARCH DAC_OVERRIDE_HOST MAC_ADMIN MAC_OVERRIDE BPF PERFMON SYSLOG SYS_NICE "
    "SYS_RESOURCE SYS_PACCT SYS_TTY_CONFIG LINUX_IMMUTABLE AUDIT_CONTROL AUDIT_READ BLOCK_SUSPEND "
    "WAKE_ALARM CHECKPOINT_RESTORE IPC_OWNER NET_BROADCAST LEASE IPC_LOCK".split()
) - {"SYS_CHROOT_HOST", "DAC_OVERRIDE_HOST", "IPC_LOCK", "LEASE", "SYS_NICE", "NET_BROADCAST"}
# Devices that give no more than their own function.
SAFE_DEVICES = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/net/tun",
    "/dev/fuse", "/dev/dri", "/dev/nvidia", "/dev/snd", "/dev/video", "/dev/kfd", "/dev/ttyUSB",
    "/dev/ttyACM",
)  # fmt: skip
UNCONFINED = ("seccomp", "apparmor", "systempaths", "label", "writable-cgroups")
ENGINE_GROUPS = frozenset({"docker", "podman", "containerd", "lxd", "incus", "libvirt", "disk"})
# The gids that distributions give to a group `docker`; only its name is certain.
ENGINE_GIDS = frozenset({"999", "998", "997", "996", "995", "994", "991", "990", "987", "986"})
SECRET_WORDS = (
    "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "TOKEN", "API_KEY", "APIKEY", "ACCESS_KEY",
    "PRIVATE_KEY", "CREDENTIAL", "AUTH_KEY", "ENCRYPTION_KEY", "SIGNING_KEY",
)  # fmt: skip
SECRET_BEGINNINGS = (
    "sk-", "sk_live_", "rk_live_", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "xoxb-",
    "xoxp-", "AKIA", "ASIA", "AIza", "npm_", "pypi-", "hf_", "-----BEGIN", "eyJhbGci",
)  # fmt: skip
# Variables that hold a name of a place, a number or a switch.
NOT_SECRET = ("_FILE", "_PATH", "_DIR", "_URL", "_TTL", "_LIMIT", "_LENGTH", "_EXPIRY", "_NAME",
              "_ENABLED", "_TOKENS")  # fmt: skip


class Hit(Record):
    """One place where a rule applies; `grade` replaces the rule's own severity."""

    place: Place
    message: str
    grade: str = ""
    # What would have to go, where that is not the place itself.
    element: Place | None = None


def _text(node: Node | None) -> str:
    return (node.text or "").strip() if node is not None else ""


# --- what is mounted ------------------------------------------------------------------------------


def _shown(mount: Mount) -> str:
    how = f" (through {mount.via})" if mount.via else ""
    return f"{mount.source or '$' + (mount.unset or ('?',))[0]} at {mount.target}{how}"


def socket_mounts(service: Service, home: str) -> Iterator[Hit]:
    """The engine's socket by any path, or a directory, volume or secret that shows it."""
    for mount in service.mounts:
        hit = ""
        if mount.kind in (BIND, SECRET) and mount.source:
            hit = sources.socket(mount.source, home) or sources.socket(mount.real, home)
        if not hit and sources.is_socket_target(mount.target):
            hit = mount.target
        if not hit or (mount.kind == VOLUME and not sources.is_socket_target(mount.target)):
            continue
        words = f"mounts {_shown(mount)}"
        if hit != canonical(mount.source or "/"):
            words += f", which shows {hit}"
        if mount.read_only:
            words += "; read-only restricts nothing here: a socket is talked to, not written"
        yield Hit(place=mount.place, message=words, element=mount.item)
    node = service.node.get("use_api_socket")
    if node is not None and service.node.truth("use_api_socket"):
        yield Hit(place=node.place, message="use_api_socket hands over the engine's socket")


def host_mounts(service: Service, home: str) -> Iterator[Hit]:
    """Directories of the host that are the host."""
    for mount in service.mounts:
        if mount.kind not in (BIND, SECRET) or not mount.source:
            continue
        why = sources.danger(mount.source, home) or sources.danger(mount.real, home)
        if why:
            ro = "read-only " if mount.read_only else ""
            grade = "high" if mount.read_only else ""
            words = f"mounts {ro}{_shown(mount)}: {why}"
            yield Hit(place=mount.place, message=words, grade=grade, element=mount.item)


def propagation(service: Service, _: str) -> Iterator[Hit]:
    """Mounts that travel back to the host."""
    for mount in service.mounts:
        if {"shared", "rshared"} & set(mount.options):
            words = f"mounts {_shown(mount)} with shared propagation"
            yield Hit(place=mount.place, message=words, element=mount.item)


def other_containers(service: Service, _: str) -> Iterator[Hit]:
    """volumes_from a container that no file describes."""
    for item in service.node.listed("volumes_from"):
        if _text(item).startswith("container:"):
            yield Hit(place=item.place, message=f"takes the mounts of {_text(item)}, unseen here")


# --- who it is ------------------------------------------------------------------------------------


def privileged(service: Service, _: str) -> Iterator[Hit]:
    """`privileged`, in every place where it can be said."""
    spots = [(service.node, "privileged")]
    spots += [(h, "privileged") for k in ("post_start", "pre_stop") for h in service.node.listed(k)]
    build = service.node.get("build")
    if build is not None:
        spots.append((build, "privileged"))
    for node, key in spots:
        if node.truth(key):
            yield Hit(place=node.mapped()[key].place, message="privileged: true")
    for item in service.node.listed("build", "entitlements"):
        yield Hit(place=item.place, message=f"the build may use {_text(item)}")


def host_namespaces(service: Service, _: str) -> Iterator[Hit]:
    """Namespaces that are the host's, or another container's."""
    for key in ("network_mode", "pid", "ipc", "uts", "userns_mode", "cgroup", "net"):
        node = service.node.get(key)
        value = _text(node)
        if node is None:
            continue
        if value == "host":
            yield Hit(place=node.place, message=f"{key}: host")
        elif value.startswith("container:"):
            yield Hit(place=node.place, message=f"{key}: {value}, unseen here", grade="medium")
    node = service.node.get("build", "network")
    if node is not None and _text(node) == "host":
        yield Hit(place=node.place, message="the build uses the host's network", grade="high")


def capabilities(service: Service, _: str) -> Iterator[Hit]:
    """Capabilities that open the host."""
    for item in service.node.listed("cap_add"):
        name = _text(item).upper().removeprefix("CAP_")
        if name in BAD_CAPS:
            grade = "medium" if name in ("SYS_RESOURCE", "SYSLOG", "NET_ADMIN") else ""
            yield Hit(place=item.place, message=f"cap_add: {name}", grade=grade)


def devices(service: Service, _: str) -> Iterator[Hit]:
    """Devices of the host beyond harmless ones."""
    for item in service.node.listed("devices"):
        path = item.string("source") if item.fields is not None else _text(item).split(":")[0]
        # CDI names (vendor.com/class=device) edit the container's mounts and hooks.
        real = paths.normalise(path) if path.startswith("/") else path
        if not real.startswith(SAFE_DEVICES) and path:
            yield Hit(place=item.place, message=f"device {path}")
    for item in service.node.listed("device_cgroup_rules"):
        yield Hit(place=item.place, message=f"device_cgroup_rules: {_text(item)}")


def unconfined(service: Service, _: str) -> Iterator[Hit]:
    """security_opt that takes protections away."""
    for item in service.node.listed("security_opt"):
        key, _sign, value = _text(item).replace("=", ":", 1).partition(":")
        if key == "no-new-privileges" and value == "false":
            yield Hit(place=item.place, message="no-new-privileges: false", grade="low")
        elif key in UNCONFINED and value in ("unconfined", "disable", "true", ""):
            yield Hit(place=item.place, message=f"security_opt: {_text(item)}")


def engine_group(service: Service, _: str) -> Iterator[Hit]:
    """The group that may talk to the engine."""
    for item in service.node.listed("group_add"):
        if _text(item) in ENGINE_GROUPS | ENGINE_GIDS or item.unset:
            name = _text(item) or f"${item.unset[0]}"
            yield Hit(place=item.place, message=f"group_add: {name}")
        elif any("DOCKER" in name.upper() for name in item.used):
            yield Hit(place=item.place, message=f"group_add: ${item.used[0]}")
    node = service.node.get("user")
    group = _text(node).partition(":")[2]
    if node is not None and group in ENGINE_GROUPS:
        yield Hit(place=node.place, message=f"user: {_text(node)}, with the group {group}")


def root_user(service: Service, _: str) -> Iterator[Hit]:
    """Root inside."""
    node = service.node.get("user")
    user = _text(node).partition(":")[0]
    if node is None:
        words = "no user: the image decides, and most images say root"
        yield Hit(place=service.place, message=words, grade="low")
    elif user == "root" or (user and not user.strip("0")):
        yield Hit(place=node.place, message=f"user: {_text(node)}")


def limits(service: Service, _: str) -> Iterator[Hit]:
    """Memory, processes and processors without a bound."""
    node = service.node
    bounds = ("deploy", "resources", "limits")
    missing = [
        name
        for name, keys in (
            ("memory", (("mem_limit",), (*bounds, "memory"))),
            ("pids", (("pids_limit",), (*bounds, "pids"))),
            ("cpus", (("cpus",), ("cpu_quota",), (*bounds, "cpus"))),
        )
        if all(node.string(*key) in ("", "0", "-1") for key in keys)
    ]
    if missing:
        yield Hit(place=service.place, message=f"no limit for {', '.join(missing)}")
    for key in ("oom_kill_disable",):
        if node.truth(key):
            yield Hit(place=node.mapped()[key].place, message=f"{key}: true")


def new_privileges(service: Service, _: str) -> Iterator[Hit]:
    """set-user-id programs inside still make root."""
    said = {_text(i).replace("=", ":", 1) for i in service.node.listed("security_opt")}
    if not said & {"no-new-privileges:true", "no-new-privileges"}:
        yield Hit(place=service.place, message="no-new-privileges is not set")


def host_programs(service: Service, _: str) -> Iterator[Hit]:
    """What makes Compose or the engine run something outside of the container."""
    node = service.node.get("provider")
    if node is not None:
        words = f"provider: Compose runs the host's program {node.string('type')}"
        yield Hit(place=node.place, message=words)
    node = service.node.get("cgroup_parent")
    if node is not None:
        yield Hit(place=node.place, message=f"cgroup_parent: {_text(node)}", grade="medium")
    table = service.node.get("sysctls")
    for key, value in (names(table).fields or {}).items() if table is not None else ():
        if not key.startswith("net."):
            yield Hit(place=value.place, message=f"sysctls: {key}", grade="medium")


# --- which engine ---------------------------------------------------------------------------------


def engine_variables(project: Project, service: Service) -> Iterator[Hit]:
    """DOCKER_HOST and its relatives: an engine over TCP, or one that somebody else is root over."""
    from ..policy import engines

    for variable in service.variables:
        if variable.name not in engines.VARIABLES or not variable.value:
            continue
        address, place = variable.value, variable.place
        words = f"{variable.name}={address}"
        if address.startswith(("tcp://", "http://")):
            verified = service.variable("DOCKER_TLS_VERIFY") not in ("", "0")
            if not verified:
                yield Hit(place=place, message=f"{words}, without TLS: whoever connects is root")
            elif _host(address) not in _names(project):
                words += ", an engine outside of this project"
                yield Hit(place=place, message=words, grade="high")
        elif address.startswith("ssh://"):
            yield Hit(place=place, message=f"{words}, an engine on another machine", grade="high")
        else:
            yield Hit(place=place, message=f"{words}, an engine's socket", grade="medium")


def _host(address: str) -> str:
    return address.partition("://")[2].partition("/")[0].rpartition(":")[0]


def _names(project: Project) -> set[str]:
    """Every name under which a service of the project answers."""
    found = set()
    for service in project.services:
        found |= {service.name, service.node.string("hostname")}
        for network in service.node.mapped("networks").values():
            found |= {_text(alias) for alias in network.listed("aliases")}
    return found - {""}


def open_engines(service: Service, _: str) -> Iterator[Hit]:
    """An engine in a container that listens without TLS, or on the host's own ports."""
    words = [_text(w) for key in ("command", "entrypoint") for w in service.node.listed(key)]
    line = " ".join(words)
    image = service.node.string("image")
    node = service.node.get("command") or service.node.get("entrypoint")
    if (
        node is not None
        and "tcp://" in line
        and "--tlsverify" not in line
        and ("dockerd" in line or "dind" in image or line.startswith("-"))
    ):
        yield Hit(place=node.place, message=f"an engine that listens without TLS: {line}")
    for variable in service.variables:
        if variable.name == "DOCKER_TLS_CERTDIR" and not variable.value:
            words_ = "DOCKER_TLS_CERTDIR is empty: the engine listens without TLS"
            yield Hit(place=variable.place, message=words_)
    for item in service.node.listed("ports"):
        port = item.string("target") if item.fields is not None else _text(item).rpartition(":")[2]
        if port.partition("/")[0] in ("2375", "2376"):
            yield Hit(place=item.place, message=f"publishes an engine's port {port}")


# --- secrets --------------------------------------------------------------------------------------


def _is_secret(name: str, value: str) -> bool:
    if value.startswith(SECRET_BEGINNINGS) and len(value) > 12:
        return True
    if "://" in value and "@" in value.partition("://")[2].partition("/")[0]:
        return ":" in value.partition("://")[2].partition("@")[0]
    upper = name.upper()
    if upper.endswith(NOT_SECRET) or value.lower() in ("true", "false", "yes", "no"):
        return False
    return any(word in upper for word in SECRET_WORDS)


def _graded(variable: Variable) -> tuple[str, str]:
    if variable.origin == FROM_FILE and variable.literal and variable.value:
        return "high", "with its value in the file"
    if variable.origin == FROM_ENV_FILE:
        return "medium", "from an env file"
    return "low", "passed from outside"


def secret_grade(variable: Variable) -> str:
    """How bad a variable is as a secret; nothing when it is none."""
    if variable.value == "" and variable.origin == FROM_FILE and variable.literal:
        return ""
    return _graded(variable)[0] if _is_secret(variable.name, variable.value) else ""


def secrets(service: Service, _: str) -> Iterator[Hit]:
    """Secrets as variables: every process inside and `docker inspect` shows them."""
    for variable in service.variables:
        grade = secret_grade(variable)
        if grade:
            how = _graded(variable)[1]
            yield Hit(place=variable.place, message=f"{variable.name}, {how}", grade=grade)
    table = service.node.get("build", "args")
    for name, node in (names(table).fields or {}).items() if table is not None else ():
        if _is_secret(name, _text(node)):
            words = f"{name}, a build argument, which stays in the image's history"
            grade = "high" if _text(node) and not node.used else "medium"
            yield Hit(place=node.place, message=words, grade=grade)


# --- what cannot be judged ------------------------------------------------------------------------

JUDGED = ("privileged", "network_mode", "pid", "ipc", "userns_mode", "cap_add", "devices",
          "security_opt", "user", "group_add", "runtime")  # fmt: skip


def unresolved(service: Service, _: str) -> Iterator[Hit]:
    """Variables without a value here, in a place where they decide."""
    for mount in service.mounts:
        if mount.unset and not sources.is_socket_target(mount.target):
            words = f"what is mounted at {mount.target} depends on ${mount.unset[0]}"
            yield Hit(place=mount.place, message=words)
    for key in JUDGED:
        for item in service.node.listed(key):
            if item.unset and key != "group_add":
                yield Hit(place=item.place, message=f"{key} depends on ${item.unset[0]}")
