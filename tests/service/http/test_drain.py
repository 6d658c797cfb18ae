"""An orderly end: nothing new, what runs may finish, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent_sandbox.service.http import frames
from agent_sandbox.service.http.messages import (
    Request,
    Response,
    WebSocket,
    WebSocketResponse,
    json_response,
)
from agent_sandbox.service.http.server import Limits

from .lab import echo, get, run, serving, until

UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def test_what_runs_is_finished_and_nothing_new_begins() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(request: Request) -> Response:
            await go.wait()
            return json_response(200, request.path)

        async with serving(handler) as lab:
            idle, busy = await lab.client(), await lab.client()
            # Two requests at once: the first runs, the second has not begun.
            busy.send(get("/first") + get("/second"))
            await until(lambda: len(lab.server.running) == 1)
            drain = asyncio.create_task(lab.server.drain(10))
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await lab.client()
            assert not drain.done()
            go.set()
            answer = await busy.answer()
            assert answer.body == b'"/first"'
            assert answer.headers["connection"] == "close"
            assert await busy.rest() == b""
            assert await drain is True
            assert lab.server.connections == 0

    run(main)


def test_a_stream_is_finished() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            await go.wait()
            yield b"two"

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            _, headers = await client.head()
            drain = asyncio.create_task(lab.server.drain(10))
            await asyncio.sleep(0.05)
            go.set()
            assert await client._body(200, headers) == b"onetwo"
            assert await client.rest() == b""
            assert await drain is True

    run(main)


def test_what_does_not_finish_is_ended() -> None:
    async def main() -> None:
        cancelled = []

        async def handler(_: Request) -> Response:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(True)
            raise AssertionError

        async with serving(handler) as lab:
            stays, goes = await lab.client(), await lab.client()
            for client in (stays, goes):
                client.send(get("/"))
            await until(lambda: len(lab.server.running) == 2)
            # A handler whose client has gone runs all the same.
            goes.writer.transport.abort()
            assert await lab.server.drain(0.1) is False
            await lab.server.close()
            assert cancelled == [True, True]
            assert await stays.rest() == b""
            assert lab.server.connections == 0

    run(main)


def test_a_websocket_is_told_that_the_server_goes_away() -> None:
    async def main() -> None:
        async def serve(ws: WebSocket) -> None:
            while await ws.receive() is not None:
                pass

        async def handler(_: Request) -> WebSocketResponse:
            return WebSocketResponse(serve)

        async with serving(handler, Limits(close_seconds=0.2)) as lab:
            client = await lab.client()
            client.send(get("/", UPGRADE))
            await client.head()
            assert await lab.server.drain(0.05) is False
            await lab.server.close()
            (message,) = frames.Reader(masked=False, limit=1000).feed(await client.rest())
            assert message[0] == frames.CLOSE
            assert isinstance(message[1], bytes)
            assert frames.read_close(message[1])[0] == 1001

    run(main)


def test_closing_twice_is_closing_once() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            await lab.ask(get("/"))
            await lab.server.close()
            await lab.server.close()

    run(main)


def test_an_idle_server_is_drained_at_once() -> None:
    async def main() -> None:
        async with serving(echo) as lab:
            assert await lab.server.drain(10) is True

    run(main)
