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
RLIMIT_FSIZE, RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE = 1, 4, 6, 7
# Who has fewer descriptors keeps them all.
FEW_DESCRIPTORS = 4096
# A dump of one byte is none, and the only value that also keeps the host's crash handler from
# being started (core(5), "Piping core dumps to a program"): it runs as root and would read it.
NO_CORE = 1
# Added to a process's score: when memory runs out, the kernel ends the sandbox first.
OOM_SCORE = 500


def apply(init: int, processes: int) -> None:
    """Limit a sandbox that is held back. Everything inside inherits it and cannot lift it."""
    machine = os.uname().machine
    _limit(machine, init, RLIMIT_CORE, NO_CORE)
    _halve_descriptors(machine, init)
    if processes:
        # Counted in the sandbox's user namespace since 5.14. Root is exempt: the keeper counts.
        _limit(machine, init, RLIMIT_NPROC, processes)
    # /proc is sealed inside, so the score stays.
    with open(f"/proc/{init}/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(OOM_SCORE))


def bound_files(init: int, size: int) -> None:
    """Let no file of a sandbox that is held back get larger: the writer gets SIGXFSZ."""
    _limit(os.uname().machine, init, RLIMIT_FSIZE, size)


def _halve_descriptors(machine: str, init: int) -> None:
    """Leave the gates of other sandboxes some room.

    unix(7), ETOOMANYREFS: descriptors that are on their way in a message are counted for all
    processes of a user together, against the sender's own limit. A command that leaves as many
    lying as it may would stop every sender with the same limit.
    """
    with open(f"/proc/{init}/limits", encoding="ascii") as file:
        soft, hard, *_ = file.read().partition("Max open files")[2].split()
    if hard.isdigit() and int(hard) >= FEW_DESCRIPTORS:
        most = int(hard) // 2
        _limit(machine, init, RLIMIT_NOFILE, most, min(int(soft), most))


def _limit(machine: str, pid: int, what: int, value: int, now: int | None = None) -> None:
    pair = (value if now is None else now).to_bytes(8, "little") + value.to_bytes(8, "little")
    try:
        syscall(SYS_PRLIMIT[machine], pid, what, pair, 0)
    except PermissionError:
        # Our own hard limit is lower already, and theirs with it.
        return
