"""The team on a real engine: its agents escape before, and after each solution they do not."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.compose import solutions
from compose.lab import (
    AGENTS,
    GUESS,
    INSTANCE,
    JOB_DONE,
    SERVICE,
    SOCKET,
    SOMEONE,
    WORKERS,
    Served,
    Started,
    Team,
    as_someone,
    stocked,
)
from conftest import ROOT
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with stocked() as made:
        yield made


STRANGER = ("run", "-d", "--name", "stranger", "--label", "stranger", "--network", "none",
            "agent:latest", "sleep", "1000000")  # fmt: skip


@pytest.fixture
def team(engine: Engine, tmp_path: Path) -> Iterator[Team]:
    made = Team(engine, tmp_path)
    yield made
    made.remove("stranger")


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


# --- the sandbox service


@pytest.fixture(scope="module")
def served(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Secured, with tokens, and started."""
    team = Served(engine, tmp_path_factory.mktemp("served"), name="served")
    file = team.secured("service", "--allow-image", "job:1", "--max-execution-time", "8")
    as_someone(team.ctl.directory, solutions.make_tokens(AGENTS).partition(": ")[2])
    team.compose(file, "up", "-d")
    yield team
    team.remove(INSTANCE)


def job(*command: str, **fields: object) -> dict[str, object]:
    return {"image": "job:1", "cmd": command, **fields}


def test_the_team_works_with_the_service(served: Served) -> None:
    """Every job has run in a container of the allowed image, by the token of its worker."""
    assert served.results() == "".join(f"task for {name}: {JOB_DONE}\n" for name in WORKERS)
    ran = {
        (line["actor"]["agent"], line["action"])
        for line in served.audit()
        if line["decision"] == "allow" and line.get("actor")
    }
    assert {
        (f"worker{n}", action) for n in (1, 2, 3) for action in ("exec.start", "exec.end")
    } <= ran


def test_cannot_escape_when_a_service_holds_the_socket(served: Served) -> None:
    code, outcomes, data = served.verify("s.yml")
    assert code == 0, data
    assert {outcomes[name, "escape"] for name in AGENTS} == {"held"}
    assert outcomes["sandbox-service", "escape"] == "accepted"
    assert served.verify("s.yml", "--no-accept", "--service", "sandbox-service")[0] == 1


def test_nothing_but_the_service_holds_the_socket(served: Served) -> None:
    status, made = served.ask("worker2", "/v1/sandboxes", {"image": "job:1"})
    assert status == 200
    # Those of runs may be gone by now; what is there is told all the same.
    told = served.engine.run("inspect", *served.containers(), check=False)
    found = json.loads(told.stdout)
    assert [one["Name"] for one in found if made["id"] in one["Name"]]
    holders = {
        one["Name"]
        for one in found
        if "docker.sock" in json.dumps([one["Mounts"], one["HostConfig"]["Binds"]])
    }
    assert holders == {f"/{SERVICE}"}
    # Root by number, and nothing of root's is left.
    assert served.service("grep", "CapEff", "/proc/1/status").split()[1] == "0" * 16
    assert served.service("stat", "-c", "%u %a", "/data") == "0 700\n"
    assert served.engine.run("exec", SERVICE, "touch", "/x", check=False).returncode


def test_cannot_use_the_service_without_a_token_of_ones_own(served: Served) -> None:
    for token in ("", GUESS):
        assert served.ask("worker1", "/v1/run", job("true"), token)[0] == 401
    assert served.refusals() == {"auth.missing", "auth.token"}
    # It has no other's: each has its own file alone.
    inside = served.engine.run("exec", "served_worker1_1", "ls", "/run/secrets").stdout
    assert inside == "worker1-sandbox-token\n"
    # What is another's does not exist for it.
    _, made = served.ask("worker2", "/v1/sandboxes", {"image": "job:1"})
    path = f"/v1/sandboxes/{made['id']}"
    assert served.ask("worker1", path)[0] == 404
    assert served.ask("worker1", f"{path}/exec", {"cmd": ["true"]})[0] == 404
    # The control: with its own token, what is its own.
    assert served.ask("worker2", f"{path}/exec", {"cmd": ["true"]})[1]["exitCode"] == 0


def test_cannot_run_an_image_that_is_not_allowed(served: Served) -> None:
    for image in ("agent:latest", "job:2", solutions.IMAGE):
        assert served.ask("worker3", "/v1/run", {**job("true"), "image": image})[0] == 403
    assert "limits.allowed_images" in served.refusals("worker3")
    # The control.
    assert served.ask("worker3", "/v1/run", job("cat", "/done"))[1]["stdout"] == JOB_DONE


