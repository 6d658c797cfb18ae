"""Networks of containers: the run's own, or none. Never the host's and never a stranger's."""

from __future__ import annotations

import re

from .labels import labels
from .schema import (
    DROP,
    flag,
    ignored,
    inner,
    mapping,
    off,
    only,
    read,
    sequence,
    string,
    text,
    texts,
)
from .slots import PORTS, free, image, own
from .values import OWNER_LABEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Policy, Site, Table
    from .slots import Slot
    from .values import Grants

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}")
LIKE_ID = re.compile(r"[0-9a-f]{6,64}")
HOSTNAME = r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?"
PORT = re.compile(r"([1-9][0-9]{0,4})(/(tcp|udp|sctp))?")
HOST_PORT = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
IPV4 = r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
IPV6 = r"[0-9a-fA-F:]*:[0-9a-fA-F:]*(?:\.[0-9.]+)?"
ADDRESS = re.compile(f"{IPV4}|{IPV6}")
EXTRA_HOST = re.compile(rf"{HOSTNAME}[:=](?:{IPV4}|\[?{IPV6}\]?)")
LOOPBACK = "127.0.0.1"
# What clients write for "any address": they get the loopback.
ANYWHERE = ("", "0.0.0.0", "::", LOOPBACK, "localhost")  # noqa: S104 - compared, not bound
DEFAULT_NETWORKS = ("", "default", "bridge")
# An address for documentation, that nothing answers. Old engines resolve names for containers of
# internal networks from the host when its resolver is on the loopback (CVE-2024-29018); with an
# address given, they ask from the container's network, where nothing leads out.
NO_RESOLVER = "192.0.2.1"
BINDING = "com.docker.network.bridge.host_binding_ipv4"
# Without an address on the bridge there is no way to the host's own services.
NO_GATEWAY = "com.docker.network.bridge.inhibit_ipv4"
OPTIONS = {
    BINDING: re.compile(re.escape(LOOPBACK)),
    NO_GATEWAY: re.compile("true|false"),
    "com.docker.network.driver.mtu": re.compile(r"[1-9][0-9]{2,4}"),
    "com.docker.network.bridge.enable_icc": re.compile("true|false"),
}


def is_open(grants: Grants) -> bool:
    """Whether containers may have a way out: only where the sandbox has the host's network."""
    return grants.network == "on"


def run_network(grants: Grants) -> str:
    """The name of the network that stands for `default`."""
    return f"agent-sandbox-{grants.owner}"


def run_network_body(grants: Grants) -> dict[str, object]:
    """How that network is made."""
    return {
        "Name": run_network(grants), "CheckDuplicate": True, **_forced(grants, {}),
        "Labels": {OWNER_LABEL: grants.owner},
    }  # fmt: skip


def _forced(grants: Grants, options: dict[str, object]) -> dict[str, object]:
    closed = not is_open(grants)
    forced = {key: value for key, value in options.items() if key not in (NO_GATEWAY, BINDING)}
    # Podman takes no option that it does not know.
    if grants.engine.name == "docker":
        forced[BINDING] = LOOPBACK
        if closed:
            forced[NO_GATEWAY] = "true"
    return {"Driver": "bridge", "Internal": closed, "Options": forced}


# --- of a container


def mode(site: Site, value: object) -> object:
    """`NetworkMode`."""
    name = string(site, value)
    if name == "none":
        return name
    if name == "host":
        raise site.refuse("the host's network is not given to containers")
    if name.startswith("container:"):
        return container(site, name)
    return network(site, name)


def new_name(site: Site, name: str) -> str:
    """A name for something new; one that looks like an id could be taken for somebody else's."""
    if not NAME.fullmatch(name) or LIKE_ID.fullmatch(name):
        raise site.refuse(f"{name[:80]!r} is not a name")
    return name


def network(site: Site, name: str) -> Slot:
    """A network by name or id."""
    if name in DEFAULT_NETWORKS:
        site.changed("network.own")
        return site.need(own("network", run_network(site.grants)))
    if not NAME.fullmatch(name) or name in ("host", "none"):
        raise site.refuse(f"{name[:80]!r} is not the name of a network of this run")
    return site.need(own("network", name))


