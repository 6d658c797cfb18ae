"""`/mcp`: the Model Context Protocol over streamable HTTP, by its official SDK.

Stateless: every request stands for itself, and is made by the agent whose token came with it. So
there is no session that another agent could take over, and nothing to lose at a restart.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from importlib import import_module

from .api import documents
from .http.asgi import serve_asgi
from .http.messages import Request
from .mcp_tools import BY_NAME, TOOLS, Asked, Tool
from .problems import Problem
from .replicas.interface import Elsewhere
from .values import Agent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .core.service import Service
    from .http.messages import Response

    # As `api.denials.Denials.note`: a refusal inside of an answer is a refusal, too.
    Refused = Callable[[Request, Agent, str, str, Problem], None]

log = logging.getLogger(__name__)
# A message with the content of a file in it.
MOST_BODY = 8 << 20
# Where the HTTP request carries who asks. Set by us for each request, read by nobody else.
AGENT, REQUEST = "agent_sandbox.agent", "agent_sandbox.request"


def endpoint(service: Service, refused: Refused | None = None) -> Endpoint:
    """The handler for `/mcp`. The SDK is loaded with the first request: it takes a second."""
    return Endpoint(service, refused)


def not_installed() -> Problem:
    """The SDK is an extra."""
    return Problem(
        "NOT_INSTALLED", "this server has no MCP: its SDK is not installed", rule="mcp.installed",
        hint="where the server runs: pip install 'agent-sandbox[mcp]', or in a checkout "
        "pip --python .venv/bin/python install 'mcp<2'",
    )  # fmt: skip


class Endpoint:
    """Answers requests. `close` ends it with the server."""

    def __init__(self, service: Service, refused: Refused | None) -> None:
        self._service = service
        self._refused = refused
        self._manager: Any = None
        self._life: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._stop = asyncio.Event()

    async def __call__(self, request: Request, agent: Agent) -> Response:
        """One request of an agent that the server has let in."""
        if request.method != "POST":
            # There is nothing to listen to without a session; the protocol has a 405 for that.
            raise Problem(
                "METHOD_NOT_ALLOWED", "MCP is stateless here: only POST", rule="mcp.stateless",
                headers={"allow": "POST"},
            )  # fmt: skip
        body = await request.body(MOST_BODY)
        # The SDK has a 500 for what is no text or nested too deeply.
        self._check_home(documents.read(body), agent, body)
        await self._ready()
        told = Request(request.method, request.target, request.headers, request.peer, body)
        state = {AGENT: agent, REQUEST: request}
        return await serve_asgi(self._manager.handle_request, told, state=state, limit=MOST_BODY)

    def _check_home(self, message: object, agent: Agent, body: bytes) -> None:
        """A tool for a sandbox is used where that is."""
        params = message.get("params") if isinstance(message, dict) else None
        arguments = params.get("arguments") if isinstance(params, dict) else None
        sandbox = arguments.get("sandbox") if isinstance(arguments, dict) else None
        if isinstance(sandbox, str):
            peer = self._service.elsewhere(agent, sandbox, "")
            if peer is not None:
                raise Elsewhere(peer, body)

    async def close(self) -> None:
        """End what is under way."""
        self._stop.set()
        if self._life is not None:
            await asyncio.gather(self._life, return_exceptions=True)

    async def _ready(self) -> None:
        """The SDK's tasks live in a task of their own: they must outlive the first request."""
        async with self._opening:
            if self._life is None or self._life.done():
                self._manager = await self._load()
                started = asyncio.Event()
                self._life = asyncio.ensure_future(self._live(started))
                await started.wait()

    async def _live(self, started: asyncio.Event) -> None:
        try:
            async with self._manager.run():
                started.set()
                await self._stop.wait()
        except Exception:
            log.exception("MCP has ended; the next request starts it anew")
        finally:
            # A failure must not leave the first request waiting.
            started.set()

    async def _load(self) -> Any:  # noqa: ANN401 - of an optional package
        try:
            # In a thread: others' requests do not wait for a second of imports.
            sdk = await asyncio.to_thread(_import_sdk)
            security = import_module("mcp.server.transport_security")
        except ImportError:
            raise not_installed() from None
        # It tells of every request, and the server has done so already.
        logging.getLogger("mcp").setLevel(logging.WARNING)
        return sdk.StreamableHTTPSessionManager(
            app=build(self._service, self._refused), stateless=True, json_response=True,
            max_request_body_size=MOST_BODY,
            # Host and Origin were checked before anybody was asked for a token: `api.origins`
            # knows the names under which this server may be called, and the SDK does not.
            security_settings=security.TransportSecuritySettings(
                enable_dns_rebinding_protection=False
            ),
        )  # fmt: skip


