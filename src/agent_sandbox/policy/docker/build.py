"""The query of `POST /build`: the classic builder, within the run's limits and networks.

The body is a tar that is streamed: see `context.Context` for how the shell passes it on.
"""

from __future__ import annotations

from . import images, networking, queries, resources
from .documents import dump, load
from .labels import labels
from .schema import DROP, mapping, string
from .values import OWNER_LABEL, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .queries import Parameters
    from .schema import Site, Table

BUILDKIT = (
    "BuildKit is not offered: it is a tunnel that cannot be checked. "
    "Set DOCKER_BUILDKIT=0 for the classic builder"
)
STAGE = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
PLATFORM = r"[a-z0-9]+(/[a-z0-9_]+(/[a-z0-9]+)?)?"
PERIOD = 100_000


def _path(site: Site, value: object) -> object:
    path = string(site, value)
    parts = path.removeprefix("./").split("/")
    if path and any(part in ("", ".", "..") for part in parts):
        raise site.refuse(f"{path[:80]!r} is not a path in the build context")
    return "/".join(parts)


def _network(site: Site, value: object) -> object:
    name = string(site, value)
    if name == "none":
        return name
    if name.startswith("container:"):
        raise site.refuse("a build does not share the network of a container")
    return networking.network(site, name)


def _arguments(site: Site, value: object) -> object:
    if value == "":
        return ""
    found: dict[str, object] = {}
    for key, content in mapping(site, load(string(site, value).encode())).items():
        found[key] = None if content is None else string(site, content)
    return found


def _labels(site: Site, value: object) -> object:
    return labels(site, load(string(site, value).encode()) if value != "" else {})


def _limits(site: Site, value: object) -> object:
    if value == "":
        return ""
    found = resources.ulimits(site, load(string(site, value).encode()) or [])
    return "" if found is DROP else found


def _heard(site: Site, value: object) -> object:
    if string(site, value).lower() not in queries.FALSE:
        site.changed()
    return ""


def _forced(site: Site, value: object) -> object:
    """Limits are set by us, whatever is asked within them."""
    queries.count(-1, 1 << 50)(site, value)
    return ""


QUERY: Table = {
    "dockerfile": _path,
    "remote": queries.default(why="the engine does not fetch build contexts"),
    "q": queries.boolean,
    "nocache": queries.boolean,
    "rm": queries.boolean,
    "forcerm": queries.boolean,
    "pull": _heard,
    "target": queries.word(STAGE),
    "platform": queries.word(PLATFORM),
    "networkmode": _network,
    "buildargs": _arguments,
    "labels": _labels,
    "ulimits": _limits,
    "shmsize": _forced,
    "memory": _forced,
    "memswap": _forced,
    "cpushares": _forced,
    "cpuperiod": _forced,
    "cpuquota": _forced,
    "cpusetcpus": _heard,
    "cpusetmems": queries.default(),
    "cachefrom": queries.default("[]", "null", why="layers of other images are not offered"),
    "cgroupparent": queries.default(why="would leave the budget of the build"),
    "extrahosts": queries.default("[]", "null"),
    "securityopt": queries.default("[]", "null"),
    "isolation": queries.default("default"),
    "squash": queries.default("0", "false", "False"),
    "outputs": queries.default("[]", "null", why=BUILDKIT),
    "session": queries.default(why=BUILDKIT),
    "buildid": lambda site, value: (string(site, value), "")[1],
    "version": queries.default("1", why=BUILDKIT),
}


def parameters(site: Site, pairs: tuple[tuple[str, str], ...]) -> tuple[Parameters, list[str]]:
    """The parameters to send, and the tags. Only `t` may be given more than once."""
    tags = [images.own_tag(value, site.grants) for key, value in pairs if key == "t" and value]
    if tags:
        site.changed("image.tag")
    found = queries.read(site, QUERY, tuple(pair for pair in pairs if pair[0] != "t"))
    grants = site.grants
    if not networking.is_open(grants):
        # The steps of a build have raw sockets, which a closed network does not hold.
        if found.get("networkmode") != "none":
            site.changed("build.network")
        found["networkmode"] = "none"
    elif "networkmode" not in found:
        found["networkmode"] = networking.network(site, "default")
    found.setdefault("labels", {OWNER_LABEL: grants.owner})
    found.update({
        "version": "1", "memory": str(grants.memory), "memswap": str(grants.memory),
        "cpuperiod": str(PERIOD), "cpuquota": str(int(grants.cpus * PERIOD)), "forcerm": "1",
    })  # fmt: skip
    if len(tags) > 16:
        raise Refused(f"{site.prefix}.tags", "too many tags", 400)
    return found, sorted(set(tags))


def text(value: object) -> str:
    """A parameter as it is written in a query."""
    return value if isinstance(value, str) else dump(value).decode("ascii")
