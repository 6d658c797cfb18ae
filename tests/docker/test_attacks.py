"""Attacks on a real dockerd: each works without the filter, and does not with it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import IMAGE, Filtered
from .corpus import BY_NAME, VERIFIED, raw
from .fake import place
from .test_clients import Client
from .test_wire import statuses, talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.kernel]
SECRET = "a secret of the host"


@pytest.fixture
def project(base: Path) -> Path:
    """A directory that the sandbox may write, beside one that it does not see."""
    (base / "hidden").mkdir()
    (base / "hidden" / "file").write_text(SECRET)
    (base / "project" / "sub").mkdir(parents=True)
    (base / "project" / "sub" / "own").write_text("own")
    (base / "project" / ".env").write_text(SECRET)
    (base / "project" / "hooks").mkdir()
    return base / "project"


@pytest.fixture
def client(daemon: Engine, start: Callable[..., Filtered], base: Path, project: Path) -> Client:
    """A client whose sandbox sees the project, but for .env; hooks are read-only."""
    binds = [
        (str(project), True, False, False, True),
        (f"{project}/.env", False, False, True, False),
        (f"{project}/hooks", False, False, False, True),
    ]
    return Client(start(daemon.socket, binds=binds), base)


def admin(daemon: Engine, base: Path) -> Client:
    """The same client without the filter: the control."""
    made = Client.__new__(Client)
    made.env = {"DOCKER_HOST": daemon.url, "HOME": str(base), "PATH": os.environ["PATH"]}
    return made


# --- the corpus


@pytest.fixture(scope="module")
def standing(daemon: Engine) -> Iterator[Client]:
    """A client for all requests of the corpus."""
    base = place()
    filtered = Filtered(base, daemon.socket)
    yield Client(filtered, base)
    filtered.stop()
    shutil.rmtree(base, ignore_errors=True)


@pytest.mark.parametrize("name", VERIFIED)
def test_what_an_engine_accepts_is_refused_by_the_filter(
    name: str, daemon: Engine, standing: Client
) -> None:
    """The control sends the same bytes to the engine itself."""
    mine = standing.run("create", "--name", "target", IMAGE, "true").stdout.strip()
    entry = BY_NAME[name]
    if name == "vol.create":
        entry = {**entry, "json": {**entry["json"], "Name": "vol"}}
    sent = raw(entry, MINE=mine)
    (status,) = statuses(talk(standing.filtered.path, sent))
    assert status >= 400
    before = json.loads(daemon.run("inspect", mine).stdout)[0]
    assert before["Name"] == "/target"
    assert not before["HostConfig"]["Privileged"]
    # A half-closed connection looks to the engine like a client that has gone: it may give up.
    control = talk(daemon.socket, sent, end=b"Connection: close" not in sent)
    try:
        if name == "start.body":
            # Not every machine can start it; that it is kept is enough.
            assert json.loads(daemon.run("inspect", mine).stdout)[0]["HostConfig"]["Privileged"]
        else:
            assert statuses(control)[0] < 300, control
    finally:
        daemon.run("volume", "rm", "-f", "vol", check=False)
        daemon.run("rmi", "python:3.11", check=False)
        daemon.run("rm", "-f", *daemon.run("ps", "-aq").stdout.split())


# --- what comes of it


READ = ("cat", "/h/file")
ATTACKS: dict[str, tuple[str, ...]] = {
    "bind": ("-v", "{base}/hidden:/h", IMAGE, *READ),
    "mount": ("--mount", "type=bind,src={base}/hidden,dst=/h", IMAGE, *READ),
    "parent": ("-v", "{project}/../hidden:/h", IMAGE, *READ),
    "link": ("-v", "{project}/link:/h", IMAGE, *READ),
    "link-above": ("-v", "{project}/above/hidden:/h", IMAGE, *READ),
    "volume-driver": (
        "--mount",
        ("type=volume,dst=/h,volume-opt=type=none,volume-opt=o=bind,"
         "volume-opt=device={base}/hidden"),
        IMAGE, *READ,
    ),
    "hidden-in-the-project": ("-v", "{project}:/h", IMAGE, "cat", "/h/.env"),
    "hidden-itself": ("-v", "{project}/.env:/f", IMAGE, "cat", "/f"),
    "capability": ("--cap-add=SYS_ADMIN", "--security-opt=apparmor=unconfined",
                   "--security-opt=seccomp=unconfined", IMAGE, "sh", "-c",
                   "mount -t tmpfs x /tmp && echo {secret}"),
    "pid": ("--pid=host", IMAGE, "sh", "-c", "grep -q dockerd /proc/*/comm && echo {secret}"),
    "network": ("--network=host", IMAGE, "sh", "-c",
                "[ $(readlink /proc/self/ns/net) = '{net}' ] && echo {secret}"),
    "other-image": ("private/other:1", "echo", "{secret}"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_cannot_reach_the_host(
    attack: str, daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    """The secret is printed without the filter, and not with it."""
    (project / "link").symlink_to(base / "hidden")
    (project / "above").symlink_to(base)
    net = os.readlink("/proc/self/ns/net")
    given = {"base": base, "project": project, "secret": SECRET, "net": net}
    words = ["run", "--rm", *(word.format(**given) for word in ATTACKS[attack])]
    refused = client.run(*words, check=False)
    assert SECRET not in refused.stdout
    extra = () if "--network" in " ".join(words) else ("--network=none",)
    control = admin(daemon, base).run("run", *extra, *words[1:], check=False)
    assert SECRET in control.stdout, control.stderr


def test_cannot_swap_a_directory_for_a_link(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    """The engine looks the path up at every start: what it is given cannot be swapped."""
    words = ("-v", f"{project}/sub:/h", IMAGE, "sh", "-c", "cat /h/own /h/file")
    client.run("create", "--name", "swapped", *words)
    admin(daemon, base).run("create", "--network=none", "--name", "control", *words)
    (project / "sub").rename(project / "away")
    (project / "sub").symlink_to(base / "hidden")
    shown = client.run("start", "-a", "swapped", check=False).stdout
    assert "own" in shown
    assert SECRET not in shown
    control = daemon.run("start", "-a", "control", check=False).stdout
    daemon.run("rm", "-f", "control")
    assert SECRET in control


def test_cannot_write_what_is_read_only_in_the_sandbox(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    """Nor by renaming the directory above it."""
    script = "echo x > /w/hooks/evil; mv /w/hooks /w/x; mkdir -p /w/hooks; echo x > /w/hooks/evil"
    words = ("run", "--rm", "-v", f"{project}:/w", IMAGE, "sh", "-c", script)
    client.run(*words, check=False)
    assert list((project / "hooks").iterdir()) == []
    admin(daemon, base).run("run", "--network=none", *words[1:], check=False)
    assert (project / "hooks" / "evil").exists()


LEAVE = """
cp /bin/busybox /w/shell; chmod 4755 /w/shell; chmod u+s /w/shell; mknod /w/disk b 8 0; true
"""


def test_cannot_leave_a_setuid_program_or_a_device(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    """Root in a container is root on the project's files; the host would obey what it leaves."""
    words = ("run", "--rm", "-v", f"{project}:/w", IMAGE, "sh", "-c", LEAVE)

    def harmful() -> set[str]:
        found = {path.name: path.lstat().st_mode for path in project.iterdir()}
        return {n for n, m in found.items() if m & stat.S_ISUID or stat.S_ISBLK(m)}

    client.run(*words, check=False)
    assert (project / "shell").exists()
    assert harmful() == set()
    admin(daemon, base).run("run", "--network=none", *words[1:], check=False)
    assert harmful() == {"shell", "disk"}


