"""SOCKS 4, 4a and 5, the client's half of the handshake, read byte by byte. Pure.

Only CONNECT: BIND and UDP ASSOCIATE would open ways that no rule describes.
"""

from __future__ import annotations

from ..record import Record

VERSION_4, VERSION_5 = 4, 5
CONNECT = 1
MAX_TEXT = 255
# RFC 1928 and RFC 1929.
NO_AUTHENTICATION, PASSWORD, NO_METHOD = 0, 2, 0xFF
IPV4, NAME, IPV6 = 1, 3, 4
ADDRESS_LENGTHS = {IPV4: 4, IPV6: 16}

# Outcomes, in both dialects: (SOCKS 5, SOCKS 4).
GRANTED, FAILED, FORBIDDEN, UNREACHABLE, BAD_COMMAND, BAD_ADDRESS = range(6)
CODES = {
    GRANTED: (0, 0x5A), FAILED: (1, 0x5B), FORBIDDEN: (2, 0x5B), UNREACHABLE: (4, 0x5B),
    BAD_COMMAND: (7, 0x5B), BAD_ADDRESS: (8, 0x5B),
}  # fmt: skip


class BadSocks(ValueError):
    """A handshake to end; `answer` is what the client is told."""

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class Step(Record):
    """What was read: `used` bytes are done with, and `answer` is to be sent."""

    used: int
    answer: bytes = b""


class Target(Record):
    """What the client wants to be connected to."""

    used: int
    version: int
    # A name as text, or a packed address.
    host: str | bytes
    port: int


def reply(version: int, outcome: int) -> bytes:
    """The end of a handshake. Addresses in it are zero: ours are nobody's business."""
    five, four = CODES[outcome]
    if version == VERSION_4:
        return bytes((0, four)) + bytes(6)
    return bytes((VERSION_5, five, 0, IPV4)) + bytes(6)


class Handshake:
    """Where a client stands. `read` with all that has come and was not used before."""

    def __init__(self) -> None:
        self._next = self._first

    def read(self, data: bytes) -> Step | Target | None:
        """A step done, the target, or None if more is needed."""
        return self._next(data)

    def _first(self, data: bytes) -> Step | Target | None:
        if data[0] == VERSION_4:
            return _four(data)
        if data[0] != VERSION_5:
            raise BadSocks("not SOCKS")
        if len(data) < 2 or len(data) < 2 + data[1]:
            return None
        offered = data[2 : 2 + data[1]]
        for method in (NO_AUTHENTICATION, PASSWORD):
            if method in offered:
                self._next = self._password if method else _five
                return Step(used=2 + data[1], answer=bytes((VERSION_5, method)))
        raise BadSocks("no method that we know", bytes((VERSION_5, NO_METHOD)))

    def _password(self, data: bytes) -> Step | None:
        """Some clients insist on it. Any password will do: nobody but the sandbox comes here."""
        if data[0] != 1:
            raise BadSocks("not a password")
        if len(data) < 2 or len(data) < 3 + data[1]:
            return None
        end = 3 + data[1] + data[2 + data[1]]
        if len(data) < end:
            return None
        self._next = _five
        return Step(used=end, answer=b"\1\0")


def _five(data: bytes) -> Target | None:
    if len(data) < 5:
        return None
    version, command, reserved, kind = data[:4]
    if version != VERSION_5 or reserved:
        raise BadSocks("not a request", reply(VERSION_5, FAILED))
    if command != CONNECT:
        raise BadSocks("only CONNECT", reply(VERSION_5, BAD_COMMAND))
    if kind == NAME:
        start, length = 5, data[4]
    elif kind in ADDRESS_LENGTHS:
        start, length = 4, ADDRESS_LENGTHS[kind]
    else:
        raise BadSocks("an unknown kind of address", reply(VERSION_5, BAD_ADDRESS))
    end = start + length + 2
    if len(data) < end:
        return None
    host: str | bytes = data[start : start + length]
    if kind == NAME:
        host = _text(data[start : start + length], VERSION_5)
    port = int.from_bytes(data[end - 2 : end], "big")
    return Target(used=end, version=VERSION_5, host=host, port=port)


def _four(data: bytes) -> Target | None:
    if len(data) < 8:
        return None
    if data[1] != CONNECT:
        raise BadSocks("only CONNECT", reply(VERSION_4, BAD_COMMAND))
    port, host = int.from_bytes(data[2:4], "big"), data[4:8]
    end = _zero(data, 8)
    if end is None:
        return None
    # 4a: an address 0.0.0.x, x not 0, says that a name follows.
    if host[:3] != bytes(3) or host[3] == 0:
        return Target(used=end + 1, version=VERSION_4, host=host, port=port)
    after = _zero(data, end + 1)
    if after is None:
        return None
    name = _text(data[end + 1 : after], VERSION_4)
    return Target(used=after + 1, version=VERSION_4, host=name, port=port)


def _zero(data: bytes, start: int) -> int | None:
    """Where the text that starts here ends."""
    end = data.find(b"\0", start, start + MAX_TEXT + 1)
    if end < 0 and len(data) - start > MAX_TEXT:
        raise BadSocks("a text without an end", reply(VERSION_4, FAILED))
    return None if end < 0 else end


def _text(name: bytes, version: int) -> str:
    """A name that has only what can be in one. NUL in it has let others through elsewhere."""
    if not name or any(not 0x20 < byte < 0x7F for byte in name):
        raise BadSocks("a name that is no name", reply(version, FORBIDDEN))
    return name.decode("ascii")
