"""Projects of docker-compose on an engine of our own, and the images that they need."""

# ruff: noqa: E501 - scripts for the inside read better in one piece

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine as engines
from agent_sandbox.compose import solutions
from compose.conftest import TEAM, Ctl
from conftest import ROOT, must_work
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Engine

AGENTS = ("orchestrator", "worker1", "worker2", "worker3")
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
# With a sandbox service the job runs there, in a container of another image; else here.
WORK = """#!/bin/sh
while ! [ -e /tasks/$1 ]; do usleep 20000; done
if [ -n "$SANDBOX_API" ]; then
    job=$(printf '{"image": "job:1", "cmd": ["sh", "-c", "echo $0: $(cat /done)", "%s"]}' "$(cat /tasks/$1)")
    until said=$(wget -q -O - --header "Authorization: Bearer $(cat "$SANDBOX_TOKEN_FILE")" --header 'Content-Type: application/json' --post-data "$job" "$SANDBOX_API/v1/run")
    do usleep 20000; done
    answer=$(echo "$said" | sed 's/.*"stdout":"\\([^"]*\\)\\\\n".*/\\1/')
else
    answer="$(cat /tasks/$1): done here"
fi
echo "$answer" > /results/$1.new
mv /results/$1.new /results/$1
exec sleep 1000000
"""
SANDBOXCTL = """#!/bin/sh
exec PYTHON -I -S /opt/agent_sandbox/cli/entry.py ctl "$@"
"""
# In a container of job:1, and nowhere else.
JOB_DONE = "done in a container"


@contextlib.contextmanager
def stocked() -> Iterator[Engine]:
    """An engine with the team's images and our own."""
    for program in ("docker-compose", "perl", "openssl"):
        must_work(shutil.which(program), f"needs {program}")
    with engines.engine("--storage-driver=overlay2") as made:
        tools = [shutil.which("perl") or "", shutil.which("docker") or ""]
        group = {"etc/group": "root:x:0:\ndocker:x:999:\n"}
        made.image(
            "agent:latest", programs=tools, files={"plan.sh": PLAN, "work.sh": WORK, **group}
        )
        made.image("bare:latest", files={"plan.sh": PLAN, "work.sh": WORK, **group})
        made.image("job:1", files={"done": JOB_DONE})
        # What the example asks for.
        made.run("tag", "job:1", "alpine:3")
        _own_image(made, group)
        yield made


def _own_image(made: Engine, group: dict[str, str]) -> None:
    """As packaging/Dockerfile makes it, but with this machine's Python: nothing can be pulled."""
    python = "/usr/bin/python3"
    must_work(os.path.exists(python), f"needs {python}")
    query = "import sysconfig; print(sysconfig.get_path('stdlib'), sysconfig.get_config_var('DESTSHARED'))"
    said = subprocess.run([python, "-I", "-c", query], capture_output=True, text=True, check=True)
    library, modules = map(Path, said.stdout.split())
    left_out = {
        "test", "idlelib", "lib2to3", "tkinter", "ensurepip", "site-packages", "dist-packages",
        "pydoc_data", "turtledemo", "unittest", "distutils",
    }  # fmt: skip
    files = {
        str(path): path.read_text(encoding="utf-8")
        for path in library.rglob("*.py")
        if not left_out & set(path.relative_to(library).parts)
    }
    source = ROOT / "src" / "agent_sandbox"
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"/opt/agent_sandbox/{path.relative_to(source)}"] = path.read_text()
    real = os.path.realpath(python)
    files["bin/sandboxctl"] = SANDBOXCTL.replace("PYTHON", real)
    files["bin/python3"] = f'#!/bin/sh\nexec {real} -I -S "$@"\n'
    made.image(
        solutions.IMAGE, programs=[real, *map(str, modules.glob("*.so"))],
        files={**files, **group}, entrypoint="sandboxctl",
    )  # fmt: skip


# The user who starts a project. Nobody inside is that user, unless the file says so.
SOMEONE = 4321


