"""Tar streams, read piece by piece and written anew. Pure.

Nothing of a client's headers reaches the engine as it came: each entry is judged, and a new header
is made from what was understood. Two readers cannot disagree about a header that one of them wrote.
"""

from __future__ import annotations

import posixpath
import tarfile
import zlib

from ...record import Record
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 512
PIECE = 1 << 18
END = bytes(2 * BLOCK)
MAX_EXTRA = 64 << 10
MAX_NAME = 4096
MAX_COMPONENT = 255
MAX_ENTRIES = 100_000
MAX_DEPTH = 128
FILE, DIRECTORY, SYMLINK, HARDLINK, OTHER = "file", "directory", "symlink", "hardlink", "other"
KINDS = {
    tarfile.REGTYPE: FILE, tarfile.AREGTYPE: FILE, tarfile.CONTTYPE: FILE,
    tarfile.DIRTYPE: DIRECTORY, tarfile.SYMTYPE: SYMLINK, tarfile.LNKTYPE: HARDLINK,
}  # fmt: skip
TYPES = {
    FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE, SYMLINK: tarfile.SYMTYPE,
    HARDLINK: tarfile.LNKTYPE,
}  # fmt: skip
EXTRA = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class Member(Record):
    """An entry, as it was understood."""

    name: str
    kind: str
    size: int = 0
    mode: int = 0o644
    modified: float = 0.0
    target: str = ""


def bad(why: str) -> Problem:
    """An archive that is not taken."""
    return Problem("INVALID", f"the archive is refused: {why}", rule="archive")


