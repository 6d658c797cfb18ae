"""The files of a sandbox in a pod. The agent does it; what it says is checked before it is used."""

from __future__ import annotations

import asyncio
import math

from ...pod import frames
from ..problems import Problem
from . import docker_tar as tars
from .docker_requests import UID
from .interface import Entry
from .pod_wire import Broken, request, unavailable
from .tree import Pieces
from .tree_open import MAX_PATH, check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from typing import TypeVar

    from .pod_wire import Wire

    T = TypeVar("T")

KINDS = frozenset(("file", "directory", "symlink", "other"))
MOST_SIZE = (1 << 63) - 1
MODES = 0o7777
# How long an agent may be silent, in seconds. A large tree takes its time; but who serves this may
# have been stopped, or lie.
SECONDS = 300.0


async def _in_time(asked: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(SECONDS):
            return await asked
    except TimeoutError as error:
        raise Broken("no answer") from error


class PodFiles:
    """`take` gives a connection to the agent; each operation needs one of its own."""

    def __init__(self, take: Callable[[], Awaitable[Wire]]) -> None:
        self._take = take

    async def _begin(self, operation: str, path: str, **fields: object) -> Wire:
        check(path)
        try:
            wire = await self._take()
            await _in_time(wire.send(request(f"files.{operation}", path=path, **fields)))
        except Broken as error:
            raise unavailable(error) from error
        return wire

    async def _ask(self, operation: str, path: str, **fields: object) -> dict[str, object]:
        """An operation with one answer."""
        wire = await self._begin(operation, path, **fields)
        try:
            return await _in_time(wire.document(frames.ANSWER))
        except Broken as error:
            raise unavailable(error) from error
        finally:
            await wire.close()

    async def entry(self, path: str) -> Entry:
        """One entry."""
        return _entry(await self._ask("entry", path), path)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file."""
        wire = await self._begin("read", path, offset=offset)
        try:
            entry = _entry(await _in_time(wire.document(frames.ANSWER)), path)
        except BaseException as error:
            wire.abort()
            if isinstance(error, Broken):
                raise unavailable(error) from error
            raise
        return entry, Pieces(_Content(wire).more, wire.abort)

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file."""
        wire = await self._begin("write", path, limit=limit, mode=mode & 0o777)
        return _entry(await self._upload(wire, data, limit, f"'{path}' would have"), path)

    async def _upload(
        self, wire: Wire, data: AsyncIterator[bytes], limit: int, what: str
    ) -> dict[str, object]:
        """Send a stream and wait for the answer, which may come before its end."""
        size = 0
        try:
            async for piece in data:
                size += len(piece)
                if size > limit:
                    raise Problem("TOO_LARGE", f"{what} more than {limit} bytes")
                try:
                    await _in_time(wire.send(*_framed(piece)))
                except Broken:
                    # It may have said no, and closed; that is still to be read.
                    break
            else:
                await _in_time(wire.send(frames.frame(frames.DONE)))
            return await _in_time(wire.document(frames.ANSWER))
        except Broken as error:
            raise unavailable(error) from error
        finally:
            # An upload that stops half way must not be taken for a whole one: it has no DONE.
            wire.abort()

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link or a directory."""
        await self._ask("delete", path, recursive=recursive)

    async def make(self, path: str) -> Entry:
        """A directory with its parents."""
        return _entry(await self._ask("make", path), path)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        wire = await self._begin("list", path, depth=min(depth, 1000), most=most)
        found: list[Entry] = []
        try:
            while True:
                document = await _in_time(wire.document(frames.LISTED, frames.ANSWER))
                if "entries" not in document:
                    more = frames.Fields(document).switch("more")
                    return sorted(found, key=lambda entry: entry.path), more
                found += _entries(document, path, most - len(found))
        except (Broken, frames.BadFrame) as error:
            raise unavailable(error) from error
        finally:
            wire.abort()

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar: taken apart and written anew."""
        wire = await self._begin("pack", path)
        try:
            await _in_time(wire.document(frames.ANSWER))
        except BaseException as error:
            wire.abort()
            if isinstance(error, Broken):
                raise unavailable(error) from error
            raise
        return Pieces(_Packed(wire).more, wire.abort)

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar below a directory."""
        wire = await self._begin("unpack", path, limit=limit)
        # What is sent may be compressed: the agent counts what it becomes.
        answer = await self._upload(wire, data, limit, "the archive has")
        try:
            return frames.Fields(answer).whole("count", most=tars.MAX_ENTRIES)
        except frames.BadFrame as error:
            raise unavailable(error) from error


def _framed(data: bytes) -> list[bytes]:
    starts = range(0, len(data), frames.CHUNK)
    return [frames.frame(frames.DATA, data[at : at + frames.CHUNK]) for at in starts]


class _Content:
    """A stream of the agent's, to its end."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def more(self) -> bytes | None:
        """The next piece; None at the end. A stream that breaks off is an error, not an end."""
        try:
            kind, data = await _in_time(self._wire.next())
        except Broken as error:
            raise unavailable(error) from error
        if kind == frames.DONE:
            return None
        if kind != frames.DATA:
            raise unavailable(f"an unexpected message {kind!r}")
        return data


class _Packed:
    """An archive of the agent's. No name leads out, and nothing is in it but files and links."""

    def __init__(self, wire: Wire) -> None:
        self._content = _Content(wire)
        self._reader = tars.Reader()
        self._left = self._size = 0
        self._is_over = False

    async def more(self) -> bytes | None:
        """The next piece."""
        if self._is_over:
            return None
        data = await self._content.more()
        try:
            if data is None:
                self._is_over = True
                self._reader.finish()
                if not self._reader.done:
                    raise tars.bad("it ends in the middle")
                return tars.END
            return b"".join(self._rewritten(data))
        except Problem as error:
            # Not the caller's archive, and not his mistake.
            raise unavailable(error.message) from error

    def _rewritten(self, data: bytes) -> Iterator[bytes]:
        for event in self._reader.feed(data):
            if isinstance(event, bytes):
                self._left -= len(event)
                yield event if self._left else event + tars.padding(self._size)
                continue
            self._left = self._size = event.size
            yield tars.header(_member(event), UID)


def _member(member: tars.Member) -> tars.Member:
    name = tars.clean(member.name)
    if not name or member.kind not in tars.TYPES:
        raise tars.bad("an entry that is no file, directory or link")
    target = tars.clean(member.target) if member.kind == tars.HARDLINK else member.target
    if "\0" in target or len(target) > tars.MAX_NAME:
        raise tars.bad("a link without a target")
    return member.replace(name=name, mode=member.mode & 0o777, target=target)


# --- entries


def _entries(document: dict[str, object], path: str, most: int) -> list[Entry]:
    """Some entries; an agent that sends none, or more than were asked for, might never end."""
    found = document["entries"]
    if len(document) != 1 or not isinstance(found, list):
        raise frames.BadFrame("no list of entries")
    if not 0 < len(found) <= min(most, frames.PER_LIST):
        raise frames.BadFrame("more entries than were asked for")
    return [_below(one, path) for one in found]


def _below(value: object, path: str) -> Entry:
    if not isinstance(value, dict):
        raise frames.BadFrame("no entry")
    name = frames.Fields(value).word("path")
    rest = name.removeprefix(f"{path}/")
    if rest == name or {"", ".", ".."} & set(rest.split("/")) or "\0" in name:
        raise frames.BadFrame("a name that is not below")
    return _read_entry(value, name)


def _entry(value: dict[str, object], path: str) -> Entry:
    """The one that was asked for, whatever the agent calls it."""
    try:
        return _read_entry(value, path)
    except frames.BadFrame as error:
        raise unavailable(error) from error


def _read_entry(value: dict[str, object], path: str) -> Entry:
    fields = frames.Fields(value)
    fields.word("path")
    modified = value.get("modified")
    entry = Entry(
        path=path, kind=fields.word("kind", most=16), size=fields.whole("size", most=MOST_SIZE),
        mode=fields.whole("mode", most=MODES), modified=_time(modified),
        target=fields.word("target", most=MAX_PATH),
    )  # fmt: skip
    if entry.kind not in KINDS or len(path) > MAX_PATH * 2:
        raise frames.BadFrame("an entry that makes no sense")
    return entry


def _time(value: object) -> float:
    """A file may be from before the epoch."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise frames.BadFrame("no time")
    return float(value)  # type: ignore[arg-type]
