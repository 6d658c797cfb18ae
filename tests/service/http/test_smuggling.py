"""One request cannot hide in another: what two readers could frame differently is refused.

Each attack carries a second request, `GET /hidden`, where a lenient reader would find one. The test
fails if it ever reaches the handler.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator

import pytest

from agent_sandbox.service.http.messages import Request, Response, json_response

from .lab import get, run, serving

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"0\r\n\r\n" + HIDDEN
TE = b"Transfer-Encoding: chunked\r\n"


def sized(number: int) -> bytes:
    return b"Content-Length: %d\r\n" % number


# Refused by their heads alone.
HEADS = {
    "both, length first": sized(4) + TE,
    "both, coding first": TE + sized(4),
    "both, length 0": sized(0) + TE,
    "two lengths": sized(0) + sized(len(HIDDEN)),
    "two equal lengths": sized(4) + sized(4),
    "a list of lengths": b"Content-Length: 4, 4\r\n",
    "a length with a sign": b"Content-Length: +4\r\n",
    "a negative length": b"Content-Length: -4\r\n",
    "a length in hexadecimal": b"Content-Length: 0x4\r\n",
    "a length with an underscore": b"Content-Length: 1_0\r\n",
    "a length with a point": b"Content-Length: 4.0\r\n",
    "an empty length": b"Content-Length: \r\n",
    "a length with a space inside": b"Content-Length: 1 0\r\n",
    "a length in other digits": "Content-Length: ²\r\n".encode("latin-1"),
    "a huge length": b"Content-Length: 99999999999999999999\r\n",
    "a blank before the colon": b"Content-Length : 4\r\n",
    "a blank before the colon of the coding": b"Transfer-Encoding : chunked\r\n",
    "a tab before the colon": b"Transfer-Encoding\t: chunked\r\n",
    "a folded length": b"Content-Length:\r\n 4\r\n",
    "a folded coding": b"Transfer-Encoding:\r\n chunked\r\n",
    "a folded field": b"X-A: b\r\n c\r\n" + TE,
    "a field that begins with a blank": b" Transfer-Encoding: chunked\r\n",
    "an underscore": b"Transfer_Encoding: chunked\r\n",
    "an underscore in the length": b"Content_Length: 4\r\n",
    "a coding with a vertical tab": b"Transfer-Encoding: \x0bchunked\r\n",
    "a coding with a NUL": b"Transfer-Encoding: chunked\x00\r\n",
    "a coding with a DEL": b"Transfer-Encoding: \x7fchunked\r\n",
    "a quoted coding": b'Transfer-Encoding: "chunked"\r\n',
    "xchunked": b"Transfer-Encoding: xchunked\r\n",
    "chunked twice": b"Transfer-Encoding: chunked, chunked\r\n",
    "chunked on two lines": TE + TE,
    "chunked before another": b"Transfer-Encoding: chunked, identity\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "chunked and identity on two lines": TE + b"Transfer-Encoding: identity\r\n",
    "a comma behind": b"Transfer-Encoding: chunked,\r\n",
    "a comma before": b"Transfer-Encoding: ,chunked\r\n",
    "a semicolon behind": b"Transfer-Encoding: chunked;q=1\r\n",
    "an empty coding": b"Transfer-Encoding:\r\n",
    "a coding with a no-break space": b"Transfer-Encoding: chunked\xa0\r\n",
    "a bare LF": b"X-A: b\nTransfer-Encoding: chunked\r\n",
    "a bare CR": b"X-A: b\rTransfer-Encoding: chunked\r\n",
    "CR CR LF": b"Transfer-Encoding: chunked\r\r\n",
    "a field without a colon": b"Transfer-Encoding\r\n",
    "a field without a name": b": chunked\r\n",
    "a NUL in a name": b"Transfer-\x00Encoding: chunked\r\n",
    "two hosts": b"Host: y\r\n",
}
# The whole input.
FIRST_LINES = {
    "HTTP/0.9": b"GET /hidden\r\n\r\n",
    "a blank line first": b"\r\n" + HIDDEN,
    "a bare LF first": b"\n" + HIDDEN,
    "bare LFs": HIDDEN.replace(b"\r\n", b"\n"),
    "a mixture": b"GET /hidden HTTP/1.1\r\nHost: x\n\r\n",
    "two blanks": b"GET  /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tab": b"GET\t/hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    "a blank behind": b"GET /hidden HTTP/1.1 \r\nHost: x\r\n\r\n",
    "a blank before": b" GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET /hidden HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/1.10": b"GET /hidden HTTP/1.10\r\nHost: x\r\n\r\n",
    "http/1.1": b"GET /hidden http/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /hidden HTTP/1.1\r\n\r\n",
    "an empty host": b"GET /hidden HTTP/1.1\r\nHost:\r\n\r\n",
    "another host in the target": b"GET http://y/hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    "a fragment": b"GET /hidden#x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a byte over 127": b"GET /hidden\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method with a bracket": b"G(T /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /hidden HTTP/1.0\r\n" + TE + b"\r\n0\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}
# Behind a good head: refused where the body is read.
BODIES = {
    "an extension": b"3;x=y\r\nabc\r\n",
    "an extension with a bare LF": b"3;x\nabc\r\n",
    "a quoted line break in an extension": b'3;x="\r\n"\r\nabc\r\n',
    "a bare LF behind the size": b"3\nabc\r\n",
    "a bare LF behind the content": b"3\r\nabc\n0\r\n\r\n",
    "a blank before the size": b" 3\r\nabc\r\n",
    "a blank behind the size": b"3 \r\nabc\r\n",
    "0x": b"0x3\r\nabc\r\n",
    "a sign": b"+3\r\nabc\r\n",
    "a negative size": b"-3\r\nabc\r\n",
    "an underscore": b"0_3\r\nabc\r\n",
    "a size that wraps": b"10000000000000003\r\nabc\r\n",
    "an empty size": b"\r\nabc\r\n",
    "a chunk longer than it says": b"3\r\nabcd\r\n",
    "a chunk shorter than it says": b"5\r\nabc\r\n0\r\n\r\n",
    "a letter too many": b"3g\r\nabc\r\n",
    "a folded trailer": b"0\r\n x: y\r\n\r\n",
    "a trailer that frames": b"0\r\nContent_Length: 3\r\n\r\n",
    "a trailer without a colon": b"0\r\nabc\r\n\r\n",
    "a bare LF in the trailers": b"0\r\nx: y\n\r\n",
    "a bare LF at the end": b"0\r\n\n",
    "a NUL": b"3\x00\r\nabc\r\n",
}


class Seen:
    """A handler that remembers what reached it."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, request: Request) -> Response:
        self.paths.append(request.path)
        body = await request.body(1000)
        return json_response(200, len(body))


