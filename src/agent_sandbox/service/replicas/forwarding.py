"""A request on its way to the replica that has its sandbox, and the answer on its way back.

Nothing is kept whole: bodies, events and terminals flow through as fast as both ends take them.
Only named fields pass, in both directions; how a message is framed is decided anew.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from time import time

from ..http import frames
from ..http.messages import Response, WebSocketResponse
from ..problems import Problem
from . import claims
from .upstream import SWITCHING, Broken, request_head

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ..http.messages import Request
    from ..http.websocket import WebSocket
    from .upstream import Address, Head, Link, Upstream

# What a handler may read of a request. Cookies stay here: the home gets the token behind them.
PASSED = (
    "authorization", "x-api-key", "accept", "content-type", "content-encoding", "range",
    "last-event-id", "idempotency-key", "mcp-protocol-version",
)  # fmt: skip
# The home of a login sees that, too, and what says that a page of ours has sent it.
LOGIN = ("cookie", "x-csrf-token", "origin")
# Of an answer, what is between two ends of a connection or is made anew by each.
DROPPED = frozenset((
    "connection", "keep-alive", "transfer-encoding", "trailer", "upgrade", "date",
    "x-request-id", "proxy-connection", "te",
))  # fmt: skip
# An answer that is no longer than this is read before the client gets its first byte.
WHOLE = 64 * 1024
MESSAGE_BYTES = 1 << 20
# The client of a WebSocket and the home agree on its end within this.
CLOSE_SECONDS = 5.0


class Errand:
    """One request that has to go to another replica."""

    __slots__ = (
        "address",
        "body",
        "gone",
        "home",
        "most",
        "owner",
        "request",
        "sender",
        "session",
        "token",
    )

    def __init__(
        self, request: Request, *, sender: str, home: str, address: Address,
        gone: asyncio.Future[None], most: int, token: str = "", owner: bool = False,
        body: bytes | None = None, session: bool = False,
    ) -> None:  # fmt: skip
        self.request = request
        # To the home of its login, not to that of its sandbox.
        self.session = session
        self.sender = sender
        self.home = home
        self.address = address
        # Done when the home's lease is over.
        self.gone = gone
        # Bytes of a body that is still to be read, at most.
        self.most = most
        # Behind a cookie; the home has no session of ours.
        self.token = token
        # The kernel said that it is the owner, or root.
        self.owner = owner
        # What was read already; None: nothing was.
        self.body = body


class Forwarder:
    """Passes requests on."""

    def __init__(self, upstream: Upstream, key: bytes, clock: Callable[[], float] = time) -> None:
        self._upstream = upstream
        self._key = key
        self._clock = clock

    async def forward(self, errand: Errand) -> Response | WebSocketResponse:
        """The home's answer. Unreached: nothing was sent; REPLICA_UNAVAILABLE: nobody knows."""
        link = await self._upstream.open(errand.address)
        cut = _Cut(link, errand)
        try:
            head = await self._ask(errand, link)
            if head.status == SWITCHING:
                return WebSocketResponse(_Tunnel(link, cut, errand).serve)
            body = link.body(head, errand.request.method)
            if head.length is not None and head.length <= WHOLE:
                whole = b"".join([piece async for piece in body])
                self._done(errand, link, head, cut)
                return Response(status=head.status, headers=_answered(head), body=whole)
        except (Broken, OSError) as error:
            cut.over()
            raise unavailable(errand, sent=True) from error
        except BaseException:
            cut.over()
            raise
        return Response(
            status=head.status, headers=_answered(head, streams=True),
            body=_Streamed(body, lambda: self._done(errand, link, head, cut), cut),
        )  # fmt: skip

    def _done(self, errand: Errand, link: Link, head: Head, cut: _Cut) -> None:
        """The answer was read to its end."""
        keep = head.keep and cut.is_whole
        cut.over(close=not keep)
        if keep:
            self._upstream.keep(errand.address, link)

    async def _ask(self, errand: Errand, link: Link) -> Head:
        request = errand.request
        wants_socket = request.upgrade()
        length = len(errand.body) if errand.body is not None else request.length
        # The key of a WebSocket's handshake is between two ends; our client has its own.
        nonce = base64.b64encode(secrets.token_bytes(16)).decode() if wants_socket else ""
        link.writer.write(
            request_head(request.method, request.target, self._fields(errand, nonce), length=length)
        )
        sending = asyncio.ensure_future(_send(errand, link, chunked=length is None))
        answer = asyncio.ensure_future(link.head())
        try:
            await asyncio.wait((sending, answer), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(failed := sending.exception(), Problem):
                # The client's own body is wrong, or will not come. All else is the home's doing:
                # it does not read on, for it has answered, or is gone. The answer tells.
                raise failed
            head = await answer
            if not sending.done():
                head = head.replace(keep=False)
        finally:
            for task in (sending, answer):
                task.cancel()
            await asyncio.gather(sending, answer, return_exceptions=True)
        if (head.status == SWITCHING) != wants_socket and head.status < 200:
            raise Broken("an answer that was not asked for")
        if head.status == SWITCHING and head.field("sec-websocket-accept") != frames.accept_key(
            nonce
        ):
            raise Broken("a WebSocket that was not asked for")
        return head

    def _fields(self, errand: Errand, nonce: str) -> list[tuple[str, str]]:
        given = errand.request.headers
        names = (*PASSED, *LOGIN) if errand.session else PASSED
        passed = {name: given[name] for name in names if name in given}
        if errand.token:
            passed["authorization"] = f"Bearer {errand.token}"
        claim = self._claim(errand, claims.digest(passed))
        fields = [("host", errand.address.authority), *passed.items()]
        if nonce:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket"),
                       ("sec-websocket-version", "13"), ("sec-websocket-key", nonce)]  # fmt: skip
        return [*fields, (claims.HEADER, claims.write(claim, self._key))]

    def _claim(self, errand: Errand, digest: str) -> claims.Claim:
        request, peer = errand.request, errand.request.peer
        return claims.Claim(
            sender=errand.sender, receiver=errand.home, at=self._clock(), request_id=request.id,
            method=request.method, target=request.target, address=peer.address, tls=peer.tls,
            unix=peer.unix, uid=peer.uid, owner=errand.owner, digest=digest, session=errand.session,
            nonce=secrets.token_hex(16),
        )  # fmt: skip


