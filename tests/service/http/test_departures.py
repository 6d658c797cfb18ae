"""A client that goes away is noticed at once, whatever its request is doing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent_sandbox.service.http.messages import Request, Response, json_response
from agent_sandbox.service.http.server import Limits

from .lab import Client, Lab, get, run, serving, tls_contexts, until

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"
# Of a body that nobody reads: more than is held, so that the connection is not even read from.
FULL = POST + b"Content-Length: 5000000\r\n\r\n" + bytes(1_000_000)
PART = POST + b"Content-Length: 5000000\r\n\r\n" + bytes(1000)
CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PIPELINED = get("/") + get("/next") * 3000


def close(client: Client) -> None:
    client.writer.transport.abort()


def reset(client: Client) -> None:
    """With SO_LINGER 0 the kernel sends a reset."""
    sock = client.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def half_close(client: Client) -> None:
    client.writer.write_eof()


WAYS: list[Callable[[Client], None]] = [close, reset, half_close]


class Busy:
    """A handler that does not read and does not return."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.heard = asyncio.Event()
        self.finish = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.started.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(8):
                await request.disconnected.wait()
                self.heard.set()
        await self.finish.wait()
        return json_response(200, None)


async def leave(
    busy: Busy, lab: Lab, client: Client, data: bytes, way: Callable[[Client], None]
) -> None:
    client.send(data)
    async with asyncio.timeout(5):
        await busy.started.wait()
    # Let everything arrive that will.
    await asyncio.sleep(0.1)
    assert not busy.heard.is_set()
    began = time.monotonic()
    way(client)
    async with asyncio.timeout(5):
        await busy.heard.wait()
    assert time.monotonic() - began < 1
    # The handler is not cancelled: what it has begun, it ends.
    assert len(lab.server.running) == 1
    busy.finish.set()
    await until(lambda: not lab.server.running)
    await until(lambda: lab.server.connections == 0)
    assert lab.errors == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "data",
    [get("/"), PART, FULL, CHUNKS, PIPELINED],
    ids=["get", "part", "full", "chunks", "pipelined"],
)
def test_a_busy_handler_hears_that_its_client_has_gone(
    data: bytes, way: Callable[[Client], None]
) -> None:
    async def main() -> None:
        busy = Busy()
        async with serving(busy, Limits(linger_seconds=0.2)) as lab:
            client = await lab.client()
            if data is FULL and way is half_close:
                # A client with unsent data sends its end behind them: it has not gone.
                client.writer.transport.set_write_buffer_limits(2**21)
                sock = client.writer.get_extra_info("socket")
                await leave(busy, lab, client, data, lambda _: sock.shutdown(socket.SHUT_WR))
            else:
                await leave(busy, lab, client, data, way)

    run(main)


@pytest.mark.parametrize(
    ("data", "way"), [(get("/"), close), (get("/"), half_close), (FULL, close)],
    ids=["get", "get, half closed", "full"],
)  # fmt: skip
def test_also_at_a_unix_socket(tmp_path: Path, data: bytes, way: Callable[[Client], None]) -> None:
    async def main() -> None:
        path = str(tmp_path / "s")
        busy = Busy()
        async with serving(busy, Limits(linger_seconds=0.2)) as lab:
            await lab.server.listen_unix(path)
            await leave(busy, lab, await lab.unix(path), data, way)

    run(main)


@pytest.mark.parametrize("data", [get("/"), FULL], ids=["get", "full"])
def test_also_with_tls(tmp_path: Path, data: bytes) -> None:
    async def main() -> None:
        server, client_side = tls_contexts(tmp_path)
        busy = Busy()
        async with serving(busy, tls=server) as lab:
            await leave(busy, lab, await lab.client(client_side), data, close)

    run(main)


def test_a_client_that_stays_is_not_taken_for_gone() -> None:
    """The control."""

    async def main() -> None:
        busy = Busy()
        async with serving(busy) as lab:
            client = await lab.client()
            client.send(PART)
            await busy.started.wait()
            await asyncio.sleep(0.3)
            assert not busy.heard.is_set()
            close(client)
            await busy.heard.wait()
            busy.finish.set()

    run(main)


