"""Placeholders: names that must be there on the host to be covered inside, and go with the run.

Recorded before they are made, so that a crash leaves no trace, and shared between runs: one that
another run still covers stays. Every step works relative to the parent's descriptor, reached
without following a link: a sandbox further up may swap a directory for a link to somewhere else.
"""

from __future__ import annotations

import fcntl
import os
import stat

from ..host import placeholders
from ..policy import paths
from ..policy.control import neutral
from ..policy.model import DIR, FILE, RW, SOCKET, Placeholder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Plan

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(space: str, plan: Plan) -> None:
    """Make what is missing.

    A placeholder of another run in the same project becomes ours too: were it removed when that
    run ends, our mount on it would go with it and the name would be free.
    """
    # Others first: what one of them held is gone for sure when it is not recorded any more.
    if not plan.placeholders and not _others(space) and not _vanished(plan):
        return
    with _Lock(space):
        # Once more: until now another run may have ended, and what it held went with it.
        wanted = (*_vanished(plan), *plan.placeholders)
        missing = [held for held in wanted if not os.path.lexists(held.path)]
        covered = {mount.dest for mount in plan.mounts} & _others(space)
        ours = sorted({*(held.path for held in missing), *covered})
        if not ours:
            return
        _record(space, ours)
        with _Parents() as parents:
            for held in missing:
                _place(held, parents)


def _vanished(plan: Plan) -> list[Placeholder]:
    """What the plan took for the user's own and makes read-only, but is not there any more.

    It was the placeholder of a run that began while we looked, and has ended since. The name is as
    free now as if it had never been there, so it is ours to hold. From shallow to deep, as mounts
    are.
    """
    writable = {m.dest for m in plan.mounts if m.level == RW and m.source == m.dest}
    return [
        Placeholder(
            path=m.dest, node=FILE if m.file else DIR, text=neutral(m.dest) if m.file else ""
        )
        for m in plan.mounts
        if m.kind in ("ro", "pin") and m.source == m.dest and not os.path.lexists(m.dest)
        # Only where a sandbox could make it: what is gone elsewhere is an error.
        and any(above in writable for above in paths.parents(m.dest))
    ]  # fmt: skip


def remove(space: str) -> None:
    """Remove what no other run needs. Only ever what is as we made it: anything else stays.

    The list is read from the disk: whoever was interrupted in the middle has told nobody.
    """
    wanted = placeholders.listed(space)
    if not wanted:
        return
    with _Lock(space), _Parents() as parents:
        for path in sorted(set(wanted) - _others(space), reverse=True):
            try:
                _remove(path, parents)
            except OSError:
                continue
        os.unlink(f"{space}/{placeholders.LIST}")


def _record(space: str, names: list[str]) -> None:
    fd = os.open(f"{space}/{placeholders.LIST}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    os.write(fd, os.fsencode("\0".join(names)))
    os.close(fd)


def _others(space: str) -> frozenset[str]:
    """Placeholders that other runs have recorded."""
    base, _, own = space.rpartition("/")
    return placeholders.recorded(paths.parent(base), own)


class _Lock:
    """Makes "who still needs it?" and "remove it" one step among all runs of a user."""

    def __init__(self, space: str) -> None:
        self._path = f"{paths.parent(paths.parent(space))}/placeholders.lock"

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class _Parents:
    """Directories that placeholders lie in, each reached once."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Parents:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def of(self, path: str) -> tuple[int, str]:
        """The parent's descriptor and the name in it."""
        parent, _, name = path.rpartition("/")
        return self._reach(parent), name

    def _reach(self, path: str) -> int:
        """A directory by its whole path, which has no link in it: planned paths are resolved."""
        known = self._open.get(path)
        if known is not None:
            return known
        if path:
            above, _, name = path.rpartition("/")
            fd = os.open(name, DIRECTORY, dir_fd=self._reach(above))
        else:
            fd = os.open("/", DIRECTORY)
        self._open[path] = fd
        return fd


def _place(held: Placeholder, parents: _Parents) -> None:
    here, name = parents.of(held.path)
    if held.node == DIR:
        os.mkdir(name, 0o755, dir_fd=here)
        return
    if held.node == SOCKET:
        try:
            os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=here)
        except FileExistsError:
            raise
        except OSError:
            # A file system without sockets: a plain file will do, though git shows it.
            pass
        else:
            return
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=here)
    os.write(fd, held.text.encode())
    os.close(fd)


def _remove(path: str, parents: _Parents) -> None:
    here, name = parents.of(path)
    info = os.lstat(name, dir_fd=here)
    if stat.S_ISDIR(info.st_mode):
        os.rmdir(name, dir_fd=here)
    elif stat.S_ISSOCK(info.st_mode) or _is_neutral(path, info, here):
        os.unlink(name, dir_fd=here)


def _is_neutral(path: str, info: os.stat_result, here: int) -> bool:
    """Whether a plain file says what a placeholder says, and no more."""
    text = neutral(path).encode()
    if not stat.S_ISREG(info.st_mode) or info.st_size not in (0, len(text)):
        return False
    if not info.st_size:
        # Made, and killed before a word was in it.
        return True
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path.rpartition("/")[2], flags, dir_fd=here)
    try:
        return os.read(fd, len(text) + 1) == text
    finally:
        os.close(fd)
