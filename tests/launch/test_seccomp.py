"""The seccomp filter, run by a small interpreter instead of the kernel, for both machines."""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import seccomp, surface
from agent_sandbox.policy import settings
from conftest import must_work

ALLOW, KILL = 0x7FFF0000, 0x80000000
ERRORS = {"EPERM": 1, "ENOSYS": 38, "EPROTONOSUPPORT": 93, "EAFNOSUPPORT": 97}
EPERM, ENOSYS, EPROTONOSUPPORT, EAFNOSUPPORT = (0x00050000 | n for n in ERRORS.values())
PLAIN = {name: 0x00050000 | number for name, number in ERRORS.items()} | {"ALLOW": ALLOW}
X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
ARCHITECTURE = {"x86_64": X86_64, "aarch64": AARCH64}
COMPAT = {"x86_64": I386, "aarch64": ARM}
MACHINES = sorted(ARCHITECTURE)
FILTERED = ("default", "strict")
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
# Upper halves that the kernel does not look at where it takes an int.
HIGH = (0, 1 << 32, 0xFFFF_FFFF << 32, 1 << 63)
GARBAGE = 0xDEAD_BEEF << 32
# Linux 6.2 to 6.18, which the headers of a stable distribution do not know yet.
YOUNG = (
    "cachestat", "fchmodat2", "map_shadow_stack", "futex_wake", "futex_wait", "futex_requeue",
    "statmount", "listmount", "lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules", "mseal",
    "setxattrat", "getxattrat", "listxattrat", "removexattrat", "open_tree_attr", "file_getattr",
    "file_setattr",
)  # fmt: skip
FIRST_YOUNG = 451
ABSENT = -1


def run(program: bytes, data: bytes) -> int:
    """Interpret classic BPF as the kernel's seccomp does (linux/filter.h)."""
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        operation, yes, no, k = code[at]
        at += 1
        if operation == 0x20:  # load a word of the data
            assert k % 4 == 0
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x54:  # and
            accumulator &= k
        elif operation == 0x05:  # jump
            at += k
        elif operation == 0x15:  # jump if equal
            at += yes if accumulator == k else no
        elif operation == 0x35:  # jump if greater or equal
            at += yes if accumulator >= k else no
        elif operation == 0x45:  # jump if any bit is set
            at += yes if accumulator & k else no
        elif operation == 0x06:  # return
            return int(k)
        else:
            pytest.fail(f"instruction {operation:#x} is not expected")


@cache
def program(machine: str, level: str) -> bytes:
    return seccomp.build(machine, level)


def judge(
    machine: str, level: str, number: int, *arguments: int, architecture: int | None = None
) -> int:
    """What the filter says about a system call (struct seccomp_data)."""
    padded = (*arguments, *([0] * (6 - len(arguments))))
    arch = ARCHITECTURE[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, arch, 0xFFFF_FFFF_FFFF, *padded)
    return run(program(machine, level), data)


@cache
def numbers(machine: str) -> dict[str, int]:
    return surface.numbers(machine)


@cache
def verdicts(level: str) -> dict[str, str]:
    """The table's word on every call, by its name."""
    found = dict.fromkeys(surface.ALLOWED.replace(",", "").split()[::3], "ALLOW")
    for name, _, _, both, _ in surface.judged():
        usual, _, strict = both.partition("/")
        found[name] = (level == "strict" and strict) or usual
    return found


def call(machine: str, level: str, name: str, *arguments: int) -> int:
    """What the filter says about a call by its name; ABSENT when the machine has no such call."""
    number = numbers(machine).get(name)
    return ABSENT if number is None else judge(machine, level, number, *arguments)


# --- The table ----------------------------------------------------------------------------------


