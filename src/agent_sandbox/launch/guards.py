"""Limits that every sandbox gets without being asked, as far as the kernel has them for everybody.

They keep an accident from taking the machine down with it: a fork bomb, a process that eats all
memory. Limits that somebody has asked for are in `limits`, and are an error where they cannot be
kept.
"""

from __future__ import annotations

import os

from .syscalls import syscall

# machine → SYS_prlimit64
SYS_PRLIMIT = {"x86_64": 302, "aarch64": 261}
RLIMIT_CORE, RLIMIT_NPROC = 4, 6
# A dump of one byte is none, and the only value that also keeps the host's crash handler from
# being started (core(5), "Piping core dumps to a program"): it runs as root and would read it.
NO_CORE = 1
# Added to a process's score: when memory runs out, the kernel ends the sandbox first.
OOM_SCORE = 500


def apply(init: int, processes: int) -> None:
    """Limit a sandbox that is held back. Everything inside inherits it and cannot lift it."""
    machine = os.uname().machine
    _limit(machine, init, RLIMIT_CORE, NO_CORE)
    if processes:
        # Counted in the sandbox's user namespace since 5.14. Root is exempt: the keeper counts.
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
