"""The request's target: decoded once, taken apart, and put together in one spelling.

The engine cleans, decodes and redirects paths in its own way. What has more than one reading is
refused, and the engine never sees the client's spelling.
"""

from __future__ import annotations

import re

from ...record import Record
from .documents import check_text
from .values import Refused

MAX_TARGET = 16 * 1024
MAX_PARAMETERS = 64
HEX = frozenset("0123456789abcdefABCDEF")
VERSION = re.compile(r"v(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,3})")
LIKE_VERSION = re.compile(r"v[0-9][0-9.]*")
# Before 1.24 the start of a container replaces its whole HostConfig.
OLDEST = (1, 24)
# What stands for itself in a path and in a query.
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Target(Record):
    """A path without version and dots, and a query in order."""

    # (0, 0): none given.
    version: tuple[int, int]
    segments: tuple[str, ...]
    query: tuple[tuple[str, str], ...]


def parse(target: str) -> Target:
    """Read an origin-form target."""
    if len(target) > MAX_TARGET:
        raise Refused("target.size", f"the target is longer than {MAX_TARGET} bytes", 414)
    if not target.startswith("/"):
        raise Refused("target.form", "the target is not a path", 400)
    if any(not "!" <= char <= "~" for char in target) or "#" in target:
        raise Refused("target.characters", "the target has characters that need encoding", 400)
    path, _, query = target.partition("?")
    segments = tuple(_segment(part) for part in path[1:].split("/"))
    version = (0, 0)
    if LIKE_VERSION.fullmatch(segments[0]):
        version, segments = _version(segments[0]), segments[1:]
    if not segments:
        raise Refused("target.path", "the path is empty", 404)
    return Target(version=version, segments=segments, query=_query(query))


def build(api: str, segments: tuple[str, ...]) -> str:
    """The one spelling of a path, in the version that we speak to the engine.

    Only the name of an image that was checked has a slash in it.
    """
    return "/".join(("", f"v{api}", *(encode(segment, ":@/") for segment in segments)))


def build_query(pairs: tuple[tuple[str, str], ...]) -> str:
    """The one spelling of a query."""
    return "&".join(f"{encode(key)}={encode(value)}" for key, value in pairs)


def encode(text: str, also: str = "") -> str:
    """Percent-encode all but letters, digits, `-._~` and some."""
    return "".join(
        char if char in PLAIN or char in also else "".join(f"%{b:02X}" for b in char.encode())
        for char in text
    )


def _segment(part: str) -> str:
    text = _decode(part)
    if not text or text in (".", ".."):
        raise Refused("target.path", "the path has empty or dotted parts", 400)
    if any(not "!" <= char <= "~" or char in "/\\%?#" for char in text):
        raise Refused("target.path", "the path has characters that no name has", 400)
    return text


def _version(text: str) -> tuple[int, int]:
    match = VERSION.fullmatch(text)
    if match is None:
        raise Refused("target.version", f"{text[:20]} is not a version of the API", 400)
    version = (int(match[1]), int(match[2]))
    if version < OLDEST or version[0] > 1:
        raise Refused("target.version", f"version {text[1:]} of the API is not supported", 400)
    return version


def _decode(text: str) -> str:
    """Undo percent-encoding once, strictly, as UTF-8."""
    if "%" not in text:
        return text
    first, *rest = text.split("%")
    raw = bytearray(first.encode("ascii"))
    for part in rest:
        if len(part) < 2 or not HEX.issuperset(part[:2]):
            raise Refused("target.encoding", "a percent sign without two digits", 400)
        raw.append(int(part[:2], 16))
        raw += part[2:].encode("ascii")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("target.encoding", "the target is not UTF-8", 400) from error


def _query(text: str) -> tuple[tuple[str, str], ...]:
    parts = [part for part in text.split("&") if part]
    if len(parts) > MAX_PARAMETERS:
        raise Refused("target.query", f"more than {MAX_PARAMETERS} parameters", 400)
    pairs = []
    for part in parts:
        name, _, value = part.partition("=")
        key, content = _decode(name), _decode(value.replace("+", " "))
        check_text(content)
        pairs.append((key, content))
    return tuple(pairs)
