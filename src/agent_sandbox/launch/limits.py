"""Limits on memory, processes and CPU time: for the whole process tree of a run, or an error.

Owns the choice of the mechanism, and RLIMIT_NPROC. Does not own the timeout, starts no sandbox and
kills nothing: the caller acts on what `exceeded` says. Mechanisms in order:

    cgroup v2       below our own group where it is ours to divide (`cgroups`)
    cgroup v1       below our own group in each hierarchy, in practice as root (`cgroups`)
    RLIMIT_NPROC    processes only, not for root, counted in the sandbox's user namespace
    systemd         a delegated scope of the user's (for root: the system's) manager, then as v2
                    (`scopes`)

No rlimit bounds the memory or the CPU time of a tree: each process has its own, and may fork.
"""

from __future__ import annotations

from ..errors import HostError
from . import cgroups, scopes
from .enforcement import HERE, Enforcer, Machine, booted, failed, listed, read, wanted_limits
from .hierarchy import hierarchies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..policy.model import Limits

__all__ = ["Enforcer", "Machine", "ProcessCount", "enforcer", "hint", "kernel_version"]

# Since 5.14 RLIMIT_NPROC counts within a user namespace (ucounts); before, all of the user's tasks.
NPROC_PER_NAMESPACE = (5, 14)


def enforcer(
    limits: Limits, *, uid: int, name: str, record: str = "", machine: Machine = HERE
) -> Enforcer | None:
    """What enforces these limits here; None when there is nothing to enforce.

    `name` (letters, digits and '-') must be unique among the sandboxes that run on this machine.
    In `record` is written what must be removed should we be killed.
    """
    wanted = wanted_limits(limits)
    if not wanted:
        return None
    trees = hierarchies(read(f"{machine.proc}/self/mountinfo"), read(f"{machine.proc}/self/cgroup"))
    tries: tuple[Callable[[], Enforcer | str], ...] = (
        lambda: cgroups.unified(limits, cgroups.PREFIX + name, trees, machine, record),
        lambda: cgroups.legacy(limits, cgroups.PREFIX + name, trees, record),
        lambda: _nproc(limits, uid, machine),
        lambda: scopes.scope(limits, cgroups.PREFIX + name, trees, uid, machine),
    )
    reasons = []
    for attempt in tries:
        found = attempt()
        if isinstance(found, Enforcer):
            return found
        reasons.append(found)
    raise HostError(
        f"cannot limit {', '.join(wanted)} of the whole process tree: {'; '.join(reasons)}",
        hint=hint(wanted, uid=uid, systemd=booted(machine)),
        code="limit-unavailable",
    )


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


# rlimits.


class ProcessCount(Enforcer):
    """RLIMIT_NPROC, set when the process is already in the sandbox's user namespace.

    The count starts at zero there and the namespaces it makes count into it. Set earlier, the
    limit would apply to all processes of the user (getrlimit(2), user_namespaces(7)).
    """

    def __init__(self, limits: Limits, count: int) -> None:
        self._limits = limits
        self._count = count
        self.describe = f"{listed(limits)} by RLIMIT_NPROC in the sandbox's user namespace"

    def attach(self, pid: int) -> None:
        """Set the limit; children inherit it, and nothing inside can raise a hard limit."""
        # Only here: most runs set no limits.
        import resource

        try:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (self._count, self._count))
        except OSError as error:
            raise failed(self._limits, "cannot set RLIMIT_NPROC", error) from error


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
