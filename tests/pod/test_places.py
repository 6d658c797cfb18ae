"""Without an inner layer, too, a command writes where it may and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.launch import landlock
from agent_sandbox.pod import confine
from conftest import As

from . import ground
from .conftest import Pods, factory
from .ground import play, run, sh

pytestmark = pytest.mark.kernel
SOURCE = str(Path(confine.__file__).parents[2])


@pytest.fixture
def made(superuser: As, built: Path, pem: bytes) -> Iterator[Pods]:
    """Makes agents in whose pods we can start something as the engine does."""
    yield from factory(superuser, built, pem)


@pytest.fixture
def volume(superuser: As) -> Iterator[Path]:
    path = ground.directory(superuser)
    path.chmod(0o777)
    yield path
    ground.remove(path)


WRITES = """
import os
def score():
    # To be killed for memory in another's place: the score may be lowered to the agent's.
    open("/proc/self/oom_score_adj", "w").write("1000")
def volume():
    open("/volume/made", "w").write("x")
def change():
    os.truncate("/volume/there", 0)
def move():
    os.rename("/volume/there", "/volume/gone")
def directory():
    os.mkdir("/volume/d")
for way in (score, volume, change, move, directory):
    try:
        way(); print(way.__name__)
    except OSError:
        pass
"""
ALL = ["score", "volume", "change", "move", "directory"]


def test_cannot_write_into_a_volume_of_the_image_or_by_proc(
    made: Pods, volume: Path, form: str
) -> None:
    (volume / "there").write_text("x")
    (volume / "there").chmod(0o666)
    pod = made(volume=volume)

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, _ = await run(link, "python3", "-c", WRITES)
        assert (process.out, process.err) == ("", "")

    play(scene())
    assert [path.name for path in volume.iterdir()] == ["there"]
    # The control: the same user without a command's domain.
    assert pod.run("/usr/bin/python3", "-c", WRITES).split() == ALL


ORDINARY = """
set -e
mkdir a b; echo x > a/f; mv a/f b/g; ln b/g a/h; ln -s h a/l; mkfifo a/p; rm a/p
python3 -c 'import os; os.rename("b/g", "a/k"); os.truncate("a/k", 0); os.rmdir("b")'
cd /tmp; echo x > f; rm f; cd; echo x > f; rm f
echo x > /dev/null; echo x | tee /dev/stderr >/dev/null
echo done > /dev/stdout
"""


def test_what_programs_do_with_files_works(pod: ground.Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        assert (await sh(link, ORDINARY)) == "done\nx\n"

    play(scene())


# With an older kernel's rights: what can still be done inside, and outside.
OLDER = """
import os, sys
sys.path.insert(0, {source!r})
from agent_sandbox.launch import syscalls
from agent_sandbox.pod import confine
syscalls.no_new_privileges(os.uname().machine)
inside, outside = sys.argv[2:]
os.mkdir(inside + "/a"); os.mkdir(inside + "/b"); os.mkdir(outside + "/a")
if int(sys.argv[1]) >= 0:
    confine.Domain((inside,), int(sys.argv[1])).enter()
for place in (inside, outside):
    for name, act in dict(
        write=lambda: open(place + "/a/f", "w").write("x"),
        move=lambda: os.rename(inside + "/a/f", inside + "/b/f"),
        remove=lambda: os.rmdir(place + "/a"),
    ).items():
        try:
            act(); print(name)
        except OSError:
            print("no", name)
"""


@pytest.mark.parametrize("abi", range(-1, landlock.SCOPE_ABI + 1))
def test_every_version_of_landlock_keeps_writes_inside(runner: As, abi: int) -> None:
    if abi > landlock.abi():
        pytest.fail("this kernel does not know that version")
    inside, outside = runner.project(), runner.project()
    argv = [sys.executable, "-c", OLDER.format(source=SOURCE), str(abi), str(inside), str(outside)]
    done = runner.run(argv, cwd="/")
    assert done.stderr == ""
    within, without = done.stdout.splitlines()[:3], done.stdout.splitlines()[3:]
    # Version 1 has no right to move.
    moved = ["no move", "no remove"] if abi == 1 else ["move", "remove"]
    assert within == ["write", *moved]
    if abi <= 0:
        # The control: without a domain nothing keeps them.
        assert (without[0], without[2]) == ("write", "no remove")
    else:
        assert (without[0], without[2]) == ("no write", "no remove")
    assert list((outside / "a").iterdir()) == ([] if abi > 0 else [outside / "a" / "f"])
