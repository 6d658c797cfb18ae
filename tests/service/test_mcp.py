"""MCP with the official SDK's client: the tools work, and an agent's tools see only its own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mcp
import pytest
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client

from agent_sandbox.service.mcp import identity
from agent_sandbox.service.mcp_tools import MOST_FILE, MOST_OUTPUT, TOOLS
from conftest import IS_ROOT, ROOT, As

from .conftest import Served, Team

pytestmark = [pytest.mark.kernel, pytest.mark.network]
Work = Callable[[ClientSession], Awaitable[Any]]
MISSING = "sbx-" + "a" * 26
# Before the system's places, which may have parts of it in other versions.
BOOT = """import sys
sys.path[:0] = sys.argv.pop(1).split(":")
from agent_sandbox.cli.ctl import main
sys.exit(main())"""


class Sited(As):
    """An identity whose programs find the SDK, which no system has."""

    def command(self, tool: str, *args: str | os.PathLike[str]) -> list[str]:
        assert tool == "ctl"
        site = Path(mcp.__file__).parent.parent
        start = [os.path.realpath(sys.executable), "-I", "-c", BOOT, f"{self.source}:{site}"]
        return [*start, *(os.fspath(arg) for arg in args)]


@pytest.fixture(scope="module")
def sited(request: pytest.FixtureRequest) -> Sited:
    """Whoever runs the tests: others need not be able to read where the SDK is."""
    base: As = request.getfixturevalue("superuser" if IS_ROOT else "user")
    return Sited(base.name, uid=base.uid, gid=base.gid, home=base.home, shared=base.shared)


@pytest.fixture(scope="module")
def one(sited: Sited) -> Iterator[Team]:
    """A server with MCP, and agents."""
    served = Served(sited, sited.directory(sited.project() / "data"))
    team = Team(served)
    yield team
    team.close()
    code = served.stop()
    shutil.rmtree(served.data, ignore_errors=True)
    assert code == 0, "".join(served.lines[-50:])
    assert [line for line in served.log if line["level"] == "error"] == [], "".join(served.lines)


def talk(url: str, token: str, work: Work) -> Any:
    """A whole session of the SDK's client."""

    async def main() -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=60) as http,
            streamable_http_client(f"{url}/mcp", http_client=http) as (reader, writer, _),
            ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            return await work(session)

    return asyncio.run(main())


