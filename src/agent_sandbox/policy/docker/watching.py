"""What an onlooker may see: `sandboxctl docker serve --read-only`.

An onlooker owns nothing. It asks a few questions, about everything in the engine or about what
carries certain labels, and gets the fields that are named here. Variables, command lines, mounts
and what containers have written are not among them.
"""

from __future__ import annotations

from .values import OWNER_LABEL, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .values import Found, Grants

    Document = dict[str, object]

# Not among them: logs, archive, changes and export (content), top (command lines), images by name
# and their history (variables, build arguments).
ROUTES = frozenset((
    "ping", "version", "info", "events", "containers", "inspect", "stats", "images", "networks",
    "network", "volumes",
))  # fmt: skip
# Filters whose answer tells what is not shown: where something is mounted, or that a container
# exists which the labels leave out.
TELLING = frozenset(("volume", "before", "since"))

CONTAINER = (
    "Id", "Names", "Image", "ImageID", "Created", "State", "Status", "Ports", "SizeRw",
    "SizeRootFs",
)  # fmt: skip
INSPECT = ("Id", "Created", "Name", "Image", "Platform", "Driver", "RestartCount", "SizeRw",
           "SizeRootFs")  # fmt: skip
# Neither `Error`, which quotes a command line, nor the log of health checks.
STATE = ("Status", "Running", "Paused", "Restarting", "OOMKilled", "Dead", "ExitCode", "StartedAt",
         "FinishedAt")  # fmt: skip
CONFIG = ("Hostname", "Domainname", "User", "Tty", "OpenStdin", "Image", "ExposedPorts",
          "StopSignal")  # fmt: skip
HOST = ("NetworkMode", "RestartPolicy", "Memory", "NanoCpus", "PidsLimit", "PortBindings",
        "AutoRemove")  # fmt: skip
ENDPOINT = (
    "Aliases", "NetworkID", "EndpointID", "Gateway", "IPAddress", "IPPrefixLen", "IPv6Gateway",
    "GlobalIPv6Address", "GlobalIPv6PrefixLen", "MacAddress", "DNSNames",
)  # fmt: skip
IMAGE = ("Id", "RepoTags", "RepoDigests", "Created", "Size", "VirtualSize", "SharedSize",
         "Containers")  # fmt: skip
NETWORK = ("Name", "Id", "Created", "Scope", "Driver", "EnableIPv6", "Internal", "Attachable",
           "Ingress", "ConfigOnly")  # fmt: skip
VOLUME = ("Name", "Driver", "Scope", "CreatedAt")
# The engine's own events show its configuration.
EVENT_TYPES = frozenset(("container", "image", "network", "volume"))


# --- who is seen


def may_ask(grants: Grants, route: str) -> None:
    """Refuse what is no question for an onlooker."""
    if grants.watches and route not in ROUTES:
        raise Refused("read-only.content", f"this socket is read-only and does not show '{route}'")


def selectors(grants: Grants) -> list[str]:
    """The labels, as NAME=VALUE, that a list is narrowed down to."""
    return list(grants.labels) if grants.watches else [f"{OWNER_LABEL}={grants.owner}"]


def sees(grants: Grants, labels: object) -> bool:
    """Whether an object with these labels is the run's own, or one for this onlooker."""
    known = labels if isinstance(labels, dict) else {}
    pairs = (wanted.partition("=") for wanted in selectors(grants))
    return all(known.get(name) == value for name, _, value in pairs)


def may_use(grants: Grants, seen: Found) -> bool:
    """The same for what inspect said."""
    if grants.watches:
        return sees(grants, seen.extra.get("labels"))
    return seen.owner == grants.owner


# --- what is shown


def _only(document: Mapping[str, object], names: tuple[str, ...]) -> Document:
    return {name: document[name] for name in names if name in document}


def _inner(document: Mapping[str, object], key: str) -> Document:
    value = document.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[Document]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _labels(value: object) -> Document:
    """Without paths of the host, which compose writes down."""
    known = value if isinstance(value, dict) else {}
    return {name: text for name, text in known.items() if not str(text).startswith(("/", "~"))}


