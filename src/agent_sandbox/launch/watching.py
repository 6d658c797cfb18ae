"""Watches the places that a sandbox's mounts protect, and covers what somebody has uncovered.

A mount on a file holds that file, not its name: when an editor outside saves by writing a new file
and renaming it over the old one, the kernel drops the mount with the old file. inotify(7) tells
of the rename, and the new file is covered within a fraction of a millisecond. Runs in the keeper,
which has joined the sandbox's namespaces, so every path is one of the sandbox.
"""

from __future__ import annotations

import os

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


class Watching:
    """The duties of a keeper: (operation, path), and an inotify descriptor that tells of changes.

    `blind` is true where no more watches are to be had; then `look` must be called from time to
    time. `fd` is -1 where there is none at all.
    """

    def __init__(self, duties: list[tuple[str, str]], table: int) -> None:
        self._duties = duties
        self._table = table
        self._init1, self._add = NUMBERS[os.uname().machine]
        self._by_name: dict[str, tuple[str, str]] = {}
        self._directories: dict[int, str] = {}
        for duty in duties:
            self._by_name[duty[1]] = duty
        self.fd = self._open()
        self.blind = self.fd < 0 and bool(duties)

    def _open(self) -> int:
        try:
            return syscall(self._init1, IN_NONBLOCK | IN_CLOEXEC)
        except OSError:
            return -1

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

    def look(self) -> None:
        """Cover everything that has lost its mount."""
        for _ in range(DEEPEST):
            # First the watches, then the look: what is made in a new directory is seen either way.
            if self.fd >= 0:
                directories = dict.fromkeys(paths.parent(path) for _, path in self._duties)
                watched = [self._watch(self.fd, directory) for directory in directories]
                self.blind = not all(watched)
            lost = joined.uncovered(self._mounts(), self._duties)
            # A directory that was replaced shows its lost children only when it is covered again.
            covered = [_cover(*duty) for duty in lost]
            if not any(covered):
                return

    def _mounts(self) -> str:
        """The sandbox's mount table. The kernel hands it out a page at a time."""
        found = b""
        while chunk := os.pread(self._table, 1 << 16, len(found)):
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
            duty = self._named(number, name)
            if duty is not None:
                # At once, without looking first: every microsecond counts.
                _cover(*duty)
            changed = changed or duty is not None or bool(mask & IN_Q_OVERFLOW)
        if changed:
            self.look()

    def _named(self, number: int, name: bytes) -> tuple[str, str] | None:
        directory = self._directories.get(number)
        if directory is None:
            return None
        return self._by_name.get(f"{directory}/{os.fsdecode(name)}")


def _cover(operation: str, path: str) -> bool:
    """Cover what is there; False when nothing is, or it has gone again: then an event will tell."""
    for attempt in range(ATTEMPTS):
        try:
            return joined.cover(operation, path)
        except OSError:
            # It was replaced once more in between. What cannot be covered must not go on.
            if attempt + 1 == ATTEMPTS and os.path.lexists(path):
                raise
    return False
