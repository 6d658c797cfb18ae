"""How answers and streams go back and forth: whole documents, endless ones, uploads, tunnels."""

from __future__ import annotations

import asyncio
import json

from . import engine, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    # A document of the engine → what the client may see of it; None drops one of a stream.
    Filter = Callable[[object], object]

# What of an answer's head is passed on, in the spelling that is sent.
PASSED = {
    "content-type": "Content-Type",
    "docker-experimental": "Docker-Experimental",
    "ostype": "Ostype",
    "x-docker-container-path-stat": "X-Docker-Container-Path-Stat",
}
# The engine's own formats for a connection that it has taken over.
RAW = ("application/vnd.docker.raw-stream", "application/vnd.docker.multiplexed-stream")
REASONS = {
    101: "UPGRADED", 200: "OK", 201: "Created", 204: "No Content", 304: "Not Modified",
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    409: "Conflict", 413: "Content Too Large", 500: "Internal Server Error", 502: "Bad Gateway",
}  # fmt: skip
# One document of a stream of documents.
MAX_EVENT = 4 << 20


class Reply:
    """The client's side of one answer."""

    def __init__(
        self, line: wire.Line, *, method: str, modern: bool, keep: bool, api: Callable[[], str]
    ) -> None:  # fmt: skip
        self.line = line
        self.method = method
        # HTTP/1.1: knows chunks.
        self._modern = modern
        self.keep = keep and modern
        # Asked when a head is written: the engine says its version while the first requests wait,
        # and a client that is not told speaks 1.24, where it removes its containers itself.
        self._api = api
        self.begun = False

    def _head(self, status: int, fields: dict[str, str], *lines: str) -> bytes:
        self.begun = True
        said = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
        said += [f"{PASSED[name]}: {value}" for name, value in fields.items() if name in PASSED]
        said += ["Server: agent-sandbox", "Builder-Version: 1"]
        if version := self._api():
            said.append(f"Api-Version: {version}")
        said += [*lines]
        return "\r\n".join([*said, "", ""]).encode("latin-1")

    def _connection(self) -> tuple[str, ...]:
        return () if self.keep else ("Connection: close",)

    async def whole(self, status: int, fields: dict[str, str], body: bytes) -> None:
        """An answer that is known to its end."""
        sized = () if status == 204 else (f"Content-Length: {len(body)}",)
        head = self._head(status, fields, *sized, *self._connection())
        await self.line.send(head + (b"" if self.method == "HEAD" else body))

    async def refuse(self, status: int, message: str) -> None:
        """An error as clients of Docker show it."""
        body = json.dumps({"message": message}).encode() + b"\n"
        await self.whole(status, {"content-type": "application/json"}, body)

    async def stream(
        self, answer: wire.Answer, pieces: AsyncIterator[bytes], length: int | None
    ) -> None:
        """An answer piece by piece, at the speed of the client."""
        if length is not None:
            framing: tuple[str, ...] = (f"Content-Length: {length}",)
        else:
            framing = ("Transfer-Encoding: chunked",) if self._modern else ()
        self.keep = self.keep and (length is not None or self._modern)
        await self.line.send(
            self._head(answer.status, answer.fields, *framing, *self._connection())
        )
        chunked = length is None and self._modern
        async for piece in pieces:
            await self.line.send(wire.chunk(piece) if chunked else piece)
        if chunked:
            await self.line.send(wire.chunk(b""))

    async def switch(self, answer: wire.Answer) -> None:
        """The head after which the connection belongs to the two sides."""
        self.keep = False
        upgraded = ("Connection: Upgrade", "Upgrade: tcp") if answer.status == 101 else ()
        await self.line.send(self._head(answer.status, answer.fields, *upgraded))


# --- documents


async def documents(body: wire.Body, keep: Filter) -> AsyncIterator[bytes]:
    """A stream of documents, one on each line, each of them filtered before it is passed on."""
    rest = b""
    async for piece in body.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT:
            raise wire.Broken("a document of the engine has no end")
        shown = b"".join(_shown(line, keep) for line in lines)
        if shown:
            yield shown
    if rest.strip():
        yield _shown(rest, keep)


