"""The tools of `sandboxctl mcp`: what they take, and what they do. No SDK here.

Every call is a sandbox of its own with the same policy. Files are read and written by programs in
it, too: so there is no second reading of the policy that could differ from the kernel's.
"""

from __future__ import annotations

import asyncio
import os
import subprocess  # noqa: TID253 - a program of its own, not a launch
import threading
import time

from ..errors import EXIT_TIMEOUT, SandboxError
from ..launch import execute
from ..policy.model import README
from ..record import Record
from ..sandbox.library import Policy, Sandbox
from ..sandbox.process import sooner
from ..service.api import inputs
from ..service.api.schema import Flag, Kind, Shape, Text, whole
from ..service.mcp_tools import as_text
from . import output
from .quarantine import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import IO, Any

    from ..policy.model import Setting
    from ..sandbox.process import Process

# What a model is shown at once. More would fill its context.
MOST_OUTPUT, MOST_FILE, MOST_ENTRIES = 64 * 1024, 256 * 1024, 500
DEFAULT_SECONDS, MOST_SECONDS, FILE_SECONDS = 120, 3600, 60
# Sandboxes at a time; the rest waits.
MOST_AT_ONCE = 8
MOST_CONTENT = 4 << 20

# $1 the file, $2 the first byte, counted from 1, $3 how many. The size comes first, in a line.
READ = """[ -f "$1" ] || { ls -dL -- "$1" >/dev/null && echo "$1: not a regular file" >&2; exit 3; }
stat -L -c %s -- "$1" && tail -c "+$2" -- "$1" | head -c "$3"
"""
# $1 the file, $2 its size: input that broke off leaves the file as it was. Written in place, so
# that mode, owner and links stay.
WRITE = """new=$(mktemp) && cat >"$new" && [ "$(wc -c <"$new")" -eq "$2" ] || exit 5
case $1 in */*) mkdir -p -- "${1%/*}/" || exit 6 ;; esac
cat -- "$new" >"$1"
"""
# $1 the directory, $2 the depth, $3 how many.
LIST = """[ -d "$1" ] || { ls -dL -- "$1" >/dev/null && echo "$1: not a directory" >&2; exit 3; }
find "$1/" -mindepth 1 -maxdepth "$2" -exec stat -c '%F|%s|%n' -- {} + | head -n "$3"
"""
READ_ONLY = "Read-only file system"
KINDS = {"regular file": "file", "regular empty file": "file", "symbolic link": "link"}


class Ended(Record):
    """How a command ended."""

    code: int
    out: bytes
    err: bytes
    cut: bool = False
    timed_out: bool = False
    exceeded: str = ""
    notices: tuple[str, ...] = ()


class Said(Record):
    """What a tool answers: words for the model, and the same as values; None for a refusal."""

    text: str
    values: Mapping[str, object] | None


class Call:
    """A command that may be ended from another thread, also before it has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._over = False

    def take(self, process: Process) -> None:
        """It has begun."""
        with self._lock:
            self._process = process
            if self._over:
                process.kill()

    def end(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()


class Flagged(Sandbox):
    """A sandbox whose policy comes from the flags of the command line and the policy files."""

    def __init__(self, values: Mapping[str, Setting], cwd: str | None, config: str | None) -> None:
        place = os.path.abspath(cwd or ".")
        super().__init__(Policy(project=place, config=config if config is not None else True))
        self._values = dict(values)


class Tools:
    """The tools under one policy."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        made = sandbox.plan(["sh"])
        self.project, self.home = made.plan.project, made.facts.home.path
        # What models write is bash more often than not.
        self.shell = "bash" if os.path.exists("/bin/bash") else "sh"

    async def use(self, name: str, arguments: object) -> Said:
        """Call a tool. What the sandbox, or the policy, refuses is an answer."""
        tool = BY_NAME.get(name)
        if tool is None:
            return Said(
                text=f"there is no tool {name[:80]!r}; there are: {', '.join(BY_NAME)}", values=None
            )
        try:
            return await tool.act(self, tool.takes.read(arguments, ""))
        except SandboxError as error:
            hint = f". {error.hint}" if error.hint else ""
            return Said(text=f"{error.code}: {error.message}{hint}", values=None)

    def place(self, path: str) -> str:
        """A path inside; the words of a model are relative to the project."""
        if path == "~" or path.startswith("~/"):
            return self.home + path[1:]
        return path if path.startswith("/") else f"{self.project}/{path}"

    async def run(
        self, argv: Sequence[str], *, data: bytes = b"", cwd: str | None = None,
        seconds: float = FILE_SECONDS, most: int = MOST_OUTPUT,
    ) -> Ended:  # fmt: skip
        """Run a command to its end on a thread; whoever cancels this ends it."""
        call = Call()
        async with self._room:
            work = asyncio.ensure_future(
                asyncio.to_thread(
                    self._run, call, argv, data=data, cwd=cwd, seconds=seconds, most=most
                )
            )
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                call.end()
                # Its sandbox must be gone before this is.
                await asyncio.wait({work})
                raise

    def _run(
        self, call: Call, argv: Sequence[str], *, data: bytes, cwd: str | None,
        seconds: float, most: int,
    ) -> Ended:  # fmt: skip
        pipe = subprocess.PIPE
        with self._sandbox.popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd) as process:
            call.take(process)
            out, err = Kept(process.stdout, most), Kept(process.stderr, most)
            feeder = threading.Thread(target=_feed, args=(process.stdin, data), daemon=True)
            feeder.start()
            code = wait(process, sooner(seconds, process.limit))
            kept = out.all(), err.all()
            feeder.join()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        warnings, notices = note(process.changes, self.project)
        return Ended(
            code=EXIT_TIMEOUT if process.timed_out else code, out=kept[0], err=kept[1],
            cut=out.cut or err.cut, timed_out=process.timed_out, exceeded=process.exceeded,
            notices=(*process.notices, *warnings, *notices),
        )  # fmt: skip


