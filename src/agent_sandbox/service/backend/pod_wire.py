"""One TLS connection to an agent, and what the service makes of its words.

The agent is not trusted: it runs beside the command. Whatever it sends is bounded and read
strictly; what does not fit ends the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl

from ...pod import frames
from ...record import Record
from ..problems import STATUS, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from .pod_identity import Identity

    Dial = Callable[[], Awaitable[socket.socket]]

DIAL_SECONDS = 10.0
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 1.0
PIECE = 1 << 16
# So many frames, and everybody else has a turn: an agent may send the smallest ones without end.
TURN = 64
# An agent that has nothing to say says nothing.
NEVER_EMPTY = frozenset((frames.OUT, frames.ERR, frames.DATA))
# Refusals that an agent may decide; for others it has no business.
CODES = frozenset((
    "BAD_REQUEST", "CONFLICT", "DISK_FULL", "FORBIDDEN", "INVALID", "NOT_FOUND", "TOO_LARGE",
    "UNSUPPORTED", "UNSUPPORTED_MEDIA_TYPE", "WRONG_STATE",
))  # fmt: skip
FIELDS = frozenset(("", "path", "cwd", "inner", "body", "env", "command"))
MOST_MESSAGE = 1000


class Broken(Exception):
    """The connection is of no use any more. Nothing is known about what was asked last."""


class Peer(Record):
    """How to reach an agent, and how to know that it is the one."""

    dial: Dial
    # Of its certificate: SHA-256 in hexadecimal.
    fingerprint: str
    identity: Identity


def unavailable(why: object) -> Problem:
    """The refusal for an agent that cannot be reached, or does not make sense."""
    return Problem("BACKEND_UNAVAILABLE", f"the sandbox's pod cannot be asked: {why}")


class Wire:
    """A connection. Made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = frames.Reader(frames.TO_SERVICE)
        self._left = TURN

    @property
    def is_alive(self) -> bool:
        """Whether nobody has closed it, as far as is known here."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def is_clear(self) -> bool:
        """Whether nothing has come that nobody has asked for."""
        return self._frames.is_empty

    async def send(self, *data: bytes) -> None:
        """Send frames; waits while the agent does not take them."""
        try:
            self._writer.writelines(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise Broken(str(error)) from error

    async def next(self) -> tuple[bytes, bytes]:
        """The next frame."""
        self._left -= 1
        if not self._left:
            self._left = TURN
            # What is here already would be read without ever waiting.
            await asyncio.sleep(0)
        try:
            while (found := self._frames.next()) is None:
                data = await self._reader.read(PIECE)
                if not data:
                    raise Broken("the agent has closed the connection")
                self._frames.feed(data)
        except (OSError, frames.BadFrame) as error:
            self.abort()
            raise Broken(str(error)) from error
        if found[0] in NEVER_EMPTY and not found[1]:
            self.abort()
            raise Broken("an empty message")
        return found

    async def document(self, *kinds: bytes) -> dict[str, object]:
        """A document of one of these kinds; a refusal is raised as what it is."""
        kind, data = await self.next()
        try:
            found = frames.document(data) if kind in (*kinds, frames.REFUSAL) else None
            if kind == frames.REFUSAL and found is not None:
                raise refusal(found)
        except frames.BadFrame as error:
            self.abort()
            raise Broken(str(error)) from error
        if found is None:
            self.abort()
            raise Broken(f"an unexpected message {kind!r}")
        return found

    def abort(self) -> None:
        """Close it without a word."""
        if self._writer.transport is not None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Close it. What the agent does not answer in time is cut off."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self.abort()


def refusal(document: Mapping[str, object]) -> Problem:
    """What an agent has refused, as far as it may."""
    fields = frames.Fields(document)
    code, message = fields.word("code", most=64), fields.word("message")
    field, hint = fields.word("field", "", most=64), fields.word("hint", "")
    fields.end()
    if code not in CODES or code not in STATUS or field not in FIELDS:
        return unavailable(shown(message)[:MOST_MESSAGE])
    return Problem(
        code, shown(message)[:MOST_MESSAGE], hint=shown(hint)[:MOST_MESSAGE], field=field
    )


def shown(text: str) -> str:
    """An agent's words, as they may be kept and shown."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


class _Protocol(asyncio.StreamReaderProtocol):
    """Knows its transport as soon as the handshake is done."""

    transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)


async def _open(
    sock: socket.socket, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `asyncio.open_connection`, but cut off at once when it is cancelled.

    The socket is the transport's, also when this fails. After a handshake that nobody waits for
    any more asyncio would close it politely, and wait half a minute for an agent that is gone.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = _Protocol(reader, loop=loop)
    try:
        transport, _ = await loop.create_connection(
            lambda: protocol, sock=sock, ssl=context, server_hostname="agent"
        )
    except BaseException:
        if isinstance(protocol.transport, asyncio.Transport):
            protocol.transport.abort()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def connect(peer: Peer) -> Wire:
    """A connection on which the agent has shown its certificate; Broken if that fails."""
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            sock = await peer.dial()
            reader, writer = await _open(sock, peer.identity.client)
    except (OSError, TimeoutError, ssl.SSLError) as error:
        raise Broken(str(error) or type(error).__name__) from error
    wire = Wire(reader, writer)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    if hashlib.sha256(shown).hexdigest() != peer.fingerprint:
        wire.abort()
        raise Broken("its certificate is not the one that the engine has shown")
    return wire


def request(operation: str, **fields: object) -> bytes:
    """The first message of an operation."""
    return frames.text(frames.REQUEST, {"operation": operation, **fields})
