"""The real engine: a fresh connection for each question, and what inspect says of a name.

Nothing that was found is remembered: a name can be given to another object at any moment.
"""

from __future__ import annotations

import json
import socket
from urllib.parse import quote, urlencode

from ...policy.docker.values import OWNER_LABEL, Engine, Found
from . import pins, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...policy.docker.values import Reference, Upstream

# Engines take older versions; the tables were made for this one.
NEWEST_API = (1, 47)
# From here on a volume can be mounted from a directory in it, which the engine opens safely.
SUBPATH_API = (1, 45)
MAX_DOCUMENT = 64 << 20
NOT_THERE = (400, 404, 409)

NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
IMAGE = NAME | frozenset("/:@+")
# Where an object of each kind is described, and which characters its name may have.
PLACES: Mapping[str, tuple[str, frozenset[str]]] = {
    "container": ("/containers/{}/json", NAME),
    "network": ("/networks/{}", NAME),
    "volume": ("/volumes/{}", NAME),
    "image": ("/images/{}/json", IMAGE),
    "exec": ("/exec/{}/json", NAME),
}


class EngineError(Exception):
    """The engine cannot be asked, or says what nobody understands."""


class Client:
    """The engine behind a unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.api = ""

    async def connect(self) -> wire.Line:
        """A new connection; a unix socket answers at once or not at all."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line = wire.Line(sock)
            await line.connect(self.path)
        except OSError as error:
            sock.close()
            raise EngineError(f"the container engine does not answer: {error.strerror}") from error
        return line

    async def ask(
        self, method: str, path: str, query: str = "", document: object = None
    ) -> tuple[wire.Answer, object]:
        """A question of our own: the answer's head, and its document if it has one."""
        body = b"" if document is None else json.dumps(document).encode()
        line = await self.connect()
        try:
            fields = (("Content-Type", "application/json"),) if body else ()
            await line.send(head(method, path, query, fields, length=len(body)) + body)
            answer = await first(line)
            content = await wire.answer_body(line, answer, method).whole(MAX_DOCUMENT)
            known = answer.media_type == "application/json" and content
            return answer, json.loads(content) if known else None
        except (OSError, ValueError) as error:
            raise EngineError(f"the container engine's answer is unusable: {error}") from error
        finally:
            line.close()

    async def order(self, wanted: Upstream) -> int:
        """A request of the policy's own; the answer's status."""
        line = await self.connect()
        try:
            await line.send(upstream_head(wanted) + wanted.body)
            return (await first(line)).status
        except OSError as error:
            raise EngineError(f"the container engine's answer is unusable: {error}") from error
        finally:
            line.close()

    async def probe(self) -> Engine:
        """What kind of engine this is. Asked once: its version decides how requests are built."""
        answer, found = await self.ask("GET", "/version")
        if answer.status != 200 or not isinstance(found, dict):
            raise EngineError(f"the container engine does not say its version ({answer.status})")
        offered = version(str(found.get("ApiVersion", "")))
        parts = found.get("Components")
        names = [str(p.get("Name")) for p in parts if isinstance(p, dict)] if parts else []
        podman = any("podman" in name.lower() for name in names)
        used = min(offered, NEWEST_API)
        line = await self.connect()
        pinned = not podman and pins.can_be_used(line.sock)
        line.close()
        self.api = f"{used[0]}.{used[1]}"
        return Engine(
            api=self.api,
            name="podman" if podman else "docker",
            subpath=not podman and used >= SUBPATH_API,
            pins=pinned,
        )

    async def count(self, owner: str) -> Found:
        """How many containers an owner has."""
        query = owned_by(owner, all="1")
        answer, found = await self.ask("GET", f"/v{self.api}/containers/json", query)
        if answer.status != 200 or not isinstance(found, list):
            raise EngineError(f"the container engine does not list containers ({answer.status})")
        return Found(id="", owner=owner, extra={"count": len(found)})

    async def inspect(self, reference: Reference) -> Found | None:
        """What a name means now; None if it means nothing."""
        place, allowed = PLACES[reference.kind]
        name = reference.name
        if not well_formed(name, allowed):
            return None
        path = f"/v{self.api}{place.format(quote(name, safe='/:@'))}"
        answer, found = await self.ask("GET", path)
        if answer.status in NOT_THERE:
            return None
        if answer.status != 200 or not isinstance(found, dict):
            raise EngineError(f"the container engine cannot describe '{name}' ({answer.status})")
        if reference.kind != "exec":
            return described(reference.kind, found)
        holder = reference.replace(kind="container", name=str(found["ContainerID"]))
        container = await self.inspect(holder)
        if container is None:
            return None
        extra = {"container": container.id}
        return Found(id=str(found["ID"]), owner=container.owner, extra=extra)


