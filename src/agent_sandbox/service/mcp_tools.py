"""The tools that agents get over MCP: what they take, and what they do. No SDK here.

Each tool is thin over `core.Service`, with the agent of the HTTP request. Nothing in a message of
MCP says who asks. Arguments are read by the tables of the API, so both refuse the same.
"""

from __future__ import annotations

import asyncio
import base64

from ..record import Record
from .api import inputs, reading, views
from .api.documents import write as to_json
from .api.schema import Flag, Items, Kind, Shape, Text, whole
from .backend.interface import WORK
from .problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from typing import Any

    from .core.jobs import Job
    from .core.service import Service
    from .http.messages import Request
    from .values import Agent

# What a model is shown at once. More would fill its context; the rest stays in the sandbox.
MOST_OUTPUT, MOST_FILE, MOST_ENTRIES, MOST_SANDBOXES = 64 * 1024, 256 * 1024, 500, 100


class Asked:
    """One call of a tool."""

    __slots__ = ("agent", "arguments", "request", "service")

    def __init__(
        self, service: Service, agent: Agent, request: Request, arguments: Mapping[str, Any]
    ) -> None:
        self.service = service
        self.agent = agent
        self.request = request
        self.arguments = arguments


class Said(Record):
    """What a tool answers: words for the model, and the same as values."""

    text: str
    values: Mapping[str, object]


class Tool(Record):
    """A row of the table."""

    name: str
    title: str
    help: str
    takes: Shape
    act: Callable[[Asked], Awaitable[Said]]
    # The audit's word for a refusal.
    action: str
    read_only: bool = False
    destructive: bool = False


# --- what tools take

SANDBOX = Text(
    least=1, most=64, pattern="[A-Za-z0-9-]+",
    help="The id of a sandbox, from create_sandbox or list_sandboxes.",
)  # fmt: skip
PATH = inputs.Argument(
    least=1, most=inputs.MOST_PATH, help=f"Absolute, or below {WORK}, e.g. src/main.py."
)
RUN: dict[str, Kind] = {
    "command": inputs.Argument(
        least=1, most=inputs.MOST_ARGUMENT, help="A command line for /bin/sh."
    ),
    "sandbox": Text(
        least=1, most=64, pattern="[A-Za-z0-9-]+",
        help="The id of a sandbox. Without it the command gets one of its own, gone afterwards.",
    ),
    "cwd": PATH,
    "stdin": inputs.EXEC_FIELDS["stdin"],
    "timeout": inputs.EXEC_FIELDS["timeout"],
}  # fmt: skip
CREATE: dict[str, Kind] = {
    "timeout": inputs.SANDBOX_FIELDS["timeout"],
    "memory": Text(most=24, help='A bound such as "512M".'),
    "network": Text(choices=("off", "public"), help="Off if left out."),
    "allow_hosts": Items(
        Text(least=1, most=300), most=256, help="Hosts that may be reached; all others may not."
    ),
    "template": inputs.SANDBOX_FIELDS["template"],
    "image": inputs.SANDBOX_FIELDS["image"],
    "env": inputs.ENV,
}
WRITE: dict[str, Kind] = {
    "sandbox": SANDBOX,
    "path": PATH,
    "content": Text(most=4 << 20, nul=True, help="The whole new content."),
    "base64": Flag(help="The content is base64, for bytes that are no text."),
}


# --- what they do


async def run_command(asked: Asked) -> Said:
    """In a sandbox that is there, or in one of its own."""
    given = dict(asked.arguments)
    sandbox = given.pop("sandbox", "")
    own = {"request_id": asked.request.id}
    if sandbox:
        job = await asked.service.execute(asked.agent, sandbox, reading.execution(given), **own)
    else:
        job = await asked.service.run(asked.agent, reading.run(given), **own)
    await _ended(asked, job)
    found = await job.journal.collect(MOST_OUTPUT, job.execution.begins)
    shown = views.result(job.execution, found.stdout, found.stderr, cut=found.cut)
    names = (
        "exitCode", "stdout", "stderr", "timedOut", "oomKilled", "exceeded", "truncated",
        "durationMs", "signal", "error", "execId", "state",
    )  # fmt: skip
    values = {name: shown[name] for name in names}
    if sandbox:
        values["sandbox"] = sandbox
    return Said(text=_told(values), values=values)


