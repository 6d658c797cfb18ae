"""Container engines: unreachable unless named, and then at the standard place.

Fake engines are Unix sockets with a listener that answers one line. The real one is dockerd.
"""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, must_work
from kernel.conftest import World, end_group, eventually, toml

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kernel, pytest.mark.docker]

CONNECT = (
    "import socket, sys\n"
    "for path in sys.argv[1:]:\n"
    "    s = socket.socket(socket.AF_UNIX)\n"
    "    s.settimeout(5)\n"
    "    try: s.connect(path); print('reached', s.recv(16).decode())\n"
    "    except OSError as e: print('refused')\n"
)


class Engine:
    """Answers every connection to a Unix socket with one word."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path
        self.calls = 0
        self._listener = socket.socket(socket.AF_UNIX)
        # The path may be longer than sun_path: bind relative to its directory.
        here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)
        path.chmod(0o666)
        world.runner.own(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.calls += 1
            with connection:
                connection.sendall(b"engine")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def short(runner: object) -> Iterator[Path]:
    """A directory with a short name, since a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/srv" if IS_ROOT else Path.home()) as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def engines(world: World) -> Iterator[list[Engine]]:
    """Engines to close at the end."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def serve(world: World, engines: list[Engine], path: Path) -> Engine:
    engine = Engine(world, path)
    engines.append(engine)
    return engine


def connect(world: World, paths: list[Path | str], *flags: str, **options: object) -> list[str]:
    done = world.sandbox(*flags, "/usr/bin/python3", "-c", CONNECT, *map(str, paths), **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_socket_in_the_project_is_reachable_when_it_is_no_engine(
    world: World, engines: list[Engine], short: Path
) -> None:
    """The control: connect() works through a bind mount, whatever its flags."""
    world.runner.own(short)
    engine = serve(world, engines, short / "s")
    named = ("--ro", str(short), "--ro", str(engine.path))
    assert connect(world, [engine.path], *named) == ["reached engine"]
    assert connect(world, [engine.path], "--network=off", *named) == ["reached engine"]


@pytest.mark.parametrize("level", ["--ro", "--rw"])
@pytest.mark.parametrize("form", ["unix://{}", "unix:{}"])
def test_cannot_reach_the_socket_of_docker_host(
    world: World, engines: list[Engine], short: Path, level: str, form: str
) -> None:
    """What DOCKER_HOST names is masked even where its directory, or it itself, is shown."""
    world.runner.own(short)
    engine = serve(world, engines, short / "d.sock")
    env = {"DOCKER_HOST": form.format(engine.path)}
    before = engine.path.stat()
    assert connect(world, [engine.path], level, str(short), env=env) == ["refused"]
    assert connect(world, [engine.path], level, str(engine.path), env=env) == ["refused"]
    assert engine.calls == 0
    after = engine.path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_naming_a_masked_socket_is_said_aloud(
    world: World, engines: list[Engine], short: Path
) -> None:
    """--rw on the socket itself does nothing, and the notice says why."""
    engine = serve(world, engines, short / "d.sock")
    done = world.sh("true", "--rw", str(engine.path), env={"DOCKER_HOST": f"unix://{engine.path}"})
    assert "stays hidden" in done.stderr
    assert "--docker" in done.stderr


@pytest.mark.parametrize("variable", ["DOCKER_HOST", "CONTAINER_HOST"])
def test_cannot_reach_an_engine_inside_the_project(
    world: World, engines: list[Engine], variable: str
) -> None:
    """A socket in the writable project is masked for the run, and untouched on the host."""
    engine = serve(world, engines, world.project / "d.sock")
    env = {variable: f"unix://{engine.path}"}
    script = "import os, sys; os.chdir(os.path.dirname(sys.argv[1])); sys.argv[1:] = ['d.sock', 'e.sock']\n"
    moved = "try: os.rename('d.sock', 'e.sock')\nexcept OSError: print('pinned')\n"
    done = world.sandbox(
        "/usr/bin/python3", "-c", script + moved + CONNECT, str(engine.path), env=env
    )
    assert done.stdout.splitlines() == ["pinned", "refused", "refused"], done.stderr
    assert os.listdir(world.project) == ["d.sock"]
    named = ("--rw", str(engine.path))
    control = world.sandbox(*named, "/usr/bin/python3", "-c", script + CONNECT, str(engine.path))
    assert control.stdout.splitlines()[0] == "reached engine", control.stderr


def test_cannot_reach_an_engine_through_a_link(
    world: World, engines: list[Engine], short: Path
) -> None:
    """DOCKER_HOST names a link: the link's target is masked as well."""
    world.runner.own(short)
    real = world.runner.directory(short / "real")
    engine = serve(world, engines, real / "d.sock")
    world.link(short / "l.sock", "real/d.sock")
    world.link(short / "l2.sock", short / "l.sock")
    env = {"DOCKER_HOST": f"unix://{short}/l2.sock"}
    paths = [engine.path, short / "l.sock", short / "l2.sock"]
    assert connect(world, paths, "--rw", str(short), env=env) == ["refused"] * 3