def cannot(data: bytes, *, handled: bool) -> None:
    """One 400, then the end; nothing of it is ever handled as a second request."""

    async def main() -> None:
        seen = Seen()
        async with serving(seen) as lab:
            client = await lab.client()
            answer = await client.ask(data)
            assert answer.status == 400, answer.body
            assert answer.headers["connection"] == "close"
            client.send(HIDDEN)
            assert await client.rest() == b""
            assert seen.paths == (["/p"] if handled else [])
            assert len(lab.bad) == (0 if handled else 1)
            assert lab.errors == []

    run(main)


@pytest.mark.parametrize("what", HEADS)
def test_cannot_smuggle_by_a_field(what: str) -> None:
    cannot(POST + HEADS[what] + b"\r\n" + CHUNKED, handled=False)


@pytest.mark.parametrize("what", FIRST_LINES)
def test_cannot_smuggle_by_a_first_line(what: str) -> None:
    cannot(FIRST_LINES[what], handled=False)


@pytest.mark.parametrize("what", BODIES)
def test_cannot_smuggle_by_a_chunk(what: str) -> None:
    cannot(POST + TE + b"\r\n" + BODIES[what] + b"\r\n" + CHUNKED, handled=True)


def test_the_hidden_request_is_found_where_it_may_be() -> None:
    """The control: behind a body that is framed in one way it is an ordinary second request."""

    async def main() -> None:
        seen = Seen()
        async with serving(seen) as lab:
            client = await lab.client()
            for framed in (TE + b"\r\n" + CHUNKED, sized(0) + b"\r\n" + HIDDEN):
                client.send(POST + framed)
                assert (await client.answer()).status == 200
                assert (await client.answer()).status == 200
            assert seen.paths == ["/p", "/hidden"] * 2

    run(main)


