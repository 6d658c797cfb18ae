"""The first program of a container: it drops the image's variables, and becomes the next. Pure.

    enter PROGRAM ARGUMENT…

An image has variables of its own (`ENV`), and a loader, a libc and a libcrypto do what variables
say before any of our code can run: LD_PRELOAD, LD_AUDIT, GCONV_PATH, OPENSSL_CONF, and more with
each version. So what reads them first must need neither loader nor libc. It is a static program of
a few hundred bytes: it keeps what begins with `terms.PREFIX`, adds `terms.VARIABLES`, and executes.
"""

from __future__ import annotations

from . import terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# ELF: machine, where it is loaded, and the sizes of its headers.
MACHINES = {"x86_64": 62, "aarch64": 183}
BASE, HEADER, SEGMENT = 0x400000, 64, 56
START = HEADER + 2 * SEGMENT
# PT_LOAD to be read and executed, aligned for the largest pages; PT_GNU_STACK: not executable.
LOAD, STACK, READ_EXECUTE, READ_WRITE, ALIGN = 1, 0x6474E551, 5, 6, 1 << 16
EXECUTABLE, CURRENT = 2, 1

# The table behind the code: the prefix, addresses of variables, 0. A variable that is shorter than
# the prefix is compared with what follows it: the kernel ends the strings with eight bytes of zero.
# What is added may lie over the auxiliary vector, which nobody needs any more.
CODE = {
    "x86_64": (
        "488b1c24"  # mov rbx, [rsp]             argc
        "488d742408"  # lea rsi, [rsp+8]         argv
        "488d54de08"  # lea rdx, [rsi+rbx*8+8]   envp
        "4889d1"  # mov rcx, rdx                 read here
        "4889d7"  # mov rdi, rdx                 write here
        "488d1d4d000000"  # lea rbx, [rip+table]
        "4c8b03"  # mov r8, [rbx]                the prefix
        "488b01"  # 1: mov rax, [rcx]
        "4883c108"  # add rcx, 8
        "4885c0"  # test rax, rax
        "740e"  # jz 2f
        "4c3b00"  # cmp r8, [rax]
        "75ef"  # jne 1b
        "488907"  # mov [rdi], rax
        "4883c708"  # add rdi, 8
        "ebe6"  # jmp 1b
        "4883c308"  # 2: add rbx, 8
        "488b03"  # mov rax, [rbx]
        "488907"  # mov [rdi], rax
        "4883c708"  # add rdi, 8
        "4885c0"  # test rax, rax
        "75ed"  # jnz 2b
        "4883c608"  # add rsi, 8
        "488b3e"  # mov rdi, [rsi]
        "b83b0000000f05"  # mov eax, 59; syscall       execve
        "bf7f000000"  # mov edi, 127
        "b83c0000000f05"  # mov eax, 60; syscall       exit
        "0f1f00"  # nop
    ),
    "aarch64": (
        "e90340f9"  # ldr x9, [sp]
        "e1230091"  # add x1, sp, #8
        "220c098b"  # add x2, x1, x9, lsl #3
        "42200091"  # add x2, x2, #8
        "ea0302aa"  # mov x10, x2
        "eb0302aa"  # mov x11, x2
        "8c020010"  # adr x12, table
        "8d8540f8"  # ldr x13, [x12], #8
        "438540f8"  # 1: ldr x3, [x10], #8
        "c30000b4"  # cbz x3, 2f
        "640040f9"  # ldr x4, [x3]
        "9f000deb"  # cmp x4, x13
        "81ffff54"  # b.ne 1b
        "638500f8"  # str x3, [x11], #8
        "faffff17"  # b 1b
        "838540f8"  # 2: ldr x3, [x12], #8
        "638500f8"  # str x3, [x11], #8
        "c3ffffb5"  # cbnz x3, 2b
        "21200091"  # add x1, x1, #8
        "200040f9"  # ldr x0, [x1]
        "a81b80d2010000d4"  # mov x8, #221; svc #0     execve
        "e00f80d2"  # mov x0, #127
        "a80b80d2010000d4"  # mov x8, #93; svc #0      exit
        "1f2003d5"  # nop
    ),
}


def program(machine: str, variables: Mapping[str, str] = terms.VARIABLES) -> bytes:
    """The file."""
    code = bytes.fromhex(CODE[machine])
    words = [f"{name}={value}".encode("ascii") + b"\0" for name, value in variables.items()]
    at = BASE + START + len(code) + 8 * (len(words) + 2)
    table = [terms.PREFIX.encode("ascii")]
    for word in words:
        table.append(_whole(at, 8))
        at += len(word)
    behind = b"".join((code, *table, bytes(8), *words))
    return b"".join((_header(machine), _segments(START + len(behind)), behind))


def _whole(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def _header(machine: str) -> bytes:
    ident = b"\x7fELF" + bytes((2, 1, CURRENT)) + bytes(9)
    sizes = (HEADER, SEGMENT, 2, 0, 0, 0)
    return b"".join((
        ident, _whole(EXECUTABLE, 2), _whole(MACHINES[machine], 2), _whole(CURRENT, 4),
        _whole(BASE + START, 8), _whole(HEADER, 8), bytes(8), bytes(4),
        *(_whole(size, 2) for size in sizes),
    ))  # fmt: skip


def _segments(size: int) -> bytes:
    load = (_whole(LOAD, 4), _whole(READ_EXECUTE, 4), bytes(8), _whole(BASE, 8) * 2,
            _whole(size, 8) * 2, _whole(ALIGN, 8))  # fmt: skip
    stack = (_whole(STACK, 4), _whole(READ_WRITE, 4), bytes(40), _whole(16, 8))
    return b"".join((*load, *stack))
