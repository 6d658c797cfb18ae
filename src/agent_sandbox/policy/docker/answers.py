"""What the engine answers, with only what belongs to the run.

None means that nothing may be shown: a single object becomes 404, an event is left out.
"""

from __future__ import annotations

import re

from . import images, mounts, watching
from .values import IMAGE_LABEL, OWNER_LABEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .values import Grants

    Document = dict[str, object]

LONG_ID = re.compile(r"\b[0-9a-f]{64}\b")
# Fields of `/info` that clients use and that say nothing about other people's work.
INFO = (
    "Architecture", "CgroupDriver", "CgroupVersion", "CpuCfsPeriod", "CpuCfsQuota", "CPUSet",
    "CPUShares", "DefaultRuntime", "Driver", "ExperimentalBuild", "IndexServerAddress",
    "IPv4Forwarding", "Isolation", "KernelMemory", "LoggingDriver", "MemoryLimit",
    "OomKillDisable", "OperatingSystem", "OSType", "OSVersion", "PidsLimit", "SecurityOptions",
    "ServerVersion", "SwapLimit", "KernelVersion",
)  # fmt: skip
# Paths of the host in the answer to inspect.
HOST_PATHS = ("ResolvConfPath", "HostnamePath", "HostsPath", "LogPath")


def filter_answer(name: str, grants: Grants, document: object) -> object:
    """An answer of the engine with only what the run may see. "error" is for statuses from 400."""
    known = (watching.ANSWERS if grants.watches else ANSWERS).get(name) or ANSWERS.get(name)
    return known(grants, document) if known is not None else document


def _is_own(grants: Grants, labels: object) -> bool:
    return isinstance(labels, dict) and labels.get(OWNER_LABEL) == grants.owner


def _objects(value: object) -> list[Document]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _inner(document: Document, key: str) -> Document:
    value = document.get(key)
    return dict(value) if isinstance(value, dict) else {}


# --- containers


def _containers(grants: Grants, document: object) -> object:
    return [
        _listed(grants, one) for one in _objects(document) if _is_own(grants, one.get("Labels"))
    ]


def _listed(grants: Grants, one: Document) -> Document:
    networks = _inner(_inner(one, "NetworkSettings"), "Networks")
    shown: Document = {**one, "HostConfig": _network_name(_inner(one, "HostConfig"), networks)}
    shown["Image"] = _image_name(grants, one.get("Labels"), one.get("Image"))
    shown["Mounts"] = [_mount(grants, mount) for mount in _objects(one.get("Mounts"))]
    return shown


def _image_name(grants: Grants, labels: object, image: object) -> str:
    """The image as it was named; the engine knows it by its id."""
    named = labels.get(IMAGE_LABEL) if isinstance(labels, dict) else None
    return images.shown(str(named or image or ""), grants)


def _network_name(host: Document, networks: Document) -> Document:
    """Clients look the mode up among the networks by name; we have given the engine an id."""
    for name, settings in networks.items():
        if isinstance(settings, dict) and settings.get("NetworkID") == host.get("NetworkMode"):
            return {**host, "NetworkMode": name}
    if len(networks) == 1 and LONG_ID.fullmatch(str(host.get("NetworkMode"))):
        # Before the first start the engine has not written the id there.
        return {**host, "NetworkMode": next(iter(networks))}
    return host


def _inspect(grants: Grants, document: object) -> object:
    if not isinstance(document, dict):
        return None
    config = _inner(document, "Config")
    if not _is_own(grants, config.get("Labels")):
        return None
    networks = _inner(_inner(document, "NetworkSettings"), "Networks")
    host = _network_name(_inner(document, "HostConfig"), networks)
    config["Image"] = _image_name(grants, config.get("Labels"), config.get("Image"))
    shown: Document = {**document, "Config": config, "HostConfig": host}
    shown.update({key: "" for key in HOST_PATHS if key in document})
    shown.pop("GraphDriver", None)
    shown["Mounts"] = [_mount(grants, mount) for mount in _objects(document.get("Mounts"))]
    return shown


def _mount(grants: Grants, mount: Document) -> Document:
    """A root that goes by the name of a volume is shown as the bind that was asked for."""
    root = mounts.root_of(grants, str(mount.get("Name", "")))
    if root:
        return {**mount, "Type": "bind", "Source": root, "Name": "", "Driver": ""}
    return {**mount, "Source": ""} if mount.get("Type") == "volume" else mount


# --- images


def _images(grants: Grants, document: object) -> object:
    found = []
    for one in _objects(document):
        shown = _names(grants, one)
        own = _is_own(grants, one.get("Labels"))
        if own or shown["RepoTags"] or shown["RepoDigests"]:
            found.append(shown)
    return found


