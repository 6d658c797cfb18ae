"""Connections through the API server's exec, before one that says what a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_exec
from agent_sandbox.service.backend.kube_exec import PROTOCOL, Bridges
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.http import frames
from agent_sandbox.service.problems import Problem

from .fake import Answer, Asked, Fake, status

EXEC = "/api/v1/namespaces/default/pods/p/exec"
SECONDS = 10


class Server:
    """One accepted WebSocket."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.transport: Any = writer.transport

    async def send(self, opcode: int, data: bytes) -> None:
        self._writer.write(frames.encode(opcode, data))
        await self._writer.drain()

    async def out(self, data: bytes) -> None:
        await self.send(frames.BINARY, b"\1" + data)


def accepts(story: Callable[[Server], Coroutine[Any, Any, None]], **wrong: str) -> Answer:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        headers = {
            "Connection": "Upgrade", "Upgrade": "websocket",
            "Sec-WebSocket-Accept": frames.accept_key(asked.headers["sec-websocket-key"]),
            "Sec-WebSocket-Protocol": PROTOCOL,
            **{name.replace("_", "-"): value for name, value in wrong.items()},
        }  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{lines}\r\n".encode())
        await story(Server(writer))
        return False

    return answer


async def nothing(_server: Server) -> None:
    """Say nothing, and stay."""
    await asyncio.Event().wait()


def play(fake: Fake, story: Callable[[socket.socket], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(SECONDS), fake.serving() as api:
            bridges = Bridges(api)
            try:
                sock = await bridges.open("p", "agent", ("connect", "a b"))
                with sock:
                    return await story(sock)
            finally:
                await bridges.close()

    return asyncio.run(main())


async def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or all until the end."""
    data = b""
    loop = asyncio.get_running_loop()
    while len(data) < size and (piece := await loop.sock_recv(sock, 1 << 16)):
        data += piece
    return data


def test_a_command_is_asked_for_word_by_word_and_with_its_own_protocol() -> None:
    fake = Fake()
    fake.on("GET", EXEC, accepts(lambda server: server.out(b"hello")))
    assert play(fake, lambda sock: receive(sock, 5)) == b"hello"
    (asked,) = fake.seen
    assert asked.headers["sec-websocket-protocol"] == PROTOCOL
    assert asked.headers["authorization"] == "Bearer secret"
    # A terminal would change bytes, and standard error would be mixed in.
    assert (asked.query["tty"], asked.query["stderr"]) == ("false", "false")
    assert asked.query["container"] == "agent"


def test_bytes_pass_as_they_are_and_nothing_else_does() -> None:
    data = bytes(range(256)) * 400

    async def story(server: Server) -> None:
        # Channels are opened with empty messages; standard error is not ours.
        for opening in (b"\1", b"\2", b"\3"):
            await server.send(frames.BINARY, opening)
        await server.send(frames.BINARY, b"\2noise")
        await server.send(frames.PING, b"alive?")
        await server.out(data)
        await asyncio.Event().wait()

    fake = Fake()
    fake.on("GET", EXEC, accepts(story))
    assert play(fake, lambda sock: receive(sock, len(data))) == data


ENDS: dict[str, Callable[[Server], Coroutine[Any, Any, None]]] = {
    "it says that the process has ended": lambda s: s.send(
        frames.BINARY, b'\3{"status": "Success"}'
    ),
    "it closes": lambda s: s.send(frames.CLOSE, frames.close_payload(1000)),
    "it goes away": lambda _: asyncio.sleep(0),
    "it masks, as only a client does": lambda s: _raw(s, b"\x82\x81\0\0\0\0\1"),
    "it sends reserved bits": lambda s: _raw(s, b"\xf2\x01\1"),
    "it sends too much at once": lambda s: _raw(
        s, b"\x82\x7f" + (kube_exec.MOST_MESSAGE + 1).to_bytes(8, "big")
    ),
    "it is cut off in a frame": lambda s: _raw(s, b"\x82\x05\1ab"),
}


async def _raw(server: Server, data: bytes) -> None:
    server.transport.write(data)
    await asyncio.sleep(0)


@pytest.mark.parametrize("name", ENDS)
def test_whatever_ends_it_ends_our_side(name: str) -> None:
    fake = Fake()
    fake.on("GET", EXEC, accepts(ENDS[name]))
    assert play(fake, lambda sock: receive(sock, 1)) == b""


def test_our_end_ends_the_other_side() -> None:
    closed = asyncio.Event()

    async def story(server: Server) -> None:
        try:
            while True:
                await server.out(b"still there?")
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def leave(sock: socket.socket) -> None:
        sock.close()
        await closed.wait()

    fake = Fake()
    fake.on("GET", EXEC, accepts(story))
    play(fake, leave)


REFUSED: dict[str, Answer] = {
    "another protocol": accepts(nothing, Sec_WebSocket_Protocol="v5.channel.k8s.io"),
    "no proof": accepts(nothing, Sec_WebSocket_Accept="x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_proves_nothing_is_refused(name: str) -> None:
    fake = Fake()
    fake.on("GET", EXEC, REFUSED[name])
    with pytest.raises(Problem, match="another protocol"):
        play(fake, lambda sock: receive(sock, 1))


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b""])
def test_an_answer_that_is_none_is_a_problem_like_any_other(answer: bytes) -> None:
    async def garbage(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        await writer.drain()
        return False

    fake = Fake()
    fake.on("GET", EXEC, garbage)
    with pytest.raises(Problem, match="the cluster is not usable"):
        play(fake, lambda sock: receive(sock, 1))


def test_a_refusal_is_told() -> None:
    fake = Fake()
    fake.on("GET", EXEC, status(403, "Forbidden", "pods/exec"))
    with pytest.raises(Refusal, match="pods/exec"):
        play(fake, lambda sock: receive(sock, 1))


def test_what_is_not_read_is_not_taken_from_the_pod() -> None:
    """A reader that is slow makes the pod wait, and not the service's memory grow."""
    sent = 0

    async def story(server: Server) -> None:
        nonlocal sent
        while True:
            await server.out(b"x" * (256 << 10))
            sent += 256 << 10

    async def idle(_sock: socket.socket) -> None:
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.3)

    fake = Fake()
    fake.on("GET", EXEC, accepts(story))
    play(fake, idle)
    assert 0 < sent < 64 << 20
