"""`sandboxctl mcp` with the official SDK's client: tools work, under the policy and no other."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import mcp
import pytest
from mcp import ClientSession, McpError, StdioServerParameters, types
from mcp.client.stdio import stdio_client

from agent_sandbox.cli.mcp_tools import MOST_FILE, MOST_OUTPUT, TOOLS, entries
from conftest import IS_ROOT, As, must_work

pytestmark = pytest.mark.kernel
Work = Callable[[ClientSession], Awaitable[Any]]
PATIENCE = 60.0
# Before the system's places, which may have parts of the SDK in other versions.
BOOT = """import sys
sys.path[:0] = sys.argv.pop(1).split(":")
from agent_sandbox.cli.ctl import main
sys.exit(main())"""


class Host:
    """What an agent's host has: a home with a secret, a project, and a way to start the server.

    As whoever runs the tests: others need not be able to read where the SDK is.
    """

    def __init__(self, me: As, base: Path) -> None:
        self.me = me
        self.home = me.directory(base / "home")
        self.project = me.directory(self.home / "work" / "project")
        self.secret = me.directory(self.home / ".ssh") / "id"
        self.secret.write_text("SECRET")
        (self.home / "outside").write_text("old")
        me.own(self.home)

    def parameters(self, *flags: str) -> StdioServerParameters:
        site = Path(mcp.__file__).parent.parent
        source = f"{self.me.source}:{site}"
        return StdioServerParameters(
            command=os.path.realpath(sys.executable), cwd=self.project,
            args=["-I", "-c", BOOT, source, "mcp", *flags],
            env=self.me.environ({"HOME": str(self.home), "SECRET_TOKEN": "hidden"}),
        )  # fmt: skip

    def talk(self, work: Work, *flags: str) -> Any:
        """A whole session."""

        async def main() -> Any:
            async with (
                stdio_client(self.parameters(*flags)) as (reader, writer),
                ClientSession(reader, writer) as session,
            ):
                await session.initialize()
                return await work(session)

        return asyncio.run(asyncio.wait_for(main(), PATIENCE * 2))


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    me: As = request.getfixturevalue("superuser" if IS_ROOT else "user")
    must_work(not me.obstacle, me.obstacle)
    # Not below /tmp, which is another one inside.
    base = Path("/srv" if IS_ROOT else Path.home()) / f"agsbx-mcp-{secrets.token_hex(4)}"
    me.directory(base)
    yield Host(me, base)
    subprocess.run(["rm", "-rf", base], check=False)


def words(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, types.TextContent))


async def use(session: ClientSession, name: str, **arguments: object) -> dict[str, Any]:
    """A call that must work; its values."""
    found = await session.call_tool(name, arguments)
    assert not found.isError, words(found)
    assert found.structuredContent is not None
    return found.structuredContent


async def refused(session: ClientSession, name: str, **arguments: object) -> str:
    """A call that must be refused; the words."""
    found = await session.call_tool(name, arguments)
    assert found.isError, words(found)
    return words(found)


def test_an_agent_works_in_the_project(host: Host) -> None:
    """Run, write, read and list; the host sees the work; the server tells where it is."""

    async def work(session: ClientSession) -> None:
        listed = await session.list_tools()
        assert [tool.name for tool in listed.tools] == [tool.name for tool in TOOLS]
        done = await use(
            session, "run_command", command="echo out; echo err >&2; cat; pwd; exit 3", stdin="in\n"
        )
        assert (done["exitCode"], done["stderr"]) == (3, "err\n")
        assert done["stdout"] == f"out\nin\n{host.project}\n"
        made = await use(session, "write_file", path="a/b c.txt", content="h\u00e9llo\n")
        assert made["size"] == 7
        read = await use(session, "read_file", path=f"{host.project}/a/b c.txt", offset=3)
        assert (read["content"], read["size"], read["truncated"]) == ("llo\n", 7, False)
        await use(session, "write_file", path="raw", content="/wA=", base64=True)
        read = await use(session, "read_file", path="raw")
        assert (read["content"], read["encoding"]) == ("/wA=", "base64")
        found = await use(session, "list_files", path="a")
        assert found["items"] == [
            {"type": "file", "size": 7, "path": f"{host.project}/a/b c.txt"}
        ]  # fmt: skip
        # More than a pipe holds, to one that reads it and to one that does not.
        for line, size in (("wc -c", 900_000), ("true", 0)):
            done = await use(session, "run_command", command=line, stdin="x" * 900_000)
            assert (int(done["stdout"] or 0), done["exitCode"]) == (size, 0)
        inner = await use(session, "run_command", command="pwd", cwd="a")
        assert inner["stdout"] == f"{host.project}/a\n"

    host.talk(work)
    assert (host.project / "a" / "b c.txt").read_text() == "h\u00e9llo\n"
    assert (host.project / "raw").read_bytes() == b"\xff\x00"


def test_the_server_says_where_its_tools_are(host: Host) -> None:
    async def main() -> types.InitializeResult:
        async with (
            stdio_client(host.parameters("--network=off")) as (reader, writer),
            ClientSession(reader, writer) as session,
        ):
            return await session.initialize()

    told = asyncio.run(main()).instructions
    assert told is not None
    assert "You are in a sandbox" in told
    assert str(host.project) in told
    assert "There is none" in told


def test_cannot_reach_beyond_the_policy(host: Host) -> None:
    """By command or by file tool, by path or by link. Control: the same paths exist outside."""
    assert host.secret.read_text() == "SECRET"
    (host.project / "link").symlink_to(host.secret)
    (host.project / "out").symlink_to(host.home / "outside")

    async def work(session: ClientSession) -> None:
        for path in ("~/.ssh/id", str(host.secret), "link", "../../.ssh/id"):
            assert "No such file" in await refused(session, "read_file", path=path), path
        assert "No such file" in await refused(session, "list_files", path="~/.ssh")
        done = await use(session, "run_command", command="cat ~/.ssh/id; env")
        assert "SECRET" not in done["stdout"]
        assert "hidden" not in done["stdout"]
        said = await refused(session, "write_file", path="/usr/planted", content="x")
        assert "/run/agent-sandbox/README.md" in said
        # These go to the private home.
        await session.call_tool("write_file", {"path": "out", "content": "new"})
        await session.call_tool("write_file", {"path": "~/planted", "content": "new"})

    host.talk(work)
    assert (host.home / "outside").read_text() == "old"
    assert not (host.home / "planted").exists()
    assert not Path("/usr/planted").exists()


def test_flags_are_the_policy(host: Host) -> None:
    """As for agent-sandbox; and a call cannot change them."""
    (host.project / ".env").write_text("SECRET=1")

    async def work(session: ClientSession) -> None:
        done = await use(session, "run_command", command="cat .env; cat /proc/net/dev")
        assert "SECRET" not in done["stdout"]
        assert len(done["stdout"].splitlines()) == 3  # two of headings, and lo
        assert "not a field" in await refused(session, "run_command", command="x", network="on")

    host.talk(work, "--exclude", ".env", "--network=off")


def test_output_is_bounded(host: Host) -> None:
    """A command that prints for ever fills neither the answer nor our memory."""
    (host.project / "big").write_bytes(b"x" * (MOST_FILE + 10))

    async def work(session: ClientSession) -> None:
        done = await use(session, "run_command", command="yes; true", timeout=2)
        assert (done["timedOut"], done["truncated"], done["exitCode"]) == (True, True, 124)
        assert len(done["stdout"]) == MOST_OUTPUT
        read = await use(session, "read_file", path="big")
        assert (len(read["content"]), read["truncated"]) == (MOST_FILE, True)
        rest = await use(session, "read_file", path="big", offset=MOST_FILE)
        assert (rest["content"], rest["truncated"]) == ("x" * 10, False)
        assert "not a regular file" in await refused(session, "read_file", path="/dev/zero")

    host.talk(work)


NONSENSE: tuple[tuple[str, dict[str, object]], ...] = (
    ("nothing", {}), ("run_command", {}), ("run_command", {"command": 3}),
    ("run_command", {"command": "a\0b"}), ("read_file", {"path": ""}),
    ("write_file", {"path": "x", "content": "%", "base64": True}),
    ("run_command", {"command": "true", "timeout": 0}), ("list_files", {"depth": 99}),
    ("run_command", {"command": "true", "cwd": "/nowhere"}),
)  # fmt: skip


def test_calls_that_make_no_sense_are_answered(host: Host) -> None:
    """In words, and the server goes on."""

    async def work(session: ClientSession) -> None:
        for name, arguments in NONSENSE:
            found = await session.call_tool(name, arguments)
            failed = found.isError or (found.structuredContent or {}).get("exitCode")
            assert failed, (name, arguments)
            assert words(found)
        await use(session, "run_command", command="true")

    host.talk(work)


def running(sign: str) -> list[int]:
    """Processes with a word in their command line."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and sign.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def gone(sign: str) -> bool:
    deadline = time.monotonic() + PATIENCE
    while running(sign) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(sign)


