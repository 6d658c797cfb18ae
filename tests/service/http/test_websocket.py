"""WebSockets: with a client that is not ours, and with one that keeps no rule."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agent_sandbox.service.http import frames
from agent_sandbox.service.http.messages import (
    Request,
    Response,
    WebSocket,
    WebSocketClosed,
    WebSocketResponse,
)
from agent_sandbox.service.http.server import Limits
from agent_sandbox.service.problems import Problem

from .lab import Client, Lab, get, run, serving, until

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
FIELDS = {
    "Connection": "Upgrade", "Upgrade": "websocket",
    "Sec-WebSocket-Key": KEY, "Sec-WebSocket-Version": "13",
}  # fmt: skip
MASK = b"\x0f\xf0\x55\xaa"
Serve = Callable[[WebSocket], Awaitable[None]]


def request(**changes: str) -> bytes:
    fields = {**FIELDS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return get("/", b"".join(f"{n}: {v}\r\n".encode() for n, v in fields.items() if v))


def frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    return frames.encode(opcode, payload, mask=MASK, final=final)


def handler(serve: Serve, protocol: str = "") -> Callable[[Request], Awaitable[WebSocketResponse]]:
    async def handle(_: Request) -> WebSocketResponse:
        return WebSocketResponse(serve, protocol)

    return handle


async def echo(ws: WebSocket) -> None:
    while (message := await ws.receive()) is not None:
        await ws.send(message)


class Raw:
    """A client that says what the test says."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.reader = frames.Reader(masked=False, limit=2**24)
        self.waiting: list[frames.Message] = []

    def send(self, data: bytes) -> None:
        self.client.send(data)

    async def next(self) -> frames.Message | None:
        """The next frame; None at the end."""
        async with asyncio.timeout(10):
            while not self.waiting:
                try:
                    data = await self.client.reader.read(2**16)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self.waiting += self.reader.feed(data)
        return self.waiting.pop(0)

    async def closed(self) -> tuple[int, str]:
        """What the close frame says that comes next; and that it is the last."""
        message = await self.next()
        assert message is not None
        assert message[0] == frames.CLOSE
        assert isinstance(message[1], bytes)
        assert await self.next() is None
        return frames.read_close(message[1])


async def raw(lab: Lab) -> Raw:
    client = await lab.client()
    client.send(request())
    status, headers = await client.head()
    assert status == 101
    assert headers["sec-websocket-accept"] == frames.accept_key(KEY)
    return Raw(client)


def url(lab: Lab) -> str:
    return f"ws://127.0.0.1:{lab.port}/"


# --- a client that is not ours


@pytest.mark.parametrize("message", ["", "grüße", "x" * 100_000, b"", bytes(1_000_000)])
def test_messages_go_there_and_back(message: str | bytes) -> None:
    async def main() -> None:
        async with serving(handler(echo)) as lab, connect(url(lab), max_size=None) as client:
            for _ in range(3):
                await client.send(message)
                assert await client.recv() == message

    run(main)


def test_a_message_in_parts_and_pings() -> None:
    async def main() -> None:
        async with serving(handler(echo)) as lab, connect(url(lab)) as client:
            await client.send(["gr", "ü", "ße"])
            assert await client.recv() == "grüße"
            async with asyncio.timeout(5):
                await (await client.ping(b"are you there"))

    run(main)


def test_a_protocol_that_the_client_offers_is_agreed_on() -> None:
    async def main() -> None:
        async with serving(handler(echo, "tty")) as lab:
            async with connect(url(lab), subprotocols=["other", "tty"]) as client:  # type: ignore[list-item]
                assert client.subprotocol == "tty"
            with pytest.raises(InvalidStatus) as found:
                await connect(url(lab), subprotocols=["other"])  # type: ignore[list-item]
            assert found.value.response.status_code == 500
            assert len(lab.errors) == 1

    run(main)


