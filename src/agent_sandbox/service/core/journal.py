"""The output of an execution as frames, for any number of readers, in bounded memory.

A frame is a stream (1 or 2), the length of its data, and the data. The offset behind a frame names
it, so a reader that tells the last one it has seen goes on exactly there. The newest frames are in
memory; when they are more than a block, or older than a second, they go to the file. Readers take
them from there at their own pace: the writer never waits for a reader.

When a lost command is started again, what the first start wrote is dropped, so that no execution
keeps more than one limit. Offsets go on, since readers have seen the old ones.

Reads and writes of the file happen on the loop: they are copies to and from the page cache, no
longer than two blocks, and a thread would cost more than the copy.
"""

from __future__ import annotations

import asyncio
import os
import struct
from bisect import bisect_right

from ...record import Record
from ..problems import Problem

STDOUT, STDERR = 1, 2
# The stream of a frame that only tells that nothing came for a while.
BEAT = 0
_HEAD = struct.Struct(">BI")
# What stays in memory, and the longest data of a frame: a backend may hand over more at once, and
# readers get it in parts, so that none of them needs much memory.
BLOCK = 64 * 1024
# A read of this length holds at least one whole frame.
_READ = _HEAD.size + 2 * BLOCK
# What followers have seen for longer than this outlives a killed process.
_FLUSH_AFTER = 1.0


class Frame(Record):
    """A piece of output. `offset` is behind it: the name under which replay goes on after it."""

    offset: int
    stream: int
    data: bytes


class Collected(Record):
    """Output in one piece; `cut` when there is more than was asked for, from offset `next` on."""

    stdout: bytes
    stderr: bytes
    cut: bool
    next: int


class Journal:
    """The frames of one execution. Only the loop may use it."""

    def __init__(self, path: str, *, limit: int, begins: int = 0) -> None:
        self._path = path
        self._limit = limit
        # The offset of what is kept, at which the file begins.
        self.begins = begins
        # The newest frames, and the offset at which they begin.
        self._tail = bytearray()
        self._start = begins
        # Where blocks of the file begin: an offset is checked by a walk from the nearest one.
        self._blocks: list[int] = [begins]
        self._descriptor = -1
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._kept = 0
        self.ended = False
        self.truncated = False
        # What the command has written, kept or not, by stream.
        self.bytes = {STDOUT: 0, STDERR: 0}

    @classmethod
    def stored(cls, path: str, begins: int = 0) -> Journal:
        """The journal of an execution that has ended, maybe under an earlier process."""
        journal = cls(path, limit=0, begins=begins)
        journal.ended = True
        try:
            journal._start += os.stat(path, follow_symlinks=False).st_size
        except FileNotFoundError:
            # It said nothing.
            return journal
        return journal

    @property
    def end(self) -> int:
        """The offset behind the newest frame."""
        return self._start + len(self._tail)

    @property
    def size(self) -> int:
        """How much is kept."""
        return self.end - self.begins

    # --- the writer

    def append(self, stream: int, data: bytes) -> None:
        """Take output. What is beyond the limit is counted and dropped."""
        if self.ended or not data:
            return
        self.bytes[stream] += len(data)
        room = self._limit - self._kept
        if len(data) > room:
            self.truncated = True
            data = data[: max(room, 0)]
        for start in range(0, len(data), BLOCK):
            self._add(stream, data[start : start + BLOCK])
        if self._tail and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_AFTER, self._flush)
        self._wake()

    def _add(self, stream: int, data: bytes) -> None:
        if self._kept >= self._limit:
            return
        self._kept += len(data)
        self._tail += _HEAD.pack(stream, len(data))
        self._tail += data
        if len(self._tail) > BLOCK:
            self._flush()

    def _flush(self) -> None:
        """Move the newest frames to the file."""
        self._unschedule()
        if self._save():
            self._start += len(self._tail)
            self._blocks.append(self._start)
        self._tail = bytearray()

    def _unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _save(self) -> bool:
        """Write the newest frames; False: they are lost.

        On a full disk the command goes on, nothing more is kept, and readers are told so. A torn
        frame at the end of the file is no frame for any reader.
        """
        try:
            if self._tail and self._descriptor < 0:
                # Ids are fresh: whatever lies there already was not made by us.
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o600)
            with memoryview(self._tail) as rest:
                done = 0
                at = self._start - self.begins
                while done < len(rest):
                    done += os.pwrite(self._descriptor, rest[done:], at + done)
        except OSError:
            self.truncated = True
            self._limit = self._kept = 0
            return False
        return True

    def restart(self) -> None:
        """What follows is of another start, and what is there goes. Readers skip the rest of it."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
        self._unschedule()
        self.begins = self._start = self.end
        self._tail, self._blocks = bytearray(), [self.begins]
        self._kept, self.truncated = 0, False
        self.bytes = dict.fromkeys(self.bytes, 0)

    def close(self) -> None:
        """No more output. All of it is in the file now; a silent command leaves none."""
        if self.ended:
            return
        self._unschedule()
        # The newest frames also stay in memory, for the one who waits for the answer.
        if not self._save():
            self._tail = bytearray()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.ended = True
        self._wake()

    def remove(self) -> None:
        """Forget it all."""
        self.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    # --- readers

    def read(self, offset: int) -> bytes:
        """What follows an offset: about two blocks of frames, of which the last may be cut."""
        if offset < self.begins:
            return b""
        if offset >= self._start:
            at = offset - self._start
            return bytes(memoryview(self._tail)[at : at + _READ])
        if self._descriptor >= 0:
            return self._read_file(self._descriptor, offset)
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Forgotten under its reader.
            return b""
        try:
            return self._read_file(descriptor, offset)
        finally:
            os.close(descriptor)

    def _read_file(self, descriptor: int, offset: int) -> bytes:
        # Behind `_start` the file may hold a torn write, or what is in memory too.
        return os.pread(descriptor, min(_READ, self._start - offset), offset - self.begins)

    async def more(self, seconds: float | None) -> bool:
        """Wait for a frame or the end; False: neither came for so long."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            done, _ = await asyncio.wait((waiter,), timeout=seconds)
        finally:
            if not waiter.done():
                waiter.cancel()
                self._waiting.remove(waiter)
        return bool(done)

    async def check(self, offset: int) -> None:
        """Refuse an offset at which no frame begins: replay from there would be noise.

        One behind the end is fine: a killed service may have lost the last second. So is one in
        what was dropped: who has seen that goes on with what is kept.
        """
        if 0 <= offset < self.begins:
            return
        at = self._blocks[bisect_right(self._blocks, offset) - 1] if offset >= 0 else offset + 1
        while at < offset and at < self.end:
            data = self.read(at)
            step = _walk(data, offset - at)
            if not step:
                return
            at += step
            # A walk over many small frames must not hold up everybody else.
            await asyncio.sleep(0)
        if at > offset:
            raise Problem("INVALID", f"no event ends at offset {offset}", rule="journal.offset",
                          field="Last-Event-ID", hint="use the id of an event")  # fmt: skip

    def follow(self, offset: int = 0, *, beat: float | None = None) -> Follower:
        """Frames behind an offset, until the end; a BEAT frame when `beat` seconds were silent."""
        return Follower(self, offset, beat)

    async def collect(self, most: int, offset: int = 0, *, whole: bool = False) -> Collected:
        """What is there now behind an offset, up to `most` bytes of data. Waits for nothing.

        `whole`: only whole frames, at least one, so that `next` goes on exactly behind them.
        """
        await self.check(offset)
        begin = offset = max(offset, self.begins)
        parts: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray()}
        data, at = self.read(offset), 0
        while True:
            frame = first(data, at, offset)
            if frame is None:
                if at == 0:
                    return _collected(parts, offset, cut=False)
                data, at = self.read(offset), 0
                await asyncio.sleep(0)
                continue
            most -= len(frame.data)
            if most < 0 and not (whole and offset == begin):
                if not whole:
                    parts[frame.stream] += frame.data[:most]
                return _collected(parts, offset, cut=True)
            parts[frame.stream] += frame.data
            at += frame.offset - offset
            offset = frame.offset


