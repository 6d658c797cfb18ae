"""Sessions of the dashboard: a cookie for a token, so that no script holds the token.

They live in memory and end with the process. The token is checked again with every request, so
a revoked one is dead at once here, too.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Under TLS the prefix makes the browser insist on Secure, Path=/ and no Domain.
NAME, SECURE_NAME = "sandbox_session", "__Host-sandbox_session"
LIFETIME, IDLE = 12 * 3600.0, 2 * 3600.0
MOST_PER_AGENT, MOST = 16, 1024


class Session(Record):
    """A login."""

    # SHA-256 of the cookie: a look into our memory by a timing of lookups tells nothing of it.
    digest: bytes
    token: str
    agent: str
    csrf: str
    expires: float

    def __repr__(self) -> str:
        # Secrets of it must not get into a message by a slip.
        return f"Session({self.agent!r})"


class Sessions:
    """The sessions of this process."""

    def __init__(self, clock: Callable[[], float], home: str = "") -> None:
        """`home`: the replica whose process this is; cookies say so, and others can ask it."""
        self._clock = clock
        self.home = home
        self._held: dict[bytes, Session] = {}
        self._used: dict[bytes, float] = {}

    def open(self, token: str, agent: str) -> tuple[str, Session]:
        """A new one: the cookie's value, and what it stands for."""
        self._sweep()
        own = [s for s in self._held.values() if s.agent == agent]
        if len(own) >= MOST_PER_AGENT:
            self._drop(own[0].digest)
        while len(self._held) >= MOST:
            self._drop(next(iter(self._held)))
        cookie = secrets.token_urlsafe(32)
        if self.home:
            cookie = f"{self.home}.{cookie}"
        session = Session(
            digest=_digest(cookie), token=token, agent=agent, csrf=secrets.token_urlsafe(24),
            expires=self._clock() + LIFETIME,
        )  # fmt: skip
        self._held[session.digest] = session
        self._used[session.digest] = self._clock()
        return cookie, session

    def find(self, cookie: str) -> Session | None:
        """The session of a cookie, unless it is over."""
        digest = _digest(cookie)
        session = self._held.get(digest)
        now = self._clock()
        if session is None or self._is_over(session, now):
            self._drop(digest)
            return None
        self._used[digest] = now
        return session

    def close(self, session: Session) -> None:
        """End one."""
        self._drop(session.digest)

    def _is_over(self, session: Session, now: float) -> bool:
        return now >= session.expires or now >= self._used[session.digest] + IDLE

    def _sweep(self) -> None:
        now = self._clock()
        for session in list(self._held.values()):
            if self._is_over(session, now):
                self._drop(session.digest)

    def _drop(self, digest: bytes) -> None:
        self._held.pop(digest, None)
        self._used.pop(digest, None)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()


def same(given: str, wanted: str) -> bool:
    """Whether two secrets are equal, in time that tells nothing."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def home_of(cookie: str) -> str:
    """The replica that has made a cookie, as that says; "": there was only one."""
    return cookie.rpartition(".")[0]


def set_cookie(value: str, *, secure: bool) -> str:
    """The header that sets it; an empty value removes it."""
    life = int(LIFETIME) if value else 0
    name = SECURE_NAME if secure else NAME
    last = "; Secure" if secure else ""
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={life}{last}"


def cookie_of(header: str, *, secure: bool) -> str | None:
    """Our cookie in a Cookie header. Twice is none: a neighbour on the host has set the other."""
    wanted = SECURE_NAME if secure else NAME
    pairs = [part.strip(" \t").partition("=") for part in header.split(";")]
    found = [value for name, _, value in pairs if name == wanted]
    return found[0] if len(found) == 1 and found[0] else None
