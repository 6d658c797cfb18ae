"""JSON as it comes from others: one meaning or none.

Two parsers that read a document differently are how a check is passed by one value and the work
done with another. So a name that stands twice, a number that JSON does not have, and text that
is no text are refused, not mended.
"""

from __future__ import annotations

import json

from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Twice(ValueError):
    """A name that stands twice in one object."""


def _pairs(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Twice(f"the name {twice[:80]!r} stands twice in one object")
    return members


def _constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


# One decoder for all requests; the C scanner does the work.
_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def bad(message: str, hint: str = "") -> Problem:
    """A body that cannot be read at all."""
    return Problem("BAD_REQUEST", message, hint=hint, rule="request.json")


def read(raw: bytes) -> object:
    """The value of a JSON text in UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value: object = _DECODER.decode(text)
    except RecursionError:
        raise bad("the JSON is nested too deeply") from None
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}", "send one JSON object") from None
    # "\ud800" is ASCII in the body and no character afterwards: nothing could encode it again.
    if "\\u" in text and _has_surrogates(value):
        raise bad("a \\u escape in the JSON is half of a character")
    return value


def _has_surrogates(value: object) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not _encodes(item):
                return True
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += item
    return False


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


def write(value: object) -> bytes:
    """A value as JSON in UTF-8. Text must be text: see `views.clean`."""
    return _ENCODER.encode(value).encode()
