"""A connection to the agent in a pod by way of the API server: its exec, as a WebSocket.

For where the addresses of pods cannot be reached. The API server's exec starts a small process in
the pod that joins its standard streams to the agent's port. What passes is TLS between us and the
agent, as on a direct connection: neither that process nor the API server can read it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import socket

from ...client import wire
from ..http import frames
from .kube_http import refusal, unavailable, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kube_api import Api
    from .kube_http import Line

PROTOCOL = "v4.channel.k8s.io"
# The first byte of each message.
STDIN, STDOUT, STDERR, STATUS = b"\0", 1, 2, 3
OPEN_SECONDS = 10.0
# The kubelet sends pieces of 32 kilobytes.
MOST_MESSAGE, PIECE = 1 << 20, 32 << 10


class Bridges:
    """Open connections through the API server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, pod: str, container: str, command: tuple[str, ...]) -> socket.socket:
        """A socket whose other end is the command's standard streams."""
        line, rest = await self._upgrade(pod, container, command)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(0)
        task = asyncio.get_running_loop().create_task(_carry(line, theirs, rest))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def ended(_: object) -> None:
            # Here, and not in the task: one that is cancelled before it begins does nothing.
            theirs.close()
            line.close()

        task.add_done_callback(ended)
        return ours

    async def close(self) -> None:
        """End all of them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _upgrade(
        self, pod: str, container: str, command: tuple[str, ...]
    ) -> tuple[Line, bytes]:
        http, key = self._api.http, base64.b64encode(secrets.token_bytes(16)).decode()
        query = [
            ("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "false"),
            ("tty", "false"), *(("command", word) for word in command),
        ]  # fmt: skip
        headers = {
            # Not only JSON: whoever serves exec would find that it has none (406).
            "Accept": "*/*", "Connection": "Upgrade", "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Protocol": PROTOCOL,
        }  # fmt: skip
        answer = wire.Reader("GET")
        with words():
            line = await http.connect()
        try:
            with words():
                async with asyncio.timeout(OPEN_SECONDS):
                    path = f"{self._api.path('pods', pod)}/exec"
                    await line.send(await http.head("GET", path, query, b"", headers))
                    while answer.head is None:
                        answer.feed(await line.receive())
            _check(answer, key)
        except BaseException:
            line.close()
            raise
        return line, answer.rest


def _check(answer: wire.Reader, key: str) -> None:
    head = answer.head
    assert head is not None  # noqa: S101 - read by the caller
    if head.status != wire.SWITCHING:
        raise refusal(head.status, answer.body())
    proven = head.headers.get("sec-websocket-accept") == frames.accept_key(key)
    if not proven or head.headers.get("sec-websocket-protocol") != PROTOCOL:
        raise unavailable("it answers an exec with another protocol")


async def _carry(line: Line, sock: socket.socket, rest: bytes) -> None:
    """Both ways, until one end is at its end: that of the other follows."""
    down = asyncio.ensure_future(_down(line, sock, rest))
    up = asyncio.ensure_future(_up(line, sock))
    try:
        await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (down, up):
            task.cancel()
        await asyncio.wait((down, up))
        for task in (down, up):
            if not task.cancelled():
                task.exception()
        with contextlib.suppress(OSError):
            line.writer.write(
                frames.encode(frames.CLOSE, frames.close_payload(1000), mask=os.urandom(4))
            )
        # It is sent at once, or not at all: nobody waits for an end that does not read.


async def _down(line: Line, sock: socket.socket, rest: bytes) -> None:
    loop, reader = asyncio.get_running_loop(), frames.Reader(masked=False, limit=MOST_MESSAGE)
    data = rest
    while True:
        for kind, message in reader.feed(data):
            if kind == frames.CLOSE:
                return
            if kind == frames.PING and isinstance(message, bytes):
                await line.send(frames.encode(frames.PONG, message, mask=os.urandom(4)))
            if kind != frames.BINARY or not isinstance(message, bytes) or not message:
                continue
            if message[0] == STATUS and len(message) > 1:
                # The process in the pod has ended, well or not.
                return
            if message[0] == STDOUT and len(message) > 1:
                # Nothing is read meanwhile: the pod has to wait.
                await loop.sock_sendall(sock, message[1:])
        data = await line.receive()
        if not data:
            return


async def _up(line: Line, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, PIECE):
        await line.send(frames.encode(frames.BINARY, STDIN + data, mask=os.urandom(4)))
