"""Sockets: no service of the host is reached by a path, an abstract name or another family."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from escape.attack import ROOT, Attack, Scene, Trial, prints, trials
from kernel.conftest import eventually

if TYPE_CHECKING:
    from escape.attack import Step

pytestmark = pytest.mark.kernel

# Names of sockets may be longer than sun_path: connect relative to their directory.
CONNECT = """
import os, socket
def connect(path, kind=socket.SOCK_STREAM):
    try:
        os.chdir(os.path.dirname(path))
        peer = socket.socket(socket.AF_UNIX, kind)
        peer.connect(os.path.basename(path))
        peer.send(b"x")
    except OSError as error:
        print(path, error)
"""
ABSTRACT = """
import socket
def abstract(kind):
    try:
        peer = socket.socket(socket.AF_UNIX, kind)
        peer.connect(chr(0) + "agsbx-" + token)
        peer.send(b"x")
    except OSError as error:
        print(error)
"""
VSOCK = """
import socket
try: print("family 40 is", socket.socket(40, socket.SOCK_STREAM).family)
except OSError as error: print(error)
"""


def in_tmp(name: str, kind: int = socket.SOCK_STREAM) -> Step:
    """A service in the host's /tmp, where ssh-agent, tmux, editors and databases have theirs."""

    def setup(scene: Scene) -> None:
        directory = scene.runner.directory(Path(f"/tmp/agsbx-{scene.token}"))
        scene.unwanted(directory)
        scene.listen(directory / name, kind)
        scene.facts["path"] = str(directory / name)

    return setup


def abstract(kind: int) -> Step:
    """A service with an abstract name, as X11 and D-Bus have it."""
    return lambda s: s.listen(f"\0agsbx-{s.token}", kind)


