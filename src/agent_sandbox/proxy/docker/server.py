"""The socket that the sandbox sees: connections, and the requests on each of them, one by one.

Every request is read strictly, judged, and sent to the engine on a connection of its own. What a
client sends behind a request that fails is never read as something else.
"""

from __future__ import annotations

import asyncio
import resource

from ...policy.docker import decision as policy
from .. import http1
from . import engine, relaying, wire
from .desk import MALFORMED, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Coroutine
    from types import TracebackType

    from ...policy.docker.values import Grants, Request, Upstream
    from .desk import Desk
    from .relaying import Filter

MAX_BODY = 4 << 20
MAX_CLIENTS = 800
# A client needs a few descriptors, and more while names are looked up.
DESCRIPTORS_EACH = 8
# Bodies that are held in memory at a time.
MAX_BODIES = 32
# Out of descriptors: some client will be done.
PAUSE = 0.1
# What a refused client may still send before the connection is closed.
MAX_DRAINED = 8 << 20
DRAIN_SECONDS = 5.0
# How long requests that change something may take to end after the run has.
GRACE = 10.0
# Paths of requests that make something. A pull makes nothing that belongs to the run.
COUNTED = "/containers/create"
CREATING = ("/networks/create", "/volumes/create", "/commit", "/tag")
BAD_GATEWAY, FORBIDDEN = 502, 403
# For the log: nobody waited for an answer.
CLIENT_GONE = 499
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange:
    """One request and its answer."""

    def __init__(self, client: wire.Line, request: http1.Request, api: Callable[[], str]) -> None:
        self.request = request
        self.body = wire.request_body(client, request)
        values = {name.lower(): value for name, value in request.fields}
        wanted = http1.tokens([values.get("connection", "")])
        self.upgrade = "upgrade" in wanted and values.get("upgrade", "").lower() == "tcp"
        # Whether the connection now belongs to the two sides.
        self.tunnel = False
        self.expects = values.get("expect", "").lower()
        self.reply = relaying.Reply(
            client, method=request.method, modern=request.version == "HTTP/1.1",
            keep="close" not in wanted, api=api,
        )  # fmt: skip


