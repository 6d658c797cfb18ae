"""What a container may see of the host: what the sandbox sees, at most as writable.

The engine follows links as root, at every start. So a path that the sandbox can replace is never
named to it: a root that cannot be replaced is, and the rest is resolved below that root by the
engine (`Subpath`) or by a descriptor that the proxy holds.
"""

from __future__ import annotations

import hashlib
import re

from .schema import (
    DROP,
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
    string,
    text,
)
from .slots import FREE, PATH, Slot, own
from .values import OWNER_LABEL, Bind, Grants, Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Policy, Table

    Mount = dict[str, object]

VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}")
SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
# Harmless as a source; it masks files.
NULL = "/dev/null"
# What the runtime mounts and masks itself.
TARGETS_OF_THE_RUNTIME = ("/proc", "/sys", "/dev/pts", "/dev/mqueue")
# Mark of a request that gives a container something of the host to write to.
WRITABLE = "writable"
# Options of `src:dst:options`. z and Z relabel files of the host; shared propagates to it.
READ_ONLY = {"ro": True, "rw": False, "readonly": True}
WITHOUT_EFFECT = frozenset((
    "private", "rprivate", "consistent", "cached", "delegated", "default", "",
))  # fmt: skip
TMPFS_SIZE = re.compile(r"([0-9]{1,12})([kKmMgG]?)")
TMPFS_MODE = re.compile(r"0?[0-7]{3}|0?1[0-7]{3}")
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def within(path: str, root: str) -> bool:
    """Whether a clean path is at or below another."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def clean(site: Site, path: str) -> str:
    """An absolute path that reads the same for everybody; one slash at its end is lost."""
    path = path[:-1] if path.endswith("/") and len(path) > 1 else path
    parts = path.split("/")[1:]
    if not path.startswith("/") or any(part in ("", ".", "..") for part in parts if path != "/"):
        raise site.refuse(f"{path[:80]!r} is not a plain absolute path")
    if any(char < " " or char == "\x7f" for char in path):
        raise site.refuse("a path with control characters")
    return path


def target(site: Site, value: object) -> str:
    """Where in the container; not over what protects it."""
    path = clean(site, string(site, value))
    if path == "/" or any(within(path, taken) for taken in TARGETS_OF_THE_RUNTIME):
        raise site.refuse(f"nothing may be mounted at {path[:80]}")
    return path


# --- host paths


def bind(site: Site, source: str, at: str, *, read_only: bool) -> list[Mount]:
    """A path of the host; what the sandbox sees differently below it goes to `derived`."""
    source = clean(site, source)
    grants = site.grants
    if source in SOCKETS or (grants.socket and source == grants.socket):
        if not grants.socket:
            raise site.refuse("the engine's socket is not given to containers")
        if source != grants.socket:
            site.changed("mount.socket")
        return [_mount("bind", grants.socket, at, read_only=read_only)]
    if source == NULL:
        return [_mount("bind", NULL, at, read_only=True)]
    nearest = max(
        (b for b in grants.binds if within(source, b.host_path)),
        key=lambda b: len(b.host_path), default=None,
    )  # fmt: skip
    if nearest is None or nearest.hidden:
        raise site.refuse(f"{source[:200]} is not visible in the sandbox")
    if not nearest.writable and not read_only:
        site.changed("mount.read-only")
    read_only = read_only or not nearest.writable
    for below in grants.binds:
        if below.host_path != source and within(below.host_path, source):
            place = at + below.host_path[len(source.rstrip("/")) :]
            site.derived[place] = _below(site, below, place, read_only=read_only)
    return [_placed(site, source, at, read_only=read_only)]


def _placed(site: Site, source: str, at: str, *, read_only: bool) -> Mount:
    """The mount of a path that is allowed, named so that it cannot be swapped."""
    grants = site.grants
    if not read_only:
        site.marks.add(WRITABLE)
    fixed = [
        b for b in grants.binds
        if within(source, b.host_path) and not b.swappable and not b.hidden and b.directory
    ]  # fmt: skip
    if any(b.host_path == source and not b.swappable for b in grants.binds):
        return _mount("bind", source, at, read_only=read_only)
    if grants.engine.subpath and fixed:
        root = max(fixed, key=lambda b: len(b.host_path)).host_path
        site.changed("mount.subpath")
        mount = _mount("volume", "", at, read_only=read_only)
        mount["Source"] = site.need(own("volume", root_volume(grants, root)))
        mount["VolumeOptions"] = {
            "NoCopy": True, "Subpath": source[len(root.rstrip("/")) + 1 :],
        }  # fmt: skip
        return mount
    if grants.engine.pins and fixed:
        site.changed("mount.pinned")
        mount = _mount("volume", "", at, read_only=read_only)
        mount["VolumeOptions"] = {"NoCopy": True}
        reference = Reference(kind="path", name=source)
        mount["Source"] = site.need(Slot(mode=PATH, references=(reference,)))
        return mount
    raise site.refuse(
        f"{source[:200]} could be replaced by a link before the engine mounts it; "
        "mount the project's own directory, or use an engine with API 1.45"
    )


def _below(site: Site, below: Bind, at: str, *, read_only: bool) -> Mount:
    """What the sandbox sees differently, seen the same by the container."""
    site.changed("mount.below")
    if not below.hidden:
        return _placed(site, below.host_path, at, read_only=read_only or not below.writable)
    if not below.directory:
        return _mount("bind", NULL, at, read_only=True)
    # An empty volume. Under a tmpfs `docker cp` would see the files: the engine mounts none there.
    options = {"NoCopy": True, "Labels": {OWNER_LABEL: site.grants.owner}}
    return {"Type": "volume", "Target": at, "VolumeOptions": options}


def _mount(kind: str, source: str, at: str, *, read_only: bool) -> Mount:
    mount: Mount = {"Type": kind, "Source": source, "Target": at}
    if read_only:
        mount["ReadOnly"] = True
    if kind == "bind":
        mount["BindOptions"] = {"Propagation": "rprivate"}
    return mount


# --- volumes


def root_volume(grants: Grants, root: str) -> str:
    """The name of the volume that stands for a root."""
    digest = hashlib.sha256(root.encode("utf-8", "surrogateescape")).hexdigest()
    return f"agent-sandbox-{grants.owner}-{digest[:12]}"


def root_of(grants: Grants, name: str) -> str:
    """The root that a volume's name stands for, or ""."""
    for root in grants.binds:
        if root_volume(grants, root.host_path) == name:
            return root.host_path
    return ""


