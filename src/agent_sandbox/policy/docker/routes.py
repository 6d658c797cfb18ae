"""The endpoints that are offered. What is not in the table does not reach the engine."""

from __future__ import annotations

from ...record import Record
from . import build, create, images, mounts, networking, queries, resources, schema, watching
from .labels import labels
from .slots import OWN_IMAGE, Slot, free, image, own
from .values import OWNER_LABEL, Reference, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .schema import Site, Table

    Body = Callable[[Site, object], dict[str, object]]

PLAIN, HIJACK, FOLLOW, UPLOAD, DOWNLOAD = "plain", "hijack", "follow", "upload", "download"
NAMED = {"{container}": "container", "{network}": "network", "{volume}": "volume", "{exec}": "exec"}
# `ps` runs on the host with these words.
TOP = r"-ef|aux|-aux|axu|ef|-eo pid,comm"
KEYS = r"[a-z@^\[\],_\\-]{1,64}"
TIME = r"[0-9]{1,12}(\.[0-9]{1,9})?|[0-9]{4}-[0-9T:.Z+-]{1,40}|([0-9]+(ns|us|ms|s|m|h))+"
REPOSITORY = r"[A-Za-z0-9._:/-]{1,255}"
CONTAINER_FILTERS = (
    "id", "name", "label", "exited", "status", "ancestor", "before", "since", "volume", "network",
    "publish", "expose", "health", "is-task",
)  # fmt: skip
PRUNE_FILTERS = ("label", "label!", "until", "dangling", "all")


NO_PARAMETERS: Table = {}


class Draft(Record):
    """A request for the engine, with slots where ids will be."""

    method: str
    segments: tuple[object, ...]
    query: tuple[tuple[str, object], ...] = ()
    # None: no body.
    body: object = None
    stream: str = PLAIN
    answer: str = ""
    needs: tuple[Slot, ...] = ()


class Route(Record):
    """One endpoint."""

    name: str
    method: str
    path: str
    query: Table = NO_PARAMETERS
    body: Body | None = None
    stream: str = PLAIN
    answer: str = ""
    # Changes a draft where a table is not enough.
    last: Callable[[Site, Draft], Draft] | None = None


# --- bodies


def _exec(site: Site, value: object) -> dict[str, object]:
    return schema.read(site, create.EXEC, value)


def _exec_start(site: Site, value: object) -> dict[str, object]:
    return schema.read(site, create.EXEC_START, value)


def _volume(site: Site, value: object) -> dict[str, object]:
    body = schema.read(site, VOLUME, value)
    name = str(body.get("Name", ""))
    sent: dict[str, object] = {
        "Driver": "local", "Labels": body.get("Labels", {OWNER_LABEL: site.grants.owner}),
    }  # fmt: skip
    if name:
        if not mounts.VOLUME_NAME.fullmatch(name) or name.startswith(images.PREFIX):
            raise site.at("Name").refuse(f"{name[:80]!r} is not the name of a volume")
        sent["Name"] = site.need(free("volume", name))
    return sent


VOLUME: Table = {
    "Name": schema.text(),
    "Driver": schema.only("", "local", why="volume plugins are not offered"),
    # Options mount anything: a host path, procfs, a disk, a cgroup tree, a share in the network.
    "DriverOpts": schema.only({}, why="options could mount any part of the host"),
    "Labels": labels,
}


# --- what a table cannot say


def _attributes(draft: Draft) -> dict[str, object]:
    return dict(draft.query)


def _query(draft: Draft, found: dict[str, object]) -> Draft:
    return draft.replace(query=tuple(found.items()))


def _named(site: Site, draft: Draft) -> Draft:
    """A new name of a container: nobody else's."""
    found = _attributes(draft)
    name = str(found.get("name", "")).removeprefix("/")
    if name:
        networking.new_name(site.at("name"), name)
        found["name"] = site.need(free("container", name))
    return _query(draft, found)


def _logs(_site: Site, draft: Draft) -> Draft:
    follow = _attributes(draft).get("follow") == "1"
    return draft.replace(stream=FOLLOW if follow else DOWNLOAD)


def _stats(_site: Site, draft: Draft) -> Draft:
    return draft.replace(stream=PLAIN if _attributes(draft).get("stream") == "0" else FOLLOW)


def _starting(_site: Site, draft: Draft) -> Draft:
    body = draft.body if isinstance(draft.body, dict) else {}
    return draft.replace(stream=PLAIN if body.get("Detach") else HIJACK)


def _listing(site: Site, draft: Draft) -> Draft:
    """A list without filters gets the one for the owner."""
    found = _attributes(draft)
    labels = watching.selectors(site.grants)
    if "filters" not in found and labels:
        found["filters"] = {"label": labels}
    return _query(draft, found)