def headers(machine: str) -> dict[str, int]:
    """The calls that the kernel's own headers know (linux-libc-dev)."""
    # aarch64 has the generic table, which the package brings on every machine.
    names = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
    path = Path("/usr/include") / names[machine]
    if machine == "x86_64" and not path.exists():
        path = Path("/usr/include/asm/unistd_64.h")
    must_work(path.exists(), f"needs {path} (Debian: linux-libc-dev)")
    text = path.read_text()
    found = {
        name: int(number)
        for name, number in re.findall(r"^#define __NR_(\w+)\s+(\d+)$", text, re.MULTILINE)
    }
    # Numbers that 32-bit machines know by another name: only the plain one is ours.
    shared = dict(re.findall(r"^#define __NR3264_(\w+)\s+(\d+)$", text, re.MULTILINE))
    named = re.findall(r"^#define __NR_(\w+)\s+__NR3264_(\w+)$", text, re.MULTILINE)
    found |= {
        name: int(shared[other])
        for name, other in named
        if other in shared and name in (other, f"new{other}")
    }
    others = {*range(403, 424)}  # calls with 64-bit times for 32-bit machines
    markers = ("arch_specific_syscall", "syscalls")
    return {n: k for n, k in found.items() if k not in others and n not in markers}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_table_has_the_kernel_s_numbers(machine: str) -> None:
    """Compared with the headers; the calls that are younger than those follow one another."""
    known, ours = headers(machine), numbers(machine)
    assert len(known) > 280
    assert {n: known[n] for n in known if n in ours} == {n: ours[n] for n in known if n in ours}
    assert [ours[name] for name in YOUNG] == [*range(FIRST_YOUNG, FIRST_YOUNG + len(YOUNG))]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_of_the_kernel_has_been_looked_at(machine: str) -> None:
    """None is open because it was forgotten, and the table names none that does not exist."""
    known, ours = headers(machine), numbers(machine)
    latest = max(ours.values())
    assert {k for k in known.values() if k <= latest} - set(ours.values()) == set()
    assert set(ours) - set(known) <= {*YOUNG, "uretprobe", "uprobe"}
    assert len(set(ours.values())) == len(ours)


def test_every_judged_call_has_a_reason_and_no_call_stands_twice() -> None:
    """A row can be argued with; one that says nothing is not there."""
    rows = [*surface.judged()]
    names = [*surface.ALLOWED.replace(",", "").split()[::3], *(row[0] for row in rows)]
    assert len(set(names)) == len(names)
    assert [row for row in rows if len(row) != 5 or row[3] == "ALLOW"] == []


def test_strict_is_never_wider_than_default() -> None:
    """A project's own file may choose it without trust."""
    usual, strict = verdicts("default"), verdicts("strict")
    for name in usual:
        if usual[name] != strict[name]:
            assert usual[name] == "ALLOW" or usual[name] in seccomp.CHECKS, name
            assert strict[name] != "ALLOW", name


def test_the_levels_are_those_of_the_settings() -> None:
    """From the tightest to the widest."""
    assert settings.BY_KEY["seccomp"].choices == seccomp.LEVELS


# --- Every row ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
def test_each_plain_row_is_what_the_filter_says(machine: str, level: str) -> None:
    """Whatever the arguments are."""
    table = verdicts(level)
    assert set(table.values()) <= {*PLAIN, *seccomp.CHECKS}
    plain = {name: verdict for name, verdict in table.items() if verdict in PLAIN}
    for argument in (0, 1, TIOCSTI, 0x7FFF_FFFF, 2**32 - 1, 2**64 - 1):
        got = {name: call(machine, level, name, *[argument] * 6) for name in plain}
        assert got == {
            name: PLAIN[verdict] if name in numbers(machine) else ABSENT
            for name, verdict in plain.items()
        }


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
def test_cannot_make_a_call_that_nobody_has_judged(machine: str, level: str) -> None:
    """Gaps, numbers beyond the table, and those that x32 has without its bit: ENOSYS."""
    known = set(numbers(machine).values())
    strangers = [n for n in range(1200) if n not in known] + [0x3FFF_FFFF]
    assert {judge(machine, level, n, *[1] * 6) for n in strangers} == {ENOSYS}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
def test_cannot_use_a_foreign_architecture(machine: str, level: str) -> None:
    """It numbers its calls anew, so every call of it is fatal."""
    for foreign in {I386, ARM, X86_64, AARCH64, 0} - {ARCHITECTURE[machine]}:
        for number in (0, 1, 16, 29, 54, 2**32 - 1):
            assert judge(machine, level, number, architecture=foreign) == KILL


@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.parametrize("number", [0, 16, 514, 521, 0x3FFFFFFF])
def test_cannot_use_the_x32_interface(level: str, number: int) -> None:
    """Its ioctl has another number on the same architecture."""
    assert judge("x86_64", level, number | 0x40000000, 0, TIOCSTI) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
