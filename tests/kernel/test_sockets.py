"""No service outside is reached by a socket, wherever its path is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import World

CONNECT = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1])
    print("connected")
except OSError as error:
    print("refused")
"""


@pytest.fixture
def bound() -> Iterator[list[socket.socket]]:
    """Listeners, closed at the end."""
    found: list[socket.socket] = []
    yield found
    for item in found:
        item.close()


def listen(world: World, path: Path, bound: list[socket.socket]) -> Path:
    """Bind a service that everybody may connect to."""
    if not path.parent.exists():
        world.runner.directory(path.parent)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    path.chmod(0o777)
    world.runner.own(path)
    bound.append(server)
    return path


def connect(world: World, path: Path | str, *flags: str) -> str:
    return world.sandbox(*flags, "python3", "-c", CONNECT, str(path)).stdout.strip()


@pytest.mark.parametrize("where", ["project", "tool", "rw"])
def test_cannot_reach_a_service_whose_socket_is_shown(
    world: World, bound: list[socket.socket], where: str
) -> None:
    """In the project (a database), below a read-only tree, below a writable one.

    Controls: the socket that is named can be used, and so can one that is bound inside.
    """
    place = {"project": "tmp/.s.PGSQL.5432", "tool": "~/tools/d/s", "rw": "~/data/s"}[where]
    flags = {"project": (), "tool": ("--ro", "~/tools"), "rw": ("--rw", "~/data")}[where]
    path = listen(world, world.path(place), bound)
    assert connect(world, path, *flags) == "refused"
    assert connect(world, path, *flags, "--rw", str(path)) == "connected"
    assert connect(world, path, *flags, "--network=off") == "refused"


def test_a_link_to_a_socket_does_not_help(world: World, bound: list[socket.socket]) -> None:
    """Neither a symbolic nor a hard one that was made earlier."""
    path = listen(world, world.path("~/tools/s"), bound)
    world.link("soft", path)
    assert connect(world, "soft", "--ro", "~/tools") == "refused"
    assert world.sh(f"ln {path} hard", "--ro", "~/tools").returncode != 0


def test_a_stale_socket_is_not_in_the_way(world: World, bound: list[socket.socket]) -> None:
    """Nobody listens: a server inside may remove it and bind its own."""
    path = listen(world, world.path("server.sock"), bound)
    bound.pop().close()
    code = f"import os, socket; os.unlink({str(path)!r}); socket.socket(1).bind({str(path)!r})"
    done = world.sandbox("python3", "-c", code)
    assert done.returncode == 0, done.stderr
    assert os.path.exists(path)
