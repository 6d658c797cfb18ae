"""Tar streams on their way to the engine: read entry by entry and written anew. No I/O.

The shell feeds what the client sends and passes on what comes back:

    body = transform(decision, grants)
    for data in client: upstream.send(body.feed(data))
    found = {reference: inspect(reference) for reference in body.references()}
    upstream.send(body.finish(found)); end of body

Either call may raise `Refused`. Then the upstream connection is closed before the end of its body:
the engine unpacks all before it builds, so nothing happens. No device node and no setuid bit gets
through: a container's path may be a directory of the project.
"""

from __future__ import annotations

import tarfile
import zlib

from .dockerfile import MAX_DOCKERFILE, Dockerfile
from .values import Grants, Reference, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slots import Lookup

BLOCK = 512
MAX_TOTAL = 8 << 30
MAX_META = 1 << 20
MAX_STEP = 1 << 20
MAX_NAME = 4096
ZERO = bytes(BLOCK)
ENCODING = ("utf-8", "surrogateescape")
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
OTHERS = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
# Keywords that change what an entry is. Attributes (capabilities among them) are not passed on.
USED = ("path", "linkpath", "size")


class Archive:
    """A tar for `PUT …/archive`."""

    def __init__(self, grants: Grants) -> None:
        self.grants = grants
        self._buffer = bytearray()
        self._inflate: zlib._Decompress | None = None
        self._started = False
        self._ended = False
        self._total = 0
        # The entry whose data is being read: what is left of it, and of its padding.
        self._left = 0
        self._padding = 0
        self._sink: bytearray | None = None
        self._silent = False
        self._tail = b""
        # A header of headers: its type, and the values that belong to the next entry.
        self._meta = b""
        self._values: dict[str, str] = {}

    # --- what the shell calls

    def feed(self, data: bytes) -> bytes:
        """Bytes from the client; what comes back goes to the engine."""
        if not self._started:
            self._buffer += data
            if len(self._buffer) < 6:
                return b""
            data = bytes(self._buffer)
            self._buffer.clear()
            self._start(data)
        if self._inflate is None:
            return self._plain(data)
        out = bytearray()
        more = bool(data)
        while more and not self._inflate.eof:
            piece = self._expand(data)
            out += self._plain(piece)
            data = self._inflate.unconsumed_tail
            # A full piece may leave output behind though all input is taken.
            more = bool(data) or len(piece) == MAX_STEP
        return bytes(out)

    def references(self) -> tuple[Reference, ...]:
        """What to look up before the end."""
        self._close()
        return ()

    def finish(self, found: Lookup) -> bytes:  # noqa: ARG002 - a context needs it
        """The end of the archive."""
        self._close()
        return self._tail + ZERO * 2

    # --- reading

    def _start(self, data: bytes) -> None:
        self._started = True
        if data[:2] == b"\x1f\x8b":
            self._inflate = zlib.decompressobj(wbits=31)
        elif data[:3] == b"BZh" or data[:6] == b"\xfd7zXZ\0" or data[:4] == b"\x28\xb5\x2f\xfd":
            raise Refused("archive.compression", "only gzip is read", 415)

    def _expand(self, data: bytes) -> bytes:
        assert self._inflate is not None  # noqa: S101 - for the type checker
        try:
            return self._inflate.decompress(data, MAX_STEP)
        except zlib.error as error:
            raise Refused("archive.compression", "the archive is not gzip", 400) from error

    def _close(self) -> None:
        if not self._started and self._buffer:
            raise Refused("archive.truncated", "the archive is not complete", 400)
        if self._inflate is not None and not self._inflate.eof:
            raise Refused("archive.truncated", "the archive is not complete", 400)
        if self._padding and not self._left:
            # Go's writer leaves the last zeros out when it is not closed, and so does docker.
            self._tail += b"" if self._silent else bytes(self._padding)
            self._padding = 0
            self._entry_ended()
        if self._left or self._buffer or self._values or self._meta:
            raise Refused("archive.truncated", "the archive is not complete", 400)

    def _plain(self, data: bytes) -> bytes:
        self._total += len(data)
        if self._total > MAX_TOTAL:
            raise Refused("archive.size", f"the archive is larger than {MAX_TOTAL} bytes", 413)
        out = bytearray()
        view = memoryview(data)
        while view.nbytes and not self._ended:
            if self._left or self._padding:
                view = self._data(view, out)
                continue
            missing = BLOCK - len(self._buffer)
            self._buffer += view[:missing]
            view = view[missing:]
            if len(self._buffer) == BLOCK:
                block = bytes(self._buffer)
                self._buffer.clear()
                self._header(block, out)
        return bytes(out)

    def _data(self, view: memoryview, out: bytearray) -> memoryview:
        """Data of an entry, and the zeros after it."""
        part = view[: self._left]
        self._left -= len(part)
        if self._sink is not None:
            self._sink += part
        if not self._silent:
            out += part
        view = view[len(part) :]
        if not self._left:
            skipped = min(self._padding, len(view))
            if not self._silent:
                out += bytes(skipped)
            self._padding -= skipped
            view = view[skipped:]
            if not self._padding:
                self._entry_ended()
        return view

    def _header(self, block: bytes, out: bytearray) -> None:
        if block == ZERO:
            if self._values:
                raise Refused("archive.header", "a name without its entry", 400)
            self._ended = True
            return
        try:
            info = tarfile.TarInfo.frombuf(block, *ENCODING)
        except (tarfile.TarError, ValueError) as error:
            raise Refused("archive.header", "not a tar archive", 400) from error
        if info.type in LONG or info.type in (*EXTENDED, tarfile.XGLTYPE):
            self._begin_meta(info)
            return
        self._entry(info, out)

    def _begin_meta(self, info: tarfile.TarInfo) -> None:
        if not 0 < info.size <= MAX_META:
            raise Refused("archive.header", "a name that is too long", 400)
        self._meta = info.type
        self._sink = bytearray()
        self._silent = True
        self._left, self._padding = info.size, -info.size % BLOCK

    def _entry_ended(self) -> None:
        meta, sink = self._meta, self._sink
        self._meta, self._sink, self._silent = b"", None, False
        if not meta or sink is None:
            return
        if meta in LONG:
            text = bytes(sink).split(b"\0", 1)[0].decode(*ENCODING)
            self._values[LONG[meta]] = text
            return
        values = _records(bytes(sink))
        if any(key.startswith("GNU.sparse") for key in values):
            raise Refused("archive.sparse", "sparse files are not read", 400)
        used = {key: value for key, value in values.items() if key in USED}
        if meta == tarfile.XGLTYPE:
            if used:
                raise Refused("archive.header", "a global header that names files", 400)
            return
        self._values.update(used)

    # --- writing

    def _entry(self, info: tarfile.TarInfo, out: bytearray) -> None:
        values, self._values = self._values, {}
        name = _plain_name(values.get("path", info.name))
        size = info.size
        if "size" in values:
            if not values["size"].isdecimal() or len(values["size"]) > 15:
                raise Refused("archive.header", "a size that is no number", 400)
            size = int(values["size"])
        if info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            raise Refused("archive.device", "device nodes are not copied")
        if info.type not in FILES and info.type not in OTHERS:
            raise Refused("archive.type", "an entry of an unknown kind", 400)
        fresh = tarfile.TarInfo(name)
        fresh.type = tarfile.REGTYPE if info.type in FILES else info.type
        # Not setuid, not setgid: root of the container is root of the host's files.
        fresh.mode = info.mode & 0o1777
        fresh.uid, fresh.gid = max(info.uid, 0), max(info.gid, 0)
        fresh.mtime = max(int(info.mtime), 0)
        fresh.linkname = self._link(info, values)
        fresh.size = size if info.type in FILES else 0
        if fresh.size < 0:
            raise Refused("archive.header", "a size below zero", 400)
        self._begin(fresh, out)

    def _link(self, info: tarfile.TarInfo, values: dict[str, str]) -> str:
        link = values.get("linkpath", info.linkname)
        if info.type == tarfile.LNKTYPE:
            return _plain_name(link)
        return link if info.type == tarfile.SYMTYPE else ""

    def _begin(self, fresh: tarfile.TarInfo, out: bytearray) -> None:
        out += _written(fresh)
        self._left, self._padding = fresh.size, -fresh.size % BLOCK


