"""The data directory: for its owner alone, and never one that somebody else could have prepared.

Tokens, commands and the audit trail lie here. So it is opened only if no other user can have put a
file, a link or a whole directory in its place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from ..errors import HostError, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
OTHERS = 0o077
SYSTEM_DATA = "/var/lib/agent-sandbox"
# What the service keeps in its data directory.
DATABASE, LOCK, AUDIT = "state.db", "lock", "audit"
# Written by SQLite beside its file.
BESIDE = ("-wal", "-shm", "-journal")

# Data directories that this process owns: a lock of fcntl does not hold against its own process.
_owned: set[tuple[int, int]] = set()


def data_directory(environ: Mapping[str, str], uid: int | None = None) -> str:
    """Where the service keeps its data unless `--data` says otherwise."""
    if given := environ.get("SANDBOX_DATA"):
        return os.path.abspath(given)
    if (os.geteuid() if uid is None else uid) == 0:
        return SYSTEM_DATA
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = f"{environ.get('HOME') or os.path.expanduser('~')}/.local/state"
    return f"{base}/agent-sandbox/service"


# --- directories


def make_directory(path: str) -> str:
    """The directory, made if it is missing; its real path. Unsafe ones are refused."""
    path = os.path.abspath(path)
    above = _make_above(os.path.dirname(path))
    real = os.path.join(above, os.path.basename(path)) if os.path.basename(path) else above
    try:
        os.mkdir(real, DIRECTORY_MODE)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unsafe(path, f"it cannot be made: {reason(error)}") from error
    check_directory(real)
    return real


def _make_above(path: str) -> str:
    """The directory above, real, with every step owned by root or by us."""
    missing = []
    at = path
    while not os.path.lexists(at):
        missing.append(os.path.basename(at))
        at = os.path.dirname(at)
    real = os.path.realpath(at)
    for step in _steps(real):
        _check_step(step)
    for name in reversed(missing):
        real = os.path.join(real, name)
        try:
            os.mkdir(real, DIRECTORY_MODE)
        except FileExistsError:
            # Two started at once; whose it is will be seen.
            _check_step(real)
        except OSError as error:
            raise _unsafe(real, f"it cannot be made: {reason(error)}") from error
    return real


def _steps(path: str) -> list[str]:
    found = ["/"]
    for name in path.split("/"):
        if name:
            found.append(os.path.join(found[-1], name))
    return found


def _check_step(path: str) -> None:
    """Whoever may rename in a directory above could swap ours for another. Sticky: only owners."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _unsafe(path, reason(error)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(path, "it is not a directory")
    # In a user namespace the owner of `/` may have no name here; it is still not our equal.
    if found.st_uid not in (0, os.geteuid()):
        # Root's service below a user's directory: that user could put another one there.
        raise _unsafe(path, f"it belongs to uid {found.st_uid}, who could replace what is in it")
    if found.st_mode & stat.S_ISVTX:
        return
    # A private group, the default of many systems, is its user.
    group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid())
    if group or found.st_mode & stat.S_IWOTH:
        raise _unsafe(path, "it can be written by others, who could replace what is in it")


def check_directory(path: str) -> None:
    """Refuse a directory that is a link, another user's, or open to others."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            what = "it is a link" if os.path.islink(path) else "it is not a directory"
            raise _unsafe(path, what) from error
        raise _unsafe(path, reason(error)) from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise _foreign(path, found.st_uid)
        if not found.st_mode & OTHERS:
            return
        if found.st_mode & 0o022 or os.listdir(fd):
            raise _unsafe(path, "it is open to other users", hint=f"chmod 700 '{path}'")
        # Just made by hand for us. A full one, such as /etc by mistake, is left alone.
        os.fchmod(fd, DIRECTORY_MODE)
    finally:
        os.close(fd)


# --- files


def open_file(path: str, flags: int = os.O_RDWR) -> int:
    """A file of ours, made if `flags` has O_CREAT. Not a link, not another's, not open to others.

    A second name (hard link) would let its owner read or keep what we write.
    """
    try:
        # O_NONBLOCK: a planted pipe must not hang us. It means nothing for files.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "it is a link" if error.errno == errno.ELOOP else reason(error)
        raise _unsafe(path, what) from error
    try:
        _check_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _unsafe(path, "it is not a regular file")
    if found.st_uid != os.geteuid():
        raise _foreign(path, found.st_uid)
    if found.st_nlink > 1:
        raise _unsafe(path, "it has a second name (hard link)")
    if found.st_mode & OTHERS:
        raise _unsafe(path, "it is open to other users", hint=f"chmod 600 '{path}'")


def check_file(path: str) -> bool:
    """Whether a file is there; one that is must be ours alone."""
    try:
        os.close(open_file(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


# --- one owner


def read_mounted(path: str, most: int, refusal: Callable[[str, str, str], HostError]) -> bytes:
    """A secret as Kubernetes and compose mount it: links are followed. OSError.

    Whoever may change it decides what is in it, so it must be nobody but its owner.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refusal(path, "it is not a regular file", "")
        if status.st_mode & 0o022:
            raise refusal(path, "others can change it", f"chmod go-w '{path}'")
        return os.read(fd, most)
    finally:
        os.close(fd)


def lock(directory: str) -> int:
    """Own the data directory until the descriptor is closed or this process ends.

    fcntl, not flock: a child that was forked and never executed anything would keep a flock, and
    no service could start after this one was killed.
    """
    path = f"{directory}/{LOCK}"
    # Looked at by name first: closing any descriptor of the file would end our own lock.
    if _identity(path) in _owned:
        raise _busy(directory, os.getpid())
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(fd)
        os.close(fd)
        raise _busy(directory, holder) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    _owned.add(_identity(path))
    return fd


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return (0, 0)
    return found.st_dev, found.st_ino


def unlock(fd: int) -> None:
    """Let others own the data directory."""
    found = os.fstat(fd)
    _owned.discard((found.st_dev, found.st_ino))
    os.close(fd)


def _holder(fd: int) -> int:
    text = os.pread(fd, 16, 0).strip()
    return int(text) if text.isdigit() else 0


# --- words


def _busy(directory: str, pid: int) -> HostError:
    who = f" (pid {pid})" if pid else ""
    return HostError(
        f"cannot use '{directory}': another service{who} uses it",
        hint="stop it, or give this one its own --data DIR",
        code="data-busy",
    )


def _foreign(path: str, uid: int) -> HostError:
    return _unsafe(
        path,
        f"it belongs to uid {uid}",
        hint="run this as that user, or give your own --data DIR",
    )


def _unsafe(path: str, what: str, hint: str = "") -> HostError:
    return HostError(
        f"cannot keep data in '{path}': {what}",
        hint=hint or "give a directory that only you can change: --data DIR",
        code="data-unsafe",
    )
