"""What goes on for a while: output as Server-Sent Events, and a terminal as a WebSocket."""

from __future__ import annotations

import asyncio
import json
import time

from ..backend.interface import Terminal
from ..http.events import encode
from ..problems import Problem
from . import documents, inputs, reading, views
from .schema import Shape, Text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ..core.jobs import Job
    from ..http.websocket import WebSocket
    from .call import Call

# Proxies cut what is silent for a minute; and a revoked token loses a silent stream with it.
BEAT = 10.0
STREAMS = {1: "stdout", 2: "stderr"}
HEARTBEAT = b": still here\n\n"
# Close codes of a WebSocket.
NORMAL, POLICY = 1000, 1008

# A revoked token gets nothing more of what it has opened after so many seconds; with a database
# that replicas share after about a second more: see `tokens_recent`.
RECHECK = 0.1

_watches: set[asyncio.Future[None]] = set()


class Leave:
    """Whether whoever opened a stream may still have it. Raises UNAUTHENTICATED."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._next = time.monotonic() + RECHECK

    def check(self, *, always: bool = False) -> None:
        """Look again, but not for every piece."""
        now = time.monotonic()
        if always or now >= self._next:
            self._next = now + RECHECK
            self._call.identify(self._call.request)


class Watched:
    """A download that ends when its reader's token does."""

    def __init__(self, body: AsyncIterator[bytes], call: Call) -> None:
        self._body = body
        self._leave = Leave(call)

    def __aiter__(self) -> Watched:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._body)
        # Pieces are large: a look costs little beside them. The database is not asked for each.
        self._leave.check(always=True)
        return piece

    async def aclose(self) -> None:
        """Close it, also when nobody has begun to read."""
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await close()


def offset_of(header: str | None) -> int:
    """Last-Event-ID."""
    if header is None or header == "":
        return 0
    if not (header.isascii() and header.isdigit() and len(header) <= 15):
        raise Problem(
            "INVALID", "Last-Event-ID is not the id of an event", field="Last-Event-ID",
            hint="send the id of the last event that you have seen", rule="request.schema",
        )  # fmt: skip
    return int(header)


async def events(
    call: Call, job: Job, *, offset: int = 0, cancel: bool = False
) -> AsyncIterator[bytes]:
    """start, stdout and stderr as they come, exit; or error. Ids are the offsets behind them.

    retry: it was lost, and is started again. What came before it is not of this time.
    """
    watch = asyncio.ensure_future(_cancel(call, job)) if cancel else None
    if watch is not None:
        # The loop itself would let go of it.
        _watches.add(watch)
        watch.add_done_callback(_watches.discard)
    leave = Leave(call)
    try:
        # Its id says: nothing has been seen yet beyond the offset at which this reader began.
        yield _event("start", views.execution(job.execution), offset)
        turns = Turns(job, offset)
        async for frame in job.journal.follow(offset, beat=BEAT):
            leave.check()
            if turns.come():
                yield _event("retry", views.execution(job.execution), offset)
            if frame.stream in STREAMS:
                offset = frame.offset
                yield _event(STREAMS[frame.stream], views.piece(frame.data), offset)
            else:
                yield HEARTBEAT
        found = await job.wait()
        leave.check(always=True)
        if turns.come():
            yield _event("retry", views.execution(found), offset)
        yield _event("exit", views.execution(found), offset)
    except Problem as problem:
        yield _event("error", problem.body(call.request.id), offset)
    finally:
        # The watch stays if the client has gone: then it has something to do.
        if watch is not None and not call.request.disconnected.is_set():
            watch.cancel()


class Turns:
    """Where in the output of a command its last start begins, for one reader."""

    def __init__(self, job: Job, offset: int) -> None:
        self._job = job
        # Who begins behind it sees nothing of an earlier time. Who begins there may not have been
        # told yet; twice does no harm, since nothing of the new time has been seen.
        self._seen = job.execution.attempts if offset > job.execution.begins else 1

    def come(self) -> bool:
        """Whether what was just read is the first of another start: the journal drops the rest."""
        told, self._seen = self._seen, self._job.execution.attempts
        return told != self._seen