def _import_sdk() -> Any:  # noqa: ANN401 - of an optional package
    if sys.flags.no_site:
        # A checkout's command starts without site-packages, where the SDK lies.
        import site

        site.main()
    return import_module("mcp.server.streamable_http_manager")


def build(service: Service, refused: Refused | None) -> Any:  # noqa: ANN401 - of an optional package
    """The SDK's server with our tools."""
    from mcp import types
    from mcp.server.lowlevel import Server

    from .. import __version__

    server: Server[dict[str, Any], Any] = Server(
        "agent-sandbox", version=__version__, instructions=INSTRUCTIONS
    )

    async def list_tools(_: types.ListToolsRequest) -> types.ServerResult:
        return types.ServerResult(types.ListToolsResult(tools=[described(t) for t in TOOLS]))

    async def call_tool(asked: types.CallToolRequest) -> types.ServerResult:
        agent, request = identity(server.request_context.request)
        name, arguments = asked.params.name, asked.params.arguments or {}
        text, values = await use(Asked(service, agent, request, arguments), name, refused)
        return types.ServerResult(
            types.CallToolResult(
                content=[types.TextContent(type="text", text=text)],
                structuredContent=values,
                isError=values is None,
            )
        )

    # Set, not decorated: the SDK's decorators would show the text of any exception to the client.
    server.request_handlers[types.ListToolsRequest] = list_tools
    server.request_handlers[types.CallToolRequest] = call_tool
    return server


INSTRUCTIONS = (
    "Sandboxes in which commands run without harm to anything outside. A command without a sandbox "
    "gets a fresh one that is gone afterwards; use create_sandbox for work in several steps."
)


def described(tool: Tool) -> Any:  # noqa: ANN401 - of an optional package
    """A tool as the protocol tells of it."""
    from mcp import types

    return types.Tool(
        name=tool.name, title=tool.title, description=tool.help, inputSchema=tool.takes.full(),
        annotations=types.ToolAnnotations(
            readOnlyHint=tool.read_only, destructiveHint=tool.destructive, openWorldHint=False
        ),
    )  # fmt: skip


def identity(http: Any) -> tuple[Agent, Request]:  # noqa: ANN401 - starlette's request
    """Who asks, from the HTTP request alone. Without that there is nobody."""
    state = http.scope["state"] if http is not None else {}
    agent, request = state.get(AGENT), state.get(REQUEST)
    if not isinstance(agent, Agent) or request is None:
        raise RuntimeError("a request without an agent")
    return agent, request


async def use(
    asked: Asked, name: str, refused: Refused | None
) -> tuple[str, dict[str, Any] | None]:
    """Call a tool: words and values, or the words of a refusal and None."""
    tool = BY_NAME.get(name)
    if tool is None:
        return f"there is no tool {name[:80]!r}; there are: {', '.join(BY_NAME)}", None
    target = asked.arguments.get("sandbox")
    try:
        asked.arguments = tool.takes.read(asked.arguments, "")
        said = await tool.act(asked)
    except Problem as problem:
        if refused is not None:
            named = target if isinstance(target, str) else ""
            refused(asked.request, asked.agent, tool.action, named, problem)
        hint = f". {problem.hint}" if problem.hint else ""
        return f"{problem.code}: {problem.message}{hint}", None
    except Exception:
        log.exception("tool %s failed (request %s)", name, asked.request.id)
        return f"INTERNAL: something went wrong in the service (request {asked.request.id})", None
    return said.text, dict(said.values)
