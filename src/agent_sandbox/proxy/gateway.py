"""The line to the gate, which makes sockets in the sandbox's network namespace for us.

One datagram is one message, in ASCII. The gate sends `listener tcp|udp ADDRESS PORT`, each with a
descriptor, then `ready`; we ask `N bind|connect ADDRESS PORT`; it answers `N ok` with a descriptor
or `N error TEXT`, in any order.
"""

from __future__ import annotations

import asyncio
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MESSAGE = 512
ANSWER_SECONDS = 15.0


class GateGone(OSError):
    """The gate has ended; the sandbox keeps what it has and gets nothing new."""


class Gate:
    """Our end of the line."""

    def __init__(self, line: socket.socket, found: Callable[[str, str, int, int], None]) -> None:
        line.setblocking(False)  # noqa: FBT003 - positional only
        self._line = line
        # Called with protocol, address, port and descriptor of each first listener.
        self._found = found
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._number = 0
        self._sending = asyncio.Lock()
        self._gone = False
        self.ready = self._loop.create_future()
        self._loop.add_reader(line.fileno(), self._read)

    async def bind(self, address: str, port: int) -> socket.socket:
        """A listener inside; OSError if there cannot be one."""
        return socket.socket(fileno=await self._ask("bind", address, port))

    async def connect(self, address: str, port: int) -> socket.socket:
        """A connection to a server inside; OSError if there is none."""
        return socket.socket(fileno=await self._ask("connect", address, port))

    async def _ask(self, verb: str, address: str, port: int) -> int:
        if self._gone:
            raise GateGone("the gate has ended")
        self._number += 1
        number = self._number
        future: asyncio.Future[int] = self._loop.create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                # One at a time: asyncio has one writer per descriptor.
                async with self._sending:
                    await self._loop.sock_sendall(
                        self._line, f"{number} {verb} {address} {port}".encode("ascii")
                    )
                return await future
        finally:
            del self._waiting[number]

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._line, MAX_MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lost()
                return
            fd = fds[0] if fds else -1
            if not self._take(data.decode("ascii", "replace").split(" "), fd) and fd >= 0:
                # Nobody waits for it any more.
                os.close(fd)

    def _take(self, words: list[str], fd: int) -> bool:
        """Act on a message; True if its descriptor was taken."""
        if words == ["ready"]:
            if not self.ready.done():
                self.ready.set_result(None)
            return False
        if words[0] == "listener" and len(words) == 4 and fd >= 0:
            self._found(words[1], words[2], int(words[3]), fd)
            return True
        future = self._waiting.get(int(words[0])) if words[0].isdigit() else None
        if future is None or future.done():
            return False
        if words[1:] == ["ok"] and fd >= 0:
            future.set_result(fd)
            return True
        future.set_exception(OSError(" ".join(words[2:]) or "no descriptor"))
        return False

    def _lost(self) -> None:
        self._gone = True
        self._loop.remove_reader(self._line.fileno())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(GateGone("the gate has ended"))
        if not self.ready.done():
            self.ready.set_result(None)
