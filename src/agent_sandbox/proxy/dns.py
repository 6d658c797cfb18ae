"""DNS messages: one question strictly read, one answer built. Pure; nothing is ever forwarded.

RFC 1035, with EDNS (RFC 6891) as far as clients need an answer to it.
"""

from __future__ import annotations

from ..record import Record

HEADER = 12
MAX_NAME = 255
MAX_LABEL = 63
# What a question with one OPT record can need; larger ones are malformed.
MAX_QUESTION = 1024
UDP_PLAIN = 512
UDP_EDNS = 1232

A, PTR, AAAA, OPT = 1, 12, 28, 41
INTERNET = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 2, 3, 4, 5
BADVERS = 16
RESPONSE, RECURSION_DESIRED, RECURSION_AVAILABLE, TRUNCATED = 0x8000, 0x0100, 0x0080, 0x0200
OPCODE = 0x7800
# Short: after a change of the rules a client asks again soon. The answer itself never changes.
TTL = 60

V4_REVERSE = ".in-addr.arpa"
V6_REVERSE = ".ip6.arpa"


class Question(Record):
    """What was asked. `name` is "" where the labels cannot be a host's name."""

    ident: int
    flags: int
    name: str
    kind: int
    klass: int
    # The question section as it came: clients compare it, with its mixed case (0x20).
    section: bytes
    edns: bool = False
    edns_version: int = 0


class Malformed(ValueError):
    """A message that gets `answer` instead, or none at all if that is empty."""

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


def parse(data: bytes) -> Question:
    """Read a question, or raise Malformed with what to say."""
    if len(data) < HEADER:
        raise Malformed("shorter than a header")
    ident, flags = _number(data, 0), _number(data, 2)
    if flags & RESPONSE:
        # Two stubs that answer each other's errors would never stop.
        raise Malformed("an answer, not a question")
    if flags & OPCODE:
        raise Malformed("not a query", bare(ident, flags, NOTIMP))
    try:
        return _body(data, ident, flags)
    except Malformed as error:
        raise Malformed(str(error), bare(ident, flags, FORMERR)) from None


def _body(data: bytes, ident: int, flags: int) -> Question:
    if len(data) > MAX_QUESTION:
        raise Malformed("too long")
    counts = tuple(_number(data, at) for at in (4, 6, 8, 10))
    if counts not in ((1, 0, 0, 0), (1, 0, 0, 1)):
        raise Malformed("not exactly one question")
    labels, at = _labels(data, HEADER)
    if len(data) < at + 4:
        raise Malformed("the question is cut off")
    kind, klass = _number(data, at), _number(data, at + 2)
    section = data[HEADER : at + 4]
    version, end = _options(data, at + 4) if counts[3] else (-1, at + 4)
    if end != len(data):
        raise Malformed("bytes after the message")
    return Question(
        ident=ident, flags=flags, name=text_of(labels), kind=kind, klass=klass, section=section,
        edns=version >= 0, edns_version=max(version, 0),
    )  # fmt: skip


def _labels(data: bytes, at: int) -> tuple[list[bytes], int]:
    """The labels of a name, and where it ends."""
    labels: list[bytes] = []
    begun = at
    while True:
        if at >= len(data):
            raise Malformed("the name is cut off")
        length = data[at]
        if length > MAX_LABEL:
            # The first name of a message has nothing to point back to: a pointer is a loop.
            raise Malformed("a compressed name in a question")
        at += 1
        if at + length - begun > MAX_NAME:
            raise Malformed("the name is too long")
        if length == 0:
            return labels, at
        if at + length > len(data):
            raise Malformed("the name is cut off")
        labels.append(data[at : at + length])
        at += length


def _options(data: bytes, at: int) -> tuple[int, int]:
    """The version in the one OPT record, and where it ends."""
    if data[at : at + 3] != b"\0" + OPT.to_bytes(2, "big") or len(data) < at + 11:
        raise Malformed("an additional record that is not OPT")
    return data[at + 6], at + 11 + _number(data, at + 9)


def text_of(labels: list[bytes]) -> str:
    """A name in text, "" if a label has what a host's name cannot have, such as a dot or NUL."""
    for label in labels:
        if b"." in label or not label.isascii() or any(not 0x20 < byte < 0x7F for byte in label):
            return ""
    return b".".join(labels).decode("ascii")


def reverse(name: str) -> bytes | None:
    """The address whose name a PTR question wants, packed; None if it is no such question."""
    lowered = name.lower()
    if lowered.endswith(V4_REVERSE):
        parts = lowered.removesuffix(V4_REVERSE).split(".")
        if len(parts) == 4 and all(part.isdigit() and len(part) <= 3 for part in parts):
            numbers = [int(part) for part in reversed(parts)]
            return bytes(numbers) if max(numbers) < 256 else None
    elif lowered.endswith(V6_REVERSE):
        digits = lowered.removesuffix(V6_REVERSE).split(".")
        if len(digits) == 32 and all(len(d) == 1 and d in "0123456789abcdef" for d in digits):
            return bytes.fromhex("".join(reversed(digits)))
    return None


def wire(name: str) -> bytes:
    """A name as labels."""
    parts = [part.encode("ascii") for part in name.split(".")]
    return b"".join(bytes((len(part),)) + part for part in parts) + b"\0"


def bare(ident: int, flags: int, code: int) -> bytes:
    """An answer without even the question, for one that could not be read."""
    said = RESPONSE | (flags & (OPCODE | RECURSION_DESIRED)) | RECURSION_AVAILABLE | code
    return ident.to_bytes(2, "big") + said.to_bytes(2, "big") + bytes(8)


def answer(
    question: Question, data: bytes = b"", *, code: int = NOERROR, room: int = 65_535
) -> bytes:
    """An answer with one record of the kind that was asked for, or with none."""
    said = RESPONSE | RECURSION_AVAILABLE | (question.flags & RECURSION_DESIRED) | (code & 0xF)
    record = b""
    if data:
        record = b"\xc0\x0c" + question.section[-4:] + TTL.to_bytes(4, "big")
        record += len(data).to_bytes(2, "big") + data
    options = _own_options(code) if question.edns else b""
    if HEADER + len(question.section) + len(record) + len(options) > room:
        said, record = said | TRUNCATED, b""
    head = [question.ident, said, 1, 1 if record else 0, 0, 1 if options else 0]
    return b"".join(n.to_bytes(2, "big") for n in head) + question.section + record + options


def _own_options(code: int) -> bytes:
    kind, size = OPT.to_bytes(2, "big"), UDP_EDNS.to_bytes(2, "big")
    return b"\0" + kind + size + bytes((code >> 4, 0, 0, 0, 0, 0))


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "big")
