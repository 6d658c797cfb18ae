"""cgroups as values: which are mounted, where one may be made, what is written and what is read.

Owns the decisions about cgroups v2 and v1, values in, values out. Touches no file: `cgroups` acts.
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import os

from ..record import Record
from .enforcement import CPU_TIME, CPUS, MEMORY, PIDS, wanted_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Limits

CONTROLLERS_V1 = {MEMORY: "memory", PIDS: "pids", CPU_TIME: "cpuacct", CPUS: "cpu"}
# CPU time needs none: cpu.stat counts in every v2 group.
CONTROLLERS_V2 = {MEMORY: "memory", PIDS: "pids", CPUS: "cpu"}
# Over which time processors are shared out, in microseconds.
PERIOD = 100_000
# Where we put ourselves when our own group must be empty of processes.
SELF = "agent-sandbox-self"


class Hierarchy(Record):
    """A mounted cgroup hierarchy: its v1 controllers (none: v2) and our own group's directory."""

    controllers: tuple[str, ...]
    mount: str
    own: str


class Position(Record):
    """What decides where a v2 group may be made."""

    own: str
    is_root: bool
    delegated: bool
    parent_delegated: bool
    # Nothing but this process and its descendants is in our own group.
    alone: bool
    systemd: bool


class Setting(Record):
    """A value for a file of a cgroup; an optional one is skipped where the kernel has no file."""

    file: str
    value: str
    optional: bool = False


class Group(Record):
    """A cgroup to make, and what to write into it, in this order."""

    path: str
    settings: tuple[Setting, ...]


def hierarchies(mountinfo: str, membership: str) -> tuple[Hierarchy, ...]:
    """The hierarchies that are mounted and show our own group, from proc(5)'s two files."""
    own: dict[tuple[str, ...], str] = {}
    for line in filter(None, membership.split("\n")):
        _, names, path = line.split(":", 2)
        own[tuple(name for name in names.split(",") if name)] = path
    found = []
    for line in filter(None, mountinfo.split("\n")):
        fields, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind not in {"cgroup", "cgroup2"}:
            continue
        root, mount = (_unescaped(field) for field in fields.split(" ")[3:5])
        # A v1 superblock names its controllers among its options; v2 is the one without any.
        named = set() if kind == "cgroup2" else set(options.split(","))
        for controllers, path in own.items():
            below = _below(path, root)
            same = named.issuperset(controllers) if controllers else not named
            if same and below is not None:
                group = (mount + below).rstrip("/")
                found.append(Hierarchy(controllers=controllers, mount=mount, own=group))
    return tuple(found)


def _unescaped(field: str) -> str:
    # Only these four are escaped in mountinfo (mangle() in fs/proc_namespace.c).
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def _below(path: str, root: str) -> str | None:
    """`path` relative to a mount that shows the hierarchy from `root` on; None when it is outside.

    Both are relative to our cgroup namespace, where what lies above it starts with '/..'.
    """
    if path.startswith("/.."):
        return None
    if root == "/":
        return path
    return path[len(root) :] if path == root or path.startswith(root + "/") else None


def controllers_v2(limits: Limits) -> list[str]:
    """What must be enabled."""
    wanted = wanted_limits(limits)
    return [controller for limit, controller in CONTROLLERS_V2.items() if limit in wanted]


def settings_v2(limits: Limits) -> tuple[Setting, ...]:
    """The files of a v2 group."""
    found = []
    if limits.memory is not None:
        found += [
            Setting(file="memory.max", value=str(limits.memory)),
            # Swap is counted apart in v2; without this, the limit only moves pages to the disk.
            Setting(file="memory.swap.max", value="0", optional=True),
            # All or nothing: no half-killed tree that goes on.
            Setting(file="memory.oom.group", value="1", optional=True),
        ]
    if limits.pids is not None:
        found.append(Setting(file="pids.max", value=str(limits.pids)))
    if limits.cpus is not None:
        found.append(Setting(file="cpu.max", value=f"{quota(limits.cpus)} {PERIOD}"))
    return tuple(found)


def quota(cpus: float) -> int:
    """Microseconds in each period; the kernel takes no less than one millisecond."""
    return max(1000, int(cpus * PERIOD))


def settings_v1(limits: Limits, controller: str) -> tuple[Setting, ...]:
    """The files of a v1 group of one controller."""
    if controller == "pids":
        return (Setting(file="pids.max", value=str(limits.pids)),)
    if controller == "cpu" and limits.cpus is not None:
        return (
            Setting(file="cpu.cfs_period_us", value=str(PERIOD)),
            Setting(file="cpu.cfs_quota_us", value=str(quota(limits.cpus))),
        )
    if controller != "memory":
        return ()
    memory = str(limits.memory)
    return (
        # Before the next: memsw (memory and swap together) may never be below it.
        Setting(file="memory.limit_in_bytes", value=memory),
        Setting(file="memory.memsw.limit_in_bytes", value=memory, optional=True),
        Setting(file="memory.swappiness", value="0", optional=True),
    )


def choose_base(position: Position, *, controllers: bool) -> tuple[str, str]:
    """The v2 group to make ours in, or an empty string and why there is none."""
    own = position.own
    if position.parent_delegated or os.path.basename(own) == SELF:
        return os.path.dirname(own), ""
    if position.systemd and not position.delegated:
        # One writer per group: the manager may rewrite the controllers of its own groups, and our
        # limits would go with them.
        return "", f"'{own}' belongs to systemd and is not delegated"
    # The kernel enables controllers only in a group without processes, the root excepted.
    if controllers and not position.is_root and not position.alone:
        return "", f"other processes share '{own}', so it takes no controllers"
    return own, ""


def used_seconds(text: str, *, version: int) -> float:
    """CPU seconds from cpu.stat (v2, microseconds) or cpuacct.usage (v1, nanoseconds)."""
    return counter(text, "usage_usec") / 1e6 if version == 2 else int(text or 0) / 1e9


def counter(text: str, key: str) -> int:
    """A value of a file of keys and numbers; 0 when it is not there."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
