"""What a handler gets and what it gives back: requests, responses, WebSockets."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode
from collections.abc import Awaitable, Callable

from ...record import Record
from ..problems import Problem
from . import targets
from .body import Body
from .websocket import WebSocket, WebSocketClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

__all__ = (
    "JSON", "PLAIN", "Body", "Handler", "Peer", "Request", "Response", "WebSocket",
    "WebSocketClosed", "WebSocketResponse", "empty", "json_response", "problem_response",
)  # fmt: skip
WEBSOCKET_VERSION = "13"
# Answers of this layer are for programs. A browser must neither guess their type nor keep them.
PLAIN = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))
JSON = (("content-type", "application/json"), *PLAIN)


class Peer(Record):
    """Who is at the other end of a connection."""

    # "127.0.0.1", "::1", or "unix".
    address: str
    port: int = 0
    # By SO_PEERCRED, on a unix socket.
    uid: int | None = None
    pid: int | None = None
    tls: bool = False
    unix: bool = False
    # What another replica says of a user at its unix socket; None: the uid says it.
    owner: bool | None = None


class Request:
    """A request. Its head has been read; its body comes when it is asked for."""

    __slots__ = (
        "_after", "_body", "disconnected", "headers", "id", "method", "path", "peer", "query",
        "target", "version",
    )  # fmt: skip

    def __init__(
        self, method: str, target: str, headers: Mapping[str, str], peer: Peer,
        body: Body | bytes = b"", *, version: str = "HTTP/1.1",
    ) -> None:  # fmt: skip
        """Raise a Problem for a target that is not one path and one query."""
        self.method = method
        self.target = target
        self.path, self.query = targets.split(target)
        self.headers = headers
        self.peer = peer
        self.version = version
        self.id = "req_" + os.urandom(8).hex()
        # Set when the client has gone, or has closed its side.
        self.disconnected = asyncio.Event()
        self._body = body if isinstance(body, Body) else Body.of(body)
        self._after: tuple[Callable[[], None], ...] = ()

    @property
    def length(self) -> int | None:
        """The length of the body; None when it is not known before it has come."""
        return self._body.length

    def after(self, work: Callable[[], None]) -> None:
        """Do it when the last byte of the answer is taken, or nobody waits for it any more."""
        self._after = (*self._after, work)

    def over(self) -> None:
        """The server's last word about it."""
        works, self._after = self._after, ()
        for work in works:
            work()

    async def body(self, limit: int) -> bytes:
        """The whole body; TOO_LARGE beyond the limit, before reading where the length is known."""
        pieces = [piece async for piece in self.stream(limit)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def stream(self, limit: int) -> AsyncIterator[bytes]:
        """The body, piece by piece, as fast as it is taken."""
        if self._body.length is not None and self._body.length > limit:
            raise _too_large(limit)
        seen = 0
        while piece := await self._body.read():
            seen += len(piece)
            if seen > limit:
                raise _too_large(limit)
            yield piece

    def upgrade(self) -> bool:
        """Whether it asks for a WebSocket, correctly."""
        fields = self.headers
        words = {word.strip(" \t").lower() for word in fields.get("connection", "").split(",")}
        return (
            self.method == "GET"
            and self.version == "HTTP/1.1"
            and self._body.length == 0
            and "upgrade" in words
            and fields.get("upgrade", "").lower() == "websocket"
            and fields.get("sec-websocket-version") == WEBSOCKET_VERSION
            and _is_key(fields.get("sec-websocket-key", ""))
        )


def _is_key(text: str) -> bool:
    try:
        return len(text) == 24 and len(b64decode(text, validate=True)) == 16
    except ValueError:
        return False


def _too_large(limit: int) -> Problem:
    return Problem(
        "TOO_LARGE", f"the body is larger than {limit} bytes", rule="http.body",
        hint="send less at once, or ask for a higher limit",
    )  # fmt: skip


class Response(Record):
    """An answer. An iterator is sent as it comes, and closed (`aclose`) whatever happens."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | AsyncIterator[bytes] = b""


class WebSocketResponse:
    """Go over to a WebSocket: `serve` runs after the 101, and its return closes it."""

    __slots__ = ("headers", "protocol", "serve")

    def __init__(
        self, serve: Callable[[WebSocket], Awaitable[None]], protocol: str = "",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:  # fmt: skip
        """`protocol`: one of those that the client offers, or "" for none."""
        self.serve = serve
        self.protocol = protocol
        self.headers = headers


Handler = Callable[[Request], Awaitable[Response | WebSocketResponse]]


def json_response(status: int, value: object, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """A value as JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate (a file name that is not UTF-8) must not turn an answer into an error.
    body = text.encode("utf-8", "backslashreplace")
    return Response(status=status, headers=(*JSON, *headers), body=body)


def empty(status: int, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """No body."""
    return Response(status=status, headers=tuple(headers))


def problem_response(problem: Problem, request_id: str) -> Response:
    """A refusal in words."""
    headers = dict(problem.headers)
    if problem.retry_after is not None:
        # Whole seconds, and never 0: a client would come back at once.
        headers["retry-after"] = str(max(1, -int(-problem.retry_after // 1)))
    if problem.status == 401:
        headers.setdefault("www-authenticate", "Bearer")
    return json_response(problem.status, problem.body(request_id), headers.items())
