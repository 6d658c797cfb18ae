"""The examples in integrations/: the development container's options are what a sandbox needs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT, As
from engine import Engine, engine

pytestmark = [pytest.mark.docker, pytest.mark.kernel]
CONFIG = ROOT / "integrations" / "devcontainer" / ".devcontainer" / "devcontainer.json"
# What an image of Debian has, from this machine.
SYSTEM = ("/usr:/usr", "/usr/lib:/lib", "/usr/lib64:/lib64", "/etc/alternatives:/etc/alternatives")
USER = 1000
# The two commands, as the example's Dockerfile puts them there.
COMMANDS = {"agent-sandbox": "run", "sandboxctl": "ctl"}
START = '#!/bin/sh\nexec /usr/bin/python3 -I -S /src/agent_sandbox/cli/entry.py {} "$@"\n'
READ_SECRET = "agent-sandbox sh -c 'cat ~/.ssh/id; echo work > made; touch /usr/x'; cat made"


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as made:
        commands = {f"opt/bin/{name}": START.format(tool) for name, tool in COMMANDS.items()}
        people = f"root:x:0:0::/root:/bin/sh\nvscode:x:{USER}:{USER}::/home/vscode:/bin/sh\n"
        files = {"etc/passwd": people, "home/vscode/.ssh/id": "SECRET", **commands}
        made.image("dev:test", files=files)
        yield made


def run(
    docker: Engine, source: Path, options: list[str], script: str
) -> subprocess.CompletedProcess[str]:
    """A command as the remote user in a container, in its workspace."""
    mounts = [word for one in SYSTEM for word in ("-v", f"{one}:ro")]
    mounts += ["-v", f"{source}:/src:ro"]
    for path in ("/home/vscode/.local", "/workspaces/project"):
        mounts += ["--tmpfs", f"{path}:uid={USER},gid={USER},mode=700"]
    env = ["-e", "HOME=/home/vscode", "-e", "PATH=/opt/bin:/usr/local/bin:/usr/bin:/bin"]
    return docker.run(
        "run", "--rm", "--network=none", f"--user={USER}:{USER}", *options, *mounts, *env,
        "-w", "/workspaces/project", "dev:test", "/usr/bin/sh", "-c", script, check=False,
    )  # fmt: skip


def test_a_sandbox_starts_in_the_development_container(docker: Engine, superuser: As) -> None:
    """With its runArgs; without one that widens none does, so each is needed."""
    told = json.loads(CONFIG.read_text())
    options: list[str] = told["runArgs"]
    done = run(docker, superuser.source, options, READ_SECRET)
    assert done.stdout == "work\n", done.stderr
    assert "Read-only file system" in done.stderr
    assert "SECRET" not in done.stdout
    for name in ("seccomp", "systempaths"):
        fewer = [option for option in options if name not in option]
        assert len(fewer) == len(options) - 1
        done = run(docker, superuser.source, fewer, "agent-sandbox true")
        assert done.returncode == 125, name


def test_the_command_after_creation_works(docker: Engine, superuser: As) -> None:
    """It tells a container that can have sandboxes from one that cannot, and makes the shim."""
    told = json.loads(CONFIG.read_text())
    script = f"{told['postCreateCommand']} >&2 && ls ~/.local/share/agent-sandbox/shims"
    # The home itself belongs to the image here.
    script = script.replace(" --rc", "")
    done = run(docker, superuser.source, told["runArgs"], script)
    assert done.stdout.splitlines()[-1] == "claude", done.stderr
    assert run(docker, superuser.source, [], script).returncode != 0