def test_cannot_run_longer_than_the_file_says(served: Served) -> None:
    status, answer = served.ask("worker1", "/v1/run", job("sleep", "1000"))
    assert (status, answer["timedOut"], answer["timeout"]) == (200, True, 8)
    assert served.ask("worker1", "/v1/run", job("true", timeout=9))[0] == 422
    assert "limits.max_execution_time" in served.refusals("worker1")
    assert not served.ask("worker1", "/v1/run", job("sleep", "0.1"))[1]["timedOut"]


def test_cannot_fill_the_disk_through_the_service(served: Served) -> None:
    """The service sees no directory of the engine's: it has to ask."""
    fill = "n=0; while :; do n=$((n+1)); head -c 4000000 /dev/zero >$n; done"
    disk = {"resources": {"disk": "20M"}}
    _, answer = served.ask("worker1", "/v1/run", job("sh", "-c", fill, **disk))
    assert answer["exceeded"] == "disk"
    few = "for n in 1 2 3; do head -c 4000000 /dev/zero >$n; done; sleep 1"
    _, answer = served.ask("worker1", "/v1/run", job("sh", "-c", few, **disk))
    assert (answer["exceeded"], answer["exitCode"]) == (None, 0)


def test_the_service_comes_back_with_what_it_had(served: Served) -> None:
    """Its data is in a volume, and its tokens in files."""
    _, made = served.ask("worker2", "/v1/sandboxes", {"image": "job:1"})
    path = f"/v1/sandboxes/{made['id']}"
    served.ask("worker2", f"{path}/exec", {"command": "echo kept >f"})
    lines = len(served.audit())
    served.engine.run("restart", "-t", "60", SERVICE)
    state = served.engine.run("inspect", "-f", "{{.State.Status}} {{.RestartCount}}", SERVICE)
    assert state.stdout == "running 0\n"
    assert eventually(lambda: _answers(served, path), 60)
    assert served.ask("worker2", f"{path}/exec", {"cmd": ["cat", "f"]})[1]["stdout"] == "kept\n"
    assert len(served.audit()) > lines


def _answers(served: Served, path: str) -> bool:
    try:
        return served.ask("worker2", path)[0] == 200
    except AssertionError:
        # Nobody listens yet.
        return False


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
    team.engine.run(*STRANGER)
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
    team.engine.run(*STRANGER)
    text = team.ctl.directory.joinpath("docker-compose.yml").read_text()
    mount = (f"source: {team.engine.socket}", f"target: {SOCKET}", "read_only: true\n")
    assert "\n        ".join(mount) in text
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


# --- the example

EXAMPLE = ROOT / "packaging" / "compose"


def _preparations() -> str:
    """What the file says to do before it is started."""
    text = (EXAMPLE / "compose.yml").read_text()
    lines = [line[6:] for line in text.splitlines() if line.startswith("#     ")]
    return "\n".join(line for line in lines if line.startswith(("mkdir", "for")))


@pytest.fixture
def example(engine: Engine, tmp_path: Path) -> Iterator[Started]:
    made = Started(engine, tmp_path, "agents", AGENT=f"{SOMEONE}:{SOMEONE}")
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    socket = f"{{services: {{sandbox-service: {{volumes: ['{engine.socket}:{SOCKET}']}}}}}}"
    made.ctl.write("socket.yml", socket)
    as_someone(tmp_path, _preparations())
    yield made
    made.remove(INSTANCE)


def test_the_example_works_and_is_safe(example: Started) -> None:
    checked = example.ctl("check", "compose.yml", "--fail-on", "low")
    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (0, "compose.yml: 2 accepted")
    files = ("compose.yml", "-f", "socket.yml")
    example.compose(*files, "up", "-d")
    for worker in ("worker-1", "worker-2"):
        out = example.ctl.directory / "results" / worker / "out.txt"
        assert eventually(out.exists, 120), example.compose(*files, "logs").stdout
        assert out.read_text() == "task 1: 42\n", out.with_name("err.txt").read_text()
    code, outcomes, data = example.verify("compose.yml")
    assert code == 0, data
    assert {outcomes[name, "escape"] for name in ("orchestrator", "worker-1", "worker-2")} == {
        "held"
    }
