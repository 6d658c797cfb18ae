"""Real clients behind the filter, before a real dockerd."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernel.conftest import eventually

from .conftest import IMAGE
from .fake import OWNER, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import Engine

    from .conftest import Filtered

pytestmark = [pytest.mark.docker, pytest.mark.kernel]
GIB = 1 << 30
# Sockets of a filter that nobody uses: the listener, the supervisor's, two of the event loop.
IDLE = 4


class Client:
    """The docker command line behind a filter."""

    def __init__(self, filtered: Filtered, home: Path) -> None:
        self.filtered = filtered
        self.env = {
            "DOCKER_HOST": f"unix://{filtered.path}", "HOME": str(home), "PATH": os.environ["PATH"],
            "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0", "LANG": "C.UTF-8",
            "TESTCONTAINERS_RYUK_DISABLED": "true",
            # The machine of the tests may look like a container itself.
            "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
        }  # fmt: skip
        self.home = home

    def run(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program; docker if none is named."""
        check = options.pop("check", True)
        command = words if options.pop("plain", False) else ("docker", *words)
        given = {"capture_output": True, "text": True, "timeout": 120, "env": self.env, **options}
        done = subprocess.run([str(word) for word in command], check=False, **given)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start docker and do not wait."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(["docker", *words], env=self.env, **given)


@pytest.fixture
def filtered(daemon: Engine, start: Callable[..., Filtered], base: Path) -> Filtered:
    """A filter that shows a project."""
    project = base / "project"
    project.mkdir()
    return start(daemon.socket, binds=[(str(project), True, False, False, True)])


@pytest.fixture
def client(filtered: Filtered, base: Path) -> Client:
    """Its client."""
    return Client(filtered, base)


@pytest.fixture
def sleeper(client: Client) -> str:
    """A container that waits."""
    return client.run("run", "-d", "--name", "sleeper", IMAGE, "sleep", "1000").stdout.strip()


# --- the command line


