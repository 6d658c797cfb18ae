"""A chunked body on its way out: every chunk is read and written anew.

Works on duplicates of the sockets, since the relay closes its own when the server has answered.
"""

from __future__ import annotations

import asyncio
import socket

from . import http1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .ledger import Account

# Each upload holds twice what it has read, and there may be thousands whose server takes nothing.
MOST_READ, LEAST_READ = 64 * 1024, 4 * 1024
HELD = 32 << 20


def share(uploads: int) -> int:
    """How much each of so many uploads may read at a time. Pure."""
    return max(LEAST_READ, min(MOST_READ, HELD // max(1, uploads)))


class Upload:
    """One body."""

    # How many there are.
    active = 0

    def __init__(self, client: socket.socket, server: socket.socket, account: Account) -> None:
        self._client = client.dup()
        self._server = server.dup()
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[bool] | None = None

    def stop(self) -> None:
        """The connection has ended. Called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            # The loop has ended.
            return

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self, first: bytes) -> None:
        """Send the body to its end; a body that is not one ends the connection."""
        self._task = self._loop.create_task(self._send(first))
        good = False
        Upload.active += 1
        try:
            good = await self._task
        except (asyncio.CancelledError, OSError, http1.BadRequest):
            pass
        finally:
            Upload.active -= 1
            if not good:
                # The relay sees it, and ends both sides.
                for one in (self._server, self._client):
                    _hang_up(one)
            self._client.close()
            self._server.close()

    async def _send(self, data: bytes) -> bool:
        chunks = http1.Chunks()
        while True:
            out = chunks.feed(data)
            if self._account.take(len(out), up=True) < len(out):
                self._account.cut()
                return False
            await self._loop.sock_sendall(self._server, out)
            if chunks.done:
                return True
            data = await self._loop.sock_recv(self._client, share(Upload.active))
            if not data:
                return False


def _hang_up(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
