"""What a client may rely on: keep-alive, pipelining, chunks, Expect, HEAD, TLS, unix sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.service.http.messages import (
    Request,
    Response,
    WebSocketResponse,
    empty,
    json_response,
)
from agent_sandbox.service.http.server import Limits, Server
from agent_sandbox.service.problems import Problem

from .lab import PATIENCE, Client, echo, get, run, serving, tls_contexts, until

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"


def test_a_request_is_read_and_answered() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            answer = await lab.ask(
                b"PUT /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nContent-Length: 3\r\n\r\nabc"
            )
            seen = json.loads(answer.body)
            assert answer.status == 200
            assert (seen["method"], seen["path"], seen["query"]) == ("PUT", "/a b", {"c": "d"})
            assert (seen["body"], seen["headers"]["x-one"]) == ("abc", "1")
            assert answer.headers["x-request-id"] == seen["id"]
            assert seen["id"].startswith("req_")
            assert len(seen["id"]) == 20

    run(main)


def test_a_connection_serves_many_requests() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            client = await lab.client()
            ids = set()
            for number in range(50):
                answer = await client.ask(get(f"/{number}"))
                assert json.loads(answer.body)["path"] == f"/{number}"
                ids.add(answer.headers["x-request-id"])
            assert len(ids) == 50
            assert lab.server.connections == 1

    run(main)


def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async def main() -> None:
        running = 0

        async def handler(request: Request) -> Response:
            nonlocal running
            running += 1
            assert running == 1
            # The first takes longest.
            await asyncio.sleep(0.05 if request.path == "/0" else 0)
            body = await request.body(10)
            running -= 1
            return json_response(200, request.path + body.decode())

        async with serving(handler) as lab:
            client = await lab.client()
            chunked = (
                POST.replace(b"/p", b"/2")
                + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n"
            )
            sized = POST.replace(b"/p", b"/1") + b"Content-Length: 1\r\n\r\na"
            client.send(get("/0") + sized + chunked + get("/3"))
            bodies = [(await client.answer()).body for _ in range(4)]
            assert bodies == [b'"/0"', b'"/1a"', b'"/2b"', b'"/3"']
            assert lab.errors == []

    run(main)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_request_may_come_in_pieces_of_any_size(step: int) -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            client = await lab.client()
            data = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n"
            data += b"0\r\nT: x\r\n\r\n" + get("/next")
            for at in range(0, len(data), step):
                client.send(data[at : at + step])
                await client.writer.drain()
                await asyncio.sleep(0)
            assert json.loads((await client.answer()).body)["body"] == "abc0123456789"
            assert json.loads((await client.answer()).body)["path"] == "/next"

    run(main)


def test_a_large_body_streams_through_a_slow_reader() -> None:
    async def main() -> None:
        total = 8 * 1024 * 1024

        async def handler(request: Request) -> Response:
            size = 0
            async for piece in request.stream(total):
                size += len(piece)
                await asyncio.sleep(0)
            return json_response(200, size)

        async with serving(handler) as lab:
            for framing in ("sized", "chunked"):
                client = await lab.client()
                data = bytes(64 * 1024)
                if framing == "sized":
                    client.send(POST + b"Content-Length: %d\r\n\r\n" % total)
                else:
                    client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(total // len(data)):
                    client.send(data if framing == "sized" else b"10000\r\n" + data + b"\r\n")
                    await client.writer.drain()
                if framing == "chunked":
                    client.send(b"0\r\n\r\n")
                assert (await client.answer()).body == str(total).encode()

    run(main)


def test_a_stream_is_sent_as_it_comes() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            yield b""  # must not end the answer
            await go.wait()
            yield b"two"

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            _, headers = await client.head()
            assert headers["transfer-encoding"] == "chunked"
            async with asyncio.timeout(PATIENCE):
                assert await client.reader.readexactly(8) == b"3\r\none\r\n"
                go.set()
                assert await client.reader.readexactly(13) == b"3\r\ntwo\r\n0\r\n\r\n"
            # And the connection goes on.
            go.set()
            client.send(get("/"))
            assert (await client.answer()).body == b"onetwo"

    run(main)


def test_an_old_client_gets_a_stream_that_ends_with_the_connection() -> None:
    async def main() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(b"GET / HTTP/1.0\r\n\r\n")
            _, headers = await client.head()
            assert "transfer-encoding" not in headers
            assert headers["connection"] == "close"
            assert await client.rest() == b"onetwo"

    run(main)


@pytest.mark.parametrize("said", [b"1", b"9"])
def test_a_stream_that_is_not_as_long_as_it_says_is_cut_off(said: bytes) -> None:
    """The client must not take a part for the whole, nor a rest for the next answer."""

    async def main() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"abcde"

        async def handler(_: Request) -> Response:
            length = (("content-length", said.decode()),)
            return Response(status=200, headers=length, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            await client.head()
            assert len(await client.rest()) != int(said)
            assert len(lab.errors) == 1

    run(main)


def test_a_stream_that_breaks_is_not_ended_in_order() -> None:
    async def main() -> None:
        closed = []

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"one"
                raise RuntimeError("broken")
            finally:
                closed.append(True)

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            await client.head()
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
            assert [str(error) for error in lab.errors] == ["broken"]
            assert closed == [True]

    run(main)


def test_head_has_the_head_of_get_and_no_body() -> None:
    async def main() -> None:
        closed = []

        class Pieces:
            def __aiter__(self) -> AsyncIterator[bytes]:
                raise AssertionError("must not be read")

            async def __anext__(self) -> bytes:
                raise AssertionError("must not be read")

            async def aclose(self) -> None:
                closed.append(True)

        async def handler(request: Request) -> Response:
            if request.path == "/stream":
                return Response(status=200, body=Pieces())
            return json_response(200, "hello")

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await client.answer(head_only=True)
            assert answer.headers["content-length"] == "7"
            client.send(b"HEAD /stream HTTP/1.1\r\nHost: x\r\n\r\n" + get("/"))
            await client.answer(head_only=True)
            # What follows is the next answer, not a body.
            assert (await client.answer()).body == b'"hello"'
            assert closed == [True]

    run(main)


def test_no_content_has_no_body_and_keeps_the_connection() -> None:
    async def main() -> None:
        async def handler(_: Request) -> Response:
            return empty(204)

        async with serving(handler) as lab:
            client = await lab.client()
            for _ in range(2):
                answer = await client.ask(get("/"))
                assert answer.status == 204
                assert "content-length" not in answer.headers

    run(main)


# --- Expect


def test_a_client_that_waits_is_told_to_go_on_when_its_body_is_wanted() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            client = await lab.client()
            client.send(POST + b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                assert (
                    await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                )
            client.send(b"abc")
            assert json.loads((await client.answer()).body)["body"] == "abc"
            assert (await client.ask(get("/"))).status == 200

    run(main)


def test_a_client_that_waits_is_refused_before_it_sends() -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            await request.body(10)
            raise AssertionError

        async with serving(handler) as lab:
            client = await lab.client()
            answer = await client.ask(POST + b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n")
            assert (answer.status, answer.code) == (413, "TOO_LARGE")
            # Whether a body follows is not known: no second request on this connection.
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""

    run(main)


def test_no_word_is_sent_to_a_client_that_does_not_wait() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            sent = POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
            assert (await lab.ask(sent)).status == 200
            old = sent.replace(b"HTTP/1.1", b"HTTP/1.0")[:-3]
            client = await lab.client()
            client.send(old)
            await asyncio.sleep(0.05)
            assert (await client.ask(b"abc")).status == 200
            assert (await lab.ask(get("/", b"Expect: tea\r\n"))).status == 400

    run(main)


# --- bodies that nobody reads


@pytest.mark.parametrize(
    ("framing", "kept"),
    [
        (b"Content-Length: 5\r\n\r\nabcde", True),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n", True),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", False),
        (b"Content-Length: 70000\r\n\r\n", False),
    ],
)
def test_the_next_request_begins_behind_an_unread_body(framing: bytes, kept: bool) -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            return json_response(200, request.path)

        async with serving(handler) as lab:
            client = await lab.client()
            answer = await client.ask(POST + framing)
            assert answer.body == b'"/p"'
            assert ("connection" not in answer.headers) == kept
            if kept:
                assert (await client.ask(get("/next"))).body == b'"/next"'
            else:
                client.send(get("/next"))
                assert await client.rest() == b""

    run(main)


def test_a_small_rest_of_an_unread_body_is_waited_for() -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            return json_response(200, request.path)

        async with serving(handler) as lab:
            client = await lab.client()
            await client.ask(POST + b"Content-Length: 60000\r\n\r\n" + bytes(100))
            client.send(bytes(59900) + get("/next"))
            assert (await client.answer()).body == b'"/next"'

    run(main)


# --- problems


def test_a_refusal_has_a_code_words_and_the_id() -> None:
    async def main() -> None:
        async def handler(_: Request) -> Response:
            raise Problem(
                "RATE_LIMITED",
                "slower",
                hint="wait",
                retry_after=1.2,
                headers={"X-RateLimit-Limit": "5"},
            )

        async with serving(handler) as lab:
            client = await lab.client()
            answer = await client.ask(get("/"))
            assert answer.status == 429
            assert answer.headers["retry-after"] == "2"
            assert answer.headers["x-ratelimit-limit"] == "5"
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert json.loads(answer.body) == {
                "code": "RATE_LIMITED", "message": "slower", "hint": "wait",
                "requestId": answer.headers["x-request-id"],
            }  # fmt: skip
            assert (await client.ask(get("/"))).status == 429  # the connection is kept
            assert lab.errors == []

    run(main)


def test_a_fault_of_ours_shows_nothing_but_an_id() -> None:
    async def main() -> None:
        async def handler(request: Request) -> Response:
            if request.path == "/none":
                return None  # type: ignore[return-value]
            if request.path == "/split":
                return empty(200, [("x-a", request.query["v"])])
            raise RuntimeError("secret")

        async with serving(handler) as lab:
            for path in ("/raise", "/none", "/split?v=a%0d%0aset-cookie:%20a=b"):
                answer = await lab.ask(get(path))
                assert (answer.status, answer.code) == (500, "INTERNAL")
                assert b"secret" not in answer.body
                assert "set-cookie" not in answer.headers
            assert len(lab.errors) == 3

    run(main)


def test_a_websocket_is_not_given_to_who_does_not_ask_for_one() -> None:
    async def main() -> None:
        async def handler(_: Request) -> WebSocketResponse:
            async def serve(_: object) -> None:
                raise AssertionError

            return WebSocketResponse(serve)

        async with serving(handler) as lab:
            answer = await lab.ask(get("/"))
            assert (answer.status, answer.code) == (426, "UPGRADE_REQUIRED")
            assert answer.headers["sec-websocket-version"] == "13"

    run(main)


# --- a client that is not ours


def test_httpx_is_content() -> None:
    async def main() -> None:
        async with serving(echo) as lab, httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{lab.port}/x"

            async def parts() -> AsyncIterator[bytes]:
                for _ in range(3):
                    yield b"part"

            answer = await client.post(url, content=parts())
            assert answer.json()["body"] == "partpartpart"
            answer = await client.get(url, params={"a": "b c&d"})
            assert answer.json()["query"] == {"a": "b c&d"}
            assert (await client.head(url)).status_code == 200
            answers = await asyncio.gather(*(client.get(url) for _ in range(50)))
            assert {answer.status_code for answer in answers} == {200}

    run(main)


# --- listeners


def test_tls_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        server, client_side = tls_contexts(tmp_path)
        seen = []

        async def handler(request: Request) -> Response:
            seen.append(request.peer)
            return json_response(200, len(await request.body(2**21)))

        async with serving(handler, tls=server) as lab:
            client = await lab.client(client_side)
            size = 2**20
            answer = await client.ask(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
            assert answer.body == str(size).encode()
            assert (await client.ask(get("/"))).body == b"0"
            assert seen[0].tls
            assert seen[0].address == "127.0.0.1"
            # A client that speaks no TLS gets nothing, and hurts nobody.
            plain = await lab.client()
            plain.send(get("/"))
            assert b"200 OK" not in await plain.rest()
            assert (await client.ask(get("/"))).status == 200

    run(main)


def test_a_handshake_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    async def main() -> None:
        server, _ = tls_contexts(tmp_path)
        async with serving(echo, Limits(head_seconds=0.2), tls=server) as lab:
            silent = await lab.client()
            await until(lambda: lab.server.connections == 1)
            assert await silent.rest() == b""
            await until(lambda: lab.server.connections == 0)

    run(main)


def test_handshakes_count_as_connections(tmp_path: Path) -> None:
    """Clients that connect and never speak TLS must not take more than their share."""

    async def main() -> None:
        server, client_side = tls_contexts(tmp_path)
        async with serving(echo, Limits(connections=4), tls=server) as lab:
            for _ in range(20):
                await lab.client()
            await until(lambda: lab.server.connections == 4)
            fast = await lab.client(client_side)
            assert (await fast.ask(get("/"))).status == 200
            assert lab.server.connections <= 4

    run(main)


def test_who_calls_at_a_unix_socket_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        seen = []

        async def handler(request: Request) -> Response:
            seen.append(request.peer)
            return empty(204)

        async with serving(handler) as lab:
            await lab.server.listen_unix(path)
            client = await lab.unix(path)
            assert (await client.ask(get("/"))).status == 204
            assert (seen[0].uid, seen[0].pid) == (os.getuid(), os.getpid())
            assert seen[0].unix
            assert seen[0].address == "unix"

    path = str(tmp_path / "s.sock")
    run(main)
    assert not Path(path).exists()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_file_of_a_socket_has_its_mode_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    async def main() -> None:
        path = tmp_path / "s.sock"
        server = Server(echo)
        before = os.umask(0o077)
        try:
            await server.listen_unix(str(path), mode)
            assert stat.S_IMODE(path.lstat().st_mode) == mode
        finally:
            os.umask(before)
            await server.close()

    run(main)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.sock"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        one, two = Server(echo), Server(echo)
        await one.listen_unix(str(path))
        with pytest.raises(HostError, match="already"):
            await two.listen_unix(str(path))
        await two.close()
        assert path.exists()
        client = Client(*await asyncio.open_unix_connection(str(path)))
        assert (await client.ask(get("/"))).status == 200
        client.close()
        await one.close()

    run(main)


def test_what_is_not_a_socket_is_never_removed(tmp_path: Path) -> None:
    async def main() -> None:
        victim = tmp_path / "victim"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(victim))
        file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
        file.write_text("x")
        link.symlink_to(victim)
        folder.mkdir()
        server = Server(echo)
        for path in (file, link, folder):
            with pytest.raises(HostError, match="not a socket"):
                await server.listen_unix(str(path))
        assert file.read_text() == "x"
        assert link.is_symlink()
        assert victim.exists()
        await server.close()

    run(main)


def test_a_socket_that_took_our_place_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s.sock"
        server = Server(echo)
        await server.listen_unix(str(path))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
        await server.close()
        assert path.exists()

    run(main)


def test_errors_of_listening_are_said_in_words(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server(echo)
        _, port = await server.listen_tcp("127.0.0.1", 0)
        with pytest.raises(HostError, match="in use"):
            await server.listen_tcp("127.0.0.1", port)
        with pytest.raises(HostError, match="too long"):
            await server.listen_unix(str(tmp_path / ("x" * 108)))
        with pytest.raises(HostError, match="cannot listen"):
            await server.listen_unix(str(tmp_path / "missing" / "s"))
        await server.close()

    run(main)


def test_a_socket_of_somebody_else_is_adopted() -> None:
    async def main() -> None:
        server = Server(echo)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await server.adopt(listener)
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        assert (await client.ask(get("/"))).status == 200
        client.close()
        await server.close()

    run(main)


def test_ipv6_is_served_and_not_ipv4_with_it() -> None:
    async def main() -> None:
        server = Server(echo)
        try:
            _, port = await server.listen_tcp("::1", 0)
        except HostError:
            pytest.skip("no IPv6 here")
        client = Client(*await asyncio.open_connection("::1", port))
        assert (await client.ask(get("/"))).status == 200
        client.close()
        with pytest.raises(OSError, match=r".+"):
            await asyncio.open_connection("127.0.0.1", port)
        await server.close()

    run(main)
