"""`--docker=filtered` in real sandboxes, as root and as a user, before a real dockerd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.conftest import World, eventually

from .conftest import IMAGE
from .fake import OWNER

if TYPE_CHECKING:
    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.kernel]
FLAGS = ("--docker=filtered", "--docker-image", "busybox")


@pytest.fixture
def env(daemon: Engine, world: World) -> dict[str, str]:
    """Where the engine is; the user may use it, as a member of its group may."""
    daemon.socket.chmod(0o666)
    return {"DOCKER_HOST": daemon.url}


def left(daemon: Engine) -> list[str]:
    """Everything in the engine that belongs to some run."""
    lists = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"), ("images", "-q"))
    label = ("--filter", f"label={OWNER}")
    return [name for words in lists for name in daemon.run(*words, *label).stdout.split()]


def test_can_run_containers_and_leaves_none(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """The CLI inside needs no setting; a published port of the project is there; all is removed."""
    script = f"""
        docker run --rm -v "$PWD:/w" {IMAGE} sh -c 'cat /w/given > /w/made'
        docker run --rm -v "$PWD/sub:/s" {IMAGE} sh -c 'echo below > /s/made'
        docker run -d --name left {IMAGE} sleep 1000 >/dev/null
        docker ps --format '{{{{.Names}}}}'; echo ${{DOCKER_HOST-unset}} $DOCKER_BUILDKIT
    """
    world.write("given", "from the project")
    world.mkdir("sub")
    done = world.sh(script, *FLAGS, "--report", str(world.home / "report"), env=env)
    assert done.stdout.split() == ["left", "unset", "0"], done.stderr
    assert world.path("made").read_text() == "from the project"
    assert world.path("sub/made").read_text() == "below\n"
    assert done.stderr == ""
    assert left(daemon) == []
    report = json.loads((world.home / "report").read_text())["docker"]
    assert report["removed"] == {"containers": 1, "networks": 1, "volumes": 1}
    assert report["left"] == []
    assert os.listdir(world.state / "docker") == []
    log = world.state / "audit" / "docker.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    assert "allow.create" in log.read_text()


def test_can_be_used_by_every_client_that_is_installed(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """Clients differ on the wire: one of a distribution, and one that somebody put before it."""
    found = [f"{place}/docker" for place in ("/usr/local/bin", "/usr/bin")]
    clients = [path for path in found if os.access(path, os.X_OK)]
    script = "; ".join(f"{path} run --rm {IMAGE} echo {path}" for path in clients)
    done = world.sh(script, *FLAGS, env=env)
    assert done.stdout.split() == clients, done.stderr
    assert clients


def test_cannot_get_more_than_the_sandbox_has(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """Privileged, other paths, other images, excluded files and the engine's own socket."""
    world.write(".env", "secret")
    world.write("~/outside", "secret")
    script = f"""
        docker run --rm --privileged {IMAGE} true
        docker run --rm -v /:/h {IMAGE} cat /h{world.home}/outside
        docker run --rm -v {world.home}:/h {IMAGE} cat /h/outside
        docker run --rm private/other:1 echo secret
        docker run --rm -v "$PWD:/w" {IMAGE} cat /w/.env
        docker run --rm -v {daemon.socket}:/s {IMAGE} echo secret
        DOCKER_HOST={daemon.url} docker ps && echo secret
        exit 0
    """
    shown = ("--ro", str(daemon.base), "--exclude", ".env")
    done = world.sh(script, *FLAGS, *shown, env=env)
    assert "secret" not in done.stdout
    assert "create.privileged" in done.stderr
    assert "requests to the container engine refused" in done.stderr
    assert left(daemon) == []


