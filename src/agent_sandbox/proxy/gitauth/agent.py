"""One connection of ssh to its agent: each message is decided, and passed on or refused.

Every connection has one of its own to the user's agent. So what ssh says about a session
(session-bind) counts for this connection alone. The agent checks the host's signature, which we
could not, and also keeps what the user was promised when the key was added (`ssh-add -h`).
"""

from __future__ import annotations

import asyncio
import os

from ...policy import knownhosts, publickeys
from ...record import Record
from . import messages, signed
from .journal import REFUSED, SIGNED
from .messages import Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...policy.publickeys import PublicKey
    from .journal import Journal

# The user may have to type a passphrase, or touch a key.
ANSWER_SECONDS = 300.0
UNBOUND = (
    "ssh did not say, or the agent outside did not take, which host it is for (session-bind, "
    "OpenSSH 8.9)"
)


class Rules(Record):
    """What may be seen and signed."""

    names: frozenset[tuple[str, str]]
    # Names as known_hosts has them; whoever may be logged in to.
    hosts: tuple[str, ...]
    any_host: bool
    known_hosts: tuple[str, ...]


class Denied(Exception):
    """Why something is not done."""


def host_of(rules: Rules, key: bytes, read: Callable[[str], str]) -> str:
    """The allowed host that a key belongs to; empty if it is nobody's."""
    texts = [read(path) for path in rules.known_hosts]
    # First, and in every file: one of the system's takes a key away that the user's still has.
    if any(key in knownhosts.revoked(text) for text in texts):
        return ""
    for text in texts:
        for name in rules.hosts:
            if key in knownhosts.keys_of(text, name):
                return name
    return ""


def may_login(
    rules: Rules, login: signed.Login, bound: messages.Bind | None, read: Callable[[str], str]
) -> str:
    """The host that a login is for. Denied, if it may not be."""
    if bound is not None and bound.session != login.session:
        raise Denied("it is for another session than the connection")
    if bound is not None and login.host_key not in (None, bound.host_key):
        raise Denied("it is for another host than the connection")
    host = host_of(rules, bound.host_key, read) if bound is not None else ""
    if host or rules.any_host:
        return host or "some host"
    if bound is None:
        raise Denied(UNBOUND)
    shown = publickeys.fingerprint(bound.host_key)
    raise Denied(f"known_hosts gives the host's key {shown} to none of git.hosts")


def read_hosts(path: str) -> str:
    """The text of a known_hosts, as it is now: the user may just have added a line.

    The path is a real one. A link at its end was put there since, and is not followed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read(knownhosts.MAX_TEXT)
    except OSError:
        return ""


class Upstream:
    """A connection to the user's agent."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: bytes) -> bytes:
        """One question, one answer."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path)
                reader, writer = self._streams
                writer.write(messages.string(message))
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(4))
                if not 0 < size <= messages.MAX_MESSAGE:
                    raise Denied("the agent outside answers with too much")
                return await reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise Denied(f"the agent outside does not answer: {error}") from None

    def another(self) -> Upstream:
        """One more connection to the same agent."""
        return Upstream(self._path)

    def close(self) -> None:
        """No more questions."""
        if self._streams is not None:
            self._streams[1].close()


class Session:
    """What one connection may do, and has said."""

    def __init__(self, rules: Rules, upstream: Upstream, journal: Journal) -> None:
        self._rules = rules
        self._upstream = upstream
        self._journal = journal
        self._bound: messages.Bind | None = None
        # Once ssh has said that it forwards the agent, whoever asks is somewhere else.
        self.over = False

    async def answer(self, message: bytes) -> bytes:
        """The answer to one message: never an error, and never what was not understood."""
        kind = message[0]
        try:
            if message == bytes([messages.REQUEST_IDENTITIES]):
                return messages.listed(await self._keys())
            if kind == messages.SIGN_REQUEST:
                return await self._sign(messages.sign_request(message))
            if kind == messages.EXTENSION:
                return await self._bind(message)
            why = messages.REFUSED.get(kind, f"message {kind}")
        except Malformed as error:
            why = f"a malformed message {kind}: {error}"
        except Denied as error:
            why = str(error)
        self._journal.note(REFUSED, why=why)
        return messages.REFUSAL

    async def _keys(self) -> tuple[PublicKey, ...]:
        """The named keys that the agent has."""
        told = await self._upstream.ask(bytes([messages.REQUEST_IDENTITIES]))
        try:
            keys = messages.identities(told)
        except Malformed as error:
            raise Denied(f"the agent outside lists no keys: {error}") from None
        return tuple(key for key in keys if publickeys.is_named(key, self._rules.names))

    async def _sign(self, asked: messages.Sign) -> bytes:
        # Asked afresh: the user may have taken the key out of the agent.
        key = next((key for key in await self._keys() if key.blob == asked.blob), None)
        if key is None:
            shown = publickeys.fingerprint(asked.blob)
            raise Denied(f"a signature with {shown}, which is none of git.keys")
        try:
            wanted = signed.read(asked.data, asked.blob)
        except Malformed as error:
            raise Denied(f"a signature with '{key.comment}': {error}") from None
        purpose = "a signature of git's"
        if isinstance(wanted, signed.Login):
            try:
                host = may_login(self._rules, wanted, self._bound, read_hosts)
            except Denied as error:
                raise Denied(f"a login as '{wanted.user}': {error}") from None
            purpose = f"a login as '{wanted.user}' to {host}"
        return await self._signature(asked, key, purpose)

    async def _signature(self, asked: messages.Sign, key: PublicKey, purpose: str) -> bytes:
        if not self._journal.has_room():
            raise Denied("a signature that could not be logged any more")
        told = await self._upstream.ask(messages.signing(asked))
        try:
            made = messages.signature(told)
        except Malformed:
            raise Denied(f"{purpose}: the agent outside refused it") from None
        # Before it leaves: what nobody knows of must not be there.
        self._journal.note(SIGNED, key=key.fingerprint, comment=key.comment, purpose=purpose)
        if not self._journal.is_whole:
            raise Denied("a signature that could not be logged")
        return made

    async def _bind(self, message: bytes) -> bytes:
        asked = messages.bind_request(message)
        if asked.forwarding:
            self.over = True
            raise Denied("forward the agent to another host")
        if self._bound is not None:
            raise Denied("use one connection for two sessions")
        if await self._takes_anything(asked):
            raise Denied("bind a session: the agent outside does not check the host's signature")
        if await self._upstream.ask(messages.binding(asked)) != messages.ACCEPTED:
            # Other agents do not know it. What needs it says so, if it comes to that.
            return messages.REFUSAL
        self._bound = asked
        return messages.ACCEPTED

    async def _takes_anything(self, asked: messages.Bind) -> bool:
        """Whether the agent takes a spoilt signature too, on a connection of its own.

        Some take every extension. Then whoever asks would name any host's key, without having it.
        """
        probe = self._upstream.another()
        try:
            spoilt = messages.spoilt(asked)
            return await probe.ask(messages.binding(spoilt)) == messages.ACCEPTED
        finally:
            probe.close()