def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    async def main() -> None:
        seen = Seen()
        async with serving(seen) as lab:
            client = await lab.client()
            answer = await client.ask(POST + sized(len(HIDDEN)) + b"\r\n" + HIDDEN)
            assert json.loads(answer.body) == len(HIDDEN)
            assert (await client.ask(get("/next"))).status == 200
            assert seen.paths == ["/p", "/next"]

    run(main)


@pytest.mark.parametrize("what", BODIES)
def test_cannot_smuggle_in_a_body_that_nobody_reads(what: str) -> None:
    async def main() -> None:
        paths = []

        async def handler(request: Request) -> Response:
            paths.append(request.path)
            return json_response(200, None)

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(POST + TE + b"\r\n" + BODIES[what] + b"\r\n" + CHUNKED)
            assert (await client.answer()).headers["connection"] == "close"
            await client.rest()
            assert paths == ["/p"]
            assert lab.server.connections <= 1

    run(main)


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    """Bytes changed, cut out, doubled: what a fuzzer does."""
    chance = random.Random(6)
    odd = b"\r\n :;,\t\0\x0b\x7f\x85\xff0123456789abcxCT"
    for _ in range(count):
        changed = bytearray(data)
        for _change in range(chance.randint(1, 4)):
            at = chance.randrange(len(changed))
            kind = chance.randrange(4)
            if kind == 0:
                changed[at] = chance.choice(odd)
            elif kind == 1:
                del changed[at : at + chance.randint(1, 6)]
            elif kind == 2:
                changed[at:at] = bytes([chance.choice(odd)])
            else:
                changed[at:at] = changed[at : at + chance.randint(1, 30)]
        yield bytes(changed)


@pytest.mark.parametrize(
    "data",
    [
        POST + TE + b"\r\n3\r\nabc\r\n0\r\n\r\n",
        POST + sized(3) + b"\r\nabc",
        get("/a/b%20c?d=e&f=%20", b"Connection: keep-alive\r\nExpect: 100-continue\r\n"),
    ],
    ids=["chunked", "sized", "get"],
)
def test_nonsense_gets_an_answer_or_an_end_and_never_a_fault(data: bytes) -> None:
    async def main() -> None:
        seen = Seen()
        async with serving(seen) as lab:
            for changed in mutations(data, 300):
                client = await lab.client()
                client.send(changed)
                client.writer.write_eof()
                answers = await client.rest()
                statuses = re.findall(rb"HTTP/1\.1 (\d\d\d) ", answers)
                assert set(statuses) <= {b"100", b"200", b"400", b"413", b"414", b"431"}, changed
                client.close()
            assert lab.errors == []
            assert (await lab.ask(get("/"))).status == 200

    run(main)


def test_cannot_go_behind_an_upgrade_that_is_not_made() -> None:
    """h2c: the switch is ignored, and what follows is read as HTTP/1."""

    async def main() -> None:
        seen = Seen()
        async with serving(seen) as lab:
            client = await lab.client()
            fields = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            fields += b"HTTP2-Settings: AAMAAABk\r\n"
            assert (await client.ask(get("/a", fields))).status == 200
            answer = await client.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert answer.status == 400
            assert seen.paths == ["/a"]
            await asyncio.sleep(0)

    run(main)