class Server:
    """Serves one listening socket until it is closed."""

    def __init__(self, listener: socket.socket, desk: Desk, page: str = "") -> None:
        listener.settimeout(0)
        # What a refused client may read about its sandbox.
        self._page = page
        self._listener = listener
        self._desk = desk
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = asyncio.Semaphore(max(1, min(MAX_CLIENTS, most // DESCRIPTORS_EACH)))
        self._bodies = asyncio.Semaphore(MAX_BODIES)
        self._clients: set[asyncio.Task[None]] = set()
        # Requests that change something in the engine: they are not left half way.
        self._changes: set[asyncio.Task[None]] = set()
        self._counting = asyncio.Lock()

    async def serve(self) -> None:
        """Accept for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError:
                self._room.release()
                await asyncio.sleep(PAUSE)
                continue
            task = loop.create_task(self._client(sock))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def close(self) -> bool:
        """End all. False if something was cut off that may have made an object in the engine."""
        self._listener.close()
        for task in self._clients:
            task.cancel()
        if self._clients:
            await asyncio.wait(self._clients)
        if not self._changes:
            return True
        _, late = await asyncio.wait(self._changes, timeout=GRACE)
        for task in late:
            task.cancel()
        return not late

    def _api(self) -> str:
        """The version that is spoken; "" before the engine has said its own."""
        return self._desk.client.api

    async def _client(self, sock: socket.socket) -> None:
        client = wire.Line(sock)
        try:
            with wire.Hangup(sock) as hangup:
                while await self._cycle(client, hangup.gone):
                    pass
        except OSError:
            # The client is gone, or the engine ended in the middle of an answer: both see the end.
            pass
        finally:
            client.close()
            self._room.release()

    async def _cycle(self, client: wire.Line, left: asyncio.Future[None]) -> bool:
        """One request; whether the connection may have another."""
        try:
            head = await client.head()
            if not head:
                return False
            request = http1.parse(head, nameless=True)
        except http1.BadRequest as error:
            await self._malformed(client, error)
            return False
        exchange = Exchange(client, request, self._api)
        work = asyncio.ensure_future(self._serve(exchange, left))
        try:
            # A client that hangs up ends its request, wherever it is; a tunnel sees to that itself.
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.tunnel:
                return False
            await work
        finally:
            await relaying.stop(work)
        return exchange.reply.keep and exchange.body.done

    async def _malformed(self, client: wire.Line, error: http1.BadRequest) -> None:
        """Refuse what could not be read. Where it ends is not known, so nothing may follow."""
        verdict = Verdict(rule=MALFORMED, status=error.status, message=f"bad request: {error}")
        self._desk.note(policy.Request(method="", target=""), verdict, error.status)
        reply = relaying.Reply(client, method="", modern=True, keep=False, api=self._api)
        await reply.refuse(error.status, f"{verdict.message} [{MALFORMED}]")
        await _drained(client)

    async def _serve(self, exchange: Exchange, left: asyncio.Future[None]) -> None:
        """Judge a request and answer it."""
        request = policy.Request(
            method=exchange.request.method, target=exchange.request.target,
            headers=exchange.request.fields,
        )  # fmt: skip
        try:
            if exchange.expects:
                await _expected(exchange)
            if not policy.is_streamed(request.method, request.target):
                async with self._bodies:
                    request = request.replace(body=await exchange.body.whole(MAX_BODY))
            verdict = await self._desk.judge(request)
            sent = verdict.upstream
            path = sent.path if sent is not None and sent.stream == "plain" else ""
            if path.endswith(COUNTED):
                await self._finished(self._alone(exchange, request, left))
            elif path.endswith(CREATING):
                await self._finished(self._follow(exchange, request, verdict, left))
            else:
                await self._follow(exchange, request, verdict, left)
        except http1.BadRequest as error:
            verdict = Verdict(rule=MALFORMED, status=error.status)
            self._desk.note(request, verdict, error.status)
            await self._refuse(exchange, error.status, f"bad request: {error} [{MALFORMED}]")

    async def _alone(
        self, exchange: Exchange, request: Request, left: asyncio.Future[None]
    ) -> None:
        """Judge once more when nobody else makes one: there is a limit, and all see one count."""
        async with self._counting:
            await self._follow(exchange, request, await self._desk.judge(request), left)

    async def _follow(
        self, exchange: Exchange, request: Request, verdict: Verdict, left: asyncio.Future[None]
    ) -> None:
        """Do what the verdict says."""
        if verdict.upstream is None:
            self._desk.note(request, verdict, verdict.status)
            more = f" (see {self._page})" if self._page and verdict.status == FORBIDDEN else ""
            await self._refuse(exchange, verdict.status, verdict.message + more)
            return
        await self._forward(exchange, request, verdict, verdict.upstream, left)

    async def _finished(self, forward: Coroutine[object, object, None]) -> None:
        """Let a change end although its client leaves: what it makes must be known."""
        task = asyncio.ensure_future(forward)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _refuse(self, exchange: Exchange, status: int, message: str) -> None:
        if exchange.reply.begun:
            raise wire.Broken("an answer that cannot be taken back")
        exchange.reply.keep = exchange.reply.keep and exchange.body.done
        await exchange.reply.refuse(status, message)
        if not exchange.body.done:
            await _drained(exchange.reply.line)

    async def _forward(
        self, exchange: Exchange, request: Request, verdict: Verdict, upstream: Upstream,
        left: asyncio.Future[None],
    ) -> None:  # fmt: skip
        """Send a rebuilt request on a connection of its own, and pass the answer on."""
        noted = False

        def note(status: int) -> None:
            """Once, and before a stream that may last for hours."""
            nonlocal noted
            if not noted:
                self._desk.note(request, verdict, status)
            noted = True

        try:
            line = await self._desk.client.connect()
            try:
                pieces = self._desk.checked(exchange.body.pieces(), verdict)
                async with _sent(line, exchange, upstream, pieces) as sent:
                    answer = await sent.answer()
                    note(answer.status)
                    await self._answer(exchange, upstream, line, answer, left)
            finally:
                line.close()
        except http1.BadRequest:
            noted = True
            raise
        except policy.Refused as refused:
            # Found in a body that was on its way; the engine has not seen its end.
            verdict = verdict.replace(rule=refused.rule, upstream=None)
            note(refused.status)
            words = f"agent-sandbox: {refused.message} [{refused.rule}]"
            await self._refuse(exchange, refused.status, words)
        except (engine.EngineError, OSError, ValueError, RecursionError) as error:
            note(BAD_GATEWAY)
            if exchange.reply.begun:
                raise wire.Broken("the engine's answer has no end") from error
            await self._refuse(exchange, BAD_GATEWAY, f"the container engine failed: {error}")
        finally:
            note(CLIENT_GONE)

    async def _answer(
        self, exchange: Exchange, upstream: Upstream, line: wire.Line, answer: wire.Answer,
        left: asyncio.Future[None],
    ) -> None:  # fmt: skip
        if upstream.stream == "hijack":
            exchange.reply.keep = False
            if relaying.opens(answer, asked=exchange.upgrade):
                exchange.tunnel = True
                await exchange.reply.switch(answer)
                await relaying.tunnel(exchange.reply.line, line, left)
                return
        if answer.status < 200:
            raise wire.Broken("the engine has switched to something that nobody asked for")
        keep = _filter(upstream.answer, answer, await self._desk.grants())
        await relaying.answer_with(exchange.reply, line, answer, upstream.stream, keep)


class _sent:  # noqa: N801 - a context, used like a function
    """A request that was sent: its head and body, or a body that is still on its way."""

    def __init__(
        self, line: wire.Line, exchange: Exchange, upstream: Upstream,
        pieces: AsyncIterator[bytes],
    ) -> None:  # fmt: skip
        self._line = line
        # A body that is not read before.
        self._pieces = pieces
        self._exchange = exchange
        self._upstream = upstream
        self._upload: relaying.Upload | None = None

    async def __aenter__(self) -> _sent:
        upstream = self._upstream
        if upstream.stream == "upload":
            await self._line.send(engine.upstream_head(upstream, chunked=1))
            self._upload = relaying.Upload(self._line, self._pieces)
        else:
            upgrade = upstream.stream == "hijack" and self._exchange.upgrade
            head = engine.upstream_head(upstream, upgrade=int(upgrade))
            await self._line.send(head + upstream.body)
        return self

    async def answer(self) -> wire.Answer:
        """The head of the answer."""
        if self._upload is not None:
            return await self._upload.answer()
        return await engine.first(self._line)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._upload is not None:
            await self._upload.stop()


def _filter(name: str, answer: wire.Answer, grants: Grants) -> Filter | None:
    """What an answer's documents go through."""
    if answer.status >= 400:
        name = "error"
    return (lambda document: policy.filter_answer(name, grants, document)) if name else None


async def _expected(exchange: Exchange) -> None:
    if exchange.expects != "100-continue":
        raise http1.BadRequest("an expectation that nobody can meet", 417)
    if not exchange.body.done:
        await exchange.reply.line.send(CONTINUE)


async def _drained(client: wire.Line) -> None:
    """Close the connection so that the client can still read why."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await relaying.drain(client, MAX_DRAINED)
    except (TimeoutError, OSError):
        return
