"""Walks a tree that a command may be changing: no link is followed, no descriptors run out.

Only the directories on the way down are open at any time. One that is nested too deep is told, not
entered: whoever counts takes it for full.
"""

from __future__ import annotations

import os
import stat

from ...record import Record
from .tree_open import DIRECTORY, LOOK, reopen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Each level is a descriptor while it is walked.
DEEPEST = 128


class Found(Record):
    """An entry: its path below the top, its name in an open directory, and what it is."""

    path: str
    here: int
    name: str
    info: os.stat_result
    # A directory that was not entered because it is too deep.
    is_deep: bool = False


class _Level:
    """A directory on the way down."""

    def __init__(self, path: str, fd: int, mode: int | None = None) -> None:
        self.path = path
        self.fd = fd
        # What its mode was, where it had to be opened.
        self._mode = mode
        try:
            self.names = iter(sorted(os.listdir(fd)))
        except OSError:
            self.names = iter(())

    def close(self) -> None:
        if self._mode is not None:
            os.fchmod(self.fd, self._mode)
        os.close(self.fd)


def each(top: int, *, depth: int = DEEPEST, closed: bool = False) -> Iterator[Found]:
    """Everything below an open directory, which is closed at the end; parents come first.

    With `closed`, directories that their owner has closed are opened for as long as it takes: to
    look at what is in one needs its mode, not only a descriptor.
    """
    levels = [_Level("", top)]
    try:
        while levels:
            level = levels[-1]
            name = next(level.names, None)
            if name is None:
                levels.pop().close()
                continue
            try:
                info = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
            except OSError:
                # Removed meanwhile.
                continue
            path = f"{level.path}/{name}" if level.path else name
            is_directory = stat.S_ISDIR(info.st_mode)
            is_deep = is_directory and len(levels) >= min(depth, DEEPEST)
            yield Found(path=path, here=level.fd, name=name, info=info, is_deep=is_deep)
            if is_directory and not is_deep:
                below = _enter(level.fd, name, path, info.st_mode, closed=closed)
                levels += [below] if below is not None else []
    finally:
        for level in reversed(levels):
            level.close()


def _enter(here: int, name: str, path: str, mode: int, *, closed: bool) -> _Level | None:
    """A directory of the command's; None: closed to us, or swapped meanwhile."""
    try:
        if not closed or mode & 0o500 == 0o500:
            return _Level(path, os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=here))
        handle = os.open(name, LOOK | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        try:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
            return _Level(path, reopen(handle, DIRECTORY), stat.S_IMODE(mode))
        finally:
            os.close(handle)
    except OSError:
        return None