def runtime_directory(scene: Scene) -> None:
    """The bus and the display in $XDG_RUNTIME_DIR."""
    place = scene.mkdir(scene.base / "run")
    for name in ("bus", "wayland-0", "gnupg/S.gpg-agent", "systemd/private"):
        scene.listen(place / name)
    scene.caller["XDG_RUNTIME_DIR"] = str(place)
    scene.caller["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={place}/bus"


def in_run(scene: Scene) -> None:
    """A service of the system in /run."""
    path = scene.unwanted(Path(f"/run/agsbx-{scene.token}.sock"))
    scene.listen(path)
    scene.watch(path)


def in_home(*names: str) -> Step:
    return lambda s: [s.listen(f"~/{name}") for name in names]


def multiplexer(scene: Scene) -> None:
    """A real tmux server: whoever reaches it runs commands on the host."""
    must_work(Path("/usr/bin/tmux").exists(), "needs tmux")
    directory = scene.runner.directory(Path(f"/tmp/agsbx-{scene.token}"))
    scene.unwanted(directory)
    server = f"{directory}/s"
    call = ("tmux", "-f", "/dev/null", "-S", server)
    done = scene.outside(*call, "new-session", "-d", "sleep 1000", env={"TERM": "xterm"})
    assert done.returncode == 0, done.stderr
    scene.cleanup.callback(scene.outside, *call, "kill-server")
    scene.facts["server"] = server


def tmux_obeyed(scene: Scene) -> bool:
    """tmux answers a client before the window's command has run."""
    asked = "asked tmux" in scene.output
    return asked and eventually(scene.marker.exists, 5)


ATTACKS = (
    Attack(
        name="socket-in-tmp", invariant=5, what="ssh-agent, editors, databases",
        setup=in_tmp("agent.1"), script=f"{CONNECT}\nconnect(path)", python=True,
        without="private /tmp",
    ),
    Attack(
        name="datagram-socket-in-tmp", invariant=5, what="loggers, window managers",
        setup=in_tmp("log", socket.SOCK_DGRAM),
        script=f"{CONNECT}\nconnect(path, socket.SOCK_DGRAM)", python=True,
        without="private /tmp",
    ),
    Attack(
        name="socket-without-a-network", invariant=5, what="a path needs no network",
        setup=in_tmp("agent.1"), flags=("--network=off",),
        script=f"{CONNECT}\nconnect(path)", python=True, without="private /tmp",
    ),
    Attack(
        name="terminal-multiplexer", invariant=5, what="have tmux open a window",
        setup=multiplexer,
        script='tmux -S $server new-window "touch $marker" && echo asked tmux',
        escaped=tmux_obeyed, without="private /tmp",
    ),
    Attack(
        name="runtime-directory", invariant=5, what="bus, display, keys in $XDG_RUNTIME_DIR",
        setup=runtime_directory, python=True,
        script=CONNECT + """
for name in ("bus", "wayland-0", "gnupg/S.gpg-agent", "systemd/private"):
    connect(f"{base}/run/{name}")
    connect(f"/run/user/{uid}/{name}")
""", without="--ro {base}/run + sockets of services",
    ),
    Attack(
        name="socket-in-run", invariant=5, what="a service of the system", who=(ROOT,),
        setup=in_run, python=True,
        script=f"""{CONNECT}
connect(f"/run/agsbx-{{token}}.sock")
connect(f"/var/run/agsbx-{{token}}.sock")
""", without="--ro /run/agsbx-{token}.sock",
    ),
    Attack(
        name="socket-in-the-home", invariant=5, what="gpg-agent, ssh's control sockets",
        setup=in_home(".gnupg/S.gpg-agent", ".ssh/control", ".emacs.d/server"), python=True,
        script=CONNECT + """
for name in (".gnupg/S.gpg-agent", ".ssh/control", ".emacs.d/server"):
    connect(f"{home}/{name}")
""", without="private home",
    ),
    Attack(
        name="socket-in-the-shown-home", invariant=5, what="gpg-agent with --home=host",
        setup=in_home(".gnupg/S.gpg-agent"), flags=("--home=host",), python=True,
        script=CONNECT + 'connect(f"{home}/.gnupg/S.gpg-agent")',
        without="secrets of the home + sockets of services",
    ),
    Attack(
        name="socket-in-a-shown-directory", invariant=5, what="connect() works read-only",
        setup=lambda s: s.listen(s.base / "service" / "s"), flags=("--ro", "{base}/service"),
        python=True, script=CONNECT + 'connect(f"{base}/service/s")',
        without="sockets of services",
    ),
    Attack(
        name="socket-in-the-project", invariant=5, what="rename it, reach it by a second name",
        setup=lambda s: s.listen("s", socket.SOCK_DGRAM), python=True,
        script=CONNECT + """
for call in (os.rename, os.link, os.symlink):
    try: call("s", "t")
    except OSError as error: print(error)
for name in ("s", "t"):
    connect(f"{project}/{name}", socket.SOCK_DGRAM)
""", without="sockets of services",
    ),
    Attack(
        name="socket-bound-by-a-relative-name", invariant=5, what="the kernel lists no path for it",
        setup=lambda s: s.listen(s.base / "service" / "s", relative=True),
        flags=("--ro", "{base}/service"), python=True,
        script=CONNECT + 'connect(f"{base}/service/s")', without="sockets of services",
    ),
    Attack(
        name="socket-with-the-strict-filter", invariant=5, what="two layers close it",
        setup=lambda s: s.listen(s.base / "service" / "s"),
        flags=("--ro", "{base}/service", "--seccomp", "strict"), python=True,
        script=CONNECT + 'connect(f"{base}/service/s")', without="sockets of services + seccomp",
    ),
    Attack(
        name="abstract-stream", invariant=5, what="X11, D-Bus", setup=abstract(socket.SOCK_STREAM),
        script=f"{ABSTRACT}\nabstract(socket.SOCK_STREAM)", python=True, without="landlock",
    ),
    Attack(
        name="abstract-datagram", invariant=5, what="loggers",
        setup=abstract(socket.SOCK_DGRAM),
        script=f"{ABSTRACT}\nabstract(socket.SOCK_DGRAM)", python=True, without="landlock",
    ),
    Attack(
        name="abstract-packets", invariant=5, what="SOCK_SEQPACKET",
        setup=abstract(socket.SOCK_SEQPACKET),
        script=f"{ABSTRACT}\nabstract(socket.SOCK_SEQPACKET)", python=True, without="landlock",
    ),
    Attack(
        name="abstract-without-a-network", invariant=10, what="two layers close it",
        setup=abstract(socket.SOCK_STREAM), flags=("--network=off",),
        script=f"{ABSTRACT}\nabstract(socket.SOCK_STREAM)", python=True,
        without="landlock + network namespace",
    ),
    Attack(
        name="hypervisor", invariant=5, what="vsock is in no namespace", script=VSOCK,
        python=True, flags=("--network=off",), escaped=prints("family 40 is 40"),
        without="seccomp",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_reach_a_service_of_the_host(trial: Trial) -> None:
    trial.run()
