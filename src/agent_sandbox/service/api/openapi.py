"""The OpenAPI 3.1 document, made of the table of routes and the tables of fields."""

from __future__ import annotations

import functools
import json
import re

from ..problems import STATUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from .call import Answer, Param, Route
    from .schema import Kind

BRACES = re.compile(r"\{([A-Za-z]+)\}")
# What any request may be refused with, what needs an identity, and what has a body.
ALL = ("BAD_REQUEST", "FORBIDDEN", "RATE_LIMITED", "URI_TOO_LONG", "HEADERS_TOO_LARGE", "INTERNAL")
KNOWN = (
    "UNAUTHENTICATED", "SCOPE_MISSING", "CSRF", "DRAINING", "AUDIT_UNAVAILABLE",
    "STATE_UNAVAILABLE", "REPLICA_UNAVAILABLE",
)  # fmt: skip
WITH_ID = ("NOT_FOUND",)
WITH_QUERY = ("INVALID",)
WITH_BODY = ("INVALID", "TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE", "REQUEST_TIMEOUT")
IDS = {
    "sandboxId": "The id of a sandbox. Another agent's is as unknown as none.",
    "execId": "The id of an execution. Another agent's is as unknown as none.",
    "tokenName": "The name of an agent, or the id of a token.",
}
RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
RATES = {
    f"X-RateLimit-{name}": {"description": words, "schema": {"type": "integer"}}
    for name, words in (
        ("Limit", "Requests at once."), ("Remaining", "Left now."),
        ("Reset", "Seconds until all are there again."),
    )
}  # fmt: skip


@functools.cache
def text() -> bytes:
    """The document as it is served."""
    from ... import __version__
    from .routes import ROUTES

    return json.dumps(document(ROUTES, __version__), ensure_ascii=False, indent=1).encode()


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The document as a value."""
    rows = [row for row in routes if not row.hidden]
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = operation(row)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agent-sandbox service", "version": version,
            "description": "Runs commands of many agents in sandboxes. Times are RFC 3339 in UTC, "
            "durations are seconds, sizes are bytes unless they have a unit. Nothing is clamped.",
        },
        "paths": paths,
        "components": {
            "schemas": components(rows),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{"bearer": []}, {"apiKey": []}],
    }  # fmt: skip


def operation(row: Route) -> dict[str, Any]:
    """One method of one path."""
    found: dict[str, Any] = {
        "operationId": row.name, "summary": row.summary, "tags": [row.tag],
        "responses": responses(row),
    }  # fmt: skip
    if row.scopes:
        found["description"] = "Scopes: " + ", ".join(f"`{scope}`" for scope in row.scopes) + "."
    if row.public:
        found["security"] = []
    if parameters := _parameters(row):
        found["parameters"] = parameters
    if row.body is not None:
        found["requestBody"] = {
            "required": not row.optional,
            "content": {"application/json": {"schema": row.body.describe()}},
        }
    elif row.raw:
        # Nothing at all is an empty file.
        found["requestBody"] = {"required": False, "content": {row.raw: {"schema": {}}}}
    return found


def _parameters(row: Route) -> list[dict[str, Any]]:
    ids = [
        {"name": name, "in": "path", "required": True, "description": IDS[name],
         "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}}
        for name in BRACES.findall(row.path)
    ]  # fmt: skip
    return ids + _listed(row.query, "query") + _listed(row.headers, "header")


def _listed(params: Mapping[str, Param], where: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": where, "required": param.needed, "description": param.help,
         "schema": param.kind.describe()}
        for name, param in params.items()
    ]  # fmt: skip


def codes_of(row: Route) -> tuple[str, ...]:
    """Every code that a route may refuse with."""
    found = list(ALL)
    if not row.public:
        found += KNOWN
    if BRACES.search(row.path):
        found += WITH_ID
    if row.query or row.headers or BRACES.search(row.path):
        found += WITH_QUERY
    if row.body is not None or row.raw:
        found += WITH_BODY
    return tuple(dict.fromkeys((*found, *row.codes)))


def responses(row: Route) -> dict[str, Any]:
    """By status: answers, then refusals with the codes that have it."""
    found = {str(status): _answer(answer, row) for status, answer in row.answers.items()}
    by_status: dict[int, list[str]] = {}
    for code in codes_of(row):
        by_status.setdefault(STATUS[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        if status in row.answers:
            continue
        found[str(status)] = {
            "description": ", ".join(f"`{code}`" for code in codes),
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            **({"headers": RETRY} if status in (429, 503) else {}),
        }
    return found


def _answer(answer: Answer, row: Route) -> dict[str, Any]:
    content: dict[str, Any] = {media: {} for media in answer.media}
    if answer.kind is not None:
        content["application/json"] = {"schema": answer.kind.describe()}
    found: dict[str, Any] = {"description": answer.help}
    if content:
        found["content"] = content
    if not row.public:
        found["headers"] = RATES
    return found


def components(rows: Iterable[Route]) -> dict[str, Any]:
    """Every named kind that a row leads to, and the shape of a refusal."""
    from .answers import PROBLEM

    found: dict[str, Any] = {}
    left: list[Kind] = [PROBLEM]
    for row in rows:
        left += [row.body] if row.body is not None else []
        left += [answer.kind for answer in row.answers.values() if answer.kind is not None]
    while left:
        kind = left.pop()
        if kind.name and kind.name not in found:
            found[kind.name] = kind.full()
        elif kind.name:
            continue
        left += kind.kinds()
    return dict(sorted(found.items()))