def _pull(site: Site, draft: Draft) -> Draft:
    found = _attributes(draft)
    asked, tag = str(found.get("fromImage", "")), str(found.get("tag", ""))
    if not asked:
        raise Refused("pull.source", "images are pulled by name, not imported")
    name = images.parse(asked)
    if tag:
        # Some clients give the name with its tag and the tag again.
        written = asked.rpartition("/")[2]
        bare = asked[: -len(name.tag) - 1] if ":" in written and name.tag else asked
        joined = f"{bare}@{tag}" if tag.startswith("sha256:") else f"{bare}:{tag}"
        name = images.parse(joined if not name.digest else asked)
    if not images.matches(name, site.grants.images):
        raise Refused("image.allow-list", f"docker.images does not allow {name}")
    if not images.may_pull(name, site.grants):
        raise Refused("pull.registry", f"docker.registries does not allow {name.domain}")
    found["fromImage"] = f"{name.domain}/{name.path}"
    # Without a tag the engine would pull all of them.
    found["tag"] = name.digest or name.tag
    return _query(draft, found)


def _tag(site: Site, draft: Draft) -> Draft:
    found = _attributes(draft)
    found["repo"], found["tag"] = _own_repository(site, found, "tag.repo")
    return _query(draft, found)


def _commit(site: Site, draft: Draft) -> Draft:
    found = _attributes(draft)
    name = str(found.get("container", ""))
    if not networking.NAME.fullmatch(name):
        raise Refused("commit.container", "a container is needed", 400)
    found["container"] = site.need(own("container", name))
    if found.get("repo"):
        found["repo"], found["tag"] = _own_repository(site, found, "commit.repo")
    return _query(draft.replace(body={}), found)


def _own_repository(site: Site, found: dict[str, object], rule: str) -> tuple[str, str]:
    repo, tag = str(found.get("repo", "")), str(found.get("tag", ""))
    if not repo:
        raise Refused(rule, "a name is needed", 400)
    named = ":" in repo.rpartition("/")[2]
    kept = images.own_tag(f"{repo}:{tag}" if tag and not named else repo, site.grants)
    site.changed("image.tag")
    place, _, word = kept.rpartition(":")
    return place, word


def _build(site: Site, draft: Draft) -> Draft:
    """The Dockerfile is read from the tar; the body of the draft says which."""
    found, tags = build.parameters(site, tuple((k, str(v)) for k, v in draft.query))
    found.setdefault("dockerfile", "Dockerfile")
    asked = {"dockerfile": found["dockerfile"], "args": found.get("buildargs")}
    pairs = (*sorted(found.items()), *(("t", tag) for tag in tags))
    return draft.replace(query=pairs, body=asked)


# --- the table


def _container(method: str, verb: str, **more: object) -> Route:
    """An endpoint below a container."""
    path = "containers/{container}" + (f"/{verb}" if verb else "")
    values: dict[str, object] = {"name": verb.replace("/", "-"), **more}
    return Route(method=method, path=path, **values)  # type: ignore[arg-type]


SIZE: Table = {"h": queries.count(0, 65535), "w": queries.count(0, 65535)}
WAIT: Table = {"t": queries.count(-1, 86400), "signal": queries.word(create.SIGNAL)}
ATTACH: Table = {
    "detachKeys": queries.word(KEYS), **dict.fromkeys(
        ("logs", "stream", "stdin", "stdout", "stderr"), queries.boolean
    ),
}  # fmt: skip
LOGS: Table = {
    **dict.fromkeys(("follow", "stdout", "stderr", "timestamps", "details"), queries.boolean),
    "since": queries.word(TIME), "until": queries.word(TIME),
    "tail": queries.word("all|-?[0-9]{1,12}"),
}  # fmt: skip
ARCHIVE: Table = {"path": queries.word(r"[^\x00-\x1f\x7f]{1,4096}")}
PUT: Table = {
    **ARCHIVE, "noOverwriteDirNonDir": queries.boolean, "copyUIDGID": queries.boolean,
}  # fmt: skip
PULL: Table = {
    "fromImage": queries.word(r"[A-Za-z0-9._:/@-]{1,255}"),
    "tag": queries.word(r"[A-Za-z0-9._:-]{1,140}"),
    "platform": queries.word(build.PLATFORM),
    "fromSrc": queries.default(why="images are pulled by name, not imported"),
    "repo": queries.default(), "message": queries.default(), "changes": queries.default(),
}  # fmt: skip
COMMIT: Table = {
    "container": queries.word(networking.NAME.pattern),
    "repo": queries.word(REPOSITORY), "tag": queries.word(images.TAG.pattern),
    "comment": queries.word(r"[^\x00-\x1f]{1,1000}"),
    "author": queries.word(r"[^\x00-\x1f]{1,200}"),
    "pause": queries.boolean,
    "changes": queries.default(why="changes go into a Dockerfile, where they are checked"),
}  # fmt: skip
NEW_NAME = queries.word("/?" + networking.NAME.pattern)

