"""WebSocket frames (RFC 6455), for both roles. Pure: bytes in, messages out.

No extension is ever agreed on, so every reserved bit is an error.
"""

from __future__ import annotations

import codecs
from base64 import b64encode
from hashlib import sha1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
DATA, CONTROL = (CONTINUATION, TEXT, BINARY), (CLOSE, PING, PONG)
FINAL, MASKED, OPCODE, LENGTH = 0x80, 0x80, 0x0F, 0x7F
RESERVED = 0x70
MAX_CONTROL = 125
# Lengths that are written in 2 and in 8 bytes.
MEDIUM, LONG = 126, 127

# Why a connection is closed.
NORMAL, GOING_AWAY, PROTOCOL_ERROR, UNSUPPORTED = 1000, 1001, 1002, 1003
NO_STATUS, ABNORMAL, BAD_DATA, POLICY, TOO_BIG, INTERNAL = 1005, 1006, 1007, 1008, 1009, 1011
# Those that may be on the wire: 1004 to 1006 and 1015 only say what an end has seen.
SENDABLE = (range(1000, 1004), range(1007, 1015), range(3000, 5000))

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

# TEXT comes as str, all else as bytes.
Message = tuple[int, "bytes | str"]


class FrameError(ValueError):
    """What the other end may not send; `code` is what it is told."""

    def __init__(self, why: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(why)
        self.code = code


def accept_key(key: str) -> str:
    """The proof that a server has understood the request."""
    digest = sha1(key.encode("latin-1") + MAGIC, usedforsecurity=False).digest()
    return b64encode(digest).decode("ascii")


def apply_mask(data: bytes, mask: bytes) -> bytes:
    """Mask or unmask. One number for the whole payload: a loop over bytes takes 50 times longer."""
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


def encode(opcode: int, payload: bytes, *, mask: bytes = b"", final: bool = True) -> bytes:
    """One frame. `mask`: four random bytes from a client, b"" from a server."""
    size = len(payload)
    if opcode in CONTROL and (size > MAX_CONTROL or not final):
        raise ValueError("a control frame is one frame of at most 125 bytes")
    first, bit = opcode | (FINAL if final else 0), MASKED if mask else 0
    if size < MEDIUM:
        head = bytes((first, bit | size))
    elif size < 1 << 16:
        head = bytes((first, bit | MEDIUM)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, bit | LONG)) + size.to_bytes(8, "big")
    return head + (mask + apply_mask(payload, mask) if mask else payload)


def is_sendable(code: int) -> bool:
    """Whether a close frame may carry it."""
    return any(code in codes for codes in SENDABLE)


def close_payload(code: int, reason: str = "") -> bytes:
    """The content of a close frame. A reason that is too long is cut at a character."""
    if code == NO_STATUS:
        return b""
    if not is_sendable(code):
        raise ValueError(f"{code} is no code that may be sent")
    text = reason.encode("utf-8", "replace")[: MAX_CONTROL - 2]
    return code.to_bytes(2, "big") + text.decode("utf-8", "ignore").encode()


def read_close(payload: bytes) -> tuple[int, str]:
    """What a close frame says."""
    if not payload:
        return NO_STATUS, ""
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not is_sendable(code):
        raise FrameError("a close frame without a code that may be sent")
    try:
        return code, payload[2:].decode()
    except UnicodeDecodeError:
        raise FrameError("a reason that is not UTF-8", BAD_DATA) from None


class Reader:
    """Frames from one end, as whole messages.

    A frame that would go over the limit is refused by its head, before its content comes.
    """

    def __init__(self, *, masked: bool, limit: int) -> None:
        """`masked`: whether the other end must mask. A client must, a server must not."""
        self._masked = masked
        self._limit = limit
        self._data = bytearray()
        # The message that is being put together: its opcode, or CONTINUATION for none.
        self._kind = CONTINUATION
        self._parts: list[bytes] = []
        self._size = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that is complete now. Take all; a FrameError ends the connection."""
        self.push(data)
        while (message := self.next()) is not None:
            if message[0] != CONTINUATION:
                yield message

    def push(self, data: bytes) -> None:
        """Keep more of the input, for `next`."""
        self._data += data

    def next(self) -> Message | None:
        """Read one frame of what was pushed; None: it is not all there.

        CONTINUATION, with nothing: a message is not complete yet. Whoever reads can stop between
        any two frames, so that no input, however cut up, takes long at once.
        """
        frame = self._frame()
        if frame is None:
            return None
        opcode, final, payload = frame
        if opcode in CONTROL:
            return opcode, payload
        return self._join(opcode, payload, final=final)

    def _frame(self) -> tuple[int, bool, bytes] | None:
        """The frame at the start of the input; None: not all there."""
        data = self._data
        if len(data) < 2:
            return None
        opcode, final, size = data[0] & OPCODE, bool(data[0] & FINAL), data[1] & LENGTH
        self._check(data[0], data[1])
        at = 2
        if size >= MEDIUM:
            at += 2 if size == MEDIUM else 8
            if len(data) < at:
                return None
            least = MEDIUM if size == MEDIUM else 1 << 16
            size = int.from_bytes(data[2:at], "big")
            if size < least:
                raise FrameError("a length that is not written as short as it can be")
        if opcode in DATA and self._size + size > self._limit:
            raise FrameError(f"a message of more than {self._limit} bytes", TOO_BIG)
        start = at + 4 if self._masked else at
        if len(data) < start + size:
            return None
        payload = bytes(data[start : start + size])
        if self._masked:
            payload = apply_mask(payload, bytes(data[at:start]))
        del data[: start + size]
        return opcode, final, payload

    def _check(self, first: int, second: int) -> None:
        opcode = first & OPCODE
        if first & RESERVED or opcode not in (*DATA, *CONTROL):
            raise FrameError("reserved bits or an unknown opcode")
        if bool(second & MASKED) != self._masked:
            raise FrameError("a client must mask" if self._masked else "a server must not mask")
        if opcode in CONTROL and (second & LENGTH > MAX_CONTROL or not first & FINAL):
            raise FrameError("a control frame that is long or in parts")
        if opcode in DATA and (opcode == CONTINUATION) != (self._kind != CONTINUATION):
            raise FrameError("a part without a beginning, or a beginning inside of a message")

    def _join(self, opcode: int, payload: bytes, *, final: bool) -> Message:
        if opcode != CONTINUATION:
            self._kind = opcode
        kind = self._kind
        if kind == TEXT:
            self._decode(payload, final=final)
        # An empty part must not leave anything behind: it would be memory for nothing.
        if payload:
            self._parts.append(payload)
            self._size += len(payload)
        if not final:
            return CONTINUATION, b""
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._kind, self._parts, self._size = CONTINUATION, [], 0
        return (kind, content.decode()) if kind == TEXT else (kind, content)

    def _decode(self, payload: bytes, *, final: bool) -> None:
        """Find bad text with the part that has it, not with the last one."""
        try:
            self._utf8.decode(payload, final)
        except UnicodeDecodeError:
            raise FrameError("text that is not UTF-8", BAD_DATA) from None
