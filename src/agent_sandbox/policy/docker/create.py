"""The body of `POST /containers/create`: one row for every field that the engine knows.

A row lets a value pass, changes it, or lets nothing pass but the default, which is then not sent.
Whatever the engine adds in a later version is refused until it has a row.
"""

from __future__ import annotations

import re

from . import images, mounts, networking, resources
from .labels import labels
from .schema import (
    DROP,
    MAX_LIST,
    Site,
    flag,
    ignored,
    inner,
    mapping,
    number,
    off,
    only,
    read,
    sequence,
    stated,
    string,
    text,
    texts,
    whole,
)
from .slots import COUNT, MOUNTS, Slot, image, own
from .values import IMAGE_LABEL, OWNER_LABEL, Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Table

HOUR = 3600
NANO = 10**9
NAME = networking.NAME
USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?"
SIGNAL = r"(SIG)?[A-Z0-9+]{1,10}|[0-9]{1,2}"
# What a container has by default. MKNOD and SETFCAP are missing: with them root in a container
# could leave a device node or a file with capabilities in the project, for the host to use.
CAPABILITIES = frozenset((
    "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "NET_RAW", "SETGID", "SETUID", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
))  # fmt: skip
ALWAYS_DROPPED = frozenset(("MKNOD", "SETFCAP"))
CAPABILITY = re.compile(r"(?:CAP_)?([A-Z_]{2,30})")
NO_NEW_PRIVILEGES = (
    "no-new-privileges", "no-new-privileges=true", "no-new-privileges:true",
)  # fmt: skip
# Read by runtimes for graphics cards, which add devices and mounts.
DEVICE_VARIABLES = ("NVIDIA_", "AMD_VISIBLE_", "HABANA_", "ASCEND_")
# The engine would change into it before the container's root is in place (CVE-2024-21626).
NOT_A_WORKING_DIRECTORY = "/proc"


def create(site: Site, value: object) -> dict[str, object]:
    """The new body."""
    asked = dict(mapping(site, value))
    host = read(site, HOST, asked.pop("HostConfig", None) or {})
    networks = read(site, NETWORKING, asked.pop("NetworkingConfig", None) or {})
    config = read(site, CONFIG, asked)
    name = config.get("Image")
    if not isinstance(name, str):
        raise site.at("Image").refuse("an image is needed", 400)
    config["Image"] = site.need(image(name, site.grants))
    config["Labels"] = _labelled(site, config.get("Labels"), name)
    count = Reference(kind="count", name="containers")
    site.need(Slot(mode=COUNT, references=(count,)))
    made = _host(site, host, config.pop("Volumes", []), name)
    return {**config, "HostConfig": made, "NetworkingConfig": networks}


def _labelled(site: Site, asked: object, name: str) -> dict[str, object]:
    found = dict(asked) if isinstance(asked, dict) else {OWNER_LABEL: site.grants.owner}
    if not images.is_id(name):
        found[IMAGE_LABEL] = images.shown(name, site.grants)
    return found


def _host(site: Site, host: dict[str, object], volumes: object, name: str) -> dict[str, object]:
    sent = resources.limited(site, host)
    asked = [host.get("Binds", []), host.get("Mounts", []), volumes]
    sent.pop("Binds", None)
    wanted = _distinct(site, [m for one in asked if isinstance(one, list) for m in one])
    tmpfs = sent.get("Tmpfs")
    if isinstance(tmpfs, dict) and not site.derived.keys().isdisjoint(tmpfs):
        raise site.at("Tmpfs").refuse("a tmpfs in the place of something hidden or read-only")
    if "VolumesFrom" in sent and (tmpfs or any(m["Type"] == "tmpfs" for m in wanted)):
        # It could stand in the place of a mask that comes with the other container.
        raise site.at("VolumesFrom").refuse("not together with a tmpfs")
    sent["Mounts"] = _with_volumes(site, wanted, tmpfs, name)
    if "NetworkMode" not in sent:
        sent["NetworkMode"] = networking.network(site, "default")
    if sent.pop("PublishAllPorts", False):
        bindings = sent.get("PortBindings", {})
        sent["PortBindings"] = networking.published(
            site, name, bindings if isinstance(bindings, dict) else {}
        )
    sent["CapDrop"] = _dropped(site, sent.get("CapDrop"))
    _confine(site, sent)
    sent.setdefault("LogConfig", resources.log_default(site.grants))
    sent["RestartPolicy"] = {"Name": "no", "MaximumRetryCount": 0}
    if not networking.is_open(site.grants):
        sent["Dns"] = [networking.NO_RESOLVER]
        sent.pop("DnsSearch", None)
    return sent