def _names(grants: Grants, one: Document) -> Document:
    tags, digests = (
        [
            images.shown(text, grants)
            for text in (listed if isinstance(listed, list) else [])
            if isinstance(text, str) and images.visible(text, grants)
        ]
        for listed in (one.get("RepoTags"), one.get("RepoDigests"))
    )
    return {**one, "RepoTags": tags, "RepoDigests": digests}


def _image(grants: Grants, document: object) -> object:
    if not isinstance(document, dict):
        return None
    shown = _names(grants, document)
    own = _is_own(grants, _inner(document, "Config").get("Labels"))
    if not own and not shown["RepoTags"] and not shown["RepoDigests"]:
        return None
    shown.pop("GraphDriver", None)
    return shown


def _history(grants: Grants, document: object) -> object:
    found = []
    for one in _objects(document):
        tags = one.get("Tags")
        listed = [t for t in tags if isinstance(t, str)] if isinstance(tags, list) else []
        seen = [images.shown(t, grants) for t in listed if images.visible(t, grants)]
        found.append({**one, "Tags": seen or None})
    return found


def _removed(grants: Grants, document: object) -> object:
    return [_texts(grants, one) for one in _objects(document)]


def _texts(grants: Grants, document: object) -> object:
    """Tags in words of the engine, as the sandbox has named them."""
    if isinstance(document, str):
        return document.replace(images.namespace(grants), "")
    if isinstance(document, dict):
        return {key: _texts(grants, value) for key, value in document.items()}
    if isinstance(document, list):
        return [_texts(grants, one) for one in document]
    return document


# --- networks and volumes


def _networks(grants: Grants, document: object) -> object:
    return [one for one in _objects(document) if _is_own(grants, one.get("Labels"))]


def _network(grants: Grants, document: object) -> object:
    own = isinstance(document, dict) and _is_own(grants, document.get("Labels"))
    return document if own else None


def _volumes(grants: Grants, document: object) -> object:
    listed = document.get("Volumes") if isinstance(document, dict) else []
    shown = [_volume(grants, one) for one in _objects(listed)]
    return {"Volumes": [one for one in shown if one is not None], "Warnings": None}


def _volume(grants: Grants, document: object) -> object:
    if not isinstance(document, dict) or not _is_own(grants, document.get("Labels")):
        return None
    if mounts.root_of(grants, str(document.get("Name", ""))):
        return None
    return {**document, "Mountpoint": ""}


# --- the rest


def _info(grants: Grants, document: object) -> object:
    asked = document if isinstance(document, dict) else {}
    shown: Document = {key: asked[key] for key in INFO if key in asked}
    count, memory = asked.get("NCPU"), asked.get("MemTotal")
    shown.update({
        # An onlooker asks about the engine that it sees, a run about one of its own.
        "ID": asked.get("ID", "") if grants.watches else grants.owner, "Name": "agent-sandbox",
        "Containers": 0, "ContainersRunning": 0, "ContainersPaused": 0, "ContainersStopped": 0,
        "Images": 0, "Labels": [], "Warnings": None, "Debug": False, "DockerRootDir": "",
        "NCPU": max(1, min(count if isinstance(count, int) else 1, int(grants.cpus))),
        "MemTotal": min(memory if isinstance(memory, int) else grants.memory, grants.memory),
        "Plugins": {"Volume": ["local"], "Network": ["bridge"], "Log": ["json-file"]},
        "RegistryConfig": {"IndexConfigs": {}, "InsecureRegistryCIDRs": [], "Mirrors": []},
        "Swarm": {"LocalNodeState": "inactive", "NodeID": "", "RemoteManagers": None},
        "Runtimes": {}, "HttpProxy": "", "HttpsProxy": "", "NoProxy": "",
    })  # fmt: skip
    return shown


def _events(grants: Grants, document: object) -> object:
    """One event: container and image events carry the labels of their object."""
    if not isinstance(document, dict):
        return None
    attributes = _inner(_inner(document, "Actor"), "Attributes")
    return _texts(grants, document) if _is_own(grants, attributes) else None


def _error(grants: Grants, document: object) -> object:
    """The engine's message, without ids: a name that is in use must not tell by whom."""
    message = document.get("message", "") if isinstance(document, dict) else ""
    text = str(_texts(grants, message))
    return {"message": LONG_ID.sub("…", text)[:4096]}


ANSWERS: dict[str, Callable[[Grants, object], object]] = {
    "containers": _containers,
    "inspect": _inspect,
    "images": _images,
    "image": _image,
    "history": _history,
    "removed": _removed,
    "networks": _networks,
    "network": _network,
    "volumes": _volumes,
    "volume": _volume,
    "info": _info,
    "events": _events,
    "progress": _texts,
    "error": _error,
}
