"""The network: shared or absent, abstract sockets closed, names resolved whatever resolv.conf is."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, must_work
from kernel.conftest import World, toml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.kernel, pytest.mark.network]

TCP = (
    "import socket, sys\n"
    "try: print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).recv(9).decode())\n"
    "except OSError: print('refused')\n"
)
ABSTRACT = (
    "import socket, sys\n"
    "s = socket.socket(socket.AF_UNIX, getattr(socket, sys.argv[2]))\n"
    "try: s.connect('\\0' + sys.argv[1]); print('reached')\n"
    "except OSError: print('refused')\n"
)
PYTHON = "/usr/bin/python3"


@contextmanager
def listener(family: int, address: object) -> Iterator[socket.socket]:
    """A host service that greets every caller."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_can_reach_a_host_port_only_with_the_network_on(world: World) -> None:
    """On is the default and shares loopback; off by flag or file reaches nothing."""
    with listener(socket.AF_INET, ("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        call = (PYTHON, "-c", TCP, port)
        assert world.sandbox(*call).stdout == "hello\n"
        assert world.sandbox("--network", *call).stdout == "hello\n"
        for word in ("off", "false", "0"):
            assert world.sandbox(f"--network={word}", *call).stdout == "refused\n"
        world.global_config(toml({"network": False}))
        assert world.sandbox(*call).stdout == "refused\n"
        assert world.sandbox("--network=on", *call).stdout == "hello\n"


def test_without_network_there_is_a_loopback_of_its_own(world: World) -> None:
    """Off leaves `lo` alone: a server and its client inside still find each other."""
    code = (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname())\n"
        "print(sorted(n for _, n in socket.if_nameindex()))\n"
    )
    done = world.sandbox("--network=off", PYTHON, "-c", code)
    assert done.stdout == "['lo']\n", done.stderr


def test_off_takes_a_network_word_as_command(world: World) -> None:
    """`--network false` runs a command called false; booleans take `=`."""
    assert world.sandbox("--network", "false").returncode == 1


@pytest.mark.parametrize("value", ["maybe", "all", ""])
def test_unknown_network_values_are_errors(world: World, value: str) -> None:
    """What is not there yet is refused, not ignored."""
    done = world.sh("touch ran", f"--network={value}")
    assert done.returncode == 125
    assert "network" in done.stderr
    assert not world.path("ran").exists()


def test_dry_run_shares_the_network_exactly_when_on(world: World) -> None:
    """--unshare-all always, --share-net exactly when the network is on; nothing starts."""
    for flag, shared in (("--network=on", True), ("--network=off", False)):
        done = world.sandbox(flag, "--dry-run", "touch", "a b", "it's")
        words = shlex.split(done.stdout)
        assert "--unshare-all" in words
        assert ("--share-net" in words) is shared
        assert words[-4:] == ["--", "touch", "a b", "it's"]
    assert os.listdir(world.project) == []
    assert not world.state.exists()


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_cannot_reach_abstract_sockets_of_the_host(world: World, kind: str) -> None:
    """Landlock closes them while the network is shared; plain bwrap, the control, reaches them."""
    name = f"agsbx-test-{secrets.token_hex(6)}"
    server = socket.socket(socket.AF_UNIX, getattr(socket, kind))
    with server:
        server.bind(f"\0{name}")
        if kind == "SOCK_STREAM":
            server.listen()
        call = [PYTHON, "-c", ABSTRACT, name, kind]
        bare = ["bwrap", "--unshare-all", "--share-net", "--ro-bind", "/", "/", *call]
        assert world.outside(*bare).stdout == "reached\n"
        if "scopes on" not in world.sandbox("--debug", "true").stderr:
            must_work(False, "needs Landlock with scopes (Linux 6.12)")
        assert world.sandbox(*call).stdout == "refused\n"
        assert world.sandbox("--network=off", *call).stdout == "refused\n"


def test_can_use_abstract_sockets_inside(world: World) -> None:
    """The scope closes the outside, not the sandbox's own sockets."""
    code = (
        "import socket\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0agsbx-inner-' + __import__('os').urandom(4).hex())\n"
        "s.listen(); c = socket.socket(socket.AF_UNIX); c.connect(s.getsockname()); print('ok')\n"
    )
    assert world.sandbox(PYTHON, "-c", code).stdout == "ok\n"


def test_names_are_resolved(world: World) -> None:
    """hosts, nsswitch and resolv.conf are readable with the network on."""
    done = world.sh(
        "getent hosts localhost; cat /etc/nsswitch.conf /etc/hosts >/dev/null; cat /etc/resolv.conf"
    )
    assert "localhost" in done.stdout
    if os.path.exists("/etc/resolv.conf"):
        assert done.returncode == 0, done.stderr


RESOLVERS = {
    "plain file": {"etc": "nameserver 192.0.2.1\n"},
    "stub": {"link": "/run/systemd/resolve/stub-resolv.conf", "run/systemd/resolve/stub-resolv.conf": None},
    "relative": {"link": "../run/systemd/resolve/stub-resolv.conf", "run/systemd/resolve/stub-resolv.conf": None},
    "var run": {"link": "/var/run/systemd/resolve/resolv.conf", "run/systemd/resolve/resolv.conf": None},
    "directly in run": {"link": "/run/resolv.conf", "run/resolv.conf": None},
    "chain": {"link": "/run/one", "run/one": "-> resolvconf/two", "run/resolvconf/two": "-> /run/three", "run/three": None},
    "chain in etc": {"link": "resolv.real", "etc/resolv.real": "-> /run/nm/resolv.conf", "run/nm/resolv.conf": None},
    "elsewhere": {"link": "/mnt/wsl/resolv.conf", "mnt/wsl/resolv.conf": None},
    "dangling": {"link": "/run/nothing"},
}  # fmt: skip
NAMESERVER = "nameserver 192.0.2.1\n"


@pytest.fixture
def host_with(world: World) -> object:
    """Runs a command on a host whose /etc/resolv.conf is as told, in a mount namespace of its own."""
    must_work(IS_ROOT, "needs root for another /etc in a private mount namespace")
    must_work(shutil.which("unshare") and shutil.which("setpriv"), "needs unshare and setpriv")
    fake = world.base / "fake"

    def run(files: dict[str, str | None], argv: list[str]) -> subprocess.CompletedProcess[str]:
        for part in ("etc", "run", "mnt"):
            (fake / part).mkdir(parents=True)
        for name in ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache"):
            shutil.copy(f"/etc/{name}", fake / "etc")
        resolv = fake / "etc" / "resolv.conf"
        for name, text in files.items():
            if name == "etc":
                resolv.write_text(str(text))
            elif name == "link":
                resolv.symlink_to(str(text))
            else:
                path: Path = fake / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if text is None:
                    path.write_text(NAMESERVER)
                else:
                    path.symlink_to(text.removeprefix("-> "))
        script = (
            f"mount --bind {fake}/etc /etc && mount --bind {fake}/run /run && "
            f'mount --bind {fake}/mnt /mnt && cd {world.project} && exec "$@"'
        )
        as_user = [
            "setpriv", f"--reuid={world.runner.uid}", f"--regid={world.runner.gid}", "--clear-groups",
        ]  # fmt: skip
        env = world.runner.environ(world.env())
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "-", *as_user, *argv],
            capture_output=True, text=True, check=False, env=env, timeout=60,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("shape", RESOLVERS)
