"""A connection that is given up leaves nothing behind, whenever that happens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.pod import frames
from agent_sandbox.service.backend import pod_identity
from agent_sandbox.service.backend.pod_link import MOST_KEPT
from agent_sandbox.service.backend.pod_wire import Peer, connect

from .liar import Liar, Talk
from .test_lies import END, HELLO, document, start

SECONDS = 20.0


def test_a_connection_that_is_cancelled_after_its_handshake_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may be frozen: to wait for its goodbye would hold the socket for half a minute."""

    async def scene() -> int:
        made = asyncio.StreamReaderProtocol.connection_made
        tasks: list[asyncio.Task[Any]] = []

        def cancelled(self: Any, transport: Any) -> None:
            made(self, transport)
            if tasks and transport.get_extra_info("socket").getsockname() == own[0].getsockname():
                tasks[0].cancel()

        monkeypatch.setattr(asyncio.StreamReaderProtocol, "connection_made", cancelled)
        own: list[socket.socket] = []
        liar = Liar(tmp_path, pod_identity.make(), {})
        async with frozen(liar._context) as port:

            async def dial() -> socket.socket:
                sock = socket.socket()
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                own.append(sock)
                return sock

            peer = Peer(dial=dial, fingerprint=liar.fingerprint, identity=liar._identity)
            tasks.append(asyncio.create_task(connect(peer)))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            for _ in range(100):
                await asyncio.sleep(0.01)
                if own[0].fileno() < 0:
                    break
            return own[0].fileno()

    assert asyncio.run(asyncio.wait_for(scene(), SECONDS)) == -1


@contextlib.asynccontextmanager
async def frozen(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that shakes hands, and then does nothing more; its port."""
    held: list[Any] = []

    class Deaf(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            held.append(transport)
            transport._ssl_protocol._transport.pause_reading()

    server = await asyncio.get_running_loop().create_server(Deaf, "127.0.0.1", 0, ssl=context)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        for one in held:
            one.abort()
        server.close()
        await asyncio.sleep(0.01)


def test_a_connection_is_kept_for_the_next_command_only_if_the_agent_says_so(lie: Any) -> None:
    async def scene(link: Any) -> int:
        await link.hello()
        for n in range(5):
            running = await link.start(start(f"exc-{n}"), lambda _, __: None)
            await running.wait()
            await asyncio.sleep(0.05)
        return len(link._kept)

    for more, kept, most in (({}, 0, 7), ({"again": False}, 0, 7), ({"again": True}, 1, 3)):
        answers = {"hello": document(HELLO), "exec": ended({**END, **more})}
        found, liar = lie(scene, answers)
        assert found == kept
        assert liar.connections <= most


def test_a_connection_on_which_more_was_said_is_not_kept(lie: Any) -> None:
    """What nobody has asked for would be taken for the answer to the next command."""

    async def scene(link: Any) -> int:
        running = await link.start(start(), lambda _, __: None)
        await running.wait()
        return len(link._kept)

    extra = frames.frame(frames.OUT, b"words of another")
    assert lie(scene, {"exec": ended({**END, "again": True}, extra)})[0] == 0
    assert lie(scene, {"exec": ended({**END, "again": True})})[0] == 1


def test_few_connections_are_kept(lie: Any) -> None:
    async def scene(link: Any) -> int:
        started = [await link.start(start(f"exc-{n}"), lambda _, __: None) for n in range(6)]
        for one in started:
            await one.wait()
        return len(link._kept)

    assert lie(scene, {"exec": ended({**END, "again": True}, wait=0.2)})[0] == MOST_KEPT


def ended(end: dict[str, object], extra: bytes = b"", wait: float = 0.0) -> Any:
    """An agent whose command has ended."""

    async def answer(talk: Talk) -> None:
        await talk.answer({})
        await asyncio.sleep(wait)
        await talk.say(frames.text(frames.ENDED, end) + extra)

    return answer