def _confine(site: Site, sent: dict[str, object]) -> None:
    """Keep a container's root from leaving setuid programs in the host's files.

    Also where it has such files from another container, or can reach that one through /proc.
    """
    reaches = mounts.WRITABLE in site.marks or "VolumesFrom" in sent or "PidMode" in sent
    if not site.grants.seccomp or not reaches:
        return
    site.changed("seccomp.setuid")
    asked = sent.get("SecurityOpt")
    given = asked if isinstance(asked, list) else []
    sent["SecurityOpt"] = [*given, f"seccomp={site.grants.seccomp}"]


def _distinct(site: Site, wanted: list[dict[str, object]]) -> list[dict[str, object]]:
    """One mount for each place, in order.

    What hides or protects a part of a mount wins over what was asked for: a tmpfs in its place
    would not be there when the engine copies files.
    """
    places: dict[str, dict[str, object]] = {}
    for mount in wanted:
        places.setdefault(str(mount["Target"]), mount)
    places.update(site.derived)
    if len(places) > MAX_LIST:
        raise site.refuse("more mounts than a container may have", 400)
    return [places[place] for place in sorted(places)]


def _with_volumes(site: Site, wanted: list[dict[str, object]], tmpfs: object, name: str) -> Slot:
    """The mounts, and a volume for each that the image declares.

    The engine would make those by itself, without an owner.
    """
    taken = list(tmpfs) if isinstance(tmpfs, dict) else []
    slot = image(name, site.grants)
    return site.need(slot.replace(mode=MOUNTS, value=(wanted, taken)))


# --- single fields


def capabilities(site: Site, value: object) -> object:
    """`CapAdd`: what a container has anyway, after `CapDrop: ALL`."""
    found = {_capability(site, item) for item in sequence(site, value)}
    if found - CAPABILITIES:
        raise site.refuse(f"the capability {min(found - CAPABILITIES)} is not given")
    if "NET_RAW" in found and not networking.is_open(site.grants):
        raise site.refuse("the capability NET_RAW is not given in a closed network")
    return sorted(found) or DROP


def dropped(site: Site, value: object) -> object:
    """`CapDrop`."""
    return sorted({_capability(site, item) for item in sequence(site, value)}) or DROP


def _capability(site: Site, value: object) -> str:
    match = CAPABILITY.fullmatch(string(site, value).upper())
    if match is None:
        raise site.refuse("not the name of a capability", 400)
    return match[1]


def _dropped(site: Site, asked: object) -> list[str]:
    names = set(asked) if isinstance(asked, list) else set()
    # In a closed network the bridge has no address, but whoever makes frames needs none.
    closed = frozenset() if networking.is_open(site.grants) else frozenset(("NET_RAW",))
    return ["ALL"] if "ALL" in names else sorted(names | ALWAYS_DROPPED | closed)


def security(site: Site, value: object) -> object:
    """`SecurityOpt`: only the one that takes away."""
    # Our own profile is put back where it is needed.
    ours = f"seccomp={site.grants.seccomp}" if site.grants.seccomp else NO_NEW_PRIVILEGES[0]
    found = []
    for item in sequence(site, value):
        if string(site, item) not in (*NO_NEW_PRIVILEGES, ours):
            raise site.refuse(f"the security option {str(item)[:40]!r} is not allowed")
        found += ["no-new-privileges"] if item in NO_NEW_PRIVILEGES else []
    return found[:1] or DROP


def environment(site: Site, value: object) -> object:
    """`Env`, without what makes a runtime hand out devices."""
    found = [string(site, item) for item in sequence(site, value)]
    for item in found:
        if item.upper().startswith(DEVICE_VARIABLES):
            raise site.refuse("variables that ask a runtime for devices are not passed")
    return found or DROP


def command(site: Site, value: object) -> object:
    """A command as list or as one string."""
    if isinstance(value, str):
        return [string(site, value)]
    return [string(site, item) for item in sequence(site, value)]


def working_directory(site: Site, value: object) -> object:
    """An absolute path that is no descriptor of the engine."""
    path = string(site, value)
    if not path:
        return DROP
    if not path.startswith("/"):
        path = f"/{path}"
    kept = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    if ".." in kept.split("/") or mounts.within(kept, NOT_A_WORKING_DIRECTORY):
        raise site.refuse(f"{path[:80]!r} is not allowed")
    return kept


def console(site: Site, value: object) -> object:
    """Height and width."""
    sizes = [number(1, 65535)(site, item) for item in sequence(site, value)]
    if len(sizes) != 2:
        raise site.refuse("must be height and width", 400)
    return DROP if DROP in sizes else sizes


def volumes_from(site: Site, value: object) -> object:
    """Mounts of another container of the run, which have been judged already."""
    found = []
    for item in sequence(site, value):
        name, _, mode = string(site, item).partition(":")
        if not NAME.fullmatch(name) or mode not in ("", "ro", "rw"):
            raise site.refuse("not CONTAINER[:ro|rw]", 400)
        found.append(site.need(own("container", name, f"{{}}:{mode}" if mode else "{}")))
    return found or DROP