ROUTES: tuple[Route, ...] = (
    Route(name="ping", method="HEAD", path="_ping", answer="ping"),
    Route(name="ping", method="GET", path="_ping", answer="ping"),
    Route(name="version", method="GET", path="version", answer="version"),
    Route(name="info", method="GET", path="info", answer="info"),
    Route(
        name="events", method="GET", path="events", stream=FOLLOW, answer="events", last=_listing,
        query={
            "since": queries.word(TIME), "until": queries.word(TIME),
            "filters": queries.filters(
                "container", "image", "network", "volume", "type", "event", "label", "scope"
            ),
        },
    ),
    # containers
    Route(
        name="containers", method="GET", path="containers/json", answer="containers", last=_listing,
        query={
            "all": queries.boolean, "size": queries.boolean, "trunc_cmd": queries.boolean,
            "limit": queries.count(-1, 1 << 31), "filters": queries.filters(*CONTAINER_FILTERS),
            "before": queries.default(), "since": queries.default(),
        },
    ),
    Route(
        name="create", method="POST", path="containers/create", body=create.create, last=_named,
        answer="created", query={"name": NEW_NAME, "platform": queries.word(build.PLATFORM)},
    ),
    Route(
        name="prune", method="POST", path="containers/prune", last=_listing, answer="pruned",
        query={"filters": queries.filters(*PRUNE_FILTERS)},
    ),
    _container("GET", "json", name="inspect", answer="inspect", query={"size": queries.boolean}),
    # The body must be empty: before API 1.24 it replaced the whole HostConfig.
    _container("POST", "start", query={"detachKeys": queries.word(KEYS)}),
    _container("POST", "stop", query=WAIT),
    _container("POST", "restart", query=WAIT),
    _container("POST", "kill", query={"signal": queries.word(create.SIGNAL)}),
    _container("POST", "pause"),
    _container("POST", "unpause"),
    _container(
        "POST", "wait", stream=FOLLOW,
        query={"condition": queries.word("not-running|next-exit|removed")},
    ),
    _container("POST", "resize", query=SIZE),
    _container("POST", "rename", query={"name": NEW_NAME}, last=_named),
    _container("POST", "update", body=resources.update),
    _container("POST", "attach", query=ATTACH, stream=HIJACK),
    _container("GET", "logs", query=LOGS, stream=DOWNLOAD, last=_logs),
    _container("GET", "top", query={"ps_args": queries.word(TOP)}),
    _container(
        "GET", "stats", stream=FOLLOW, last=_stats,
        query={"stream": queries.boolean, "one-shot": queries.boolean},
    ),
    _container("GET", "changes"),
    _container("HEAD", "archive", query=ARCHIVE),
    _container("GET", "archive", query=ARCHIVE, stream=DOWNLOAD),
    _container("PUT", "archive", name="archive-put", query=PUT, stream=UPLOAD),
    _container(
        "DELETE", "", name="remove",
        query={
            "v": queries.boolean, "force": queries.boolean,
            "link": queries.default("0", "false", "False"),
        },
    ),
    _container("POST", "exec", body=_exec),
    Route(
        name="exec-start", method="POST", path="exec/{exec}/start", body=_exec_start,
        stream=HIJACK, last=_starting,
    ),
    Route(name="exec-resize", method="POST", path="exec/{exec}/resize", query=SIZE),
    Route(name="exec-inspect", method="GET", path="exec/{exec}/json", answer="exec"),
    # images
    Route(
        name="images", method="GET", path="images/json", answer="images",
        query={
            **dict.fromkeys(("all", "digests", "shared-size"), queries.boolean),
            "only_ids": queries.ignored(queries.boolean),
            "manifests": queries.default("0", "false"),
            "filter": queries.default(),
            "filters": queries.filters(
                "reference", "dangling", "label", "before", "since", owned=False
            ),
        },
    ),
    Route(
        name="pull", method="POST", path="images/create", query=PULL, stream=FOLLOW,
        answer="progress", last=_pull,
    ),
    Route(
        name="image", method="GET", path="images/{image}/json", answer="image",
        query={"manifests": queries.default("0", "false"), "platform": queries.default()},
    ),
    Route(name="history", method="GET", path="images/{image}/history", answer="history"),
    Route(
        name="tag", method="POST", path="images/{image}/tag", last=_tag,
        query={
            "repo": queries.word(REPOSITORY), "tag": queries.word(images.TAG.pattern),
            "force": queries.default("0", "false", "False"),
        },
    ),
    Route(
        name="image-remove", method="DELETE", path="images/{own-image}", answer="removed",
        query={"force": queries.boolean, "noprune": queries.boolean},
    ),
    Route(name="commit", method="POST", path="commit", query=COMMIT, last=_commit),
    Route(
        name="build", method="POST", path="build", stream=UPLOAD, answer="progress", last=_build,
    ),
    # networks
    Route(
        name="networks", method="GET", path="networks", answer="networks", last=_listing,
        query={
            "filters": queries.filters("name", "id", "driver", "label", "type", "scope", "dangling")
        },
    ),
    Route(
        name="network-create", method="POST", path="networks/create", body=networking.create,
        answer="created",
    ),
    Route(
        name="prune", method="POST", path="networks/prune", last=_listing, answer="pruned",
        query={"filters": queries.filters(*PRUNE_FILTERS)},
    ),
    Route(
        name="network", method="GET", path="networks/{network}", answer="network",
        query={"verbose": queries.boolean, "scope": queries.default("local")},
    ),
    Route(name="network-remove", method="DELETE", path="networks/{network}"),
    Route(
        name="connect", method="POST", path="networks/{network}/connect", body=networking.connect
    ),
    Route(
        name="disconnect", method="POST", path="networks/{network}/disconnect",
        body=networking.disconnect,
    ),
    # volumes
    Route(
        name="volumes", method="GET", path="volumes", answer="volumes", last=_listing,
        query={"filters": queries.filters("name", "label", "dangling", "driver")},
    ),
    Route(
        name="volume-create", method="POST", path="volumes/create", body=_volume, answer="volume"
    ),
    Route(
        name="prune", method="POST", path="volumes/prune", last=_listing, answer="pruned",
        query={"filters": queries.filters(*PRUNE_FILTERS)},
    ),
    Route(name="volume", method="GET", path="volumes/{volume}", answer="volume"),
    Route(
        name="volume-remove", method="DELETE", path="volumes/{volume}",
        query={"force": queries.boolean},
    ),
)  # fmt: skip

