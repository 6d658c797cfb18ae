"""What a sandbox sends to the proxy: any bytes are read, refused or need more, and nothing else."""

from __future__ import annotations

import asyncio
import time

from hypothesis import strategies as st

from agent_sandbox.proxy import clienthello, dns, http1, sniff, socks
from agent_sandbox.proxy.stub import Stub

from .bound import fuzz
from .mutation import mutated

QUESTION = b"\x12\x34\1\0\0\1\0\0\0\0\0\0\7example\3com\0\0\1\0\1"
HELLO = bytes.fromhex(
    "1603010044010000400303" + "00" * 32 + "00000213010100001500000011000f00000c6578616d706c652e"
    "74657374"
)
REQUESTS = (
    "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "POST /x?y=z HTTP/1.1\r\nHost: a.test:80\r\nContent-Length: 5\r\nX-Y: z\r\n\r\nhello",
    "POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "GET /ws HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
)
PIECES = (
    "\r\n", "\n", "\r", "\0", " ", "\t", ":", "Content-Length: 1\r\n", "Host: b.test\r\n",
    "Transfer-Encoding: chunked\r\n", "Connection: Host, Content-Length\r\n", "\r\n\r\n", "chunked",
    ", ", ";", "0x", "HTTP/1.1", "http://", "@", "#", "\x7f", "\xff", "Upgrade: h2c\r\n", "[::1]",
)  # fmt: skip
BODIES = ("5\r\nhello\r\n0\r\n\r\n", "a\r\n0123456789\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n")


@st.composite
def near(draw: st.DrawFn, document: bytes) -> bytes:
    """Bytes near a valid message."""
    data = bytearray(document)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            data[at : at + draw(st.integers(0, 9))] = b""
        elif kind == 1:
            data[at:at] = draw(st.binary(max_size=6))
        elif data:
            data[at % len(data)] = draw(st.integers(0, 255))
    return bytes(data)


@fuzz(500, data=st.one_of(near(QUESTION), st.binary(max_size=80)))
def test_any_datagram_is_answered_or_dropped(data: bytes) -> None:
    answer = asyncio.run(Stub().answer(data, 512))
    if answer:
        assert answer[:2] == data[:2]
        assert answer[2] & 0x80
        assert len(answer) <= 1232
        # Never more than one record, and only with a stand-in or the loopback.
        assert answer[6:8] in (b"\0\0", b"\0\1")


@fuzz(500, data=st.one_of(near(HELLO), st.binary(max_size=80)), cut=st.integers(0, 100))
def test_any_hello_is_read_the_same_however_it_comes(data: bytes, cut: int) -> None:
    def outcome(sent: bytes) -> object:
        try:
            return clienthello.read(sent)
        except clienthello.BadHello:
            return "bad"

    whole = outcome(data)
    part = outcome(data[:cut])
    # More bytes never turn a refusal into a name, nor one name into another.
    if part is not None:
        assert part == whole
    if isinstance(whole, clienthello.Hello):
        assert whole.name.isascii()
        assert "\0" not in whole.name
        # As it stands there: nothing was put together from two places of one record.
        assert whole.length <= len(data)


def reading(data: bytes) -> http1.Request | None:
    try:
        length = http1.head_length(data)
        return http1.parse(data[:length]) if length else None
    except http1.BadRequest:
        return None


@fuzz(800, text=mutated(REQUESTS, PIECES))
def test_what_goes_out_reads_as_what_came_in(text: str) -> None:
    """A request that passes is read once more as itself: by us, and by the simplest server."""
    found = reading(text.encode("latin-1", "replace"))
    if found is None:
        return
    try:
        target = http1.target(found)
    except http1.BadRequest:
        return
    out = http1.rebuild(found, "judged.test", target.path or "/")
    again = reading(out)
    assert again is not None
    assert (again.method, again.length, again.chunked) == (
        found.method, found.length, found.chunked,
    )  # fmt: skip
    assert again.host == "judged.test"
    assert out.count(b"\r\n\r\n") == 1
    lowered = out.lower()
    assert lowered.count(b"\nhost:") == 1
    assert lowered.count(b"\ncontent-length:") + lowered.count(b"\ntransfer-encoding:") <= 1
    assert lowered.count(b"\nconnection:") == 1
    assert b"\0" not in out


@fuzz(
    400, text=mutated(BODIES, ("\r\n", "\n", ";", "0", "f", " ", "ffffffff")), cut=st.integers(1, 9)
)
def test_chunks_mean_the_same_in_any_pieces(text: str, cut: int) -> None:
    data = text.encode("latin-1", "replace")

    def outcome(size: int) -> object:
        chunks = http1.Chunks()
        try:
            out = b"".join(chunks.feed(data[at : at + size]) for at in range(0, len(data), size))
        except http1.BadRequest:
            return "bad"
        return out, chunks.done

    assert outcome(cut) == outcome(len(data) or 1)


@fuzz(
    400, data=st.one_of(st.binary(max_size=40), near(b"\5\1\0\3\6a.test\1\xbb")), four=st.booleans()
)
def test_any_handshake_is_a_target_or_refused(data: bytes, four: bool) -> None:
    handshake = socks.Handshake()
    rest = b"\4\1\0\x50" + data if four else b"\5\1\0" + data
    try:
        while rest:
            step = handshake.read(rest)
            if step is None:
                return
            assert 0 < step.used <= len(rest)
            if isinstance(step, socks.Target):
                if isinstance(step.host, str):
                    assert step.host.isprintable()
                    assert " " not in step.host
                return
            rest = rest[step.used :]
    except socks.BadSocks:
        return


@fuzz(400, text=mutated(REQUESTS, PIECES), cut=st.integers(1, 30))
def test_cannot_look_opaque_at_first(text: str, cut: int) -> None:
    """What is HTTP as a whole is never taken for something else by its beginning."""
    data = text.encode("latin-1", "replace")
    if sniff.kind(data) == sniff.HTTP:
        assert sniff.kind(data[:cut]) in (None, sniff.HTTP)


def test_no_parser_is_slow() -> None:
    """64 KiB of the worst, a byte more each time."""
    begun = time.monotonic()
    for size in range(0, 16_384, 64):
        clienthello.read(b"\x16\3\1\x40\0\1\0\x3f\xf0" + bytes(size))
        http1.head_length(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (size // 6))
        sniff.kind(b"GET " + b"a" * size)
        dns.text_of([b"a" * 63] * 4)
    assert time.monotonic() - begun < 5