def test_a_tracer_can_have_a_call_skipped(machine: str, level: str) -> None:
    """It writes -1 for the number, and the kernel asks the filter about that."""
    assert judge(machine, level, 0xFFFF_FFFF) == ALLOW
    assert judge(machine, level, 0xFFFF_FFFE) in (KILL, ENOSYS)


# --- Arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", ["strict", "default", "off"])
@pytest.mark.parametrize("request_", [TIOCSTI, TIOCLINUX], ids=["TIOCSTI", "TIOCLINUX"])
@pytest.mark.parametrize("high", HIGH)
def test_cannot_type_into_the_terminal(machine: str, level: str, request_: int, high: int) -> None:
    """Also with bits that the kernel ignores in the request (CVE-2019-10063; invariant 6)."""
    for fd in (0, 255):
        assert call(machine, level, "ioctl", fd, request_ | high, 0) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_can_use_every_other_terminal_request(machine: str) -> None:
    """Modes, foreground group, window size: job control works. A line discipline is no part."""
    usual = (0x5401, 0x5402, 0x5403, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414, 0x541B, 0x541D)
    for request in (*usual, 0, 2**64 - 1):
        assert call(machine, "strict", "ioctl", 0, request) == ALLOW
    assert call(machine, "default", "ioctl", 0, TIOCSETD | GARBAGE) == EPERM


