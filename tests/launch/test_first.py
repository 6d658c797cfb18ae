"""Nothing of a run is cleared away before the first process of its sandbox is gone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from agent_sandbox.launch import first, placing, sweeping, workspace
from agent_sandbox.policy.model import DIR, Placeholder

from .test_placing import Wishes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_sandbox.policy.model import Plan


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for the first process of a sandbox."""
    started = subprocess.Popen(["sleep", "1000"])
    yield started
    started.kill()
    started.wait()


class Run:
    """A run that holds a name, and a process that was let go."""

    def __init__(self, base: Path, init: int) -> None:
        self.state = str(base / "state")
        workspace.open_state(self.state, os.getuid())
        self.space = workspace.create(self.state)
        self.held = base / "held"
        wishes = Wishes(placeholders=(Placeholder(path=str(self.held), node=DIR),))
        placing.make(self.space.path, cast("Plan", wishes))
        first.note(f"{self.space.path}/{workspace.LOCK}", init)

    def die(self) -> None:
        """As the kernel does it when the supervisor is killed: the lock goes first."""
        os.close(self.space.lock)


@pytest.fixture
def run(tmp_path: Path, process: subprocess.Popen[bytes]) -> Run:
    return Run(Path(os.path.realpath(tmp_path)), process.pid)


@pytest.fixture
def undying(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The kernel is slow to end processes, as on a machine with far too much to do."""
    monkeypatch.setattr(first, "END_SECONDS", 0.05)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr(first._signal, "pidfd_send_signal", lambda *_: None)
    return monkeypatch


def test_a_dead_run_is_cleared_when_its_sandbox_is_gone(
    run: Run, process: subprocess.Popen[bytes]
) -> None:
    run.die()
    assert sweeping.sweep(run.state) == 1
    assert process.wait(30) == -signal.SIGKILL
    assert not run.held.exists()
    assert not os.path.exists(run.space.path)


def test_a_held_name_stays_while_something_inside_may_live(
    run: Run, undying: pytest.MonkeyPatch
) -> None:
    """The control is the test before: the same, but the process ends."""
    run.die()
    assert sweeping.sweep(run.state) == 0
    assert run.held.is_dir()
    assert os.path.exists(run.space.path)
    undying.undo()
    assert sweeping.sweep(run.state) == 1
    assert not run.held.exists()


def test_the_end_of_a_run_leaves_it_to_a_later_one(run: Run, undying: pytest.MonkeyPatch) -> None:
    sweeping.remove(run.space, keep=False)
    assert run.held.is_dir()
    undying.undo()
    assert sweeping.sweep(run.state) == 1
    assert not run.held.exists()


def test_a_number_that_is_used_again_is_somebody_else(
    run: Run, process: subprocess.Popen[bytes]
) -> None:
    """The same number with another time of start."""
    Path(run.space.path, workspace.LOCK).write_bytes(b"%d 1\n" % process.pid)
    run.die()
    assert sweeping.sweep(run.state) == 1
    assert process.poll() is None
    assert not run.held.exists()


def test_a_process_that_is_gone_cannot_be_noted(run: Run) -> None:
    """Then there is nothing to let go."""
    with pytest.raises(ProcessLookupError):
        first.note(f"{run.space.path}/{workspace.LOCK}", 1 << 23)
    sweeping.remove(run.space, keep=False)
