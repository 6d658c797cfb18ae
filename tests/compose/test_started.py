"""The team on a real engine: its agents escape before, and after each solution they do not."""

# ruff: noqa: E501 - scripts for the inside read better in one piece

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import engine as engines
from agent_sandbox.compose import solutions
from compose.conftest import TEAM, Ctl
from conftest import ROOT, must_work
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.slow]

WORKERS = ("one", "two", "three")
SOCKET = "/var/run/docker.sock"
PLAN = """#!/bin/sh
# Hands out a task to each worker and waits for every result.
for name in one two three; do echo "task for $name" > /tasks/$name.new; mv /tasks/$name.new /tasks/$name; done
for name in one two three; do while ! [ -e /results/$name ]; do usleep 20000; done; done
cat /results/one /results/two /results/three > /results/all.new
mv /results/all.new /results/all
exec sleep 1000000
"""
# With a sandbox service the job runs there, else here.
WORK = """#!/bin/sh
while ! [ -e /tasks/$1 ]; do usleep 20000; done
if [ -n "$SANDBOX_URL" ]; then
    until answer=$(wget -q -O - --header "Authorization: Bearer $(cat "$SANDBOX_TOKEN_FILE")" "$SANDBOX_URL/run/$1"); do
        usleep 20000
    done
else
    answer="$(cat /tasks/$1): done here"
fi
echo "$answer" > /results/$1.new
mv /results/$1.new /results/$1
exec sleep 1000000
"""
# The image's sandboxctl: `docker serve` is the real one. In the place of `serve` stands a program
# that knows its tokens, and holds the socket.
SANDBOXCTL = r"""#!/bin/sh
if [ "$1" = docker ]; then exec PYTHON -I -S /opt/agent_sandbox/cli/entry.py ctl "$@"; fi
exec perl -e '
my %known; opendir my $d, "/run/secrets" or die;
for my $f (grep { !/^\./ } readdir $d) { open my $h, "<", "/run/secrets/$f" or die; my $t = <$h>; chomp $t; $known{$t} = $f }
die "no socket" unless -S "/var/run/docker.sock"; die "no limit" unless $ENV{MAX_EXECUTION_TIME};
socket(my $l, 2, 1, 0); setsockopt($l, 1, 2, 1); bind($l, pack("Sna4x8", 2, 8080, "\0\0\0\0")) or die; listen($l, 9);
while (accept(my $c, $l)) {
  my $r = ""; while ($r !~ /\r?\n\r?\n/) { sysread($c, my $p, 4096) or last; $r .= $p }
  my ($t) = $r =~ /^Authorization: Bearer (\S+)/mi; my $who = $known{$t // ""};
  my $b = $who ? "done by the service for $who\n" : "no\n";
  syswrite($c, "HTTP/1.0 " . ($who ? "200 OK" : "403 Forbidden") . "\r\nContent-Length: " . length($b) . "\r\n\r\n$b");
  close $c;
}'
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with the team's image and the stand-in's."""
    for program in ("docker-compose", "perl"):
        must_work(shutil.which(program), f"needs {program}")
    with engines.engine() as made:
        tools = [shutil.which("perl") or "", shutil.which("docker") or ""]
        group = {"etc/group": "root:x:0:\ndocker:x:999:\n"}
        made.image(
            "agent:latest", programs=tools, files={"plan.sh": PLAN, "work.sh": WORK, **group}
        )
        made.image("bare:latest", files={"plan.sh": PLAN, "work.sh": WORK, **group})
        _own_image(made, tools[0], group)
        yield made


def _own_image(made: Engine, perl: str, group: dict[str, str]) -> None:
    """As packaging/Dockerfile makes it, but with this machine's Python: nothing can be pulled."""
    python = "/usr/bin/python3"
    must_work(os.path.exists(python), f"needs {python}")
    query = "import sysconfig; print(sysconfig.get_path('stdlib'), sysconfig.get_config_var('DESTSHARED'))"
    said = subprocess.run([python, "-I", "-c", query], capture_output=True, text=True, check=True)
    library, modules = map(Path, said.stdout.split())
    left_out = {
        "test",
        "idlelib",
        "lib2to3",
        "tkinter",
        "ensurepip",
        "site-packages",
        "dist-packages",
    }
    files = {
        str(path): path.read_text(encoding="utf-8")
        for path in library.rglob("*.py")
        if not left_out & set(path.relative_to(library).parts)
    }
    source = ROOT / "src" / "agent_sandbox"
    for path in source.rglob("*.py"):
        files[f"/opt/agent_sandbox/{path.relative_to(source)}"] = path.read_text()
    files["bin/sandboxctl"] = SANDBOXCTL.replace("PYTHON", os.path.realpath(python))
    programs = [perl, os.path.realpath(python), *map(str, modules.glob("*.so"))]
    made.image(
        solutions.IMAGE, programs=programs, files={**files, **group}, entrypoint="sandboxctl"
    )


