"""Handlers: who asks, what is allowed, and what has happened."""

from __future__ import annotations

import asyncio

from .. import limits
from ..audit.read import Filter, newest
from ..problems import Problem
from ..values import SCOPES
from . import reading, views
from .call import Call, reply
from .inputs import EXEC_FIELDS, SANDBOX_FIELDS, SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..http.messages import Response


_readers = asyncio.Semaphore(2)


async def whoami(call: Call) -> Response:
    """GET /v1/whoami."""
    found = call.service.whoami(call.agent)
    return reply(200, views.identity(found, limits.describe(found.limits)))


async def policy(call: Call) -> Response:
    """GET /v1/policy: what holds for whoever asks."""
    parts = call.parts
    own = limits.for_agent(parts.limits, call.agent)
    templates = [
        name for name in parts.templates
        if call.agent.templates is None or name in call.agent.templates
    ]  # fmt: skip
    return reply(200, {
        "limits": limits.describe(own), "templates": templates, "scopes": list(SCOPES),
        "signals": list(SIGNALS),
        "backends": [
            views.backend(name, support, default=name == parts.default_backend)
            for name, support in parts.service.supports.items()
        ],
    })  # fmt: skip


async def check(call: Call) -> Response:
    """POST /v1/policy/check: a dry run. With a command, `timeout` is the command's, as in run."""
    body = dict(call.body)
    has_command = "command" in body or "cmd" in body
    if has_command:
        wish = reading.run(body).sandbox
    else:
        for name in EXEC_FIELDS.keys() - SANDBOX_FIELDS.keys():
            if name in body:
                raise reading.meaningless(name)
        wish = reading.wish(body)
    found = views.outcome(await call.service.policy_check(call.agent, wish))
    if has_command:
        _judge_command(call, body, found)
    return reply(200, found)


def _judge_command(call: Call, body: dict[str, object], found: dict[str, object]) -> None:
    own = limits.for_agent(call.parts.limits, call.agent)
    given = body.get("timeout")
    try:
        limits.check_timeout(own, given if isinstance(given, float) else None)
    except Problem as problem:
        refusals = found["refusals"]
        assert isinstance(refusals, list)  # noqa: S101 - made by `views.outcome`
        refusals.append({
            "code": problem.code, "rule": problem.rule, "reason": problem.message,
            "hint": problem.hint, "field": problem.field,
        })  # fmt: skip
        found["allowed"], found["effective"] = False, None


async def audit(call: Call) -> Response:
    """GET /v1/audit: newest first; `next` is the number of the oldest line in this part."""
    query = call.query
    limit = query.get("limit", 100)
    since, until = (
        reading.moment(query[name], name) if name in query else None for name in ("since", "until")
    )
    wanted = Filter(
        agent=query.get("agent", ""), action=query.get("action", ""),
        decision=query.get("decision", ""), target=query.get("target", ""),
        before=query.get("after"), since=since, until=until,
    )  # fmt: skip
    # It may read far back: off the loop, and not everybody at once.
    async with _readers:
        found = await asyncio.to_thread(newest, call.parts.audit, wanted, limit + 1)
    more = str(found[limit - 1]["seq"]) if len(found) > limit else None
    return reply(200, {"items": found[:limit], "next": more})
