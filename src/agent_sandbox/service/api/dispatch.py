"""From a request to its handler and back: one door for everything.

The order matters. Who is meant (Host), where it comes from (Origin), what is asked (route), who
asks, whether it may, how often; only then is anything of the body read.
"""

from __future__ import annotations

import asyncio
import time
import traceback

from .. import limits, quotas
from ..core.queue import draining
from ..http.messages import Response, WebSocketResponse
from ..problems import Problem
from ..replicas.forwarding import unavailable
from ..replicas.interface import Elsewhere
from . import documents, origins
from .call import EVENTS, JSON, Call, read_params, refuse_secrets, reply
from .entrance import NOBODY, Entrance
from .room import STRANGERS, Room
from .routes import find
from .streams import Watched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..http.messages import Peer, Request
    from ..logs import Log
    from ..quotas import Verdict
    from ..replicas.gateway import Gateway
    from ..replicas.interface import AnyBuckets
    from ..replicas.interface import Peer as Replica
    from ..values import Agent
    from .call import Parts, Route
    from .denials import Denials
    from .origins import Names

# What `curl -d` says, and what those say who say nothing: JSON all the same.
UNSAID = ("", "application/x-www-form-urlencoded")
# Pages of ours get their own policy; nothing else of ours is a page.
HEADERS = (
    ("cache-control", "no-store"), ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"), ("x-frame-options", "DENY"),
    ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
    ("cross-origin-resource-policy", "same-origin"), ("cross-origin-opener-policy", "same-origin"),
)  # fmt: skip
READS = ("GET", "HEAD")
# How often a request may find that its replica is gone.
LOOKS = 3
# They answer at once, and everybody needs to know.
MONITORS = ("/healthz", "/readyz")


class Trace:
    """What is known of a request so far, for its line in the log."""

    __slots__ = ("action", "agent", "label", "started", "target", "verdict")

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.agent: Agent | None = None
        self.label = "unmatched"
        self.action = "http.unknown"
        self.target = ""
        self.verdict: Verdict | None = None


