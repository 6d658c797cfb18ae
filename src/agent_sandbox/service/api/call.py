"""One request on its way to its handler, and what a row of the table of routes holds."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from ...record import Record
from ..http.messages import Response, WebSocketResponse
from ..problems import Problem
from .documents import write
from .schema import Flag, Kind, Number, invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ..audit import AuditTrail
    from ..core.service import Service
    from ..http.messages import Request
    from ..limits import Limits
    from ..metrics import Metrics
    from ..tokens import Tokens
    from ..values import Agent
    from .room import Room
    from .sessions import Session, Sessions

JSON, EVENTS, BYTES, TAR = (
    "application/json", "text/event-stream", "application/octet-stream", "application/x-tar",
)  # fmt: skip
# A JSON body without files: nobody has so much to say.
SMALL = 64 * 1024
# One with files or input in it. Parsing blocks the loop, so larger files go by PUT.
LARGE = 8 << 20
WHOLE = re.compile(r"-?[0-9]{1,15}")
DECIMAL = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?")

Handler = Callable[["Call"], Awaitable[Response | WebSocketResponse]]


class Parts(Record):
    """The assembled service, as handlers see it."""

    service: Service
    tokens: Tokens
    audit: AuditTrail
    limits: Limits
    sessions: Sessions
    metrics: Metrics
    backends: Mapping[str, Any]
    default_backend: str
    templates: tuple[str, ...]
    ready: Callable[[], Awaitable[tuple[bool, str]]]
    # TLS ends in front of us: cookies are `Secure`, too.
    secure: bool = False
    metrics_public: bool = False
    mcp: Callable[[Request, Agent], Awaitable[Response]] | None = None
    connections: Callable[[], int] = lambda: 0


class Param(Record):
    """A parameter of a query, or a header."""

    kind: Kind
    help: str
    needed: bool = False


class Answer(Record):
    """What a status means: the kind of its JSON, or other media types."""

    help: str
    kind: Kind | None = None
    media: tuple[str, ...] = ()


class Route(Record):
    """A row: what may be asked, by whom, and what comes back."""

    method: str
    # Segments in braces are ids: `sandboxId`, `execId`, `tokenName`.
    path: str
    name: str
    handler: Handler
    summary: str
    tag: str
    # What a line of the audit calls it.
    action: str = ""
    # All of them are needed; an admin has every scope.
    scopes: tuple[str, ...] = ()
    # Whether anybody may ask, without an identity.
    public: bool = False
    body: Kind | None = None
    # A body may be left out.
    optional: bool = False
    # The media type of a body that the handler reads as it comes.
    raw: str = ""
    most: int = SMALL
    query: Mapping[str, Param] = {}
    headers: Mapping[str, Param] = {}
    answers: Mapping[int, Answer] = {}
    # Codes of refusals beyond those that every such route may answer with.
    codes: tuple[str, ...] = ()
    websocket: bool = False
    # It is served, but is no part of the document: pages, and other names of a route.
    hidden: bool = False
    # Whether a drain lets it pass.
    always: bool = False
    # Whether it counts as a creation, too.
    makes: bool = False


class Call:
    """A request that has been let in."""

    __slots__ = (
        "agent",
        "body",
        "headers",
        "identify",
        "ids",
        "is_held",
        "parts",
        "query",
        "raw",
        "request",
        "room",
        "route",
        "session",
    )  # fmt: skip

    def __init__(
        self, parts: Parts, request: Request, route: Route, agent: Agent, ids: Mapping[str, str]
    ) -> None:
        self.parts = parts
        self.request = request
        self.route = route
        self.agent = agent
        self.ids = ids
        self.session: Session | None = None
        # Who asks, asked again: for what goes on while a token may be revoked.
        self.identify: Callable[[Request], object] = lambda _: None
        self.room: Room | None = None
        # The memory of its answer is counted already.
        self.is_held = False
        self.query: dict[str, Any] = {}
        self.headers: dict[str, Any] = {}
        self.body: Any = None
        # As it came, for another replica.
        self.raw: bytes | None = None

    @property
    def service(self) -> Service:
        """What acts."""
        return self.parts.service

    async def hold(self, size: int) -> None:
        """Wait until there is memory for an answer that cannot be refused any more."""
        if self.room is not None:
            self.is_held = True
            await self.room.take(self.request, self.agent.name, size)


def reply(status: int, value: object, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """A JSON answer; the dispatcher adds what every answer carries."""
    return Response(status=status, headers=(("content-type", JSON), *headers), body=write(value))


def read_params(
    params: Mapping[str, Param], given: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Parameters of a query by their table; `where` names the place for messages."""
    for name in given:
        if name not in params:
            raise _unknown(name, params, where)
    found = {}
    for name, param in params.items():
        if name in given:
            found[name] = param.kind.read(_value(param.kind, given[name], name), name)
        elif param.needed:
            raise invalid(name, f"is missing in the {where}")
    return found


def _value(kind: Kind, text: str, name: str) -> object:
    """Text of a query as the JSON value that its kind expects."""
    if isinstance(kind, Flag):
        if text not in ("true", "false"):
            raise invalid(name, "must be true or false")
        return text == "true"
    if isinstance(kind, Number):
        if not (WHOLE if kind.whole else DECIMAL).fullmatch(text):
            raise invalid(name, "must be a whole number" if kind.whole else "must be a number")
        return int(text) if kind.whole else float(text)
    return text


# Where logs and histories of others would keep it.
SECRET_NAMES = frozenset(
    "token access-token api-key apikey key auth authorization bearer x-api-key secret".split()
)


def refuse_secrets(query: Mapping[str, str]) -> None:
    """A token in an address is refused before anybody looks whether it is a good one."""
    for name in query:
        if name.lower().replace("_", "-") in SECRET_NAMES:
            raise Problem(
                "BAD_REQUEST", "a token in the query is refused: addresses end up in logs",
                hint="send it as 'Authorization: Bearer …'; and replace it, for it has been shown",
                rule="auth.query", field=name,
            )  # fmt: skip


def _unknown(name: str, params: Mapping[str, Param], where: str) -> Problem:
    known = ", ".join(sorted(params)) or "none"
    shown = name if name.isprintable() and len(name) <= 80 else repr(name[:80])
    return invalid(shown, f"is not a parameter of this {where}", f"parameters are: {known}")
