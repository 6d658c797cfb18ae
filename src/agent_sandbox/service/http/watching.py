"""Hears that a client has gone while nothing is read from it.

asyncio notices an end only by reading, and a connection that is not read (a full buffer, a busy
handler) would keep its client's work alive. The kernel tells it without a read: EPOLLRDHUP.
"""

from __future__ import annotations

import asyncio
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Watched(Protocol):
        """What wants to know."""

        def hung_up(self) -> None:
            """The other end has closed its side."""

        def abort(self) -> None:
            """The connection is dead in both directions."""


class Watch:
    """One more epoll, inside of the loop's."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def add(self, descriptor: int, watched: Watched, *, half_closed: bool = False) -> None:
        """Watch for the end of the client's side; if that has come already, for the end of all."""
        # Errors and the end of both directions are always told, asked for or not. Once is enough.
        events = select.EPOLLONESHOT | (0 if half_closed else select.EPOLLRDHUP)
        if descriptor in self._watched:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._watched[descriptor] = watched

    def drop(self, descriptor: int) -> None:
        """Watch no more. Before the descriptor is closed: its number is used again."""
        if self._watched.pop(descriptor, None) is not None:
            try:
                self._epoll.unregister(descriptor)
            except OSError:
                pass

    def close(self) -> None:
        """The end."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._watched.clear()

    def _ready(self) -> None:
        for descriptor, events in self._epoll.poll(0):
            watched = self._watched.get(descriptor)
            if watched is None:
                continue
            if events & (select.EPOLLHUP | select.EPOLLERR):
                watched.abort()
            else:
                watched.hung_up()