def shared_memory(site: Site, value: object) -> object:
    """`ShmSize`, a part of the container's memory."""
    return number(1, site.grants.memory)(site, value)


def image_name(site: Site, value: object) -> object:
    """`Image`, looked up later."""
    name = string(site, value)
    if not images.is_id(name):
        images.parse(name)
    return name


def duration(site: Site, value: object) -> object:
    """Nanoseconds of a health check."""
    return number(1_000_000, 24 * HOUR * NANO)(site, value)


def bind_list(site: Site, value: object) -> object:
    """`Binds`."""
    return mounts.binds(site, value)


def mount_list(site: Site, value: object) -> object:
    """`Mounts`."""
    return mounts.mounts(site, value)


def volume_list(site: Site, value: object) -> object:
    """`Volumes`."""
    return mounts.anonymous(site, value)


CONFIG: Table = {
    "Hostname": text(networking.HOSTNAME),
    "Domainname": text(networking.HOSTNAME),
    "User": text(USER),
    "AttachStdin": flag,
    "AttachStdout": flag,
    "AttachStderr": flag,
    "Tty": flag,
    "OpenStdin": flag,
    "StdinOnce": flag,
    "Env": environment,
    "Cmd": command,
    "Entrypoint": command,
    "Shell": texts(),
    "Image": image_name,
    "Volumes": volume_list,
    "WorkingDir": working_directory,
    "ExposedPorts": networking.exposed,
    "Labels": labels,
    "StopSignal": text(SIGNAL),
    "StopTimeout": lambda site, value: min(max(whole(site, value), 0), HOUR),
    "Healthcheck": inner({
        "Test": texts(), "Interval": duration, "Timeout": duration, "StartPeriod": duration,
        "StartInterval": duration, "Retries": number(1, 1000),
    }),
    "NetworkDisabled": flag,
    "ArgsEscaped": ignored(flag),
    "OnBuild": only([]),
    "MacAddress": only("", why="a chosen address would allow spoofing"),
    # Some clients write this one beside the image.
    "Runtime": only("", why="the runtime is the engine's choice"),
}  # fmt: skip

HOST: Table = {
    **resources.RESOURCES,
    "Privileged": off(why="privileged containers own the host"),
    "Binds": bind_list,
    "Mounts": mount_list,
    "Tmpfs": mounts.tmpfs,
    "VolumesFrom": volumes_from,
    "VolumeDriver": only("", "local", why="volume plugins are not offered"),
    "CapAdd": capabilities,
    "CapDrop": dropped,
    "SecurityOpt": security,
    "NetworkMode": networking.mode,
    "PortBindings": networking.bindings,
    "PublishAllPorts": flag,
    "ExtraHosts": networking.extra_hosts,
    "Dns": networking.dns,
    "DnsOptions": texts(r"[a-z0-9:-]{1,64}"),
    "DnsSearch": texts(r"\.|" + networking.HOSTNAME),
    "Links": networking.links,
    "PidMode": networking.namespace(),
    "IpcMode": networking.namespace("none", "private", "shareable"),
    "CgroupnsMode": networking.namespace("private"),
    "UTSMode": only("", why="the host's name space is not given"),
    "UsernsMode": only("", why="would undo the engine's mapping of users"),
    "Cgroup": only(""),
    # An empty list is not null: it would show what the engine hides in /proc.
    "MaskedPaths": only(),
    "ReadonlyPaths": only(),
    "Sysctls": only({}),
    "Runtime": only("", why="the runtime is the engine's choice"),
    "Annotations": only({}),
    "LogConfig": resources.log,
    "GroupAdd": only([]),
    "StorageOpt": only({}),
    "ShmSize": shared_memory,
    "AutoRemove": flag,
    "ReadonlyRootfs": flag,
    # The engine may have a default of its own.
    "Init": stated,
    "ConsoleSize": console,
    "ContainerIDFile": ignored(text()),
    "Isolation": only("", "default"),
}

NETWORKING: Table = {"EndpointsConfig": networking.endpoints}

EXEC: Table = {
    "AttachStdin": flag,
    "AttachStdout": flag,
    "AttachStderr": flag,
    "Tty": flag,
    "Detach": flag,
    "DetachKeys": text(r"[a-z@^\[\],_\\-]{1,64}"),
    "detachKeys": only(""),
    "Cmd": command,
    "Env": environment,
    "User": text(USER),
    "WorkingDir": working_directory,
    "ConsoleSize": console,
    "Privileged": off(why="privileged commands own the host"),
    # docker-py repeats the container of the path.
    "Container": ignored(text()),
}

EXEC_START: Table = {"Detach": flag, "Tty": flag, "ConsoleSize": console}
