"""The head of an answer. Pure, but for the date.

A value with a line break would let whoever chose it write fields, or a whole second answer, of its
own. It raises, whatever it was meant for.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

from ...proxy.http1 import TOKEN
from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus if s >= 200}
SWITCHING = "HTTP/1.1 101 Switching Protocols\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
# How an answer is framed is decided here and by nobody else.
FRAMING = frozenset(("transfer-encoding", "keep-alive", "trailer", "date"))
BODILESS = frozenset((204, 304))
MAX_NAMES = 1024

_names: dict[str, str] = {}
_date = (0, "")


class Plan(Record):
    """A head, and what may follow it."""

    head: bytes
    # Whether a body is sent at all.
    body: bool
    chunked: bool
    # How long a stream has said that it will be.
    length: int | None
    keep: bool


def line(name: str, value: str) -> str:
    """One field, checked."""
    known = _names.get(name) or _name(name)
    if not (value.isascii() and value.isprintable()) and not _is_text(value):
        raise ValueError(f"a value of {known} with a character that may not be in a field")
    return f"{known}: {value}\r\n"


def _name(name: str) -> str:
    if not name or not TOKEN.issuperset(name):
        raise ValueError(f"{name!r} is not the name of a field")
    if len(_names) < MAX_NAMES:
        _names[name] = name.lower()
    return name.lower()


def _is_text(value: str) -> bool:
    # U+0080 to U+009F too: U+0085 is a line break for some readers.
    return all(" " <= char <= "~" or char == "\t" or "\xa0" <= char <= "\xff" for char in value)


def date() -> str:
    """The Date field, made once a second."""
    global _date  # noqa: PLW0603 - one clock for the process
    now = int(time.time())
    if _date[0] != now:
        _date = (now, f"date: {formatdate(now, usegmt=True)}\r\n")
    return _date[1]


def plan(
    status: int, headers: Iterable[tuple[str, str]], body_length: int | None, *,
    method: str, version: str, request_id: str, keep: bool,
) -> Plan:  # fmt: skip
    """`body_length` None: a stream. Raises ValueError for what must not be sent."""
    lines = [STATUS_LINES.get(status) or _status_line(status), date()]
    declared: int | None = None
    marked = False
    for name, value in headers:
        text = line(name, value)
        key = _names.get(name, name)
        if key in FRAMING:
            raise ValueError(f"{key} is not a handler's to set")
        if key == "content-length":
            declared = _length(value, declared)
        elif key == "connection":
            if value.lower() != "close":
                raise ValueError("a handler may only close the connection")
            keep = False
        else:
            marked = marked or key == "x-request-id"
            lines.append(text)
    if request_id and not marked:
        lines.append(line("x-request-id", request_id))
    sends = method != "HEAD" and status not in BODILESS
    length = _agreed(declared, body_length, sends=sends)
    chunked = length is None and sends and version == "HTTP/1.1"
    if chunked:
        lines.append("transfer-encoding: chunked\r\n")
    elif length is not None and status not in BODILESS:
        lines.append(f"content-length: {length}\r\n")
    elif sends:
        # HTTP/1.0: the end of the connection is the end of the body.
        keep = False
    lines.append("\r\n" if keep else "connection: close\r\n\r\n")
    return Plan(
        head="".join(lines).encode("latin-1"), body=sends, chunked=chunked, length=length, keep=keep
    )


def _status_line(status: int) -> str:
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is not the status of an answer")
    return f"HTTP/1.1 {status} \r\n"


def _length(value: str, before: int | None) -> int:
    if before is not None or not (value.isascii() and value.isdigit()):
        raise ValueError("a Content-Length that is not one number")
    return int(value)


def _agreed(declared: int | None, body_length: int | None, *, sends: bool) -> int | None:
    """The length that is told. What a handler says must be so, unless nothing is sent (HEAD)."""
    if body_length is None or declared == body_length:
        return declared
    if declared is not None and (sends or body_length):
        raise ValueError("a Content-Length that is not the body's")
    return body_length if declared is None else declared


def switching(accept: str, protocol: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The 101 before a WebSocket."""
    lines = [SWITCHING, date(), "upgrade: websocket\r\nconnection: Upgrade\r\n"]
    lines.append(line("sec-websocket-accept", accept))
    if protocol:
        lines.append(line("sec-websocket-protocol", protocol))
    lines += [line(name, value) for name, value in headers]
    return ("".join(lines) + "\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