def _shown(line: bytes, keep: Filter) -> bytes:
    if not line.strip():
        return b""
    found = keep(json.loads(line))
    return b"" if found is None else json.dumps(found).encode() + b"\r\n"


async def answer_with(
    reply: Reply, line: wire.Line, answer: wire.Answer, stream: str, keep: Filter | None
) -> None:
    """Pass an answer on, as the policy says."""
    body = wire.answer_body(line, answer, reply.method)
    whole = stream == "plain" or answer.status >= 400
    if keep is None and not whole:
        await reply.stream(answer, body.pieces(), body.left)
    elif keep is not None and not whole:
        await reply.stream(answer, documents(body, keep), None)
    else:
        content = await body.whole(engine.MAX_DOCUMENT)
        if keep is not None and content and answer.media_type == "application/json":
            shown = keep(json.loads(content))
            if shown is None:
                await reply.refuse(404, "No such object")
                return
            content = json.dumps(shown).encode() + b"\n"
        await reply.whole(answer.status, answer.fields, content)


# --- uploads


class Upload:
    """A body on its way to the engine, at its speed; the answer may come before the end."""

    def __init__(self, line: wire.Line, pieces: AsyncIterator[bytes]) -> None:
        self._line = line
        self._up = asyncio.ensure_future(_send_body(line, pieces))

    async def answer(self) -> wire.Answer:
        """The head of the answer; raises what is wrong with the client's body."""
        down = asyncio.ensure_future(engine.first(self._line))
        try:
            await asyncio.wait({self._up, down}, return_when=asyncio.FIRST_COMPLETED)
            if self._up.done() or not down.done():
                # Whoever sends what cannot be read gets no answer of the engine's.
                await self._up
            return await down
        finally:
            await stop(down)

    async def stop(self) -> None:
        """What is not sent when the answer has ended is never sent."""
        await stop(self._up)


async def stop(task: asyncio.Task[object] | asyncio.Future[wire.Answer]) -> None:
    """End a task and take note of how it ended, so that nobody complains about it."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _send_body(line: wire.Line, pieces: AsyncIterator[bytes]) -> None:
    try:
        async for piece in pieces:
            try:
                await line.send(wire.chunk(piece))
            except OSError:
                # It has heard enough, and says why in its answer.
                return
        await line.send(wire.chunk(b""))
    except BaseException:
        # Never the end of the body: the engine must not take a part of it for the whole.
        line.abort()
        raise


# --- tunnels


def opens(answer: wire.Answer, *, asked: bool) -> bool:
    """Whether the engine has taken the connection over. Only then bytes may pass unread."""
    if answer.status == 101:
        return asked
    return answer.status == 200 and answer.media_type in RAW


async def _pump(source: wire.Line, sink: wire.Line) -> None:
    try:
        while data := await source.receive():
            await sink.send(data)
    except OSError:
        # A reset, or nobody reads any more.
        pass
    sink.end()


async def tunnel(client: wire.Line, server: wire.Line, left: asyncio.Future[None]) -> None:
    """Bytes both ways. Each side may end its half and still hear the other; `left`: client gone."""
    up = asyncio.ensure_future(_pump(client, server))
    down = asyncio.ensure_future(_pump(server, client))
    try:
        with wire.Hangup(server.sock) as hangup:
            while not (up.done() and down.done()):
                over = (up.done() and left.done()) or (down.done() and hangup.gone.done())
                if over:
                    return
                waiting = {f for f in (up, down, left, hangup.gone) if not f.done()}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            await stop(task)


async def drain(client: wire.Line, most: int) -> None:
    """Read what a client still sends after a refusal, so that close(2) does not destroy it."""
    client.end()
    while most > 0 and (data := await client.receive()):
        most -= len(data)