def test_can_be_switched_off_and_on_by_file_and_flag(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """A table in the user's own file; the project's may not widen the list of images."""
    world.global_config('[docker]\naccess = "filtered"\nimages = ["busybox"]\n')
    script = f"docker run --rm {IMAGE} echo ran"
    assert world.sh(script, env=env).stdout == "ran\n"
    assert world.sh("test -e /run/docker.sock", "--docker=off", env=env).returncode == 1
    world.project_config('[docker]\nimages = ["*"]\n')
    refused = world.sh(script, env=env)
    assert refused.returncode == 125
    assert "docker.images" in refused.stderr


def test_a_killed_supervisor_leaves_nothing(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """The filter sees its end, and cleans up on its own."""
    script = f"docker run -d {IMAGE} sleep 1000 >/dev/null; echo up; sleep 1000"
    process = world.start(*FLAGS, "sh", "-c", script, env=env, stdout=-1)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    assert left(daemon)
    process.kill()
    process.wait()
    assert eventually(lambda: not left(daemon), 60)
    process.stdout.close()


def filters_of(supervisor: int) -> list[int]:
    """Processes of the filter that a supervisor has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes()
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if b"proxy/docker/main.py" in words and int(parent) == supervisor:
                found.append(int(place.name))
    return found


def test_a_killed_filter_is_said_and_cleaned_up_after(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """The command has no engine any more; the next run removes what is left."""
    script = f"docker run -d {IMAGE} sleep 1000 >/dev/null; echo up; read x; docker ps; echo $?"
    process = world.start(*FLAGS, "sh", "-c", script, env=env, stdin=-1, stdout=-1, stderr=-1)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    (one,) = filters_of(process.pid)
    os.kill(one, signal.SIGKILL)
    out, said = process.communicate("\n", timeout=60)
    assert out == "1\n"
    assert "the Docker filter ended before the command did" in said
    assert left(daemon)
    assert world.sh("true", *FLAGS, env=env).returncode == 0
    assert left(daemon) == []
    assert os.listdir(world.state / "docker") == []


def test_the_library_has_it_too(world: World, daemon: Engine, env: dict[str, str]) -> None:
    """docker="filtered", with what was asked in the result."""
    code = f"""
from agent_sandbox import Policy, Sandbox
box = Sandbox(Policy(project=".", docker="filtered", docker_images=["busybox"]))
result = box.run(["sh", "-c", "docker run --rm {IMAGE} echo ran; docker run --privileged {IMAGE}"],
                 capture=True)
print(result.stdout.split(), [one.rule for one in result.containers.rules if not one.allowed],
      result.containers.left)
"""
    done = world.python(code, env=env)
    assert done.stdout == "['ran'] ['create.privileged'] ()\n", done.stderr
    assert left(daemon) == []


def test_the_engine_s_network_follows_the_sandbox_s(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """Without a network the containers of the sandbox are in one that leads nowhere."""
    script = f"docker run -d {IMAGE} sleep 1000 >/dev/null; docker network ls -q | head -n1"
    script += "; docker network inspect -f '{{.Internal}}' $(docker network ls -q)"
    for flags, internal in ((("--network=off",), "true"), ((), "false")):
        done = world.sh(script, *FLAGS, *flags, env=env)
        assert done.stdout.split()[-1] == internal, done.stderr


def test_a_missing_engine_is_an_error(world: World) -> None:
    """As for --docker=on: nothing is started."""
    gone = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = world.sh("touch ran", "--docker=filtered", env=gone)
    assert done.returncode == 125
    assert "/nowhere/docker.sock" in done.stderr
    assert not world.path("ran").exists()


PLANT = """
for f in .git/hooks/pre-commit .git/config .envrc .vscode/tasks.json; do
    mkdir -p /w/${f%/*}; echo evil >> /w/$f
done
mv /w/.git /w/moved && mkdir -p /w/.git/hooks && echo evil > /w/.git/hooks/pre-commit
cat /w/.env
"""


def planted(world: World) -> list[str]:
    """Control files that a container has written or made."""
    names = (".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json", "moved")
    found = []
    for name in names:
        path = world.path(name)
        if path.is_dir() or (path.is_file() and "evil" in path.read_text()):
            found.append(name)
    return found


def test_a_container_is_held_to_what_the_sandbox_may_write(
    world: World, daemon: Engine, env: dict[str, str]
) -> None:
    """Root in a container cannot touch control files in the project, nor read what is excluded."""
    world.outside("git", "init", "-q")
    world.outside("git", "config", "user.name", "me")
    world.write(".env", "secret")
    script = f"docker run --rm -v \"$PWD:/w\" {IMAGE} sh -c '{PLANT}'"
    done = world.sh(script, *FLAGS, "--exclude", ".env", env=env)
    assert "secret" not in done.stdout
    assert planted(world) == [], done.stderr
    # Nothing had to be put back at the end.
    assert "agent-sandbox:" not in done.stderr
    control = daemon.run(
        "run", "--rm", "--network=none", "-v", f"{world.project}:/w", IMAGE, "sh", "-c", PLANT
    )
    assert control.stdout == "secret"
    assert len(planted(world)) == 4