def test_either_side_may_close() -> None:
    async def main() -> None:
        seen: list[tuple[int | None, str]] = []

        async def serve(ws: WebSocket) -> None:
            while (message := await ws.receive()) is not None:
                if message == "close":
                    await ws.close(4321, "as you wish")
                    with pytest.raises(WebSocketClosed):
                        await ws.send("late")
            seen.append((ws.code, ws.reason))

        async with serving(handler(serve)) as lab:
            async with connect(url(lab)) as client:
                await client.send("close")
                with pytest.raises(ConnectionClosed) as found:
                    await client.recv()
                assert found.value.rcvd is not None
                assert (found.value.rcvd.code, found.value.rcvd.reason) == (4321, "as you wish")
            client = await connect(url(lab))
            await client.close(4000, "bye")
            assert client.close_code == 4000
            await until(lambda: len(seen) == 2)
            assert seen[1] == (4000, "bye")
            await until(lambda: lab.server.connections == 0)

    run(main)


async def fails(client: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as found:
        await client.recv()
    assert found.value.rcvd is not None
    return found.value.rcvd.code, found.value.rcvd.reason


def test_how_a_handler_ends_is_told() -> None:
    async def main() -> None:
        async def serve(ws: WebSocket) -> None:
            what = await ws.receive()
            if what == "problem":
                raise Problem("WRONG_STATE", "it has ended")
            if what == "error":
                raise RuntimeError("secret")

        async with serving(handler(serve)) as lab:
            for what, expected in (
                ("return", (1000, "")), ("problem", (1008, "it has ended")), ("error", (1011, "")),
            ):  # fmt: skip
                async with connect(url(lab)) as client:
                    await client.send(what)
                    assert await fails(client) == expected
            assert [str(error) for error in lab.errors] == ["secret"]

    run(main)


# --- the handshake


@pytest.mark.parametrize(
    "changes",
    [
        {"Upgrade": "h2c"}, {"Upgrade": ""}, {"Connection": "close"}, {"Connection": ""},
        {"Sec-WebSocket-Version": "8"}, {"Sec-WebSocket-Version": ""}, {"Sec-WebSocket-Key": ""},
        {"Sec-WebSocket-Key": "short"}, {"Sec-WebSocket-Key": "!" * 24},
        {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAAAA"}, {"Content-Length": "3"},
    ],
)  # fmt: skip
def test_a_handshake_that_is_not_right_gets_words(changes: dict[str, str]) -> None:
    async def main() -> None:
        async with serving(handler(echo)) as lab:
            answer = await lab.ask(request(**changes))
            assert (answer.status, answer.code) == (426, "UPGRADE_REQUIRED")

    run(main)


def test_only_get_can_become_a_websocket() -> None:
    async def main() -> None:
        async with serving(handler(echo)) as lab:
            for data in (request().replace(b"GET", b"POST"), request().replace(b"1.1", b"1.0")):
                assert (await lab.ask(data)).status == 426

    run(main)


def test_frames_right_behind_the_handshake_are_read() -> None:
    async def main() -> None:
        async with serving(handler(echo)) as lab:
            client = await lab.client()
            client.send(request() + frame(frames.TEXT, b"early"))
            await client.head()
            assert await Raw(client).next() == (frames.TEXT, "early")

    run(main)


def test_nothing_is_http_behind_the_handshake() -> None:
    async def main() -> None:
        paths = []

        async def handle(request: Request) -> Response | WebSocketResponse:
            paths.append(request.path)
            return WebSocketResponse(echo)

        async with serving(handle) as lab:
            client = await raw(lab)
            client.send(get("/hidden"))
            assert (await client.closed())[0] == 1002
            assert paths == ["/"]

    run(main)


# --- abuse


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frames.encode(frames.TEXT, b"not masked"), 1002),
        (frame(frames.TEXT, b"\xff\xfe"), 1007),
        (frame(frames.CONTINUATION, b"x"), 1002),
        (b"\xf1\x80" + MASK, 1002),
        (b"\x83\x80" + MASK, 1002),
        (b"\x89\xfe\x00\x7e", 1002),
        (b"\x82\xff\x00\x00\x00\xff\xff\xff\xff\xff", 1009),
        (frame(frames.CLOSE, b"\x03"), 1002),
        (frame(frames.CLOSE, b"\x03\xed"), 1002),
        (frame(frames.CLOSE, b"\x03\xe8\xff"), 1007),
    ],
)
def test_who_breaks_the_rules_is_told_and_cut_off(data: bytes, code: int) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(ws: WebSocket) -> None:
            await echo(ws)
            ended.set()

        async with serving(handler(serve)) as lab:
            client = await raw(lab)
            client.send(frame(frames.TEXT, b"good"))
            assert await client.next() == (frames.TEXT, "good")
            client.send(data + frame(frames.TEXT, b"more"))
            assert (await client.closed())[0] == code
            async with asyncio.timeout(5):
                await ended.wait()
            await until(lambda: lab.server.connections == 0)
            assert lab.errors == []

    run(main)


