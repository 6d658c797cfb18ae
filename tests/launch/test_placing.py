"""Placeholders and what is left of dead runs, on a real file system and without a sandbox."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import agent_sandbox
from agent_sandbox.launch import placing, sweeping, workspace
from agent_sandbox.policy.model import DIR, FILE, SOCKET, Placeholder
from agent_sandbox.record import Record

if TYPE_CHECKING:
    from agent_sandbox.policy.model import Plan

SOURCE = str(Path(agent_sandbox.__file__).parent.parent)


class Wishes(Record):
    """As much of a plan as placing reads."""

    placeholders: tuple[Placeholder, ...] = ()
    mounts: tuple[Any, ...] = ()


class Covered(Record):
    """As much of a mount."""

    dest: str
    source: str = ""
    kind: str = "mask-file"
    level: str = "exclude"
    file: bool = False


@pytest.fixture
def state(tmp_path: Path) -> str:
    place = Path(os.path.realpath(tmp_path)) / "state"
    workspace.open_state(str(place), os.getuid())
    return str(place)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = Path(os.path.realpath(tmp_path)) / "project"
    (place / "inner").mkdir(parents=True)
    return place


def plan(*held: Placeholder) -> Plan:
    return cast("Plan", Wishes(placeholders=held))


def names(state: str) -> list[str]:
    return sorted(os.listdir(f"{state}/run"))


def held(path: Path, node: str) -> Placeholder:
    return Placeholder(path=str(path), node=node)


@pytest.mark.parametrize("node", [DIR, SOCKET, FILE])
def test_what_was_made_is_removed(state: str, project: Path, node: str) -> None:
    space = workspace.create(state)
    placing.make(space.path, plan(held(project / "inner" / ".envrc", node)))
    assert os.listdir(project / "inner") == [".envrc"]
    sweeping.remove(space, keep=False)
    assert os.listdir(project / "inner") == []
    assert names(state) == []


@pytest.mark.parametrize("node", [DIR, SOCKET, FILE])
def test_is_never_made_behind_a_link(state: str, project: Path, node: str) -> None:
    # Between planning and placing, a sandbox further up swaps the directory for a link.
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    (project / "inner").rename(project / "was")
    (project / "inner").symlink_to(elsewhere)
    space = workspace.create(state)
    with pytest.raises(NotADirectoryError):
        placing.make(space.path, plan(held(project / "inner" / ".envrc", node)))
    assert os.listdir(elsewhere) == []
    # A control: by its path it would have been.
    (project / "inner" / ".envrc").mkdir()
    assert os.listdir(elsewhere) == [".envrc"]
    sweeping.remove(space, keep=False)
    assert os.listdir(elsewhere) == [".envrc"]


def test_nothing_behind_a_link_is_removed(state: str, project: Path) -> None:
    space = workspace.create(state)
    placing.make(space.path, plan(held(project / "inner" / ".vscode", DIR)))
    # The user's own, empty, of the same name.
    (project / "elsewhere" / ".vscode").mkdir(parents=True)
    (project / "inner").rename(project / "was")
    (project / "inner").symlink_to(project / "elsewhere")
    sweeping.remove(space, keep=False)
    assert os.listdir(project / "elsewhere") == [".vscode"]


@pytest.mark.parametrize("content", ["mine", "dir"])
def test_what_somebody_put_there_stays(state: str, project: Path, content: str) -> None:
    place = project / "inner" / ".envrc"
    space = workspace.create(state)
    placing.make(space.path, plan(held(place, SOCKET)))
    place.unlink()
    if content == "dir":
        place.mkdir()
        (place / "file").write_text("x")
    else:
        place.write_text(content)
    sweeping.remove(space, keep=False)
    assert place.exists()


@pytest.mark.parametrize("is_file", [False, True])
def test_what_went_with_another_run_since_the_plan_is_held(
    state: str, project: Path, *, is_file: bool
) -> None:
    # The other run's placeholder was there when the plan was made, and was taken for the user's.
    top = project / "inner" / ".claude"
    name, top_name = str(top / "settings.json"), str(top)
    mounts = (
        Covered(dest=str(project), source=str(project), kind="rw", level="rw"),
        Covered(dest=top_name, source=top_name, kind="ro", level="ro", file=is_file),
    )
    below = () if is_file else (Placeholder(path=name, node=SOCKET),)
    wishes = cast("Plan", Wishes(placeholders=below, mounts=mounts))
    space = workspace.create(state)
    placing.make(space.path, wishes)
    assert top.is_file() if is_file else os.listdir(top) == ["settings.json"]
    sweeping.remove(space, keep=False)
    assert os.listdir(project / "inner") == []
    # A control: what is gone where no sandbox writes is nobody's to make.
    elsewhere = cast("Plan", Wishes(mounts=mounts[1:]))
    space = workspace.create(state)
    placing.make(space.path, elsewhere)
    assert os.listdir(project / "inner") == []
    sweeping.remove(space, keep=False)


def test_a_second_run_keeps_what_it_covers(state: str, project: Path) -> None:
    place = project / "inner" / ".envrc"
    first, second = workspace.create(state), workspace.create(state)
    placing.make(first.path, plan(held(place, DIR)))
    placing.make(second.path, cast("Plan", Wishes(mounts=(Covered(dest=str(place)),))))
    sweeping.remove(first, keep=False)
    assert place.is_dir()
    sweeping.remove(second, keep=False)
    assert not place.exists()


# --- dead runs ------------------------------------------------------------------------------------


def leave(state: str, step: str) -> None:
    """Let another process die in the middle of a run's life."""
    code = f"""
import os, sys
sys.path.insert(0, {SOURCE!r})
from agent_sandbox.launch import sweeping, workspace
space = workspace.create({state!r}) if {step!r} != "making" else None
step, die = {step!r}, lambda *_, **__: os._exit(9)
if step == "making":
    os.rename = die
    workspace.create({state!r})
if step == "removing":
    os.mkdir(space.path + "/tmp/deep")
    os.makedirs(space.path + "/tmp/deep/er/and/deeper")
    rmdir = os.rmdir
    def dying(*a, **k):
        if sys.argv[1] == "0":
            die()
        sys.argv[1] = str(int(sys.argv[1]) - 1)
        return rmdir(*a, **k)
    os.rmdir = dying
    sweeping.remove(space, keep=False)
os._exit(9)
"""
    for number in range(5 if step == "removing" else 1):
        done = subprocess.run(
            [sys.executable, "-c", code, str(number)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("step", ["making", "running", "removing"])
def test_the_next_run_removes_what_a_dead_one_left(state: str, step: str) -> None:
    leave(state, step)
    assert names(state), "a control: something is left"
    sweeping.sweep(state)
    assert names(state) == []


def test_the_living_are_left_alone(state: str) -> None:
    space = workspace.create(state)
    gate = os.open(f"{state}/run", os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_SH)
    os.mkdir(f"{state}/run/.new-other")
    assert sweeping.sweep(state) == 0
    assert names(state) == [".new-other", os.path.basename(space.path)]
    os.close(gate)
    sweeping.sweep(state)
    assert names(state) == [os.path.basename(space.path)]


def test_the_control_groups_of_a_dead_run_go_with_it(state: str, tmp_path: Path) -> None:
    # Plain directories: what matters is which of them are touched.
    groups = [tmp_path / "agent-sandbox-dead" / "run", tmp_path / "somebody-else"]
    for group in groups:
        group.mkdir(parents=True)
    space = workspace.create(state)
    paths = [groups[0].parent, groups[1]]
    Path(f"{space.path}/{workspace.GROUPS}").write_text("\0".join(map(str, paths)))
    os.close(space.lock)
    sweeping.sweep(state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["somebody-else", "state"]
