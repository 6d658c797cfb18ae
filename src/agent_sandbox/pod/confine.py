"""What a command gives up before it runs: system calls, reach to other processes, large files.

All of it is prepared once. Between fork and exec there are a few system calls and nothing else.
"""

from __future__ import annotations

import _ctypes
import os

from ..launch import landlock, seccomp, surface, syscalls
from ..policy.owned import PARTS
from . import mounts, terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..launch.seccomp import Instruction

    # Where in the arguments, how, with what to compare, and the verdict when that holds; in their
    # order. Then the verdict when none does.
    Rule = tuple[tuple[tuple[int, int, int, str], ...], str]

PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
# landlock_add_rule(2), its one kind of rule, and the first version that knows what: to move between
# directories, to cut off, and to keep signals and abstract sockets apart.
SYS_landlock_add_rule, PATH_BENEATH = 445, 1
SCOPES = landlock.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | landlock.LANDLOCK_SCOPE_SIGNAL
REFER_ABI, TRUNCATE_ABI, SCOPE_ABI = 2, 3, landlock.SCOPE_ABI
# LANDLOCK_ACCESS_FS_WRITE_FILE, …_REMOVE_DIR to …_MAKE_SYM, …_REFER, …_TRUNCATE; character and
# block devices, which nobody may make anywhere.
WRITE_FILE, CHANGE, REFER, TRUNCATE = 1 << 1, 0b1111111110000, 1 << 13, 1 << 14
DEVICES = 1 << 6 | 1 << 11
# Where a command may write: as with an inner layer. An image's VOLUME is a directory on the node
# that no limit counts; and by /proc a command could have the agent killed for memory in its place.
WRITABLE = (terms.PLACE, *PARTS, "/dev")
# Without a pid namespace there are processes beside the command's own that it must not reach: the
# agent, and what an operator or the service starts through the engine. Those have a network. The
# kernel asks for the same user alone. A filter cannot tell a command's own processes from others,
# so whatever acts on a process by its number acts on the caller (0) and on nobody else; signals
# alone, without which no shell could end a job, go to all but the agent.
IS, IS_NOT = range(2)
HIGH = 4
EVERYBODY = 0xFFFFFFFF
PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1
F_SETSIG = 10


def _own(argument: int) -> Rule:
    return ((8 * argument, IS_NOT, 0, "EPERM"),), "ALLOW"


def _not_init(*arguments: int) -> Rule:
    return tuple((8 * number, IS, 1, "EPERM") for number in arguments), "ALLOW"


_NEVER: Rule = (), "EPERM"
APART: dict[str, Rule] = {
    "ptrace": _NEVER, "process_vm_readv": _NEVER, "process_vm_writev": _NEVER, "kcmp": _NEVER,
    "process_madvise": _NEVER, "process_mrelease": _NEVER,
    "move_pages": _own(0), "migrate_pages": _own(0), "get_robust_list": _own(0),
    # Limits of others may be read, not set (both halves of the address of the new ones): the agent
    # could be kept from opening /proc, and so from finding whom to end.
    "prlimit64": (
        ((0, IS, 0, "ALLOW"), (16, IS_NOT, 0, "EPERM"), (16 + HIGH, IS_NOT, 0, "EPERM")), "ALLOW",
    ),
    # An idle agent on a processor that others fill never runs: neither a kill nor a lease is kept,
    # and a SIGKILL of the engine waits until it would run.
    "sched_setscheduler": _own(0), "sched_setparam": _own(0), "sched_setattr": _own(0),
    "sched_setaffinity": _own(0),
    "setpriority": (
        ((0, IS_NOT, PRIO_PROCESS, "EPERM"), (8, IS_NOT, 0, "EPERM")), "ALLOW",
    ),
    "ioprio_set": (
        ((0, IS_NOT, IOPRIO_WHO_PROCESS, "EPERM"), (8, IS_NOT, 0, "EPERM")), "ALLOW",
    ),
    # A signal whose sender is not known (its queue was full) looks like one of the engine.
    "kill": (((0, IS, 1, "EPERM"), (0, IS, EVERYBODY, "EPERM")), "ALLOW"),
    "tkill": _not_init(0), "tgkill": _not_init(0, 1), "rt_sigqueueinfo": _not_init(0),
    "rt_tgsigqueueinfo": _not_init(0, 1),
    # It takes any open /proc/PID; whoever has it can do without.
    "pidfd_send_signal": ((), "ENOSYS"),
    # The kernel sends it for others, to whomever F_SETOWN says.
    "fcntl": (((8, IS, F_SETSIG, "EPERM"),), "ALLOW"),
}  # fmt: skip
# A path in the file system leads nowhere else, and asking about interfaces sends nothing.
NO_NETWORK: dict[str, Rule] = {
    "socket": (
        ((0, IS, seccomp.AF_UNIX, "ALLOW"), (0, IS, seccomp.AF_NETLINK, "ALLOW")), "EAFNOSUPPORT",
    ),
}  # fmt: skip


def hide(machine: str) -> None:
    """Close this process to others of its user: memory, variables, descriptors (proc(5))."""
    syscalls.syscall(syscalls.SYS_PRCTL[machine], PR_SET_DUMPABLE, 0, 0, 0, 0)