def test_can_write_the_project(client: Client, project: Path) -> None:
    """A control of the tests above: the mount is there."""
    client.run("run", "--rm", "-v", f"{project}:/w", IMAGE, "sh", "-c", "echo made > /w/made")
    assert (project / "made").read_text() == "made\n"


def test_cannot_touch_what_others_have(daemon: Engine, client: Client, base: Path) -> None:
    """Containers, networks, volumes and images of strangers are not there."""
    outside = admin(daemon, base)
    outside.run(
        "run", "-d", "--network=none", "--name", "victim", "-v", "theirs:/v", IMAGE, "sleep", "1000"
    )
    outside.run("network", "create", "theirnet")
    try:
        number = outside.run("inspect", "-f", "{{.Id}}", "victim").stdout.strip()
        for name in ("victim", number, number[:12]):
            for words in (
                ("logs", name), ("exec", name, "true"), ("rm", name), ("kill", name),
                ("inspect", "--type", "container", name), ("cp", f"{name}:/etc/passwd", str(base)),
                ("run", "--volumes-from", name, IMAGE),
                ("run", "--pid", f"container:{name}", IMAGE),
                ("run", "--network", f"container:{name}", IMAGE), ("attach", name),
                ("commit", name, "stolen"), ("rename", name, "mine"), ("update", "-m", "64m", name),
            ):  # fmt: skip
                assert client.run(*words, check=False).returncode != 0, words
        for words in (
            ("run", "--network", "theirnet", IMAGE), ("network", "rm", "theirnet"),
            ("network", "inspect", "theirnet"), ("run", "-v", "theirs:/v", IMAGE),
            ("volume", "rm", "theirs"), ("volume", "inspect", "theirs"),
            ("rmi", "private/other:1"), ("save", IMAGE),
        ):  # fmt: skip
            assert client.run(*words, check=False).returncode != 0, words
        for listed in (
            ("ps", "-aq"),
            ("volume", "ls", "-q"),
            ("network", "ls", "-qf", "name=their"),
        ):
            assert client.run(*listed).stdout == ""
        assert "private" not in client.run("images").stdout
        client.run("system", "prune", "-af", "--volumes", check=False)
        assert (
            outside.run("inspect", "-f", "{{.State.Running}} {{.Name}}", "victim").stdout
            == "true /victim\n"
        )
        assert outside.run("exec", "victim", "ls", "/").returncode == 0
    finally:
        outside.run("rm", "-f", "-v", "victim")
        outside.run("network", "rm", "theirnet")
        outside.run("volume", "rm", "-f", "theirs", check=False)


