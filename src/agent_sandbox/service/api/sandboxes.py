"""Handlers: sandboxes, from their creation to their end."""

from __future__ import annotations

from ..http.messages import Response, empty
from ..problems import Problem
from ..store_rows import cursor
from . import reading, views
from .call import Call, reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..values import Sandbox

MOST_ITEMS, ITEMS = 500, 100


async def create(call: Call) -> Response:
    """POST /v1/sandboxes."""
    made = await call.service.create(
        call.agent, reading.wish(call.body), key=call.headers.get("idempotency-key"),
        request_id=call.request.id,
    )  # fmt: skip
    return reply(201, views.sandbox(made), (("location", f"/v1/sandboxes/{made.id}"),))


async def find(call: Call) -> Response:
    """GET /v1/sandboxes/{sandboxId}."""
    return reply(200, views.sandbox(call.service.get(call.agent, call.ids["sandboxId"])))


async def listed(call: Call) -> Response:
    """GET /v1/sandboxes."""
    limit = call.query.get("limit", ITEMS)
    found = call.service.sandboxes(
        call.agent, owner=owner_of(call), state=call.query.get("state"),
        metadata=reading.filters(call.query["metadata"]) if call.query.get("metadata") else {},
        after=call.query.get("after"), limit=limit + 1,
        newest=call.query.get("order") == "desc",
    )  # fmt: skip
    shown = [views.sandbox(sandbox) for sandbox in found[:limit]]
    return reply(200, {"items": shown, "next": behind(found, limit)})


async def delete(call: Call) -> Response:
    """DELETE /v1/sandboxes/{sandboxId}."""
    await call.service.delete(call.agent, call.ids["sandboxId"], request_id=call.request.id)
    return empty(204)


async def renew(call: Call) -> Response:
    """POST /v1/sandboxes/{sandboxId}/renew."""
    expires = call.body.get("expiresAt")
    found = await call.service.renew(
        call.agent, call.ids["sandboxId"], timeout=call.body.get("timeout"),
        expires=None if expires is None else reading.moment(expires, "expiresAt"),
        request_id=call.request.id,
    )  # fmt: skip
    return reply(200, views.sandbox(found))


async def pause(call: Call) -> Response:
    """POST /v1/sandboxes/{sandboxId}/pause."""
    found = await call.service.pause(call.agent, call.ids["sandboxId"], request_id=call.request.id)
    return reply(200, views.sandbox(found))


async def resume(call: Call) -> Response:
    """POST /v1/sandboxes/{sandboxId}/resume."""
    found = await call.service.resume(call.agent, call.ids["sandboxId"], request_id=call.request.id)
    return reply(200, views.sandbox(found))


async def set_metadata(call: Call) -> Response:
    """PATCH /v1/sandboxes/{sandboxId}/metadata."""
    found = await call.service.set_metadata(
        call.agent, call.ids["sandboxId"], call.body, request_id=call.request.id
    )
    return reply(200, views.sandbox(found))


async def usage(call: Call) -> Response:
    """GET /v1/sandboxes/{sandboxId}/metrics."""
    return reply(200, views.resources(await call.service.usage(call.agent, call.ids["sandboxId"])))


# --- parts of a list


def owner_of(call: Call) -> str | None:
    """`?owner=`: whose, for an admin; others have but their own."""
    owner: str | None = call.query.get("owner")
    if owner is not None and owner != call.agent.name and not call.agent.is_admin:
        raise Problem(
            "SCOPE_MISSING", "only an admin may ask for what others own", rule="scope.admin",
            hint="leave owner out", field="owner",
        )  # fmt: skip
    return owner


def behind(found: list[Sandbox], limit: int) -> str | None:
    """What the client gives back as `?after=`, if there is more."""
    return cursor(found[limit - 1].created, found[limit - 1].id) if len(found) > limit else None