class Team:
    """A copy of the project, with this engine's socket in the place of the host's."""

    def __init__(self, engine: Engine, directory: Path, image: str = "agent:latest") -> None:
        self.engine = engine
        self.ctl = Ctl(directory)
        self.env = {**engine.env, "OPENAI_API_KEY": "x", "COMPOSE_PROJECT_NAME": "team"}
        text = (TEAM / "docker-compose.yml").read_text().replace("agent:latest", image)
        # It takes every capability, which root on a test machine need not have.
        text = text.replace("    privileged: true\n", "")
        self.write("docker-compose.yml", text)
        for name in ("tasks", "results"):
            (directory / name).mkdir()

    def write(self, name: str, text: str) -> None:
        for source in (f"- {SOCKET}:", f'- "{SOCKET}:'):
            text = text.replace(source, source.replace(SOCKET, str(self.engine.socket)))
        self.ctl.write(
            name, text.replace("source: /run/docker.sock", f"source: {self.engine.socket}")
        )

    def secured(self, solution: str, *flags: str) -> str:
        done = self.ctl(
            "secure", "docker-compose.yml", "--solution", solution, "-o", "s.yml", *flags
        )
        assert done.returncode == 0, done.stderr
        self.write("s.yml", (self.ctl.directory / "s.yml").read_text())
        return "s.yml"

    def compose(self, file: str, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker-compose", "-f", file, *words], cwd=self.ctl.directory, env=self.env,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    def verify(self, *words: str) -> tuple[int, dict[tuple[str, str], str], Any]:
        done = self.ctl("verify", "--json", *words, **self.env)
        assert done.returncode in (0, 1), done.stderr
        data = json.loads(done.stdout)
        return (
            done.returncode,
            {(a["service"], a["attack"]): a["outcome"] for a in data["attacks"]},
            data,
        )

    def results(self) -> str:
        """What the team has made together, as soon as it is there."""
        whole = self.ctl.directory / "results" / "all"
        assert eventually(whole.exists, 60), self.engine.run("ps", "-a").stdout
        return whole.read_text()

    def containers(self) -> set[str]:
        return set(self.engine.run("ps", "-aq", "--no-trunc").stdout.split())


@pytest.fixture
def team(engine: Engine, tmp_path: Path) -> Iterator[Team]:
    made = Team(engine, tmp_path)
    yield made
    left = made.engine.run("ps", "-aq").stdout.split()
    if left:
        made.engine.run("rm", "-f", "-v", *left)
    made.engine.run("network", "prune", "-f")


AGENTS = ("orchestrator", "worker1", "worker2", "worker3")
HERE_DONE = "".join(f"task for {name}: done here\n" for name in WORKERS)


def test_every_agent_escapes_from_the_team_as_it_is(team: Team) -> None:
    """The control, and the proof that verify leaves nothing behind."""
    team.compose("docker-compose.yml", "up", "-d")
    assert team.results() == HERE_DONE
    before = team.containers()
    code, outcomes, data = team.verify()
    assert code == 1
    for name in AGENTS:
        assert outcomes[name, "docker ps"] == "reached"
        assert outcomes[name, "raw request"] == "reached"
        assert outcomes[name, "escape"] == "escaped"
    tools = {a["tool"] for a in data["addresses"] if a["outcome"] == "escaped"}
    assert tools == {"docker", "perl", "outside"}
    assert team.containers() == before


def test_cannot_escape_without_the_socket(team: Team) -> None:
    file = team.secured("no-socket")
    team.compose(file, "up", "-d")
    assert team.results() == HERE_DONE
    code, outcomes, data = team.verify(file)
    assert code == 0, data
    assert {outcomes[name, "escape"] for name in AGENTS} == {"held"}
    assert {outcomes[name, "raw request"] for name in AGENTS} <= {"held", "not there"}
    assert not [a for a in data["addresses"] if a["outcome"] in ("reached", "escaped", "not tried")]


def test_cannot_escape_when_a_service_holds_the_socket(team: Team) -> None:
    """A stand-in answers in the place of `sandboxctl serve`; each agent has its own token."""
    file = team.secured("service", "--allow-image", "agent:latest")
    for name in AGENTS:
        team.ctl.write(f"secrets/{name}-sandbox.token", f"token-of-{name}\n")
    team.compose(file, "up", "-d")
    expected = "".join(f"done by the service for worker{n}-sandbox-token\n" for n in (1, 2, 3))
    assert team.results() == expected
    code, outcomes, data = team.verify(file)
    assert code == 0, data
    assert {outcomes[name, "escape"] for name in AGENTS} == {"held"}
    assert outcomes["sandbox-service", "escape"] == "accepted"
    assert team.verify(file, "--no-accept")[0] == 1
    wrong = team.engine.run(
        "exec", "team_worker1_1", "wget", "-q", "-O", "-", "--header",
        "Authorization: Bearer guess", "http://sandbox-service:8080/run/x", check=False,
    )  # fmt: skip
    assert "403" in wrong.stderr


# From inside the orchestrator, with whatever DOCKER_HOST says: what it can do with the engine. Not
# `grep -q`, which ends before docker has written all.
DEEDS = {
    "list": "docker ps --format '{{.Names}}'",
    "create": "docker create --name escaped -v /:/host agent:latest true",
    "exec": "docker exec team_worker1_1 true",
    "stop": "docker stop -t 0 team_worker1_1",
    "start": "docker start team_worker1_1",
    "archive": "docker cp team_worker1_1:/etc/passwd - | grep -c root",
    "logs": "docker logs team_worker1_1",
    "variables": "docker inspect team_worker1_1 | grep -c RESULTS=",
    "others": "docker ps --format '{{.Names}}' | grep -c stranger",
}


def _deeds(team: Team) -> set[str]:
    """What the orchestrator can do."""
    return {
        deed
        for deed, words in DEEDS.items()
        if team.engine.run(
            "exec", "team_orchestrator_1", "sh", "-c", f"set -o pipefail; {words}", check=False
        ).returncode == 0
    }  # fmt: skip


def test_cannot_do_more_than_look_with_read_access(team: Team) -> None:
    """The real filter in a container of its own, before the real engine."""
    team.engine.run(
        "run", "-d", "--name", "stranger", "--network", "none", "agent:latest", "sleep", "1000000"
    )
    file = team.secured("no-socket", "--read-access", "orchestrator")
    team.compose(file, "up", "-d")
    assert team.results() == HERE_DONE
    assert eventually(lambda: "list" in _deeds(team), 60), team.engine.run(
        "logs", "team_docker-readonly_1", check=False
    )
    assert _deeds(team) == {"list"}
    assert "escaped" not in team.engine.run("ps", "-a", "--format", "{{.Names}}").stdout
    audit = team.engine.run("logs", "team_docker-readonly_1").stdout
    rules = {json.loads(line)["rule"] for line in audit.splitlines()}
    assert {"allow.containers", "read-only", "read-only.content"} <= rules
    # Nobody else has the filter's socket, and verify says who looks.
    inside = team.engine.run("exec", "team_worker1_1", "ls", "/run/docker-readonly", check=False)
    assert inside.returncode
    code, outcomes, data = team.verify(file)
    assert code == 0, data
    assert outcomes["orchestrator", "docker ps"] == "accepted"
    assert outcomes["orchestrator", "escape"] == "held"
    assert outcomes["worker1", "raw request"] in ("held", "not there")


def test_a_read_only_mount_of_the_socket_is_no_read_access(team: Team) -> None:
    """The control: `:ro` in the place of the filter, and everything works."""
    team.engine.run(
        "run", "-d", "--name", "stranger", "--network", "none", "agent:latest", "sleep", "1000000"
    )
    text = team.ctl.directory.joinpath("docker-compose.yml").read_text()
    mount = f"source: {team.engine.socket}\n        target: /var/run/docker.sock\n        read_only: true\n"
    assert mount in text
    team.compose("docker-compose.yml", "up", "-d")
    assert team.results() == HERE_DONE
    assert _deeds(team) == set(DEEDS)


def test_the_filter_comes_back_after_it_was_killed(team: Team) -> None:
    """Its socket is still in the volume then, and the reader's mount is the same."""
    file = team.secured("no-socket", "--read-access", "orchestrator")
    team.compose(file, "up", "-d")
    assert eventually(lambda: "list" in _deeds(team), 60)
    team.engine.run("kill", "-s", "KILL", "team_docker-readonly_1")
    team.engine.run("start", "team_docker-readonly_1")
    assert eventually(lambda: "list" in _deeds(team), 60)
    # And it ends at once when it is told to.
    team.engine.run("stop", "-t", "60", "team_docker-readonly_1", timeout=50)
    state = team.engine.run("inspect", "-f", "{{.State.ExitCode}}", "team_docker-readonly_1")
    assert state.stdout == "0\n"


def test_an_agent_without_programs_is_attacked_from_outside(engine: Engine, tmp_path: Path) -> None:
    """Nothing in the image can ask a socket, and the verdict is the same."""
    made = Team(engine, tmp_path, "bare:latest")
    try:
        made.compose("docker-compose.yml", "up", "-d", "worker1")
        code, outcomes, data = made.verify()
        assert code == 1
        assert outcomes["worker1", "escape"] == "escaped"
        assert {a["tool"] for a in data["addresses"] if a["outcome"] == "escaped"} == {"outside"}
    finally:
        made.compose("docker-compose.yml", "down", "-t", "0")


def test_verify_says_what_it_could_not_try(engine: Engine, tmp_path: Path) -> None:
    """Addresses on the network cannot be asked from outside: not tried is not held."""
    made = Team(engine, tmp_path, "bare:latest")
    file = made.secured("no-socket")
    try:
        made.compose(file, "up", "-d", "worker1")
        code, outcomes, data = made.verify(file)
        assert outcomes["worker1", "raw request"] == "not tried"
        assert {a["target"][:4] for a in data["addresses"] if a["outcome"] == "not tried"} == {
            "tcp:"
        }
        assert code == 1
    finally:
        made.compose(file, "down", "-t", "0")


def test_verify_needs_a_running_project(engine: Engine, tmp_path: Path) -> None:
    made = Team(engine, tmp_path)
    done = made.ctl("verify", **made.env)
    assert done.returncode == 125
    assert "not running" in done.stderr
    assert os.listdir(tmp_path / "tasks") == []
