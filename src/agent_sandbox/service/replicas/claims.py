"""The header with which one replica vouches for a request that it passes on. Pure.

It says from where the request came first, so that the audit has the client's address and not the
replica's; and that it was passed on, so that it is never passed on again. It grants nothing else:
the token comes along and is checked anew. Only where the kernel said who asks, on a unix socket,
is there no token, and the replica's word stands for it.

The key is in the state that all replicas share. Who can read that has every sandbox anyway.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets

from ...record import Record
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = "x-sandbox-forward"
# The name of the key among the kept values, and its length.
KEY, KEY_BYTES = "replicas.forward", 32
# Clocks of replicas may differ by so much; a header that was seen on the way is dead after it.
SECONDS = 60.0
MOST = 4096
# What says who asks. The header is good for this token alone.
CREDENTIALS = ("authorization", "x-api-key", "cookie")


class Claim(Record):
    """What one replica tells another about a request."""

    sender: str
    receiver: str
    at: float
    # As in the log and the audit of both.
    request_id: str
    method: str
    target: str
    # Of the client: its address, or the user at the other end of a unix socket.
    address: str
    tls: bool = False
    unix: bool = False
    uid: int | None = None
    # That user runs the sender, or is root there.
    owner: bool = False
    # It is sent to the home of its login, which may pass it on to that of its sandbox.
    session: bool = False
    # Of the token or cookie that comes along.
    digest: str = ""
    # Different for each request: a header is good once, whatever body comes with it.
    nonce: str = ""


class Once:
    """The claims that were used, as long as they could be used again."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._next = 0.0

    def take(self, claim: Claim, now: float) -> None:
        """FORBIDDEN for a second time."""
        if now >= self._next:
            self._seen = {nonce: at for nonce, at in self._seen.items() if at + SECONDS >= now}
            self._next = now + SECONDS
        if claim.nonce in self._seen:
            raise forged()
        self._seen[claim.nonce] = claim.at


def make_key() -> bytes:
    """A fresh one."""
    return secrets.token_bytes(KEY_BYTES)


def digest(headers: Mapping[str, str]) -> str:
    """Binds a claim to the credentials beside it."""
    text = "\n".join(headers.get(name, "") for name in CREDENTIALS)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write(claim: Claim, key: bytes) -> str:
    """The header's value.

    Without what is as it would be anyway: a replica of another version may not know the field, and
    has to only where it says something.
    """
    unsaid = claim.__defaults__
    values = {k: v for k, v in vars(claim).items() if k not in unsaid or v != unsaid[k]}
    plain = json.dumps(values, separators=(",", ":")).encode()
    payload = base64.urlsafe_b64encode(plain).decode()
    return f"{payload}.{_mac(payload, key)}"


def read(
    text: str, key: bytes, *, receiver: str, method: str, target: str,
    headers: Mapping[str, str], now: float,
) -> Claim:  # fmt: skip
    """The claim of a header that one of us has made for this very request; else FORBIDDEN.

    REPLICA_UNAVAILABLE for one of another version that says what we do not understand: to leave
    that out could be to allow more than the sender did.
    """
    claim = _opened(text, key)
    if (
        claim is None
        or claim.receiver != receiver
        or (claim.method, claim.target) != (method, target)
        or abs(now - claim.at) > SECONDS
        or not hmac.compare_digest(claim.digest, digest(headers))
    ):
        raise forged()
    return claim


def forged() -> Problem:
    """The refusal of a header that is not ours, or not for this request."""
    return Problem(
        "FORBIDDEN", f"{HEADER} is for requests between replicas", rule="replica.forward",
        hint="leave it out; replicas need clocks that agree", field=HEADER,
    )  # fmt: skip


def _opened(text: str, key: bytes) -> Claim | None:
    payload, dot, mac = text.rpartition(".")
    if not dot or len(text) > MOST or not text.isascii():
        return None
    # The seal first: nothing is decoded that is not ours. It is on the letters, not on what they
    # mean: base64 has several spellings.
    if not hmac.compare_digest(mac, _mac(payload, key)):
        return None
    # Written by `write`, maybe of another version.
    values = json.loads(base64.urlsafe_b64decode(payload))
    try:
        return Claim(**values)
    except TypeError:
        raise Problem(
            "REPLICA_UNAVAILABLE", "another version of the service has passed this on",
            rule="replica.version", hint="ask again, until all replicas are of one version",
            retry_after=2.0,
        ) from None  # fmt: skip


def _mac(payload: str, key: bytes) -> str:
    text = f"agent-sandbox forward 1\n{payload}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
