"""What a client speaks, told from its first bytes. Pure.

Where a protocol names a host inside the stream (TLS, HTTP), that name is checked. So what might
be taken for one of these by a server must be taken for it here.
"""

from __future__ import annotations

TLS, HTTP, SSH, HTTP2, OPAQUE = "tls", "http", "ssh", "http2", "opaque"
MAX_FIRST_LINE = 16 * 1024
BLANKS = b" \t\r\n"
PREFACE = b"PRI * HTTP/2.0"
# What a method can be made of; servers that read HTTP skip blanks before it.
METHOD = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
MAX_METHOD = 64

# Ports where only this is spoken; anything else has no name that could be checked.
ONLY = {80: (HTTP,), 443: (TLS, SSH)}


def kind(data: bytes) -> str | None:
    """The protocol; None if more bytes are needed."""
    if data[:1] == b"\x16":
        if len(data) < 2:
            return None
        return TLS if data[1] == 3 else OPAQUE
    if data.startswith(b"SSH-"):
        return SSH
    if b"SSH-".startswith(data):
        return None
    return _text(data)


def _text(data: bytes) -> str | None:
    """Every answer but None is final: more bytes would not change it."""
    if PREFACE.startswith(data[: len(PREFACE)]):
        return HTTP2 if len(data) >= len(PREFACE) else None
    line, ended, _ = data.lstrip(BLANKS).partition(b"\n")
    method = line.replace(b"\t", b" ").partition(b" ")[0]
    if not METHOD.issuperset(method):
        return OPAQUE
    if b"HTTP/" in line.upper():
        return HTTP
    if ended:
        return OPAQUE
    # Too long for a request that servers take, blanks before it included; but who knows.
    return HTTP if len(data) > MAX_FIRST_LINE or len(method) > MAX_METHOD else None