def _collected(parts: dict[int, bytearray], offset: int, *, cut: bool) -> Collected:
    return Collected(stdout=bytes(parts[STDOUT]), stderr=bytes(parts[STDERR]), cut=cut, next=offset)


def first(data: bytes, at: int, offset: int) -> Frame | None:
    """The whole frame at a place in a piece of a journal, of which the place is `offset`."""
    begin = at + _HEAD.size
    if begin > len(data):
        return None
    stream, length = _HEAD.unpack_from(data, at)
    if begin + length > len(data) or stream not in (STDOUT, STDERR):
        return None
    data = data[begin : begin + length]
    return Frame(offset=offset + _HEAD.size + length, stream=stream, data=data)


def _walk(data: bytes, goal: int) -> int:
    """How far the whole frames of `data` reach, but not over a `goal` at which one ends."""
    at, size = 0, len(data)
    while at < goal and at + _HEAD.size <= size:
        after = at + _HEAD.size + _HEAD.unpack_from(data, at)[1]
        if after > size:
            break
        at = after
    return at


class Follower:
    """Iterates over frames. A cancelled wait loses nothing: the next one goes on."""

    def __init__(self, journal: Journal, offset: int, beat: float | None) -> None:
        self._journal = journal
        # Behind the last frame that was given out, and what has been read from there on.
        self._offset = offset
        self._beat = beat
        self._data = b""
        self._at = 0
        self._checked = offset == 0

    def __aiter__(self) -> Follower:
        """Itself."""
        return self

    async def __anext__(self) -> Frame:
        """The next frame, or a BEAT."""
        if not self._checked:
            await self._journal.check(self._offset)
            self._offset = min(self._offset, self._journal.end)
            self._checked = True
        while (frame := self._next()) is None:
            # No wait between the look at `ended` and the one for frames: none can come between.
            ended = self._journal.ended
            behind = self._offset < self._journal.end
            self._data, self._at = self._journal.read(self._offset), 0
            if first(self._data, 0, 0) is not None:
                # A reader with much to catch up must not hold up everybody else.
                await asyncio.sleep(0)
            elif ended or behind:
                raise StopAsyncIteration
            elif not await self._journal.more(self._beat):
                return Frame(offset=self._offset, stream=BEAT, data=b"")
        self._at += frame.offset - self._offset
        self._offset = frame.offset
        return frame

    def _next(self) -> Frame | None:
        """Of what was read ahead, if it was not dropped meanwhile."""
        if self._offset < self._journal.begins:
            self._offset, self._data, self._at = self._journal.begins, b"", 0
        return first(self._data, self._at, self._offset)

    async def aclose(self) -> None:
        """Nothing is held but what was read ahead."""
        self._data, self._at = b"", 0
