"""Requests made from the table of routes, so that a new route is tried by itself."""

from __future__ import annotations

import io
import re
import tarfile
from typing import Any

import httpx

from agent_sandbox.service.api.call import TAR, Route
from agent_sandbox.service.api.routes import ROUTES
from agent_sandbox.service.api.schema import Shape

BRACES = re.compile(r"\{([A-Za-z]+)\}")
KNOWN = [route for route in ROUTES if not route.public]


def name(route: Route) -> str:
    return f"{route.method} {route.path}"


def about(*ids: str) -> list[Route]:
    """The routes with one of these ids in their path."""
    return [route for route in ROUTES if set(BRACES.findall(route.path)) & set(ids)]


def one_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("unpacked"))
    return buffer.getvalue()


def body_of(route: Route) -> Any:
    """The example of the document; what has none takes nothing."""
    if isinstance(route.body, Shape) and route.body.example is not None:
        return dict(route.body.example)
    return {}


def ask(client: httpx.Client, route: Route, ids: dict[str, str], **more: Any) -> httpx.Response:
    """A request that is right in every part but for who sends it."""
    path = BRACES.sub(lambda found: ids.get(found[1], "unknown"), route.path)
    query = {param: "x" for param, row in route.query.items() if row.needed}
    sent: dict[str, Any] = {"params": query}
    if route.raw:
        sent["content"] = one_tar() if route.raw == TAR else b"{}"
        sent["headers"] = {"content-type": route.raw}
    elif route.body is not None:
        sent["json"] = body_of(route)
    sent.update(more)
    # A stream may go on for long: what it begins with will do.
    with client.stream(route.method, path, **sent) as answer:
        if answer.headers.get("content-type") == "text/event-stream":
            return httpx.Response(answer.status_code, headers=answer.headers)
        answer.read()
    return answer
