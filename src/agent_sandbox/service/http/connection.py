"""One connection: heads and bodies in, one request at a time, and every way in which it can end.

A Protocol and not a pair of streams: a stream has a task and two futures for each read.
Time is kept by the server's one tick, not by a timer for each wait.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic

from ...proxy import http1
from ..problems import Problem
from . import answers, exchange, frames, targets
from .body import Body
from .messages import Request, problem_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from .limits import Limits
    from .messages import Handler, Peer
    from .watching import Watch
    from .websocket import WebSocket

    class Desk(Protocol):
        """The server, as a connection sees it."""

        handler: Handler
        limits: Limits
        watch: Watch
        draining: bool
        # Connections without a request, the longest waiting first: they give way if it is full.
        waiting: dict[Connection, None]
        running: set[asyncio.Task[None]]

        def bad(self, peer: Peer, problem: Problem) -> None:
            """A request that never became one."""

        def error(self, request: Request, error: BaseException) -> None:
            """A fault of ours."""

        def forget(self, connection: Connection) -> None:
            """It is gone."""

        def finished(self, task: asyncio.Task[None]) -> None:
            """A request is done."""


# Waiting for a head; running a request; dropping the rest of its body; a WebSocket; dropping what
# comes after a refusal; closed by us.
WAIT, BUSY, SKIP, SOCKET, LINGER, SHUT = range(6)
NO_BODY = Body(0)
# Statuses of the parser that have a code of their own; all else is a BAD_REQUEST.
CODES = {414: "URI_TOO_LONG", 431: "HEADERS_TOO_LARGE"}
GONE = "the client went away before the end of the body"


def refusal(error: http1.BadRequest) -> Problem:
    """What the parser found, as an answer."""
    code = CODES.get(error.status, "BAD_REQUEST")
    return Problem(code, f"bad request: {error}", rule="http.head")


class Connection(asyncio.Protocol):
    """A client, from its first byte to its last."""

    def __init__(self, desk: Desk, peer: Peer, key: str, descriptor: int) -> None:
        """`key`: whom its connections are counted for."""
        self.desk = desk
        self.peer = peer
        self.key = key
        self.descriptor = descriptor
        self.opening: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.request: Request | None = None
        self.socket: WebSocket | None = None
        self.streaming = False
        self.lost = False
        self.deadline = monotonic() + desk.limits.head_seconds
        self.state = WAIT
        self._fresh = True
        self._input = b""
        self._body = NO_BODY
        self._task: asyncio.Task[None] | None = None
        self._continue = False
        self._keep = True
        self._eof = False
        self._paused = False
        # Seconds for which the client may still be silent within its body; and since when it is.
        self._patience = 0.0
        self._silent = 0.0
        self._stuck: tuple[float, int] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._dropped = 0

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready: for TLS, after the handshake."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self.transport = transport
        transport.set_write_buffer_limits(high=self.desk.limits.send_held_bytes)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.state == WAIT:
            self._head(data)
        elif self.state == BUSY:
            self._behind(data)
        elif self.state == SOCKET and self.socket is not None:
            self.socket.feed(data)
        elif self.state == SKIP:
            self._input += self._body.feed(data)
            self._body.settle()
            if self._body.complete:
                self._ready()
        else:
            self._dropped += len(data)
            if self._dropped > self.desk.limits.linger_bytes:
                self.abort()

    def eof_received(self) -> bool:
        """The client has closed its side. Some (`nc -N`) still read: an answer may go out."""
        if self.state != BUSY:
            if self.socket is not None:
                self.socket.lost()
            return False
        self._eof = True
        self._client_gone()
        self.deadline = monotonic() + self.desk.limits.half_closed_seconds
        self.desk.watch.add(self.descriptor, self, half_closed=True)
        return not self.peer.tls

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, whoever wanted it."""
        del exc
        self.lost = True
        self.deadline = inf
        self.desk.watch.drop(self.descriptor)
        self._client_gone()
        if self.socket is not None:
            self.socket.lost()
        self._wake_writers()
        if self.streaming and self._task is not None:
            self._task.cancel()
        self.desk.forget(self)

    def pause_writing(self) -> None:
        """More waits for the client than it may."""
        size = self.transport.get_write_buffer_size() if self.transport else 0
        self._stuck = (monotonic(), size)

    def resume_writing(self) -> None:
        """It reads."""
        self._stuck = None
        self._wake_writers()

    # --- a head

    def _head(self, data: bytes) -> None:
        if not self._input and not self._fresh:
            self.deadline = monotonic() + self.desk.limits.head_seconds
        self._input = self._input + data if self._input else data
        limits = self.desk.limits
        try:
            # Without a line's end there is nothing new to find.
            size = http1.head_length(self._input) if b"\n" in data else 0
            if not size:
                self._check_growth(limits)
                return
            head, self._input = self._input[:size], self._input[size:]
            self._begin(http1.parse(head), size, limits)
        except http1.BadRequest as error:
            self.refuse(refusal(error))
        except Problem as problem:
            self.refuse(problem)

    def _check_growth(self, limits: Limits) -> None:
        if len(self._input) > limits.target_bytes + 64 and b"\n" not in self._input:
            raise http1.BadRequest(f"the first line is longer than {limits.target_bytes}", 414)
        if len(self._input) > limits.head_bytes:
            raise http1.BadRequest(f"the head is larger than {limits.head_bytes} bytes", 431)

    def _begin(self, parsed: http1.Request, size: int, limits: Limits) -> None:
        if size > limits.head_bytes:
            raise http1.BadRequest(f"the head is larger than {limits.head_bytes} bytes", 431)
        if len(parsed.target) > limits.target_bytes:
            raise http1.BadRequest(f"a target longer than {limits.target_bytes} bytes", 414)
        if len(parsed.fields) > limits.fields:
            raise http1.BadRequest(f"more than {limits.fields} fields", 431)
        headers = targets.headers(parsed.fields)
        length = None if parsed.chunked else parsed.length
        body = Body(length, self) if length != 0 else NO_BODY
        request = Request(
            parsed.method, parsed.target, headers, self.peer, body, version=parsed.version
        )
        expects = headers.get("expect", "").lower()
        if expects not in ("", "100-continue"):
            raise targets.bad("an expectation that is not 100-continue")
        self.request, self._body = request, body
        self._keep = parsed.version == "HTTP/1.1" and not (
            "connection" in headers and "close" in http1.tokens([headers["connection"]])
        )
        if self._input and length != 0:
            self._input = body.feed(self._input)
        # An HTTP/1.0 client does not know what a 100 is.
        asks = bool(expects) and parsed.version == "HTTP/1.1"
        self._continue = asks and not body.complete and not body.held
        self._patience = limits.body_seconds
        self.state = BUSY
        self.deadline = inf
        self._fresh = False
        self.desk.waiting.pop(self, None)
        self._task = asyncio.get_running_loop().create_task(exchange.serve(self, request))
        self.desk.running.add(self._task)

    def _behind(self, data: bytes) -> None:
        """What comes while a request runs: its body, or the next requests, which wait."""
        limits = self.desk.limits
        if not self._body.complete:
            self._patience = min(
                limits.body_seconds, self._patience + len(data) / limits.body_bytes_per_second
            )
            data = self._body.feed(data)
        if data:
            self._input += data
        if self._body.held >= limits.body_held_bytes or len(self._input) > limits.head_bytes:
            self.pause()

    # --- the body's wishes

    def body_wanted(self) -> None:
        """The handler begins to read: a client that waits for a word may go on."""
        if self._continue:
            self._continue = False
            self.write(answers.CONTINUE)

    def body_waits(self, *, waiting: bool) -> None:
        """The clock of a body runs only while it is waited for: a slow handler is not its fault."""
        now = monotonic()
        if waiting:
            self._silent = now
            self.deadline = now + self._patience
        elif not self._eof:
            self._patience = max(0.0, self._patience - (now - self._silent))
            self.deadline = inf

    def body_taken(self) -> None:
        """The handler has taken what there was."""
        if self._paused and len(self._input) <= self.desk.limits.head_bytes:
            self.resume()

    def body_rest(self, rest: bytes) -> None:
        """What came behind the last chunk."""
        self._input = rest + self._input

    # --- the answer's side

    def keeps(self, *, streams: bool) -> bool:
        """Whether there may be a next request, as it looks before the answer's head is sent."""
        if not self._keep or self._eof or self.desk.draining or self._continue:
            # A client that still waits for `100 Continue` may send its body, or may not.
            return False
        body = self._body
        if body.complete or body.failed or streams:
            return body.complete
        if body.missing is None:
            try:
                return body.settle()
            except http1.BadRequest as error:
                self.desk.bad(self.peer, refusal(error))
                return False
        return body.missing <= self.desk.limits.body_skip_bytes

    def write(self, data: bytes) -> None:
        """Send, or keep until it can be sent. Nothing, if the client has gone."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def is_stuck(self) -> bool:
        """Whether the client does not read as fast as it is written to."""
        return self._stuck is not None

    async def drained(self) -> None:
        """Return when it reads again, or has gone."""
        while self._stuck is not None and not self.lost:
            future = asyncio.get_running_loop().create_future()
            self._writers.append(future)
            await future

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for future in writers:
            if not future.done():
                future.set_result(None)

    def done(self, *, keep: bool) -> None:
        """The answer is out: on to the next request, or the end."""
        if self._task is not None:
            self.desk.finished(self._task)
        self._task = self.request = None
        if self.lost or self.state == SHUT:
            return
        if not keep or self._eof:
            self._goodbye(unread=not self._body.complete)
        elif self._body.complete:
            self._ready()
        else:
            self.state = SKIP
            self.deadline = monotonic() + self.desk.limits.body_seconds
            self._body.settle()
            self.resume()

    def _ready(self) -> None:
        if self.desk.draining:
            self.hang_up()
            return
        self.state, self._body = WAIT, NO_BODY
        self.desk.waiting[self] = None
        if self._input:
            data, self._input = self._input, b""
            self._head(data)
        else:
            self.deadline = monotonic() + self.desk.limits.idle_seconds
        # Only now: pipelined requests must not let in another load with each one that is served.
        if self._paused and len(self._input) <= self.desk.limits.head_bytes:
            self.resume()

    def open_socket(self, socket: WebSocket) -> None:
        """From here on the client speaks in frames."""
        self.socket, self.state = socket, SOCKET
        data, self._input = self._input, b""
        self.resume()
        if data:
            socket.feed(data)

    # --- ends

    def refuse(self, problem: Problem) -> None:
        """Answer what never became a request, and close: where the next one begins is not known."""
        self.desk.bad(self.peer, problem)
        self.desk.waiting.pop(self, None)
        response = problem_response(problem, "")
        body = response.body if isinstance(response.body, bytes) else b""
        plan = answers.plan(
            response.status, response.headers, len(body),
            method="GET", version="HTTP/1.1", request_id="", keep=False,
        )  # fmt: skip
        self.write(plan.head + body)
        self._goodbye(unread=True)

    def _goodbye(self, *, unread: bool) -> None:
        """Close, so that the answer arrives.

        Closing with unread input makes the kernel send a reset, which can overtake the answer: what
        still comes is read and dropped for a moment.
        """
        transport = self.transport
        if transport is None or not unread or self._eof:
            self.hang_up()
            return
        self.state = LINGER
        # Whoever comes may have its place.
        self.desk.waiting[self] = None
        self.deadline = monotonic() + self.desk.limits.linger_seconds
        self._input = b""
        if transport.can_write_eof():
            transport.write_eof()
        self.resume()

    def hang_up(self) -> None:
        """Close when everything is sent; a client that does not take it is cut off."""
        self.state = SHUT
        self.deadline = monotonic() + self.desk.limits.send_seconds
        self.desk.waiting[self] = None
        if self.transport is not None:
            self.transport.close()
        elif self.opening is not None:
            self.opening.cancel()

    def abort(self) -> None:
        """Close now."""
        self.state = SHUT
        self.desk.waiting.pop(self, None)
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def stop(self) -> None:
        """The server stops. What runs is cancelled by it, and closes this when it ends."""
        if self.socket is not None:
            self.socket.start_close(frames.GOING_AWAY, "the server stops")
        elif self._task is None:
            self.abort()

    def close_if_idle(self) -> None:
        """Draining: nothing new."""
        if self.state == WAIT:
            self.hang_up()

    # --- time, and the way out

    def tick(self, now: float) -> None:
        """The server's clock."""
        if self.socket is not None and not self.lost:
            self.socket.tick(now, paused=self._paused)
        if self._stuck is not None and self.transport is not None:
            since, before = self._stuck
            size = self.transport.get_write_buffer_size()
            if size < before:
                self._stuck = (now, size)
            elif now - since >= self.desk.limits.send_seconds:
                self.abort()
        if now >= self.deadline:
            self.deadline = inf
            self._expire()

    def _expire(self) -> None:
        if self.state == WAIT and self._input:
            self.refuse(Problem("REQUEST_TIMEOUT", "the head came too slowly", rule="http.head"))
        elif self.state == WAIT:
            self.hang_up()
        elif self.state == BUSY and not self._eof:
            late = Problem("REQUEST_TIMEOUT", "the body came too slowly", rule="http.body")
            self._body.fail(late)
        else:
            self.abort()

    def pause(self) -> None:
        """Read no more; be told if the client goes away all the same."""
        if not self._paused and self.transport is not None and not self.lost:
            self._paused = True
            self.transport.pause_reading()
            self.desk.watch.add(self.descriptor, self)

    def resume(self) -> None:
        """Read again."""
        if self._paused and self.transport is not None and not self.lost:
            self._paused = False
            self.desk.watch.drop(self.descriptor)
            self.transport.resume_reading()

    def hung_up(self) -> None:
        """The client has closed its side, while we do not read.

        Unread bytes may still be there: whoever reads the body will come to its end.
        """
        if self.request is not None and self.state == BUSY:
            self.request.disconnected.set()
            self.desk.watch.add(self.descriptor, self, half_closed=True)
        else:
            self.abort()

    def _client_gone(self) -> None:
        if self.request is not None:
            self.request.disconnected.set()
        self._body.fail(Problem("BAD_REQUEST", GONE, rule="http.body"))