def _answered(head: Head, *, streams: bool = False) -> tuple[tuple[str, str], ...]:
    """Fields that go on to the client. A length stays where the content is not all there yet."""
    dropped = DROPPED if streams else DROPPED | {"content-length"}
    return tuple(pair for pair in head.fields if pair[0] not in dropped)


async def _send(errand: Errand, link: Link, *, chunked: bool) -> None:
    if errand.body is not None:
        await link.send(errand.body)
        return
    async for piece in errand.request.stream(errand.most):
        await link.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        await link.send(b"0\r\n\r\n")


def unavailable(errand: Errand | None = None, *, sent: bool = False) -> Problem:
    """The refusal when a home does not answer. What it has done by then is not known."""
    doubt = sent and errand is not None and errand.request.method not in ("GET", "HEAD")
    return Problem(
        "REPLICA_UNAVAILABLE", "the replica that has this does not answer" +
        ("; whether it has acted is not known" if doubt else ""),
        rule="replica.reached", retry_after=2.0,
        hint="look at what is there before you ask again" if doubt else "ask again",
    )  # fmt: skip


class _Cut:
    """Ends a connection with its home, and tells the home when the client has gone."""

    def __init__(self, link: Link, errand: Errand) -> None:
        self._link = link
        self._gone = errand.gone
        # Nothing has disturbed it: the connection may serve again.
        self.is_whole = True
        self._gone.add_done_callback(self._home_gone)
        self._watch = asyncio.ensure_future(self._client(errand.request))

    def _home_gone(self, _: asyncio.Future[None]) -> None:
        self.is_whole = False
        self._link.close()

    async def _client(self, request: Request) -> None:
        await request.disconnected.wait()
        self.is_whole = False
        self._link.end_input()

    def over(self, *, close: bool = True) -> None:
        """No more to watch."""
        self._gone.remove_done_callback(self._home_gone)
        self._watch.cancel()
        if close:
            self._link.close()


class _Streamed:
    """The rest of an answer. A half of it is never taken for the whole: the client is cut off."""

    def __init__(self, body: AsyncIterator[bytes], done: Callable[[], None], cut: _Cut) -> None:
        self._body = body
        self._done = done
        self._cut = cut
        self._over = False

    def __aiter__(self) -> _Streamed:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._body)
        except StopAsyncIteration:
            self._over = True
            self._done()
            raise
        except Broken:
            raise unavailable() from None

    async def aclose(self) -> None:
        """Whoever reads has gone, or all is read."""
        if not self._over:
            self._over = True
            self._cut.over()


class _Tunnel:
    """A WebSocket of a client, and one to its home."""

    def __init__(self, link: Link, cut: _Cut, errand: Errand) -> None:
        self._link = link
        self._cut = cut
        self._errand = errand

    async def serve(self, ws: WebSocket) -> None:
        """Messages both ways until one end closes."""
        inward = asyncio.ensure_future(self._inward(ws))
        outward = asyncio.ensure_future(self._outward(ws))
        try:
            done, _ = await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
            if outward not in done:
                # The home's last words after the client's.
                await asyncio.wait((outward,), timeout=CLOSE_SECONDS)
            if outward.done() and outward.exception() is None:
                await ws.close(*outward.result())
            elif outward.done() and isinstance(outward.exception(), Broken):
                await ws.close(frames.INTERNAL, "REPLICA_UNAVAILABLE")
        finally:
            for task in (inward, outward):
                task.cancel()
            await asyncio.gather(inward, outward, return_exceptions=True)
            self._cut.over()

    async def _inward(self, ws: WebSocket) -> None:
        while (message := await ws.receive()) is not None:
            text = isinstance(message, str)
            data = message.encode() if isinstance(message, str) else message
            await self._frame(frames.TEXT if text else frames.BINARY, data)
        code = ws.code if ws.code is not None and frames.is_sendable(ws.code) else frames.NORMAL
        await self._frame(frames.CLOSE, frames.close_payload(code, ws.reason))

    async def _frame(self, kind: int, data: bytes) -> None:
        await self._link.send(frames.encode(kind, data, mask=secrets.token_bytes(4)))

    async def _outward(self, ws: WebSocket) -> tuple[int, str]:
        """Until the home closes: its code and its reason."""
        reader = frames.Reader(masked=False, limit=MESSAGE_BYTES)
        while data := await self._link.read(MESSAGE_BYTES):
            try:
                messages = list(reader.feed(data))
            except frames.FrameError as error:
                raise Broken("frames that are none") from error
            for kind, payload in messages:
                if kind == frames.CLOSE and isinstance(payload, bytes):
                    code, reason = frames.read_close(payload)
                    return (code if frames.is_sendable(code) else frames.NORMAL), reason
                if kind == frames.PING and isinstance(payload, bytes):
                    await self._frame(frames.PONG, payload)
                elif kind in frames.DATA:
                    await ws.send(payload)
        raise Broken("the home went away")
