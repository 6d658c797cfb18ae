"""What somebody wants signed: a login to a host, or something of git's. Pure.

A key signs bytes, and whoever chooses the bytes chooses what the signature proves. So only two
kinds are let through, and each is read to its last byte: a login's request (RFC 4252, 7) and a
message of the namespace `git` (PROTOCOL.sshsig). Neither can be taken for the other.
"""

from __future__ import annotations

from ...record import Record
from .messages import Fields, Malformed

MAGIC = b"SSHSIG"
NAMESPACE = b"git"
DIGESTS = {b"sha256": 32, b"sha512": 64}
USERAUTH_REQUEST = 50
SERVICE = b"ssh-connection"
PLAIN = b"publickey"
HOST_BOUND = b"publickey-hostbound-v00@openssh.com"
# The hash of a key exchange: SHA-1 to SHA-512.
SESSION_SIZES = (20, 32, 48, 64)
MAX_USER = 256


class Login(Record):
    """A request to log in, in one session."""

    session: bytes
    user: str
    # The server's key, where the client says it.
    host_key: bytes | None = None


class GitSignature(Record):
    """A commit, a tag or a push."""


def read(data: bytes, key: bytes) -> Login | GitSignature:
    """What these bytes are, if they may be signed with this key."""
    if data.startswith(MAGIC):
        return _message(data)
    return _login(data, key)


def _message(data: bytes) -> GitSignature:
    fields = Fields(data[len(MAGIC) :])
    namespace, reserved, algorithm, digest = (fields.string() for _ in range(4))
    fields.end()
    if namespace != NAMESPACE:
        raise Malformed("it is a signature for something else than git")
    if reserved or DIGESTS.get(algorithm) != len(digest):
        raise Malformed("it is no signature of git's")
    return GitSignature()


def _login(data: bytes, key: bytes) -> Login:
    fields = Fields(data)
    session = fields.string()
    if len(session) not in SESSION_SIZES or fields.byte() != USERAUTH_REQUEST:
        raise Malformed("it is neither a login nor a signature of git's")
    user, service, method = fields.string(), fields.string(), fields.string()
    has_signature = fields.boolean()
    algorithm, blob = fields.string(), fields.string()
    host_key = fields.string() if method == HOST_BOUND else None
    fields.end()
    good = service == SERVICE and method in (PLAIN, HOST_BOUND) and has_signature
    if not good or blob != key or not algorithm.isascii():
        raise Malformed("it is no login with this key")
    name = user.decode("utf-8", "replace")
    if len(user) > MAX_USER or not name.isprintable():
        raise Malformed("the user's name is not printable")
    return Login(session=session, user=name, host_key=host_key)
