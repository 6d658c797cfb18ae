"""The seccomp filter as BPF bytes for bwrap's --seccomp. Pure.

`surface` says which calls a command may make; here that table becomes a program for the kernel.
Three levels: "default" lets everyday programs work, "strict" gives up debuggers and unix sockets,
"off" keeps only what the sandbox itself cannot do without (`_guard`).

Arguments are compared by their low 32 bits: where the kernel takes an int, a comparison of all 64
would let 0x100005412 through as another value than 0x5412 (CVE-2019-10063).
"""

from __future__ import annotations

from ..errors import HostError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # Code, jump if true, jump if false, constant (struct sock_filter).
    Instruction = tuple[int, int, int, int]
    # Argument, operation, constant, what then: a verdict or a further check.
    Test = tuple[int, int, int, "str | Check"]
    # Tests in their order, and the verdict when none applies.
    Check = tuple[tuple[Test, ...], str]

# From linux/audit.h, linux/filter.h and linux/seccomp.h, by their kernel names.
AUDIT_ARCH_X86_64 = 0xC000003E
AUDIT_ARCH_I386 = 0x40000003
AUDIT_ARCH_AARCH64 = 0xC00000B7
AUDIT_ARCH_ARM = 0x40000028
X32_SYSCALL_BIT = 0x40000000
BPF_LD_W_ABS = 0x20
BPF_ALU_AND_K = 0x54
BPF_JA = 0x05
BPF_JEQ_K = 0x15
BPF_JGE_K = 0x35
BPF_JSET_K = 0x45
BPF_RET_K = 0x06
SECCOMP_RET_KILL_PROCESS = 0x80000000
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
# Offsets in struct seccomp_data; arguments are 64 bits wide, low half first on these machines.
DATA_NR = 0
DATA_ARCH = 4
DATA_ARGS = 16
# What a tracer writes to have a call skipped.
NO_SYSCALL = 0xFFFFFFFF

VERDICTS: Mapping[str, int] = {
    "ALLOW": SECCOMP_RET_ALLOW,
    "EPERM": SECCOMP_RET_ERRNO | 1,
    "ENOSYS": SECCOMP_RET_ERRNO | 38,
    "EPROTONOSUPPORT": SECCOMP_RET_ERRNO | 93,
    "EAFNOSUPPORT": SECCOMP_RET_ERRNO | 97,
}

# machine → (audit architecture, has x32)
MACHINES: Mapping[str, tuple[int, bool]] = {
    "x86_64": (AUDIT_ARCH_X86_64, True),
    "aarch64": (AUDIT_ARCH_AARCH64, False),
}

LEVELS = ("strict", "default", "off")

# Operations of a test: equal, any bit of a mask set, no bit set.
EQUAL, ANY, NONE = range(3)

TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
# CLONE_NEWNS, …CGROUP, …UTS, …IPC, …USER, …PID, …NET (linux/sched.h). CLONE_NEWTIME lies in the
# byte that clone takes for the signal at the end, so only unshare knows it.
CLONE_NEW, CLONE_NEWTIME = 0x7E020000, 0x80
S_ISUID = 0o4000
# O_CREAT and the bit of O_TMPFILE that O_DIRECTORY does not share; without them there is no mode.
CREATES = 0o100 | 0o20000000
AF_UNIX, AF_INET, AF_NETLINK, AF_INET6 = 1, 2, 16, 10
SOCK_STREAM = 1
NETLINK_ROUTE = 0
# IP (the type decides), ICMP, TCP, UDP, ICMPv6. Others load modules: SCTP, DCCP, L2TP, SMC, …
PROTOCOLS = (0, 1, 6, 17, 58)
PER_LINUX, PER_QUERY = 0, 0xFFFFFFFF

_INTERNET: Check = (tuple((2, EQUAL, p, "ALLOW") for p in PROTOCOLS), "EPROTONOSUPPORT")
_NETLINK: Check = (((2, EQUAL, NETLINK_ROUTE, "ALLOW"),), "EAFNOSUPPORT")
_FAMILIES: tuple[Test, ...] = (
    (0, EQUAL, AF_INET, _INTERNET),
    (0, EQUAL, AF_INET6, _INTERNET),
    (0, EQUAL, AF_NETLINK, _NETLINK),
)
# In a pair of SOCK_STREAM (1) or SOCK_SEQPACKET (5) nobody can connect elsewhere; in one of
# SOCK_DGRAM (2) or SOCK_RAW (3), which means the same, connect and sendto take any path.
_CONNECTED: Check = (((1, ANY, 0b1010, "EPERM"), (1, ANY, SOCK_STREAM, "ALLOW")), "EPERM")
_TERMINAL: Check = (((1, EQUAL, TIOCSTI, "EPERM"), (1, EQUAL, TIOCLINUX, "EPERM")), "ALLOW")


