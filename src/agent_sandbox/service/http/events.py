"""Server-Sent Events, written and read. Pure."""

from __future__ import annotations

import codecs

from ...record import Record

CONTENT_TYPE = "text/event-stream"
MAX_EVENT = 16 * 1024 * 1024
BREAKS = ("\r", "\n", "\0")


class Event(Record):
    """What a stream has said. `id` is the last one that it gave, also with an earlier event."""

    event: str
    data: str
    id: str


class TooLarge(ValueError):
    """An event that is larger than the reader takes."""


def encode(event: str, data: str, id: str = "") -> bytes:
    """One event. Line breaks in the data become several lines, which a reader joins with LF."""
    if any(mark in text for mark in BREAKS for text in (event, id)):
        # It would begin a field of its own.
        raise ValueError("a line break in the name or the id of an event")
    lines = [f"id: {id}"] if id else []
    lines.append(f"event: {event}")
    # Not splitlines(): to a reader only CR, LF and CRLF are line breaks.
    text = data.replace("\r\n", "\n").replace("\r", "\n") if "\r" in data else data
    lines += [f"data: {line}" for line in text.split("\n")]
    return ("\n".join(lines) + "\n\n").encode()


def comment(text: str = "") -> bytes:
    """A line that readers drop: it keeps a quiet connection alive."""
    if any(mark in text for mark in BREAKS):
        raise ValueError("a line break in a comment")
    return f": {text}\n\n".encode()


class Decoder:
    """A stream's bytes → its events."""

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self.last_id = ""
        # Milliseconds after which the stream wants to be asked again, if it said so.
        self.retry: int | None = None
        self._limit = limit
        # "utf-8-sig": a byte order mark at the start is dropped. What is not UTF-8 is replaced.
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        # A line without its end, in pieces: joining them each time would take quadratic time.
        self._partial: list[str] = []
        self._partial_size = 0
        self._after_cr = False
        self._event = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now."""
        text = self._utf8.decode(data)
        if text and self._after_cr:
            # The LF of a CRLF that came in two pieces.
            self._after_cr = False
            text = text.removeprefix("\n")
        if not text:
            return []
        self._after_cr = text.endswith("\r")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        found: list[Event] = []
        for line in lines[:-1]:
            self._partial.append(line)
            whole, self._partial, self._partial_size = "".join(self._partial), [], 0
            event = self._line(whole)
            if event is not None:
                found.append(event)
        self._partial.append(lines[-1])
        self._partial_size += len(lines[-1])
        self._check()
        return found

    def _check(self) -> None:
        if self._size + self._partial_size > self._limit:
            raise TooLarge(f"an event of more than {self._limit} characters")

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        self._size += len(line)
        self._check()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry = int(value)
        return None

    def _dispatch(self) -> Event | None:
        name, data = self._event, self._data
        self._event, self._data, self._size = "", [], 0
        if not data:
            return None
        return Event(event=name or "message", data="\n".join(data), id=self.last_id)