async def _ended(asked: Asked, job: Job) -> None:
    """Its end. The result of one whose caller has gone can never be asked for: it is ended."""
    gone = asyncio.ensure_future(asked.request.disconnected.wait())
    ends = asyncio.ensure_future(job.wait())
    try:
        await asyncio.wait((gone, ends), return_when=asyncio.FIRST_COMPLETED)
        if not ends.done():
            await asked.service.kill(
                asked.agent, job.id, reason="the client went away", request_id=asked.request.id
            )
        await ends
    finally:
        gone.cancel()
        ends.cancel()


def _told(values: Mapping[str, object]) -> str:
    """A command's end as a model reads it: output first, then what is remarkable."""
    parts = [str(values["stdout"])]
    if values["stderr"]:
        parts.append(f"[stderr]\n{values['stderr']}")
    lost = values["exitCode"] is None
    notes = ["it was lost: nobody saw its end" if lost else f"exit code {values['exitCode']}"]
    if values["timedOut"]:
        notes.append("it took too long and was ended")
    if values["exceeded"]:
        notes.append(f"it was ended by the limit '{values['exceeded']}'")
    if values["truncated"]:
        notes.append("there was more output than is shown")
    if values["error"]:
        notes.append(str(values["error"]))
    parts.append(f"[{'; '.join(notes)}]")
    return "\n".join(part.rstrip("\n") for part in parts if part)


async def read_file(asked: Asked) -> Said:
    """Text, or base64 of what is none."""
    path, offset = asked.arguments["path"], asked.arguments.get("offset", 0)
    entry, pieces = await _files(asked).read(path, offset)
    data = bytearray()
    try:
        async for piece in pieces:
            data += piece
            if len(data) > MOST_FILE:
                break
    finally:
        await pieces.aclose()
    more = len(data) > MOST_FILE
    content, encoding = as_text(bytes(data[:MOST_FILE]), cut=more)
    values: dict[str, object] = {
        "path": views.clean(entry.path), "size": entry.size, "encoding": encoding,
        "truncated": more, "content": content,
    }  # fmt: skip
    if more:
        content += f"\n[cut after {MOST_FILE} bytes of {entry.size}: go on with offset]"
    return Said(text=content, values=values)


def as_text(data: bytes, *, cut: bool) -> tuple[str, str]:
    """UTF-8 if it is that, else base64; the last character may be cut in two. Pure."""
    for dropped in range(4 if cut else 1):
        try:
            return data[: len(data) - dropped].decode(), "utf-8"
        except UnicodeDecodeError:
            continue
    return base64.b64encode(data).decode(), "base64"


async def write_file(asked: Asked) -> Said:
    """Replace a file."""
    given = asked.arguments
    data = given["content"].encode()
    if given.get("base64"):
        data = inputs.Base64().read(given["content"], "content")
    entry = await _files(asked).write(given["path"], _once(data))
    path = views.clean(entry.path)
    return Said(text=f"wrote {entry.size} bytes to {path}", values=views.entry(entry))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def list_files(asked: Asked) -> Said:
    """Names, kinds and sizes."""
    given = asked.arguments
    found, more = await _files(asked).list(
        given.get("path", WORK), depth=given.get("depth", 1), most=MOST_ENTRIES
    )
    entries = [views.entry(entry) for entry in found]
    lines = [f"{one['type']:<9} {one['size']:>10} {one['path']}" for one in entries]
    if more:
        lines.append(f"[only the first {MOST_ENTRIES} are shown]")
    values: dict[str, object] = {"items": entries, "truncated": more}
    return Said(text="\n".join(lines) or "[nothing there]", values=values)


def _files(asked: Asked) -> Any:  # noqa: ANN401 - core.files.AuditedFiles, which is no module of ours
    return asked.service.files(asked.agent, asked.arguments["sandbox"], request_id=asked.request.id)


