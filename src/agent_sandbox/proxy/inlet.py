"""A client at the door: what it has sent, how it can be spoken to, how long it may take."""

from __future__ import annotations

import asyncio
import socket

from . import refusals, sniff
from .refusals import BUSY, MALFORMED, Problem
from .relay import close

# For everything that a client says before it is let through.
HANDSHAKE_SECONDS = 10.0
READ = 64 * 1024
# What all clients at the door may have said together. Our memory is not the sandbox's: no limit of
# the command's holds it.
MAX_WAITING = 64 << 20
# After a refusal the client may read in peace.
FAREWELL_SECONDS = 2.0
FAREWELL_BYTES = 1 << 20
# Nobody has to speak first on a port that is refused: a short look at what it might be.
GLANCE_SECONDS = 0.25

VOICES = {sniff.TLS: refusals.TLS, sniff.HTTP: refusals.HTTP, sniff.SSH: refusals.SSH}


class Gone(Exception):
    """The client has closed."""


class Inlet:
    """One accepted connection."""

    # Bytes that are held for all of them.
    waiting = 0

    def __init__(self, client: socket.socket) -> None:
        self._counted = 0
        self.sock = client
        self.data = b""
        self.voice = refusals.OPAQUE
        # Somebody else closes it.
        self.handed_over = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + HANDSHAKE_SECONDS

    def restart_clock(self) -> None:
        """The client has waited for us; that is not its fault."""
        self._deadline = self._loop.time() + HANDSHAKE_SECONDS

    async def more(self) -> None:
        """Wait for more bytes."""
        if Inlet.waiting >= MAX_WAITING:
            raise Problem(BUSY, "too much waits to be read")
        try:
            async with asyncio.timeout_at(self._deadline):
                chunk = await self._loop.sock_recv(self.sock, READ)
        except TimeoutError:
            raise Problem(MALFORMED, "the client took too long", status=408) from None
        if not chunk:
            raise Gone
        self.data += chunk
        self._counted += len(chunk)
        Inlet.waiting += len(chunk)

    def release(self) -> None:
        """What it has said is on its way, or of no use."""
        Inlet.waiting -= self._counted
        self._counted = 0

    async def kind(self) -> str:
        """What the client speaks."""
        while True:
            found = sniff.kind(self.data) if self.data else None
            if found is not None:
                self.voice = VOICES.get(found, self.voice)
                return found
            await self.more()

    async def glance(self, port: int) -> None:
        """Find out how to tell a client that it is refused."""
        if port == 22:
            self.voice = refusals.SSH
            return
        if port not in sniff.ONLY:
            self._deadline = self._loop.time() + GLANCE_SECONDS
        try:
            await self.kind()
        except (Problem, Gone):
            return

    async def farewell(self, problem: Problem) -> None:
        """Tell the client why, and give it time to read that."""
        said = refusals.say(self.voice, problem)
        if not said:
            return
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._loop.sock_sendall(self.sock, said)
                self.sock.shutdown(socket.SHUT_WR)
                # Bytes that are never read would make close(2) a reset, which overtakes the text.
                left = FAREWELL_BYTES
                while left > 0 and (chunk := await self._loop.sock_recv(self.sock, READ)):
                    left -= len(chunk)
        except (TimeoutError, OSError):
            return

    def close(self) -> None:
        """The end, unless somebody else has it."""
        if not self.handed_over:
            self.handed_over = True
            close(self.sock)