class Dispatcher:
    """The handler of the HTTP server."""

    def __init__(
        self, parts: Parts, names: Names, entrance: Entrance, denials: Denials, log: Log, *,
        gateway: Gateway | None = None, buckets: AnyBuckets | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.names = names
        self._entrance = entrance
        self._denials = denials
        self._log = log
        self._gateway = gateway
        self._buckets = buckets or quotas.Buckets()
        self._room = Room()

    async def handle(self, request: Request) -> Response | WebSocketResponse:
        """Answer a request, whatever it is."""
        trace = Trace()
        answer: Response | WebSocketResponse
        code = ""
        try:
            answer = await self._serve(request, trace)
        except Problem as problem:
            code = problem.code
            answer = self._refuse(request, trace, problem)
        except asyncio.CancelledError:
            self._done(request, trace, 499, "")
            raise
        except Exception as error:  # noqa: BLE001 - nothing unexpected may reach a client
            code = "INTERNAL"
            answer = self._failed(request, error)
        status = answer.status if isinstance(answer, Response) else 101
        self._done(request, trace, status, code)
        return self._dressed(answer, trace)

    def malformed(self, peer: Peer, problem: Problem) -> None:
        """What never became a request."""
        self.parts.metrics.denied(problem.code)
        self._denials.malformed(peer, problem)

    def failed(self, request: Request, error: BaseException) -> None:
        """A fault that the HTTP server saw: in a stream that had begun."""
        self._failed(request, error)

    # --- the way in

    async def _serve(self, request: Request, trace: Trace) -> Response | WebSocketResponse:
        claim = self._gateway.receive(request) if self._gateway is not None else None
        # One that is here for its login alone has not been counted, nor sent to its sandbox.
        forwarded = claim is not None and not claim.session
        if claim is None:
            self._check_sender(request)
        route, ids = self._route(request)
        trace.label, trace.action = route.path, route.action
        trace.target = ids.get("sandboxId") or ids.get("execId") or ""
        call = Call(self.parts, request, route, NOBODY, ids)
        refuse_secrets(request.query)
        if self.parts.service.draining and not route.always:
            raise draining()
        if self._gateway is not None and not route.always:
            # Before who asks is looked up: without a lease not even that may be asked.
            self._gateway.check()
        if claim is None and (answer := await self._from_login(call)) is not None:
            return answer
        self._admit(call, trace, forwarded=forwarded)
        if self._gateway is not None and not route.always:
            # That may have taken its time.
            self._gateway.check()
            answer = await self._from_home(call, forwarded=forwarded)
            if answer is not None:
                return answer
        # Pages have parameters of their own, which are none of ours.
        if not route.hidden:
            call.query = read_params(route.query, request.query, "query")
        call.headers = _headers(route, request)
        await _read_body(call)
        for _ in range(LOOKS):
            try:
                return self._bounded(call, await route.handler(call))
            except Elsewhere as other:
                if other.body is not None:
                    call.raw = other.body
                answer = await self._passed_on(call, other.peer, forwarded=forwarded)
                if answer is not None:
                    return answer
        raise unavailable()

    # --- to the replica that has it

    async def _from_login(self, call: Call) -> Response | WebSocketResponse | None:
        """The answer of the replica that has the login of a cookie; None: that is none, or ours."""
        if self._gateway is None or call.route.public:
            return None
        home = self._entrance.session_home(call.request)
        if not home:
            return None
        # Nobody knows yet who that is.
        self._room.enter(call.request, f"@{call.request.peer.address}", STRANGERS)
        most = self.parts.limits.max_upload_bytes if call.route.raw else call.route.most
        return await self._gateway.ask_login(call.request, home, most)

    async def _from_home(
        self, call: Call, *, forwarded: bool
    ) -> Response | WebSocketResponse | None:
        """The answer of the replica that has what the path names; None: we answer ourselves.

        Before anything of the body is read: it goes through as it comes.
        """
        ids = call.ids
        for _ in range(LOOKS):
            peer = call.service.elsewhere(
                call.agent, ids.get("sandboxId", ""), ids.get("execId", "")
            )
            if peer is None:
                return None
            answer = await self._passed_on(call, peer, forwarded=forwarded)
            if answer is not None:
                return answer
        raise unavailable()

    async def _passed_on(
        self, call: Call, peer: Replica, *, forwarded: bool
    ) -> Response | WebSocketResponse | None:
        """Its answer; None: it is gone, and whoever asks has to look again."""
        if forwarded or self._gateway is None:
            # It was sent to us as its home. It has moved on; it is never sent on a second time.
            raise unavailable()
        route, own = call.route, limits.for_agent(self.parts.limits, call.agent)
        return await self._gateway.pass_on(
            call.request, peer, most=own.max_upload_bytes if route.raw else route.most,
            token=call.session.token if call.session is not None else "",
            owner=call.request.peer.unix and call.agent.key.startswith("uid:"), body=call.raw,
        )  # fmt: skip

    def _check_sender(self, request: Request) -> None:
        """On a unix socket there is no browser and no name."""
        if request.peer.unix:
            return
        host = request.headers.get("host")
        if host is None:
            raise Problem("BAD_REQUEST", "a Host header is needed", rule="host.syntax")
        named = origins.check_host(self.names, host)
        origins.check_origin(self.names, named, request.headers, tls=request.peer.tls)

    def _route(self, request: Request) -> tuple[Route, dict[str, str]]:
        found = find(request.path)
        if found is None:
            raise Problem(
                "NOT_FOUND", "there is nothing at this path", rule="route.known",
                hint="GET /openapi.json lists what there is",
            )  # fmt: skip
        methods, ids = found
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
            raise Problem(
                "METHOD_NOT_ALLOWED", f"this path takes {', '.join(allowed)}",
                rule="route.method", headers={"allow": ", ".join(allowed)},
            )  # fmt: skip
        return route, ids

    def _admit(self, call: Call, trace: Trace, *, forwarded: bool) -> None:
        """Who it is, whether it may, and not too often."""
        route, now = call.route, time.monotonic()
        # No rate for who is not known: behind a proxy all have one address, and one of them must
        # not keep the others, or monitors, out. Refusing costs as little as counting would.
        if route.public or (route.path == "/metrics" and self.parts.metrics_public):
            if route.path not in MONITORS:
                peer = call.request.peer
                self._room.enter(call.request, f"@{peer.uid or peer.address}", STRANGERS)
            return
        call.agent, call.session = self._entrance.identify(call.request)
        call.identify = self._entrance.again
        trace.agent = call.agent
        call.room = self._room
        bounds = limits.for_agent(self.parts.limits, call.agent)
        self._room.enter(call.request, call.agent.name, bounds.max_open_requests_per_agent)
        rates = quotas.rates(bounds)
        if not forwarded:
            trace.verdict = self._buckets.check(call.agent.name, rates[quotas.REQUESTS], now)
        for scope in route.scopes:
            limits.check_scope(call.agent, scope)
        if route.makes and not forwarded:
            self._buckets.check((call.agent.name, "makes"), rates[quotas.CREATES], now)

    # --- the way out

    def _bounded(
        self, call: Call, answer: Response | WebSocketResponse
    ) -> Response | WebSocketResponse:
        """Answers wait in memory for who reads slowly; what has acted has asked for room before.

        And a download does not outlive its token. Events see to that themselves.
        """
        if not isinstance(answer, Response) or call.room is None:
            return answer
        if not isinstance(answer.body, bytes):
            if ("content-type", EVENTS) in answer.headers:
                return answer
            return answer.replace(body=Watched(answer.body, call))
        if not call.is_held and call.request.method in READS:
            call.room.hold(call.request, call.agent.name, len(answer.body))
        return answer

    def _refuse(self, request: Request, trace: Trace, problem: Problem) -> Response:
        self.parts.metrics.denied(problem.code)
        headers = list(problem.headers.items())
        if problem.retry_after is not None:
            headers.append(("retry-after", str(max(1, -int(-problem.retry_after // 1)))))
        if problem.status == 401:
            headers.append(("www-authenticate", "Bearer"))
        try:
            self._denials.note(request, trace.agent, trace.action, trace.target, problem)
        except Exception as error:  # noqa: BLE001 - the refusal stands, whatever the audit does
            # Without a lease no line may be written: that is no fault.
            if not (isinstance(error, Problem) and error.code == "REPLICA_UNAVAILABLE"):
                self._failed(request, error)
        return reply(problem.status, problem.body(request.id), headers)

    def _failed(self, request: Request, error: BaseException) -> Response:
        shown = "".join(traceback.format_exception(error))
        self._log.write("error", "fault", requestId=request.id, method=request.method,
                        path=request.path, traceback=shown)  # fmt: skip
        problem = Problem(
            "INTERNAL", "something went wrong in the service", rule="service.fault",
            hint="its log has more under this requestId",
        )  # fmt: skip
        return reply(500, problem.body(request.id))

    def _dressed(
        self, answer: Response | WebSocketResponse, trace: Trace
    ) -> Response | WebSocketResponse:
        if isinstance(answer, WebSocketResponse):
            return answer
        own = {name for name, _ in answer.headers}
        headers = [*answer.headers, *(pair for pair in HEADERS if pair[0] not in own)]
        if trace.verdict is not None and "x-ratelimit-limit" not in {n.lower() for n in own}:
            headers += trace.verdict.headers()
        return Response(status=answer.status, headers=tuple(headers), body=answer.body)

    def _done(self, request: Request, trace: Trace, status: int, code: str) -> None:
        seconds = time.perf_counter() - trace.started
        self.parts.metrics.requested(request.method, trace.label, status, seconds)
        # The query is not logged: it has paths inside, and whatever a client puts there.
        self._log.request(
            request, agent=trace.agent.name if trace.agent else "", route=trace.label,
            status=status, seconds=seconds, code=code,
        )  # fmt: skip


def _headers(route: Route, request: Request) -> dict[str, Any]:
    """Headers of the table by lower-case name; all others are no business of a handler."""
    found = {}
    for name, param in route.headers.items():
        key = name.lower()
        if key in request.headers:
            found[key] = param.kind.read(request.headers[key], name)
    return found


def _has_token(request: Request) -> bool:
    return "authorization" in request.headers or "x-api-key" in request.headers


async def _read_body(call: Call) -> None:
    route, request = call.route, call.request
    if route.raw:
        return
    if route.body is None:
        # A GET with a body means something to some parsers and nothing to others.
        if await request.body(1024):
            raise Problem("BAD_REQUEST", "this request takes no body", rule="request.body")
        return
    if call.room is not None:
        length = route.most if request.length is None else min(request.length, route.most)
        call.room.hold(request, call.agent.name, length)
    raw = call.raw = await request.body(route.most)
    if not raw and route.optional:
        call.body = {}
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not (kind in UNSAID and _has_token(request)):
        # A form of another site cannot send this type without asking first, nor a token.
        raise Problem(
            "UNSUPPORTED_MEDIA_TYPE", "the body must be application/json",
            hint="send 'Content-Type: application/json'", rule="request.media",
            field="Content-Type",
        )  # fmt: skip
    if not raw:
        raise Problem("BAD_REQUEST", "the body is empty", rule="request.json",
                      hint="send one JSON object")  # fmt: skip
    call.body = route.body.read(documents.read(raw), "")
