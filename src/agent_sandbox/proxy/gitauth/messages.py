"""Messages between ssh and its agent (draft-ietf-sshm-ssh-agent), read strictly. Pure.

What is passed on is written anew from what was understood. A message with anything more, anything
less or another type than those below is refused.
"""

from __future__ import annotations

from ...policy.publickeys import PublicKey
from ...record import Record

# What OpenSSH's agent takes at most.
MAX_MESSAGE = 256 << 10
MAX_KEYS = 2048

FAILURE, SUCCESS = 5, 6
REQUEST_IDENTITIES, IDENTITIES_ANSWER = 11, 12
SIGN_REQUEST, SIGN_RESPONSE = 13, 14
EXTENSION = 27
SESSION_BIND = b"session-bind@openssh.com"
# Which hash a signature by an RSA key has; 0 for the key's own.
FLAGS = (0, 2, 4)

# What is refused, in words for the log.
REFUSED = {
    1: "list keys of protocol 1", 17: "add a key", 18: "remove a key", 19: "remove all keys",
    20: "add the keys of a smartcard", 21: "remove the keys of a smartcard", 22: "lock the agent",
    23: "unlock the agent", 25: "add a key", 26: "add the keys of a smartcard",
    27: "use an extension",
}  # fmt: skip

REFUSAL = bytes([FAILURE])
ACCEPTED = bytes([SUCCESS])


class Malformed(ValueError):
    """A message that is not exactly what it should be."""


class Sign(Record):
    """A request for a signature."""

    blob: bytes
    data: bytes
    flags: int


class Bind(Record):
    """A session's host key, and its signature over the session's id."""

    host_key: bytes
    session: bytes
    signature: bytes
    forwarding: bool


class Fields:
    """A cursor over the content of a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        """One byte."""
        return self._take(1)[0]

    def boolean(self) -> bool:
        """0 or 1. RFC 4251 lets readers take more for true, and nobody writes it."""
        value = self.byte()
        if value > 1:
            raise Malformed("a truth value is neither 0 nor 1")
        return bool(value)

    def number(self) -> int:
        """A number of 32 bits."""
        return int.from_bytes(self._take(4))

    def string(self) -> bytes:
        """Bytes with their length before them."""
        return self._take(self.number())

    def end(self) -> None:
        """Nothing may follow."""
        if self._at != len(self._data):
            raise Malformed("something follows the last field")

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise Malformed("it ends within a field")
        self._at += size
        return taken


def string(data: bytes) -> bytes:
    """Bytes with their length before them."""
    return len(data).to_bytes(4) + data


def identities(message: bytes) -> tuple[PublicKey, ...]:
    """The keys in an agent's answer."""
    fields = Fields(message)
    if fields.byte() != IDENTITIES_ANSWER:
        raise Malformed("it is no list of keys")
    count = fields.number()
    if count > MAX_KEYS:
        raise Malformed("it lists too many keys")
    found = []
    for _ in range(count):
        blob, comment = fields.string(), fields.string()
        found.append(PublicKey(blob=blob, comment=comment.decode("utf-8", "replace")))
    fields.end()
    return tuple(found)


def listed(keys: tuple[PublicKey, ...]) -> bytes:
    """An answer with these keys."""
    parts = [string(key.blob) + string(key.comment.encode()) for key in keys]
    return bytes([IDENTITIES_ANSWER]) + len(keys).to_bytes(4) + b"".join(parts)


def sign_request(message: bytes) -> Sign:
    """A request for a signature."""
    fields = Fields(message)
    if fields.byte() != SIGN_REQUEST:
        raise Malformed("it asks for no signature")
    asked = Sign(blob=fields.string(), data=fields.string(), flags=fields.number())
    fields.end()
    if asked.flags not in FLAGS:
        raise Malformed("it has flags that nobody knows")
    return asked


def signing(asked: Sign) -> bytes:
    """The same request, written anew."""
    return bytes([SIGN_REQUEST]) + string(asked.blob) + string(asked.data) + asked.flags.to_bytes(4)


def signature(message: bytes) -> bytes:
    """An agent's answer with a signature, written anew."""
    fields = Fields(message)
    if fields.byte() != SIGN_RESPONSE:
        raise Malformed("it is no signature")
    found = fields.string()
    fields.end()
    return bytes([SIGN_RESPONSE]) + string(found)


def bind_request(message: bytes) -> Bind:
    """The one extension that is known: which host a connection is for."""
    fields = Fields(message)
    if fields.byte() != EXTENSION or fields.string() != SESSION_BIND:
        raise Malformed("it is another extension")
    asked = Bind(
        host_key=fields.string(), session=fields.string(), signature=fields.string(),
        forwarding=fields.boolean(),
    )  # fmt: skip
    fields.end()
    return asked


def binding(asked: Bind) -> bytes:
    """The same request, written anew."""
    parts = (SESSION_BIND, asked.host_key, asked.session, asked.signature)
    return bytes([EXTENSION]) + b"".join(string(part) for part in parts) + bytes([asked.forwarding])


def spoilt(asked: Bind) -> Bind:
    """The same with a signature that cannot be right: its last byte is another one."""
    last = asked.signature[-1] ^ 1 if asked.signature else 0
    return asked.replace(signature=asked.signature[:-1] + bytes([last]))
