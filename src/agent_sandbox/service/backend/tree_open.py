"""Opens paths of a sandbox from outside, while the command inside may swap anything for a link.

Every path is looked up below the sandbox's own directory, which is the root of the look-up: an
absolute link and `..` stay below it (openat2(2), RESOLVE_IN_ROOT). Where the kernel has no openat2
each component is opened by itself, no link followed, and links are read and gone after by hand.
What is found is a descriptor that can neither be read nor written (O_PATH). Only what it turns out
to be decides whether it is opened: a FIFO would block, a device would act.
"""

from __future__ import annotations

import errno
import os
import stat

from ...errors import reason
from ...launch.syscalls import syscall
from ...policy.owned import PARTS
from ..problems import Problem

# One table for all machines since 5.1.
SYS_OPENAT2 = 437
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x01, 0x02, 0x10
RESOLVE = RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_IN_ROOT
LOOK = os.O_PATH | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# The kernel's own limit on links in one look-up (MAXSYMLINKS).
MAX_LINKS = 40
# A look-up with `..` in it is refused while something is renamed (EAGAIN).
TRIES = 1000
MAX_PATH = 4096

# What the kernel says → what the client is told.
CODES = {
    errno.ENOENT: "NOT_FOUND", errno.ENOTDIR: "CONFLICT", errno.EISDIR: "CONFLICT",
    errno.ENOTEMPTY: "CONFLICT", errno.EEXIST: "CONFLICT", errno.ELOOP: "INVALID",
    errno.ENAMETOOLONG: "INVALID", errno.EXDEV: "FORBIDDEN", errno.EACCES: "FORBIDDEN",
    errno.EPERM: "FORBIDDEN", errno.ENOSPC: "DISK_FULL", errno.EDQUOT: "DISK_FULL",
    errno.EAGAIN: "CONFLICT", errno.EFBIG: "TOO_LARGE", errno.EINVAL: "INVALID",
}  # fmt: skip


def problem(error: OSError, path: str) -> Problem:
    """The refusal for what the kernel refused."""
    code = CODES.get(error.errno or 0, "INTERNAL")
    return Problem(code, f"'{path}': {reason(error)}", field="path")


def check(path: str) -> str:
    """A path inside that is absolute, plain, and in a part that clients may use."""
    parts = path.split("/")
    plain = path.startswith("/") and not {"", ".", ".."} & set(parts[1:]) and "\0" not in path
    if not plain or len(os.fsencode(path)) > MAX_PATH:
        raise Problem("INVALID", f"cannot use the path {path!r}", field="path")
    if not any(path == part or path.startswith(f"{part}/") for part in PARTS):
        shown = " or ".join(f"'{part}'" for part in PARTS)
        raise Problem("FORBIDDEN", f"'{path}' is not below {shown}", field="path")
    return path


class Root:
    """A sandbox's directory, open. Use it as a context manager."""

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            self.fd = os.open(place, LOOK | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise Problem("NOT_FOUND", "no such sandbox") from error

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def find(self, path: str, *, follow: bool = True) -> int:
        """What a path inside leads to, as a descriptor that only names it (O_PATH)."""
        flags = LOOK if follow else LOOK | os.O_NOFOLLOW
        fd = _resolve(self.fd, path, flags)
        if not self._is_in_part(fd):
            # Beside the parts: by a link to `/` or to `/home`.
            os.close(fd)
            raise PermissionError(errno.EACCES, "it leads out of the sandbox's directories")
        return fd

    def _is_in_part(self, fd: int) -> bool:
        """Whether a descriptor is of one of the parts.

        Nobody inside can move anything from one part into another, nor out: they are different
        mounts there. So what is true now stays true.
        """
        name = os.readlink(f"/proc/self/fd/{fd}")
        return any(
            name == self.place + part or name.startswith(f"{self.place}{part}/") for part in PARTS
        )

    def directory(self, path: str) -> int:
        """A directory, to be read and to work in."""
        fd = self.find(path)
        try:
            return reopen(fd, DIRECTORY)
        finally:
            os.close(fd)

    def parent(self, path: str) -> tuple[int, str]:
        """The directory that a name is in, and the name. Parts themselves have none."""
        if path in PARTS:
            raise PermissionError(errno.EPERM, "the sandbox needs this directory")
        above, _, name = path.rpartition("/")
        return self.directory(above), name


def reopen(fd: int, flags: int) -> int:
    """Open what a descriptor names: exactly that, wherever its name leads by now."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def open_file(fd: int) -> int:
    """Open what a descriptor names if it is a regular file."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return reopen(fd, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)


_has_openat2 = True


def _resolve(root: int, path: str, flags: int) -> int:
    global _has_openat2  # noqa: PLW0603 - the kernel has it or not
    if _has_openat2:
        try:
            return _openat2(root, path, flags)
        except OSError as error:
            # EPERM: a container's filter that does not know the call.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            _has_openat2 = False
    return walk(root, path, flags)


def _openat2(root: int, path: str, flags: int) -> int:
    how = b"".join(value.to_bytes(8, "little") for value in (flags, 0, RESOLVE))
    raw = os.fsencode(path.lstrip("/")) or b"."
    for _ in range(TRIES):
        try:
            return syscall(SYS_OPENAT2, root, raw + b"\0", how, len(how))
        except BlockingIOError:
            continue
    raise OSError(errno.EAGAIN, "it is being moved")


def walk(root: int, path: str, flags: int) -> int:
    """The same without openat2: one component at a time, links gone after by hand."""
    todo = [part for part in reversed(path.split("/")) if part]
    held = [os.dup(root)]
    links = 0
    try:
        while todo:
            part = todo.pop()
            if part == "..":
                # Where we came from, not what the kernel takes for the parent by now.
                if len(held) > 1:
                    os.close(held.pop())
                continue
            if part == ".":
                continue
            fd = os.open(part, LOOK | os.O_NOFOLLOW, dir_fd=held[-1])
            held.append(fd)
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                continue
            if not todo and flags & os.O_NOFOLLOW:
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            text = os.readlink("", dir_fd=fd)
            os.close(held.pop())
            todo += [step for step in reversed(text.split("/")) if step]
            if text.startswith("/"):
                for above in held[1:]:
                    os.close(above)
                del held[1:]
        return os.dup(held[-1])
    finally:
        for fd in held:
            os.close(fd)
