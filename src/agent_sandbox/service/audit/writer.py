"""Writes the audit trail: one line before each answer, on the end of the chain, by one at a time.

A line counts when `write` returns: it is then in the page cache, which a kill of this process does
not touch. A power cut may take lines that `sync` has not reached; `verify` then says which.
"""

from __future__ import annotations

import errno
import os
import threading
import time

from ...errors import reason as words
from .. import store_private
from . import places
from .lines import VERSION, BadLine, Head, parse, seal, stamp
from .trail import ALLOW, GAP, RECOVERED, ROTATE_BYTES, AuditTrail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Audit(AuditTrail):
    """The audit trail in a directory. Several processes may write to it."""

    def __init__(
        self, directory: str, *, rotate_bytes: int = ROTATE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.directory = store_private.make_directory(directory)
        self._rotate = rotate_bytes
        self._clock = clock
        # The lock of the file is this process's; threads need one of their own.
        self._mutex = threading.Lock()
        made = os.O_RDWR | os.O_CREAT
        self._lock = store_private.open_file(f"{self.directory}/{places.LOCK}", made)
        self._head_fd = self._log = -1
        self._head = Head()
        self._head_bytes = b""
        with self._mutex, places.locked(self._lock):
            self._head_fd = places.open_head(self.directory)
            self._recover()

    @property
    def seq(self) -> int:
        """The number of the last line that this process knows."""
        return self._head.seq

    @property
    def head(self) -> str:
        """The end of the chain as `SEQ:HASH`, to be kept elsewhere for `verify --head`."""
        return f"{self._head.seq}:{self._head.hash}"

    def _write(self, record: Mapping[str, object]) -> int:
        with self._mutex, places.locked(self._lock):
            try:
                self._catch_up()
                return self._append(record)
            except OSError as error:
                raise places.unavailable(words(error)) from error

    def snapshot(self) -> places.Snapshot:
        """What there is now, for readers."""
        return places.Snapshot(self.directory)

    def remove(self, number: int) -> None:
        """Remove a file."""
        os.unlink(f"{self.directory}/{places.name_of(number)}")

    def sync(self) -> None:
        """Bring what was written to the disk. It waits: call it from a thread, every second or so.

        The log first: a head that is ahead of its log is how a lost line shows.
        """
        with self._mutex:
            log, head = os.dup(self._log), os.dup(self._head_fd)
        try:
            os.fdatasync(log)
            os.fdatasync(head)
        finally:
            os.close(log)
            os.close(head)

    def close(self) -> None:
        """No more lines from here."""
        for fd in (self._log, self._head_fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._log = self._head_fd = self._lock = -1

    # --- one line, with the lock held

    def _catch_up(self) -> None:
        """See what others have done since: a line, or half of one, or worse."""
        status = os.fstat(self._log)
        unchanged = (
            status.st_size == self._head.end
            # A file that was removed takes lines, and nobody finds them.
            and status.st_nlink == os.fstat(self._head_fd).st_nlink == 1
            and os.pread(self._head_fd, len(self._head_bytes) + 1, 0) == self._head_bytes
        )
        if not unchanged:
            self._recover()

    def _append(self, record: Mapping[str, object]) -> int:
        seq = self._head.seq + 1
        line, digest = seal({
            "v": VERSION, "ts": stamp(self._clock()), "seq": seq, "prev": self._head.hash, **record,
        })  # fmt: skip
        if self._head.end and self._head.end + len(line) > self._rotate:
            self._open(self._head.file + 1)
            self._head = self._head.replace(file=self._head.file + 1, end=0)
        written = 0
        try:
            written = os.write(self._log, line)
        finally:
            if written != len(line):
                # A full disk takes a part of a line. It was not acknowledged: take it back.
                os.ftruncate(self._log, self._head.end)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._set_head(
            Head(seq=seq, hash=digest, file=self._head.file, end=self._head.end + len(line))
        )
        return seq

    def _set_head(self, head: Head) -> None:
        """The line first, then the head: a kill between leaves a whole line, which is found."""
        self._head = head
        self._head_bytes = head.encode()
        os.pwrite(self._head_fd, self._head_bytes, 0)

    def _open(self, number: int) -> None:
        fd = places.open_log(self.directory, number, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if self._log >= 0:
            os.close(self._log)
        self._log = fd

    # --- after a kill, or when others have written

    def _recover(self) -> None:
        """Find the end of the chain. What the head has acknowledged is never removed."""
        numbers = places.numbers(self.directory)
        head = places.head_at(self._head_fd)
        problem = ""
        if head is None:
            head = Head(file=numbers[0]) if numbers else Head()
            if numbers:
                problem = "the head was missing"
        elif os.fstat(self._head_fd).st_nlink != 1:
            problem = "the head was removed"
            os.close(self._head_fd)
            made = os.O_RDWR | os.O_CREAT
            self._head_fd = store_private.open_file(f"{self.directory}/{places.HEAD}", made)
        reach = Reach(self.directory, numbers, head, strict=not problem)
        problem = problem or reach.problem
        if problem:
            # What is there is evidence: go on in a new file, behind all of it.
            number = max([*numbers, reach.head.file]) + 1
            self._open(number)
            self._set_head(reach.head.replace(file=number, end=0))
            self._append({"action": GAP, "decision": ALLOW, "reason": problem})
            return
        self._open(reach.head.file)
        if reach.torn:
            os.ftruncate(self._log, reach.head.end)
        self._set_head(reach.head)
        if reach.torn:
            torn = {"file": places.name_of(reach.head.file), "bytes": reach.torn}
            self._append({
                "action": RECOVERED, "decision": ALLOW, "request": torn,
                "reason": "a line that was not finished, and so not acknowledged, was removed",
            })  # fmt: skip


class Reach:
    """How far the chain reaches beyond a head, and what stands in its way."""

    def __init__(self, directory: str, numbers: list[int], head: Head, *, strict: bool) -> None:
        self.directory = directory
        self.head = head
        self.problem = ""
        # Bytes of a line that was not finished, at the very end.
        self.torn = 0
        self._strict = strict
        if head.seq and head.file not in numbers:
            self.problem = f"{places.name_of(head.file)} was missing"
            return
        for number in [n for n in numbers if n >= head.file]:
            if self.problem or self.torn:
                self.problem = self.problem or f"{places.name_of(self.head.file)} was not finished"
                return
            self._follow(number)

    def _follow(self, number: int) -> None:
        """Take every line that hangs on the one before."""
        fd = places.open_log(self.directory, number, os.O_RDONLY)
        at = self.head.end if number == self.head.file else 0
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size < at:
                self.problem = f"{places.name_of(number)} was cut"
                return
            file.seek(at)
            while line := file.readline():
                if not line.endswith(b"\n"):
                    self.torn = len(line)
                    break
                if not self._take(number, line, file.tell()):
                    self.problem = f"{places.name_of(number)} had a strange line"
                    return
        if number != self.head.file:
            # Made for a line that did not come any more, or not all of it.
            self.head = self.head.replace(file=number, end=0)

    def _take(self, number: int, line: bytes, end: int) -> bool:
        try:
            found = parse(line[:-1])
        except BadLine:
            return False
        follows = found.seq == self.head.seq + 1 and found.prev == self.head.hash
        if not follows and self._strict:
            return False
        self.head = Head(seq=found.seq, hash=found.hash, file=number, end=end)
        return True
