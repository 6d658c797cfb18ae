"""System calls that the standard library does not wrap, without the cost of importing ctypes.

`_ctypes` is the C half of ctypes; the Python half costs 3–5 ms at every start.
"""

from __future__ import annotations

import _ctypes
import errno
import os

# Same numbers on every architecture: calls added since 5.1 share one table.
SYS_landlock_create_ruleset = 444
SYS_landlock_restrict_self = 446
# machine → SYS_prctl
SYS_PRCTL = {"x86_64": 157, "aarch64": 167}
# machine → SYS_keyctl
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
# machine → SYS_unshare
SYS_UNSHARE = {"x86_64": 272, "aarch64": 97}
# machine → SYS_kcmp
SYS_KCMP = {"x86_64": 312, "aarch64": 272}
KCMP_FILES = 2
CLONE_FS = 0x200
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
KEYCTL_JOIN_SESSION_KEYRING = 1


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


def die_with_parent(machine: str) -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    syscall(SYS_PRCTL[machine], PR_SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans(machine: str) -> None:
    """Become the parent of descendants whose own parent ends, so that we can wait for them."""
    syscall(SYS_PRCTL[machine], PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def unshare_directory(machine: str) -> None:
    """Give this thread a working directory and a umask of its own."""
    syscall(SYS_UNSHARE[machine], CLONE_FS)


def share_descriptors(first: int, second: int) -> bool:
    """Whether two threads have one table of descriptors. False where the kernel does not say."""
    try:
        return syscall(SYS_KCMP[os.uname().machine], first, second, KCMP_FILES, 0, 0) == 0
    except (OSError, KeyError):
        return False


def join_new_keyring(machine: str) -> None:
    """Leave the caller's session keyring behind: its keys can be read by whoever possesses it."""
    try:
        syscall(SYS_KEYCTL[machine], KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
    except OSError as error:
        # No keyrings in this kernel, or none for this container: then none can be read either.
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
            raise
