"""What verify's answers mean, and that the probe asks the same in every language."""

from __future__ import annotations

import http.server
import os
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.cli.compose import outside
from agent_sandbox.compose import probe
from agent_sandbox.compose.probe import Agent, Row
from conftest import IS_ROOT, must_work

if TYPE_CHECKING:
    from collections.abc import Iterator

AGENT = Agent(id="c" * 64, service="w", image="sha256:1", pid=0, env=(), mounts=(), labels=())


def row(**answers: str) -> Row:
    return Row(tool="t", target="unix:/s", answers=tuple(answers.items()))


JUDGED = [
    ({"ping": "-2"}, "held"), ({"ping": "-absent"}, "not there"),
    ({"ping": "-untried"}, "not tried"),
    ({}, "held"), ({"ping": "-nohttp"}, "held"),
    ({"ping": "200", "list": "200", "create": "201", "id": "HOST"}, "escaped"),
    ({"ping": "200", "list": "200", "create": "201", "id": ""}, "escaped"),
    ({"ping": "200", "list": "200", "create": "201", "id": "OTHER"}, "held"),
    ({"ping": "200", "list": "200", "create": "403", "id": "HOST"}, "reached"),
    ({"ping": "200", "list": "403", "create": "404", "id": ""}, "reached"),
    ({"ping": "403", "list": "403", "create": "403"}, "held"),
    ({"ping": "403", "list": "403", "create": "201"}, "escaped"),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "outcome"), JUDGED)
def test_answers_are_judged(answers: dict[str, str], outcome: str) -> None:
    assert probe.judged(row(**answers), "HOST")[0] == outcome


def outcomes(found: list[Row], labels: str = "", *, accept: bool = True) -> dict[str, str]:
    agent = AGENT.replace(labels=(("agent-sandbox.accept", labels),))
    made = probe.verdicts(agent, found, "HOST", accept=accept)
    return {v.attack: v.outcome for v in made}


ESCAPE = row(ping="200", list="200", create="201", id="HOST")
READ = row(ping="200", list="200", create="403", id="HOST")


def test_the_worst_answer_counts() -> None:
    found = [row(ping="-2"), ESCAPE, row(ping="-absent")]
    assert outcomes(found) == {
        "docker ps": "not tried",
        "raw request": "reached",
        "escape": "escaped",
    }
    assert outcomes([row(ping="-2"), row(ping="-untried")])["escape"] == "not tried"
    assert outcomes([READ]) == {
        "docker ps": "not tried",
        "raw request": "reached",
        "escape": "held",
    }
    assert set(outcomes([]).values()) == {"not tried"}


def test_labels_answer_for_what_they_name() -> None:
    assert outcomes([ESCAPE], "docker-socket")["escape"] == "accepted"
    assert outcomes([ESCAPE], "docker-socket", accept=False)["escape"] == "escaped"
    assert outcomes([ESCAPE], "privileged")["escape"] == "escaped"
    # Whoever may read may not create.
    assert outcomes([READ], "engine-address")["raw request"] == "accepted"
    assert outcomes([ESCAPE], "engine-address")["escape"] == "escaped"


def test_what_a_container_prints_besides_is_dropped() -> None:
    text = "motd\nagsbx\nagsbx a b\nagsbx perl unix:/s ping=200 list=200 x\n\x00\nagsbxx a b c=d\n"
    assert probe.rows(text) == (
        Row(tool="perl", target="unix:/s", answers=(("ping", "200"), ("list", "200"), ("x", ""))),
    )


def test_addresses_come_from_mounts_variables_and_the_list() -> None:
    agent = AGENT.replace(
        env=(
            ("DOCKER_HOST", "tcp://h:2375"),
            ("CONTAINER_HOST", "unix:///odd place/s"),
            ("A", "b"),
        ),
        mounts=("/hostrun", "/s"),
    )
    found = probe.targets(agent)
    assert found[0] == "tcp:h:2375"
    assert {"unix:/s", "unix:/hostrun/docker.sock", "unix:/var/run/docker.sock"} <= set(found)
    assert not [target for target in found if " " in target]


def test_an_inspected_container_may_lack_everything() -> None:
    assert probe.agent({"Id": "x", "Name": "/n"}).service == "n"
    odd = {"Id": 5, "Config": None, "Mounts": "x", "State": {"Pid": "y"}}
    assert probe.agent(odd).pid == 0


