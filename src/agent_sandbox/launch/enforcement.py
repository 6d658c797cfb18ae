"""What every mechanism that holds a run to its limits shares.

Owns the interface (Enforcer), where the kernel and systemd are found (Machine), the limits as
words, and how a kernel file is read and written. Knows no mechanism: `limits` chooses one.
"""

from __future__ import annotations

import os

from ..errors import HostError, reason
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..policy.model import Limits

MEMORY, PIDS, CPU_TIME, CPUS = "memory", "pids", "cpu-time", "cpus"
POLL = 0.1


class Machine(Record):
    """Where the kernel and systemd are found; tests bring a machine of their own."""

    proc: str = "/proc"
    run: str = "/run"
    release: str = os.uname().release


class Enforcer:
    """Holds a process tree to its limits: `attach` before it runs, `close` when it is dead."""

    poll: float | None = None
    describe: str = ""

    def bear(self, start: Callable[[], int]) -> int | None:
        """Start a process that is under the limits from its birth; None where that cannot be.

        To be called on the thread that starts it.
        """
        del start
        return None

    def attach(self, pid: int) -> None:
        """Put a process, and all that it will fork, under the limits."""
        raise NotImplementedError

    def exceeded(self) -> str | None:
        """The limit that ended or must end the run; ask once more before `close`."""
        return None

    def close(self) -> None:
        """Remove what was made; never raises."""


HERE = Machine()


def wanted_limits(limits: Limits) -> dict[str, str]:
    """The limits that are set and are ours, with their values for people."""
    found = {
        MEMORY: limits.memory, PIDS: limits.pids, CPU_TIME: limits.cpu_time, CPUS: limits.cpus,
    }  # fmt: skip
    return {name: f"{value:g}" if name in (CPU_TIME, CPUS) else str(value)
            for name, value in found.items() if value is not None}  # fmt: skip


def listed(limits: Limits) -> str:
    """The limits for people."""
    return ", ".join(f"{name} {value}" for name, value in wanted_limits(limits).items())


def failed(limits: Limits, what: str, error: OSError | None = None) -> HostError:
    """The error for limits that a mechanism could not set."""
    cause = f"{what}: {reason(error)}" if error else what
    names = wanted_limits(limits)
    return HostError(
        f"cannot limit {', '.join(names)} of the whole process tree: {cause}",
        hint="drop " + ", ".join(f"--{name}" for name in names),
        code="limit-unavailable",
    )


def booted(machine: Machine) -> bool:
    """Whether systemd manages this machine."""
    # As sd_booted(3) does it.
    return os.path.isdir(f"{machine.run}/systemd/system")


def read(path: str) -> str:
    """A kernel file's text; empty when it is not there (the group may just have gone)."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def write(path: str, text: str) -> None:
    """Write at once, as cgroup files want it; never creates a file. Errors carry the path."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(handle)
