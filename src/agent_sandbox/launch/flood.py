"""Measures the private /tmp against its limit: no kernel limit exists for a directory on disk.

Free space of the whole file system is cheap to ask for. Only when it has shrunk by a good part of
the limit is the directory itself measured. Runs in the keeper, which sees the sandbox's own /tmp.
"""

from __future__ import annotations

import errno
import os
import time

PLACE = "/tmp"
# One file for this many bytes of the limit: floods of empty files fill a disk's inodes.
BYTES_PER_FILE = 8192
BLOCK = 512
# How often the tree is measured although the file system has not shrunk, in seconds.
SELDOM = 2.0


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
        size, count = self._deleted(), 0
        todo = [self._place]
        while todo:
            try:
                with os.scandir(todo.pop()) as scanned:
                    for item in scanned:
                        count += 1
                        size += item.stat(follow_symlinks=False).st_blocks * BLOCK
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

    def _deleted(self) -> int:
        """Bytes in files that are open but have no name any more. /proc shows the sandbox alone."""
        device = os.stat(self._place).st_dev
        found: dict[int, int] = {}
        for pid in os.listdir("/proc"):
            if not pid.isdigit():
                continue
            try:
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    info = os.stat(f"/proc/{pid}/fd/{fd}")
                    if not info.st_nlink and info.st_dev == device:
                        found[info.st_ino] = info.st_blocks * BLOCK
            except OSError:
                continue
        return sum(found.values())
