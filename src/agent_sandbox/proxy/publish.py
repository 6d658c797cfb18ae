"""Ports out: a server inside becomes reachable at a port of the host."""

from __future__ import annotations

import asyncio
import socket

from ..errors import reason
from .relay import close

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .gateway import Gate
    from .listening import Listeners
    from .relay import Relay

BACKLOG = 128
# A server inside listens on either.
INNER = ("127.0.0.1", "::1")


class Publisher:
    """Listeners on the host; the gate connects to the servers inside."""

    def __init__(self, gate: Gate, relay: Relay, listeners: Listeners) -> None:
        self._gate = gate
        self._relay = relay
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()

    def publish(self, address: str, port: int, inner: int) -> str:
        """Listen; what is wrong if that cannot be done."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Of the last run's connections, some may still be in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            return f"cannot publish port {port}: {reason(error)}"
        self._listeners.add(listener, self._handler(inner))
        return ""

    def _closed(self) -> None:
        """In the relay's thread."""
        try:
            self._loop.call_soon_threadsafe(self._listeners.left)
        except RuntimeError:
            # The loop has ended, and with it everything.
            return

    def _handler(self, inner: int) -> Callable[[socket.socket], Coroutine[None, None, None]]:
        async def handler(client: socket.socket) -> None:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for address in INNER:
                try:
                    server = await self._gate.connect(address, inner)
                except (OSError, TimeoutError):
                    continue
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._relay.join(client, server, None, closed=self._closed)
                return
            # Nobody listens inside: a reset, as if nobody listened here.
            close(client, broken=True)
            self._listeners.left()

        return handler
