"""An API server that says what a test wants it to say, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agent_sandbox.record import Record
from agent_sandbox.service.backend.kube_api import Api
from agent_sandbox.service.backend.kube_config import Access
from agent_sandbox.service.backend.kube_credentials import Credentials
from agent_sandbox.service.backend.kube_http import Http


class Asked(Record):
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


# Writes an answer; whether the connection stays.
Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool]]


def says(status: int, document: object) -> Answer:
    """A whole answer."""

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))
        await writer.drain()
        return True

    return answer


def streams(*events: object, then: str = "end") -> Answer:
    """Chunks; `then` "end" is well, "cut" is not, "stay" goes on until the other side goes."""

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            data = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        if then == "end":
            writer.write(b"0\r\n\r\n")
        elif then == "stay":
            await asyncio.Event().wait()
        return then == "end"

    return answer


def status(code: int, reason: str = "", message: str = "no") -> Answer:
    """A refusal as the API server writes it."""
    return says(code, {"kind": "Status", "code": code, "reason": reason, "message": message})


class Fake:
    """Answers in the order of a test; by method and path, the last one stays."""

    def __init__(self) -> None:
        self.seen: list[Asked] = []
        self.connections = 0
        self._answers: dict[tuple[str, str], list[Answer]] = {}
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    def on(self, method: str, path: str, *answers: Answer) -> None:
        self._answers[method, path] = list(answers)

    def of(self, method: str, *, watch: bool | None = None) -> list[Asked]:
        return [
            one for one in self.seen
            if one.method == method and (watch is None or ("watch" in one.query) == watch)
        ]  # fmt: skip

    def _next(self, asked: Asked) -> Answer:
        watching = "?watch" if "watch" in asked.query else ""
        held = self._answers.get((asked.method, asked.path + watching), [])
        if not held:
            return status(404, "NotFound", f"{asked.method} {asked.path}")
        return held.pop(0) if len(held) > 1 else held[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while True:
                asked = await _read(reader)
                self.seen.append(asked)
                if not await self._next(asked)(asked, writer):
                    break
        self._open.discard(task)
        writer.transport.abort()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Api]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        access = Access(host="127.0.0.1", port=self.port, tls=False, token="secret")
        api = Api(Http(access, Credentials(access, {})), "default")
        try:
            yield api
        finally:
            await api.http.close()
            server.close()
            for task in tuple(self._open):
                task.cancel()
            if self._open:
                await asyncio.wait(tuple(self._open))
            # The loop closes sockets in its next turn.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    parts = urlsplit(target)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(
        method=method, path=parts.path, query=dict(parse_qsl(parts.query, keep_blank_values=True)),
        headers=headers, body=body,
    )  # fmt: skip