NAMESPACES = {
    "mnt": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000,
    "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip
# pthread_create, fork, posix_spawn in glibc, and Go with a pidfd.
THREAD, FORK, SPAWN, GO = 0x3D0F00, 0x01200011, 0x4111, 0x1000 | 0x4100 | 17


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.parametrize("flag", NAMESPACES.values(), ids=NAMESPACES)
def test_cannot_make_a_namespace(machine: str, level: str, flag: int) -> None:
    """By clone or unshare, alone or among other flags; clone3 is not there at all."""
    for more in (0, THREAD, 17, GARBAGE):
        assert call(machine, level, "clone", flag | more) == EPERM
        assert call(machine, level, "unshare", flag | more) == EPERM
    assert call(machine, level, "clone3", 0, 88) == ENOSYS
    assert call(machine, level, "setns", 3, flag) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_can_make_processes_and_threads(machine: str) -> None:
    """CLONE_NEWTIME is no flag of clone: its bit belongs to the signal at the child's end."""
    for flags in (THREAD, FORK, SPAWN, GO, 0x80 | 17, GARBAGE | FORK):
        assert call(machine, "strict", "clone", flags) == ALLOW
    for flags in (0, 0x400, 0x200 | 0x400):  # CLONE_FILES, CLONE_FS
        assert call(machine, "strict", "unshare", flags) == ALLOW
    assert call(machine, "default", "unshare", 0x80) == EPERM


ALLOWED_SOCKETS = [
    (1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 1, 6), (2, 2, 17), (2, 2, 1), (10, 1, 6), (10, 2, 0),
    (10, 2, 58), (16, 3, 0), (16, 2, 0),
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", HIGH)
def test_can_use_unix_and_internet_sockets_and_ask_for_routes(machine: str, high: int) -> None:
    """Whatever is in the upper half of an argument."""
    for family, kind, protocol in ALLOWED_SOCKETS:
        for flags in (0, 0x80800):  # SOCK_CLOEXEC, SOCK_NONBLOCK
            words = (family | high, kind | flags | high, protocol | high)
            assert call(machine, "default", "socket", *words) == ALLOW
            strict = EAFNOSUPPORT if family == 1 else ALLOW
            assert call(machine, "strict", "socket", *words) == strict


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.parametrize("high", HIGH)
def test_cannot_use_other_families(machine: str, level: str, high: int) -> None:
    """vsock, packet, alg, bluetooth, …; netlink but for routes; internet protocols with modules."""
    for family in {*range(60), 2**31, 2**32 - 1} - {1, 2, 10, 16}:
        assert call(machine, level, "socket", family | high, 1, 0) == EAFNOSUPPORT
    for protocol in (*range(1, 32), 2**32 - 1):
        assert call(machine, level, "socket", 16, 3, protocol | high) == EAFNOSUPPORT
    for protocol in (33, 115, 132, 136, 255, 256, 262, 2**32 - 1):
        for family in (2, 10):
            got = call(machine, level, "socket", family, 1, protocol | high)
            assert got == EPROTONOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_pairs_are_unix_and_in_strict_connected(machine: str) -> None:
    """A pair of datagram sockets can be connected anew, to any path."""
    stream, datagram, raw, packets = 1, 2, 3, 5
    for flags in (0, 0x800, 0x80000, 0x80800, GARBAGE):
        for kind in (stream, datagram, raw, packets):
            assert call(machine, "default", "socketpair", 1, kind | flags, 0) == ALLOW
        for kind in (stream, packets):
            assert call(machine, "strict", "socketpair", 1, kind | flags, 0) == ALLOW
        for kind in {*range(16)} - {stream, packets}:
            assert call(machine, "strict", "socketpair", 1, kind | flags, 0) == EPERM
    for level in FILTERED:
        for family in {*range(60)} - {1}:
            assert call(machine, level, "socketpair", family, 1, 0) == EAFNOSUPPORT


# Calls with a mode, and its place.
MODES = {"chmod": 1, "fchmod": 1, "creat": 1, "mknod": 1, "fchmodat": 2, "fchmodat2": 2,
         "mknodat": 2}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.parametrize(("name", "place"), MODES.items())
def test_cannot_set_the_set_user_id_bit(machine: str, level: str, name: str, place: int) -> None:
    """S_ISUID alone; the group's bit is left to shared repositories."""
    before = [0xFFFF_FFFF_FFFF_FFFF] * place
    absent = name not in numbers(machine)
    for high in HIGH:
        for mode in (0o4000, 0o4755, 0o104755, 0o7777, 2**32 - 1):
            got = call(machine, level, name, *before, mode | high)
            assert got == (ABSENT if absent else EPERM)
        for mode in (0, 0o755, 0o2755, 0o3777, 0o100644, 0x1000):
            got = call(machine, level, name, *before, mode | high)
            assert got == (ABSENT if absent else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", FILTERED)
@pytest.mark.parametrize(("name", "place"), [("open", 1), ("openat", 2)])
def test_cannot_create_a_set_user_id_file(machine: str, level: str, name: str, place: int) -> None:
    """With O_CREAT or O_TMPFILE; without either the mode is what happens to be in a register."""
    before = [0xFFFF_FFFF_FFFF_FFFF] * place
    absent = name not in numbers(machine)
    creating = (0o100, 0o101 | 0o1000, 0o20200000 | 2, 0o20000000)
    for high in HIGH:
        for flags in creating:
            assert call(machine, level, name, *before, flags | high, 0o4755 | high) == (
                ABSENT if absent else EPERM
            )
            assert call(machine, level, name, *before, flags | high, 0o2644 | high) == (
                ABSENT if absent else ALLOW
            )
        for flags in (0, 1, 2, 0o200000, 0o2000000, 0o10000000):
            assert call(machine, level, name, *before, flags | high, 2**64 - 1) == (
                ABSENT if absent else ALLOW
            )
    assert call(machine, level, "openat2") == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", HIGH)
def test_cannot_reach_the_sandbox_s_first_process(machine: str, high: int) -> None:
    """The kernel takes the low half of a pid, as the filter does; at every level."""
    for level in ("default", "off"):
        for request in (0, 5, 16, 0x4206):
            assert call(machine, level, "ptrace", request, 1 | high) == EPERM
        for name in ("process_vm_readv", "process_vm_writev"):
            assert call(machine, level, name, 1 | high) == EPERM
            assert call(machine, level, name, 2 | high) == ALLOW
        assert call(machine, level, "ptrace", 16, 2 | high) == ALLOW
        assert call(machine, level, "pidfd_getfd", 3, 0) == EPERM
    for name in ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"):
        assert call(machine, "strict", name, 2, 2) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_strict_leaves_the_personality_as_it_is(machine: str) -> None:
    """Asking is allowed."""
    for value in (0, 0xFFFF_FFFF, GARBAGE):
        assert call(machine, "strict", "personality", value) == ALLOW
    for value in (1, 8, 0x0040000, 0x0400000, 0xFFFF_FFFE):
        assert call(machine, "strict", "personality", value) == EPERM
        assert call(machine, "default", "personality", value) == ALLOW


# --- Off ----------------------------------------------------------------------------------------

# ioctl, ptrace, process_vm_readv, process_vm_writev, pidfd_getfd in the table of the 32-bit half.
HALF = {"x86_64": (54, 26, 347, 348, 438), "aarch64": (54, 26, 376, 377, 438)}


@pytest.mark.parametrize("machine", MACHINES)
def test_off_holds_terminal_and_first_process_in_the_32_bit_table(machine: str) -> None:
    """There are no others to hold them at that level."""
    ioctl, ptrace, readv, writev, getfd = HALF[machine]
    foreign = COMPAT[machine]
    assert judge(machine, "off", ioctl, 0, TIOCSTI, architecture=foreign) == EPERM
    assert judge(machine, "off", ioctl, 0, TIOCLINUX, architecture=foreign) == EPERM
    assert judge(machine, "off", ioctl, 0, 0x5413, architecture=foreign) == ALLOW
    assert judge(machine, "off", ptrace, 16, 1, architecture=foreign) == EPERM
    assert judge(machine, "off", ptrace, 16, 2, architecture=foreign) == ALLOW
    assert judge(machine, "off", readv, 1, architecture=foreign) == EPERM
    assert judge(machine, "off", writev, 1, architecture=foreign) == EPERM
    assert judge(machine, "off", getfd, 3, architecture=foreign) == EPERM


@pytest.mark.parametrize("bit", [0, 0x40000000])
def test_off_holds_them_in_the_x32_table(bit: int) -> None:
    """Also by x32's numbers without the bit, which kernels before 5.4 took."""
    for number in (16, 514):
        assert judge("x86_64", "off", number | bit, 0, TIOCSTI) == EPERM
    for number in (101, 521):
        assert judge("x86_64", "off", number | bit, 16, 1) == EPERM
    for number in (310, 311, 539, 540):
        assert judge("x86_64", "off", number | bit, 1) == EPERM
    assert judge("x86_64", "off", 438 | bit, 3) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_off_allows_everything_else(machine: str) -> None:
    """That is what it is for."""
    guarded = {numbers(machine)[n] for n in ("ioctl", "ptrace", "process_vm_readv",
                                             "process_vm_writev", "pidfd_getfd")}  # fmt: skip
    guarded |= {514, 521, 539, 540} if machine == "x86_64" else set()
    rest = [n for n in range(1200) if n not in guarded]
    assert {judge(machine, "off", n, *[1] * 6) for n in rest} == {ALLOW}
    assert judge(machine, "off", 0xFFFF_FFFF) == ALLOW
    for foreign in {I386, ARM, X86_64, AARCH64, 0} - {ARCHITECTURE[machine], COMPAT[machine]}:
        assert judge(machine, "off", 0, architecture=foreign) == KILL


# --- The program --------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("level", ["strict", "default", "off"])
def test_the_program_is_well_formed(machine: str, level: str) -> None:
    """Whole instructions, every jump forward and inside, a return at the end, short enough."""
    built = program(machine, level)
    code = [struct.unpack_from("<HBBI", built, at) for at in range(0, len(built), 8)]
    assert len(built) == 8 * len(code)
    assert len(code) < 512
    assert code[-1][0] == 0x06
    for at, (operation, yes, no, k) in enumerate(code):
        if operation in (0x15, 0x35, 0x45):
            assert at + 1 + max(yes, no) < len(code)
        if operation == 0x05:
            assert at + 1 + k < len(code)


def test_without_a_level_the_default_is_built() -> None:
    """As doctor does."""
    assert seccomp.build("x86_64") == seccomp.build("x86_64", "default")


@pytest.mark.parametrize("machine", ["riscv64", "i686", "armv7l", ""])
@pytest.mark.parametrize("level", ["strict", "default", "off"])
def test_an_unknown_machine_is_an_error(machine: str, level: str) -> None:
    """A protection that cannot be applied stops the start (invariant 1)."""
    with pytest.raises(HostError) as caught:
        seccomp.build(machine, level)
    assert caught.value.code == "unsupported-machine"
    assert "x86_64" in caught.value.hint