class Reader:
    """Takes a tar apart: each Member, then the pieces of its content."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._left = 0
        self._padding = 0
        # A header that is about the next one: its type, and what it says.
        self._extra: bytes | None = None
        self._said: dict[str, str] = {}
        self.done = False

    def feed(self, data: bytes) -> Iterator[Member | bytes]:
        """More of it."""
        self._data += data
        while not self.done:
            if self._left:
                piece = bytes(self._data[: self._left])
                if not piece:
                    return
                del self._data[: len(piece)]
                self._left -= len(piece)
                yield piece
                continue
            if len(self._data) < self._padding:
                return
            del self._data[: self._padding]
            self._padding = 0
            if self._extra is not None:
                if not self._take_extra():
                    return
                continue
            if len(self._data) < BLOCK:
                return
            member = self._header()
            if member is not None:
                yield member

    def finish(self) -> None:
        """There is no more: it must have been complete."""
        if not self.done and (
            self._left or self._extra is not None or len(self._data) > self._padding
        ):
            raise bad("it ends in the middle")

    def _header(self) -> Member | None:
        block = bytes(self._data[:BLOCK])
        del self._data[:BLOCK]
        if not any(block):
            self.done = True
            self._data.clear()
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise bad(f"not a tar ({error})") from error
        if info.type in EXTRA:
            if not 0 <= info.size <= MAX_EXTRA:
                raise bad("a header that is too long")
            self._extra = info.type
            self._extra_size = info.size
            return None
        return self._member(info)

    def _take_extra(self) -> bool:
        whole = self._extra_size + -self._extra_size % BLOCK
        if len(self._data) < whole:
            return False
        content = bytes(self._data[: self._extra_size])
        del self._data[:whole]
        kind, self._extra = self._extra, None
        if kind == tarfile.GNUTYPE_LONGNAME:
            self._said["path"] = _name(content)
        elif kind == tarfile.GNUTYPE_LONGLINK:
            self._said["linkpath"] = _name(content)
        elif kind == tarfile.XHDTYPE:
            self._said.update(records(content))
        # A global header says nothing that matters here.
        return True

    def _member(self, info: tarfile.TarInfo) -> Member:
        said, self._said = self._said, {}
        if info.type == tarfile.GNUTYPE_SPARSE or any(k.startswith("GNU.sparse") for k in said):
            raise bad("a sparse file")
        kind = KINDS.get(info.type, OTHER)
        name = said.get("path", info.name)
        if kind == FILE and name.endswith("/"):
            kind = DIRECTORY
        size = int(_number(said.get("size"), info.size))
        if size < 0 or size > 1 << 60:
            raise bad("a size that makes no sense")
        # Links and directories have no content, whatever they say; readers disagree about it.
        if kind != FILE and size:
            raise bad("content behind an entry that is no file")
        self._left = size
        self._padding = -size % BLOCK
        return Member(
            name=name, kind=kind, size=size, mode=info.mode & 0o7777,
            modified=_number(said.get("mtime"), float(info.mtime)),
            target=said.get("linkpath", info.linkname),
        )  # fmt: skip


def _name(content: bytes) -> str:
    return content.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError as error:
        raise bad("a number that is none") from error


def records(content: bytes) -> dict[str, str]:
    """The records of a pax header: LENGTH KEY=VALUE and a newline."""
    found: dict[str, str] = {}
    while content:
        length, space, _ = content.partition(b" ")
        size = int(length) if space and length.isdigit() and len(length) < 7 else 0
        record = content[len(length) + 1 : size]
        key, equals, value = record[:-1].partition(b"=")
        if size <= len(length) + 1 or size > len(content) or record[-1:] != b"\n" or not equals:
            raise bad("a damaged pax header")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        content = content[size:]
    return found


class Gunzip:
    """Content that may be compressed with gzip; bounded by what it becomes."""

    def __init__(self) -> None:
        self._head = b""
        self._zip: zlib._Decompress | None = None
        self._plain = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """More of it; what it means, in small pieces."""
        if self._plain:
            yield data
            return
        if self._zip is None:
            self._head += data
            if len(self._head) < 2:
                return
            data, self._head = self._head, b""
            if not data.startswith(b"\x1f\x8b"):
                self._plain = True
                yield data
                return
            self._zip = zlib.decompressobj(31)
        more = True
        while more and not self._zip.eof:
            try:
                piece = self._zip.decompress(data, PIECE)
            except zlib.error as error:
                raise bad("damaged gzip") from error
            yield piece
            data = self._zip.unconsumed_tail
            # A full piece: there may be more of it although all input was taken.
            more = bool(data) or len(piece) == PIECE

    def finish(self) -> bytes:
        """There is no more."""
        if self._zip is not None and not self._zip.eof:
            raise bad("it ends in the middle")
        return self._head


# --- writing


def header(member: Member, owner: int) -> bytes:
    """The header of an entry."""
    info = tarfile.TarInfo(member.name)
    info.type = TYPES[member.kind]
    info.size = member.size if member.kind == FILE else 0
    info.mode = member.mode
    info.uid = info.gid = owner
    info.mtime = min(max(int(member.modified), 0), 1 << 33)
    info.linkname = member.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    """What follows the content."""
    return bytes(-size % BLOCK)


# --- judging


def clean(name: str) -> str:
    """A relative name without `.`; "" is the directory itself. It never leads out."""
    if name.startswith("/") or "\0" in name or len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise bad(f"the name {name[:80]!r}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (
        len(parts) > MAX_DEPTH
        or ".." in parts
        or any(len(p.encode("utf-8", "replace")) > MAX_COMPONENT for p in parts)
    ):
        raise bad(f"the name {name[:80]!r}")
    return "/".join(parts)


class Judge:
    """Decides about the entries of an archive that a client sends, one after another."""

    def __init__(self) -> None:
        self._links: set[str] = set()
        self._files: set[str] = set()
        self._made: set[str] = {""}
        self.count = 0

    def admit(self, member: Member) -> list[Member]:
        """What to write for an entry: directories that it needs and that nobody named, and itself.

        The engine does not make a directory where a link is (noOverwriteDirNonDir), so no entry is
        written through a link that a sandbox has put there.
        """
        name = clean(member.name)
        if member.kind not in TYPES:
            raise bad(f"{name[:80]!r} is no file, directory or link")
        if not name:
            if member.kind != DIRECTORY:
                raise bad("an entry without a name")
            return []
        parts = name.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if any(one in self._links for one in above):
            raise bad(f"{name[:80]!r} lies behind a link")
        found = [
            Member(name=one, kind=DIRECTORY, mode=0o755) for one in above if one not in self._made
        ]
        self._made.update(above)
        target = self._target(member, name)
        for names in (self._links, self._files, self._made):
            names.discard(name)
        held = {SYMLINK: self._links, DIRECTORY: self._made}
        held.get(member.kind, self._files).add(name)
        self.count += 1
        if self.count > MAX_ENTRIES:
            raise Problem("TOO_LARGE", f"the archive has more than {MAX_ENTRIES} entries")
        # No set-user-id and the like: they mean nothing inside, and should mean nothing elsewhere.
        found.append(member.replace(name=name, mode=member.mode & 0o777, target=target))
        return found

    def _target(self, member: Member, name: str) -> str:
        if member.kind == HARDLINK:
            target = clean(member.target)
            # Nothing else is known not to lie behind a link of the sandbox's.
            if target not in self._files:
                raise bad(f"{name[:80]!r} is a second name of no file before it")
            return target
        if member.kind == SYMLINK:
            target = member.target
            if not target or "\0" in target or len(target) > MAX_NAME:
                raise bad(f"{name[:80]!r} is a link without a target")
            # Inside, a link leads where a command may go anyway, and nothing here follows it. But
            # the engine takes no relative one that climbs above the directory.
            place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            if place.split("/")[0] == "..":
                raise bad(f"{name[:80]!r} links out of the archive")
            return target
        return ""


def relative(member: Member) -> Member | None:
    """An entry of the engine's archive of a tree, named from the tree; None: not to be passed on.

    The engine puts the tree's own name before everything.
    """
    parts = [part for part in member.name.split("/") if part not in ("", ".")][1:]
    if not parts or member.kind not in TYPES or ".." in parts:
        return None
    target = member.target
    if member.kind == HARDLINK:
        target = "/".join([p for p in target.split("/") if p not in ("", ".")][1:])
        if not target:
            return None
    return member.replace(name="/".join(parts), target=target, mode=member.mode & 0o777)
