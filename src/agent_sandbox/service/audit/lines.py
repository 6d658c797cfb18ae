"""One line of the audit trail: what it is made of, and how it hangs on the line before. Pure.

A line is a JSON object. Its last member `hash` is the SHA-256 of the same object without it, and
its `prev` is the hash of the line before. So any other byte, order or number shows. To see it by
hand: `jq -cj 'del(.hash)'` of a line, through `sha256sum`.
"""

from __future__ import annotations

import hashlib
import json
import time

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

VERSION = 1
# What stands before the first line.
GENESIS = "0" * 64
MARK, END = b',"hash":"', b'"}'
TAIL = len(MARK) + 64 + len(END)
# More than any line of ours; a reader that meets no newline stops here.
MOST_LINE = 1 << 20
# ASCII only: no byte of a line can end it, hide it or drive a terminal.
_encode = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False).encode


class Line(Record):
    """A line that fits its own hash."""

    seq: int
    prev: str
    hash: str
    record: dict[str, Any]


class BadLine(ValueError):
    """A line that nobody of us has written."""


def seal(record: dict[str, object]) -> tuple[bytes, str]:
    """A line with its newline, and its hash."""
    body = _encode(record).encode()
    digest = hashlib.sha256(body).hexdigest()
    return b"%s%s%s%s\n" % (body[:-1], MARK, digest.encode(), END), digest


def unsealed(record: Mapping[str, object]) -> str:
    """What stands behind `prev` in a line that somebody else will seal."""
    return "," + _encode(record)[1:]


def parse(line: bytes) -> Line:
    """A line without its newline."""
    body, mark, digest, end = (
        line[:-TAIL], line[-TAIL : -TAIL + len(MARK)], line[-66:-2], line[-2:],
    )  # fmt: skip
    if not body or mark != MARK or end != END:
        raise BadLine("is not a line of the audit trail")
    if hashlib.sha256(body + b"}").hexdigest().encode() != digest:
        raise BadLine("was changed: it does not fit its hash")
    try:
        record = json.loads(body + b"}")
        seq, prev = record["seq"], record["prev"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadLine("is not a line of the audit trail") from error
    if not isinstance(seq, int) or not isinstance(prev, str):
        raise BadLine("is not a line of the audit trail")
    return Line(seq=seq, prev=prev, hash=digest.decode(), record=record)


def stamp(now: float) -> str:
    """A moment in RFC 3339, UTC, milliseconds."""
    whole = int(now)
    return f"{_second(whole)}.{int((now - whole) * 1000):03d}Z"


_last = (0, "")


def _second(whole: int) -> str:
    """Many lines are of the same second."""
    global _last  # noqa: PLW0603
    if _last[0] != whole or not _last[1]:
        _last = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return _last[1]


class Head(Record):
    """The end of the trail, as the last writer left it."""

    seq: int = 0
    hash: str = GENESIS
    # Number of the file, and where its last line ends.
    file: int = 1
    end: int = 0

    def encode(self) -> bytes:
        """Always of the same length: it is overwritten in place, in one step."""
        return b"%020d %s %06d %020d\n" % (self.seq, self.hash.encode(), self.file, self.end)


HEAD_BYTES = len(Head().encode())


def read_head(data: bytes) -> Head | None:
    """The head that stands in a file; None if there is none."""
    parts = data.split()
    if len(data) != HEAD_BYTES or len(parts) != 4:
        return None
    seq, digest, file, end = parts
    if not (seq.isdigit() and file.isdigit() and end.isdigit() and len(digest) == 64):
        return None
    head = Head(seq=int(seq), hash=digest.decode("ascii", "replace"), file=int(file), end=int(end))
    # Nothing else may mean the same.
    return head if data == head.encode() else None
