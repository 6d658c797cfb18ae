"""Directories of this machine as tar streams, and back.

What comes out of a sandbox was written by whoever ran there. So nothing in it is followed: names
are opened one by one from a directory that is held open, links are made only where they cannot
lead out, and owners, set-user-id bits and devices are left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tarfile

from ..record import Record
from .errors import BadAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

PIECE = 256 * 1024
BLOCK = tarfile.BLOCKSIZE
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_ENTRIES = 1_000_000


class Unpacked(Record):
    """How many entries were written, and the names of those that were left out."""

    entries: int
    skipped: tuple[str, ...] = ()


# --- out of this machine


def pack(root: str) -> Iterator[bytes]:
    """A directory, or one file, as a tar. Names are relative to it; links stay links."""
    if not os.path.isdir(root) or os.path.islink(root):
        yield from _member(root, os.path.basename(os.path.normpath(root)))
    else:
        yield from _below(root, "")
    yield bytes(2 * BLOCK)


def _below(root: str, prefix: str) -> Iterator[bytes]:
    for name in sorted(os.listdir(os.path.join(root, prefix) if prefix else root)):
        inside = f"{prefix}/{name}" if prefix else name
        path = os.path.join(root, inside)
        yield from _member(path, inside)
        if os.path.isdir(path) and not os.path.islink(path):
            yield from _below(root, inside)


def _member(path: str, name: str) -> Iterator[bytes]:
    found = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode) & 0o777, found.st_mtime
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        yield _head(info)
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        yield _head(info)
    elif stat.S_ISREG(found.st_mode):
        yield from _content(path, info)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    # A pipe that took the file's place must not hold us.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        info.size = left = os.fstat(fd).st_size
        yield _head(info)
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                # It shrank: the head has promised more.
                yield bytes(left)
                break
            left -= len(piece)
            yield piece
    yield bytes(-info.size % BLOCK)


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """A file, piece by piece."""
    while piece := file.read(PIECE):
        yield piece


# --- onto this machine


class Replacement:
    """A file that takes its name when all of it is there. A link at that name is replaced."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._temporary = f"{path}.{secrets.token_hex(6)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(self._temporary, flags, 0o666), "wb")  # noqa: SIM115 - our life

    def write(self, data: bytes) -> None:
        """More of it."""
        self._file.write(data)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                os.rename(self._temporary, self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)


class Pieces:
    """Reads a tar from a function that gives pieces, b"" at the end."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._held = bytearray()

    def read(self, size: int) -> bytes:
        """So many bytes, fewer only at the end."""
        while len(self._held) < size and (piece := self._more()):
            self._held += piece
        found = bytes(self._held[:size])
        del self._held[:size]
        return found


def unpack(source: Pieces | IO[bytes], target: str) -> Unpacked:
    """Write a tar below a directory, which is made if it is missing."""
    os.makedirs(target, exist_ok=True)
    # The directory itself is the caller's, a link to it too; what is below is not.
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    entries, skipped = 0, []
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:  # type: ignore[call-overload]
            for info in archive:
                # Members are kept for seeking otherwise, and the list grows.
                archive.members = []
                if _place(root, archive, info):
                    entries += 1
                else:
                    skipped.append(info.name)
                if entries + len(skipped) > MAX_ENTRIES:
                    raise BadAnswer(f"the archive has more than {MAX_ENTRIES} entries")
    except tarfile.TarError as error:
        raise BadAnswer(f"the archive cannot be read: {error}") from None
    finally:
        os.close(root)
    return Unpacked(entries=entries, skipped=tuple(skipped))


def _place(root: int, archive: tarfile.TarFile, info: tarfile.TarInfo) -> bool:
    """Write one entry; False: it is left out."""
    names = [name for name in info.name.split("/") if name not in ("", ".")]
    if info.name.startswith("/") or ".." in names or "\0" in info.name:
        return False
    if not names:
        return info.isdir()
    if not (info.isdir() or info.isreg() or (info.issym() and stays_inside(info.linkname, names))):
        return False
    with _parent(root, names[:-1]) as parent:
        if info.isdir():
            os.close(_directory(parent, names[-1]))
        elif info.issym():
            _clear(parent, names[-1])
            os.symlink(info.linkname, names[-1], dir_fd=parent)
        else:
            _write(parent, names[-1], archive, info)
    return True


def stays_inside(target: str, names: list[str]) -> bool:
    """Whether a link cannot lead out, whatever other links there are.

    Its own directory is a real one, so ".." at the beginning go up real directories. Behind a name,
    which may be a link itself, ".." could go up from anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return not target.startswith("/") and up < len(names) and ".." not in parts[up:]


@contextlib.contextmanager
def _parent(root: int, names: list[str]) -> Iterator[int]:
    current = os.dup(root)
    try:
        for name in names:
            below = _directory(current, name)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def _directory(parent: int, name: str) -> int:
    """A directory, made if it is missing. A link, whoever made it, is an error."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except OSError as error:
        raise BadAnswer(f"cannot unpack into '{name}': {error.strerror}") from None


def _clear(parent: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadAnswer(f"cannot replace '{name}': {error.strerror}") from None


def _write(parent: int, name: str, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
    _clear(parent, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=parent)
    source = archive.extractfile(info)
    with open(fd, "wb") as file:
        while source is not None and (piece := source.read(PIECE)):
            file.write(piece)
        os.fchmod(fd, (info.mode & 0o755) | 0o600)
    with contextlib.suppress(OSError, OverflowError, ValueError):
        os.utime(name, (info.mtime, info.mtime), dir_fd=parent, follow_symlinks=False)