def test_a_tag_that_others_use_stays_theirs(daemon: Engine, client: Client, base: Path) -> None:
    """docker build -t and docker tag write into the run's own space."""
    before = daemon.run("inspect", "-f", "{{.Id}}", IMAGE).stdout
    (base / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo evil > /evil\n")
    client.run("build", "-t", IMAGE, "-f", base / "Dockerfile", base / "project")
    assert client.run("run", "--rm", IMAGE, "cat", "/evil").stdout == "evil\n"
    assert daemon.run("inspect", "-f", "{{.Id}}", IMAGE).stdout == before
    outside = admin(daemon, base)
    outside.env["DOCKER_BUILDKIT"] = "0"
    outside.run(
        "build", "--network=none", "-t", "control:1", "-f", base / "Dockerfile", base / "project"
    )
    outside.run("tag", "control:1", "alpine:latest")
    changed = daemon.run("inspect", "-f", "{{.Id}}", "alpine:latest").stdout
    daemon.run("tag", IMAGE, "alpine:latest")
    daemon.run("rmi", "control:1")
    assert changed != before


@pytest.fixture
def service() -> Iterator[int]:
    """A service of the host on all its addresses; its port."""
    with socket.create_server(("", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    server.accept()[0].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("mode", ["on", "off", "allow", "public"])
def test_containers_have_no_more_network_than_the_sandbox(
    mode: str, daemon: Engine, start: Callable[..., Filtered], base: Path, service: int
) -> None:
    """Open, a service of the host can be reached; closed, it cannot, on no network of the run."""
    client = Client(start(daemon.socket, network=mode), base)
    client.run("network", "create", "mine")
    outer = socket.gethostbyname(socket.gethostname())
    script = (
        "set -- $(ip route); [ $1 = default ] && gateway=$3 || gateway=${1%.*}.1; "
        f"for at in $gateway {outer}; do nc -w 2 $at {service} </dev/null && echo reached; done"
    )
    for network in ("default", "mine"):
        words = ("run", "--rm", f"--network={network}", IMAGE, "sh", "-c", script)
        reached = "reached" in client.run(*words, check=False).stdout
        assert reached is (mode == "on"), network


def test_cannot_craft_packets_in_a_closed_network(
    daemon: Engine, start: Callable[..., Filtered], base: Path
) -> None:
    """Whoever can address the bridge by its number needs no gateway: no raw sockets there."""
    asked = ("create", "--cap-add=NET_RAW", IMAGE, "true")
    for mode in ("off", "on"):
        client = Client(start(daemon.socket, network=mode), base)
        words = asked if mode == "on" else ("create", IMAGE, "true")
        mine = client.run(*words).stdout.strip()
        host = json.loads(daemon.run("inspect", mine).stdout)[0]["HostConfig"]
        assert ("NET_RAW" in (host["CapDrop"] or [])) is (mode == "off")
        if mode == "off":
            assert client.run(*asked, check=False).returncode != 0


def test_limits_are_the_engine_s_business(client: Client, daemon: Engine) -> None:
    """Memory, processes and processors are set although nobody asked."""
    mine = client.run("create", IMAGE, "true").stdout.strip()
    host = json.loads(daemon.run("inspect", mine).stdout)[0]["HostConfig"]
    assert host["Memory"] == 2 << 30
    assert host["PidsLimit"] == 512
    assert host["NanoCpus"] == 2 * 10**9
    assert client.run("run", "-m", "900g", IMAGE, check=False).returncode != 0


def test_there_is_a_limit_to_containers(
    daemon: Engine, start: Callable[..., Filtered], base: Path
) -> None:
    """One more is refused."""
    client = Client(start(daemon.socket, containers=2), base)
    client.run("create", IMAGE, "true")
    client.run("create", IMAGE, "true")
    assert "limit.containers" in client.run("create", IMAGE, "true", check=False).stderr


def test_the_limit_to_containers_cannot_be_raced(
    daemon: Engine, start: Callable[..., Filtered], base: Path
) -> None:
    """Many at once see one count."""
    filtered = start(daemon.socket, containers=3)
    body = json.dumps({"Image": IMAGE, "Cmd": ["true"]}).encode()
    asked = (
        b"POST /v1.41/containers/create HTTP/1.1\r\nHost: d\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: talk(filtered.path, asked, end=False), range(24)))
    found = sorted(statuses(answer)[0] for answer in answers)
    assert found == [201] * 3 + [403] * 21
    assert len(Client(filtered, base).run("ps", "-aq").stdout.split()) == 3


def test_buildkit_is_refused_with_a_hint(client: Client, base: Path) -> None:
    """What to do instead is said."""
    answer = talk(
        client.filtered.path,
        b"POST /v1.41/session HTTP/1.1\r\nHost: d\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    )
    assert statuses(answer) == [403]
    assert b"DOCKER_BUILDKIT=0" in answer