class Context(Archive):
    """A build context. Its Dockerfile is held back and goes out last, as it was checked."""

    def __init__(self, grants: Grants, *, dockerfile: str, arguments: object) -> None:
        super().__init__(grants)
        self._path = dockerfile
        self._arguments = arguments if isinstance(arguments, dict) else {}
        self._content: bytearray | None = None
        self._checked: Dockerfile | None = None

    def references(self) -> tuple[Reference, ...]:
        """The images that the Dockerfile names."""
        self._close()
        if self._content is None:
            raise Refused(
                "build.dockerfile", f"Cannot locate specified Dockerfile: {self._path}", 400
            )
        self._checked = Dockerfile(bytes(self._content), self.grants, self._arguments)
        return self._checked.references()

    def finish(self, found: Lookup) -> bytes:
        """The Dockerfile and the end of the archive."""
        if self._checked is None:
            self.references()
        assert self._checked is not None  # noqa: S101 - for the type checker
        text = self._checked.render(found)
        info = tarfile.TarInfo(self._path)
        info.size, info.mode = len(text), 0o644
        return self._tail + _written(info) + text + bytes(-len(text) % BLOCK) + ZERO * 2

    def _begin(self, fresh: tarfile.TarInfo, out: bytearray) -> None:
        if fresh.name != self._path:
            super()._begin(fresh, out)
            return
        if fresh.type != tarfile.REGTYPE:
            raise Refused("build.dockerfile", "the Dockerfile is not a plain file")
        if fresh.size > MAX_DOCKERFILE:
            raise Refused("build.size", "the Dockerfile is too large", 413)
        # The engine uses the last one of several, and so do we.
        self._content = self._sink = bytearray()
        self._silent = True
        self._left, self._padding = fresh.size, -fresh.size % BLOCK
        if not fresh.size:
            self._entry_ended()


def _written(info: tarfile.TarInfo) -> bytes:
    try:
        return info.tobuf(tarfile.GNU_FORMAT, *ENCODING)
    except (ValueError, UnicodeError) as error:
        raise Refused("archive.header", "an entry that cannot be written", 400) from error


def _plain_name(name: str) -> str:
    """A relative name that goes down only."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(name) > MAX_NAME:
        raise Refused("archive.name", "an entry with a name that leads out", 400)
    return "/".join(parts) or "."


def _records(data: bytes) -> dict[str, str]:
    """Extended headers: the length, a blank, KEY=VALUE and a line end for each."""
    found: dict[str, str] = {}
    while data:
        digits, space, _ = data.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 7:
            raise Refused("archive.header", "a malformed extended header", 400)
        length = int(digits)
        record, data = data[len(digits) + 1 : length], data[length:]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or length <= len(digits):
            raise Refused("archive.header", "a malformed extended header", 400)
        name = key.decode(*ENCODING)
        if name in found or b"\0" in value:
            raise Refused("archive.header", "a malformed extended header", 400)
        found[name] = value[:-1].decode(*ENCODING)
    return found