def as_someone(directory: Path, script: str) -> None:
    """What an ordinary, careful user does in a directory of theirs."""
    os.chown(directory, SOMEONE, SOMEONE)
    subprocess.run(
        ["sh", "-euc", f"umask 077; {script}"], cwd=directory, user=SOMEONE, group=SOMEONE,
        extra_groups=[], check=True, timeout=60,
    )  # fmt: skip


class Started:
    """A project of docker-compose in a directory."""

    def __init__(self, engine: Engine, directory: Path, name: str, **env: str) -> None:
        self.engine = engine
        self.name = name
        self.ctl = Ctl(directory)
        self.env = {**engine.env, "COMPOSE_PROJECT_NAME": name, **env}

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

    def told(self) -> str:
        """What the containers have said."""
        names = self.engine.run("ps", "-a", "--format", "{{.Names}}").stdout.split()
        logs = [(name, self.engine.run("logs", "--tail=20", name, check=False)) for name in names]
        return "\n".join(f"{name}: {done.stdout}{done.stderr}" for name, done in logs)

    def containers(self) -> set[str]:
        return set(self.engine.run("ps", "-aq", "--no-trunc").stdout.split())

    def remove(self, *others: str) -> None:
        """Its containers, other ones by their labels, and networks that are left."""
        mine = f"com.docker.compose.project={self.name}"
        for label in (mine, *others):
            left = self.engine.run("ps", "-aq", "--filter", f"label={label}").stdout.split()
            if left:
                self.engine.run("rm", "-f", "-v", *left)
        self.engine.run("network", "prune", "-f")


class Team(Started):
    """A copy of the team's file, with this engine's socket in the place of the host's."""

    def __init__(
        self, engine: Engine, directory: Path, image: str = "agent:latest", name: str = "team"
    ) -> None:
        super().__init__(engine, directory, name)
        self.env["OPENAI_API_KEY"] = "x"
        text = (TEAM / "docker-compose.yml").read_text().replace("agent:latest", image)
        # It takes every capability, which root on a test machine need not have.
        text = text.replace("    privileged: true\n", "")
        self.write("docker-compose.yml", text)
        for shared in ("tasks", "results"):
            (directory / shared).mkdir()

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

    def results(self) -> str:
        """What the team has made together, as soon as it is there."""
        whole = self.ctl.directory / "results" / "all"
        assert eventually(whole.exists, 60), self.told()
        return whole.read_text()


SERVICE = "served_sandbox-service_1"
INSTANCE = "org.agent-sandbox.service.instance"
OWN = '--header "Authorization: Bearer $(cat "$SANDBOX_TOKEN_FILE")"'
POST = "--header 'Content-Type: application/json' --post-data \"$1\""
GUESS = f"--header 'Authorization: Bearer {'x' * 64}'"


class Served(Team):
    """The team with the real service; its agents are asked to ask, with what their image has."""

    def ask(self, worker: str, path: str, body: object = None, token: str = OWN) -> tuple[int, Any]:
        """The status, and the document if there is one."""
        data = "" if body is None else POST
        script = f'wget -q -O - {token} {data} "$SANDBOX_API{path}"'
        done = self.engine.run(
            "exec", f"served_{worker}_1", "sh", "-c", script, "sh", json.dumps(body), check=False
        )
        if done.returncode == 0:
            return 200, json.loads(done.stdout)
        refused = re.search(r"HTTP/1.1 (\d+)", done.stderr)
        assert refused, (done, self.engine.run("logs", SERVICE, check=False))
        return int(refused[1]), None

    def service(self, *words: str) -> str:
        """A command in the service's container."""
        return self.engine.run("exec", SERVICE, *words).stdout

    def audit(self) -> list[dict[str, Any]]:
        """The lines in the service's volume, whose chain holds."""
        self.service("sandboxctl", "audit", "verify", "--data=/data")
        tail = ("audit", "tail", "-n", "100000", "--json", "--data=/data")
        return [json.loads(line) for line in self.service("sandboxctl", *tail).splitlines()]

    def refusals(self, worker: str = "") -> set[str]:
        """The rules by which a worker was refused; or those whom nobody knows."""
        denied = [line for line in self.audit() if line["decision"] == "deny"]
        return {line["rule"] for line in denied if line.get("actor", {}).get("agent", "") == worker}
