"""The seccomp profile of containers that can write to the host's files. Pure.

Made of the table that sandboxes go by, less what only concerns a sandbox, and with what root in a
container needs. It takes the place of the engine's own profile.
"""

from __future__ import annotations

import json

from ...launch import surface
from ...launch.seccomp import CLONE_NEW, CLONE_NEWTIME, CREATES, S_ISUID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Argument = dict[str, object]

ARCHITECTURES = {
    "SCMP_ARCH_X86_64": ("SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "SCMP_ARCH_AARCH64": ("SCMP_ARCH_ARM",),
}
ENOSYS = 38
# Root in a container changes its root when packages are installed; 32-bit programs need the others.
NEEDED = ("chroot", "get_thread_area", "set_thread_area")
# Open in a sandbox, but not in the engine's own profile for containers without more capabilities.
NOT_GIVEN = (
    "kcmp", "lsm_set_self_attr", "mbind", "migrate_pages", "move_pages", "set_mempolicy",
    "set_mempolicy_home_node",
)  # fmt: skip
# PER_LINUX, PER_LINUX32, each with UNAME26, and the question.
PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
# Checks that protect the sandbox's first process and the caller's terminal.
OF_THE_SANDBOX = ("terminal", "pid1", "group")
AF_VSOCK = 40
# What the calls of 32-bit programs are called that do the same.
OLD_NAMES = (
    "_llseek", "chown32", "clock_getres_time64", "clock_gettime64", "clock_nanosleep_time64",
    "fadvise64_64", "fchown32", "fcntl64", "fstat64", "fstatat64", "fstatfs64", "ftruncate64",
    "futex_time64", "getegid32", "geteuid32", "getgid32", "getgroups32", "getresgid32",
    "getresuid32", "getuid32", "lchown32", "lstat64", "mmap2", "nice", "ppoll_time64",
    "pselect6_time64", "recv", "recvmmsg_time64", "rt_sigtimedwait_time64",
    "sched_rr_get_interval_time64", "select", "_newselect", "semtimedop_time64", "send",
    "sendfile64", "setfsgid32", "setfsuid32", "setgid32", "setgroups32", "setregid32",
    "setresgid32", "setresuid32", "setreuid32", "setuid32", "sigprocmask", "sigreturn",
    "socketcall", "stat64", "statfs64", "time", "timer_gettime64", "timer_settime64",
    "timerfd_gettime64", "timerfd_settime64", "truncate64", "ugetrlimit", "utimensat_time64",
    "waitpid",
)  # fmt: skip


def wanted(info: object) -> str:
    """The profile for an engine, by its own description; "" where its root is not the host's."""
    options = info.get("SecurityOptions") if isinstance(info, dict) else None
    named = " ".join(map(str, options)) if isinstance(options, list) else ""
    harmless = "name=userns" in named or "name=rootless" in named
    return "" if harmless else text()


def text() -> str:
    """The profile, as the engine takes it."""
    rules: dict[str, list[dict[str, object]]] = {}
    for name, verdict in sorted(calls().items()):
        rules[name] = rule(name, verdict)
    plain = sorted(name for name, found in rules.items() if found == [_allow()])
    listed: list[dict[str, object]] = [{"names": plain, **_allow()}]
    for name, found in sorted(rules.items()):
        if name not in plain:
            listed += [{"names": [name], **one} for one in found]
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [
            {"architecture": name, "subArchitectures": list(others)}
            for name, others in ARCHITECTURES.items()
        ],
        "syscalls": listed,
    }
    return json.dumps(profile, sort_keys=True, separators=(",", ":"))


def calls() -> dict[str, str]:
    """Call → verdict, for a container."""
    found = dict.fromkeys((*OLD_NAMES, *_allowed()), surface.ALLOW)
    for name, verdict in _judged():
        kept = surface.ALLOW if verdict.startswith(OF_THE_SANDBOX) else verdict
        found[name] = kept
    found.update(dict.fromkeys(NEEDED, surface.ALLOW))
    return {name: verdict for name, verdict in found.items() if name not in NOT_GIVEN}


def _judged() -> list[tuple[str, str]]:
    rows = [line.split() for line in surface.JUDGED.splitlines()]
    return [(r[0], r[3].partition("/")[0]) for r in rows if r and not r[0].startswith("#")]


def _allowed() -> list[str]:
    return [row.split()[0] for row in surface.ALLOWED.replace("\n", " ").split(",") if row.split()]


def rule(name: str, verdict: str) -> list[dict[str, object]]:
    """The rules for one call; no rule is a refusal."""
    if verdict == "EPERM":
        # What happens without a rule.
        return []
    if verdict == "ENOSYS":
        return [{"action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}]
    kind, _, place = verdict.partition(":")
    arguments = BY_NAME.get(name, [])
    if kind in BY_KIND:
        arguments = BY_KIND[kind](int(place or 0))
    return [_allow(one) for one in arguments] or [_allow()]


def _none_of(index: int, mask: int) -> Argument:
    return {"index": index, "value": mask, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}


# Any one of the arguments lets a call through. A mode counts only where a file is made.
BY_KIND: dict[str, Callable[[int], list[Argument]]] = {
    "suid": lambda place: [_none_of(place, S_ISUID)],
    "creates-suid": lambda place: [_none_of(place, CREATES), _none_of(place + 1, S_ISUID)],
    "namespaces": lambda place: [_none_of(place, CLONE_NEW)],
    "namespaces+time": lambda place: [_none_of(place, CLONE_NEW | CLONE_NEWTIME)],
}
BY_NAME: dict[str, list[Argument]] = {
    "socket": [{"index": 0, "value": AF_VSOCK, "op": "SCMP_CMP_NE"}],
    "personality": [{"index": 0, "value": p, "op": "SCMP_CMP_EQ"} for p in PERSONALITIES],
}


def _allow(*arguments: Argument) -> dict[str, object]:
    allowed: dict[str, object] = {"action": "SCMP_ACT_ALLOW"}
    return {**allowed, "args": list(arguments)} if arguments else allowed
