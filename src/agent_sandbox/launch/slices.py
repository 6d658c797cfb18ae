"""Control groups for a program that runs many sandboxes: made below one group of ours, and reused.

`cgroups` makes groups for one run and looks for those of dead runs each time. Here one group at
the top is locked for the program's life, and a later run of anybody's removes it when the program
was killed (`cgroups`, the sweep). A group that is empty again serves the next sandbox.
"""

from __future__ import annotations

import _thread
import os

from ..errors import HostError, reason
from ..record import Record
from . import cgroups
from .enforcement import HERE, MEMORY, Enforcer, read, wanted_limits, write
from .hierarchy import (
    CONTROLLERS_V1,
    CONTROLLERS_V2,
    choose_base,
    counter,
    hierarchies,
    settings_v1,
    settings_v2,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..policy.model import Limits
    from .enforcement import Machine
    from .hierarchy import Hierarchy

FREEZER = "freezer"
# How many empty groups are kept for the next sandboxes.
SPARE = 32


class Usage(Record):
    """What a group's processes use now; None where nobody counts."""

    memory: int | None
    pids: int | None


class Slices:
    """The groups of one program. `kept` says which limits they can keep."""

    def __init__(self, name: str, machine: Machine = HERE) -> None:
        self._name = cgroups.PREFIX + name
        # Our groups at the top. The locks let others know that they are in use.
        self._locks: dict[str, int] = {}
        self._spare: dict[Limits, list[str]] = {}
        self._made = 0
        self._turn = _thread.allocate_lock()
        self.version = 0
        # Controller → our group of it. In v2 they are all the same.
        self.tops: dict[str, str] = {}
        self.reason = ""
        trees = hierarchies(
            read(f"{machine.proc}/self/mountinfo"), read(f"{machine.proc}/self/cgroup")
        )
        why = self._unified(trees, machine) and self._legacy(trees)
        if why:
            self.reason = why

    @property
    def kept(self) -> frozenset[str]:
        """The limits that these groups keep."""
        return frozenset(limit for limit, one in CONTROLLERS_V1.items() if one in self.tops)

    @property
    def can_freeze(self) -> bool:
        """Whether processes can be stopped without their noticing."""
        return FREEZER in self.tops

    def _unified(self, trees: Sequence[Hierarchy], machine: Machine) -> str:
        tree = next((t for t in trees if not t.controllers), None)
        if tree is None:
            return "cgroup v2: not mounted"
        position = cgroups.position(tree, machine)
        base, refusal = choose_base(position, controllers=True)
        if refusal:
            return f"cgroup v2: {refusal}"
        wanted = set(CONTROLLERS_V2.values()) & set(read(f"{base}/cgroup.controllers").split())
        if not wanted or not os.access(f"{base}/cgroup.procs", os.W_OK):
            return f"cgroup v2: no controllers for us in '{base}'"
        try:
            if wanted - set(read(f"{base}/cgroup.subtree_control").split()):
                if base == position.own and not position.is_root:
                    cgroups.vacate(base)
                cgroups.enable(base, wanted)
            cgroups.sweep(base)
            top = f"{base}/{self._name}"
            self._locks[top] = cgroups.claim(top)
            cgroups.enable(top, wanted)
        except OSError as error:
            self.close()
            return f"cgroup v2: cannot use '{error.filename or base}': {reason(error)}"
        self.version = 2
        self.tops = dict.fromkeys((*wanted, FREEZER), top)
        return ""

    def _legacy(self, trees: Sequence[Hierarchy]) -> str:
        why = "cgroup v1: no hierarchy"
        for controller in (*CONTROLLERS_V2.values(), FREEZER):
            tree = next((t for t in trees if controller in t.controllers), None)
            if tree is None:
                continue
            top = f"{tree.own}/{self._name}"
            try:
                if top not in self._locks:
                    cgroups.sweep(tree.own)
                    self._locks[top] = cgroups.claim(top)
            except OSError as error:
                why = f"cgroup v1: cannot use '{tree.own}': {reason(error)}"
                continue
            self.tops[controller] = top
        self.version = 1
        return "" if self.tops else why

    def take(self, limits: Limits) -> Slice:
        """A group with these limits. What they ask for must be in `kept`."""
        with self._turn:
            spare = self._spare.get(limits)
            if spare:
                return Slice(self, spare.pop(), limits)
            self._made += 1
            group = Slice(self, f"s{self._made}", limits)
        try:
            group.make()
        except OSError as error:
            group.remove()
            raise HostError(
                f"cannot make a control group: {reason(error)}",
                hint="run 'sandboxctl doctor'",
                code="limit-unavailable",
            ) from error
        return group

    def give_back(self, group: Slice, name: str, limits: Limits) -> None:
        """Take a group back whose processes have ended."""
        with self._turn:
            if sum(map(len, self._spare.values())) < SPARE and group.is_empty():
                self._spare.setdefault(limits, []).append(name)
                return
        group.remove()

    def close(self) -> None:
        """Remove everything."""
        self._spare = {}
        for top, lock in self._locks.items():
            cgroups.remove(top, seconds=cgroups.REMOVE_SECONDS)
            os.close(lock)
        self._locks, self.tops = {}, {}


class Slice(Enforcer):
    """The group of one sandbox, for all that runs in it."""

    def __init__(self, owner: Slices, name: str, limits: Limits) -> None:
        self._owner = owner
        self._name = name
        self._limits = limits
        self._by_controller = {c: f"{top}/{name}" for c, top in owner.tops.items()}
        self.paths = tuple(dict.fromkeys(self._by_controller.values()))
        # What the kernel has killed of the group's last user is not ours.
        self._killed_before = self.kills()
        self._closed = False

    def make(self) -> None:
        """Make the group and set its limits."""
        for path in self.paths:
            os.mkdir(path)
        wanted = wanted_limits(self._limits)
        for limit, controller in CONTROLLERS_V2.items():
            if limit not in wanted:
                continue
            if self._owner.version == 1:
                chosen = settings_v1(self._limits, controller)
            else:
                every = settings_v2(self._limits)
                chosen = tuple(s for s in every if s.file.startswith(f"{controller}."))
            for setting in chosen:
                cgroups.apply(self._by_controller[controller], setting)

    def bear(self, start: Callable[[], int]) -> int | None:
        """Start a process from within the group, so that it is born there.

        In v1 a thread may move itself, which takes no lock that all forks share; to move another
        process the kernel waits for an RCU grace period, some ten milliseconds. A process's memory
        is charged where its first thread is, so nothing of ours is charged to the group.
        """
        if self._owner.version != 1:
            return None
        try:
            self._enter(self.paths)
            return start()
        finally:
            self._enter([os.path.dirname(top) for top in dict.fromkeys(self._owner.tops.values())])

    def _enter(self, groups: Iterable[str]) -> None:
        for path in groups:
            try:
                # 0 is the writer itself.
                write(f"{path}/tasks", "0")
            except OSError as error:
                raise self._failed(path, error) from error

    def _failed(self, path: str, error: OSError) -> HostError:
        return HostError(
            f"cannot limit the sandbox: '{path}': {reason(error)}",
            hint="run 'sandboxctl doctor'",
            code="limit-unavailable",
        )

    def attach(self, pid: int) -> None:
        """Move a process in."""
        for path in self.paths:
            try:
                write(f"{path}/cgroup.procs", str(pid))
            except OSError as error:
                raise self._failed(path, error) from error

    def exceeded(self) -> str | None:
        """Whether the kernel has killed for want of memory since this sandbox has the group."""
        return MEMORY if self.kills() > self._killed_before else None

    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory, also of earlier users."""
        path = self._by_controller.get("memory")
        if path is None:
            return 0
        file = "memory.events" if self._owner.version == 2 else "memory.oom_control"
        return counter(read(f"{path}/{file}"), "oom_kill")

    def usage(self) -> Usage:
        """What its processes use now."""
        memory, pids = self._by_controller.get("memory"), self._by_controller.get("pids")
        file = "memory.current" if self._owner.version == 2 else "memory.usage_in_bytes"
        return Usage(
            memory=int(read(f"{memory}/{file}") or 0) if memory else None,
            pids=int(read(f"{pids}/pids.current") or 0) if pids else None,
        )

    def freeze(self, *, on: bool) -> None:
        """Stop its processes where they are, or let them go on."""
        path = self._by_controller[FREEZER]
        if self._owner.version == 2:
            write(f"{path}/cgroup.freeze", "1" if on else "0")
        else:
            write(f"{path}/freezer.state", "FROZEN" if on else "THAWED")

    def is_empty(self) -> bool:
        """Whether no process is in it."""
        return not any(read(f"{path}/cgroup.procs") for path in self.paths)

    def close(self) -> None:
        """Give it back. Its processes must have ended."""
        if not self._closed:
            self._closed = True
            self._owner.give_back(self, self._name, self._limits)

    def remove(self) -> None:
        """Remove it; what stays busy is left to the end of the program."""
        for path in self.paths:
            cgroups.remove(path, seconds=cgroups.REMOVE_SECONDS)