@pytest.mark.parametrize("parts", [1, 10])
def test_a_message_that_is_too_large_is_refused(parts: int) -> None:
    async def main() -> None:
        async with serving(handler(echo), Limits(message_bytes=1000)) as lab:
            client = await raw(lab)
            size = 1000 // parts
            for part in range(parts):
                kind = frames.CONTINUATION if part else frames.BINARY
                client.send(frame(kind, bytes(size), final=part == parts - 1))
            assert await client.next() == (frames.BINARY, bytes(1000))
            client.send(frame(frames.BINARY, bytes(size), final=False))
            for _ in range(parts):
                client.send(frame(frames.CONTINUATION, bytes(size), final=False))
            assert (await client.closed())[0] == 1009

    run(main)


@pytest.mark.parametrize(
    ("limits", "size"),
    [(Limits(messages_held=10), 1), (Limits(messages_held_bytes=10_000), 5_000)],
    ids=["many", "large"],
)
def test_what_a_handler_does_not_receive_does_not_fill_the_memory(
    limits: Limits, size: int
) -> None:
    async def main() -> None:
        go = asyncio.Event()
        got = 0
        held: list[int] = []

        async def serve(ws: WebSocket) -> None:
            nonlocal got
            await go.wait()
            held.append(len(ws._queue))
            while await ws.receive() is not None:
                got += 1

        async with serving(handler(serve), limits) as lab:
            client = await raw(lab)
            batch = frame(frames.BINARY, bytes(size)) * (200_000 // (size + 6))
            sent = 0

            async def pour() -> None:
                nonlocal sent
                while True:
                    client.send(batch)
                    sent += 200_000 // (size + 6)
                    await client.client.writer.drain()

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pour(), 1)
            go.set()
            await until(lambda: bool(held))
            assert held == [10 if size == 1 else 2]
            # And nothing was lost.
            await until(lambda: got > 50 * held[0])
            assert sent >= got

    run(main)


def test_a_flood_of_pings_from_a_client_that_never_reads_is_not_kept() -> None:
    async def main() -> None:
        sockets: list[WebSocket] = []

        async def serve(ws: WebSocket) -> None:
            sockets.append(ws)
            await ws.receive()

        async with serving(handler(serve), Limits(send_held_bytes=20_000, send_seconds=1)) as lab:
            lab.server._listeners[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", lab.port))
            await loop.sock_sendall(sock, request())
            ping = frame(frames.PING, bytes(125)) * 100
            most = 0
            began = time.monotonic()

            async def pour() -> None:
                nonlocal most
                while True:
                    await loop.sock_sendall(sock, ping)
                    for connection in lab.server._connections:
                        if connection.transport is not None:
                            most = max(most, connection.transport.get_write_buffer_size())
                    await asyncio.sleep(0)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pour(), 8)
            assert 0 < most < 25_000
            assert time.monotonic() - began < 5
            await until(lambda: lab.server.connections == 0)
            sock.close()

    run(main)


def test_a_client_that_never_reads_holds_up_the_sender() -> None:
    async def main() -> None:
        sent = 0
        ended = asyncio.Event()

        async def serve(ws: WebSocket) -> None:
            nonlocal sent
            try:
                while True:
                    await ws.send(bytes(10_000))
                    sent += 1
            finally:
                ended.set()

        async with serving(handler(serve), Limits(send_held_bytes=50_000, send_seconds=0.5)) as lab:
            client = await lab.client(limit=1)
            client.send(request())
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(8):
                await ended.wait()
            assert sent * 10_000 < 10_000_000
            await until(lambda: lab.server.connections == 0)
            assert lab.errors == []

    run(main)


