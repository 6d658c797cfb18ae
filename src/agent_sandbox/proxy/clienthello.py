"""The first message of a TLS client, read as far as the name of the server. Pure.

Nothing is changed or answered: what was read here is what goes out, byte by byte. A hello may be
split over records; whatever TLS does not allow at this place is refused, because a server might
read it in another way than we do.
"""

from __future__ import annotations

from ..record import Record

MAX_HELLO = 16 * 1024
# A hello needs one record, or two if it is large. Each call looks at every record again.
MAX_RECORDS = 16
RECORD_HEADER = 5
MAX_RECORD = 16 * 1024
HANDSHAKE = 22
CLIENT_HELLO = 1
SERVER_NAME = 0
HOST_NAME = 0


class Hello(Record):
    """A complete hello; `name` is "" when the client named no server."""

    name: str
    # How many bytes of the input it took. What follows is encrypted, or early data.
    length: int


class BadHello(ValueError):
    """Not a hello that we let through."""


def read(data: bytes) -> Hello | None:
    """The hello at the start of the input, or None if more of it is needed."""
    message, at = bytearray(), 0
    for _ in range(MAX_RECORDS):
        if at > MAX_HELLO:
            raise BadHello("larger than 16 KiB")
        header = data[at : at + RECORD_HEADER]
        if header[:1] not in (b"", bytes((HANDSHAKE,))) or header[1:2] not in (b"", b"\3"):
            raise BadHello("not a TLS handshake")
        if len(header) < RECORD_HEADER:
            return None
        size = int.from_bytes(header[3:5], "big")
        # RFC 8446, 5.1: no empty fragments of handshakes, and no more than 2^14 bytes.
        if not 0 < size <= MAX_RECORD:
            raise BadHello(f"a record of {size} bytes")
        at += RECORD_HEADER
        message += data[at : at + size]
        whole = _length(message)
        at += size
        if whole is not None and len(message) >= whole:
            if len(message) > whole or at > len(data):
                raise BadHello("more than a hello in its record")
            return Hello(name=_name(bytes(message[4:])), length=at)
        if at > len(data):
            return None
    raise BadHello("too many records")


def _length(message: bytearray) -> int | None:
    """How long the whole message is, header included, as soon as that can be told."""
    if message and message[0] != CLIENT_HELLO:
        raise BadHello("not a ClientHello")
    if len(message) < 4:
        return None
    length = 4 + int.from_bytes(message[1:4], "big")
    if length > MAX_HELLO:
        raise BadHello("larger than 16 KiB")
    return length


class _Cursor:
    """Takes fields from the front; every length must fit."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if len(self.rest) < count:
            raise BadHello("a field is cut off")
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def vector(self, width: int) -> bytes:
        """A field with its length in front."""
        return self.take(int.from_bytes(self.take(width), "big"))


def _name(body: bytes) -> str:
    cursor = _Cursor(body)
    cursor.take(2 + 32)
    session, suites, compression = cursor.vector(1), cursor.vector(2), cursor.vector(1)
    if len(session) > 32 or len(suites) < 2 or len(suites) % 2 or not compression:
        raise BadHello("fields of impossible lengths")
    if not cursor.rest:
        return ""
    inner = _Cursor(cursor.vector(2))
    if cursor.rest:
        raise BadHello("bytes after the extensions")
    seen: set[int] = set()
    name = ""
    while inner.rest:
        kind = int.from_bytes(inner.take(2), "big")
        content = inner.vector(2)
        if kind in seen:
            # Which of the two would a server take?
            raise BadHello("an extension twice")
        seen.add(kind)
        if kind == SERVER_NAME:
            name = _server_name(content)
    return name


def _server_name(content: bytes) -> str:
    outer = _Cursor(content)
    listed = _Cursor(outer.vector(2))
    kind, name = listed.take(1)[0], listed.vector(2)
    if outer.rest or listed.rest or kind != HOST_NAME:
        raise BadHello("not exactly one server name")
    if not name or any(not 0x20 < byte < 0x7F for byte in name):
        raise BadHello("a server name that is no name")
    return name.decode("ascii")
