"""Control groups for many sandboxes, on a machine made of files and on the real one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import cgroups, hierarchy, slices
from agent_sandbox.launch.enforcement import Machine
from agent_sandbox.policy.model import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMITS = Limits(memory=64 << 20, pids=10, cpus=0.5)


def test_processors_are_a_share_of_each_period() -> None:
    v2 = {s.file: s.value for s in hierarchy.settings_v2(Limits(cpus=1.5))}
    v1 = {s.file: s.value for s in hierarchy.settings_v1(Limits(cpus=1.5), "cpu")}
    assert v2 == {"cpu.max": "150000 100000"}
    assert v1 == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    # The kernel refuses less than a millisecond.
    assert hierarchy.quota(0.001) == 1000
    assert hierarchy.controllers_v2(LIMITS) == ["memory", "pids", "cpu"]
    assert hierarchy.controllers_v2(Limits(cpu_time=5.0)) == []


def test_a_machine_without_groups_says_so(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    for name in ("mountinfo", "cgroup"):
        (tmp_path / "self" / name).write_text("")
    made = slices.Slices("none", Machine(proc=str(tmp_path)))
    assert not made.tops
    assert not made.kept
    assert not made.can_freeze
    assert "cgroup v2: not mounted" in made.reason or "cgroup v1" in made.reason
    made.close()


@pytest.fixture
def groups() -> Iterator[slices.Slices]:
    made = slices.Slices(f"test-{os.getpid()}-{os.urandom(4).hex()}")
    if not made.tops:
        pytest.skip(f"no control groups for us here: {made.reason}")
    yield made
    made.close()


def test_a_group_is_reused_for_the_same_limits_alone(groups: slices.Slices) -> None:
    one = groups.take(LIMITS)
    paths = one.paths
    one.close()
    one.close()
    other = groups.take(LIMITS.replace(pids=11))
    again, second = groups.take(LIMITS), groups.take(LIMITS)
    assert again.paths == paths
    assert len({other.paths, again.paths, second.paths}) == 3


def test_a_group_with_a_process_in_it_is_not_reused(groups: slices.Slices) -> None:
    group = groups.take(LIMITS)
    with subprocess.Popen(["sleep", "60"]) as process:
        group.attach(process.pid)
        assert not group.is_empty()
        assert (group.usage().pids or 0) >= 1
        group.close()
        assert groups.take(LIMITS).paths != group.paths
        process.kill()


def test_a_process_can_be_born_in_a_group_and_we_stay_out(groups: slices.Slices) -> None:
    group = groups.take(LIMITS)
    born: list[int | None] = []
    before = _memberships("thread-self")

    def start() -> None:
        pid = group.bear(lambda: os.posix_spawn("/bin/sleep", ["sleep", "60"], {}))
        born.append(pid)
        assert _memberships("thread-self") == before

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    if groups.version != 1:
        assert born == [None]
        return
    assert born[0] is not None
    assert not group.is_empty()
    assert all(name in _memberships(str(born[0])) for name in groups.kept & {"pids", "memory"})
    assert group.paths[0].rpartition("/")[2] in _memberships(str(born[0]))
    os.kill(born[0], 9)
    os.waitpid(born[0], 0)
    assert group.is_empty()


def test_who_cannot_be_started_leaves_us_where_we_were(groups: slices.Slices) -> None:
    group = groups.take(LIMITS)
    before = _memberships("thread-self")

    def fail() -> int:
        raise HostError("no", code="x")

    if groups.version == 1:
        with pytest.raises(HostError):
            group.bear(fail)
    assert _memberships("thread-self") == before


def test_frozen_processes_stand_still(groups: slices.Slices) -> None:
    if not groups.can_freeze:
        pytest.skip("no freezer here")
    group = groups.take(Limits())
    with subprocess.Popen(
        ["sh", "-c", "while read line; do echo $line; done"], stdin=-1, stdout=-1, text=True,
        bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        group.attach(process.pid)
        group.freeze(on=True)
        process.stdin.write("word\n")
        heard: list[str] = []
        thread = threading.Thread(target=lambda: heard.append(process.stdout.readline()))  # type: ignore[union-attr]
        thread.start()
        thread.join(0.3)
        assert heard == []
        group.freeze(on=False)
        thread.join(30)
        assert heard == ["word\n"]
        process.kill()


def _memberships(process: str) -> str:
    with open(f"/proc/{process}/cgroup", encoding="ascii") as file:
        return file.read()


# --- others who sweep at the same moment


class Rival:
    """Another program's sweep, at a chosen call of ours, so that nothing depends on luck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self._monkeypatch = monkeypatch
        self._left = times
        self.swept: list[str] = []

    def sweep(self, path: str) -> None:
        """What is there and not locked goes, as often as was said."""
        if self._left:
            self._left -= 1
            cgroups.sweep(os.path.dirname(path))
            if not os.path.exists(path):
                self.swept.append(path)

    def after_mkdir(self) -> None:
        """Before the group is opened."""
        mkdir = os.mkdir

        def made(path: str, *rest: int) -> None:
            mkdir(path, *rest)
            self.sweep(path)

        self._monkeypatch.setattr(os, "mkdir", made)

    def before_lock(self) -> None:
        """When it is open already."""
        flock = fcntl.flock

        def locked(fd: int, operation: int) -> None:
            if operation == fcntl.LOCK_SH:
                self.sweep(os.readlink(f"/proc/self/fd/{fd}"))
            flock(fd, operation)

        self._monkeypatch.setattr(fcntl, "flock", locked)


MOMENTS = (Rival.after_mkdir, Rival.before_lock)


@pytest.mark.parametrize("moment", MOMENTS)
def test_groups_that_are_swept_before_they_are_locked_are_made_again(
    groups: slices.Slices, monkeypatch: pytest.MonkeyPatch, moment: Callable[[Rival], None]
) -> None:
    """On the real kernel. The control is that the sweep does remove a group at that moment."""
    del groups
    rival = Rival(monkeypatch, times=2)
    moment(rival)
    made = slices.Slices(f"test-{os.getpid()}-{os.urandom(4).hex()}")
    monkeypatch.undo()
    try:
        assert len(rival.swept) == 2
        assert not made.reason
        assert rival.swept[0] in made.tops.values()
        # From here on nobody takes them away, though they are empty.
        for top in made.tops.values():
            cgroups.sweep(os.path.dirname(top))
        group = made.take(LIMITS)
        assert all(map(os.path.isdir, group.paths))
        group.close()
    finally:
        made.close()


def test_a_late_sweep_does_not_remove_what_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is on a group that is gone; the one with that name is another's, and alive."""
    path = f"{tmp_path}/{cgroups.PREFIX}x"
    os.mkdir(path)
    flock = fcntl.flock
    made: list[int] = []

    def late(fd: int, operation: int) -> None:
        if not made and operation & fcntl.LOCK_EX:
            os.rmdir(path)
            made.append(-1)
            made[:] = [cgroups.claim(path)]
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    cgroups.sweep(str(tmp_path))
    assert os.path.isdir(path)
    # The control: when its maker is gone, it goes too.
    os.close(made[0])
    cgroups.sweep(str(tmp_path))
    assert not os.path.exists(path)
