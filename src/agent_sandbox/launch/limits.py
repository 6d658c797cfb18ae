"""Limits on memory, processes and CPU time: for the whole process tree of a run, or an error.

Owns the cgroups of a run (made, filled, read, removed) and RLIMIT_NPROC. Does not own the timeout,
starts no sandbox and kills nothing: the caller acts on what `exceeded` says. Mechanisms in order:

    cgroup v2       below our own group where it is ours to divide
    cgroup v1       below our own group in each hierarchy, in practice as root
    RLIMIT_NPROC    processes only, not for root, counted in the sandbox's user namespace
    systemd         a delegated scope of the user's (for root: the system's) manager, then as v2

No rlimit bounds the memory or the CPU time of a tree: each process has its own, and may fork.
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://systemd.io/CGROUP_DELEGATION
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import sys
import time

from ..errors import HostError, reason
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..policy.model import Limits

MEMORY, PIDS, CPU_TIME = "memory", "pids", "cpu-time"
CONTROLLERS_V1 = {MEMORY: "memory", PIDS: "pids", CPU_TIME: "cpuacct"}
PREFIX = "agent-sandbox-"
# Where we put ourselves when our own group must be empty of processes.
SELF = "agent-sandbox-self"
# The processes live one level below the limits: a sandbox that may nest can unshare its cgroup
# namespace and mount the hierarchy, but sees only its own group and what is below.
LEAF = "run"
POLL = 0.1
# A manager that does not answer must not hang the start.
SCOPE_SECONDS = 5.0
REMOVE_SECONDS = 1.0
# Fixed places, never PATH: it may name a directory that a sandbox wrote.
TOOL_DIRS = ("/usr/bin", "/bin", "/run/current-system/sw/bin")
# Since 5.14 RLIMIT_NPROC counts within a user namespace (ucounts); before, all of the user's tasks.
NPROC_PER_NAMESPACE = (5, 14)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Machine(Record):
    """Where the kernel and systemd are found; tests bring a machine of their own."""

    proc: str = "/proc"
    run: str = "/run"
    release: str = os.uname().release


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


class Enforcer:
    """Holds a process tree to its limits: `attach` before it runs, `close` when it is dead."""

    poll: float | None = None
    describe: str = ""

    def attach(self, pid: int) -> None:
        """Put a process, and all that it will fork, under the limits."""
        raise NotImplementedError

    def exceeded(self) -> str | None:
        """The limit that ended or must end the run; ask once more before `close`."""
        return None

    def close(self) -> None:
        """Remove what was made; never raises."""


HERE = Machine()


def enforcer(limits: Limits, *, uid: int, name: str, machine: Machine = HERE) -> Enforcer | None:
    """What enforces these limits here; None when there is nothing to enforce.

    `name` (letters, digits and '-') must be unique among the sandboxes that run on this machine.
    """
    wanted = wanted_limits(limits)
    if not wanted:
        return None
    trees = hierarchies(
        _read(f"{machine.proc}/self/mountinfo"), _read(f"{machine.proc}/self/cgroup")
    )
    tries: tuple[Callable[[], Enforcer | str], ...] = (
        lambda: _unified(limits, PREFIX + name, trees, machine),
        lambda: _legacy(limits, PREFIX + name, trees),
        lambda: _nproc(limits, uid, machine),
        lambda: _scope(limits, PREFIX + name, trees, uid, machine),
    )
    reasons = []
    for attempt in tries:
        found = attempt()
        if isinstance(found, Enforcer):
            return found
        reasons.append(found)
    raise HostError(
        f"cannot limit {', '.join(wanted)} of the whole process tree: {'; '.join(reasons)}",
        hint=hint(wanted, uid=uid, systemd=_booted(machine)),
        code="limit-unavailable",
    )


# Decisions: values in, values out.


def wanted_limits(limits: Limits) -> dict[str, str]:
    """The limits that are set and are ours, with their values for people."""
    found = {MEMORY: limits.memory, PIDS: limits.pids, CPU_TIME: limits.cpu_time}
    return {name: f"{value:g}" if name == CPU_TIME else str(value)
            for name, value in found.items() if value is not None}  # fmt: skip


def hint(wanted: Iterable[str], *, uid: int, systemd: bool) -> str:
    """What a person can do on this machine."""
    flags = ", ".join(f"--{name}" for name in wanted)
    if systemd and uid:
        return (
            "log in as yourself (not through su), so that 'systemctl --user status' works, or run "
            f"from a unit with Delegate=yes, or drop {flags}"
        )
    if systemd:
        return f"check 'systemctl status', or run from a unit with Delegate=yes, or drop {flags}"
    if uid:
        return f"have root give you a cgroup v2 of your own, run as root, or drop {flags}"
    return f"start agent-sandbox alone in a writable cgroup of its own, or drop {flags}"


def hierarchies(mountinfo: str, membership: str) -> tuple[Hierarchy, ...]:
    """The hierarchies that are mounted and show our own group, from proc(5)'s two files."""
    own: dict[tuple[str, ...], str] = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        own[tuple(name for name in names.split(",") if name)] = path
    found = []
    for line in mountinfo.splitlines():
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
    """What must be enabled: cpu.stat counts in every v2 group, so CPU time needs nothing."""
    return [name for name in wanted_limits(limits) if name != CPU_TIME]


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
    return tuple(found)


