"""The seccomp filter, run by a small interpreter instead of the kernel."""

from __future__ import annotations

import struct

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM = 0x00050001
X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
ARCHITECTURE = {"x86_64": X86_64, "aarch64": AARCH64}
IOCTL = {"x86_64": 16, "aarch64": 29}
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
MACHINES = sorted(ARCHITECTURE)


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
        elif operation == 0x15:  # jump if equal
            at += yes if accumulator == k else no
        elif operation == 0x35:  # jump if greater or equal
            at += yes if accumulator >= k else no
        elif operation == 0x06:  # return
            return int(k)
        else:
            pytest.fail(f"instruction {operation:#x} is not expected")


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says about a system call (struct seccomp_data)."""
    padded = (*arguments, *([0] * (6 - len(arguments))))
    arch = ARCHITECTURE[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, arch, 0xFFFF_FFFF_FFFF, *padded)
    return run(seccomp.build(machine), data)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("request_", [TIOCSTI, TIOCLINUX], ids=["TIOCSTI", "TIOCLINUX"])
@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFF_FFFF << 32, 1 << 63])
@pytest.mark.parametrize("fd", [0, 255])
def test_cannot_type_into_the_terminal(machine: str, request_: int, high: int, fd: int) -> None:
    """Also with bits that the kernel ignores in the request (CVE-2019-10063; invariant 6)."""
    assert verdict(machine, IOCTL[machine], fd, request_ | high, 0) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "request_",
    [0x5401, 0x5402, 0x5403, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414, 0x541B, 0x541D, 0, 2**64 - 1],
    ids=hex,
)
def test_can_use_every_other_terminal_request(machine: str, request_: int) -> None:
    """Modes, foreground group, window size: job control works."""
    assert verdict(machine, IOCTL[machine], 0, request_) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_can_make_every_other_system_call(machine: str) -> None:
    """Whatever its arguments look like."""
    numbers = [n for n in range(600) if n != IOCTL[machine]]
    assert {verdict(machine, n, TIOCSTI, TIOCSTI) for n in numbers} == {ALLOW}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("foreign", [I386, ARM, X86_64, AARCH64, 0])
def test_cannot_use_a_foreign_architecture(machine: str, foreign: int) -> None:
    """It numbers its calls anew, so every call of it is fatal."""
    if foreign == ARCHITECTURE[machine]:
        pytest.skip("that is this machine's own")
    for number in (0, 1, 16, 29, 54):
        assert verdict(machine, number, architecture=foreign) == KILL


@pytest.mark.parametrize("number", [0, 16, 514, 0x3FFFFFFF])
def test_cannot_use_the_x32_interface(number: int) -> None:
    """Its ioctl has another number on the same architecture."""
    assert verdict("x86_64", number | 0x40000000, 0, TIOCSTI) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_is_well_formed(machine: str) -> None:
    """Whole instructions, every jump inside, a return at the end."""
    program = seccomp.build(machine)
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    assert len(program) == 8 * len(code)
    assert code[-1][0] == 0x06
    for at, (operation, yes, no, _) in enumerate(code):
        if operation in (0x15, 0x35):
            assert at + 1 + max(yes, no) < len(code)


@pytest.mark.parametrize("machine", ["riscv64", "i686", "armv7l", ""])
def test_an_unknown_machine_is_an_error(machine: str) -> None:
    """A protection that cannot be applied stops the start (invariant 1)."""
    with pytest.raises(HostError) as caught:
        seccomp.build(machine)
    assert caught.value.code == "unsupported-machine"
    assert "x86_64" in caught.value.hint
