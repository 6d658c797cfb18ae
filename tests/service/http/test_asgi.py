"""ASGI applications behind our server: streaming both ways, errors, the client's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route

from agent_sandbox.service.http import asgi
from agent_sandbox.service.http.asgi import serve_asgi
from agent_sandbox.service.http.messages import Request, Response

from .lab import Client, get, run, serving, until

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
POST = b"POST /p?q=1 HTTP/1.1\r\nHost: x\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


def bridge(app: App, **options: Any) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        return await serve_asgi(app, request, **options)

    return handler


def reset(client: Client) -> None:
    client.writer.transport.abort()


def test_an_application_sees_the_request() -> None:
    async def main() -> None:
        async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            body = b""
            while True:
                message = await receive()
                body += message["body"]
                if not message["more_body"]:
                    break
            seen = {
                key: scope[key]
                for key in (
                    "type",
                    "method",
                    "path",
                    "root_path",
                    "scheme",
                    "state",
                    "http_version",
                )
            }
            seen["query"] = scope["query_string"].decode()
            seen["raw"] = scope["raw_path"].decode()
            seen["x"] = dict(scope["headers"])[b"x-a"].decode()
            seen["body"] = body.decode()
            data = json.dumps(seen).encode()
            headers = [(b"content-length", str(len(data)).encode()), (b"X-Out", b"1")]
            await send({**START, "status": 201, "headers": headers})
            await send({"type": "http.response.body", "body": data})

        async with serving(bridge(app, root_path="/mcp", state={"a": 1})) as lab:
            client = await lab.client()
            for framing in (
                b"Content-Length: 3\r\n\r\nabc",
                b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            ):
                answer = await client.ask(POST.replace(b"/p", b"/a%20b") + b"X-A: y\r\n" + framing)
                assert answer.status == 201
                assert answer.headers["x-out"] == "1"
                assert json.loads(answer.body) == {
                    "type": "http", "method": "POST", "path": "/a b", "raw": "/a%20b",
                    "query": "q=1", "root_path": "/mcp", "scheme": "http", "state": {"a": 1},
                    "x": "y", "body": "abc", "http_version": "1.1",
                }  # fmt: skip

    run(main)


def test_a_stream_is_told_of_at_once_and_waits_for_its_reader() -> None:
    async def main() -> None:
        go = asyncio.Event()
        sent = 0

        async def app(_: MutableMapping[str, Any], __: Receive, send: Send) -> None:
            nonlocal sent
            await send(START)
            await go.wait()
            for _number in range(2000):
                await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
                sent += 1
            await send({"type": "http.response.body", "body": b"end"})

        async with serving(bridge(app)) as lab:
            client = await lab.client()
            client.send(get("/"))
            _, headers = await client.head()
            assert headers["transfer-encoding"] == "chunked"
            go.set()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.3)
            assert sent < 2000
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            body = await client._body(200, headers)
            assert len(body) == 20_000_003

    run(main)


def test_the_end_of_the_client_is_told_and_then_insisted_on() -> None:
    async def main() -> None:
        told = asyncio.Event()
        cancelled = asyncio.Event()

        async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            await receive()
            await send(START)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            told.set()
            await send({"type": "http.response.body", "body": b"y", "more_body": True})
            if scope["path"] == "/stubborn":
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()

        async with serving(bridge(app)) as lab:
            for path, event in (("/", told), ("/stubborn", cancelled)):
                told.clear()
                client = await lab.client()
                client.send(get(path))
                await client.head()
                reset(client)
                async with asyncio.timeout(asgi.LEAVE_SECONDS + 3):
                    await told.wait()
                    await event.wait()
            await until(lambda: not asgi._RUNNING)
            assert lab.errors == []

    run(main)


def test_a_client_that_goes_before_the_head_is_told_of_too() -> None:
    async def main() -> None:
        told = asyncio.Event()

        async def app(_: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            await receive()
            assert (await receive())["type"] == "http.disconnect"
            told.set()
            await send(START)
            await send({"type": "http.response.body", "body": b"late"})

        async with serving(bridge(app)) as lab:
            client = await lab.client()
            client.send(get("/"))
            await until(lambda: bool(lab.server.running))
            reset(client)
            async with asyncio.timeout(3):
                await told.wait()
            await until(lambda: not asgi._RUNNING and not lab.server.running)

    run(main)


@pytest.mark.parametrize("when", ["before", "after", "never", "twice", "unknown"])
def test_an_application_that_fails(when: str) -> None:
    async def main() -> None:
        async def app(_: MutableMapping[str, Any], __: Receive, send: Send) -> None:
            if when == "before":
                raise RuntimeError("secret")
            if when == "unknown":
                await send({"type": "http.nonsense"})
            if when in ("after", "twice"):
                await send(START)
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.05)
                if when == "twice":
                    await send(START)
                raise RuntimeError("secret")

        async with serving(bridge(app)) as lab:
            client = await lab.client()
            client.send(get("/"))
            status, headers = await client.head()
            if when in ("after", "twice"):
                assert status == 200
                assert not (await client.rest()).endswith(b"0\r\n\r\n")
            else:
                assert status == 500
                assert b"secret" not in await client.reader.readexactly(
                    int(headers["content-length"])
                )
            assert len(lab.errors) == 1

    run(main)


def test_a_body_that_is_too_large_for_an_application() -> None:
    async def main() -> None:
        async def app(_: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            while (await receive())["more_body"]:
                pass
            await send(START)
            await send({"type": "http.response.body", "body": b""})

        async with serving(bridge(app, limit=10)) as lab:
            for framing in (
                b"Content-Length: 11\r\n\r\n",
                b"Transfer-Encoding: chunked\r\n\r\nb\r\n",
            ):
                assert (await lab.ask(POST + framing + b"x" * 11)).status == 413
            assert lab.errors == []

    run(main)


def test_an_application_cannot_split_an_answer() -> None:
    async def main() -> None:
        async def app(_: MutableMapping[str, Any], __: Receive, send: Send) -> None:
            await send({**START, "headers": [(b"x-a", b"b\r\nset-cookie: c=d")]})
            await send({"type": "http.response.body", "body": b"x"})

        async with serving(bridge(app)) as lab:
            answer = await lab.ask(get("/"))
            assert answer.status == 500
            assert "set-cookie" not in answer.headers

    run(main)


def test_starlette_works() -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def hello(request: StarletteRequest) -> StarletteResponse:
            body = await request.body()
            return JSONResponse({"q": request.query_params["q"], "n": len(body)})

        async def background(_: StarletteRequest) -> StarletteResponse:
            async def work() -> None:
                await asyncio.sleep(0.05)
                done.set()

            return PlainTextResponse("soon", background=BackgroundTask(work))

        async def stream(_: StarletteRequest) -> StarletteResponse:
            async def pieces() -> AsyncIterator[str]:
                for number in range(3):
                    yield f"data: {number}\n\n"

            return StreamingResponse(pieces(), media_type="text/event-stream")

        app = Starlette(routes=[
            Route("/p", hello, methods=["POST"]),
            Route("/background", background),
            Route("/stream", stream),
        ])  # fmt: skip
        async with serving(bridge(app)) as lab:
            client = await lab.client()
            answer = await client.ask(POST + b"Content-Length: 100000\r\n\r\n" + bytes(100_000))
            assert json.loads(answer.body) == {"q": "1", "n": 100_000}
            assert (await client.ask(get("/background"))).body == b"soon"
            async with asyncio.timeout(5):
                await done.wait()
            answer = await client.ask(get("/stream"))
            assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
            assert (await client.ask(get("/missing"))).status == 404
            assert lab.errors == []

    run(main)
