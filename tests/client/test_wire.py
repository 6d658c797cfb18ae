"""HTTP as the client reads it: the same answer however it is cut, and nothing that is unclear."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.client import BadAnswer
from agent_sandbox.client.wire import Reader, request_head

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: v\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nhello"


def read(raw: bytes, cuts: list[int], method: str = "GET", *, end: bool = False) -> Reader:
    """Feed it in parts; `end`: the connection ends behind it."""
    reader, body = Reader(method), b""
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    for start, stop in pairwise(places):
        reader.feed(raw[start:stop])
        while piece := reader.body():
            body += piece
    if end:
        reader.feed(b"")
        while piece := reader.body():
            body += piece
    reader.whole = body  # type: ignore[attr-defined]
    return reader


@pytest.mark.parametrize(
    ("raw", "keep"), [(SIZED, True), (CHUNKED, True), (CONTINUED, True), (ENDLESS, False)]
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_is_the_same_however_it_is_cut(raw: bytes, keep: bool, cuts: list[int]) -> None:
    reader = read(raw, cuts, end=raw is ENDLESS)
    assert reader.head is not None
    assert (reader.head.status, reader.whole, reader.done) == (200, b"hello", True)  # type: ignore[attr-defined]
    assert reader.keep is keep
    assert reader.rest == b""


def test_what_follows_a_switch_is_the_other_protocols() -> None:
    reader = read(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n\x81\x00", [])
    assert (reader.done, reader.rest) == (True, b"\x81\x00")


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body(status: int) -> None:
    assert read(f"HTTP/1.1 {status} x\r\nContent-Length: 9\r\n\r\n".encode(), []).done


def test_an_answer_to_head_has_no_body() -> None:
    assert read(SIZED[:-5], [], "HEAD").done


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5 \x0b5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_cannot_be_confused_about_where_an_answer_ends(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(raw, [])


@pytest.mark.parametrize("raw", [b"", SIZED[:-1], CHUNKED[:-1], CHUNKED[:60], SIZED[:20]])
def test_an_answer_that_is_cut_off_is_no_answer(raw: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        read(raw, [], end=True)


def test_cannot_put_a_header_into_a_value() -> None:
    with pytest.raises(BadAnswer):
        request_head("GET", "/", "h", [("Last-Event-ID", "1\r\nX-Other: 2")])
