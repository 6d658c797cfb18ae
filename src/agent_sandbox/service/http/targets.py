"""Paths, queries and fields of a request, with one reading each. Pure.

What two readers could take for different things (an encoded slash, a name twice) is refused, so
that a route, a rule and a log line always speak of the same thing.
"""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_PARAMETERS = 100
HEX = frozenset("0123456789abcdefABCDEF")
NOTHING: Mapping[str, str] = {}
# Fields that are lists by their definition: several lines mean the same as one with commas.
LISTS = frozenset((
    "accept", "accept-charset", "accept-encoding", "accept-language", "cache-control",
    "connection", "forwarded", "if-match", "if-none-match", "pragma", "prefer",
    "sec-websocket-extensions", "sec-websocket-protocol", "te", "trailer", "upgrade", "via",
    "x-forwarded-for",
))  # fmt: skip


def bad(message: str, hint: str = "") -> Problem:
    """A request that can be read in more than one way, or in none."""
    return Problem("BAD_REQUEST", message, hint=hint)


def unquote(text: str, what: str) -> str:
    """Percent-decode once, strictly: complete escapes, UTF-8, no NUL."""
    if "%" not in text:
        return text
    for piece in text.split("%")[1:]:
        if len(piece) < 2 or not HEX.issuperset(piece[:2]):
            raise bad(f"a % in the {what} that is not followed by two hexadecimal digits")
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise bad(f"the {what} is not UTF-8") from None
    if "\0" in decoded:
        raise bad(f"a NUL in the {what}")
    return decoded


def path(raw: str) -> str:
    """The path, decoded, each segment a real name. "/" is the root."""
    if not raw.startswith("/"):
        # Also http://host/path: its host and the Host field would be two answers to one question.
        raise bad("the target of the request is not a path")
    if raw == "/":
        return raw
    segments = raw[1:].split("/")
    if "%" in raw:
        segments = [unquote(segment, "path") for segment in segments]
        if any("/" in segment for segment in segments):
            raise bad("an encoded slash in the path")
    for segment in segments:
        if segment in ("", ".", ".."):
            raise bad(f"a segment {segment!r} in the path", "write the path without // and dots")
    return "/" + "/".join(segments)


def query(raw: str) -> Mapping[str, str]:
    """The parameters. A name twice is an error: the first and the last reader would disagree."""
    if not raw:
        return NOTHING
    pairs = raw.split("&")
    if len(pairs) > MAX_PARAMETERS:
        raise bad(f"more than {MAX_PARAMETERS} parameters in the query")
    found: dict[str, str] = {}
    for pair in pairs:
        if not pair:
            continue
        left, _, right = pair.partition("=")
        name = unquote(left.replace("+", " "), "query")
        if name in found:
            raise bad(f"the parameter {name!r} twice in the query")
        found[name] = unquote(right.replace("+", " "), "query")
    return found


def split(target: str) -> tuple[str, Mapping[str, str]]:
    """A raw target → path and parameters."""
    before, _, after = target.partition("?")
    return path(before), query(after)


def headers(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The fields by lower-case name. Only lists and cookies may come twice."""
    found: dict[str, str] = {}
    for name, value in fields:
        key = name.lower()
        if key not in found:
            found[key] = value
        elif key in LISTS:
            found[key] += ", " + value
        elif key == "cookie":
            found[key] += "; " + value
        else:
            raise bad(f"the field {key} twice")
    return found
