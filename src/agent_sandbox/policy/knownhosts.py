"""`known_hosts`: which keys belong to a host, read as ssh does (sshd(8), match.c). Pure."""

from __future__ import annotations

import hashlib
import hmac

from .publickeys import decoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SSH_PORT = 22
REVOKED = "@revoked"
MAX_TEXT = 4 << 20


def spelled(host: str, port: int) -> str:
    """A host and its port as known_hosts has them."""
    return host if port == SSH_PORT else f"[{host}]:{port}"


def keys_of(text: str, name: str) -> frozenset[bytes]:
    """The keys of a host, but for those that some line revokes.

    Lines for authorities are left out: a host that shows a certificate is not recognised.
    """
    held = (b for marker, at, b, _ in _lines(text) if not marker and matches(at, name))
    return frozenset(held) - revoked(text)


def revoked(text: str) -> frozenset[bytes]:
    """The keys that a text revokes, whoever they were for: nobody trusts them any more.

    Also in other files: ssh asks each of them.
    """
    return frozenset(blob for marker, _, blob, _ in _lines(text) if marker == REVOKED)


def only(text: str, names: Iterable[str] | None) -> str:
    """The lines that are about these hosts, and no others; with None about all hosts."""
    wanted = tuple(names) if names is not None else None
    return "".join(
        f"{line}\n"
        for _, patterns, _, line in _lines(text)
        if wanted is None or any(matches(patterns, name) for name in wanted)
    )


def _lines(text: str) -> Iterator[tuple[str, str, bytes, str]]:
    """Marker, patterns, key and the line itself, of each line that is whole."""
    for line in text[:MAX_TEXT].split("\n"):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        marker = parts.pop(0) if parts[0].startswith("@") else ""
        blob = decoded(parts[2]) if len(parts) > 2 else None
        if blob is not None:
            yield marker, parts[0], blob, line.rstrip("\r")


def matches(patterns: str, name: str) -> bool:
    """Whether a list of patterns, or one hashed name, is about a host."""
    if patterns.startswith("|"):
        return _is_hash_of(patterns, name)
    found = False
    for pattern in patterns.lower().split(","):
        if pattern.startswith("!"):
            # One that is excluded is excluded for good.
            if _glob(pattern[1:], name):
                return False
        elif _glob(pattern, name):
            found = True
    return found


def _is_hash_of(text: str, name: str) -> bool:
    parts = text.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    salt, wanted = decoded(parts[2]), decoded(parts[3])
    if salt is None or wanted is None:
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), wanted)


def _glob(pattern: str, name: str) -> bool:
    """`*` and `?` alone have a meaning. Linear: it goes back to the last star only."""
    at = star = -1
    i = mark = 0
    while i < len(name):
        step = pattern[at + 1 : at + 2]
        if step == "*":
            at += 1
            star, mark = at, i
        elif step in ("?", name[i]):
            at += 1
            i += 1
        elif star >= 0:
            at = star
            mark += 1
            i = mark
        else:
            return False
    return not pattern[at + 1 :].strip("*")