class Handler(http.server.BaseHTTPRequestHandler):
    """An engine as far as the probe goes."""

    def answer(self) -> None:
        asked = (self.command, self.path.partition("?")[0])
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        code = {"POST": 201, "DELETE": 204}.get(self.command, 200)
        body = b'{"ID":"HOST","x":1}' if self.path == "/info" else b"[]"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

    def log_message(self, *words: object) -> None:
        pass

    def address_string(self) -> str:
        return "x"


class Server(socketserver.ThreadingUnixStreamServer):
    def __init__(self, path: str) -> None:
        self.asked: list[tuple[str, str]] = []
        super().__init__(path, Handler)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("s") / "s"
    with Server(str(path)) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


ASKED = [("GET", "/_ping"), ("GET", "/containers/json"), ("GET", "/info"),
         ("POST", "/containers/create"), ("DELETE", "/containers/n")]  # fmt: skip


@pytest.mark.parametrize("tool", ["python3", "perl", "curl"])
def test_every_language_asks_the_same(tmp_path: Path, server: Server, tool: str) -> None:
    """A PATH with one of them: the shell takes what is there."""
    for name in (tool, "tr"):
        must_work(shutil.which(name), f"needs {name}")
        program = os.path.realpath(sys.executable) if name == "python3" else shutil.which(name)
        (tmp_path / name).symlink_to(str(program))
    words = ["n", "sha256:1", probe.LABEL, probe.PYTHON_INSIDE, probe.PERL]
    targets = [f"unix:{server.server_address}", "unix:/nowhere", "tcp:127.0.0.1:1"]
    done = subprocess.run(
        ["/bin/sh", "-c", probe.SHELL, "sh", *words, *targets], env={"PATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    found = {r.target: r for r in probe.rows(done.stdout)}
    assert set(found) == {*targets, "docker-cli"}, done.stderr
    assert found[targets[0]].tool == tool.rstrip("3")
    assert probe.judged(found[targets[0]], "HOST")[0] == "escaped"
    assert probe.judged(found[targets[0]], "ELSE")[0] == "held"
    assert [probe.judged(found[t], "HOST")[0] for t in targets[1:]] == ["held", "held"]
    assert server.asked == ASKED


def test_without_any_language_the_socket_is_seen_but_not_tried(
    tmp_path: Path, server: Server
) -> None:
    words = ["n", "sha256:1", probe.LABEL, "", ""]
    targets = [f"unix:{server.server_address}", "unix:/nowhere", "tcp:127.0.0.1:1"]
    done = subprocess.run(
        ["/bin/sh", "-c", probe.SHELL, "sh", *words, *targets], env={"PATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    found = {r.target: probe.judged(r, "HOST")[0] for r in probe.rows(done.stdout)}
    assert [found[t] for t in targets] == ["not tried", "not there", "not tried"]


def test_from_outside_the_same_is_asked(server: Server) -> None:
    """As root: the root directory and the user of a process, here our own."""
    must_work(IS_ROOT, "needs root")
    said = outside.ask(
        os.getpid(), [f"unix:{server.server_address}", "unix:/nowhere"], ("n", "i", probe.LABEL)
    )
    found = [probe.judged(r, "HOST")[0] for r in probe.rows(said)]
    assert found == ["escaped", "held"]
    assert server.asked == ASKED


def test_from_outside_permissions_are_the_users(server: Server) -> None:
    """A closed socket stays closed to a process of another user."""
    must_work(IS_ROOT, "needs root")
    os.chmod(str(server.server_address), 0o600)
    with subprocess.Popen(["sleep", "1000"], user=65534, group=65534, extra_groups=[]) as other:
        try:
            said = outside.ask(other.pid, [f"unix:{server.server_address}"], ("n", "i", "l"))
        finally:
            other.kill()
    assert [probe.judged(r, "HOST")[0] for r in probe.rows(said)] == ["held"]
    assert server.asked == []


def test_a_process_that_is_gone_is_not_asked() -> None:
    assert outside.ask(2**22 + 5, ["unix:/s"], ("n", "i", "l")) == ""


def test_the_table_has_a_line_for_each_attack() -> None:
    lines = probe.table(probe.verdicts(AGENT, [ESCAPE], "HOST", accept=True)).splitlines()
    assert lines[0].split() == ["SERVICE", "ATTACK", "OUTCOME", "DETAIL"]
    assert (
        lines[3]
        == "w        escape       escaped    unix:/s: made a container with the host's disk"
    )
