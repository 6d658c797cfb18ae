"""The three questions of the socket loop: decide, rebuild, filter the answer.

The loop asks `is_streamed` for the head of a request, reads the body unless it is, then:

    decision = decide(request, grants)
    found = {reference: inspect(reference) for reference in decision.references}
    upstream = rebuild(decision, grants, found)

For a reference that is missing, `provision` gives the request that makes it, if it is one of the
run's own fixtures. A streamed body goes through `context.Context` (build) or `Archive`.
"""

from __future__ import annotations

import re

from . import build, mounts, networking, queries, routes, slots, target, watching
from .answers import filter_answer
from .context import Archive, Context
from .documents import dump, load
from .schema import Site
from .values import (
    OWNER_LABEL,
    Bind,
    Decision,
    Engine,
    Found,
    Grants,
    Reference,
    Refused,
    Request,
    Upstream,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OWNER_LABEL",
    "Bind",
    "Decision",
    "Engine",
    "Found",
    "Grants",
    "Reference",
    "Refused",
    "Request",
    "Upstream",
    "decide",
    "filter_answer",
    "is_streamed",
    "provision",
    "rebuild",
    "transform",
    "unchecked",
]

# It becomes a part of names of images, networks and volumes.
OWNER = re.compile(r"[a-z0-9]{1,40}(-[a-z0-9]{1,40}){0,3}")
JSON = "application/json"
API = re.compile(r"1\.[0-9]{2,3}")


def decide(request: Request, grants: Grants) -> Decision:
    """The verdict on a request, before its references are known."""
    route, normalised = "", ""
    try:
        _check_grants(grants)
        where = target.parse(request.target)
        normalised = target.build(grants.engine.api, where.segments)
        _check_version(where.version, grants)
        chosen, names = routes.find(request.method, where.segments)
        route = chosen.name
        _check_head(request, chosen)
        _check_mode(request, grants)
        watching.may_ask(grants, chosen.name)
        site = Site(grants, chosen.name)
        draft = _draft(site, chosen, names, where, request.body)
    except Refused as refusal:
        return _refusal(refusal, route, normalised)
    references = tuple(dict.fromkeys(r for slot in site.needs for r in slot.references))
    return Decision(
        allowed=True, rule=f"allow.{route}", route=route, normalised=normalised,
        references=references, mutations=tuple(site.mutations),
        draft=draft.replace(needs=tuple(site.needs)),
    )  # fmt: skip


def is_streamed(method: str, text: str) -> bool:
    """Whether the body of a request is passed on while it is read."""
    try:
        route, _ = routes.find(method, target.parse(text).segments)
    except Refused:
        return False
    return route.stream == routes.UPLOAD


def rebuild(
    decision: Decision, grants: Grants, found: Mapping[Reference, Found | None]
) -> Decision | Upstream:
    """The request for the engine, or a refusal (a foreign or missing reference is 404)."""
    draft = decision.draft
    if not decision.allowed or not isinstance(draft, routes.Draft):
        return decision
    try:
        for slot in draft.needs:
            slots.resolve(slot, grants, found)
        segments = tuple(str(slots.fill(part, grants, found)) for part in draft.segments)
        query = tuple(
            (key, build.text(slots.fill(value, grants, found))) for key, value in draft.query
        )
        uploads = draft.stream == routes.UPLOAD
        body = b"" if draft.body is None or uploads else dump(
            slots.fill(draft.body, grants, found)
        )  # fmt: skip
    except Refused as refusal:
        return _refusal(refusal, decision.route, decision.normalised)
    return Upstream(
        method=draft.method, path=target.build(grants.engine.api, segments),
        query=target.build_query(query), headers=_headers(draft, has_body=bool(body)),
        body=body, stream=draft.stream, answer=draft.answer,
    )  # fmt: skip


def provision(reference: Reference, grants: Grants) -> Upstream | None:
    """The request that makes a fixture of the run: its network, or the volume of a root."""
    if grants.read_only:
        # To look at something must not make it.
        return None
    path, body = "", {}
    if reference == Reference(kind="network", name=networking.run_network(grants)):
        path, body = "networks", networking.run_network_body(grants)
    root = mounts.root_of(grants, reference.name) if reference.kind == "volume" else ""
    if root and any(b.host_path == root and not b.swappable for b in grants.binds):
        options = {"type": "none", "o": "bind", "device": root}
        path = "volumes"
        body = {
            "Name": reference.name, "Driver": "local", "DriverOpts": options,
            "Labels": {OWNER_LABEL: grants.owner},
        }  # fmt: skip
    if not path:
        return None
    return Upstream(
        method="POST", path=target.build(grants.engine.api, (path, "create")), body=dump(body),
        headers=(("Host", "docker"), ("Content-Type", JSON)),
    )  # fmt: skip