def stay_open(machine: str) -> bytes:
    """Instructions before a filter: a command's prctl(PR_SET_DUMPABLE) is answered, not done. Pure.

    Who cannot be looked into cannot be asked for the files that it holds, and is taken for one that
    hides them (`held`). Programs that keep keys close themselves like that; nobody else of their
    user is in the sandbox.
    """
    program = (
        (seccomp.BPF_LD_W_ABS, 0, 0, seccomp.DATA_NR),
        (seccomp.BPF_JEQ_K, 0, 3, surface.numbers(machine)["prctl"]),
        (seccomp.BPF_LD_W_ABS, 0, 0, seccomp.DATA_ARGS),
        (seccomp.BPF_JEQ_K, 0, 1, PR_SET_DUMPABLE),
        (seccomp.BPF_RET_K, 0, 0, seccomp.SECCOMP_RET_ERRNO),
    )
    return _assembled(program)


def extra_filter(machine: str, *, network: bool) -> bytes:
    """What has to be refused where no namespace keeps it. Comes before the usual filter. Pure."""
    numbers = surface.numbers(machine)
    program: list[Instruction] = [(seccomp.BPF_LD_W_ABS, 0, 0, seccomp.DATA_NR)]
    for name, rule in {**APART, **({} if network else NO_NETWORK)}.items():
        body = _ruled(rule)
        program += [(seccomp.BPF_JEQ_K, 0, len(body), numbers[name]), *body]
    program.append(_returned("ALLOW"))
    return _assembled(program)


def _assembled(program: Iterable[Instruction]) -> bytes:
    return b"".join(
        (code | yes << 16 | no << 24 | k << 32).to_bytes(8, "little")
        for code, yes, no, k in program
    )


def _ruled(rule: Rule) -> list[Instruction]:
    """Tests one after the other; by the low 32 bits, which are all that the kernel takes."""
    found: list[Instruction] = []
    for offset, operation, constant, verdict in rule[0]:
        jumps = (0, 1) if operation == IS else (1, 0)
        found += [
            (seccomp.BPF_LD_W_ABS, 0, 0, seccomp.DATA_ARGS + offset),
            (seccomp.BPF_JEQ_K, *jumps, constant),
            _returned(verdict),
        ]
    return [*found, _returned(rule[1])]


def _returned(verdict: str) -> Instruction:
    return (seccomp.BPF_RET_K, 0, 0, seccomp.VERDICTS[verdict])


class Filter:
    """A filter in memory, ready for the kernel."""

    def __init__(self, program: bytes) -> None:
        kind = type("_Program", (_ctypes.Array,), {"_type_": _Byte, "_length_": len(program)})
        self._held = kind.from_buffer_copy(program)  # type: ignore[attr-defined]
        address = _ctypes.addressof(self._held)
        # struct sock_fprog: the number of instructions, and where they are.
        self._header = (len(program) // 8).to_bytes(8, "little") + address.to_bytes(8, "little")
        self.program = program

    def load(self, machine: str) -> None:
        """Install it for this process. Needs no_new_privs."""
        number = syscalls.SYS_PRCTL[machine]
        syscalls.syscall(number, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._header, 0, 0)


class _Byte(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001
    _type_ = "c"


class Domain:
    """Landlock, prepared: where files may be changed, and whom signals reach.

    A domain that handles any file right also keeps its processes from tracing others, through
    /proc/PID/mem too (5.13). The first version has no right to move files to another directory:
    there that fails as between two file systems.
    """

    def __init__(self, places: tuple[str, ...] = WRITABLE, abi: int | None = None) -> None:
        self.abi = landlock.abi() if abi is None else abi
        self._ruleset = -1
        if self.abi <= 0:
            return
        later = ((REFER_ABI, REFER), (TRUNCATE_ABI, TRUNCATE))
        rights = WRITE_FILE | CHANGE | sum(one for since, one in later if self.abi >= since)
        # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped.
        attributes = rights.to_bytes(8, "little")
        if self.abi >= SCOPE_ABI:
            attributes += bytes(8) + SCOPES.to_bytes(8, "little")
        create = syscalls.SYS_landlock_create_ruleset
        self._ruleset = syscalls.syscall(create, attributes, len(attributes), 0)
        for place in places:
            self._allow(place, rights & ~DEVICES)

    def _allow(self, place: str, rights: int) -> None:
        try:
            fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            # struct landlock_path_beneath_attr: allowed_access, parent_fd.
            rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
            syscalls.syscall(SYS_landlock_add_rule, self._ruleset, PATH_BENEATH, rule, 0)
        finally:
            os.close(fd)

    def enter(self) -> None:
        """For the calling process, and what it starts. Needs no_new_privs."""
        if self._ruleset >= 0:
            syscalls.syscall(syscalls.SYS_landlock_restrict_self, self._ruleset, 0)


class Bounds:
    """Everything that a command without an inner layer gives up, and what holds with one."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self.usual = Filter(stay_open(machine) + seccomp.build(machine))
        self._apart = {
            network: Filter(extra_filter(machine, network=network)) for network in (False, True)
        }
        self._domain = Domain()
        # Without Landlock a command without an inner layer could fill these, and nobody counts it.
        self.unkept = [] if self._domain.abi > 0 else mounts.writable(WRITABLE)

    @property
    def kept_apart(self) -> str:
        """How far the kernel keeps commands from processes that are not theirs (`terms`)."""
        if self._domain.abi >= SCOPE_ABI:
            return "landlock"
        return "landlock-trace" if self._domain.abi > 0 else "pod"

    def scope(self) -> None:
        """For a command with an inner layer, which must still be able to mount."""
        landlock.restrict(self._machine)

    def apply(self, *, network: bool) -> None:
        """For a command without one: the last thing before it is executed."""
        self._domain.enter()
        self._apart[network].load(self._machine)
        self.usual.load(self._machine)