def context(world: World, name: str, path: Path) -> None:
    key = sha256(name.encode()).hexdigest()
    meta = {"Name": name, "Endpoints": {"docker": {"Host": f"unix://{path}"}}}
    world.write(f"~/.docker/contexts/meta/{key}/meta.json", json.dumps(meta))


def test_cannot_reach_the_engine_of_a_docker_context(
    world: World, engines: list[Engine], short: Path
) -> None:
    """Every context's socket is masked, the current one and the others."""
    engine = serve(world, engines, short / "ctx.sock")
    context(world, "mine", engine.path)
    assert connect(world, [engine.path], "--rw", str(short)) == ["refused"]
    world.write("~/.docker/config.json", json.dumps({"currentContext": "mine"}))
    assert connect(world, [engine.path], "--rw", str(short)) == ["refused"]


@pytest.mark.parametrize("place", [".docker/run/docker.sock", ".docker/desktop/docker.sock"])
def test_cannot_reach_a_desktop_engine_with_the_host_home(
    world: World, engines: list[Engine], place: str
) -> None:
    """Sockets below the real home stay out of reach when that home is shown."""
    path = world.home / place
    world.runner.directory(path.parent)
    serve(world, engines, path)
    script = (
        f'cd {path.parent} 2>/dev/null && exec /usr/bin/python3 -c "$0" docker.sock || echo refused'
    )
    for flags in (["--home=host"], ["--ro", f"~/{Path(place).parent}"], ["--rw", "~/.docker"]):
        done = world.sandbox(*flags, "sh", "-c", script, CONNECT)
        assert done.stdout.splitlines() == ["refused"], (flags, done.stderr)
    control = world.outside("sh", "-c", script, CONNECT)
    assert control.stdout == "reached engine\n"


def test_cannot_reach_system_sockets_under_the_host_preset(world: World) -> None:
    """/run is fresh even with @host: no engine, no bus, no other service."""
    world.global_config(toml({"filesystem": {"presets": ["@host"]}}))
    done = world.sh("find /run /var/run/ -type s 2>/dev/null | head; ls -A /run")
    assert set(done.stdout.split()) <= {"agent-sandbox", "user", "systemd"}, done.stdout


@pytest.mark.parametrize(
    "address",
    ["unix://{project}/absent.sock", "unix://{project}/no/dir/d.sock", "unix:///nowhere/d.sock",
     "unix://{home}/.no/d.sock", "tcp://127.0.0.1:1", "unix://relative.sock", "npipe://x", ""],
)  # fmt: skip
def test_a_missing_engine_neither_stops_the_start_nor_leaves_a_file(
    world: World, address: str
) -> None:
    """Off means off, also when there is nothing to switch off."""
    value = address.format(project=world.project, home=world.home)
    done = world.sh("echo ran; echo ${DOCKER_HOST-unset}", env={"DOCKER_HOST": value})
    assert done.stdout.split() == ["ran", "unset"], done.stderr
    assert os.listdir(world.project) == []
    assert not world.path("~/.no").exists()