def test_a_client_that_does_not_answer_the_close_is_cut_off() -> None:
    async def main() -> None:
        async def serve(ws: WebSocket) -> None:
            await ws.close(1000, "enough")

        async with serving(handler(serve), Limits(close_seconds=0.2)) as lab:
            client = await raw(lab)
            assert await client.next() == (frames.CLOSE, b"\x03\xe8enough")
            client.send(frame(frames.TEXT, b"no, wait"))
            assert await client.next() is None
            await until(lambda: lab.server.connections == 0)

    run(main)


def test_a_silent_client_is_asked_and_then_cut_off() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(ws: WebSocket) -> None:
            assert await ws.receive() is None
            assert ws.code == 1006
            ended.set()

        async with serving(handler(serve), Limits(ping_seconds=0.1)) as lab:
            client = await raw(lab)
            for _ in range(3):
                assert await client.next() == (frames.PING, b"")
                client.send(frame(frames.PONG))
            assert await client.next() == (frames.PING, b"")
            assert await client.next() is None
            async with asyncio.timeout(5):
                await ended.wait()
            assert lab.errors == []

    run(main)


def test_an_answering_client_may_be_silent_for_long() -> None:
    """The control, with a client that is not ours."""

    async def main() -> None:
        async with (
            serving(handler(echo), Limits(ping_seconds=0.05)) as lab,
            connect(url(lab), ping_interval=None) as client,
        ):
            await asyncio.sleep(0.5)
            await client.send("x")
            assert await client.recv() == "x"

    run(main)


@pytest.mark.parametrize("kind", ["reset", "close", "half closed"])
def test_a_client_that_goes_away_ends_the_conversation(kind: str) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(ws: WebSocket) -> None:
            assert await ws.receive() is None
            assert ws.code == 1006
            ended.set()

        async with serving(handler(serve)) as lab:
            client = await raw(lab)
            if kind == "half closed":
                client.client.writer.write_eof()
            else:
                client.client.writer.transport.abort()
            async with asyncio.timeout(1):
                await ended.wait()
            await until(lambda: lab.server.connections == 0)

    run(main)


class Wire:
    """A connection that only counts."""

    def __init__(self) -> None:
        self.written = 0
        self.paused = False

    def write(self, data: bytes) -> None:
        self.written += bool(data)

    def is_stuck(self) -> bool:
        return False

    async def drained(self) -> None:
        raise AssertionError

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def hang_up(self) -> None:
        raise AssertionError

    def abort(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", ["pings", "parts", "messages"])
def test_a_flood_is_read_in_portions(kind: str) -> None:
    """Between two portions, everybody else has a turn; nothing new is read until all is done."""

    async def main() -> None:
        wire = Wire()
        ws = WebSocket(wire)
        begin = frame(frames.TEXT, b"", final=False)
        data = {
            "pings": frame(frames.PING) * 5000,
            "parts": begin + frame(frames.CONTINUATION, b"x", final=False) * 5000,
            "messages": frame(frames.TEXT, b"x") * 5000,
        }[kind]
        ws.feed(data)
        left = len(ws._reader._data)
        assert len(data) * 0.9 < left < len(data)
        turns = 0
        while len(ws._reader._data):
            assert wire.paused
            turns += 1
            await asyncio.sleep(0)
            if kind == "messages":
                while ws._queue:
                    await ws.receive()
        assert 15 < turns < 100
        assert wire.written == (5000 if kind == "pings" else 0)
        assert not wire.paused

    run(main)


def test_many_tiny_messages_do_not_stop_others() -> None:
    async def main() -> None:
        async def handle(request: Request) -> Response | WebSocketResponse:
            return Response(status=200) if request.path == "/quick" else WebSocketResponse(echo)

        async with serving(handle) as lab:
            client = await raw(lab)
            flood = frame(frames.TEXT, b"x") * 1000

            async def pour() -> None:
                while True:
                    client.send(flood)
                    await client.client.writer.drain()
                    await client.client.reader.read(2**16)

            task = asyncio.create_task(pour())
            for _ in range(20):
                began = time.monotonic()
                assert (await lab.ask(get("/quick"))).status == 200
                assert time.monotonic() - began < 1
            task.cancel()
            await asyncio.wait((task,))

    run(main)
