"""Watches the places that a sandbox's mounts protect, and covers what somebody has uncovered.

A mount on a file holds that file, not its name: when an editor outside saves by writing a new file
and renaming it over the old one, the kernel drops the mount with the old file. inotify(7) tells
of the rename, and the new file is covered within a fraction of a millisecond. The mount table tells
as well (poll(2) on mountinfo), of every mount that has gone. Runs in the keeper, which has joined
the sandbox's namespaces, so every path is one of the sandbox.
"""

from __future__ import annotations

import os
import select

from ..policy import paths
from . import joined
from .syscalls import syscall

# machine → (SYS_inotify_init1, SYS_inotify_add_watch)
NUMBERS = {"x86_64": (294, 254), "aarch64": (26, 27)}
# linux/inotify.h
IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW, IN_ONLYDIR = 0x80, 0x100, 0x4000, 0x01000000
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
HEADER = 16
# How many directories, one in the other, may have been replaced at once.
DEEPEST = 64
ATTEMPTS = 5
# How often one held name is made again. Then whoever removes it outside is left alone.
REMAKES = 8


def instance() -> int:
    """A new inotify instance; -1 when this user has none left (fs.inotify.max_user_instances)."""
    try:
        return syscall(NUMBERS[os.uname().machine][0], IN_NONBLOCK | IN_CLOEXEC)
    except OSError:
        return -1


class Watching:
    """The duties of a keeper: (operation, path), and an inotify descriptor that tells of changes.

    `fd` is -1 where there is none. `blind` is true then, and where no more watches are to be had:
    `glance` must be called from time to time. `table` is the sandbox's mount table, which the
    kernel reports as changed when a mount goes.
    """

    def __init__(self, duties: list[tuple[str, str]], table: int, fd: int) -> None:
        self._duties = duties
        self.table = table
        self.fd = fd
        self.blind = fd < 0 and bool(duties)
        self._add = NUMBERS[os.uname().machine][1]
        self._by_name = {duty[1]: duty for duty in duties}
        self._directories: dict[int, str] = {}
        # What was at the places that have no mount, at the last look.
        self._open: dict[str, tuple[int, int, int] | None] = {}
        self._remade: dict[str, int] = {}
        self._ways: frozenset[str] = frozenset()
        self._changes = select.poll()
        # The table always has something to read; POLLPRI and POLLERR tell that it has changed.
        self._changes.register(table, select.POLLPRI)

    def _watch(self, fd: int, directory: str) -> bool:
        """Watch a directory; False when there are no more watches for this user."""
        wanted = IN_MOVED_TO | IN_CREATE | IN_ONLYDIR
        try:
            number = syscall(self._add, fd, os.fsencode(directory) + b"\0", wanted)
        except OSError as error:
            # ENOSPC: fs.inotify.max_user_watches. Otherwise it is not there, or not shown.
            return error.errno != 28
        self._directories[number] = directory
        return True

    def _watch_all(self, ways: list[str]) -> bool:
        """Watch every directory of a duty, and those on the way to what is not covered."""
        self._ways = frozenset(ways)
        # From above to below: what is made there meanwhile is told by the one above.
        every = [*(paths.parent(way) for way in ways), *ways]
        every += [paths.parent(path) for _, path in self._duties]
        watched = [self._watch(self.fd, directory) for directory in dict.fromkeys(every)]
        return all(watched)

    def look(self) -> None:
        """Cover everything that has lost its mount."""
        for _ in range(DEEPEST):
            # What changes in the table after this is told again.
            self._changes.poll(0)
            mounted = joined.points(self._mounts())
            lost = joined.uncovered(mounted, self._duties)
            # First the watches, then the look: what is made in a new directory is seen either way.
            if self.fd >= 0:
                self.blind = not self._watch_all(joined.ways(mounted, lost))
            self._open = {path: _identity(path) for _, path in lost}
            # A directory that was replaced shows its lost children only when it is covered again.
            covered = [_cover(*duty) or self._remake(*duty) for duty in lost]
            if not any(covered):
                return

    def _remake(self, operation: str, path: str) -> bool:
        """Hold a name again whose placeholder was removed outside, before it is taken inside."""
        count = self._remade.get(path, 0)
        if operation not in joined.REMADE or count >= REMAKES:
            return False
        if joined.remake(operation, path):
            self._remade[path] = count + 1
        return _cover(operation, path)

    def glance(self) -> None:
        """Where nothing tells: look if something has come to a place that has no mount."""
        fresh = instance() if self.fd < 0 else -1
        if fresh >= 0:
            self.fd = fresh
        if fresh >= 0 or any(_identity(path) != was for path, was in self._open.items()):
            self.look()

    def _mounts(self) -> str:
        """The sandbox's mount table. The kernel hands it out a page at a time."""
        found = b""
        while chunk := os.pread(self.table, 1 << 16, len(found)):
            found += chunk
        return found.decode("utf-8", "surrogateescape")

    def heed(self) -> None:
        """Handle what inotify has to tell."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        changed = False
        at = 0
        while at + HEADER <= len(data):
            number = int.from_bytes(data[at : at + 4], "little", signed=True)
            mask = int.from_bytes(data[at + 4 : at + 8], "little")
            length = int.from_bytes(data[at + 12 : at + 16], "little")
            name = data[at + HEADER : at + HEADER + length].rstrip(b"\0")
            at += HEADER + length
            path = f"{self._directories.get(number, '')}/{os.fsdecode(name)}"
            duty = self._by_name.get(path)
            if duty is not None:
                # At once, without looking first: every microsecond counts.
                _cover(*duty)
            changed = changed or duty is not None or path in self._ways
            changed = changed or bool(mask & IN_Q_OVERFLOW)
        if changed:
            self.look()


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_ctime_ns


def _cover(operation: str, path: str) -> bool:
    """Cover what is there; False when nothing is, or it has gone again: then an event will tell."""
    for attempt in range(ATTEMPTS):
        try:
            return joined.cover(operation, path)
        except OSError as error:
            # It was replaced once more in between. What cannot be covered must not go on.
            if attempt + 1 == ATTEMPTS and os.path.lexists(path):
                raise OSError(error.errno, error.strerror, path) from error
    return False
