"""The files of a sandbox that is a directory on this machine: looked at and changed from outside.

Each operation opens what it needs as `tree_open` says and works on descriptors from then on. A new
file is written beside the parts that the command can see, and moved to its place when it is whole;
what is removed is moved there first.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
from functools import partial

from ...launch import sweeping
from ...policy.owned import PARTS
from ..problems import Problem
from . import tree_steps as steps
from . import tree_tar
from .tree_open import Root, check, problem
from .tree_steps import TOO_DEEP, describe, disk_usage, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator
    from concurrent.futures import Executor
    from typing import TypeVar

    from .interface import Entry

    T = TypeVar("T")

__all__ = [
    "TOO_DEEP", "Pieces", "Tree", "describe", "disk_usage", "make_place", "remove_place",
    "remove_unused", "tidy_place", "write_all",
]  # fmt: skip

CHUNK = 1 << 18
# Above the parts, in the order in which they are made.
SKELETON = ("", "/home", *PARTS)
# Modes that a client may set: no set-user-id bit on the host's disk.
PERMISSIONS = 0o777


def make_place(place: str) -> None:
    """Make the directories of a sandbox; FileExistsError when they are there."""
    os.mkdir(place, 0o700)
    try:
        for part in SKELETON[1:]:
            os.mkdir(place + part)
            # Whatever the umask is. /tmp as programs expect it; all is below a closed directory.
            os.chmod(place + part, 0o1777 if part == "/tmp" else 0o755)
    except OSError:
        sweeping.remove_tree(place)
        raise


def remove_unused(place: str) -> bool:
    """Remove a sandbox that holds nothing, as after most single commands; False if it does."""
    try:
        for part in reversed(SKELETON):
            os.rmdir(place + part)
    except FileNotFoundError:
        return not os.path.lexists(place)
    except OSError:
        return False
    return True


def remove_place(place: str) -> None:
    """Remove a sandbox with all that is in it; OSError when something stays."""
    sweeping.remove_tree(place)
    if os.path.lexists(place):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def tidy_place(place: str) -> None:
    """Remove what a killed service has left beside the parts: half of an upload or of a removal."""
    parts = {part.split("/")[1] for part in PARTS}
    with os.scandir(place) as found:
        strays = [one for one in found if one.name not in parts]
    for one in strays:
        if one.is_dir(follow_symlinks=False):
            sweeping.remove_tree(one.path)
        else:
            os.unlink(one.path)


class Pieces:
    """A stream that lets go of what it reads from, also if nobody ever began to read.

    A generator would not: the `finally` of one that was never begun does not run, and a client may
    ask for the head alone (HEAD), or go away before the first piece.
    """

    def __init__(
        self, more: Callable[[], Awaitable[bytes | None]], end: Callable[[], None]
    ) -> None:
        self._more = more
        self._end: Callable[[], None] | None = end

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        if self._end is None:
            raise StopAsyncIteration
        try:
            piece = await self._more()
        except BaseException:
            await self.aclose()
            raise
        if piece is None:
            await self.aclose()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Let go of it."""
        end, self._end = self._end, None
        if end is not None:
            end()


class Tree:
    """The files of one sandbox."""

    def __init__(self, place: str, executor: Executor) -> None:
        self._place = place
        self._executor = executor

    async def _step(self, job: Callable[[], T]) -> T:
        """On a thread, which is waited for even when nobody wants its result any more.

        A descriptor that is closed under its hands may be somebody else's file a moment later.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, job)
        except RuntimeError as error:
            # The threads are gone: a drain has come to its end.
            raise Problem("DRAINING", "the service is stopping", retry_after=5.0) from error
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def _do(self, path: str, job: Callable[[Root, str], T]) -> T:
        """One operation on a thread."""
        return await self._step(partial(self._act, check(path), job))

    def _act(self, path: str, job: Callable[[Root, str], T]) -> T:
        with Root(self._place) as root:
            try:
                return job(root, path)
            except OSError as error:
                raise problem(error, path) from error

    async def entry(self, path: str) -> Entry:
        """One entry."""
        return await self._do(path, steps.look)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file."""
        entry, fd = await self._do(path, partial(steps.open_at, offset=offset))
        return entry, Pieces(partial(self._step, partial(_more, fd)), partial(os.close, fd))

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file as one step."""
        check(path)
        fresh = f"{self._place}/.new-{os.urandom(8).hex()}"
        try:
            fd = await self._step(partial(steps.create, fresh))
        except OSError as error:
            raise Problem("NOT_FOUND", "no such sandbox") from error
        try:
            await self._fill(fd, data, limit, path)
            os.fchmod(fd, mode & PERMISSIONS)
            return await self._do(path, partial(steps.put, fresh))
        except BaseException:
            steps.unlink(fresh)
            raise
        finally:
            os.close(fd)

    async def _fill(self, fd: int, data: AsyncIterator[bytes], limit: int, path: str) -> None:
        size = 0
        async for chunk in data:
            size += len(chunk)
            if size > limit:
                raise Problem("TOO_LARGE", f"'{path}' would have more than {limit} bytes")
            try:
                await self._step(partial(steps.write_all, fd, chunk))
            except OSError as error:
                raise problem(error, path) from error

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link or a directory."""
        await self._do(path, partial(steps.delete, recursive=recursive))

    async def make(self, path: str) -> Entry:
        """A directory with its parents."""
        return await self._do(path, steps.make)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        return await self._do(path, partial(steps.list_below, depth=depth, most=most))

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar."""
        top = await self._do(path, Root.directory)
        pieces = tree_tar.pack(top)
        return Pieces(
            partial(self._step, partial(next, pieces, None)), partial(_end_pack, pieces, top)
        )

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar below a directory."""
        top = await self._do(path, steps.make_open)
        archive = tree_tar.Unpacking(top, self._place, limit)
        try:
            async for chunk in data:
                await self._step(partial(archive.feed, chunk))
            await self._step(archive.finish)
        except OSError as error:
            raise problem(error, path) from error
        finally:
            archive.close()
        return archive.count


def _more(fd: int) -> bytes | None:
    return os.read(fd, CHUNK) or None


def _end_pack(pieces: Generator[bytes], top: int) -> None:
    if inspect.getgeneratorstate(pieces) == inspect.GEN_CREATED:
        # It would close it at its end, which it never comes to.
        os.close(top)
    pieces.close()
