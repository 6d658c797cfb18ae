"""Handlers: tokens of agents, for admins; and logins of the dashboard."""

from __future__ import annotations

import time

from ...errors import SandboxError
from .. import limits
from ..http.messages import Response, empty
from ..problems import Problem
from . import sessions, views
from .call import Call, reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..tokens import TokenInfo


def shown(found: TokenInfo) -> dict[str, object]:
    """A token, but for its secret."""
    return {
        "id": found.key, "name": found.name, "scopes": list(found.scopes),
        "images": None if found.images is None else list(found.images),
        "templates": None if found.templates is None else list(found.templates),
        "quotas": {name.upper(): value for name, value in found.quotas.items()},
        "createdAt": views.when(found.created), "expiresAt": views.when(found.expires or 0),
        "revokedAt": views.when(found.revoked or 0), "uid": found.uid, "source": found.source,
        "state": found.state(time.time()),
    }  # fmt: skip


async def tokens(call: Call) -> Response:
    """GET /v1/tokens."""
    return reply(200, {"items": [shown(found) for found in call.parts.tokens.list()]})


async def new_token(call: Call) -> Response:
    """POST /v1/tokens: the token itself is in this answer and nowhere else."""
    body = call.body
    try:
        quotas = dict(
            limits.quota(name, _plain(value)) for name, value in body.get("quotas", {}).items()
        )
        # A default above its maximum is refused now, not with the agent's first request.
        limits.for_agent(call.parts.limits, call.agent.replace(quotas=quotas))
        expires = time.time() + body["expiresIn"] if "expiresIn" in body else None
        token, found = call.parts.tokens.new(
            body["name"], expires=expires, uid=body.get("uid"), quotas=quotas,
            images=body.get("images"), templates=body.get("templates"),
            **({"scopes": body["scopes"]} if "scopes" in body else {}),
        )  # fmt: skip
    except Problem:
        raise
    except SandboxError as error:
        raise refused(error) from error
    _note(call, "token.new", found)
    return reply(201, {**shown(found), "token": token})


def _plain(value: str | float) -> str:
    """A quota as the command line has it: 3.0 is 3."""
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


async def revoke_token(call: Call) -> Response:
    """DELETE /v1/tokens/{tokenName}: by name or id."""
    try:
        ended = call.parts.tokens.revoke(call.ids["tokenName"])
    except SandboxError as error:
        raise refused(error) from error
    for found in ended:
        _note(call, "token.revoke", found)
    return empty(204)


async def rotate_token(call: Call) -> Response:
    """POST /v1/tokens/{tokenName}/rotate."""
    try:
        token, found = call.parts.tokens.rotate(call.ids["tokenName"], call.body.get("grace", 0.0))
    except SandboxError as error:
        raise refused(error) from error
    _note(call, "token.rotate", found)
    return reply(200, {**shown(found), "token": token})


# What the token's own errors are over HTTP.
CODES = {"token-taken": "CONFLICT", "token-unknown": "NOT_FOUND", "token-from-file": "CONFLICT"}


def refused(error: SandboxError) -> Problem:
    """An error of the library as a refusal."""
    code = CODES.get(error.code, "INVALID")
    return Problem(code, error.message, hint=error.hint, rule=f"token.{error.code}")


def _note(call: Call, action: str, found: TokenInfo) -> None:
    call.parts.audit.write(
        call.agent, action, target={"type": "token", "id": found.key, "name": found.name},
        request={"scopes": list(found.scopes)}, request_id=call.request.id,
    )  # fmt: skip


# --- sessions


async def login(call: Call) -> Response:
    """POST /v1/session: a token for a cookie."""
    token = call.body["token"]
    agent = call.parts.tokens.check(token)
    if agent is None:
        raise Problem(
            "UNAUTHENTICATED", "this token is not known, or not any more", rule="auth.token",
            hint="sandboxctl token list shows which are", field="token",
        )  # fmt: skip
    call.agent = agent.replace(address=call.request.peer.address)
    cookie, session = call.parts.sessions.open(token, agent.name)
    call.session = session
    call.parts.audit.write(call.agent, "session.open", request_id=call.request.id)
    header = sessions.set_cookie(cookie, secure=call.parts.secure or call.request.peer.tls)
    return reply(200, _session(call), (("set-cookie", header),))


async def session(call: Call) -> Response:
    """GET /v1/session."""
    return reply(200, _session(call))


async def logout(call: Call) -> Response:
    """DELETE /v1/session."""
    if call.session is not None:
        call.parts.sessions.close(call.session)
        call.parts.audit.write(call.agent, "session.close", request_id=call.request.id)
    header = sessions.set_cookie("", secure=call.parts.secure or call.request.peer.tls)
    return empty(204, (("set-cookie", header),))


def _session(call: Call) -> dict[str, object]:
    found = call.session
    return {
        "agent": call.agent.name, "scopes": sorted(call.agent.scopes),
        "admin": call.agent.is_admin, "csrfToken": found.csrf if found else None,
        "expiresAt": views.when(found.expires) if found else None,
    }  # fmt: skip
