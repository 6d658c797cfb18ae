"""Tar archives to and from the directory of a sandbox. Nothing of an archive is believed.

An entry's directories are opened one by one below the top, no link followed: not one that the
archive brought along, nor one that the command inside puts there meanwhile. Links are made as they
are written (inside they lead where the command may go anyway), after all files, so that no later
entry can go through them. Counted is what is unpacked, not what was sent.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zlib

from ..problems import Problem
from .tree_open import DIRECTORY
from .tree_walk import each

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

BLOCK = 512
ZERO = bytes(BLOCK)
CHUNK = 1 << 18
MAX_ENTRIES = 100_000
# Names and other texts of one entry.
MAX_META = 1 << 16
MAX_NAME = 4096
MAX_DEPTH = 128
ENCODING = ("utf-8", "surrogateescape")
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
USED = ("path", "linkpath", "size")
# No set-user-id bits on the host's disk.
PERMISSIONS = 0o777


def _bad(message: str) -> Problem:
    return Problem("INVALID", f"cannot unpack the archive: {message}", field="body")


# --- packing


def pack(top: int) -> Generator[bytes]:
    """The tree below an open directory, which is closed at the end."""
    for found in each(top):
        info = tarfile.TarInfo(found.path)
        info.mode = stat.S_IMODE(found.info.st_mode)
        info.mtime = int(found.info.st_mtime)
        kind = stat.S_IFMT(found.info.st_mode)
        try:
            if kind == stat.S_IFDIR:
                info.type = tarfile.DIRTYPE
            elif kind == stat.S_IFLNK:
                info.type, info.linkname = (
                    tarfile.SYMTYPE,
                    os.readlink(found.name, dir_fd=found.here),
                )
            elif kind == stat.S_IFREG:
                yield from _file(found.here, found.name, info)
                continue
            else:
                # A socket or a FIFO is nothing without its processes. Many of them must not keep a
                # thread that others wait for.
                yield b""
                continue
        except OSError:
            # Removed, swapped or closed meanwhile.
            continue
        yield _header(info)
    yield ZERO * 2


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, *ENCODING)


def _file(here: int, name: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    try:
        now = os.fstat(fd)
        if not stat.S_ISREG(now.st_mode):
            return
        info.size = left = now.st_size
        yield _header(info)
        while left:
            data = os.read(fd, min(CHUNK, left))
            # It may have shrunk since its size was written.
            data = data or bytes(min(CHUNK, left))
            left -= len(data)
            yield data
        yield bytes(-info.size % BLOCK)
    finally:
        os.close(fd)


# --- unpacking


class Unpacking:
    """Takes an archive piece by piece. `feed`, `finish`; `close` in any case."""

    def __init__(self, top: int, place: str, limit: int) -> None:
        self._top = top
        self._place = place
        self._limit = limit
        self.count = 0
        self._total = 0
        self._start = b""
        self._inflate: zlib._Decompress | None = None
        self._begun = False
        self._over = False
        self._buffer = bytearray()
        # What is being read: a file that is written, or texts about the next entry.
        self._left = 0
        self._padding = 0
        self._file = -1
        self._fresh = ""
        self._target = ("", 0)
        self._meta = b""
        self._texts: bytearray | None = None
        self._values: dict[str, str] = {}
        self._links: list[tuple[bytes, str, str]] = []
        self._modes: list[tuple[str, int]] = []

    def feed(self, data: bytes) -> None:
        """The next bytes of the archive."""
        if not self._begun:
            self._start += data
            if len(self._start) < 6:
                return
            data, self._start = self._start, b""
            self._begin(data)
        if self._inflate is None:
            self._plain(data)
            return
        more = True
        while more and not self._inflate.eof:
            try:
                piece = self._inflate.decompress(data, CHUNK)
            except zlib.error as error:
                raise _bad("it is not gzip") from error
            self._plain(piece)
            data = self._inflate.unconsumed_tail
            more = bool(data) or len(piece) == CHUNK

    def finish(self) -> None:
        """The end of the archive: links and modes of directories come last."""
        if self._start or self._left or self._buffer or self._values or self._meta or self._texts:
            raise _bad("it is not complete")
        if self._inflate is not None and not self._inflate.eof:
            raise _bad("it is not complete")
        if self._file >= 0:
            self._end_file()
        for kind, name, target in self._links:
            self._link(kind, name, target)
        for name, mode in reversed(self._modes):
            self._set_mode(name, mode)

    def close(self) -> None:
        """Close what is open, remove what is unfinished."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            os.unlink(self._fresh)
        if self._top >= 0:
            os.close(self._top)
            self._top = -1

    def _begin(self, data: bytes) -> None:
        self._begun = True
        if data[:2] == b"\x1f\x8b":
            self._inflate = zlib.decompressobj(wbits=31)
        elif data[:3] == b"BZh" or data[:6] == b"\xfd7zXZ\0" or data[:4] == b"\x28\xb5\x2f\xfd":
            raise Problem("UNSUPPORTED_MEDIA_TYPE", "only plain and gzip archives are unpacked")

    def _plain(self, data: bytes) -> None:
        self._total += len(data)
        # Headers count as well: a hundred thousand empty files are not nothing.
        if self._total > self._limit:
            raise Problem("TOO_LARGE", f"the archive unpacks to more than {self._limit} bytes")
        view = memoryview(data)
        while view.nbytes and not self._over:
            if self._left or self._padding:
                view = self._content(view)
                continue
            missing = BLOCK - len(self._buffer)
            self._buffer += view[:missing]
            view = view[missing:]
            if len(self._buffer) == BLOCK:
                block = bytes(self._buffer)
                self._buffer.clear()
                self._header(block)

    def _content(self, view: memoryview) -> memoryview:
        """Data of an entry, and the zeros after it."""
        count = min(self._left, len(view))
        part = view[:count]
        if self._texts is not None:
            self._texts += part
        while self._file >= 0 and part.nbytes:
            part = part[os.write(self._file, part) :]
        self._left -= count
        skipped = 0
        if not self._left:
            skipped = min(self._padding, len(view) - count)
            self._padding -= skipped
            if not self._padding:
                self._end_content()
        return view[count + skipped :]

    def _end_content(self) -> None:
        if self._texts is not None:
            self._learn(bytes(self._texts))
        elif self._file >= 0:
            self._end_file()

    # --- headers

    def _header(self, block: bytes) -> None:
        if block == ZERO:
            if self._values:
                raise _bad("a name without its entry")
            self._over = True
            return
        try:
            info = tarfile.TarInfo.frombuf(block, *ENCODING)
        except (tarfile.TarError, ValueError) as error:
            raise _bad("it is not a tar") from error
        if info.type in LONG or info.type in EXTENDED:
            if not 0 < info.size <= MAX_META:
                raise _bad("a name that is too long")
            self._meta, self._texts = info.type, bytearray()
            self._left, self._padding = info.size, -info.size % BLOCK
            return
        self._entry(info)

    def _learn(self, text: bytes) -> None:
        """Texts that belong to the next entry."""
        meta, self._meta, self._texts = self._meta, b"", None
        if meta in LONG:
            self._values[LONG[meta]] = text.split(b"\0", 1)[0].decode(*ENCODING)
            return
        values = _records(text)
        if any(key.startswith("GNU.sparse") for key in values):
            raise _bad("sparse files are not unpacked")
        used = {key: value for key, value in values.items() if key in USED}
        if meta == tarfile.XGLTYPE:
            if used:
                raise _bad("a global header that names files")
            return
        self._values.update(used)

    def _entry(self, info: tarfile.TarInfo) -> None:
        values, self._values = self._values, {}
        self.count += 1
        if self.count > MAX_ENTRIES:
            raise Problem("TOO_LARGE", f"the archive has more than {MAX_ENTRIES} entries")
        parts = _plain_parts(values.get("path", info.name))
        name = "/".join(parts)
        size = info.size
        if "size" in values:
            if not values["size"].isdecimal() or len(values["size"]) > 15:
                raise _bad("a size that is no number")
            size = int(values["size"])
        if info.type in FILES and name and size >= 0:
            self._begin_file(name, info.mode & PERMISSIONS, size)
        elif info.type == tarfile.DIRTYPE:
            if name:
                os.close(self._enter(parts))
                self._modes.append((name, info.mode & PERMISSIONS))
        elif info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) and name:
            target = values.get("linkpath", info.linkname)
            if not target or "\0" in target or len(target) > MAX_NAME:
                raise _bad("a link without a target")
            if info.type == tarfile.LNKTYPE:
                target = "/".join(_plain_parts(target))
            self._links.append((info.type, name, target))
        else:
            raise _bad(f"'{name}' is a device, a FIFO or of an unknown kind")

    # --- files

    def _begin_file(self, name: str, mode: int, size: int) -> None:
        if self._total + size > self._limit + CHUNK:
            raise Problem("TOO_LARGE", f"the archive unpacks to more than {self._limit} bytes")
        # Written where nobody inside can see it, moved to its place when it is whole.
        self._fresh = f"{self._place}/.new-{os.urandom(8).hex()}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._fresh, flags, 0o600)
        self._target = (name, mode)
        self._left, self._padding = size, -size % BLOCK
        if not size:
            self._end_file()

    def _end_file(self) -> None:
        name, mode = self._target
        os.fchmod(self._file, mode)
        *above, leaf = name.split("/")
        here = self._enter(above)
        try:
            os.rename(self._fresh, leaf, dst_dir_fd=here)
        finally:
            os.close(here)
        os.close(self._file)
        self._file = -1

    def _link(self, kind: bytes, name: str, target: str) -> None:
        *above, leaf = name.split("/")
        here = self._enter(above)
        try:
            _clear(here, leaf)
            if kind == tarfile.SYMTYPE:
                os.symlink(target, leaf, dir_fd=here)
                return
            *way, other = target.split("/")
            there = self._enter(way, make=False)
            try:
                info = os.stat(other, dir_fd=there, follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode):
                    raise _bad(f"'{name}' is a second name of what is no file")
                # Not through a link that was put there meanwhile: that is a second name of it.
                os.link(other, leaf, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            finally:
                os.close(there)
        except FileNotFoundError as error:
            raise _bad(f"'{name}' is a second name of what is not there") from error
        finally:
            os.close(here)

    def _set_mode(self, name: str, mode: int) -> None:
        fd = self._enter(name.split("/"))
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def _enter(self, parts: list[str], *, make: bool = True) -> int:
        """A directory below the top, made where it is missing; no link on the way is followed."""
        here = os.dup(self._top)
        for part in parts:
            try:
                deeper = _step(here, part, make=make)
            finally:
                os.close(here)
            here = deeper
        return here


def _step(here: int, part: str, *, make: bool) -> int:
    flags = DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(part, flags, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(part, 0o755, dir_fd=here)
    except FileExistsError:
        # The command was faster.
        pass
    return os.open(part, flags, dir_fd=here)


def _clear(here: int, name: str) -> None:
    """Make room for a link. A directory stays, and is an error then."""
    try:
        os.unlink(name, dir_fd=here)
    except FileNotFoundError:
        return


def _plain_parts(name: str) -> list[str]:
    """A relative name that goes down only."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _bad(f"{name!r} leads out")
    if len(name) > MAX_NAME or len(parts) > MAX_DEPTH:
        raise _bad("a name that is too long")
    return parts


def _records(data: bytes) -> dict[str, str]:
    """Extended headers: the length, a blank, KEY=VALUE and a line end for each."""
    found: dict[str, str] = {}
    while data:
        digits, space, _ = data.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 7:
            raise _bad("a malformed extended header")
        length = int(digits)
        record, data = data[len(digits) + 1 : length], data[length:]
        key, equals, value = record.partition(b"=")
        ends = value.endswith(b"\n") and len(record) == length - len(digits) - 1
        if not equals or not ends:
            raise _bad("a malformed extended header")
        name = key.decode(*ENCODING)
        if name in found or b"\0" in value:
            raise _bad("a malformed extended header")
        found[name] = value[:-1].decode(*ENCODING)
    return found
