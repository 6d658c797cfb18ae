"""Handlers: commands, their results, and what is done to them while they run."""

from __future__ import annotations

import asyncio

from .. import limits
from ..backend.interface import Terminal
from ..http.messages import Response, WebSocketResponse, empty
from ..problems import Problem
from ..store_rows import cursor
from . import reading, streams, views
from .call import EVENTS, JSON, Call, reply
from .sandboxes import ITEMS, owner_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..core.jobs import Job

MOST_PART = 4 << 20
# Bytes of JSON for one of output, at worst: a control character is \\u0001.
ESCAPED = 6
# What Accept may say. Who takes anything gets JSON.
MEDIA = {
    JSON: JSON, "application/*": JSON, "*/*": JSON, EVENTS: EVENTS, "text/*": EVENTS,
}  # fmt: skip


async def execute(call: Call) -> Response:
    """POST /v1/sandboxes/{sandboxId}/exec."""
    wanted = wanted_media(call.request.headers.get("accept"))
    wish = reading.execution(call.body)
    job = await call.service.execute(
        call.agent, call.ids["sandboxId"], wish, request_id=call.request.id
    )
    return await answer(call, job, wanted, background=wish.background,
                        cancel=wish.cancel_on_disconnect)  # fmt: skip


async def run(call: Call) -> Response:
    """POST /v1/run."""
    wanted = wanted_media(call.request.headers.get("accept"))
    wish = reading.run(call.body)
    job = await call.service.run(
        call.agent, wish, key=call.headers.get("idempotency-key"),
        request_id=call.request.id,
    )  # fmt: skip
    return await answer(call, job, wanted, background=wish.command.background,
                        cancel=wish.command.cancel_on_disconnect)  # fmt: skip


async def answer(call: Call, job: Job, wanted: str, *, background: bool, cancel: bool) -> Response:
    """The end, or what comes until then, or at once that it runs."""
    place = (("location", f"/v1/execs/{job.id}"),)
    if wanted == EVENTS:
        return Response(
            status=200, headers=(("content-type", EVENTS), *place),
            body=streams.events(call, job, cancel=cancel),
        )  # fmt: skip
    if background:
        return reply(202, views.execution(job.execution), place)
    if not await _ended(call, job):
        if cancel:
            await call.service.kill(
                call.agent, job.id, reason="the client went away", request_id=call.request.id
            )
        # Nobody reads this. The result is kept.
        return reply(202, views.execution(job.execution), place)
    # Its token may have been revoked meanwhile.
    call.identify(call.request)
    return reply(200, await result(call, job), place)