def volume(site: Site, name: str, at: str, *, read_only: bool, options: Mount) -> list[Mount]:
    """A volume of the run: one that exists must be its own, a new one becomes its own."""
    sub = str(options.get("Subpath", ""))
    root = root_of(site.grants, name) if name else ""
    if root:
        return bind(site, f"{root.rstrip('/')}/{sub}" if sub else root, at, read_only=read_only)
    if sub and not site.grants.engine.subpath:
        raise site.refuse("this engine has no Subpath")
    mount = _mount("volume", name, at, read_only=read_only)
    if name:
        if not VOLUME_NAME.fullmatch(name) or name.startswith("agent-sandbox-"):
            raise site.refuse(f"{name[:80]!r} is not the name of a volume")
        reference = Reference(kind="volume", name=name)
        mount["Source"] = site.need(Slot(mode=FREE, references=(reference,)))
    else:
        del mount["Source"]
    # The engine makes a missing volume with these labels.
    mount["VolumeOptions"] = {**options, "Labels": {OWNER_LABEL: site.grants.owner}}
    return [mount]


# --- the three ways to ask


def binds(site: Site, value: object) -> list[Mount]:
    """`Binds`: src:dst[:options], name:dst[:options] or dst."""
    found: list[Mount] = []
    for item in sequence(site, value):
        parts = string(site, item).split(":")
        if len(parts) > 3:
            raise site.refuse("a bind with more than two colons", 400)
        if len(parts) == 1:
            parts.insert(0, "")
        source, at, words = (*parts, "")[:3]
        read_only, options = _bind_options(site, words)
        place = target(site, at)
        if source.startswith("/"):
            found += bind(site, source, place, read_only=read_only)
        else:
            found += volume(site, source, place, read_only=read_only, options=options)
    return found


def _bind_options(site: Site, words: str) -> tuple[bool, Mount]:
    read_only, options = False, {}
    for word in words.split(","):
        if word in READ_ONLY:
            read_only = READ_ONLY[word]
        elif word == "nocopy":
            options["NoCopy"] = True
        elif word not in WITHOUT_EFFECT:
            raise site.refuse(f"the bind option {word[:20]!r} is not allowed")
    return read_only, dict(options)


def anonymous(site: Site, value: object) -> list[Mount]:
    """`Config.Volumes`: a volume without a name for each path."""
    found: list[Mount] = []
    for path, options in mapping(site, value).items():
        if options not in ({}, None):
            raise site.refuse("a volume takes no options here", 400)
        found += volume(site, "", target(site, path), read_only=False, options={})
    return found


