"""Accepts connections, never more at a time than can be served.

Beyond that, connections wait in the listeners' backlogs. When descriptors run out, accepting
pauses and goes on; it never stops for good.
"""

from __future__ import annotations

import asyncio
import errno
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    Handler = Callable[[socket.socket], Coroutine[None, None, None]]

MAX_CONNECTIONS = 4096
# A connection has two sockets, and while a receiver is slow a pipe.
DESCRIPTORS_EACH = 4
RESERVED_DESCRIPTORS = 128
MAX_LISTENERS = 4096
BATCH = 64
PAUSE_SECONDS = 0.1
# accept(2): no room now; and errors of the connection that was to be accepted.
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptors() -> int:
    """Take as many descriptors as we may; how many that are."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def connections_for(descriptors: int) -> int:
    """How many connections fit."""
    return max(16, min(MAX_CONNECTIONS, (descriptors - RESERVED_DESCRIPTORS) // DESCRIPTORS_EACH))


class Listeners:
    """Every listener, and how many connections there are."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._handlers: dict[socket.socket, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self.active = 0

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, listener: socket.socket, handler: Handler) -> None:
        """Serve what comes to this listener. Each connection ends with a call of `left`."""
        if len(self._handlers) >= MAX_LISTENERS:
            listener.close()
            return
        listener.setblocking(False)  # noqa: FBT003 - positional only
        self._handlers[listener] = handler
        if not self._paused:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def left(self) -> None:
        """A connection has ended."""
        self.active -= 1
        if self._paused and self.active < self._most:
            self._resume()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run something besides; asyncio alone would forget it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BATCH):
            if self.active >= self._most:
                self._pause()
                return
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in FULL:
                    # The listener stays readable: without a pause this would be a busy loop.
                    self._pause()
                    self._loop.call_later(PAUSE_SECONDS, self._resume)
                    return
                continue
            client.setblocking(False)  # noqa: FBT003 - positional only
            self.active += 1
            self.start(self._handlers[listener](client))

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            for listener in self._handlers:
                self._loop.remove_reader(listener.fileno())

    def _resume(self) -> None:
        if self._paused and self.active < self._most:
            self._paused = False
            for listener in self._handlers:
                self._loop.add_reader(listener.fileno(), self._accept, listener)
