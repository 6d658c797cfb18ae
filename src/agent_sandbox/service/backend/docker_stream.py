"""What an execution's connection carries: the engine's frames, and the words of our wrapper. Pure.

Without a terminal each piece has a head of eight bytes: the stream, three zeroes, the length. The
wrapper says on standard error, before everything and behind everything, what the engine does not:
that the command has started and as which process, and how it ended (see `docker_scripts`).
"""

from __future__ import annotations

import re
import signal

from ...record import Record

STDOUT, STDERR = 1, 2
HEAD = 8
# The wrapper's last words: two numbers, and two lines of times.
MAX_TAIL = 256
_MINUTES = re.compile(rb"(\d+)m(\d+)[.,](\d+)s")


class BadStream(ValueError):
    """Not what an engine sends."""


class Frames:
    """Takes the engine's frames apart."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """More bytes; (stream, content) in order. A frame need not be whole."""
        self._data += data
        found: list[tuple[int, bytes]] = []
        at = 0
        while True:
            if self._left:
                piece = bytes(self._data[at : at + self._left])
                at += len(piece)
                self._left -= len(piece)
                if piece:
                    found.append((self._stream, piece))
                if self._left:
                    break
            if len(self._data) - at < HEAD:
                break
            self._stream = self._data[at]
            if self._stream > STDERR or any(self._data[at + 1 : at + 4]):
                raise BadStream("the engine's stream has a frame of an unknown kind")
            self._left = int.from_bytes(self._data[at + 4 : at + HEAD], "big")
            at += HEAD
        del self._data[:at]
        return found


class Begun(Record):
    """The wrapper's first words."""

    pid: int = 0
    ooms: int = 0
    # "cwd", "126" or "127": it did not start.
    failed: str = ""


class Finished(Record):
    """The wrapper's last words."""

    code: int
    ooms: int
    cpu_ms: int


class Words:
    """Takes the wrapper's words out of one stream; the rest is the command's."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._held = b""
        self.begun: Begun | None = None
        self.finished: Finished | None = None

    def feed(self, data: bytes) -> bytes:
        """More of the stream; what belongs to the command."""
        data = self._held + data
        self._held = b""
        before = b""
        if self.begun is None:
            before, data = self._first(data)
            if self.begun is None:
                return before
        cut = self._hold(data)
        self._held = data[cut:]
        return before + data[:cut]

    def _first(self, data: bytes) -> tuple[bytes, bytes]:
        """Look for the first words. What comes before them is a complaint of the shell's."""
        at = data.find(self._token)
        end = data.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            cut = at if at >= 0 else _partial(data, self._token)
            self._held = data[cut:]
            return data[:cut], b""
        words = data[at + len(self._token) : end].split()
        self.begun = _begun(words)
        return data[:at], data[end + 1 :]

    def _hold(self, data: bytes) -> int:
        """From where on it could be the last words."""
        at = data.rfind(self._token)
        if at < 0:
            return _partial(data, self._token)
        if len(data) - at > MAX_TAIL:
            return max(at + len(self._token), _partial(data, self._token))
        return at

    def end(self) -> bytes:
        """The stream has ended; what was held back and belongs to the command."""
        data, self._held = self._held, b""
        at = data.rfind(self._token)
        if at < 0 or self.begun is None:
            return data
        self.finished = _finished(data[at + len(self._token) :])
        return data if self.finished is None else data[:at]


def _partial(data: bytes, token: bytes) -> int:
    """Where a token may have begun that is not complete yet."""
    for at in range(max(0, len(data) - len(token) + 1), len(data)):
        if token.startswith(data[at:]):
            return at
    return len(data)


def _begun(words: list[bytes]) -> Begun:
    if len(words) == 1 and words[0].startswith(b"!"):
        return Begun(failed=words[0][1:].decode("ascii", "replace"))
    if len(words) == 2 and all(word.isdigit() and len(word) < 12 for word in words):
        return Begun(pid=int(words[0]), ooms=int(words[1]))
    return Begun(failed="?")


def _finished(text: bytes) -> Finished | None:
    line, newline, rest = text.partition(b"\n")
    words = line.split()
    if not newline or len(words) != 2 or not all(w.isdigit() and len(w) < 12 for w in words):
        return None
    return Finished(code=int(words[0]), ooms=int(words[1]), cpu_ms=_cpu(rest))


def _cpu(text: bytes) -> int:
    """The children's times: user and system, on the second line."""
    lines = text.splitlines()
    found = _MINUTES.findall(lines[1]) if len(lines) > 1 else []
    return sum(
        (int(minutes) * 60 + int(seconds)) * 1000 + int((part + b"00")[:3])
        for minutes, seconds, part in found
    )


def signal_name(code: int) -> str:
    """The name of the signal in an exit code, as a shell writes it."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""
