"""Measures the private /tmp against its limit: no kernel limit exists for a directory on disk.

Free space of the whole file system is cheap to ask for. Only when it has shrunk by a good part of
the limit is the directory itself measured. Runs in the keeper, which sees the sandbox's own /tmp.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PLACE = "/tmp"
# One file for this many bytes of the limit: floods of empty files fill a disk's inodes.
BYTES_PER_FILE = 8192
BLOCK = 512
# How often the tree is measured although the file system has not shrunk, in seconds.
SELDOM = 2.0
# How many descriptors are looked at, and what more than that weighs: more than any limit.
MOST_LOOKED, UNCOUNTED = 100_000, 1 << 62
# How /proc/PID/maps marks a file without a name.
DELETED = b" (deleted)"


class Flood:
    """Knows how much /tmp may hold. To be asked from time to time."""

    def __init__(self, limit: int, place: str = PLACE) -> None:
        self._limit = limit
        self._files = max(1000, limit // BYTES_PER_FILE)
        self._place = place
        self._free, self._free_files = self._left()
        self._first = self._free
        self._due = time.monotonic() + SELDOM

    def _left(self) -> tuple[int, int]:
        info = os.statvfs(self._place)
        return info.f_bfree * info.f_frsize, info.f_ffree

    def exceeded(self) -> bool:
        """Whether the directory holds more than it may."""
        free, files = self._left()
        shrunk = self._free - free > self._limit // 8
        # File systems without a fixed number of inodes report none: look at the space alone.
        shrunk = shrunk or self._free_files - files > self._files // 8
        now = time.monotonic()
        if not shrunk and now < self._due:
            return False
        self._free, self._free_files = free, files
        found = self._measure()
        # Others may free as much as is written here, so it is measured now and then in any case; a
        # tree that takes long less often.
        self._due = time.monotonic() + max(SELDOM, 50 * (time.monotonic() - now))
        return found

    def _measure(self) -> bool:
        """Add up the tree, no further than to the limit. Links are not followed."""
        size, count = self._nameless(), 0
        todo = [self._place]
        while todo:
            try:
                with os.scandir(todo.pop()) as scanned:
                    for item in scanned:
                        count += 1
                        size += _size(item)
                        if item.is_dir(follow_symlinks=False):
                            todo.append(item.path)
                        if size > self._limit or count > self._files:
                            return True
            except OSError as error:
                # Removed meanwhile. A closed directory opens for a process with capabilities in
                # the sandbox; one that is nested too deep to look at is taken for full.
                if error.errno == errno.ENAMETOOLONG and self._first - self._free > self._limit:
                    return True
        return size > self._limit

    def _nameless(self) -> int:
        """Bytes in files that have no name any more. /proc shows the sandbox's processes alone.

        Not to be seen here: a descriptor that was sent through a socket and not yet received.
        """
        info = os.stat(self._place)
        found: dict[int, int] = {}
        mapped: dict[int, int] = {}
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try:
                    _held_open(f"/proc/{pid}", info.st_dev, found)
                    _held_mapped(f"/proc/{pid}", self._place, mapped)
                except OSError:
                    continue
        # A mapping may be longer than its file, and only the file system knows what is on disk: no
        # more counts than has been used since the start.
        only = sum(size for inode, size in mapped.items() if inode not in found)
        return sum(found.values()) + min(only, max(0, self._first - self._free))


def nameless(pids: Iterable[int], device: int) -> int:
    """Bytes of a file system in files that only these processes still hold open.

    Whoever measures for many must not be kept at it by one: beyond so many descriptors it is
    UNCOUNTED. A table that many threads share is looked at once.
    """
    found: dict[int, int] = {}
    looked = 0
    for pid in pids:
        for thread in _tables(pid):
            looked += _held_in(f"/proc/{pid}/task/{thread}/fd", device, found)
            if looked > MOST_LOOKED:
                return UNCOUNTED
    return sum(found.values())


def _tables(pid: int) -> list[int]:
    """One thread of a process for each table of descriptors."""
    from .syscalls import share_descriptors

    found: list[int] = []
    for name in _names(f"/proc/{pid}/task"):
        thread = int(name)
        if not any(share_descriptors(thread, other) for other in found):
            found.append(thread)
    return found


def _size(item: os.DirEntry[str]) -> int:
    try:
        return item.stat(follow_symlinks=False).st_blocks * BLOCK
    except OSError:
        # Removed meanwhile. Somebody may do that all the time: the others still count.
        return 0


def _held_open(process: str, device: int, found: dict[int, int]) -> None:
    """Note deleted files in the descriptors of a process, and of each thread.

    A thread may have a table of its own (clone(2) without CLONE_FILES), and a first thread that has
    ended has none.
    """
    for thread in os.listdir(f"{process}/task"):
        _held_in(f"{process}/task/{thread}/fd", device, found)


def _held_in(place: str, device: int, found: dict[int, int]) -> int:
    """Note deleted files in one table of descriptors; how many there are in it."""
    names = _names(place)
    for fd in names:
        try:
            info = os.stat(f"{place}/{fd}")
        except OSError:
            # Closed meanwhile. Somebody may do that all the time: the others still count.
            continue
        if not info.st_nlink and info.st_dev == device:
            found[info.st_ino] = info.st_blocks * BLOCK
    return len(names)


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _held_mapped(process: str, place: str, found: dict[int, int]) -> None:
    """Note how far into deleted files below a directory the mappings of a process reach.

    That is the least that such a file can have: how large it is, nobody says. The files themselves
    are behind map_files, for which a user namespace has no capability. Their device numbers are no
    help: btrfs and overlay show another one here than in stat(2).
    """
    for line in _maps(process).split(b"\n"):
        if line.endswith(DELETED):
            span, _, offset, _, inode, path = line.split(maxsplit=5)
            if path.startswith(os.fsencode(place) + b"/"):
                first, _, last = span.partition(b"-")
                end = int(offset, 16) + int(last, 16) - int(first, 16)
                found[int(inode)] = max(found.get(int(inode), 0), end)


def _maps(process: str) -> bytes:
    """The mappings of a process: those of any thread that lives, since they share them."""
    for thread in os.listdir(f"{process}/task"):
        try:
            with open(f"{process}/task/{thread}/maps", "rb") as file:
                data = file.read()
        except OSError:
            continue
        if data:
            return data
    return b""