class Kept:
    """The beginning of a stream. The rest is read and forgotten: a full pipe would stop it."""

    def __init__(self, stream: IO[bytes] | None, most: int) -> None:
        self._stream = stream
        self._most = most
        self._data = bytearray()
        self.cut = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while self._stream is not None:
            try:
                piece = os.read(self._stream.fileno(), 1 << 16)
            except (OSError, ValueError):
                return
            if not piece:
                return
            room = self._most - len(self._data)
            self._data += piece[:room]
            self.cut = self.cut or len(piece) > room

    def all(self) -> bytes:
        """What was kept, at the end."""
        self._reader.join()
        return bytes(self._data)


def _feed(stream: IO[bytes] | None, data: bytes) -> None:
    if stream is None:
        return
    try:
        stream.write(data)
    except (OSError, ValueError):
        # It has read enough.
        pass
    try:
        stream.close()
    except OSError:
        # What it did not read; the descriptor is closed all the same.
        return


def wait(process: Process, seconds: float | None) -> int:
    """Wait for the end under a timeout and the polled limits: ask first, kill later."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return process.wait(sooner(left, process.poll_interval))
        except subprocess.TimeoutExpired:
            process.check_limits()
        if deadline is not None and time.monotonic() >= deadline:
            if process.timed_out:
                process.kill()
                deadline = None
            else:
                process.timed_out = True
                process.terminate()
                deadline = time.monotonic() + execute.GRACE


# --- what they do


async def run_command(tools: Tools, given: Mapping[str, Any]) -> Said:
    """A command line for a shell."""
    ended = await tools.run(
        [tools.shell, "-c", given["command"]],
        data=given.get("stdin", "").encode(),
        cwd=tools.place(given["cwd"]) if "cwd" in given else None,
        seconds=given.get("timeout", DEFAULT_SECONDS),
    )
    values: dict[str, object] = {
        "exitCode": ended.code, "stdout": _lossy(ended.out), "stderr": _lossy(ended.err),
        "timedOut": ended.timed_out, "exceeded": ended.exceeded, "truncated": ended.cut,
        "notices": [output.printable(text) for text in ended.notices],
    }  # fmt: skip
    return Said(text=told(values), values=values)


def told(values: Mapping[str, object]) -> str:
    """A command's end as a model reads it: output first, then what is remarkable. Pure."""
    parts = [str(values["stdout"])]
    if values["stderr"]:
        parts.append(f"[stderr]\n{values['stderr']}")
    notes = [f"exit code {values['exitCode']}"]
    if values["timedOut"]:
        notes.append("it took too long and was ended")
    if values["exceeded"]:
        notes.append(f"it was ended by the limit '{values['exceeded']}'")
    if values["truncated"]:
        notes.append("there was more output than is shown")
    notices = values["notices"]
    notes += [str(text) for text in notices] if isinstance(notices, list) else []
    parts.append(f"[{'; '.join(notes)}]")
    return "\n".join(part.rstrip("\n") for part in parts if part)


async def read_file(tools: Tools, given: Mapping[str, Any]) -> Said:
    """Text, or base64 of what is none."""
    path, offset = tools.place(given["path"]), given.get("offset", 0)
    # One more than is shown, and the line with the size.
    words = ("sh", path, str(offset + 1), str(MOST_FILE + 1))
    ended = await tools.run(["sh", "-c", READ, *words], most=MOST_FILE + 64)
    if ended.code:
        return failed(ended)
    size, _, data = ended.out.partition(b"\n")
    more = len(data) > MOST_FILE
    content, encoding = as_text(data[:MOST_FILE], cut=more)
    values: dict[str, object] = {
        "path": path, "size": int(size), "encoding": encoding, "truncated": more,
        "content": content,
    }  # fmt: skip
    if more:
        content += f"\n[cut after {MOST_FILE} bytes of {int(size)}: go on with offset]"
    return Said(text=content, values=values)