def test_can_run(client: Client) -> None:
    """Output, exit code, and standard input with its end."""
    done = client.run(
        "run", "--rm", IMAGE, "sh", "-c", "echo out; echo err >&2; exit 3", check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    done = client.run("run", "--rm", "-i", IMAGE, "wc", "-c", input="x" * 100_000)
    assert done.stdout.split() == ["100000"]


def terminal(client: Client, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    """docker with a terminal of 33 lines and 77 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))

    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", "docker", *words], stdin=theirs, stdout=theirs,
        stderr=theirs, env=client.env,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def until(
    fd: int, pattern: str, seconds: float = 60, nudge: Callable[[], None] | None = None
) -> str:
    """Read until the output matches; what gets lost on the way is done again each second."""
    found = ""
    deadline = time.monotonic() + seconds
    while not re.search(pattern, found):
        rest = deadline - time.monotonic()
        assert rest > 0, found
        ready, _, _ = select.select([fd], [], [], min(rest, 1))
        if ready:
            found += os.read(fd, 4096).decode(errors="replace")
        elif nudge:
            nudge()
    return found


def resize(fd: int, lines: int, columns: int) -> None:
    """By way of another size: the kernel tells of a change alone."""
    for width in (columns - 1, columns):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", lines, width, 0, 0))


@pytest.mark.parametrize("how", ["run", "exec"])
def test_can_be_used_with_a_terminal_that_changes_its_size(client: Client, how: str) -> None:
    """docker run -it and exec -it: keys, size, resize, exit code."""
    words = ["run", "--rm", "-it", IMAGE, "sh"]
    if how == "exec":
        client.run("run", "-d", "--name", "box", IMAGE, "sleep", "1000")
        words = ["exec", "-it", "box", "sh"]
    process, fd = terminal(client, *words)
    until(fd, "# ")
    # The client tells the size after the start.
    os.write(fd, b"while [ \"$(stty size)\" != '33 77' ]; do :; done; echo fi'rst'\n")
    until(fd, "first")
    resize(fd, 40, 100)
    os.write(fd, b"while [ \"$(stty size)\" != '40 100' ]; do :; done; echo sec'ond'\n")
    # The client tells the first size and only then listens for changes: one may be lost.
    until(fd, "second", nudge=lambda: resize(fd, 40, 100))
    os.write(fd, b"tty; exit 5\n")
    until(fd, "/dev/pts/0")
    assert process.wait(30) == 5
    os.close(fd)


def test_can_exec_copy_and_inspect(client: Client, sleeper: str, base: Path) -> None:
    """exec with input, cp both ways, inspect, top, stats, diff, ps, wait."""
    assert client.run("exec", "-i", "sleeper", "cat", input="through").stdout == "through"
    (base / "file").write_text("content")
    client.run("cp", base / "file", "sleeper:/tmp/copied")
    client.run("cp", "sleeper:/tmp/copied", base / "back")
    assert (base / "back").read_text() == "content"
    assert json.loads(client.run("inspect", "sleeper").stdout)[0]["Id"] == sleeper
    assert "sleep 1000" in client.run("top", "sleeper").stdout
    assert "sleeper" in client.run("stats", "--no-stream").stdout
    assert "/tmp/copied" in client.run("diff", "sleeper").stdout
    assert client.run("ps", "-q", "--no-trunc").stdout.split() == [sleeper]
    waiting = client.start("wait", "sleeper")
    client.run("kill", "sleeper")
    assert waiting.communicate(timeout=30)[0] == "137\n"


def test_can_follow_logs(client: Client) -> None:
    """logs -f shows lines as they come, and ends with the container."""
    client.run("run", "-di", "--name", "talker", IMAGE, "sh", "-c", "echo one; read x; echo two")
    following = client.start("logs", "-f", "talker")
    assert following.stdout
    assert following.stdout.readline() == "one\n"
    client.run("attach", "--no-stdin=false", "talker", input="\n")
    assert following.communicate(timeout=30)[0] == "two\n"


def open_sockets(filtered: Filtered) -> int:
    """How many sockets the filter's process has."""
    place = f"/proc/{filtered.pid}/fd"
    count = 0
    for fd in os.listdir(place):
        # One may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"{place}/{fd}").startswith("socket:")
    return count


@pytest.mark.parametrize("words", [("logs", "-f"), ("attach",), ("wait",), ("stats",)])
def test_a_client_that_is_killed_leaves_no_connection(
    client: Client, sleeper: str, words: tuple[str, ...]
) -> None:
    """The engine is not kept busy for somebody who is gone."""
    # The client that made the container may be on its way out.
    assert eventually(lambda: open_sockets(client.filtered) == IDLE)
    process = client.start(*words, "sleeper", stdin=subprocess.PIPE)
    assert eventually(lambda: open_sockets(client.filtered) >= IDLE + 2)
    process.kill()
    process.communicate()
    assert eventually(lambda: open_sockets(client.filtered) == IDLE)


@pytest.mark.slow
def test_can_copy_a_gibibyte_in_little_memory(client: Client, sleeper: str, base: Path) -> None:
    """Up and down, at the speed of the slower side."""
    big = base / "big"
    with big.open("wb") as file:
        for number in range(1024):
            file.write(number.to_bytes(4, "big") * (1 << 18))
    client.run("cp", big, "sleeper:/big")
    size = client.run("exec", "sleeper", "stat", "-c", "%s", "/big").stdout
    assert size == f"{GIB}\n"
    client.run("cp", "sleeper:/big", base / "back")
    assert subprocess.run(["cmp", big, base / "back"], check=False).returncode == 0
    status = Path(f"/proc/{client.filtered.pid}/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
    assert peak < 80_000, f"{peak} kB"


def test_can_build_and_run_what_was_built(client: Client, base: Path) -> None:
    """The classic builder; the tag lives in the run's own space and looks as the user wrote it."""
    context = base / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(
        f"FROM {IMAGE}\nCOPY greeting /greeting\nRUN cat /greeting > /said\nCMD cat /said\n"
    )
    (context / "greeting").write_text("hello from the build\n")
    client.run("build", "-t", "mine:1", context)
    assert client.run("run", "--rm", "mine:1").stdout == "hello from the build\n"
    shown = client.run("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert "mine:1" in shown
    assert not [name for name in shown if name.startswith("agent-sandbox")]
    client.run("tag", "mine:1", "other:2")
    client.run("rmi", "other:2")


def test_can_see_events_of_its_own_only(client: Client, daemon: Engine) -> None:
    """And nothing of what others do."""
    events = client.start("events", "--format", "{{.Type}} {{.Action}} {{.Actor.ID}}")
    assert events.stdout
    try:
        daemon.run("run", "--rm", "--network", "none", "--name", "foreign", IMAGE, "true")
        mine = client.run("run", "-d", IMAGE, "true").stdout.strip()
        seen = ""
        while "die" not in seen:
            seen += events.stdout.readline()
    finally:
        events.kill()
        events.communicate()
    assert f"container start {mine}" in seen
    ids = {line.split()[2] for line in seen.splitlines() if line.startswith("container")}
    assert ids == {mine}


# --- other clients


COMPOSE = """
version: "3"
services:
  web:
    build: web
    command: httpd -f -p 8080 -h /www
    volumes: ["data:/data", "./shared:/shared"]
  user:
    image: {image}
    depends_on: [web]
    command: sh -c 'until wget -qO- http://web:8080/page; do sleep 0.1; done; echo done > /shared/f'
    volumes: ["./shared:/shared"]
volumes: {{data: {{}}}}
"""


def test_compose_works(client: Client, base: Path) -> None:
    """Build, up, names of services, logs, down; a directory of the project."""
    project = base / "project"
    (project / "web").mkdir()
    (project / "shared").mkdir()
    (project / "web" / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY page /www/page\n")
    (project / "web" / "page").write_text("served by compose\n")
    (project / "docker-compose.yml").write_text(COMPOSE.format(image=IMAGE))
    compose = ("docker-compose", "--no-ansi")
    client.run(*compose, "up", "--build", "-d", cwd=project, plain=True)
    client.run("wait", client.run("ps", "-aqf", "name=user").stdout.strip())
    done = client.run(*compose, "logs", "user", cwd=project, plain=True)
    assert "served by compose" in done.stdout
    assert (project / "shared" / "f").read_text() == "done\n"
    assert "web" in client.run(*compose, "ps", cwd=project, plain=True).stdout
    client.run(*compose, "down", "-v", "-t", "0", cwd=project, plain=True)
    assert client.run("ps", "-aq").stdout == ""


DOCKER_PY = """
import docker, io, sys, tarfile
client = docker.from_env()
image = sys.argv[1]
assert client.ping()
assert client.containers.run(image, ["echo", "hi"], remove=True) == b"hi\\n"
box = client.containers.run(image, "sleep 1000", detach=True, name="py")
assert box.exec_run("echo in").output == b"in\\n"
out = box.exec_run(["sh", "-c", "echo a; echo b"], stream=True).output
assert b"".join(out) == b"a\\nb\\n"
sock = box.exec_run("cat", stdin=True, socket=True).output
sock._sock.sendall(b"raw")
sock._sock.shutdown(1)
assert sock.read().endswith(b"raw")
made = io.BytesIO()
with tarfile.open(fileobj=made, mode="w") as tar:
    entry = tarfile.TarInfo("f")
    entry.size = 3
    tar.addfile(entry, io.BytesIO(b"abc"))
assert box.put_archive("/tmp", made.getvalue())
bits, stat = box.get_archive("/tmp/f")
assert stat["size"] == 3 and b"abc" in b"".join(bits)
assert box.stats(stream=False)["pids_stats"]
network = client.networks.create("pynet")
network.connect(box)
network.disconnect(box)
volume = client.volumes.create("pyvol")
assert [c.name for c in client.containers.list()] == ["py"]
assert "pynet" in [n.name for n in client.networks.list()]
assert [v.name for v in client.volumes.list()] == ["pyvol"]
box.stop(timeout=0)
assert box.wait()["StatusCode"] == 137
box.remove()
network.remove()
volume.remove()
try:
    client.containers.run(image, "true", privileged=True)
except docker.errors.APIError as error:
    assert "create.privileged" in str(error), error
else:
    raise SystemExit("privileged was accepted")
print("done")
"""

TESTCONTAINERS = """
import sys
from testcontainers.core.container import DockerContainer
from testcontainers.core.waiting_utils import wait_for_logs
with DockerContainer(sys.argv[1]).with_command(
    ["sh", "-c", "echo ready; httpd -f -p 8080"]
).with_exposed_ports(8080) as box:
    wait_for_logs(box, "ready", timeout=30)
    assert box.exec(["echo", "inside"]).output == b"inside\\n"
    print(box.get_container_host_ip(), box.get_exposed_port(8080))
"""


def test_docker_py_works(client: Client) -> None:
    """The whole way of a test-suite: run, exec, streams, sockets, archives, networks, errors."""
    done = client.run(sys.executable, "-I", "-c", DOCKER_PY, IMAGE, plain=True)
    assert done.stdout == "done\n"


def test_testcontainers_works(client: Client) -> None:
    """Without Ryuk: what it would remove is removed at the end of the run."""
    done = client.run(sys.executable, "-I", "-c", TESTCONTAINERS, IMAGE, plain=True)
    host, port = done.stdout.split()[-2:]
    assert host in ("localhost", "127.0.0.1")
    assert int(port) > 1023


def test_a_hundred_requests_at_once(client: Client, sleeper: str) -> None:
    """Execs, inspects and lists, all of them answered."""
    wrong: list[object] = []

    def ask(number: int) -> None:
        words = (
            ("exec", "sleeper", "echo", str(number)) if number % 5 == 0 else ("inspect", "sleeper")
        )
        done = client.run(*words, check=False)
        if done.returncode:
            wrong.append((number, done.stderr))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- the end of a run


def owned(daemon: Engine, owner: str) -> dict[str, list[str]]:
    """What the engine has of a run."""
    label = f"label={OWNER}={owner}"
    lists = {
        "containers": ("ps", "-aq"), "networks": ("network", "ls", "-q"),
        "volumes": ("volume", "ls", "-q"), "images": ("images", "-aq"),
    }  # fmt: skip
    return {k: daemon.run(*w, "--filter", label).stdout.split() for k, w in lists.items()}


def make_things(client: Client, base: Path) -> None:
    """One of each."""
    client.run("run", "-d", "-v", "vol:/v", IMAGE, "sleep", "1000")
    client.run("network", "create", "net")
    (base / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo x > /x\n")
    client.run(
        "build",
        "-t",
        "made",
        "-f",
        "-",
        ".",
        cwd=base / "project",
        input=(base / "Dockerfile").read_text(),
    )


def test_everything_is_removed_at_the_end(client: Client, daemon: Engine, base: Path) -> None:
    """Containers that run, networks, volumes and images; and nothing of others."""
    foreign = daemon.run("create", "--network", "none", IMAGE, "true").stdout.strip()
    make_things(client, base)
    there = owned(daemon, client.filtered.owner)
    assert all(there.values()), there
    report = client.filtered.stop()
    assert not any(owned(daemon, client.filtered.owner).values())
    assert report["left"] == []
    assert report["removed"]["containers"] == 1
    assert os.listdir(base / "records") == []
    assert daemon.run("rm", foreign).returncode == 0
    shown = daemon.run("images", "--format", "{{.Repository}}").stdout
    assert "agent-sandbox" not in shown
    assert "busybox" in shown


def test_what_a_dead_run_left_is_removed_at_the_next_start(
    client: Client, daemon: Engine, base: Path, start: Callable[..., Filtered]
) -> None:
    """The filter was killed, and its supervisor with it."""
    living = start(daemon.socket)
    Client(living, base).run("run", "-d", "--name", "alive", IMAGE, "sleep", "1000")
    make_things(client, base)
    client.filtered.kill()
    assert any(owned(daemon, client.filtered.owner).values())
    start(daemon.socket).stop()
    assert not any(owned(daemon, client.filtered.owner).values())
    assert owned(daemon, living.owner)["containers"]


def test_what_is_kept_stays(daemon: Engine, base: Path, start: Callable[..., Filtered]) -> None:
    """--docker-keep."""
    filtered = start(daemon.socket, keep=True)
    mine = Client(filtered, base).run("run", "-d", IMAGE, "true").stdout.strip()
    assert filtered.stop()["kept"] is True
    start(daemon.socket).stop()
    daemon.run("rm", "-f", mine)
    daemon.run("network", "rm", f"agent-sandbox-{filtered.owner}")


def test_a_supervisor_that_dies_ends_the_filter_which_cleans_up(
    client: Client, daemon: Engine
) -> None:
    """The end of its stream is all that it needs to see."""
    client.run("run", "-d", IMAGE, "sleep", "1000")
    handle = os.pidfd_open(client.filtered.pid)
    client.filtered.orphan()
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)
    assert not any(owned(daemon, client.filtered.owner).values())


def test_nobody_answers_when_the_filter_is_dead(client: Client) -> None:
    """Refused at once, not a wait for ever."""
    client.filtered.kill()
    with pytest.raises(ConnectionRefusedError):
        connect(client.filtered.path)