def settings_v1(limits: Limits, controller: str) -> tuple[Setting, ...]:
    """The files of a v1 group of one controller."""
    if controller == "pids":
        return (Setting(file="pids.max", value=str(limits.pids)),)
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
    return _counter(text, "usage_usec") / 1e6 if version == 2 else int(text or 0) / 1e9


def _counter(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


# cgroup v2 and v1.


class Groups(Enforcer):
    """One or more cgroups with limits, each with a leaf for the processes."""

    def __init__(self, limits: Limits, groups: Sequence[Group], *, version: int) -> None:
        self._limits = limits
        self._version = version
        self._locks: dict[str, int] = {}
        self._verdict: str | None = None
        paths = [group.path for group in groups]
        self.describe = f"{_listed(limits)} by cgroup v{version} {' '.join(paths)}"
        try:
            for group in groups:
                self._locks[group.path] = _make(group)
                for setting in group.settings:
                    _apply(group.path, setting)
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
                _write(f"{path}/{LEAF}/cgroup.procs", str(pid))
            except OSError as error:
                raise _failed(self._limits, f"cannot move it into '{path}'", error) from error

    def exceeded(self) -> str | None:
        """What the kernel counted."""
        if self._verdict is None:
            self._verdict = self._look()
        return self._verdict

    def _look(self) -> str | None:
        cpu, killed = 0.0, 0
        for path in self._locks:
            if self._version == 2:
                cpu += used_seconds(_read(f"{path}/cpu.stat"), version=2)
                killed += _counter(_read(f"{path}/memory.events"), "oom_kill")
            else:
                cpu += used_seconds(_read(f"{path}/cpuacct.usage"), version=1)
                # v1 counts where the victim was, and tells no group above.
                killed += _counter(_read(f"{path}/{LEAF}/memory.oom_control"), "oom_kill")
        if self._limits.cpu_time is not None and cpu > self._limits.cpu_time:
            return CPU_TIME
        return MEMORY if self._limits.memory is not None and killed else None

    def close(self) -> None:
        """Remove the groups; a process that is being torn down keeps one busy for a moment."""
        for path, lock in self._locks.items():
            _remove(path, seconds=REMOVE_SECONDS)
            os.close(lock)
        self._locks = {}


def _unified(
    limits: Limits, name: str, trees: Sequence[Hierarchy], machine: Machine
) -> Enforcer | str:
    """Groups in the v2 hierarchy, or why not."""
    tree = next((t for t in trees if not t.controllers), None)
    if tree is None:
        return "cgroup v2: not mounted"
    needed = controllers_v2(limits)
    position = _position(tree, machine)
    base, refusal = choose_base(position, controllers=bool(needed))
    if refusal:
        return f"cgroup v2: {refusal}"
    # To move a process, the kernel wants this file of the common ancestor to be writable, too.
    if not (os.access(base, os.W_OK) and os.access(f"{base}/cgroup.procs", os.W_OK)):
        return f"cgroup v2: '{base}' is not writable"
    missing = set(needed) - set(_read(f"{base}/cgroup.controllers").split())
    if missing:
        return f"cgroup v2: no {', '.join(sorted(missing))} controller in '{base}'"
    try:
        if set(needed) - set(_read(f"{base}/cgroup.subtree_control").split()):
            if base == position.own and not position.is_root:
                _vacate(base)
            _enable(base, needed)
        group = Group(path=f"{base}/{name}", settings=settings_v2(limits))
        return Groups(limits, [group], version=2)
    except OSError as error:
        return f"cgroup v2: cannot use '{error.filename or base}': {reason(error)}"


def _position(tree: Hierarchy, machine: Machine) -> Position:
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
        systemd=_booted(machine),
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


def _booted(machine: Machine) -> bool:
    # As sd_booted(3) does it.
    return os.path.isdir(f"{machine.run}/systemd/system")


def _alone(group: str, machine: Machine) -> bool:
    # Twice: a process that ended meanwhile looks like a stranger once.
    return not (_strangers(group, machine) & _strangers(group, machine))


def _strangers(group: str, machine: Machine) -> set[str]:
    pids = _read(f"{group}/cgroup.procs").split()
    return {pid for pid in pids if not _is_ours(int(pid), machine)}


def _is_ours(pid: int, machine: Machine) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1 and pid != os.getpid():
        # The name in parentheses may hold anything, so count from the last parenthesis.
        after = _read(f"{machine.proc}/{pid}/stat").rpartition(")")[2].split()
        pid = int(after[1]) if len(after) > 1 else 0
    return pid == os.getpid()


def _vacate(group: str) -> None:
    """Move the processes of a group, which are all ours, into a leaf, where they stay."""
    leaf = f"{group}/{SELF}"
    if not os.path.isdir(leaf):
        os.mkdir(leaf)
    # More than once: what forks meanwhile is born in the old group.
    for _ in range(5):
        for pid in _read(f"{group}/cgroup.procs").split():
            try:
                _write(f"{leaf}/cgroup.procs", pid)
            except ProcessLookupError:
                continue


def _enable(group: str, controllers: Iterable[str]) -> None:
    # Stays enabled: to take it back would lift the limits of runs beside this one.
    _write(f"{group}/cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))


def _legacy(limits: Limits, name: str, trees: Sequence[Hierarchy]) -> Enforcer | str:
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
        return Groups(limits, groups, version=1)
    except OSError as error:
        return f"cgroup v1: cannot use '{error.filename}': {reason(error)}"


def _make(group: Group) -> int:
    """Make a group and its leaf; the lock tells later runs that its owner lives."""
    _sweep(os.path.dirname(group.path))
    while True:
        os.mkdir(group.path)
        try:
            lock = os.open(group.path, DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            os.mkdir(f"{group.path}/{LEAF}")
        except FileNotFoundError:
            # Another run's sweep was faster than our lock.
            os.close(lock)
            continue
        except OSError:
            os.close(lock)
            _remove(group.path, seconds=0)
            raise
        return lock


def _sweep(base: str) -> None:
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
            _remove(f"{base}/{name}", seconds=0)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _remove(path: str, *, seconds: float) -> None:
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


# systemd.


class Scope(Enforcer):
    """A delegated scope, made by a service manager when the process is known."""

    def __init__(
        self, limits: Limits, name: str, mount: str, call: Sequence[str], machine: Machine
    ) -> None:
        self._limits = limits
        self._unit = f"{name}.scope"
        self._mount = mount
        self._call = call
        self._machine = machine
        self._groups: Groups | None = None
        # The write end of the keeper's standard input, and its pid.
        self._keeper: tuple[int, int] | None = None
        self.describe = f"{_listed(limits)} by cgroup v2 in systemd's {self._unit}"
        if limits.cpu_time is not None:
            self.poll = POLL

    def attach(self, pid: int) -> None:
        """Have the manager move the process into a scope, and divide that."""
        try:
            # systemd removes a scope with its last process, and what the kernel counted goes with
            # it. The keeper holds it until we close, or die: then its input ends.
            self._keeper = _start_keeper()
            pids = [pid, self._keeper[1]]
            refusal = _run(start_transient(self._call, self._unit, pids))
            # A complaint is not yet a failure; the kernel's word counts, but soon.
            base = self._wait_for(pids, SCOPE_SECONDS / 10 if refusal else SCOPE_SECONDS)
            if base is None:
                raise _failed(self._limits, f"systemd made no scope ({refusal or 'no answer'})")
            needed = controllers_v2(self._limits)
            missing = set(needed) - set(_read(f"{base}/cgroup.controllers").split())
            if missing:
                raise _failed(self._limits, f"systemd delegates no {', '.join(missing)}")
            _vacate(base)
            if needed:
                _enable(base, needed)
            group = Group(path=f"{base}/{PREFIX}limits", settings=settings_v2(self._limits))
            self._groups = Groups(self._limits, [group], version=2)
        except OSError as error:
            raise _failed(self._limits, f"cannot divide '{self._unit}'", error) from error
        self._groups.attach(pid)

    def _wait_for(self, pids: Sequence[int], seconds: float) -> str | None:
        """The scope's directory, once the kernel says that all processes are in it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            places = {self._place(pid) for pid in pids}
            place = places.pop()
            if not places and os.path.basename(place) == self._unit:
                return place
            time.sleep(0.002)
        return None

    def _place(self, pid: int) -> str:
        text = _read(f"{self._machine.proc}/{pid}/cgroup")
        return next((self._mount + t[3:] for t in text.splitlines() if t.startswith("0::")), "")

    def exceeded(self) -> str | None:
        """What the kernel counted in the scope."""
        return self._groups.exceeded() if self._groups else None

    def close(self) -> None:
        """Remove our groups and let the scope end; systemd forgets it."""
        if self._groups:
            self._groups.close()
        if self._keeper:
            os.close(self._keeper[0])
            _wait(self._keeper[1])
        self._groups = self._keeper = None


def start_transient(call: Sequence[str], unit: str, pids: Sequence[int]) -> list[str]:
    """The busctl command that makes a scope of running processes (org.freedesktop.systemd1(5))."""
    return [
        *call, "--quiet", f"--timeout={SCOPE_SECONDS:g}", "call",
        "org.freedesktop.systemd1", "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))",
        unit, "fail", "4",
        "Description", "s", "agent-sandbox run",
        "PIDs", "au", str(len(pids)), *map(str, pids),
        "Delegate", "b", "true",
        # A scope whose processes were killed counts as failed and would otherwise stay listed.
        "CollectMode", "s", "inactive-or-failed",
        "0",
    ]  # fmt: skip


def _scope(
    limits: Limits, name: str, trees: Sequence[Hierarchy], uid: int, machine: Machine
) -> Enforcer | str:
    """A scope of the manager that is ours to ask, or why not."""
    if not _booted(machine):
        return "systemd: not running"
    tree = next((t for t in trees if not t.controllers), None)
    if tree is None or set(controllers_v2(limits)) - set(
        _read(f"{tree.mount}/cgroup.controllers").split()
    ):
        return "systemd: it uses cgroup v1, which cannot be delegated"
    tool = next((f"{d}/busctl" for d in TOOL_DIRS if os.path.exists(f"{d}/busctl")), None)
    if tool is None:
        return "systemd: busctl is not installed"
    # The bus of the manager, not that of the caller's variables. (Its private socket would do
    # without a bus, but logs a warning for a look like ours.)
    bus = f"{machine.run}/user/{uid}/bus" if uid else f"{machine.run}/dbus/system_bus_socket"
    if not _shares_pids(bus):
        return f"systemd: no {'user' if uid else 'system'} manager answers at '{bus}'"
    return Scope(limits, name, tree.mount, [tool, f"--address=unix:path={bus}"], machine)


def _shares_pids(path: str) -> bool:
    """Whether those who listen here mean the same processes by a pid as we do.

    A host's socket inside a container leads to a manager that would move a stranger: the kernel
    shows the pid of a peer outside our pid namespace as 0 (unix(7), SO_PEERCRED).
    """
    peer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        peer.connect(path)
        credentials = peer.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    except OSError:
        return False
    finally:
        peer.close()
    return int.from_bytes(credentials[:4], sys.byteorder) != 0


def _start_keeper() -> tuple[int, int]:
    theirs, ours = os.pipe()
    try:
        return ours, _spawn(["/bin/sh", "-c", "read -r _"], stdin=theirs)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _run(argv: list[str]) -> str:
    """Run a tool to its end; what it said on standard error."""
    reading, writing = os.pipe()
    try:
        pid = _spawn(argv, stderr=writing)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with open(reading, "rb") as said:
        text = said.read()
    _wait(pid)
    return text.decode(errors="replace").strip().replace("\n", ", ")


def _spawn(argv: list[str], *, stdin: int | None = None, stderr: int | None = None) -> int:
    """Start a tool without our descriptors, variables and process group.

    A descriptor that another thread made inheritable for its own sandbox must not live on in the
    keeper, and Ctrl-C is not meant for it.
    """
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        given = (null if stdin is None else stdin, null, null if stderr is None else stderr)
        actions: list[tuple[int, ...]] = [
            (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(given)
        ]
        open_now = [int(fd) for fd in os.listdir("/proc/self/fd")]
        actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in open_now if fd > 2]
        return os.posix_spawn(argv[0], argv, {"LC_ALL": "C"}, file_actions=actions, setpgroup=0)
    finally:
        os.close(null)


def _wait(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        # A program that ignores SIGCHLD has its children reaped by the kernel.
        return


# rlimits.


class ProcessCount(Enforcer):
    """RLIMIT_NPROC, set when the process is already in the sandbox's user namespace.

    The count starts at zero there and the namespaces it makes count into it. Set earlier, the
    limit would apply to all processes of the user (getrlimit(2), user_namespaces(7)).
    """

    def __init__(self, limits: Limits, count: int) -> None:
        self._limits = limits
        self._count = count
        self.describe = f"{_listed(limits)} by RLIMIT_NPROC in the sandbox's user namespace"

    def attach(self, pid: int) -> None:
        """Set the limit; children inherit it, and nothing inside can raise a hard limit."""
        # Only here: most runs set no limits.
        import resource

        try:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (self._count, self._count))
        except OSError as error:
            raise _failed(self._limits, "cannot set RLIMIT_NPROC", error) from error


def _nproc(limits: Limits, uid: int, machine: Machine) -> Enforcer | str:
    """RLIMIT_NPROC, or why not. Before systemd: it needs no other process to agree."""
    if limits.pids is None or len(wanted_limits(limits)) > 1:
        return "rlimits: they bound processes, not trees"
    if uid == 0:
        return "rlimits: root is exempt from RLIMIT_NPROC"
    if kernel_version(machine.release) < NPROC_PER_NAMESPACE:
        return f"rlimits: Linux {machine.release} counts all processes of the user (5.14 does not)"
    return ProcessCount(limits, limits.pids)


def kernel_version(release: str) -> tuple[int, int]:
    """Major and minor number of a release such as '6.18.44-fc' or '7.0-rc1'."""
    major, _, rest = release.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return (int(major), int(digits)) if major.isdigit() and digits else (0, 0)


# Files and words.


def _read(path: str) -> str:
    """A kernel file's text; empty when it is not there (the group may just have gone)."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    """One write(2), as cgroup files want it; never creates a file. Errors carry the path."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(handle)


def _apply(group: str, setting: Setting) -> None:
    path = f"{group}/{setting.file}"
    if not setting.optional or os.path.exists(path):
        _write(path, setting.value)


def _listed(limits: Limits) -> str:
    return ", ".join(f"{name} {value}" for name, value in wanted_limits(limits).items())


def _failed(limits: Limits, what: str, error: OSError | None = None) -> HostError:
    cause = f"{what}: {reason(error)}" if error else what
    names = wanted_limits(limits)
    return HostError(
        f"cannot limit {', '.join(names)} of the whole process tree: {cause}",
        hint="drop " + ", ".join(f"--{name}" for name in names),
        code="limit-unavailable",
    )
