"""System calls that the standard library does not wrap, without the cost of importing ctypes.

`_ctypes` is the C half of ctypes; the Python half costs 3–5 ms at every start.
"""

from __future__ import annotations

import _ctypes
import os

# Same numbers on every architecture: calls added since 5.1 share one table.
SYS_landlock_create_ruleset = 444
SYS_landlock_restrict_self = 446
# machine → SYS_prctl
SYS_PRCTL = {"x86_64": 157, "aarch64": 167}
PR_SET_NO_NEW_PRIVS = 38


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001
    _type_ = "l"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


# None opens the program itself, which has the C library in it.
_library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
_syscall = _Function(_ctypes.dlsym(_library, "syscall"))


def syscall(number: int, *arguments: int | bytes) -> int:
    """Make a system call; errors are OSError as everywhere else."""
    passed = [a if isinstance(a, bytes) else _Long(a) for a in arguments]
    result: int = _syscall(_Long(number), *passed)
    if result == -1:
        code = _ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def no_new_privileges(machine: str) -> None:
    """Forbid this thread and its children to gain rights by exec (needed for Landlock)."""
    syscall(SYS_PRCTL[machine], PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
