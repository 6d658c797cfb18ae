"""An agent that says whatever a test wants, to see what the service makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from agent_sandbox.pod import frames, identity
from agent_sandbox.service.backend import pod_identity
from agent_sandbox.service.backend.pod_link import PodLink

Answer = Callable[["Talk"], Awaitable[None]]


class Talk:
    """One connection, as the agent sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = frames.Reader(frames.TO_AGENT)
        self.request: dict[str, object] = {}

    async def next(self) -> tuple[bytes, bytes]:
        while (found := self._frames.next()) is None:
            data = await self.reader.read(1 << 16)
            if not data:
                raise ConnectionError
            self._frames.feed(data)
        return found

    async def say(self, *data: bytes) -> None:
        self.writer.writelines(data)
        await self.writer.drain()

    async def answer(self, document: object) -> None:
        await self.say(frames.text(frames.ANSWER, document))


class Liar:
    """A server with an agent's TLS. `answers` are by operation."""

    def __init__(self, place: Path, pem: bytes, answers: dict[str, Answer]) -> None:
        self._identity = pod_identity.contexts(pem)
        key, certificate = place / "key.pem", place / "certificate.pem"
        if not key.exists():
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                 "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x", "-keyout", key, "-out",
                 certificate], check=True, capture_output=True,
            )  # fmt: skip
        self._context = identity.server(self._identity.ca, str(certificate), str(key))
        der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
        self.fingerprint = hashlib.sha256(der).hexdigest()
        self.answers = answers
        self.asked: list[str] = []
        self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        talk = Talk(reader, writer)
        try:
            while True:
                kind, data = await talk.next()
                if kind != frames.REQUEST:
                    continue
                talk.request = frames.document(data)
                operation = str(talk.request["operation"])
                self.asked.append(operation)
                await self.answers[operation](talk)
        except (OSError, KeyError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[PodLink]:
        """A link to it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        port = server.sockets[0].getsockname()[1]

        async def dial() -> socket.socket:
            sock = socket.socket()
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return sock

        link = PodLink(dial, self.fingerprint, self._identity, **options)
        try:
            yield link
        finally:
            await link.close()
            server.close()
            # Also what is still in its handshake: it has to see that we are gone.
            deadline = asyncio.get_running_loop().time() + 20
            while server._active_count and asyncio.get_running_loop().time() < deadline:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
