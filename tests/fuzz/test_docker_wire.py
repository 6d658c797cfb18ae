"""Bytes before the Docker filter: nothing dangerous arrives, and framing has one reading."""

from __future__ import annotations

import contextlib
import shutil
import socket
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from agent_sandbox.proxy import http1
from agent_sandbox.proxy.docker import audit, wire
from docker.conftest import Filtered
from docker.corpus import REQUESTS, raw
from docker.fake import OWNER, FakeEngine, connect, place
from docker.test_corpus import harm

from .bound import fuzz
from .mutation import mutated

if TYPE_CHECKING:
    from collections.abc import Iterator

SENT = tuple(raw(entry).decode("latin-1") for entry in REQUESTS)
PIECES = (
    "\r\n", "\n", "\r", "\0", " ", "\t", ":", "0\r\n\r\n", "Content-Length: 5\r\n", "chunked",
    "Transfer-Encoding: chunked\r\n", "HTTP/1.1", "HTTP/1.0", "/../", "%2e", "%2f", "//", "?", "&",
    "Upgrade: tcp\r\nConnection: Upgrade\r\n", '"Privileged": true,', '"privileged": true,',
    '"HostConfig": {"Privileged": true},', "\\u017f", "Å¿", '"Binds": ["/:/h"],', "{", "}",
    "[", "]", "Expect: 100-continue\r\n", "v1.41", "/v1.41", "1e999", "-1", "null",
)  # fmt: skip
CHUNKED = ("5\r\nhello\r\n0\r\n\r\n", "a\r\n0123456789\r\n1\r\nx\r\n0\r\nX: y\r\n\r\nGET /")
ANSWERS = (
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n",
    "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
)


@pytest.fixture(scope="module")
def filtered() -> Iterator[tuple[FakeEngine, Filtered]]:
    """A recording engine, and a filter before it."""
    base = place()
    engine = FakeEngine(base / "engine.sock")
    engine.start()
    one = Filtered(base, engine.path)
    about = {"Id": "c" * 64, "Config": {"Labels": {OWNER: one.owner}}, "HostConfig": {}}
    engine.answers["GET", "/containers/MINE/json"] = 200, about
    yield engine, one
    one.stop()
    engine.stop()
    shutil.rmtree(base, ignore_errors=True)


@fuzz(1500, text=mutated(SENT, PIECES), behind=st.sampled_from(("", *SENT[:10])))
def test_whatever_is_sent_nothing_dangerous_arrives(
    filtered: tuple[FakeEngine, Filtered], text: str, behind: str
) -> None:
    """By a second opinion on each request that arrives, fields and paths."""
    engine, one = filtered
    engine.seen.clear()
    # Whoever waits for more gets the end; whoever has refused may be gone before all is sent.
    with connect(one.path) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall((text + behind).encode("latin-1", "replace"))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    for seen in engine.asked():
        if not seen.path.endswith("/networks/create"):
            assert harm(seen.method, seen.path, seen.body) == [], seen


def reading(data: bytes, step: int, *, framed: bool) -> tuple[bytes, bytes] | str:
    """What a chunked body says when it comes in pieces: content and rest, or an error."""
    chunks = http1.Chunks(framed=framed)
    out = b""
    for at in range(0, len(data), step):
        try:
            out += chunks.feed(data[at : at + step])
        except http1.BadRequest as error:
            return str(error)
        if chunks.done:
            return out, chunks.rest + data[at + step :]
    return "more"


@fuzz(1500, text=mutated(CHUNKED, PIECES), step=st.integers(1, 9))
def test_a_chunked_body_has_one_reading(text: str, step: int) -> None:
    """However it is cut into pieces, and framed anew it says the same."""
    data = text.encode("latin-1", "replace")
    whole = reading(data, max(1, len(data)), framed=False)
    parts = reading(data, step, framed=False)
    assert isinstance(parts, str) == isinstance(whole, str)
    if not isinstance(whole, str):
        assert parts == whole
        again = reading(data, step, framed=True)
        assert not isinstance(again, str)
        assert reading(again[0], 3, framed=False) == (whole[0], b"")


@fuzz(800, text=mutated(ANSWERS, PIECES))
def test_an_answer_is_read_or_refused(text: str) -> None:
    """The engine is believed, but not to be what it is not."""
    try:
        answer = wire.parse_answer(text.encode("latin-1", "replace"))
    except wire.Broken:
        return
    assert 0 <= answer.status <= 999


@fuzz(
    800, text=mutated(("/build?buildargs=s3cret&t=x", "/x?a=s3cret"), ("&", "=", "?", "%26", ";"))
)
def test_no_value_of_a_query_gets_into_the_log(text: str) -> None:
    """Names only."""
    values = [part.partition("=")[2] for part in text.partition("?")[2].split("&")]
    shown = audit.bare(text).partition("?")[2]
    assert not any(len(v) > 5 and f"={v}" in shown for v in values)