def _not_init(argument: int) -> Check:
    # pid 1 is bwrap's. Between its fork of the command and its own filter it can do everything,
    # and it has the host's /proc open: as root, whoever traces it then owns the machine.
    return ((argument, EQUAL, 1, "EPERM"),), "ALLOW"


def _no_suid(mode: int) -> Check:
    return ((mode, ANY, S_ISUID, "EPERM"),), "ALLOW"


def _creates_no_suid(flags: int) -> Check:
    return ((flags, NONE, CREATES, "ALLOW"), (flags + 1, ANY, S_ISUID, "EPERM")), "ALLOW"


# Verdicts of `surface` that depend on arguments.
CHECKS: Mapping[str, Check] = {
    # A line discipline is kernel code that is loaded on demand, for any terminal.
    "terminal": ((*_TERMINAL[0], (1, EQUAL, TIOCSETD, "EPERM")), "ALLOW"),
    "pid1:0": _not_init(0),
    "pid1:1": _not_init(1),
    # PRIO_PGRP and IOPRIO_WHO_PGRP: the command shares the process group of whoever started it.
    "group:1": (((0, EQUAL, 1, "EPERM"),), "ALLOW"),
    "group:2": (((0, EQUAL, 2, "EPERM"),), "ALLOW"),
    "namespaces": (((0, ANY, CLONE_NEW, "EPERM"),), "ALLOW"),
    "namespaces+time": (((0, ANY, CLONE_NEW | CLONE_NEWTIME, "EPERM"),), "ALLOW"),
    "suid:1": _no_suid(1),
    "suid:2": _no_suid(2),
    "creates-suid:1": _creates_no_suid(1),
    "creates-suid:2": _creates_no_suid(2),
    "socket": (((0, EQUAL, AF_UNIX, "ALLOW"), *_FAMILIES), "EAFNOSUPPORT"),
    "socket-strict": (_FAMILIES, "EAFNOSUPPORT"),
    "pair": (((0, EQUAL, AF_UNIX, "ALLOW"),), "EAFNOSUPPORT"),
    "pair-strict": (((0, EQUAL, AF_UNIX, _CONNECTED),), "EAFNOSUPPORT"),
    "personality": (
        ((0, EQUAL, PER_LINUX, "ALLOW"), (0, EQUAL, PER_QUERY, "ALLOW")),
        "EPERM",
    ),
}

# What holds at "off" too: ioctl; ptrace; process_vm_readv and process_vm_writev; pidfd_getfd.
_HELD: tuple[Check, ...] = (_TERMINAL, _not_init(1), _not_init(0), ((), "EPERM"))
_GUARDED: Mapping[str, tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]] = {
    # Every table of calls that a machine has, with its numbers for them; x32's without their bit.
    "x86_64": (
        (AUDIT_ARCH_X86_64, ((16, 514), (101, 521), (310, 311, 539, 540), (438,))),
        (AUDIT_ARCH_I386, ((54,), (26,), (347, 348), (438,))),
    ),
    "aarch64": (
        (AUDIT_ARCH_AARCH64, ((29,), (117,), (270, 271), (438,))),
        (AUDIT_ARCH_ARM, ((54,), (26,), (376, 377), (438,))),
    ),
}


