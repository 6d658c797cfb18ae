"""The files of an audit directory: `audit-000001.jsonl` and so on, `head`, and `lock`."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager

from .. import store_private
from ..problems import Problem
from .lines import HEAD_BYTES, MOST_LINE, Head, read_head

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .trail import Trail, Where

HEAD, LOCK = "head", "lock"
PREFIX, SUFFIX = "audit-", ".jsonl"
LOCK_SECONDS = 5.0
BLOCK = 1 << 16


def name_of(number: int) -> str:
    """The name of a file."""
    return f"{PREFIX}{number:06d}{SUFFIX}"


def number_of(name: str) -> int | None:
    """The number of a file; None: another file."""
    digits = name.removeprefix(PREFIX).removesuffix(SUFFIX)
    if digits.isascii() and digits.isdigit() and name == name_of(int(digits)):
        return int(digits)
    return None


def numbers(directory: str) -> list[int]:
    """The files that are there, in order."""
    found = [number_of(name) for name in os.listdir(directory)]
    return sorted(number for number in found if number is not None)


def open_log(directory: str, number: int, flags: int) -> int:
    """A file of the trail; FileNotFoundError."""
    return store_private.open_file(f"{directory}/{name_of(number)}", flags)


def head_at(fd: int) -> Head | None:
    """The head in an open file."""
    return read_head(os.pread(fd, HEAD_BYTES + 1, 0))


@contextmanager
def locked(fd: int, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of the trail: one line at a time, from the service or `sandboxctl`."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = 0.0
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            deadline = deadline or time.monotonic() + LOCK_SECONDS
            if time.monotonic() > deadline:
                raise unavailable("another process holds its lock") from None
            time.sleep(0.0005)
    try:
        yield
    finally:
        # By word, not by closing: a child that was forked meanwhile has the descriptor too.
        fcntl.flock(fd, fcntl.LOCK_UN)


def open_head(directory: str) -> int:
    """The head of a trail; that of a new one is made in one step, before any log.

    An empty head says that somebody has removed what was in it: a kill must not say so.
    """
    path = f"{directory}/{HEAD}"
    try:
        return store_private.open_file(path, os.O_RDWR)
    except FileNotFoundError:
        if numbers(directory):
            # Whoever looks for the end of the chain will see that it is missing.
            return store_private.open_file(path, os.O_RDWR | os.O_CREAT)
    fd = store_private.open_file(f"{path}.new", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 0)
    os.pwrite(fd, Head().encode(), 0)
    os.rename(f"{path}.new", path)
    return fd


class Snapshot:
    """The trail at one moment, between two lines: readers see no half of one."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        store_private.check_directory(directory)
        self.head: Head | None = None
        self.sizes: dict[int, int] = {}
        try:
            lock = store_private.open_file(f"{directory}/{LOCK}", os.O_RDONLY)
        except FileNotFoundError:
            self._look()
            return
        try:
            with locked(lock, shared=True):
                self._look()
        finally:
            os.close(lock)

    def _look(self) -> None:
        try:
            fd = store_private.open_file(f"{self.directory}/{HEAD}", os.O_RDONLY)
            self.head = head_at(fd)
            os.close(fd)
        except FileNotFoundError:
            pass
        for number in numbers(self.directory):
            fd = open_log(self.directory, number, os.O_RDONLY)
            self.sizes[number] = os.fstat(fd).st_size
            os.close(fd)

    def lines(self, number: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each line of a file with where it ends; the last may lack its newline."""
        left = self.sizes[number] - start
        end = start
        try:
            fd = open_log(self.directory, number, os.O_RDONLY)
        except FileNotFoundError:
            # Pruned meanwhile.
            return
        with open(fd, "rb", buffering=1 << 16) as file:
            file.seek(start)
            while left > 0:
                line = file.readline(min(MOST_LINE, left))
                if not line:
                    return
                left -= len(line)
                end += len(line)
                yield end, line

    def backwards(self, number: int) -> Iterator[bytes]:
        """The lines of a file from its end to its beginning."""
        try:
            fd = open_log(self.directory, number, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            at, rest = self.sizes[number], b""
            while at > 0:
                size = min(BLOCK, at)
                at -= size
                lines = (os.pread(fd, size, at) + rest).split(b"\n")
                # The first may begin in the block before.
                rest = lines[0]
                yield from (line for line in reversed(lines[1:]) if line)
            if rest:
                yield rest
        finally:
            os.close(fd)


def look(where: Where) -> Trail:
    """The trail in a directory, or the one that a writer has, as it is now."""
    return Snapshot(where) if isinstance(where, str) else where.snapshot()


def unavailable(why: str) -> Problem:
    """No line, no action: what cannot be written down is not done."""
    return Problem(
        "AUDIT_UNAVAILABLE", "the audit trail cannot be written",
        hint=f"nothing is done without it: {why}", rule="audit.write", retry_after=1.0,
    )  # fmt: skip
