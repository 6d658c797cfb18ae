"""The log: one line per event on a stream, as JSON or as text. No secret is given to it.

It has no queries, no bodies and no headers. What it has of a client cannot drive a terminal.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
import traceback
from datetime import UTC, datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from .http.messages import Request

JSON, TEXT, QUIET = "json", "text", "off"
FORMATS = (JSON, TEXT, QUIET)


class Log:
    """Writes lines. A stream that cannot be written is given up: the service goes on.

    Whoever reads them may stop to read. Then lines are dropped and counted: the service is one
    thread, and must not wait for its log.
    """

    def __init__(self, format: str, stream: TextIO | None = None) -> None:
        self._format = format
        self._stream = sys.stderr if stream is None else stream
        self._room = _poller(self._stream)
        self._dropped = 0

    def write(self, level: str, event: str, **members: object) -> None:
        """One line."""
        if self._format == QUIET and level != "error":
            return
        if self._room is not None and not self._room.poll(0):
            self._dropped += 1
            return
        if self._dropped:
            members["dropped"], self._dropped = self._dropped, 0
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        stamp = now.replace("+00:00", "Z")
        if self._format == TEXT:
            line = _text(stamp, level, event, members)
        else:
            line = json.dumps({"ts": stamp, "level": level, "event": event, **members})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._format = QUIET

    def request(
        self, request: Request, *, agent: str, route: str, status: int, seconds: float, code: str
    ) -> None:
        """A request that was answered. Monitors ask all the time: nobody reads that."""
        if self._format == QUIET or (route in ("/healthz", "/readyz") and status == 200):
            return
        more = {"code": code} if code else {}
        self.write(
            "warning" if status >= 500 else "info", "request", requestId=request.id, agent=agent,
            address=request.peer.address, method=request.method, path=request.path, route=route,
            status=status, ms=round(seconds * 1000, 2), **more,
        )  # fmt: skip


class Relay(logging.Handler):
    """Takes what modules say by `logging` into the log: one form, and nobody waits for a pipe."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        more = {}
        if record.exc_info and record.exc_info[1] is not None:
            more["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._log.write(level, record.name, message=record.getMessage(), **more)


def _poller(stream: TextIO) -> select.poll | None:
    """Tells whether a line can be written without waiting: a pipe then has a page free."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return None
    found = select.poll()
    found.register(fd, select.POLLOUT)
    return found


def _text(stamp: str, level: str, event: str, members: dict[str, object]) -> str:
    trace = str(members.pop("traceback", ""))
    shown = " ".join(f"{name}={_printable(str(value))}" for name, value in members.items())
    line = f"{stamp} {level:7} {event} {shown}"
    # Lines of a traceback stay lines; what is in them may be a client's.
    return "\n    ".join([line, *(_printable(part) for part in trace.splitlines())])


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
