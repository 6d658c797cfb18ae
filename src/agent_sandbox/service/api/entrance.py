"""Who is at the door: a token, the other end of a unix socket, or a session of the dashboard."""

from __future__ import annotations

from ..problems import Problem
from ..tokens_recent import Recent
from ..values import SCOPES, Agent
from . import sessions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..http.messages import Request
    from ..tokens import Tokens
    from .sessions import Session, Sessions

OWNER = "owner"
NOBODY = Agent(name="", key="", scopes=frozenset())


def unknown(message: str, rule: str, hint: str = "") -> Problem:
    """401. The words are the same for what never was, what is over and what is forged."""
    return Problem("UNAUTHENTICATED", message, rule=rule, hint=hint)


class Entrance:
    """Tells who asks."""

    def __init__(
        self, tokens: Tokens, logins: Sessions, *, owner: int, secure: bool,
        recent: Recent | None = None,
    ) -> None:  # fmt: skip
        self._tokens = recent or Recent(tokens)
        self._sessions = logins
        self._owner = owner
        self._secure = secure

    def identify(self, request: Request) -> tuple[Agent, Session | None]:
        """The agent, and its session if a cookie said so."""
        return self._identify(request, fresh=True)

    def again(self, request: Request) -> tuple[Agent, Session | None]:
        """The same for what stays open, and asks often: as it was about a second ago."""
        return self._identify(request, fresh=False)

    def _identify(self, request: Request, *, fresh: bool) -> tuple[Agent, Session | None]:
        token = given_token(request)
        peer = request.peer
        if token is not None:
            agent = self._tokens.check(token, fresh=fresh)
            if agent is None:
                raise _bad_token()
            return agent.replace(address=peer.address), None
        if peer.unix:
            # A number of another machine's user means nothing here, but who has a token by it.
            known = peer.uid in (self._owner, 0) if peer.owner is None else peer.owner
            return self._by_uid(peer.uid, owner=known, fresh=fresh), None
        return self._by_cookie(request, fresh=fresh)

    def _by_uid(self, uid: int | None, *, owner: bool, fresh: bool) -> Agent:
        """The kernel says who is at the other end; its owner and root need no token."""
        if uid is not None and owner:
            return Agent(
                name=OWNER, key=f"uid:{uid}", scopes=frozenset(SCOPES), uid=uid, address="unix"
            )
        agent = self._tokens.by_uid(uid, fresh=fresh) if uid is not None else None
        if agent is None:
            raise unknown(
                "this user has no access", "auth.uid",
                "send a token, or have one made with --uid",
            )  # fmt: skip
        return agent.replace(address="unix")

    def session_home(self, request: Request) -> str:
        """Which other replica has the login of a cookie, as that says; "": nobody is asked."""
        headers = request.headers
        if request.peer.unix or "authorization" in headers or "x-api-key" in headers:
            return ""
        secure = self._secure or request.peer.tls
        cookie = sessions.cookie_of(headers.get("cookie", ""), secure=secure) or ""
        home = sessions.home_of(cookie)
        return home if home != self._sessions.home else ""

    def _by_cookie(self, request: Request, *, fresh: bool) -> tuple[Agent, Session]:
        secure = self._secure or request.peer.tls
        cookie = sessions.cookie_of(request.headers.get("cookie", ""), secure=secure)
        if cookie is None:
            raise unknown(
                "a token is needed", "auth.missing",
                "send 'Authorization: Bearer TOKEN'; 'sandboxctl token new NAME' makes one",
            )  # fmt: skip
        session = self._sessions.find(cookie)
        agent = self._tokens.check(session.token, fresh=fresh) if session else None
        if session is None or agent is None:
            if session is not None:
                self._sessions.close(session)
            raise unknown("the session is over", "auth.session", "log in again")
        # A browser sends the cookie along with whatever any page asks for; only our own page
        # can know the second value. To read needs it as well: cookies know no ports, so whoever
        # serves a page at another port of this host is sent ours.
        given = request.headers.get("x-csrf-token", "")
        if not sessions.same(given, session.csrf):
            raise Problem(
                "CSRF", "a request with a cookie needs X-CSRF-Token", rule="auth.csrf",
                hint="its value is csrfToken in the answer of POST /v1/session",
            )  # fmt: skip
        if request.headers.get("upgrade") and "origin" not in request.headers:
            raise Problem(
                "CSRF", "a WebSocket with a cookie needs an Origin", rule="auth.csrf",
                hint="use a token, or a browser",
            )  # fmt: skip
        return agent.replace(address=request.peer.address), session


def given_token(request: Request) -> str | None:
    """The token of a request, by either header; None: neither is there."""
    bearer, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    if bearer is None:
        return key
    scheme, _, token = bearer.partition(" ")
    if scheme.lower() != "bearer":
        raise unknown("Authorization must be 'Bearer TOKEN'", "auth.scheme")
    token = token.strip(" ")
    if key is not None and not sessions.same(key, token):
        raise Problem(
            "BAD_REQUEST", "Authorization and X-API-Key are two tokens", rule="auth.twice",
            hint="send one of them",
        )  # fmt: skip
    return token


def _bad_token() -> Problem:
    return unknown(
        "this token is not known, or not any more", "auth.token",
        "'sandboxctl token list' shows which are",
    )  # fmt: skip