async def _ended(call: Call, job: Job) -> bool:
    """Wait for the end, or for the client to go away: False."""
    gone = asyncio.ensure_future(call.request.disconnected.wait())
    ends = asyncio.ensure_future(job.wait())
    try:
        done, _ = await asyncio.wait((gone, ends), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not ends.done():
            ends.cancel()
    if ends not in done:
        return False
    # What kept the end from being written down: to answer as if it were would be a lie.
    ends.result()
    return True


async def result(call: Call, job: Job) -> dict[str, object]:
    """An execution with as much of its output as a JSON answer carries."""
    most = limits.for_agent(call.parts.limits, call.agent).max_inline_bytes
    written = job.execution.stdout_bytes + job.execution.stderr_bytes or job.journal.end
    await call.hold(ESCAPED * min(written, most))
    # Of the last time that it was started.
    found = await job.journal.collect(most, job.execution.begins)
    return views.result(job.execution, found.stdout, found.stderr, cut=found.cut)


def wanted_media(accept: str | None) -> str:
    """JSON or events, as the client prefers; JSON when it does not care."""
    if accept is None:
        return JSON
    quality = {JSON: 0.0, EVENTS: 0.0}
    for part in accept.split(","):
        media, _, rest = part.partition(";")
        known = MEDIA.get(media.strip().lower())
        if known is not None:
            quality[known] = max(quality[known], _weight(rest))
    if not any(quality.values()):
        raise Problem(
            "NOT_ACCEPTABLE", f"the answer is {JSON} or {EVENTS}", rule="request.accept",
            hint="Accept names neither", field="Accept",
        )  # fmt: skip
    return EVENTS if quality[EVENTS] > quality[JSON] else JSON


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                found = float(value.strip()) if len(value) < 8 else 0.0
            except ValueError:
                return 0.0
            return found if 0.0 <= found <= 1.0 else 0.0
    return 1.0


# --- an execution that is there


async def find(call: Call) -> Response:
    """GET /v1/execs/{execId}."""
    return reply(200, await result(call, call.service.job(call.agent, call.ids["execId"])))


async def listed(call: Call) -> Response:
    """GET /v1/execs, and those of one sandbox."""
    limit = call.query.get("limit", ITEMS)
    sandbox = call.ids.get("sandboxId") or call.query.get("sandbox")
    if "sandboxId" in call.ids:
        # Of a sandbox that is not there: 404, not an empty list.
        call.service.get(call.agent, call.ids["sandboxId"])
    found = call.service.executions(
        call.agent, sandbox=sandbox, owner=owner_of(call), state=call.query.get("state"),
        after=call.query.get("after"), limit=limit + 1,
        newest=call.query.get("order") == "desc",
    )  # fmt: skip
    more = cursor(found[limit - 1].started, found[limit - 1].id) if len(found) > limit else None
    return reply(200, {"items": [views.execution(one) for one in found[:limit]], "next": more})


async def logs(call: Call) -> Response:
    """GET /v1/execs/{execId}/logs: what has come behind an offset, without waiting."""
    job = call.service.job(call.agent, call.ids["execId"])
    limit = call.query.get("limit", 1 << 20)
    since = call.query.get("since", job.execution.begins)
    await call.hold(ESCAPED * min(limit, max(0, job.journal.end - since)))
    found = await job.journal.collect(limit, since, whole=True)
    shown = views.result(job.execution, found.stdout, found.stderr, cut=False)
    names = ("stdout", "stderr", "stdoutBase64", "stderrBase64", "encoding", "truncated", "state",
             "attempts")  # fmt: skip
    part = {name: shown[name] for name in names if name in shown}
    return reply(200, {**part, "next": found.next, "more": found.cut})


async def events(call: Call) -> Response:
    """GET /v1/execs/{execId}/events."""
    job = call.service.job(call.agent, call.ids["execId"])
    offset = streams.offset_of(call.request.headers.get("last-event-id"))
    await job.journal.check(offset)
    return Response(
        status=200, headers=(("content-type", EVENTS),),
        body=streams.events(call, job, offset=offset),
    )  # fmt: skip


async def terminal(call: Call) -> Response | WebSocketResponse:
    """GET /v1/execs/{execId}/ws."""
    job = call.service.job(call.agent, call.ids["execId"])
    if not call.request.upgrade():
        raise Problem(
            "UPGRADE_REQUIRED", "this address speaks WebSocket", rule="request.upgrade",
            headers={"upgrade": "websocket"},
            hint="connect with a WebSocket client, version 13",
        )  # fmt: skip
    offset = call.query.get("since", 0)
    await job.journal.check(offset)
    return WebSocketResponse(streams.terminal(call, job, offset))


async def stdin(call: Call) -> Response:
    """POST /v1/execs/{execId}/stdin."""
    body = call.body
    data = body["data"].encode() if "data" in body else body.get("dataBase64", b"")
    await call.service.stdin(
        call.agent, call.ids["execId"], data, eof=body.get("eof", False),
        request_id=call.request.id,
    )  # fmt: skip
    return empty(204)


async def signal(call: Call) -> Response:
    """POST /v1/execs/{execId}/signal."""
    number = reading.signal_number(call.body["signal"])
    await call.service.signal(call.agent, call.ids["execId"], number, request_id=call.request.id)
    return empty(204)


async def resize(call: Call) -> Response:
    """POST /v1/execs/{execId}/resize."""
    size = Terminal(rows=call.body["rows"], columns=call.body["cols"])
    await call.service.resize(call.agent, call.ids["execId"], size, request_id=call.request.id)
    return empty(204)


async def kill(call: Call) -> Response:
    """POST /v1/execs/{execId}/kill: its end, with its output."""
    await call.service.kill(call.agent, call.ids["execId"], request_id=call.request.id)
    return reply(200, await result(call, call.service.job(call.agent, call.ids["execId"])))


async def forget(call: Call) -> Response:
    """DELETE /v1/execs/{execId}."""
    await call.service.forget(call.agent, call.ids["execId"], request_id=call.request.id)
    return empty(204)
