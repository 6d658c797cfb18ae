"""Limits that every sandbox gets without being asked, as far as the kernel has them for everybody.

They keep an accident from taking the machine down with it: a fork bomb, a process that eats all
memory. Limits that somebody has asked for are in `limits`, and are an error where they cannot be
kept.
"""

from __future__ import annotations

import os

from .syscalls import syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Limits
    from .limits import Enforcer

# machine → SYS_prlimit64
SYS_PRLIMIT = {"x86_64": 302, "aarch64": 261}
RLIMIT_CORE, RLIMIT_NPROC = 4, 6
# A dump of one byte is none, and the only value that also keeps the host's crash handler from
# being started (core(5), "Piping core dumps to a program"): it runs as root and would read it.
NO_CORE = 1
# Added to a process's score: when memory runs out, the kernel ends the sandbox first.
OOM_SCORE = 500
# Root's sandbox may use this part of the machine's memory.
MEMORY_SHARE = 0.9


def apply(init: int, processes: int) -> None:
    """Limit a sandbox that is held back. Everything inside inherits it and cannot lift it."""
    machine = os.uname().machine
    _limit(machine, init, RLIMIT_CORE, NO_CORE)
    if processes:
        # Counted in the sandbox's user namespace since 5.14; root is exempt and gets a cgroup.
        _limit(machine, init, RLIMIT_NPROC, processes)
    # /proc is sealed inside, so the score stays.
    with open(f"/proc/{init}/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(OOM_SCORE))


def _limit(machine: str, pid: int, what: int, value: int) -> None:
    pair = value.to_bytes(8, "little") * 2
    try:
        syscall(SYS_PRLIMIT[machine], pid, what, pair, 0)
    except PermissionError:
        # Our own hard limit is lower already, and theirs with it.
        return


def of_root(limits: Limits, name: str) -> Enforcer | None:
    """A cgroup with the default limits where root can make one at once; None where not."""
    from . import cgroups
    from .enforcement import HERE, Enforcer, read
    from .hierarchy import hierarchies

    if limits.default_pids is None:
        return None
    wanted = limits.replace(
        pids=limits.default_pids, memory=int(_memory(read("/proc/meminfo")) * MEMORY_SHARE) or None
    )
    trees = hierarchies(read("/proc/self/mountinfo"), read("/proc/self/cgroup"))
    found = cgroups.unified(wanted, cgroups.PREFIX + name, trees, HERE)
    if not isinstance(found, Enforcer):
        found = cgroups.legacy(wanted, cgroups.PREFIX + name, trees)
    return found if isinstance(found, Enforcer) else None


def _memory(text: str) -> int:
    """Bytes of memory by /proc/meminfo."""
    words = text.partition("MemTotal:")[2].split(maxsplit=1)
    return int(words[0]) * 1024 if words and words[0].isdigit() else 0
