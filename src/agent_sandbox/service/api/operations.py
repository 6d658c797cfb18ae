"""Handlers: what monitors, browsers and other protocols ask for."""

from __future__ import annotations

import asyncio
import time

from .. import dashboard
from ..http.messages import Response, empty
from ..problems import Problem
from . import openapi
from .call import JSON, Call, reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..core.service import Service

HEALTHY = reply(200, {"status": "ok"})
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(_call: Call) -> Response:
    """GET /healthz: the loop turns."""
    return HEALTHY


class Readiness:
    """Whether the service takes work: one look at the backend for all who ask within a second."""

    SECONDS = 1.0

    def __init__(self, service: Service) -> None:
        self._service = service
        self._looked = -self.SECONDS
        self._found: asyncio.Future[tuple[bool, str]] | None = None

    async def __call__(self) -> tuple[bool, str]:
        """Anybody may ask, so it must cost next to nothing."""
        now = time.monotonic()
        if self._found is None or self._service.draining or now >= self._looked + self.SECONDS:
            self._looked = now
            self._found = asyncio.ensure_future(self._service.ready())
        # Who stops waiting must not take the answer from the others.
        return await asyncio.shield(self._found)


async def readyz(call: Call) -> Response:
    """GET /readyz: whether it can take work; why not, in a word."""
    ready, reason = await call.parts.ready()
    if ready:
        return HEALTHY
    return reply(503, {"status": "unready", "reason": reason}, (("retry-after", "5"),))


async def metrics(call: Call) -> Response:
    """GET /metrics."""
    parts = call.parts
    gauges = {
        "sandbox_audit_seq": parts.audit.seq, "sandbox_http_connections": parts.connections(),
    }  # fmt: skip
    text = parts.metrics.render(parts.service.counts(), gauges, parts.service.gauges())
    return Response(status=200, headers=(("content-type", METRICS_TYPE),), body=text.encode())


async def document(_call: Call) -> Response:
    """GET /openapi.json."""
    return Response(status=200, headers=(("content-type", JSON),), body=openapi.text())


async def page(call: Call) -> Response:
    """The dashboard's files."""
    found = dashboard.asset(call.request.path)
    if found is None:
        raise Problem("NOT_FOUND", "there is nothing at this path", rule="route.known")
    content, kind, tag = found
    headers = (
        ("content-type", kind), ("etag", tag), ("cache-control", "no-cache"),
        ("content-security-policy", dashboard.POLICY),
    )  # fmt: skip
    if call.request.headers.get("if-none-match") == tag:
        return empty(304, headers[1:])
    return Response(status=200, headers=headers, body=content)


async def mcp(call: Call) -> Response:
    """/mcp: the Model Context Protocol."""
    if call.parts.mcp is None:
        raise Problem("NOT_INSTALLED", "this server has no MCP", rule="mcp.installed",
                      hint="pip install 'agent-sandbox[mcp]'")  # fmt: skip
    return await call.parts.mcp(call.request, call.agent)
