"""The seccomp filter as BPF bytes for bwrap's --seccomp. Pure.

It exists because the sandbox keeps the caller's terminal for job control: without it a process
inside could type into that terminal (TIOCSTI) or paste through the console (TIOCLINUX). Sockets to
the hypervisor (vsock) are refused as well.
"""

from __future__ import annotations

from ..errors import HostError

# From linux/audit.h, linux/filter.h and linux/seccomp.h, by their kernel names.
AUDIT_ARCH_X86_64 = 0xC000003E
AUDIT_ARCH_AARCH64 = 0xC00000B7
X32_SYSCALL_BIT = 0x40000000
BPF_LD_W_ABS = 0x20
BPF_JEQ_K = 0x15
BPF_JGE_K = 0x35
BPF_RET_K = 0x06
SECCOMP_RET_KILL_PROCESS = 0x80000000
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
EPERM = 1
TIOCSTI = 0x5412
TIOCLINUX = 0x541C
EAFNOSUPPORT = 97
AF_VSOCK = 40
# Offsets in struct seccomp_data; arguments are 64 bits wide, low half first on these machines.
DATA_NR = 0
DATA_ARCH = 4
DATA_ARG0_LOW = 16
DATA_ARG1_LOW = 24

# machine → (audit architecture, number of ioctl, number of socket, has x32)
MACHINES: dict[str, tuple[int, int, int, bool]] = {
    "x86_64": (AUDIT_ARCH_X86_64, 16, 41, True),
    "aarch64": (AUDIT_ARCH_AARCH64, 29, 198, False),
}


def _instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return code.to_bytes(2, "little") + bytes((yes, no)) + k.to_bytes(4, "little")


def build(machine: str) -> bytes:
    """The filter for a machine; foreign architectures are killed, since they number calls anew."""
    if machine not in MACHINES:
        raise HostError(
            f"cannot build a seccomp filter for '{machine}'",
            hint="supported machines: " + ", ".join(MACHINES),
            code="unsupported-machine",
        )
    architecture, ioctl, socket, has_x32 = MACHINES[machine]
    program = [
        _instruction(BPF_LD_W_ABS, DATA_ARCH),
        _instruction(BPF_JEQ_K, architecture, yes=1),
        _instruction(BPF_RET_K, SECCOMP_RET_KILL_PROCESS),
        _instruction(BPF_LD_W_ABS, DATA_NR),
    ]
    if has_x32:
        program += [
            _instruction(BPF_JGE_K, X32_SYSCALL_BIT, no=1),
            _instruction(BPF_RET_K, SECCOMP_RET_KILL_PROCESS),
        ]
    program += [
        _instruction(BPF_JEQ_K, ioctl, no=5),
        # The kernel itself looks at the low 32 bits of the request only (CVE-2019-10063): a
        # comparison of all 64 would let 0x100005412 through.
        _instruction(BPF_LD_W_ABS, DATA_ARG1_LOW),
        _instruction(BPF_JEQ_K, TIOCSTI, yes=1),
        _instruction(BPF_JEQ_K, TIOCLINUX, no=1),
        _instruction(BPF_RET_K, SECCOMP_RET_ERRNO | EPERM),
        _instruction(BPF_RET_K, SECCOMP_RET_ALLOW),
        # A network namespace does not hold vsock: it reaches the hypervisor's side from anywhere.
        _instruction(BPF_JEQ_K, socket, no=3),
        _instruction(BPF_LD_W_ABS, DATA_ARG0_LOW),
        _instruction(BPF_JEQ_K, AF_VSOCK, no=1),
        _instruction(BPF_RET_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
        _instruction(BPF_RET_K, SECCOMP_RET_ALLOW),
    ]
    return b"".join(program)
