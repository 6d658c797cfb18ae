"""Whether a request was meant for us, and whether a page of ours sent it.

A name that an attacker's DNS leads to our address (rebinding) makes a browser treat us as a part of
the attacker's site. The browser then still tells the name it used: in Host. Pure.
"""

from __future__ import annotations

import ipaddress

from ...record import Record
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PORTS = {"http": 80, "https": 443}


class Names(Record):
    """Who we are, as far as clients may call us."""

    hosts: frozenset[str] = LOOPBACK_NAMES
    # One of our listeners is on every address: any literal address may lead to us. An address
    # cannot be rebound, only a name can.
    any_address: bool = False
    # TLS may end in front of us, so pages of ours have https.
    proxied: bool = False


def authority(text: str) -> tuple[str, int | None] | None:
    """`name`, `name:port`, `[v6]:port` → name in small letters and port; None: it is neither."""
    host, port = text, ""
    if text.startswith("["):
        inner, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or ":" not in inner:
            return None
        host, port = inner, rest[1:]
        if rest == ":":
            return None
    elif ":" in text:
        host, _, port = text.partition(":")
        if not port:
            return None
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5):
        return None
    # "localhost." is the same name to a resolver.
    host = host.lower().removesuffix(".")
    if not host or not host.isascii() or any(char in host for char in "/@\\ \t?#%,"):
        return None
    return host, int(port) if port else None


def is_address(host: str) -> bool:
    """Whether it is a literal address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_host(names: Names, header: str) -> tuple[str, int | None]:
    """The host that the client named, if it is one of ours."""
    found = authority(header)
    if found is None:
        raise Problem("BAD_REQUEST", "the Host header is not a host", rule="host.syntax")
    host = found[0]
    if host in names.hosts or (names.any_address and is_address(host)):
        return found
    raise Problem(
        "FORBIDDEN", f"this service is not known as '{host[:255]}'",
        hint="start it with --public-host NAME to be called by that name", rule="host.known",
    )  # fmt: skip


def check_origin(
    names: Names, named: tuple[str, int | None], headers: Mapping[str, str], *, tls: bool
) -> None:
    """A page of another site may not even ask. Programs send no Origin."""
    origin = headers.get("origin")
    if origin is None:
        # A link that somebody follows is a navigation; its page cannot read what it leads to.
        foreign = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            raise _foreign("another site")
        return
    scheme, separator, rest = origin.partition("://")
    found = authority(rest) if separator and scheme in PORTS else None
    if found is None:
        raise _foreign(origin)
    own = PORTS["https" if tls or names.proxied else "http"]
    if (found[0], found[1] or PORTS[scheme]) != (named[0], named[1] or own):
        raise _foreign(origin)
    # Without TLS of ours, but behind a proxy's, it is https for some and http for others.
    if not names.proxied and scheme != ("https" if tls else "http"):
        raise _foreign(origin)


def _foreign(origin: str) -> Problem:
    shown = "".join(c if c.isprintable() else "?" for c in origin[:100])
    return Problem(
        "FORBIDDEN", f"requests from the origin '{shown}' are refused",
        hint="only pages of this service may call it from a browser", rule="origin.same",
    )  # fmt: skip
