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
import stat
from functools import partial

from ...launch import sweeping
from ...policy.owned import PARTS
from ..problems import Problem
from . import tree_tar
from .interface import Entry
from .tree_open import DIRECTORY, Root, check, open_file, problem
from .tree_walk import DEEPEST, each

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator
    from concurrent.futures import Executor
    from typing import TypeVar

    T = TypeVar("T")

CHUNK = 1 << 18
BLOCK = 512
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
# Above the parts, in the order in which they are made.
SKELETON = ("", "/home", *PARTS)
# Modes that a client may set: no set-user-id bit on the host's disk.
PERMISSIONS = 0o777
# What a tree weighs that is nested deeper than anybody looks.
TOO_DEEP = 1 << 62
# What a file without a block weighs, and a further name of one that was counted. A file system has
# only so many of them, and whoever counts or removes them needs time and memory for each.
FILE_BYTES, NAME_BYTES = 4096, 1024


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
        return await self._do(path, _entry)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file."""
        entry, fd = await self._do(path, partial(_open, offset=offset))
        return entry, Pieces(partial(self._step, partial(_more, fd)), partial(os.close, fd))

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file as one step."""
        check(path)
        fresh = f"{self._place}/.new-{os.urandom(8).hex()}"
        try:
            fd = await self._step(partial(_create, fresh))
        except OSError as error:
            raise Problem("NOT_FOUND", "no such sandbox") from error
        try:
            await self._fill(fd, data, limit, path)
            os.fchmod(fd, mode & PERMISSIONS)
            return await self._do(path, partial(_put, fresh))
        except BaseException:
            _unlink(fresh)
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
                await self._step(partial(write_all, fd, chunk))
            except OSError as error:
                raise problem(error, path) from error

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link or a directory."""
        await self._do(path, partial(_delete, recursive=recursive))

    async def make(self, path: str) -> Entry:
        """A directory with its parents."""
        return await self._do(path, _make)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        return await self._do(path, partial(_list, depth=depth, most=most))

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar."""
        top = await self._do(path, Root.directory)
        pieces = tree_tar.pack(top)
        return Pieces(
            partial(self._step, partial(next, pieces, None)), partial(_end_pack, pieces, top)
        )

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar below a directory."""
        top = await self._do(path, _make_open)
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


# --- on a thread


def _create(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_all(fd: int, data: bytes) -> None:
    """Write everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def describe(path: str, info: os.stat_result, target: str = "") -> Entry:
    """An entry from what the kernel knows of it."""
    kind = KINDS.get(stat.S_IFMT(info.st_mode), "other")
    return Entry(
        path=path, kind=kind, size=info.st_size, mode=stat.S_IMODE(info.st_mode),
        modified=info.st_mtime, target=target,
    )  # fmt: skip


def _entry(root: Root, path: str) -> Entry:
    fd = root.find(path, follow=False)
    try:
        info = os.fstat(fd)
        return describe(
            path, info, os.readlink("", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else ""
        )
    finally:
        os.close(fd)


def _open(root: Root, path: str, *, offset: int) -> tuple[Entry, int]:
    found = root.find(path)
    try:
        fd = open_file(found)
        try:
            os.lseek(fd, offset, os.SEEK_SET)
        except OSError:
            # Further than any file of this file system can reach.
            os.close(fd)
            raise
        return describe(path, os.fstat(found)), fd
    finally:
        os.close(found)


def _more(fd: int) -> bytes | None:
    return os.read(fd, CHUNK) or None


def _end_pack(pieces: Generator[bytes], top: int) -> None:
    if inspect.getgeneratorstate(pieces) == inspect.GEN_CREATED:
        # It would close it at its end, which it never comes to.
        os.close(top)
    pieces.close()


def _put(fresh: str, root: Root, path: str) -> Entry:
    """Move a finished file to its place."""
    above = path.rpartition("/")[0]
    if above:
        os.close(_make_open(root, above))
    here, name = root.parent(path)
    try:
        os.rename(fresh, name, dst_dir_fd=here)
        return describe(path, os.stat(name, dir_fd=here, follow_symlinks=False))
    finally:
        os.close(here)


def _make(root: Root, path: str) -> Entry:
    fd = _make_open(root, path)
    try:
        return describe(path, os.fstat(fd))
    finally:
        os.close(fd)


def _make_open(root: Root, path: str) -> int:
    """A directory, made with its parents where they are missing."""
    try:
        return root.directory(path)
    except FileNotFoundError:
        if path in PARTS:
            raise
    if path.count("/") > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, "it is nested too deep")
    above, _, name = path.rpartition("/")
    here = _make_open(root, above)
    try:
        os.mkdir(name, 0o755, dir_fd=here)
    except FileExistsError:
        # Made meanwhile; or a link that leads nowhere, which then is an error here.
        pass
    finally:
        os.close(here)
    return root.directory(path)


def _delete(root: Root, path: str, *, recursive: bool) -> None:
    here, name = root.parent(path)
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=here)
            return
        if not recursive:
            os.rmdir(name, dir_fd=here)
            return
        aside = f"{root.place}/.gone-{os.urandom(8).hex()}"
        sweeping.move_up(here, name, root.fd, os.path.basename(aside))
    finally:
        os.close(here)
    sweeping.remove_tree(aside)


def _list(root: Root, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
    found: list[Entry] = []
    for one in each(root.directory(path), depth=depth):
        if len(found) >= most:
            return _sorted(found), True
        target = ""
        if stat.S_ISLNK(one.info.st_mode):
            try:
                target = os.readlink(one.name, dir_fd=one.here)
            except OSError:
                # Swapped meanwhile.
                continue
        found.append(describe(f"{path}/{one.path}", one.info, target))
    return _sorted(found), False


def _sorted(found: list[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.path)


def disk_usage(place: str, most: int = TOO_DEEP) -> int:
    """Bytes that a sandbox has on the disk. No link is followed, a file with two names is one.

    Beyond `most` it goes no further: a command that moves directories from behind the walk to where
    it has not been yet could keep it going for ever.
    """
    total = 0
    seen: set[int] = set()
    try:
        top = os.open(place, DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    for found in each(top, closed=True):
        if found.is_deep:
            # Where nobody counts there is no limit: it is taken for full.
            return TOO_DEEP
        info = found.info
        weight = max(info.st_blocks * BLOCK, FILE_BYTES)
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            weight = NAME_BYTES if info.st_ino in seen else weight
            seen.add(info.st_ino)
        total += weight
        if total > most:
            break
    return total