async def write_file(tools: Tools, given: Mapping[str, Any]) -> Said:
    """The whole new content of a file."""
    path = tools.place(given["path"])
    data = given["content"].encode()
    if given.get("base64"):
        data = inputs.Base64().read(given["content"], "content")
    ended = await tools.run(["sh", "-c", WRITE, "sh", path, str(len(data))], data=data)
    if ended.code:
        return failed(ended)
    return Said(text=f"wrote {len(data)} bytes to {path}", values={"path": path, "size": len(data)})


async def list_files(tools: Tools, given: Mapping[str, Any]) -> Said:
    """Names, kinds and sizes."""
    path = tools.place(given["path"]) if "path" in given else tools.project
    words = ("sh", path.rstrip("/") or "/", str(given.get("depth", 1)), str(MOST_ENTRIES + 1))
    ended = await tools.run(["sh", "-c", LIST, *words], most=MOST_ENTRIES * inputs.MOST_PATH)
    if ended.code:
        return failed(ended)
    found = sorted(entries(ended.out), key=lambda one: str(one["path"]))
    more = len(found) > MOST_ENTRIES
    shown = found[:MOST_ENTRIES]
    lines = [f"{one['type']:<9} {one['size']:>10} {one['path']}" for one in shown]
    if more:
        lines.append(f"[only {MOST_ENTRIES} are shown]")
    return Said(
        text="\n".join(lines) or "[nothing there]", values={"items": shown, "truncated": more}
    )


def entries(data: bytes) -> list[dict[str, object]]:
    """What `stat` printed, line by line. A name with a newline makes lines that are none. Pure."""
    found: list[dict[str, object]] = []
    for line in _lossy(data).splitlines():
        kind, _, rest = line.partition("|")
        size, bar, path = rest.partition("|")
        if bar and size.isdecimal():
            clean = output.printable(path.replace("//", "/", 1))
            found.append({"type": KINDS.get(kind, kind), "size": int(size), "path": clean})
    return found


def failed(ended: Ended) -> Said:
    """What a program inside said."""
    said = _lossy(ended.err).strip() or f"exit code {ended.code}"
    if ended.timed_out:
        said = "it took too long and was ended"
    # The kernel's words do not tell who refused.
    more = f" (the sandbox refuses that: see {README})" if READ_ONLY in said else ""
    return Said(text=output.printable(said.splitlines()[0])[:1000] + more, values=None)


def _lossy(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# --- what they take

PATH = inputs.Argument(
    least=1, most=inputs.MOST_PATH, help="Absolute, below ~, or below the project."
)
RUN: dict[str, Kind] = {
    "command": inputs.Argument(
        least=1, most=inputs.MOST_ARGUMENT, help="A command line for a shell."
    ),
    "cwd": PATH,
    "stdin": Text(most=1 << 20, nul=True, help="What it reads. Nothing if left out."),
    "timeout": whole(1, MOST_SECONDS, help=f"Seconds; {DEFAULT_SECONDS} if left out."),
}
WRITTEN: dict[str, Kind] = {
    "path": PATH,
    "content": Text(most=MOST_CONTENT, nul=True, help="The whole new content."),
    "base64": Flag(help="The content is base64, for bytes that are no text."),
}


class Tool(Record):
    """A row of the table."""

    name: str
    title: str
    help: str
    takes: Shape
    act: Callable[[Tools, Mapping[str, Any]], Awaitable[Said]]
    read_only: bool = False
    destructive: bool = False


TOOLS = (
    Tool(
        name="run_command", title="Run a command", act=run_command, destructive=True,
        help="Run a command in a sandbox: the project is writable, the rest of the machine is "
        "read-only or hidden. Each call is a new sandbox; files in the project and in the home "
        "stay, processes and /tmp do not.",
        takes=Shape(RUN, needed=("command",)),
    ),
    Tool(
        name="read_file", title="Read a file", act=read_file, read_only=True,
        help="Read a file as the sandbox sees it.",
        takes=Shape(
            {"path": PATH, "offset": whole(help="The first byte to show.")}, needed=("path",)
        ),
    ),
    Tool(
        name="write_file", title="Write a file", act=write_file, destructive=True,
        help="Replace a file, or make it with the directories above it, where the sandbox may "
        "write.",
        takes=Shape(WRITTEN, needed=("path", "content")),
    ),
    Tool(
        name="list_files", title="List files", act=list_files, read_only=True,
        help="List a directory as the sandbox sees it.",
        takes=Shape({"path": PATH, "depth": whole(1, 8, help="1 if left out.")}),
    ),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}