def owned_by(owner: str, **more: str) -> str:
    """A query that selects what a run owns. Pure."""
    return urlencode({"filters": json.dumps({"label": [f"{OWNER_LABEL}={owner}"]}), **more})


def well_formed(name: str, allowed: frozenset[str]) -> bool:
    """Whether a name can stand in a path and mean nothing but itself."""
    parts = name.split("/")
    return bool(name) and allowed.issuperset(name) and not {"", ".", ".."} & set(parts)


def described(kind: str, found: Mapping[str, object]) -> Found:
    """An object by its description. Pure."""
    config = _table(found.get("Config"))
    if kind == "container":
        return Found(id=str(found["Id"]), owner=_owner(config), extra=_labels(config))
    if kind == "image":
        extra = {
            "digests": found.get("RepoDigests") or [],
            "tags": found.get("RepoTags") or [],
            "ports": list(_table(config.get("ExposedPorts"))),
            "volumes": list(_table(config.get("Volumes"))),
        }
        return Found(id=str(found["Id"]), owner=_owner(config), extra=extra)
    name = str(found["Name" if kind == "volume" else "Id"])
    return Found(id=name, owner=_owner(found), extra=_labels(found))


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _labels(holder: Mapping[str, object]) -> Mapping[str, object]:
    return {"labels": _table(holder.get("Labels"))}


def _owner(holder: Mapping[str, object]) -> str:
    return str(_table(holder.get("Labels")).get(OWNER_LABEL, ""))


def version(text: str) -> tuple[int, int]:
    """`1.41` as numbers."""
    major, dot, minor = text.partition(".")
    if not dot or not all(part.isascii() and part.isdigit() for part in (major, minor)):
        raise EngineError("the container engine's version is not a number")
    return int(major), int(minor)


def head(
    method: str, path: str, query: str, fields: tuple[tuple[str, str], ...], *,
    length: int = 0, chunked: bool = False, upgrade: bool = False,
) -> bytes:  # fmt: skip
    """A request's head, made of our own values. Pure."""
    target = f"{path}?{query}" if query else path
    lines = [f"{method} {target} HTTP/1.1", "Host: docker", "User-Agent: agent-sandbox"]
    lines += [f"{name}: {value}" for name, value in fields]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif length or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {length}")
    lines += ["Connection: Upgrade", "Upgrade: tcp"] if upgrade else ["Connection: close"]
    text = "\r\n".join([*lines, "", ""])
    if any(not " " <= char <= "~" for line in lines for char in line) or " " in target:
        # Whatever it is, it could be a second request to the engine.
        raise ValueError("a request to the engine with characters that do not belong there")
    return text.encode("ascii")


def upstream_head(upstream: Upstream, **framing: int) -> bytes:
    """The head of a request that the policy has rebuilt. Framing and connection are ours."""
    fields = tuple((n, v) for n, v in upstream.headers if n.lower() == "content-type")
    return head(
        upstream.method, upstream.path, upstream.query, fields,
        length=framing.get("length", len(upstream.body)), chunked=bool(framing.get("chunked")),
        upgrade=bool(framing.get("upgrade")),
    )  # fmt: skip


async def first(line: wire.Line) -> wire.Answer:
    """The head of the answer."""
    try:
        data = await line.head()
    except ValueError as error:
        raise wire.Broken(f"the engine's answer is not HTTP: {error}") from error
    if not data:
        raise wire.Broken("the engine ended without an answer")
    return wire.parse_answer(data)
