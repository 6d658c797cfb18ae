"""The cgroups of a run, v2 and v1: made, filled, read and removed.

Owns Groups, and what it takes to divide a group that is ours. What to make, and where, is decided
in `hierarchy`. Kills nothing: the caller acts on what `exceeded` says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from ..errors import reason
from .enforcement import (
    CPU_TIME,
    MEMORY,
    POLL,
    Enforcer,
    booted,
    failed,
    listed,
    read,
    wanted_limits,
    write,
)
from .hierarchy import (
    CONTROLLERS_V1,
    SELF,
    Group,
    Position,
    choose_base,
    controllers_v2,
    counter,
    settings_v1,
    settings_v2,
    used_seconds,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..policy.model import Limits
    from .enforcement import Machine
    from .hierarchy import Hierarchy, Setting

PREFIX = "agent-sandbox-"
# The processes live one level below the limits: a sandbox that may nest can unshare its cgroup
# namespace and mount the hierarchy, but sees only its own group and what is below.
LEAF = "run"
REMOVE_SECONDS = 1.0
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Groups(Enforcer):
    """One or more cgroups with limits, each with a leaf for the processes."""

    def __init__(
        self, limits: Limits, groups: Sequence[Group], *, version: int, record: str = ""
    ) -> None:
        self._limits = limits
        self._version = version
        self._locks: dict[str, int] = {}
        self._verdict: str | None = None
        paths = [group.path for group in groups]
        self.describe = f"{listed(limits)} by cgroup v{version} {' '.join(paths)}"
        try:
            if record:
                write_down(record, paths)
            for group in groups:
                self._locks[group.path] = _make(group)
                for setting in group.settings:
                    apply(group.path, setting)
        except OSError:
            self.close()
            raise
        # Where the kernel kills one process only (v1), the caller must end the rest.
        whole = any(os.path.exists(f"{path}/memory.oom.group") for path in paths)
        if limits.cpu_time is not None or (limits.memory is not None and not whole):
            self.poll = POLL

    def attach(self, pid: int) -> None:
        """Move the process into every group."""
        for path in self._locks:
            try:
                write(f"{path}/{LEAF}/cgroup.procs", str(pid))
            except OSError as error:
                raise failed(self._limits, f"cannot move it into '{path}'", error) from error

    def exceeded(self) -> str | None:
        """What the kernel counted."""
        if self._verdict is None:
            self._verdict = self._look()
        return self._verdict

    def _look(self) -> str | None:
        cpu, killed = 0.0, 0
        for path in self._locks:
            if self._version == 2:
                cpu += used_seconds(read(f"{path}/cpu.stat"), version=2)
                killed += counter(read(f"{path}/memory.events"), "oom_kill")
            else:
                cpu += used_seconds(read(f"{path}/cpuacct.usage"), version=1)
                # v1 counts where the victim was, and tells no group above.
                killed += counter(read(f"{path}/{LEAF}/memory.oom_control"), "oom_kill")
        if self._limits.cpu_time is not None and cpu > self._limits.cpu_time:
            return CPU_TIME
        return MEMORY if self._limits.memory is not None and killed else None

    def close(self) -> None:
        """Remove the groups; a process that is being torn down keeps one busy for a moment."""
        for path, lock in self._locks.items():
            remove(path, seconds=REMOVE_SECONDS)
            os.close(lock)
        self._locks = {}


def unified(
    limits: Limits, name: str, trees: Sequence[Hierarchy], machine: Machine, record: str = ""
) -> Enforcer | str:
    """Groups in the v2 hierarchy, or why not."""
    tree = next((t for t in trees if not t.controllers), None)
    if tree is None:
        return "cgroup v2: not mounted"
    needed = controllers_v2(limits)
    here = position(tree, machine)
    base, refusal = choose_base(here, controllers=bool(needed))
    if refusal:
        return f"cgroup v2: {refusal}"
    # To move a process, the kernel wants this file of the common ancestor to be writable, too.
    if not (os.access(base, os.W_OK) and os.access(f"{base}/cgroup.procs", os.W_OK)):
        return f"cgroup v2: '{base}' is not writable"
    missing = set(needed) - set(read(f"{base}/cgroup.controllers").split())
    if missing:
        return f"cgroup v2: no {', '.join(sorted(missing))} controller in '{base}'"
    try:
        if set(needed) - set(read(f"{base}/cgroup.subtree_control").split()):
            if base == here.own and not here.is_root:
                vacate(base)
            enable(base, needed)
        group = Group(path=f"{base}/{name}", settings=settings_v2(limits))
        return Groups(limits, [group], version=2, record=record)
    except OSError as error:
        return f"cgroup v2: cannot use '{error.filename or base}': {reason(error)}"


def position(tree: Hierarchy, machine: Machine) -> Position:
    """What decides where our groups may be."""
    parent = os.path.dirname(tree.own)
    return Position(
        own=tree.own,
        # Only the real root lacks this file; the root of a cgroup namespace has it.
        is_root=not os.path.exists(f"{tree.own}/cgroup.events"),
        delegated=_delegated(tree.own),
        # A user's manager is itself delegated to, and manages what is directly below.
        parent_delegated=tree.own != tree.mount
        and _delegated(parent)
        and not os.path.basename(parent).startswith("user@"),
        alone=_alone(tree.own, machine),
        systemd=booted(machine),
    )


def _delegated(path: str) -> bool:
    """Whether systemd marked a group as somebody else's to divide."""
    for attribute in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(path, attribute) == b"1":
                return True
        except OSError:
            continue
    return False


