"""What a client speaks: whatever a server might take for TLS or HTTP is taken for it."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy.sniff import HTTP, HTTP2, OPAQUE, SSH, TLS, kind


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16", None), (b"\x16\3", TLS), (b"\x16\3\1\0", TLS), (b"\x16\4", OPAQUE),
        (b"S", None), (b"SSH", None), (b"SSH-", SSH), (b"SSH-2.0-x\r\n", SSH),
        (b"GET / HTTP/1.1\r\n", HTTP), (b"GET / HTTP/1.1", HTTP), (b"get / http/1.1", HTTP),
        (b"\r\nGET / HTTP/1.1\r\n", HTTP), (b" \t\r\n\nGET / HTTP/1.1", HTTP),
        (b"GET\t/\tHTTP/1.1\n", HTTP), (b"X-Y / HTTP/9.9\n", HTTP), (b"GET / HTTP/", HTTP),
        (b"G", None), (b"GET", None), (b"GET /", None), (b"\r\n", None), (b" ", None),
        (b"GET /\n", OPAQUE), (b"EHLO a.test\r\n", OPAQUE), (b"PING\r\n", OPAQUE),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP2), (b"\r\nPRI * HTTP/2.0\r\n", HTTP),
        (b"\0", OPAQUE), (b"\0\0\0\x08\x04\xd2\x16\x2f", OPAQUE), (b"(x", OPAQUE),
        (b"*1\r\n$4\r\nPING\r\n", OPAQUE), (b"a" * 65, HTTP), (b"\x80\x2e", OPAQUE),
        (b"GET /" + b"a" * 20_000, HTTP), (b"\0GET / HTTP/1.1\r\n", OPAQUE),
        (b"PRI * HTTP/", None), (b"\r\n" * 9000, HTTP), (b" " * 17_000, HTTP),
    ],
)  # fmt: skip
def test_kinds(data: bytes, expected: str | None) -> None:
    assert kind(data) == expected


@pytest.mark.parametrize("data", [b"\r\n GET /x HTTP/1.1\r\nHost: b\r\n\r\n", b"SSX / HTTP/1.1\n"])
def test_cannot_be_opaque_first_and_http_later(data: bytes) -> None:
    """However it is cut, it is HTTP or not known yet."""
    found = [kind(data[:length]) for length in range(1, len(data))]
    assert set(found) <= {None, HTTP}
