"""JSON bodies, read so that no other parser can read them differently, and written anew.

Go merges duplicate keys, folds case (also U+017F and U+212A), and old engines stop at the first
value. All of that is an error here.
"""

from __future__ import annotations

import json

from .values import Refused

MAX_BODY = 4 << 20
MAX_DEPTH = 16
MAX_KEYS = 10_000
INT64 = 1 << 63


def load(body: bytes) -> object:
    """The one value in a body."""
    if len(body) > MAX_BODY:
        raise Refused("body.size", f"the body is larger than {MAX_BODY} bytes", 413)
    try:
        text = body.decode("utf-8")
        value: object = json.loads(
            text, object_pairs_hook=_object, parse_float=_float, parse_constant=_float,
            parse_int=_integer,
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise Refused("body.json", "the body is not one JSON value", 400) from error
    _measure(value)
    return value


def dump(value: object) -> bytes:
    """The bytes of a value: ASCII, sorted, always the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("body.duplicate", "a key appears twice in one object", 400)
    for key in found:
        if not key.isascii() or not key.isprintable():
            raise Refused("body.key", "a key has characters outside of printable ASCII", 400)
    return found


def _float(text: str) -> object:
    # No field of the API is one.
    raise Refused("body.number", f"{text[:20]} is not a whole number", 400)


def _integer(text: str) -> int:
    value = int(text) if len(text) < 21 else INT64
    if not -INT64 <= value < INT64:
        raise Refused("body.number", "a number does not fit 64 bits", 400)
    return value


def _measure(value: object) -> None:
    """Refuse deep nesting and strings that are no Unicode, without recursion."""
    left: list[tuple[object, int]] = [(value, 1)]
    keys = 0
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            check_text(item)
        elif isinstance(item, (dict, list)):
            keys += len(item)
            if depth > MAX_DEPTH or keys > MAX_KEYS:
                raise Refused("body.depth", "the body is nested too deeply or has too much", 400)
            inner = item.values() if isinstance(item, dict) else item
            left += [(one, depth + 1) for one in inner]


def check_text(text: str) -> None:
    """Refuse lone surrogates and NUL: Go would replace the first, C ends at the second."""
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise Refused("body.text", "a string has NUL or half a character", 400)