def _endpoints(document: Document) -> Document:
    networks = _inner(_inner(document, "NetworkSettings"), "Networks")
    return {name: _only(one, ENDPOINT) for name, one in networks.items() if isinstance(one, dict)}


def _containers(grants: Grants, document: object) -> object:
    return [_container(one) for one in _objects(document) if sees(grants, one.get("Labels"))]


def _container(one: Document) -> Document:
    return {
        **_only(one, CONTAINER), "Command": "", "Mounts": [], "Labels": _labels(one.get("Labels")),
        "HostConfig": _only(_inner(one, "HostConfig"), ("NetworkMode",)),
        "NetworkSettings": {"Networks": _endpoints(one)},
    }  # fmt: skip


def _inspect(grants: Grants, document: object) -> object:
    if not isinstance(document, dict):
        return None
    config, state = _inner(document, "Config"), _inner(document, "State")
    if not sees(grants, config.get("Labels")):
        return None
    shown = _only(state, STATE)
    if state.get("Health"):
        shown["Health"] = _only(_inner(state, "Health"), ("Status", "FailingStreak"))
    return {
        **_only(document, INSPECT), "Path": "", "Args": [], "Mounts": [], "State": shown,
        "Config": {
            **_only(config, CONFIG), "Env": [], "Cmd": None, "Entrypoint": None,
            "Labels": _labels(config.get("Labels")),
        },
        "HostConfig": _only(_inner(document, "HostConfig"), HOST),
        "NetworkSettings": {
            "Ports": _inner(document, "NetworkSettings").get("Ports"),
            "Networks": _endpoints(document),
        },
    }  # fmt: skip


def _images(grants: Grants, document: object) -> object:
    return [
        {**_only(one, IMAGE), "ParentId": "", "Labels": _labels(one.get("Labels"))}
        for one in _objects(document)
        if sees(grants, one.get("Labels"))
    ]


def _networks(grants: Grants, document: object) -> object:
    shown = [_network(grants, one) for one in _objects(document)]
    return [one for one in shown if one is not None]


def _network(grants: Grants, document: object) -> object:
    if not isinstance(document, dict) or not sees(grants, document.get("Labels")):
        return None
    ranges = _objects(_inner(document, "IPAM").get("Config"))
    return {
        **_only(document, NETWORK), "Options": {}, "Labels": _labels(document.get("Labels")),
        # Who is in it is seen at the containers, if they are.
        "Containers": {},
        "IPAM": {"Driver": "default", "Config": [_only(r, ("Subnet", "Gateway")) for r in ranges]},
    }  # fmt: skip


def _volumes(grants: Grants, document: object) -> object:
    listed = document.get("Volumes") if isinstance(document, dict) else []
    shown = [
        {
            **_only(one, VOLUME), "Mountpoint": "", "Options": None,
            "Labels": _labels(one.get("Labels")),
        }
        for one in _objects(listed)
        if sees(grants, one.get("Labels"))
    ]  # fmt: skip
    return {"Volumes": shown, "Warnings": None}


def _events(grants: Grants, document: object) -> object:
    """One event. Labels stand among its attributes; networks and volumes have none there."""
    if not isinstance(document, dict) or document.get("Type") not in EVENT_TYPES:
        return None
    actor = _inner(document, "Actor")
    attributes = _inner(actor, "Attributes")
    if not sees(grants, attributes):
        return None
    shown = _only(document, ("Type", "scope", "time", "timeNano", "id", "from"))
    shown.update({key: _action(document[key]) for key in ("status", "Action") if key in document})
    shown["Actor"] = {"ID": actor.get("ID", ""), "Attributes": _labels(attributes)}
    return shown


def _action(value: object) -> str:
    """`exec_create: sh -c …` holds a command line; `health_status: healthy` does not."""
    text = str(value)
    return text if text.startswith("health_status") else text.partition(":")[0]


ANSWERS: dict[str, Callable[[Grants, object], object]] = {
    "containers": _containers,
    "inspect": _inspect,
    "images": _images,
    "networks": _networks,
    "network": _network,
    "volumes": _volumes,
    "events": _events,
}