class Tools:
    """The tools as one agent has them."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def call(self, name: str, **arguments: object) -> types.CallToolResult:
        async def work(session: ClientSession) -> types.CallToolResult:
            return await session.call_tool(name, arguments)

        found: types.CallToolResult = talk(self._url, self._token, work)
        return found

    def use(self, name: str, **arguments: object) -> dict[str, Any]:
        """A call that must work; its values."""
        found = self.call(name, **arguments)
        assert not found.isError, words(found)
        assert found.structuredContent is not None
        return found.structuredContent

    def refused(self, name: str, **arguments: object) -> str:
        """A call that must be refused; the words."""
        found = self.call(name, **arguments)
        assert found.isError, words(found)
        assert found.structuredContent is None
        return words(found)


def words(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, types.TextContent))


@pytest.fixture
def tools(one: Team) -> Tools:
    return Tools(one.served.url, one.tokens["a"])


@pytest.fixture
def others(one: Team) -> Tools:
    return Tools(one.served.url, one.tokens["b"])


@pytest.fixture
def box(tools: Tools) -> Any:
    made = tools.use("create_sandbox")["id"]
    yield made
    tools.call("delete_sandbox", sandbox=made)


# --- what they do


def test_the_server_tells_what_it_has(one: Team) -> None:
    async def work(session: ClientSession) -> types.ListToolsResult:
        await session.send_ping()
        return await session.list_tools()

    found = talk(one.served.url, one.tokens["a"], work).tools
    assert {tool.name for tool in found} == {
        "run_command", "read_file", "write_file", "list_files", "list_sandboxes",
        "create_sandbox", "delete_sandbox",
    }  # fmt: skip
    for tool in found:
        assert tool.description
        assert tool.inputSchema["additionalProperties"] is False
        # A model cannot look up what stands elsewhere.
        assert "$ref" not in json.dumps(tool.inputSchema)
        assert tool.annotations is not None


def test_a_command_runs_in_a_sandbox_of_its_own(tools: Tools) -> None:
    found = tools.call("run_command", command="cat; echo oh >&2; exit 3", stdin="in\n")
    assert not found.isError
    assert found.structuredContent is not None
    values = found.structuredContent
    assert (values["exitCode"], values["stdout"], values["stderr"]) == (3, "in\n", "oh\n")
    assert words(found) == "in\n[stderr]\noh\n[exit code 3]"
    late = tools.call("run_command", command="sleep 30", timeout=0.3)
    assert "took too long" in words(late)


def test_work_in_several_steps(tools: Tools, box: str) -> None:
    assert box in [one["id"] for one in tools.use("list_sandboxes")["items"]]
    tools.use("write_file", sandbox=box, path="src/main.py", content="print(6 * 7)\n")
    found = tools.use("run_command", sandbox=box, command="cat main.py > copy; cat copy", cwd="src")
    assert found["stdout"] == "print(6 * 7)\n"
    assert tools.use("read_file", sandbox=box, path="/workspace/src/copy")["content"] == (
        "print(6 * 7)\n"
    )
    listed = tools.use("list_files", sandbox=box, depth=3)
    assert "/workspace/src/copy" in [entry["path"] for entry in listed["items"]]
    tools.use("delete_sandbox", sandbox=box)
    assert "NOT_FOUND" in tools.refused("run_command", sandbox=box, command="true")


def test_bytes_that_are_no_text_pass_both_ways(tools: Tools, box: str) -> None:
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    tools.use("write_file", sandbox=box, path="b", content=text, base64=True)
    found = tools.use("read_file", sandbox=box, path="b")
    assert (found["encoding"], base64.b64decode(found["content"])) == ("base64", data)


def test_what_is_large_is_cut_and_said_to_be(tools: Tools, box: str) -> None:
    command = f"head -c {MOST_FILE + 10} /dev/zero | tr '\\0' x | tee f"
    found = tools.call("run_command", sandbox=box, command=command)
    assert "more output than is shown" in words(found)
    assert len(words(found)) < MOST_OUTPUT + 1000
    first = tools.use("read_file", sandbox=box, path="f")
    assert (first["truncated"], len(first["content"])) == (True, MOST_FILE)
    rest = tools.use("read_file", sandbox=box, path="f", offset=MOST_FILE)
    assert (rest["truncated"], rest["content"]) == (False, "x" * 10)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("run_command", {}, "command"),
        ("run_command", {"command": ["ls"]}, "command"),
        ("run_command", {"command": "true", "sudo": True}, "sudo"),
        ("run_command", {"command": "true", "timeout": 1e6}, "LIMIT_EXCEEDED"),
        ("run_command", {"command": "true", "sandbox": "../x"}, "sandbox"),
        ("run_command", {"command": "true", "agent": "agent-b"}, "agent"),
        ("read_file", {"sandbox": MISSING, "path": "x"}, "NOT_FOUND"),
        ("create_sandbox", {"memory": "64T"}, "LIMIT_EXCEEDED"),
        ("create_sandbox", {"network": "public", "allow_hosts": ["a.example"]}, "allow_hosts"),
        ("drop_tables", {}, "run_command"),
    ],
)
def test_a_refusal_is_words(tools: Tools, name: str, arguments: dict[str, Any], said: str) -> None:
    assert said in tools.refused(name, **arguments)


def test_cannot_read_outside_of_the_sandbox(tools: Tools, box: str) -> None:
    tools.use("run_command", sandbox=box, command="ln -s /etc/hostname l; ln -s / root")
    for path in ("l", "root/etc/hostname", "../../etc/hostname", "/etc/hostname"):
        tools.refused("read_file", sandbox=box, path=path)
        tools.refused("write_file", sandbox=box, path=f"{path}x/../l", content="x")


# --- whose they are


def test_cannot_use_what_belongs_to_another_agent(tools: Tools, others: Tools, box: str) -> None:
    mark = secrets.token_hex(8)
    tools.use("write_file", sandbox=box, path="secret", content=mark)
    assert box not in str(others.use("list_sandboxes"))
    tries: list[tuple[str, dict[str, Any]]] = [
        ("run_command", {"command": "cat secret"}), ("read_file", {"path": "secret"}),
        ("write_file", {"path": "secret", "content": "x"}), ("list_files", {}),
        ("delete_sandbox", {}),
    ]  # fmt: skip
    for name, arguments in tries:
        said = others.refused(name, sandbox=box, **arguments)
        # The same words as for one that never was.
        assert said.replace(box, "") == others.refused(name, sandbox=MISSING, **arguments).replace(
            MISSING, ""
        )
        assert mark not in said
    # A control: its owner can.
    assert tools.use("read_file", sandbox=box, path="secret")["content"] == mark


def test_an_admins_tools_list_only_its_own(one: Team, box: str) -> None:
    admin = Tools(one.served.url, one.tokens["admin"])
    assert box not in str(admin.use("list_sandboxes"))


def test_cannot_say_in_a_message_who_one_is(one: Team, box: str) -> None:
    """Neither in the arguments nor in what the protocol lets a client add."""
    asked = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {
            "name": "list_files", "arguments": {"sandbox": box},
            "_meta": {"agent": "agent-a", "authorization": one.tokens["a"]},
        },
    }  # fmt: skip
    headers = {"Accept": "application/json, text/event-stream", "X-Agent": "agent-a"}
    said = one.b.post("/mcp", json=asked, headers=headers).json()["result"]
    assert said["isError"]
    assert "NOT_FOUND" in said["content"][0]["text"]
    # A control.
    said = one.a.post("/mcp", json=asked, headers=headers).json()["result"]
    assert not said.get("isError")


def test_two_agents_at_once_do_not_mix(one: Team) -> None:
    async def mine(token: str, text: str) -> set[str]:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=60) as http,
            streamable_http_client(f"{one.served.url}/mcp", http_client=http) as (r, w, _),
            ClientSession(r, w) as session,
        ):
            await session.initialize()
            calls = [
                session.call_tool("run_command", {"command": f"echo {text}"}) for _ in range(5)
            ]
            return {words(found).partition("\n")[0] for found in await asyncio.gather(*calls)}

    async def both() -> tuple[set[str], set[str]]:
        first, second = await asyncio.gather(
            mine(one.tokens["a"], "aaa"), mine(one.tokens["b"], "bbb")
        )
        return first, second

    assert asyncio.run(both()) == ({"aaa"}, {"bbb"})


def test_without_an_identity_there_is_nothing() -> None:
    """Fail closed: a request that did not come through our door."""

    foreign = SimpleNamespace(scope={"state": {"agent_sandbox.agent": "agent-a"}})
    for http in (None, foreign):
        with pytest.raises(RuntimeError):
            identity(http)


# --- the door


ASKED = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPT = {"Accept": "application/json, text/event-stream"}


def test_without_a_good_token_there_is_no_way_in(one: Team) -> None:
    assert one.nobody.post("/mcp", json=ASKED, headers=ACCEPT).status_code == 401
    forged = {**ACCEPT, "Authorization": f"Bearer {one.tokens['a'][:-4]}AAAA"}
    assert one.nobody.post("/mcp", json=ASKED, headers=forged).status_code == 401
    assert one.a.post("/mcp", json=ASKED, headers=ACCEPT).status_code == 200

    async def work(session: ClientSession) -> None:
        await session.list_tools()

    with pytest.raises(BaseExceptionGroup) as caught:
        talk(one.served.url, "sbx_none", work)
    assert "401" in str(caught.value.exceptions) or caught.group_contains(httpx.HTTPStatusError)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_cannot_be_reached_by_rebinding_a_name(one: Team, headers: dict[str, str]) -> None:
    said = one.a.post("/mcp", json=ASKED, headers={**ACCEPT, **headers})
    assert 400 <= said.status_code < 500
    assert "tools" not in said.text


def test_there_is_nothing_to_listen_to(one: Team) -> None:
    for method in ("GET", "DELETE"):
        said = one.a.request(method, "/mcp", headers={"Accept": "text/event-stream"})
        assert (said.status_code, said.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"jsonrpc": "2.0"}', b"null", b"\xff", b"[" * 100_000]
)
def test_what_is_no_message_is_a_clear_4xx(one: Team, body: bytes) -> None:
    headers = {**ACCEPT, "Content-Type": "application/json"}
    said = one.a.post("/mcp", content=body, headers=headers)
    assert 400 <= said.status_code < 500, said.text


def test_a_message_that_is_too_large_is_refused(one: Team) -> None:
    headers = {**ACCEPT, "Content-Type": "application/json"}
    assert one.a.post("/mcp", content=b" " * (9 << 20), headers=headers).status_code == 413


def test_scopes_hold_for_tools(one: Team) -> None:
    token = one.served.token(f"reader-{secrets.token_hex(3)}", "--scope", "files")
    reader = Tools(one.served.url, token)
    assert "SCOPE_MISSING" in reader.refused("run_command", command="true")
    assert "SCOPE_MISSING" in reader.refused("create_sandbox")


# --- the audit


def test_what_tools_do_and_what_is_refused_is_in_the_audit(one: Team, tools: Tools) -> None:
    mark = secrets.token_hex(6)
    tools.use("run_command", command=f"echo {mark}")
    tools.refused("read_file", sandbox=MISSING, path="x")
    allowed = one.audit(agent="agent-a", action="exec.start")
    assert mark in json.dumps(allowed)
    denied = [line for line in one.audit(agent="agent-a", decision="deny") if MISSING in str(line)]
    assert denied
    assert denied[-1]["action"] == "file.get"


def test_a_command_whose_caller_has_gone_is_ended(one: Team) -> None:
    mark = secrets.token_hex(6)
    asked = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "run_command", "arguments": {"command": f"sleep 50; : {mark}"}},
    }  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        one.a.post("/mcp", json=asked, headers=ACCEPT, timeout=1)

    newest = one.a.get("/v1/execs", params={"order": "desc", "limit": "5"})
    assert newest.status_code == 200, newest.text
    (execution,) = [e for e in newest.json()["items"] if mark in " ".join(e["command"])]
    result = one.a.get(
        f"/v1/execs/{execution['id']}/events", headers={"Accept": "text/event-stream"}, timeout=20
    )
    assert '"exitCode":137' in result.text.replace(" ", "")


# --- without the SDK


def test_without_the_sdk_the_server_says_what_is_missing() -> None:
    script = """
import asyncio, sys
sys.modules["mcp"] = None
from agent_sandbox.service import mcp
from agent_sandbox.service.http.messages import Peer, Request
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Agent

async def main():
    asked = Request("POST", "/mcp", {}, Peer(address="127.0.0.1"), b"{}")
    try:
        await mcp.endpoint(None)(asked, Agent(name="a", key="", scopes=frozenset()))
    except Problem as problem:
        print(problem.status, problem.code, problem.hint)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.startswith("501 NOT_INSTALLED where the server runs: pip install")


def test_every_tool_has_an_action_for_the_audit() -> None:
    assert all("." in tool.action for tool in TOOLS)