# First part of a path → what to do instead.
EXPLAINED = {
    "session": build.BUILDKIT,
    "grpc": build.BUILDKIT,
    "swarm": "swarm is not offered",
    "plugins": "plugins run as root on the host",
    "auth": "log in outside; the engine would connect to any host",
    "distribution": "the engine would connect to any host; use 'docker pull'",
    "libpod": "only Docker's API is offered",
    "system": "the state of the whole engine is not shown",
}


def find(method: str, segments: tuple[str, ...]) -> tuple[Route, dict[str, str]]:
    """The route of a request and the names in its path."""
    for route in ROUTES:
        if route.method == method:
            names = match(tuple(route.path.split("/")), segments)
            if names is not None:
                return route, names
    first = segments[0]
    why = EXPLAINED.get(first, f"{method} /{'/'.join(segments)[:80]} is not offered")
    raise Refused(f"endpoint.{first if first in EXPLAINED else 'unknown'}", why)


def match(pattern: tuple[str, ...], segments: tuple[str, ...]) -> dict[str, str] | None:
    """The names at the places of a pattern. Names of images may have slashes."""
    names: dict[str, str] = {}
    for index, part in enumerate(pattern):
        if part in ("{image}", "{own-image}"):
            rest = len(pattern) - index - 1
            middle = segments[index : len(segments) - rest]
            if not middle or segments[len(segments) - rest :] != pattern[index + 1 :]:
                return None
            return {part: "/".join(middle)}
        if index >= len(segments):
            return None
        if part in NAMED:
            names[part] = segments[index]
        elif part != segments[index]:
            return None
    return names if len(pattern) == len(segments) else None


# Fixed words that stand where a name may stand.
WORDS = frozenset(("json", "create", "prune"))


def path(site: Site, route: Route, names: dict[str, str]) -> tuple[object, ...]:
    """The path for the engine, with a slot for each name."""
    parts: list[object] = []
    for part in route.path.split("/"):
        if part == "{image}":
            parts.append(site.need(image(names[part], site.grants)))
        elif part == "{own-image}":
            parts.append(site.need(image(names[part], site.grants, OWN_IMAGE)))
        elif part in NAMED:
            kind, name = NAMED[part], names[part]
            if not networking.NAME.fullmatch(name) or name in WORDS:
                raise Refused(f"owner.{kind}", f"No such {kind}: {name[:80]}", 404)
            parts.append(site.need(Slot(mode="own", references=(Reference(kind=kind, name=name),))))
        else:
            parts.append(part)
    return tuple(parts)
