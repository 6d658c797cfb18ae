"""An ASGI 3 application as a handler of one request: streaming both ways, the end told."""

from __future__ import annotations

import asyncio
from collections import deque

from ..problems import Problem
from .messages import Response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
    from typing import Any

    from .messages import Request

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES = 4 * 1024 * 1024
# An application that is told that its client has gone may clean up for so long.
LEAVE_SECONDS = 2.0
# A task that nobody holds is collected in the middle of its work.
_RUNNING: set[asyncio.Task[None]] = set()
# How an answer is framed is the connection's business.
FRAMING = frozenset((b"transfer-encoding", b"connection", b"keep-alive", b"date"))


class ApplicationError(RuntimeError):
    """An application that does not keep to ASGI."""


def scope(request: Request, root_path: str, state: dict[str, Any] | None) -> Scope:
    """What an application is told about a request."""
    raw_path, _, query = request.target.partition("?")
    peer = request.peer
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.version.removeprefix("HTTP/"),
        "method": request.method,
        "scheme": "https" if peer.tls else "http",
        "path": request.path,
        "raw_path": raw_path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "root_path": root_path,
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in request.headers.items()
        ],
        "client": None if peer.unix else (peer.address, peer.port),
        "server": None,
        "state": {} if state is None else state,
    }


async def serve_asgi(
    app: App, request: Request, *, root_path: str = "", state: dict[str, Any] | None = None,
    limit: int = BODY_BYTES,
) -> Response:  # fmt: skip
    """Run the application; return with its head. What raises before that is raised here."""
    run = _Run(request, limit)
    run.start(app, scope(request, root_path, state))
    try:
        await run.head.wait()
    except asyncio.CancelledError:
        await run.aclose()
        raise
    if run.error is not None:
        raise run.error
    if run.whole is not None:
        return Response(status=run.status, headers=run.headers, body=run.whole)
    return Response(status=run.status, headers=run.headers, body=run)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in pairs
        if name.lower() not in FRAMING
    )


class _Run:
    """One request inside of an application; also the iterator of its answer's body."""

    def __init__(self, request: Request, limit: int) -> None:
        # The answer can be begun, or there was an error before that.
        self.head = asyncio.Event()
        self.status = 0
        self.headers: tuple[tuple[str, str], ...] = ()
        # The body, if it came in one piece.
        self.whole: bytes | None = None
        self.error: BaseException | None = None
        self._request = request
        self._input: AsyncIterator[bytes] | None = request.stream(limit)
        self._task: asyncio.Task[None] | None = None
        # Pieces on their way: the application waits until the client has taken the last one.
        self._pieces: deque[bytes] = deque()
        self._room, self._filled = asyncio.Event(), asyncio.Event()
        # Nothing more comes; nothing more is wanted.
        self._done = False
        self._over = asyncio.Event()

    def start(self, app: App, told: Scope) -> None:
        """Let it run."""
        self._task = asyncio.get_running_loop().create_task(self._application(app, told))
        _RUNNING.add(self._task)
        self._task.add_done_callback(_RUNNING.discard)

    async def _application(self, app: App, told: Scope) -> None:
        try:
            await app(told, self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - raised where the answer is made
            self._fail(error)
        else:
            if not self._done and self._request.disconnected.is_set():
                self._fail(Problem("BAD_REQUEST", "the client went away"))
            elif not self._done:
                self._fail(ApplicationError("the application returned before the answer's end"))

    def _fail(self, error: Exception) -> None:
        if self._over.is_set():
            # Nobody is left to tell but the log. That a client has gone is no news.
            if isinstance(error, Problem):
                return
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "after an answer", "exception": error})
            return
        self.error = error
        self._done = True
        self.head.set()
        self._filled.set()

    # --- the application's side

    async def receive(self) -> Message:
        """A part of the body, or that the client has gone."""
        if self._input is not None:
            piece = await anext(self._input, b"")
            if piece:
                return {"type": "http.request", "body": piece, "more_body": True}
            self._input = None
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone()
        return {"type": "http.disconnect"}

    async def _gone(self) -> None:
        """Wait for the client's end, or for the answer's."""
        events = (self._request.disconnected, self._over)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def send(self, message: Message) -> None:
        """The head, and then pieces."""
        kind = message["type"]
        if self._over.is_set():
            return
        if kind == "http.response.start" and not self.status:
            self.status = message["status"]
            self.headers = _headers(message.get("headers", ()))
            # Of a stream the client learns at once, also if its first piece takes a while.
            if all(name.lower() != "content-length" for name, _ in self.headers):
                self.head.set()
        elif kind == "http.response.body" and self.status and not self._done:
            await self._body(bytes(message.get("body", b"")), more=message.get("more_body", False))
        else:
            raise ApplicationError(f"{kind} at this point")

    async def _body(self, data: bytes, *, more: bool) -> None:
        if not more and not self.head.is_set():
            self.whole, self._done = data, True
            self._over.set()
            self.head.set()
            return
        self.head.set()
        while self._pieces and not self._over.is_set():
            self._room.clear()
            await self._room.wait()
        self._done = not more
        self._pieces.append(data)
        self._filled.set()

    # --- the connection's side

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces and not self._done:
            self._filled.clear()
            await self._filled.wait()
        if self._pieces:
            self._room.set()
            return self._pieces.popleft()
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """The answer is complete, or nobody wants it. What still runs then is told, and ended."""
        self._over.set()
        self._room.set()
        complete = self._done and not self._pieces
        if self._task is None or self._task.done() or complete:
            # A complete answer may be followed by work of the application's own.
            return
        _, running = await asyncio.wait((self._task,), timeout=LEAVE_SECONDS)
        if running:
            self._task.cancel()
            await asyncio.wait((self._task,))
