"""Container engines: whoever reaches one is root on the host."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from escape.attack import Attack, Scene, Trial, trials
from escape.test_sockets import CONNECT

pytestmark = pytest.mark.kernel


def engine(scene: Scene) -> None:
    """DOCKER_HOST names a socket in a directory that the policy shows."""
    scene.listen(scene.base / "engine" / "d.sock")
    scene.caller["DOCKER_HOST"] = f"unix://{scene.base}/engine/d.sock"


def linked_engine(scene: Scene) -> None:
    """DOCKER_HOST names the first of two links."""
    scene.listen(scene.base / "engine" / "real" / "d.sock")
    scene.link(scene.base / "engine" / "one", "two")
    scene.link(scene.base / "engine" / "two", scene.base / "engine" / "real" / "d.sock")
    scene.caller["DOCKER_HOST"] = f"unix://{scene.base}/engine/one"


def podman(scene: Scene) -> None:
    scene.listen(scene.base / "engine" / "p.sock")
    scene.caller["CONTAINER_HOST"] = f"unix:{scene.base}/engine/p.sock"


def context(scene: Scene) -> None:
    """A context of docker that is not the current one."""
    path = scene.base / "engine" / "c.sock"
    scene.listen(path)
    key = sha256(b"mine").hexdigest()
    meta = {"Name": "mine", "Endpoints": {"docker": {"Host": f"unix://{path}"}}}
    scene.write(f"~/.docker/contexts/meta/{key}/meta.json", json.dumps(meta))


def in_project(scene: Scene) -> None:
    scene.listen("d.sock")
    scene.caller["DOCKER_HOST"] = f"unix://{scene.project}/d.sock"


def machines(scene: Scene) -> None:
    """Sockets of desktop engines, in directories that the user has opened by name."""
    for name in (".colima/default/docker.sock", ".rd/docker.sock", ".orbstack/run/docker.sock"):
        scene.listen(f"~/{name}")


ATTACKS = (
    Attack(
        name="engine-in-a-shown-directory", invariant=5, what="connect() works read-only",
        setup=engine, flags=("--ro", "{base}/engine"), python=True,
        script=CONNECT + 'connect(f"{base}/engine/d.sock")',
        without="engine sockets + sockets of services",
    ),
    Attack(
        name="engine-named-itself", invariant=5, what="rw on the socket, without --docker",
        setup=engine, flags=("--rw", "{base}/engine/d.sock"), python=True,
        script=CONNECT + 'connect(f"{base}/engine/d.sock")', without="engine sockets",
    ),
    Attack(
        name="engine-behind-links", invariant=5, what="each of its names", setup=linked_engine,
        flags=("--rw", "{base}/engine"), python=True,
        script=CONNECT + """
for name in ("one", "two", "real/d.sock"):
    connect(f"{base}/engine/{name}")
""", without="engine sockets + sockets of services",
    ),
    Attack(
        name="podman", invariant=5, what="CONTAINER_HOST", setup=podman,
        flags=("--ro", "{base}/engine"), python=True,
        script=CONNECT + 'connect(f"{base}/engine/p.sock")',
        without="engine sockets + sockets of services",
    ),
    Attack(
        name="engine-of-a-context", invariant=5, what="docker's own list of engines",
        setup=context, flags=("--ro", "{base}/engine"), python=True,
        script=CONNECT + 'connect(f"{base}/engine/c.sock")',
        without="engine sockets + sockets of services",
    ),
    Attack(
        name="engine-in-the-project", invariant=5, what="rename it, link it, reach it",
        setup=in_project, python=True,
        script=CONNECT + """
for call in (os.rename, os.link, os.symlink):
    try: call("d.sock", "e.sock")
    except OSError as error: print(error)
connect(f"{project}/d.sock")
connect(f"{project}/e.sock")
""", without="engine sockets + sockets of services",
    ),
    Attack(
        name="engines-of-desktops", invariant=5, what="their directories opened by name",
        setup=machines, python=True,
        flags=("--rw", "~/.colima", "--rw", "~/.rd", "--rw", "~/.orbstack"),
        script=CONNECT + """
for name in (".colima/default/docker.sock", ".rd/docker.sock", ".orbstack/run/docker.sock"):
    connect(f"{home}/{name}")
""", without="engine sockets + sockets of services",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_reach_a_container_engine(trial: Trial) -> None:
    trial.run()