def test_can_read_resolv_conf_whatever_it_links_to(
    world: World, host_with: object, shape: str
) -> None:
    """The file behind the link is there inside with the network on; a dangling one stops nothing."""
    script = "cat /etc/resolv.conf; ls /run /mnt 2>/dev/null | grep -c 'other' "
    done = host_with(RESOLVERS[shape], world.argv("sh", "-c", script))  # type: ignore[operator]
    lines = done.stdout.splitlines()
    assert "agent-sandbox" not in done.stderr, done.stderr
    assert lines[-1] == "0"
    if shape != "dangling":
        assert lines[0] == NAMESERVER.strip(), done.stderr


@pytest.mark.parametrize("shape", RESOLVERS)
def test_with_a_proxy_resolv_conf_is_ours_whatever_it_links_to(
    world: World, host_with: object, shape: str
) -> None:
    """The stub's address, and nothing else of /run; a dangling link leaves the default, the same."""
    script = "cat /etc/resolv.conf; getent hosts some.example | grep -c some.example"
    argv = world.argv("--network=public", "sh", "-c", script)
    done = host_with(RESOLVERS[shape], argv)  # type: ignore[operator]
    lines = done.stdout.splitlines()
    assert "agent-sandbox" not in done.stderr, done.stderr
    assert lines[-1] == "1"
    if shape != "dangling":
        assert lines[0] == "nameserver 127.0.0.1", done.stderr


def test_cannot_see_more_of_run_than_the_resolver_needs(world: World, host_with: object) -> None:
    """Files beside the resolver's own stay hidden."""
    files = {**RESOLVERS["stub"], "run/systemd/resolve/secret": None, "run/service.sock": None}
    done = host_with(files, world.argv("sh", "-c", "find /run -type f -o -type s"))  # type: ignore[operator]
    shown = {p for p in done.stdout.split() if not p.startswith("/run/agent-sandbox/")}
    assert shown == {"/run/systemd/resolve/stub-resolv.conf"}, done.stderr


def test_without_network_the_resolver_is_not_shown(world: World, host_with: object) -> None:
    """Nothing of /run is needed when there is no network."""
    argv = world.argv("--network=off", "sh", "-c", "cat /etc/resolv.conf || echo none")
    done = host_with(RESOLVERS["stub"], argv)  # type: ignore[operator]
    assert done.stdout == "none\n", done.stderr