def transform(decision: Decision, grants: Grants) -> Archive | None:
    """What a streamed body goes through, None where there is none."""
    draft = decision.draft
    if not isinstance(draft, routes.Draft) or draft.stream != routes.UPLOAD:
        return None
    if decision.route != "build":
        return Archive(grants)
    asked = draft.body if isinstance(draft.body, dict) else {}
    return Context(grants, dockerfile=str(asked.get("dockerfile")), arguments=asked.get("args"))


def unchecked(request: Request, grants: Grants) -> Decision | Upstream:
    """The request anew without any check of its meaning, for the mode `warn`. This is root."""
    try:
        where = target.parse(request.target)
        body = dump(load(request.body)) if request.body else b""
    except Refused as refusal:
        return _refusal(refusal, "", "")
    headers = [("Host", "docker")] + ([("Content-Type", JSON)] if body else [])
    return Upstream(
        method=request.method, path=target.build(grants.engine.api, where.segments),
        query=target.build_query(where.query), headers=tuple(headers), body=body,
    )  # fmt: skip


# --- parts of a decision


def _refusal(refusal: Refused, route: str, normalised: str) -> Decision:
    return Decision(
        allowed=False, rule=refusal.rule, status=refusal.status, route=route,
        message=f"agent-sandbox: {refusal.message} [{refusal.rule}]", normalised=normalised,
    )  # fmt: skip


def _check_grants(grants: Grants) -> None:
    if not OWNER.fullmatch(grants.owner) or not API.fullmatch(grants.engine.api):
        raise Refused("grants", "the proxy is not set up", 500)


def _check_mode(request: Request, grants: Grants) -> None:
    if grants.read_only and request.method not in ("GET", "HEAD"):
        raise Refused("read-only", "this socket is read-only")


def _check_version(version: tuple[int, int], grants: Grants) -> None:
    """What the engine itself would say to a client that is newer."""
    newest = tuple(int(part) for part in grants.engine.api.split("."))
    if version > newest:
        raise Refused(
            "target.version",
            f"client version {version[0]}.{version[1]} is too new. "
            f"Maximum supported API version is {grants.engine.api}",
            400,
        )


def _check_head(request: Request, route: routes.Route) -> None:
    """Headers that would change how the rest is read."""
    values: dict[str, list[str]] = {}
    for name, value in request.headers:
        values.setdefault(name.lower(), []).append(value.strip().lower())
    if "transfer-encoding" in values and "content-length" in values:
        raise Refused("head.framing", "Content-Length and Transfer-Encoding together", 400)
    if any(len(values.get(name, ())) > 1 for name in ("content-type", "upgrade", "host")):
        raise Refused("head.duplicate", "a header is given twice", 400)
    upgrade = values.get("upgrade", ["tcp"])[0]
    if upgrade != "tcp" or ("upgrade" in values and route.stream != routes.HIJACK):
        raise Refused("head.upgrade", "this endpoint cannot switch to another protocol", 400)
    if request.body and route.body is not None:
        kind = values.get("content-type", [JSON])[0].partition(";")[0].strip()
        if kind != JSON:
            raise Refused("head.content-type", f"the body must be {JSON}", 400)


def _draft(
    site: Site, route: routes.Route, names: dict[str, str], where: target.Target, body: bytes
) -> routes.Draft:
    segments = routes.path(site, route, names)
    if route.name == "build":
        query: tuple[tuple[str, object], ...] = where.query
    else:
        query = tuple(queries.read(site, route.query, where.query).items())
    draft = routes.Draft(
        method=route.method, segments=segments, query=query, body=_body(site, route, body),
        stream=route.stream, answer=route.answer,
    )  # fmt: skip
    draft = route.last(site, draft) if route.last is not None else draft
    if route.name != "build":
        draft = draft.replace(query=tuple(sorted(draft.query, key=lambda pair: pair[0])))
    return draft


def _body(site: Site, route: routes.Route, body: bytes) -> object:
    if route.body is not None:
        return route.body(site, load(body) if body else {})
    if route.stream != routes.UPLOAD and body and load(body) not in ({}, None):
        # Go reads a form in a body as parameters, before those of the query.
        raise Refused("body.unexpected", "this request takes no body", 400)
    return None


def _headers(draft: routes.Draft, *, has_body: bool) -> tuple[tuple[str, str], ...]:
    headers = [("Host", "docker")]
    if draft.stream == routes.UPLOAD:
        headers.append(("Content-Type", "application/x-tar"))
    elif has_body:
        headers.append(("Content-Type", JSON))
    if draft.stream == routes.HIJACK:
        headers += [("Connection", "Upgrade"), ("Upgrade", "tcp")]
    return tuple(headers)