def container(site: Site, text: str) -> Slot:
    """`container:NAME`, for what is shared with another container of the run."""
    name = text.removeprefix("container:")
    if not NAME.fullmatch(name):
        raise site.refuse(f"{text[:80]!r} does not name a container", 400)
    return site.need(own("container", name, "container:{}"))


def namespace(*allowed: str) -> Policy:
    """A namespace mode: some words, or another container of the run."""

    def policy(site: Site, value: object) -> object:
        name = string(site, value)
        if name.startswith("container:"):
            return container(site, name)
        if name not in ("", *allowed):
            raise site.refuse(f"{site.rule}: {name[:40]!r} is not allowed")
        return name or DROP

    return policy


def links(site: Site, value: object) -> object:
    """`container:alias`, where the container is the run's own."""
    found = []
    for item in sequence(site, value):
        name, _, alias = string(site, item).removeprefix("/").partition(":")
        if not NAME.fullmatch(name) or (alias and not re.fullmatch(HOSTNAME, alias)):
            raise site.refuse("a link that is not CONTAINER:ALIAS", 400)
        found.append(site.need(own("container", name, "{}:" + (alias or name))))
    return found or DROP


def endpoints(site: Site, value: object) -> object:
    """`EndpointsConfig`: network → aliases."""
    found: dict[object, object] = {}
    for name, config in mapping(site, value).items():
        sent = read(site.under("create.endpoint"), ENDPOINT, config if config is not None else {})
        if name == "none" or name.startswith("container:"):
            if sent:
                raise site.refuse(f"{name[:40]!r} takes no settings", 400)
            continue
        slot = network(site, name)
        if slot in found:
            raise site.refuse("a network appears twice", 400)
        found[slot] = sent
    return found or DROP


ENDPOINT: Table = {
    "Aliases": texts(HOSTNAME),
    "Links": links,
    "IPAMConfig": inner({
        "IPv4Address": only(""), "IPv6Address": only(""), "LinkLocalIPs": only([]),
    }),
    "MacAddress": only(""),
    "DriverOpts": only({}),
    "GwPriority": only(0),
    **dict.fromkeys(
        ("NetworkID", "EndpointID", "Gateway", "IPAddress", "IPv6Gateway", "GlobalIPv6Address"),
        only(""),
    ),
    "IPPrefixLen": only(0),
    "GlobalIPv6PrefixLen": only(0),
    "DNSNames": only([]),
}  # fmt: skip


def extra_hosts(site: Site, value: object) -> object:
    """Names for literal addresses."""
    found = [string(site, item) for item in sequence(site, value)]
    for item in found:
        if item.endswith("host-gateway"):
            raise site.refuse("host-gateway would lead to the services of the host")
        string(site, item, EXTRA_HOST)
    return found or DROP


def dns(site: Site, value: object) -> object:
    """Resolvers by address."""
    return [string(site, item, ADDRESS) for item in sequence(site, value)] or DROP


# --- ports


def exposed(site: Site, value: object) -> object:
    """`ExposedPorts`."""
    found: dict[str, object] = {}
    for port, options in mapping(site, value).items():
        if options not in ({}, None):
            raise site.refuse("a port takes no options here", 400)
        found[_port(site, port)] = {}
    return found or DROP


def bindings(site: Site, value: object) -> object:
    """`PortBindings`: on the loopback, outside of the range of system services."""
    found: dict[str, object] = {}
    for port, places in mapping(site, value).items():
        asked = sequence(site, places) if places is not None else []
        key = _port(site, port)
        if key in found:
            raise site.refuse("a port appears twice", 400)
        # An empty list publishes the port on a number of the engine's choice, on all addresses.
        found[key] = [_binding(site, item) for item in asked or [{}]]
    return found or DROP