def mounts(site: Site, value: object) -> list[Mount]:
    """`Mounts`."""
    found: list[Mount] = []
    for item in sequence(site, value):
        place = site.under("create.mounts")
        entry = read(place, MOUNT, item)
        kind = entry.get("Type")
        if not isinstance(kind, str) or kind not in KINDS:
            raise place.at("Type").refuse(f"mounts of type {str(kind)[:20]!r} are not offered")
        wrong = set(entry) - {"Type", "Source", "Target", "ReadOnly", KINDS[kind]}
        if wrong:
            raise place.refuse(f"{min(wrong)} does not belong to a {kind}", 400)
        found += _kind(place, kind, entry)
    return found


def _kind(site: Site, kind: str, entry: Mount) -> list[Mount]:
    at = target(site.at("Target"), entry.get("Target"))
    source, read_only = str(entry.get("Source", "")), entry.get("ReadOnly") is True
    options = entry.get(KINDS[kind], {})
    if kind == "bind":
        return bind(site.at("Source"), source, at, read_only=read_only)
    if kind == "volume":
        return volume(
            site.at("Source"), source, at, read_only=read_only, options=mapping(site, options)
        )
    if source:
        raise site.at("Source").refuse("a tmpfs has no source", 400)
    size = {"SizeBytes": site.grants.memory, **mapping(site, options)}
    mount: Mount = {"Type": "tmpfs", "Target": at, "TmpfsOptions": size}
    return [mount | {"ReadOnly": True} if read_only else mount]


def subpath(site: Site, value: object) -> object:
    """A relative path that goes down only."""
    path = string(site, value)
    if path and (path.startswith("/") or any(p in ("", ".", "..") for p in path.split("/"))):
        raise site.refuse(f"{path[:80]!r} is not a plain relative path")
    return path or DROP


def _labels(site: Site, value: object) -> object:
    from .labels import labels

    labels(site, value)
    return DROP


def _size(site: Site, value: object) -> object:
    return number(1, site.grants.memory)(site, value)


NO_DRIVER: Policy = inner({"Name": only("", "local"), "Options": only({})})
MOUNT: Table = {
    "Type": string,
    "Source": text(),
    "Target": text(),
    "ReadOnly": flag,
    "Consistency": ignored(text("default|consistent|cached|delegated")),
    "BindOptions": inner({
        "Propagation": only("", "rprivate", "private", why="is not allowed to reach the host"),
        "NonRecursive": off(),
        # Would make a directory on the host, as root.
        "CreateMountpoint": off(),
        "ReadOnlyNonRecursive": off(),
        "ReadOnlyForceRecursive": off(),
    }),
    "VolumeOptions": inner({
        "NoCopy": flag,
        "Labels": _labels,
        # Mounts anything: a host path, procfs, a disk, a cgroup tree, a share in the network.
        "DriverConfig": NO_DRIVER,
        "Subpath": subpath,
    }),
    "TmpfsOptions": inner({"SizeBytes": _size, "Mode": number(0, 0o1777), "Options": only([])}),
    "ImageOptions": only({}),
    "ClusterOptions": only({}),
}  # fmt: skip
KINDS = {"bind": "BindOptions", "volume": "VolumeOptions", "tmpfs": "TmpfsOptions"}


def tmpfs(site: Site, value: object) -> object:
    """`Tmpfs`: path → options. Never setuid, never devices, always a size."""
    found = {}
    for path, words in mapping(site, value).items():
        found[target(site, path)] = _tmpfs_options(site, string(site, words))
    return found or DROP


def _tmpfs_options(site: Site, words: str) -> str:
    access, execute, size, mode = "rw", "noexec", site.grants.memory, ""
    for word in filter(None, words.split(",")):
        name, _, value = word.partition("=")
        if word in ("rw", "ro"):
            access = word
        elif word in ("exec", "noexec"):
            execute = word
        elif word in ("nosuid", "nodev"):
            continue
        elif name == "size" and (match := TMPFS_SIZE.fullmatch(value)):
            size = int(match[1]) * UNITS[match[2].lower()]
        elif name == "mode" and TMPFS_MODE.fullmatch(value):
            mode = value
        else:
            raise site.refuse(f"the tmpfs option {word[:20]!r} is not allowed")
    if not 0 < size <= site.grants.memory:
        raise site.refuse(f"docker.memory allows {site.grants.memory} bytes")
    suffix = f",mode={mode}" if mode else ""
    return f"{access},{execute},nosuid,nodev,size={size}{suffix}"
