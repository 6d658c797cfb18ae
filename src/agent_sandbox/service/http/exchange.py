"""One request: the handler is asked, its answer is sent.

Whatever happens, something is answered or the connection ends, and a stream is closed.
"""

from __future__ import annotations

import asyncio

from ..problems import Problem
from . import answers, frames
from .messages import Response, WebSocketResponse, problem_response
from .websocket import WebSocket, WebSocketClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .connection import Connection
    from .messages import Request

UPGRADE = {"upgrade": "websocket", "sec-websocket-version": "13"}


async def serve(connection: Connection, request: Request) -> None:
    """From the handler to the last byte."""
    keep = False
    try:
        answer = await _ask(connection, request)
        if isinstance(answer, Response):
            keep = await _send(connection, request, answer)
        elif (failed := await _websocket(connection, request, answer)) is not None:
            keep = await _send(connection, request, failed)
    except asyncio.CancelledError:
        # A stream whose client has gone is cancelled by its connection: that is no error.
        if not connection.lost:
            connection.abort()
            raise
    except Problem:
        # A stream that gave up: known, but too late for words.
        connection.abort()
    except Exception as error:  # noqa: BLE001 - a stream that broke: all else is answered
        connection.desk.error(request, error)
        # Not closed in order: the client must not take the half for the whole.
        connection.abort()
    finally:
        request.over()
        connection.done(keep=keep)


async def _ask(connection: Connection, request: Request) -> Response | WebSocketResponse:
    try:
        answer: object = await connection.desk.handler(request)
    except Problem as problem:
        return problem_response(problem, request.id)
    except Exception as error:  # noqa: BLE001 - the client learns an id, the log the rest
        return _fault(connection, request, error)
    if isinstance(answer, Response):
        return answer
    if not isinstance(answer, WebSocketResponse):
        return _fault(connection, request, TypeError(f"a handler returned a {type(answer)}"))
    if request.upgrade():
        return answer
    wrong = Problem("UPGRADE_REQUIRED", "this speaks WebSocket only", headers=UPGRADE)
    return problem_response(wrong, request.id)


def _fault(connection: Connection, request: Request, error: BaseException) -> Response:
    connection.desk.error(request, error)
    internal = Problem(
        "INTERNAL", "an error of the service", hint=f"its log has more about {request.id}"
    )
    return problem_response(internal, request.id)


# --- answers


def _plan(connection: Connection, request: Request, answer: Response) -> answers.Plan:
    streams = not isinstance(answer.body, bytes)
    length = len(answer.body) if isinstance(answer.body, bytes) else None
    return answers.plan(
        answer.status, answer.headers, length, method=request.method, version=request.version,
        request_id=request.id, keep=connection.keeps(streams=streams),
    )  # fmt: skip


async def _send(connection: Connection, request: Request, answer: Response) -> bool:
    """Send it; whether a next request may follow."""
    try:
        plan = _plan(connection, request, answer)
    except ValueError as error:
        await _close(connection, request, answer.body)
        answer = _fault(connection, request, error)
        plan = _plan(connection, request, answer)
    body = answer.body
    if isinstance(body, bytes):
        connection.write(plan.head + body if plan.body and body else plan.head)
    else:
        await _stream(connection, request, plan, body)
    if connection.is_stuck():
        await connection.drained()
    return plan.keep


async def _stream(
    connection: Connection, request: Request, plan: answers.Plan, body: AsyncIterator[bytes]
) -> None:
    # From here on there is only the client's interest: without a client it is cancelled.
    connection.streaming = True
    try:
        connection.write(plan.head)
        if plan.body and not connection.lost:
            await _pump(connection, plan, body)
    finally:
        connection.streaming = False
        await _close(connection, request, body)


async def _pump(connection: Connection, plan: answers.Plan, body: AsyncIterator[bytes]) -> None:
    sent = 0
    async for piece in body:
        if connection.lost:
            return
        if not piece:
            continue
        sent += len(piece)
        if plan.length is not None and sent > plan.length:
            raise ValueError("a stream that is longer than its Content-Length")
        connection.write(answers.chunk(piece) if plan.chunked else piece)
        if connection.is_stuck():
            await connection.drained()
    if plan.length is not None and sent != plan.length:
        raise ValueError("a stream that is shorter than its Content-Length")
    if plan.chunked:
        connection.write(answers.LAST_CHUNK)


async def _close(connection: Connection, request: Request, body: object) -> None:
    close = getattr(body, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception as error:  # noqa: BLE001 - the answer is out already
        connection.desk.error(request, error)


# --- WebSockets


async def _websocket(
    connection: Connection, request: Request, answer: WebSocketResponse
) -> Response | None:
    """Run it to its end; a Response if it cannot begin."""
    offered = [
        word.strip() for word in request.headers.get("sec-websocket-protocol", "").split(",")
    ]
    if answer.protocol and answer.protocol not in offered:
        wrong = ValueError("a protocol that the client has not offered")
        return _fault(connection, request, wrong)
    try:
        accept = frames.accept_key(request.headers["sec-websocket-key"])
        head = answers.switching(accept, answer.protocol, answer.headers)
    except ValueError as error:
        return _fault(connection, request, error)
    if connection.lost:
        return None
    socket = WebSocket(connection, connection.desk.limits, answer.protocol)
    connection.write(head)
    connection.open_socket(socket)
    code = frames.INTERNAL
    try:
        await answer.serve(socket)
        code = frames.NORMAL
    except WebSocketClosed:
        code = frames.NORMAL
    except Problem as problem:
        code = frames.POLICY
        await socket.close(code, problem.message)
    except Exception as error:  # noqa: BLE001 - told by the code 1011
        connection.desk.error(request, error)
    finally:
        await socket.close(code)
    return None