async def _cancel(call: Call, job: Job) -> None:
    """End the command when its client goes away. A silent stream would not notice."""
    await call.request.disconnected.wait()
    if not job.ended:
        await call.service.kill(
            call.agent, job.id, reason="the client went away", request_id=call.request.id
        )


def _event(name: str, value: object, offset: int) -> bytes:
    return encode(name, documents.write(value).decode(), str(offset))


# --- a terminal


ORDER = Shape(
    {"type": Text(choices=("resize", "signal", "eof", "input")),
     "rows": inputs.RESIZE.fields["rows"], "cols": inputs.RESIZE.fields["cols"],
     "signal": inputs.SIGNAL.fields["signal"], "data": inputs.STDIN.fields["data"]},
    needed=("type",),
)  # fmt: skip
NEEDED = {"resize": ("rows", "cols"), "signal": ("signal",), "eof": (), "input": ("data",)}


def terminal(call: Call, job: Job, offset: int) -> Callable[[WebSocket], Awaitable[None]]:
    """Binary messages are bytes of the terminal both ways; text is JSON."""

    async def serve(ws: WebSocket) -> None:
        tasks = (
            asyncio.ensure_future(_outward(ws, Leave(call), job, offset)),
            asyncio.ensure_future(_inward(ws, call, job)),
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await _part(ws, done.pop().exception())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return serve


async def _part(ws: WebSocket, error: BaseException | None) -> None:
    """The end: of the command, of the client, of its permission; or a fault, which is ours."""
    if isinstance(error, Problem):
        await ws.close(POLICY, error.code)
    elif error is None:
        await ws.close(NORMAL, "")
    elif not isinstance(error, ConnectionError):
        raise error


async def _outward(ws: WebSocket, leave: Leave, job: Job, offset: int) -> None:
    """Output as binary messages, then how it ended."""
    turns = Turns(job, offset)
    async for frame in job.journal.follow(offset, beat=BEAT):
        leave.check()
        if turns.come():
            await ws.send(json.dumps({"type": "retry", **views.execution(job.execution)}))
        if frame.stream in STREAMS:
            offset = frame.offset
            await ws.send(frame.data)
    found = await job.wait()
    leave.check(always=True)
    if turns.come():
        await ws.send(json.dumps({"type": "retry", **views.execution(found)}))
    await ws.send(json.dumps({"type": "exit", **views.execution(found)}))


async def _inward(ws: WebSocket, call: Call, job: Job) -> None:
    """Input and orders, until the client leaves. What is wrong is told, and nothing is done."""
    leave = Leave(call)
    while (message := await ws.receive()) is not None:
        leave.check(always=True)
        try:
            if isinstance(message, bytes):
                await call.service.stdin(call.agent, job.id, message, request_id=call.request.id)
            else:
                await _order(call, job, message)
        except Problem as problem:
            await ws.send(json.dumps({"type": "error", **problem.body(call.request.id)}))


async def _order(call: Call, job: Job, message: str) -> None:
    order = ORDER.read(documents.read(message.encode("utf-8", "surrogatepass")), "")
    kind = order["type"]
    for name in NEEDED[kind]:
        if name not in order:
            raise Problem("INVALID", f"{name}: is missing", field=name, rule="request.schema")
    own = {"request_id": call.request.id}
    if kind == "resize":
        size = Terminal(rows=order["rows"], columns=order["cols"])
        await call.service.resize(call.agent, job.id, size, **own)
    elif kind == "signal":
        number = reading.signal_number(order["signal"])
        await call.service.signal(call.agent, job.id, number, **own)
    else:
        data = order.get("data", "").encode()
        await call.service.stdin(call.agent, job.id, data, eof=kind == "eof", **own)