async def list_sandboxes(asked: Asked) -> Said:
    """The agent's own; an admin's tools see no more than that."""
    found = asked.service.sandboxes(asked.agent, owner=asked.agent.name, limit=MOST_SANDBOXES)
    shown = [_brief(views.sandbox(sandbox)) for sandbox in found]
    text = to_json(shown).decode() if shown else "[there are no sandboxes]"
    return Said(text=text, values={"items": shown})


async def create_sandbox(asked: Asked) -> Said:
    """One that lives until it is deleted or expires."""
    given = dict(asked.arguments)
    body: dict[str, Any] = {
        name: given[name] for name in ("timeout", "template", "image", "env", "network")
        if name in given
    }  # fmt: skip
    if "memory" in given:
        body["resources"] = inputs.RESOURCES.read({"memory": given["memory"]}, "")
    if "allow_hosts" in given:
        if given.get("network", "allow") != "allow":
            raise Problem(
                "INVALID", "allow_hosts: means nothing with the network mode given",
                field="allow_hosts", rule="request.schema", hint="leave network out",
            )  # fmt: skip
        body["network"] = {"mode": "allow", "allowOut": given["allow_hosts"]}
    made = await asked.service.create(asked.agent, reading.wish(body), request_id=asked.request.id)
    shown = _brief(views.sandbox(made))
    return Said(text=to_json(shown).decode(), values=shown)


def _brief(shown: Mapping[str, object]) -> dict[str, object]:
    names = ("id", "state", "backend", "template", "image", "createdAt", "expiresAt", "metadata",
             "resources", "network")  # fmt: skip
    return {name: shown[name] for name in names}


async def delete_sandbox(asked: Asked) -> Said:
    """With its files, and what runs in it."""
    sandbox = asked.arguments["sandbox"]
    await asked.service.delete(asked.agent, sandbox, request_id=asked.request.id)
    return Said(text=f"deleted {sandbox}", values={"deleted": sandbox})


# --- the table

TOOLS: tuple[Tool, ...] = (
    Tool(
        name="run_command", title="Run a command", action="exec.start", act=run_command,
        help="Run a shell command in a sandbox and wait for its end. Files that it makes stay in "
        "the sandbox until that is deleted or expires.",
        takes=Shape(RUN, needed=("command",)), destructive=True,
    ),
    Tool(
        name="read_file", title="Read a file", action="file.get", act=read_file, read_only=True,
        help=f"Read a file of a sandbox, up to {MOST_FILE} bytes at once.",
        takes=Shape(
            {"sandbox": SANDBOX, "path": PATH,
             "offset": whole(0, help="The byte to begin with; 0 if left out.")},
            needed=("sandbox", "path"),
        ),
    ),
    Tool(
        name="write_file", title="Write a file", action="file.put", act=write_file,
        help="Write a file of a sandbox. What was there is replaced, directories are made.",
        takes=Shape(WRITE, needed=("sandbox", "path", "content")), destructive=True,
    ),
    Tool(
        name="list_files", title="List files", action="file.list", act=list_files, read_only=True,
        help=f"List a directory of a sandbox; {WORK} if no path is given.",
        takes=Shape(
            {"sandbox": SANDBOX, "path": PATH, "depth": whole(1, 64, help="1 if left out.")},
            needed=("sandbox",),
        ),
    ),
    Tool(
        name="list_sandboxes", title="List sandboxes", action="sandbox.list", act=list_sandboxes,
        help="List your sandboxes.", takes=Shape({}), read_only=True,
    ),
    Tool(
        name="create_sandbox", title="Create a sandbox", action="sandbox.create",
        help="Make a sandbox that keeps its files between commands, until it is deleted or "
        "expires.", act=create_sandbox, takes=Shape(CREATE),
    ),
    Tool(
        name="delete_sandbox", title="Delete a sandbox", action="sandbox.delete",
        help="End whatever runs in a sandbox, and remove it with its files.", act=delete_sandbox,
        takes=Shape({"sandbox": SANDBOX}, needed=("sandbox",)), destructive=True,
    ),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}