@pytest.mark.parametrize("kind", ["plain", "link", "context"])
def test_can_reach_the_engine_when_asked(
    world: World, engines: list[Engine], short: Path, kind: str
) -> None:
    """--docker binds the resolved socket at the standard path, and warns that this equals root."""
    engine = serve(world, engines, short / "d.sock")
    env = {"DOCKER_HOST": f"unix://{engine.path}"}
    if kind == "link":
        world.link(short / "l.sock", "d.sock")
        env = {"DOCKER_HOST": f"unix://{short}/l.sock"}
    elif kind == "context":
        context(world, "mine", engine.path)
        env = {"DOCKER_CONTEXT": "mine"}
    flags = ("--docker", "--ro", str(short))
    done = world.sandbox(
        *flags,
        "/usr/bin/python3",
        "-c",
        CONNECT,
        "/var/run/docker.sock",
        "/run/docker.sock",
        env=env,
    )
    assert done.stdout.splitlines() == ["reached engine"] * 2, done.stderr
    assert "equals root" in done.stderr
    assert world.sh("echo ${DOCKER_HOST-unset}", "--docker", env=env).stdout == "unset\n"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("unix:///nowhere/d.sock", "/nowhere/d.sock"),
        ("tcp://h:1", "not a unix socket"),
        ("unix://r", "not a unix"),
    ],
)
def test_asking_for_a_missing_engine_is_an_error(world: World, address: str, words: str) -> None:
    """--docker without a socket ends with 125 and says where it looked."""
    done = world.sh("touch ran", "--docker", env={"DOCKER_HOST": address})
    assert done.returncode == 125
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert not world.path("ran").exists()


def test_a_plain_file_is_no_engine(world: World) -> None:
    """--docker refuses what is not a socket: it would be a way to have any file bound writable."""
    target = world.write("~/private", "s")
    done = world.sh("cat /var/run/docker.sock", "--docker", env={"DOCKER_HOST": f"unix://{target}"})
    assert done.returncode == 125


def test_docker_can_be_switched_by_file_and_flag(
    world: World, engines: list[Engine], short: Path
) -> None:
    """The user's own file may expose it, a flag takes it back."""
    engine = serve(world, engines, short / "d.sock")
    env = {"DOCKER_HOST": f"unix://{engine.path}"}
    world.global_config("docker = true\n")
    assert connect(world, ["/var/run/docker.sock"], env=env) == ["reached engine"]
    assert connect(world, ["/var/run/docker.sock"], "--docker=off", env=env) == ["refused"]


# --- the real thing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Path]:
    """A dockerd of our own, away from any other."""
    must_work(IS_ROOT, "dockerd needs root")
    must_work(shutil.which("dockerd") and shutil.which("docker"), "needs dockerd and docker")
    base = Path(tempfile.mkdtemp(prefix="agsbx-dockerd-", dir="/srv"))
    base.chmod(0o755)
    address = base / "docker.sock"
    command = [
        "dockerd", "--data-root", base / "data", "--exec-root", base / "exec", "--pidfile",
        base / "pid", "-H", f"unix://{address}", "--iptables=false", "--ip6tables=false",
        "--bridge=none", "--storage-driver=vfs",
    ]  # fmt: skip
    with (base / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    ready = ["docker", "-H", f"unix://{address}", "version"]
    try:
        up = eventually(
            lambda: (
                daemon.poll() is not None
                or subprocess.run(ready, capture_output=True, check=False).returncode == 0
            ),
            60,
        )
        must_work(
            up and daemon.poll() is None,
            f"dockerd does not start: {(base / 'log').read_text()[-2000:]}",
        )
        address.chmod(0o666)
        yield address
    finally:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            pass
        end_group(daemon)
        subprocess.run(["umount", "-R", "-q", str(base)], capture_output=True, check=False)
        shutil.rmtree(base, ignore_errors=True)


def test_can_use_the_real_engine_only_when_asked(world: World, dockerd: Path) -> None:
    """`docker version` and `docker ps` work with --docker and fail without, with the real CLI."""
    env = {"DOCKER_HOST": f"unix://{dockerd}"}
    shown = ("--ro", str(dockerd.parent))
    script = (
        "docker version --format '{{.Server.Version}}' && docker ps -q && docker info >/dev/null"
    )
    outside = world.outside("sh", "-c", script, env=env)
    assert outside.returncode == 0, outside.stderr
    inside = world.sh(script, "--docker", env=env)
    assert (inside.returncode, inside.stdout) == (0, outside.stdout), inside.stderr
    for address in ("", f"DOCKER_HOST=unix://{dockerd} "):
        closed = world.sh(f"{address}docker ps", *shown, env=env)
        assert closed.returncode != 0
        assert closed.stdout == ""
    closed = world.sh("docker ps", "--rw", str(dockerd), env=env)
    assert closed.returncode != 0