def _alone(group: str, machine: Machine) -> bool:
    # One stranger is enough: a busy host has thousands of them in the group that all begin in.
    for pid in _members(group):
        # One that ended meanwhile looks like a stranger, but is not in the group any more.
        if not _is_ours(int(pid), machine) and pid in _members(group):
            return False
    return True


def _members(group: str) -> list[str]:
    return read(f"{group}/cgroup.procs").split()


def _is_ours(pid: int, machine: Machine) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1 and pid != os.getpid():
        # The name in parentheses may hold anything, so count from the last parenthesis.
        after = read(f"{machine.proc}/{pid}/stat").rpartition(")")[2].split()
        pid = int(after[1]) if len(after) > 1 else 0
    return pid == os.getpid()


def vacate(group: str) -> None:
    """Move the processes of a group, which are all ours, into a leaf, where they stay."""
    leaf = f"{group}/{SELF}"
    if not os.path.isdir(leaf):
        os.mkdir(leaf)
    # More than once: what forks meanwhile is born in the old group.
    for _ in range(5):
        for pid in read(f"{group}/cgroup.procs").split():
            try:
                write(f"{leaf}/cgroup.procs", pid)
            except ProcessLookupError:
                continue


def enable(group: str, controllers: Iterable[str]) -> None:
    """Let the groups below this one have these controllers."""
    # Stays enabled: to take it back would lift the limits of runs beside this one.
    write(f"{group}/cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))


def legacy(
    limits: Limits, name: str, trees: Sequence[Hierarchy], record: str = ""
) -> Enforcer | str:
    """Groups in the v1 hierarchies, or why not."""
    settings: dict[str, tuple[Setting, ...]] = {}
    for limit in wanted_limits(limits):
        controller = CONTROLLERS_V1[limit]
        tree = next((t for t in trees if controller in t.controllers), None)
        if tree is None:
            return f"cgroup v1: no {controller} hierarchy"
        if not os.access(tree.own, os.W_OK):
            return f"cgroup v1: '{tree.own}' is not writable"
        # Below our own group, so that limits already on us go on to hold. Controllers mounted
        # together share a directory.
        path = f"{tree.own}/{name}"
        settings[path] = settings.get(path, ()) + settings_v1(limits, controller)
    groups = [Group(path=path, settings=found) for path, found in settings.items()]
    try:
        return Groups(limits, groups, version=1, record=record)
    except OSError as error:
        return f"cgroup v1: cannot use '{error.filename}': {reason(error)}"


def _make(group: Group) -> int:
    """Make a group and its leaf; the lock tells later runs that its owner lives."""
    sweep(os.path.dirname(group.path))
    lock = claim(group.path)
    try:
        os.mkdir(f"{group.path}/{LEAF}")
    except OSError:
        os.close(lock)
        remove(group.path, seconds=0)
        raise
    return lock


def claim(path: str) -> int:
    """Make a group and lock it, so that no sweep takes it for a dead run's.

    A sweep can be faster than the lock. But it removes only what it has locked alone, and what is
    still where it was: who has the lock and still finds the group has it for good.
    """
    while True:
        os.mkdir(path)
        try:
            lock = os.open(path, DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, path):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _is_at(directory: int, path: str) -> bool:
    """Whether an open directory is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(directory), os.lstat(path))
    except FileNotFoundError:
        return False


def write_down(record: str, paths: Sequence[str]) -> None:
    """Say which groups a run is about to make."""
    with open(record, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\0".join(paths))


def remove_recorded(record: str) -> None:
    """Remove the groups of a dead run. Its last process may have just been killed."""
    try:
        with open(record, encoding="utf-8", errors="surrogateescape") as file:
            paths = file.read().split("\0")
    except FileNotFoundError:
        return
    for path in paths:
        if os.path.basename(path).startswith(PREFIX):
            remove(path, seconds=REMOVE_SECONDS)


def apply(group: str, setting: Setting) -> None:
    """Write one setting of a group."""
    path = f"{group}/{setting.file}"
    if not setting.optional or os.path.exists(path):
        write(path, setting.value)


def sweep(base: str) -> None:
    """Remove the groups of runs whose supervisor was killed before it could."""
    for name in os.listdir(base):
        if not name.startswith(PREFIX) or name == SELF:
            continue
        try:
            lock = os.open(f"{base}/{name}", DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another sweep may have removed it meanwhile, and its maker have made it again.
            if _is_at(lock, f"{base}/{name}"):
                remove(f"{base}/{name}", seconds=0)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def remove(path: str, *, seconds: float) -> None:
    """Remove a group and all below it; what stays busy is left to the next sweep."""
    deadline = time.monotonic() + seconds
    # Children first. The files of a cgroup go with it and cannot be removed.
    for directory in [top for top, _, _ in os.walk(path, topdown=False)]:
        while True:
            try:
                os.rmdir(directory)
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < deadline:
                    time.sleep(0.002)
                    continue
            break