def _port(site: Site, text: str) -> str:
    match = PORT.fullmatch(text)
    if match is None or int(match[1]) > 65535:
        raise site.refuse(f"{text[:20]!r} is not a port", 400)
    return f"{match[1]}/{match[3] or 'tcp'}"


def _binding(site: Site, value: object) -> dict[str, object]:
    entry = read(site, {"HostIp": text(), "HostPort": text()}, value)
    address, port = str(entry.get("HostIp", "")), str(entry.get("HostPort", ""))
    if address not in ANYWHERE:
        raise site.refuse("ports are published on 127.0.0.1 only")
    if address != LOOPBACK:
        site.changed("ports.loopback")
    if port in ("", "0"):
        return {"HostIp": LOOPBACK, "HostPort": ""}
    match = HOST_PORT.fullmatch(port)
    if match is None:
        raise site.refuse(f"{port[:20]!r} is not a port", 400)
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1024 <= first <= last <= 65535:
        raise site.refuse("ports are published from 1024 to 65535")
    return {"HostIp": LOOPBACK, "HostPort": f"{first}-{last}" if match[2] else str(first)}


def published(site: Site, name: str, asked: dict[str, object]) -> Slot:
    """`PublishAllPorts`, as bindings: by itself it would publish on all addresses."""
    site.changed("ports.all")
    slot = image(name, site.grants)
    return site.need(slot.replace(mode=PORTS, value=asked))


# --- networks of the run


def create(site: Site, value: object) -> dict[str, object]:
    """The body of `POST /networks/create`."""
    body = read(site, NETWORK, value)
    name = string(site.at("Name"), body.get("Name"), NAME)
    new_name(site.at("Name"), name)
    if name.startswith("agent-sandbox-") or name in ("host", "none", "bridge", "default"):
        raise site.at("Name").refuse(f"the name {name[:80]!r} is reserved")
    if not is_open(site.grants):
        site.changed("network.internal")
    options = body.get("Options", {})
    closed = _forced(site.grants, options if isinstance(options, dict) else {})
    internal = bool(body.get("Internal")) or bool(closed["Internal"])
    return {
        "Name": site.need(free("network", name)), "CheckDuplicate": True, **closed,
        "Internal": internal,
        "Labels": body.get("Labels", {OWNER_LABEL: site.grants.owner}),
    }  # fmt: skip


def _options(site: Site, value: object) -> object:
    found: dict[str, object] = {}
    for key, content in mapping(site, value).items():
        pattern = OPTIONS.get(key)
        if pattern is None:
            raise site.refuse(f"the network option {key[:80]!r} is not allowed")
        found[key] = string(site, content, pattern)
    return found or DROP


NETWORK: Table = {
    "Name": string,
    "CheckDuplicate": flag,
    "Driver": only("", "bridge", "default", why="only bridge networks are offered"),
    "Internal": flag,
    "Attachable": ignored(flag),
    "Ingress": off(),
    "Scope": only("", "local"),
    "ConfigOnly": off(),
    "ConfigFrom": only({}, {"Network": ""}),
    # A range of the caller's choice could take over routes of the host.
    "IPAM": inner({
        "Driver": only("", "default"), "Config": only([], why="ranges are chosen by the engine"),
        "Options": only({}),
    }),
    "EnableIPv4": ignored(flag),
    "EnableIPv6": off(),
    "Options": _options,
    "Labels": labels,
}  # fmt: skip


def connect(site: Site, value: object) -> dict[str, object]:
    """The body of `POST /networks/NAME/connect`."""
    body = read(site, {"Container": string, "EndpointConfig": inner(ENDPOINT)}, value)
    name = string(site.at("Container"), body.get("Container"), NAME)
    return {**body, "Container": site.need(own("container", name))}


def disconnect(site: Site, value: object) -> dict[str, object]:
    """The body of `POST /networks/NAME/disconnect`."""
    body = read(site, {"Container": string, "Force": flag}, value)
    name = string(site.at("Container"), body.get("Container"), NAME)
    return {**body, "Container": site.need(own("container", name))}
