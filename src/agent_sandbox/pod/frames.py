"""Messages between the service and the agent: one letter, a length, that many bytes. Pure.

Both sides take the other for hostile. A kind that nobody expects and a length beyond its bound are
refused as soon as the head is there, so no more than one frame is ever held.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = 5
# From the service: what is wanted; input, its end (from the agent: nobody reads it any more), a
# signal, a size, an end at once.
REQUEST, INPUT, CLOSE, SIGNAL, SIZE, KILL = b"Q", b"I", b"C", b"S", b"W", b"K"
# From the agent: yes, no; output; input that was taken; a sign of life; how a command ended;
# some entries of a list.
ANSWER, REFUSAL, OUT, ERR, ROOM, ALIVE, ENDED, LISTED = (
    b"A", b"N", b"1", b"2", b"R", b"H", b"E", b"L",
)  # fmt: skip
# Either way: a piece of a file or an archive, and the end of it.
DATA, DONE = b"D", b"Z"

# Pieces of streams.
CHUNK = 1 << 17
# A command with its variables: the kernel itself takes about 2 MiB (execve(2)), JSON six times.
MOST_REQUEST = 1 << 24
MOST_TEXT = 1 << 16
MOST_LISTED = 1 << 20
# The most entries in one LISTED.
PER_LIST = 64

# Kind → the most bytes that it may carry.
TO_AGENT: Mapping[bytes, int] = {
    REQUEST: MOST_REQUEST, INPUT: CHUNK, CLOSE: 0, SIGNAL: 1, SIZE: 4, KILL: 0, DATA: CHUNK,
    DONE: 0,
}  # fmt: skip
TO_SERVICE: Mapping[bytes, int] = {
    ANSWER: MOST_TEXT, REFUSAL: MOST_TEXT, OUT: CHUNK, ERR: CHUNK, ROOM: 4, CLOSE: 0, ALIVE: 0,
    ENDED: MOST_TEXT, LISTED: MOST_LISTED, DATA: CHUNK, DONE: 0,
}  # fmt: skip


class BadFrame(ValueError):
    """The other side does not speak the protocol."""


def frame(kind: bytes, data: bytes = b"") -> bytes:
    """A message."""
    return kind + len(data).to_bytes(4, "big") + data


def number(kind: bytes, value: int) -> bytes:
    """A message with a number of four bytes."""
    return frame(kind, value.to_bytes(4, "big"))


def text(kind: bytes, document: object) -> bytes:
    """A message with a document. Bytes that are no text survive (PEP 383)."""
    return frame(kind, json.dumps(document, separators=(",", ":")).encode("ascii"))


class Reader:
    """Takes a stream apart. Only kinds of the table, within their bounds."""

    def __init__(self, kinds: Mapping[bytes, int]) -> None:
        self._kinds = kinds
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """More of the stream."""
        self._held += data

    def next(self) -> tuple[bytes, bytes] | None:
        """The next message; None: there is not enough yet. BadFrame: there never will be."""
        held = self._held
        if not held:
            return None
        kind = bytes(held[:1])
        most = self._kinds.get(kind)
        if most is None:
            raise BadFrame(f"a message of unknown kind {kind!r}")
        if len(held) < HEAD:
            return None
        size = int.from_bytes(held[1:HEAD], "big")
        if size > most:
            raise BadFrame(f"a message {kind!r} of {size} bytes")
        if len(held) < HEAD + size:
            return None
        found = bytes(held[HEAD : HEAD + size])
        del held[: HEAD + size]
        return kind, found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held: the stream may end here."""
        return not self._held


def document(data: bytes) -> dict[str, object]:
    """The document of a message, read in one way only: no name twice, no NaN, an object."""
    try:
        found = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise BadFrame("not a document") from error
    if not isinstance(found, dict):
        raise BadFrame("not an object")
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _constant(name: str) -> object:
    raise ValueError(name)


class Fields:
    """The members of a document, asked for by name and type. Others are refused at the end."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def word(self, name: str, default: str | None = None, most: int = MOST_TEXT) -> str:
        """A text. Half of a character that needs two is kept: it stands for a byte (PEP 383)."""
        found = self._values.pop(name, default)
        if not isinstance(found, str) or len(found) > most:
            raise BadFrame(f"'{name}' is no text")
        return found

    def whole(self, name: str, default: int | None = None, most: int = 1 << 62) -> int:
        """A number, not below zero."""
        found = self._values.pop(name, default)
        if type(found) is not int or not 0 <= found <= most:
            raise BadFrame(f"'{name}' is no number")
        return found

    def seconds(self, name: str, default: float | None = None) -> float:
        """A time; neither NaN nor without end."""
        found = self._values.pop(name, default)
        if type(found) not in (int, float) or not 0 <= found < 1e12:  # type: ignore[operator]
            raise BadFrame(f"'{name}' is no time")
        return float(found)  # type: ignore[arg-type]

    def switch(self, name: str, default: bool | None = None) -> bool:  # noqa: FBT001 - a value
        """Yes or no."""
        found = self._values.pop(name, default)
        if type(found) is not bool:
            raise BadFrame(f"'{name}' is neither true nor false")
        return found

    def words(self, name: str, most: int) -> tuple[str, ...]:
        """Texts."""
        found = self._values.pop(name, None)
        fits = isinstance(found, list) and len(found) <= most
        if not fits or not all(isinstance(one, str) for one in found):  # type: ignore[attr-defined]
            raise BadFrame(f"'{name}' is no list of texts")
        return tuple(found)  # type: ignore[arg-type]

    def table(self, name: str, most: int) -> dict[str, str]:
        """Texts by name."""
        found = self._values.pop(name, None)
        fits = isinstance(found, dict) and len(found) <= most
        if not fits or not all(isinstance(one, str) for one in found.values()):  # type: ignore[attr-defined]
            raise BadFrame(f"'{name}' is no table of texts")
        return found  # type: ignore[return-value]

    def end(self) -> None:
        """Nothing else is there."""
        if self._values:
            raise BadFrame(f"unknown: {', '.join(sorted(self._values))[:200]}")
