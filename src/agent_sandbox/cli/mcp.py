"""`sandboxctl mcp`: the Model Context Protocol over standard input and output, by its official SDK.

For agents that run outside, or have no sandbox of their own: their host starts this program, and
its tools work under one policy, from the flags of agent-sandbox. When the host goes away, so does
everything that its calls have started.
"""

from __future__ import annotations

import os
import sys

from ..errors import HostError, UsageError
from ..policy import whereabouts
from ..policy.model import MARKER, README
from . import options, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    from .mcp_tools import Tool, Tools

HINT = "see 'sandboxctl mcp --help'"
INSTRUCTIONS = (
    "These tools work in a sandbox that the user chose. Each call is a new one: files stay, "
    "processes and /tmp do not. What follows is the page that commands in it find at {readme}.\n\n"
)


def main(arguments: list[str]) -> int:
    """Serve until standard input ends."""
    parsed = options.parse(arguments)
    if parsed.command or parsed.switches or parsed.report:
        raise UsageError("mcp takes flags of agent-sandbox only", hint=HINT, code="usage")
    if os.path.exists(MARKER):
        raise HostError(
            "cannot start a sandbox inside a sandbox",
            hint=f"run commands as they are: they are sandboxed already; see {README}",
            code="nested",
        )
    _load_sdk()
    import anyio

    from .mcp_tools import Flagged, Tools

    sandbox = Flagged(parsed.values, parsed.cwd, parsed.config)
    # Before anybody asks: a policy that cannot be used is told now.
    prepared = sandbox.plan(["sh"])
    for message in prepared.plan.notices:
        output.notice("sandboxctl", message)
    page = whereabouts.text(prepared.policy, prepared.facts)

    async def serve() -> None:
        await talk(Tools(sandbox), out, INSTRUCTIONS.format(readme=README) + page)

    # Whatever prints, here or in a library, must not end up between two messages.
    said = os.dup(1)
    os.dup2(2, 1)
    with open(said, "w", encoding="utf-8") as out:
        try:
            anyio.run(serve)
        except KeyboardInterrupt:
            return 130
    return 0


def _load_sdk() -> None:
    if sys.flags.no_site:
        # A checkout's command starts without site-packages, where the SDK lies.
        import site

        site.main()
    try:
        import mcp.server.stdio  # noqa: F401
    except ImportError as error:
        raise HostError(
            "cannot speak MCP: its SDK is not installed",
            hint="pip install 'agent-sandbox[mcp]', or in a checkout "
            "pip --python .venv/bin/python install 'mcp<2'",
            code="no-mcp",
        ) from error


async def talk(tools: Tools, out: TextIO, instructions: str) -> None:
    """The protocol, until the other side has gone."""
    import anyio
    from mcp.server.stdio import stdio_server

    server = build(tools, instructions)
    async with stdio_server(stdout=anyio.wrap_file(out)) as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def build(tools: Tools, instructions: str) -> Any:  # noqa: ANN401 - of an optional package
    """The SDK's server with our tools."""
    from mcp import types
    from mcp.server.lowlevel import Server

    from .. import __version__
    from .mcp_tools import TOOLS

    server: Server[dict[str, Any], Any] = Server(
        "agent-sandbox", version=__version__, instructions=instructions
    )

    async def list_tools(_: types.ListToolsRequest) -> types.ServerResult:
        return types.ServerResult(types.ListToolsResult(tools=[described(t) for t in TOOLS]))

    async def call_tool(asked: types.CallToolRequest) -> types.ServerResult:
        said = await tools.use(asked.params.name, asked.params.arguments or {})
        return types.ServerResult(
            types.CallToolResult(
                content=[types.TextContent(type="text", text=said.text)],
                structuredContent=None if said.values is None else dict(said.values),
                isError=said.values is None,
            )
        )

    # Set, not decorated: the SDK's decorators would check arguments by rules of their own.
    server.request_handlers[types.ListToolsRequest] = list_tools
    server.request_handlers[types.CallToolRequest] = call_tool
    return server


def described(tool: Tool) -> Any:  # noqa: ANN401 - of an optional package
    """A tool as the protocol tells of it."""
    from mcp import types

    return types.Tool(
        name=tool.name, title=tool.title, description=tool.help, inputSchema=tool.takes.full(),
        annotations=types.ToolAnnotations(
            readOnlyHint=tool.read_only, destructiveHint=tool.destructive, openWorldHint=False
        ),
    )  # fmt: skip