def build(machine: str, level: str = "default") -> bytes:
    """The filter for a machine."""
    if machine not in MACHINES:
        raise HostError(
            f"cannot build a seccomp filter for '{machine}'",
            hint="supported machines: " + ", ".join(MACHINES),
            code="unsupported-machine",
        )
    if level == "off":
        return _pack(_guard(machine))
    # Only when a sandbox starts, not for every plan.
    from . import surface

    architecture, has_x32 = MACHINES[machine]
    found = surface.verdicts(machine, strict=level == "strict")
    head = [
        _load(DATA_ARCH),
        # Another architecture numbers its calls anew.
        (BPF_JEQ_K, 1, 0, architecture),
        _return(SECCOMP_RET_KILL_PROCESS),
        _load(DATA_NR),
    ]
    if has_x32:
        head += [
            (BPF_JGE_K, 0, 3, X32_SYSCALL_BIT),
            (BPF_JEQ_K, 0, 1, NO_SYSCALL),
            _return(SECCOMP_RET_ALLOW),
            _return(SECCOMP_RET_KILL_PROCESS),
        ]
    else:
        head += [(BPF_JEQ_K, 0, 1, NO_SYSCALL), _return(SECCOMP_RET_ALLOW)]
    return _pack(_link(head, _tree(_ranges(found))))


def _load(offset: int) -> Instruction:
    return (BPF_LD_W_ABS, 0, 0, offset)


def _return(value: int) -> Instruction:
    return (BPF_RET_K, 0, 0, value)


def _ranges(found: Mapping[int, str]) -> list[tuple[int, str]]:
    """Where in the numbers a verdict begins; it holds until the next one. Unknown: ENOSYS."""
    ranges: list[tuple[int, str]] = []
    last = ""
    for number in range(max(found) + 2):
        verdict = found.get(number, "ENOSYS")
        if verdict != last:
            ranges.append((number, verdict))
            last = verdict
    return ranges


def _tree(ranges: Sequence[tuple[int, str]]) -> list[Instruction | str]:
    """A binary search over the ranges, with verdicts or names of checks as its leaves."""
    if len(ranges) == 1:
        verdict = ranges[0][1]
        return [_return(VERDICTS[verdict]) if verdict in VERDICTS else verdict]
    middle = len(ranges) // 2
    below, above = _tree(ranges[:middle]), _tree(ranges[middle:])
    return [(BPF_JGE_K, len(below), 0, ranges[middle][0]), *below, *above]


def _link(head: Sequence[Instruction], tree: Sequence[Instruction | str]) -> list[Instruction]:
    """Put the checks behind the tree, once each, and let its leaves jump there."""
    program = [*head, *tree]
    tail: list[Instruction] = []
    places: dict[str, int] = {}
    for name in program:
        if isinstance(name, str) and name not in places:
            places[name] = len(program) + len(tail)
            tail += _check(CHECKS[name])
    return [
        (BPF_JA, 0, 0, places[item] - at - 1) if isinstance(item, str) else item
        for at, item in enumerate(program)
    ] + tail


def _check(check: Check) -> list[Instruction]:
    """Tests one after the other; each either returns or is jumped over."""
    code: list[Instruction] = []
    loaded = -1
    for argument, operation, constant, then in check[0]:
        if argument != loaded:
            code.append(_load(DATA_ARGS + 8 * argument))
            loaded = argument
        inner = [_return(VERDICTS[then])] if isinstance(then, str) else _check(then)
        over = len(inner)
        if operation == NONE:
            code.append((BPF_JSET_K, over, 0, constant))
        else:
            jump = BPF_JEQ_K if operation == EQUAL else BPF_JSET_K
            code.append((jump, 0, over, constant))
        code += inner
    return [*code, _return(VERDICTS[check[1]])]


def _guard(machine: str) -> list[Instruction]:
    """The terminal and pid 1, in every table of calls that the machine has."""
    program = [_load(DATA_ARCH)]
    for architecture, groups in _GUARDED[machine]:
        block = [_load(DATA_NR)]
        if architecture == AUDIT_ARCH_X86_64:
            block.append((BPF_ALU_AND_K, 0, 0, 0xFFFFFFFF ^ X32_SYSCALL_BIT))
        for numbers, check in zip(groups, _HELD, strict=True):
            code = _check(check)
            for number in numbers:
                block += [(BPF_JEQ_K, 0, len(code), number), *code]
        block.append(_return(SECCOMP_RET_ALLOW))
        program += [(BPF_JEQ_K, 0, len(block), architecture), *block]
    return [*program, _return(SECCOMP_RET_KILL_PROCESS)]


def _pack(program: Sequence[Instruction]) -> bytes:
    return b"".join(
        (code | yes << 16 | no << 24 | k << 32).to_bytes(8, "little")
        for code, yes, no, k in program
    )
