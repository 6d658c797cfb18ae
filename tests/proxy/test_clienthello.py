"""The server's name in a ClientHello: found wherever OpenSSL puts it, or refused."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy import clienthello
from agent_sandbox.proxy.clienthello import BadHello, read

from .lab import hello


def vector(data: bytes, width: int) -> bytes:
    return len(data).to_bytes(width, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(data, 2)


def server_name(*entries: tuple[int, bytes]) -> bytes:
    listed = b"".join(bytes((kind,)) + vector(name, 2) for kind, name in entries)
    return extension(0, vector(listed, 2))


def message(
    extensions: bytes | None = b"", *, session: bytes = b"", suites: bytes = b"\x13\x01",
    compression: bytes = b"\0", tail: bytes = b"", kind: int = 1,
) -> bytes:  # fmt: skip
    body = b"\3\3" + bytes(32) + vector(session, 1) + vector(suites, 2) + vector(compression, 1)
    if extensions is not None:
        body += vector(extensions, 2)
    return bytes((kind,)) + vector(body + tail, 3)


def record(data: bytes, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    return bytes((kind,)) + version + vector(data, 2)


PLAIN = message(server_name((0, b"a.test")))


def test_the_name_that_openssl_sends() -> None:
    data = hello("example.com")
    found = read(data)
    assert found is not None
    assert (found.name, found.length) == ("example.com", len(data))


def test_no_name_is_an_empty_name() -> None:
    for data in (hello(None), record(message(None)), record(message(b""))):
        found = read(data)
        assert found is not None
        assert found.name == ""


def test_every_shorter_input_needs_more() -> None:
    data = hello("example.com")
    assert all(read(data[:length]) is None for length in range(len(data)))


@pytest.mark.parametrize("size", [1, 5, 7, 20, 60])
def test_a_hello_may_be_split_over_records(size: int) -> None:
    pieces = [PLAIN[at : at + size] for at in range(0, len(PLAIN), size)]
    data = b"".join(record(piece) for piece in pieces)
    if len(pieces) > clienthello.MAX_RECORDS:
        with pytest.raises(BadHello):
            read(data)
        return
    assert all(read(data[:length]) is None for length in range(len(data)))
    found = read(data + b"\x14\3\3\0\1\1")
    assert found is not None
    assert (found.name, found.length) == ("a.test", len(data))


BAD = {
    "http": b"GET / HTTP/1.1\r\n",
    "sslv2": b"\x80\x2e\x01\x00\x02",
    "an alert": record(b"\2\0", 21),
    "version 4": record(PLAIN, version=b"\4\0"),
    "an empty record": record(b""),
    "an empty record in between": record(PLAIN[:5]) + record(b"") + record(PLAIN[5:]),
    "another type in between": record(PLAIN[:5]) + record(PLAIN[5:], 23),
    "a server's hello": record(message(b"", kind=2)),
    "too large a record": b"\x16\3\1\xff\xff",
    "too large a message": b"\x16\3\1\x40\x00\1\xff\xff\xff",
    "more in the record": record(PLAIN + b"\1"),
    "a second hello in the record": record(PLAIN * 2),
    "bytes after extensions": record(message(server_name((0, b"a.test")), tail=b"x")),
    "a long session": record(message(session=bytes(33))),
    "odd suites": record(message(suites=b"\1\2\3")),
    "no suites": record(message(suites=b"")),
    "no compression": record(message(compression=b"")),
    "two names": record(message(server_name((0, b"a.test"), (0, b"b.test")))),
    "two kinds of names": record(message(server_name((0, b"a.test"), (1, b"b.test")))),
    "another kind of name": record(message(server_name((1, b"a.test")))),
    "the extension twice": record(message(server_name((0, b"a.test")) + server_name((0, b"b")))),
    "another extension twice": record(message(extension(9, b"") * 2)),
    "an empty name": record(message(server_name((0, b"")))),
    "an empty list": record(message(extension(0, vector(b"", 2)))),
    "an empty extension": record(message(extension(0, b""))),
    "NUL in the name": record(message(server_name((0, b"a.test\0.evil")))),
    "a blank in the name": record(message(server_name((0, b"a test")))),
    "a name with the eighth bit": record(message(server_name((0, b"\xe4.test")))),
    "an extension that is cut off": record(message(b"\0\0\0\x20ab")),
    "a name that is cut off": record(message(extension(0, b"\0\x20\0\0\x30a"))),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_cannot_pass_with(what: str) -> None:
    with pytest.raises(BadHello):
        read(BAD[what])


def test_the_control_passes() -> None:
    found = read(record(PLAIN))
    assert found is not None
    assert found.name == "a.test"


def test_a_padded_hello_has_a_limit() -> None:
    """Browsers pad; 16 KiB is more than any of them needs."""
    large = message(server_name((0, b"a.test")) + extension(21, bytes(12_000)))
    found = read(record(large))
    assert found is not None
    assert found.name == "a.test"
    huge = message(server_name((0, b"a.test")) + extension(21, bytes(17_000)))
    with pytest.raises(BadHello):
        read(record(huge[:16_000]) + record(huge[16_000:]))