@pytest.mark.parametrize(("unix", "way"), [(False, reset), (True, close)], ids=["tcp", "unix"])
def test_a_quiet_stream_ends_with_its_client(
    tmp_path: Path, unix: bool, way: Callable[[Client], None]
) -> None:
    """Nothing is written, so no write can fail."""

    async def main() -> None:
        ended = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"x"
                await asyncio.sleep(60)
            finally:
                ended.set()

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            path = str(tmp_path / "s")
            await lab.server.listen_unix(path)
            client = await lab.unix(path) if unix else await lab.client()
            client.send(get("/"))
            await client.head()
            way(client)
            async with asyncio.timeout(1):
                await ended.wait()
            await until(lambda: lab.server.connections == 0)
            assert lab.errors == []

    run(main)


def test_a_lively_stream_ends_with_its_client() -> None:
    """An ordinary close looks like a half-closed connection, until something is written."""

    async def main() -> None:
        ended = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        async def handler(_: Request) -> Response:
            return Response(status=200, body=pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            await client.head()
            close(client)
            async with asyncio.timeout(1):
                await ended.wait()
            await until(lambda: lab.server.connections == 0)
            assert lab.errors == []

    run(main)


def test_a_stream_that_nobody_waits_for_is_closed() -> None:
    """The client went away while the handler was still at work."""

    async def main() -> None:
        closed = asyncio.Event()

        class Pieces:
            def __aiter__(self) -> AsyncIterator[bytes]:
                return self

            async def __anext__(self) -> bytes:
                return b"x"

            async def aclose(self) -> None:
                closed.set()

        async def handler(request: Request) -> Response:
            await request.disconnected.wait()
            await asyncio.sleep(0.05)
            return Response(status=200, body=Pieces())

        async with serving(handler) as lab:
            client = await lab.client()
            client.send(get("/"))
            await until(lambda: bool(lab.server.running))
            reset(client)
            async with asyncio.timeout(5):
                await closed.wait()

    run(main)


def test_a_client_that_closes_its_side_still_gets_its_answer() -> None:
    """`printf … | nc -N`."""

    async def main() -> None:
        async def handler(request: Request) -> Response:
            size = len(await request.body(10**7))
            await asyncio.sleep(0.05)
            return json_response(200, size)

        async with serving(handler) as lab:
            for size in (0, 10, 5_000_000):
                client = await lab.client()
                client.send(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
                client.writer.write_eof()
                answer = await client.answer()
                assert answer.body == str(size).encode()
                assert await client.rest() == b""

    run(main)


def test_the_reader_of_a_body_is_told_that_its_end_will_not_come() -> None:
    async def main() -> None:
        found: list[BaseException] = []

        async def handler(request: Request) -> Response:
            try:
                await request.body(10**7)
            except Exception as error:
                found.append(error)
                raise
            return json_response(200, None)

        async with serving(handler) as lab:
            for way in WAYS:
                client = await lab.client()
                client.send(PART)
                await until(lambda: bool(lab.server.running))
                way(client)
                await until(lambda: not lab.server.running)
            assert ["went away" in str(error) for error in found] == [True] * 3
            assert lab.errors == []

    run(main)


def test_descriptors_are_given_back() -> None:
    """A thousand clients in every state, and nothing is left of them."""

    async def main() -> None:
        busy = Busy()
        busy.finish.set()
        async with serving(busy, Limits(linger_seconds=0.1)) as lab:
            before = len(os.listdir("/proc/self/fd"))
            for number in range(300):
                client = await lab.client()
                client.send((b"GET /", get("/"), PART, FULL)[number % 4])
                await asyncio.sleep(0)
                (close, reset)[number % 2](client)
            await until(lambda: lab.server.connections == 0 and not lab.server.running)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
            assert lab.server.watch._watched == {}
            assert lab.server._counts == {}
            assert lab.server.waiting == {}

    run(main)
