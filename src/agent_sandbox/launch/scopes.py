"""A delegated scope of systemd's for a run: asked for, divided, kept until the end.

Owns the question to the manager, by busctl, and the keeper process that holds the scope. What goes
into the scope are the groups of `cgroups`. https://systemd.io/CGROUP_DELEGATION
"""

from __future__ import annotations

import _socket
import os
import sys
import time

from .cgroups import PREFIX, Groups, enable, vacate
from .enforcement import POLL, Enforcer, booted, failed, listed, read
from .hierarchy import Group, controllers_v2, settings_v2

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..policy.model import Limits
    from .enforcement import Machine
    from .hierarchy import Hierarchy

# A manager that does not answer must not hang the start.
SCOPE_SECONDS = 5.0
# Fixed places, never PATH: it may name a directory that a sandbox wrote.
TOOL_DIRS = ("/usr/bin", "/bin", "/run/current-system/sw/bin")


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
        self.describe = f"{listed(limits)} by cgroup v2 in systemd's {self._unit}"
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
                raise failed(self._limits, f"systemd made no scope ({refusal or 'no answer'})")
            needed = controllers_v2(self._limits)
            missing = set(needed) - set(read(f"{base}/cgroup.controllers").split())
            if missing:
                raise failed(self._limits, f"systemd delegates no {', '.join(missing)}")
            vacate(base)
            if needed:
                enable(base, needed)
            group = Group(path=f"{base}/{PREFIX}limits", settings=settings_v2(self._limits))
            self._groups = Groups(self._limits, [group], version=2)
        except OSError as error:
            raise failed(self._limits, f"cannot divide '{self._unit}'", error) from error
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
        text = read(f"{self._machine.proc}/{pid}/cgroup")
        return next((self._mount + t[3:] for t in text.split("\n") if t.startswith("0::")), "")

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


def scope(
    limits: Limits, name: str, trees: Sequence[Hierarchy], uid: int, machine: Machine
) -> Enforcer | str:
    """A scope of the manager that is ours to ask, or why not."""
    if not booted(machine):
        return "systemd: not running"
    tree = next((t for t in trees if not t.controllers), None)
    if tree is None or set(controllers_v2(limits)) - set(
        read(f"{tree.mount}/cgroup.controllers").split()
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