def begun(file: Path) -> bool:
    """Wait for another process to make a file."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.exists()


def test_a_call_that_is_given_up_ends(host: Host) -> None:
    """The command with all its children, not only the wait for it."""
    sign = f"9{secrets.randbelow(10**9):09}"

    async def work(session: ClientSession) -> None:
        line = f"sleep {sign} & touch begun; sleep {sign}"
        call = asyncio.ensure_future(session.call_tool("run_command", {"command": line}))
        assert await asyncio.to_thread(begun, host.project / "begun")
        assert running(sign)  # the control
        for number in range(20):
            note = types.CancelledNotification(
                params=types.CancelledNotificationParams(requestId=number)
            )
            await session.send_notification(types.ClientNotification(note))
        with pytest.raises(McpError):
            await call
        assert await asyncio.to_thread(gone, sign)
        await use(session, "run_command", command="true")

    host.talk(work)


HELLO = types.InitializeRequestParams(
    protocolVersion="2025-06-18", capabilities=types.ClientCapabilities(),
    clientInfo=types.Implementation(name="t", version="1"),
)  # fmt: skip


def tell(server: subprocess.Popen[bytes], **message: object) -> None:
    """One message."""
    assert server.stdin is not None
    text = types.JSONRPCMessage.model_validate({"jsonrpc": "2.0", **message})
    server.stdin.write(text.model_dump_json(exclude_none=True).encode() + b"\n")
    server.stdin.flush()


@pytest.mark.parametrize("how", ["stdin", "kill"])
def test_nothing_outlives_the_host(host: Host, how: str) -> None:
    """Whether it closes the pipe or kills the server."""
    sign = f"8{secrets.randbelow(10**9):09}"
    start = host.parameters()
    with subprocess.Popen(
        [start.command, *start.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=host.project, env=start.env,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        tell(server, id=1, method="initialize", params=HELLO.model_dump(mode="json"))
        assert b"serverInfo" in server.stdout.readline()
        tell(server, method="notifications/initialized")
        line = {"command": f"sleep {sign} & touch begun; sleep {sign}"}
        call = {"name": "run_command", "arguments": line}
        tell(server, id=2, method="tools/call", params=call)
        assert begun(host.project / "begun")
        assert running(sign)  # the control
        if how == "kill":
            server.kill()
        server.stdin.close()
        assert gone(sign)
        code = server.wait(PATIENCE)
        # No message is left half written, and nothing else was printed.
        said = server.stdout.read().splitlines()
    assert code == (-signal.SIGKILL if how == "kill" else 0)
    assert all(line.startswith(b"{") for line in said)


@pytest.mark.parametrize("flags", [["true"], ["--debug"], ["--dry-run"], ["--report", "x"]])
def test_only_flags_of_a_policy(host: Host, flags: list[str]) -> None:
    done = host.me.run(host.me.command("ctl", "mcp", *flags), cwd=host.project)
    assert (done.returncode, done.stdout) == (125, "")
    assert "flags of agent-sandbox only" in done.stderr


def test_without_the_sdk_there_is_a_hint(user: As) -> None:
    """The system's Python has none."""
    probe = user.run([user.python, "-c", "import mcp"])
    must_work(probe.returncode, "needs a Python without the SDK")
    done = user.sandboxctl("mcp")
    assert (done.returncode, done.stdout) == (125, "")
    assert "agent-sandbox[mcp]" in done.stderr


def test_names_cannot_forge_a_listing() -> None:
    """A newline in a name makes a line that is dropped, or an entry that is there."""
    listed = b"regular file|3|/p//a\nregular file|x|/p//b\nnonsense\nsymbolic link|1|/p//c\x1b[2J\n"
    assert entries(listed) == [
        {"type": "file", "size": 3, "path": "/p/a"},
        {"type": "link", "size": 1, "path": "/p/c?[2J"},
    ]  # fmt: skip
