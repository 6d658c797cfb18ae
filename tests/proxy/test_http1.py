"""HTTP requests: one reading only, or none. The tables are the known ways to smuggle."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy import http1
from agent_sandbox.proxy.http1 import BadRequest, Chunks

END = b"\r\n\r\n"


def request(
    *fields: bytes, line: bytes = b"GET / HTTP/1.1", host: bytes = b"Host: a.test"
) -> bytes:
    return b"\r\n".join(part for part in (line, host, *fields) if part) + END


def parse(data: bytes) -> http1.Request:
    length = http1.head_length(data)
    assert length
    return http1.parse(data[:length])


def test_a_request_is_read() -> None:
    found = parse(request(b"X-Y:  z \t", b"Content-Length: 5") + b"hello")
    assert (found.method, found.target, found.host) == ("GET", "/", "a.test")
    assert found.fields[1] == ("X-Y", "z")
    assert (found.sized, found.length, found.chunked, found.upgrade) == (True, 5, False, False)


def test_every_shorter_head_needs_more() -> None:
    data = request(b"X: y")
    assert all(http1.head_length(data[:length]) == 0 for length in range(len(data)))
    assert http1.head_length(data + b"more") == len(data)


BAD = {
    "a bare LF": b"GET / HTTP/1.1\nHost: a.test\n\n",
    "one bare LF": b"GET / HTTP/1.1\r\nHost: a.test\nX: y\r\n\r\n",
    "a bare CR": request(b"X: a\rTransfer-Encoding: chunked"),
    "a folded line": request(b"X: a", b" b"),
    "a folded line with a tab": request(b"X: a", b"\tb"),
    "a first field that is folded": request(b"", host=b" Host: a.test"),
    "a blank before the colon": request(b"Content-Length : 3"),
    "no colon": request(b"nonsense"),
    "an empty name": request(b": x"),
    "NUL in a value": request(b"X: a\0b"),
    "NUL in a name": request(b"X\0: a"),
    "a vertical tab before chunked": request(b"Transfer-Encoding: \x0bchunked"),
    "DEL": request(b"X: a\x7fb"),
    "two blanks in the first line": request(line=b"GET  / HTTP/1.1"),
    "a tab in the first line": request(line=b"GET\t/ HTTP/1.1"),
    "no version": request(line=b"GET /"),
    "HTTP/2": request(line=b"PRI * HTTP/2.0"),
    "HTTP/1.2": request(line=b"GET / HTTP/1.2"),
    "http/1.1": request(line=b"GET / http/1.1"),
    "HTTP/01.1": request(line=b"GET / HTTP/01.1"),
    "a bad method": request(line=b"G(T / HTTP/1.1"),
    "no method": request(line=b" / HTTP/1.1"),
    "an empty line first": b"\r\n" + request(),
    "a fragment": request(line=b"GET /#x HTTP/1.1"),
    "UTF-8 in the target": request(line="GET /ä HTTP/1.1".encode()),
    "no Host": request(host=b""),
    "an empty Host": request(host=b"Host:"),
    "two Hosts": request(b"Host: b.test"),
    "two equal Hosts": request(b"host: a.test"),
    "both lengths": request(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "both, the other way": request(b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "two lengths": request(b"Content-Length: 3", b"Content-Length: 4"),
    "two equal lengths": request(b"Content-Length: 3", b"Content-Length: 3"),
    "a list of lengths": request(b"Content-Length: 3, 3"),
    "+3": request(b"Content-Length: +3"),
    "-3": request(b"Content-Length: -3"),
    "0x3": request(b"Content-Length: 0x3"),
    "3_0": request(b"Content-Length: 3_0"),
    "no number": request(b"Content-Length:"),
    "another digit": request("Content-Length: ³".encode("latin-1")),
    "too many digits": request(b"Content-Length: " + b"9" * 19),
    "chunked twice": request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "chunked, chunked": request(b"Transfer-Encoding: chunked, chunked"),
    "gzip, chunked": request(b"Transfer-Encoding: gzip, chunked"),
    "identity": request(b"Transfer-Encoding: identity"),
    "xchunked": request(b"Transfer-Encoding: xchunked"),
    "quoted chunked": request(b'Transfer-Encoding: "chunked"'),
    "chunked in 1.0": request(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"),
    "an underscore": request(b"Transfer_Encoding: chunked"),
    "an underscore in the length": request(b"Content_Length: 3"),
    "too many fields": request(*[b"X: y"] * 300),
    "too long a first line": request(line=b"GET /" + b"a" * 20_000 + b" HTTP/1.1"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_cannot_pass_with(what: str) -> None:
    with pytest.raises(BadRequest):
        parse(BAD[what])


def test_a_head_without_an_end_has_a_limit() -> None:
    with pytest.raises(BadRequest) as caught:
        http1.head_length(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)
    assert caught.value.status == 431
    with pytest.raises(BadRequest) as caught:
        http1.head_length(b"GET /" + b"a" * 20_000)
    assert caught.value.status == 414


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"GET /x?y HTTP/1.1", ("", 0, "/x?y")),
        (b"OPTIONS * HTTP/1.1", ("", 0, "*")),
        (b"GET http://a.test HTTP/1.1", ("a.test", 80, "/")),
        (b"GET HTTP://a.test:8080/x HTTP/1.1", ("a.test", 8080, "/x")),
        (b"GET http://a.test?q HTTP/1.1", ("a.test", 80, "/?q")),
        (b"GET http://[fd00::1]:81/ HTTP/1.1", ("fd00::1", 81, "/")),
        (b"CONNECT a.test:443 HTTP/1.1", ("a.test", 443, "")),
        (b"CONNECT [::1]:443 HTTP/1.1", ("::1", 443, "")),
    ],
)
def test_targets(line: bytes, expected: tuple[str, int, str]) -> None:
    found = http1.target(parse(request(line=line)))
    assert (found.host, found.port, found.path) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"GET * HTTP/1.1", b"GET a.test HTTP/1.1", b"GET https://a.test/ HTTP/1.1",
        b"GET ftp://a.test/ HTTP/1.1", b"GET http:///x HTTP/1.1", b"GET http://u@a.test/ HTTP/1.1",
        b"GET http://u:p@a.test/ HTTP/1.1", b"GET http://a.test:/ HTTP/1.1",
        b"GET http://a.test:0/ HTTP/1.1", b"GET http://a.test:99999/ HTTP/1.1",
        b"GET http://a.test:+80/ HTTP/1.1", b"CONNECT a.test HTTP/1.1",
        b"CONNECT a.test:443/ HTTP/1.1", b"CONNECT http://a.test:443 HTTP/1.1",
        b"CONNECT [::1 HTTP/1.1", b"CONNECT [a]:1 HTTP/1.1", b"CONNECT [::1]x:443 HTTP/1.1",
        b"CONNECT :443 HTTP/1.1",
    ],
)  # fmt: skip
def test_targets_that_are_none(line: bytes) -> None:
    with pytest.raises(BadRequest):
        http1.target(parse(request(line=line)))


def test_what_goes_out_is_built_anew() -> None:
    found = parse(
        request(
            b"Connection: keep-alive, X-Drop, Host", b"X-Drop: 1", b"Proxy-Authorization: Basic x",
            b"Proxy-Connection: keep-alive", b"TE: trailers", b"Upgrade: h2c",
            b"HTTP2-Settings: x", b"X-Keep: 2", b"content-length: 007",
            line=b"POST http://A.test/x HTTP/1.1",
        )
    )  # fmt: skip
    assert http1.rebuild(found, "a.test", "/x") == (
        b"POST /x HTTP/1.1\r\nHost: a.test\r\nX-Keep: 2\r\nContent-Length: 7\r\n"
        b"Connection: close\r\n\r\n"
    )


def test_cannot_upgrade_to_anything_but_websocket() -> None:
    """Behind h2c there would be requests that nobody reads."""
    good = (b"Connection: keep-alive, Upgrade", b"Upgrade: WebSocket")
    assert parse(request(*good)).upgrade
    for fields, line in (
        ((b"Connection: Upgrade", b"Upgrade: h2c"), b"GET / HTTP/1.1"),
        ((b"Connection: Upgrade", b"Upgrade: websocket, h2c"), b"GET / HTTP/1.1"),
        ((*good, b"Upgrade: h2c"), b"GET / HTTP/1.1"),
        ((b"Upgrade: websocket",), b"GET / HTTP/1.1"),
        ((*good, b"Content-Length: 1"), b"GET / HTTP/1.1"),
        ((*good, b"Transfer-Encoding: chunked"), b"GET / HTTP/1.1"),
        (good, b"POST / HTTP/1.1"),
        (good, b"GET / HTTP/1.0"),
    ):
        found = parse(request(*fields, line=line))
        assert not found.upgrade
        assert b"pgrade" not in http1.rebuild(found, "a.test", "/")


CHUNKED = b"5\r\nhello\r\n00a\r\n0123456789\r\n0\r\nX: y\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_are_read_in_any_pieces(size: int) -> None:
    chunks = Chunks()
    out = b"".join(chunks.feed(CHUNKED[at : at + size]) for at in range(0, len(CHUNKED), size))
    assert out.endswith(b"0\r\n\r\n")
    assert chunks.done
    plain = Chunks()
    assert plain.feed(out)
    assert plain.done
    assert b"X: y" not in out


def test_nothing_behind_the_last_chunk_goes_out() -> None:
    chunks = Chunks()
    assert chunks.feed(b"0\r\n\r\nGET /evil HTTP/1.1\r\n\r\n") == b"0\r\n\r\n"
    assert chunks.feed(b"more") == b""


@pytest.mark.parametrize(
    "data",
    [
        b"5;x=y\r\nhello\r\n", b"5 \r\nhello\r\n", b" 5\r\nhello\r\n", b"0x5\r\nhello\r\n",
        b"+5\r\nhello\r\n", b"-5\r\nhello\r\n", b"5\nhello\n", b"\r\nhello", b"5\r\nhelloX\r\n",
        b"5\r\nhello\n0\r\n", b"5\r\nhello\rX", b"g\r\n", b"5_0\r\n", b"f" * 16 + b"\r\n",
        b"0\r\nX: y\n\r\n", b"0\r\n x\r\n\r\n", b"0\r\nno colon\r\n\r\n", b"0\r\nX: " + b"y" * 9000,
        b"5\r\nhello\r\n\r\n", b"5\r5\r\nhello\r\n", b"\xb25\r\n",
    ],
)  # fmt: skip
def test_cannot_hide_in_chunks(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Chunks().feed(data)
    slow = Chunks()
    with pytest.raises(BadRequest):
        list(map(slow.feed, (data[at : at + 1] for at in range(len(data)))))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HTTP/1.1 101 Switching\r\n\r\nraw", 101),
        (b"HTTP/1.1 101\r\n\r\n", 101),
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.0 101 no\r\n\r\n", 0),
        (b"HTTP/1.1 1010 no\r\n\r\n", 0),
        (b"HTTP/1.1  101 no\r\n\r\n", 0),
        (b"ICY 101 no\r\n\r\n", 0),
    ],
)
def test_only_a_101_switches(data: bytes, status: int) -> None:
    found = http1.answer(data)
    assert found is not None
    assert found.status == status


def test_an_answer_may_need_more() -> None:
    assert http1.answer(b"HTTP/1.1 101 x\r\n") is None
    endless = http1.answer(b"x" * 70_000)
    assert endless is not None
    assert endless.status == 0
    assert http1.closing(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n") == (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nA: b\r\n\r\n"
    )
