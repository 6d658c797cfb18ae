"""Moves bytes between pairs of sockets: one thread, one epoll, splice(2) through pipes.

The bytes stay in the kernel. Events are edge-triggered: a pair that has nothing to do costs no
system call, and a socket that is closed on one side does not wake the thread over and over. A pipe
belongs to a direction only while bytes are in it, so an idle pair holds its two sockets and nothing
else. What the receiver does not take stays in the pipe, and the sender's socket is not read
meanwhile: the kernel's flow control does the rest.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
import threading
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger import Account

F_SETPIPE_SZ = 1031
# pipe(7): a user's pipes may have 64 MiB together before all new ones are made tiny. So only a few
# of ours are large; they are the ones that are moving bytes at the moment.
PIPE_SIZES = (1 << 20, 1 << 18)
LARGE_PIPES = 16
SPARE_PIPES = 8
DEFAULT_PIPE = 1 << 16
# What one direction may move before others get their turn.
TURN = 4 << 20
EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
BATCH = 256
# After a round that moved this much, a rest lets bytes gather: a large transfer then goes in few
# large pieces, and its two ends get the processor. Others wait less than half a millisecond.
BULK = 64 << 10
REST = 0.0004
FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
# Dropped at the end, so that close(2) does not send a reset that destroys what was answered.
DRAIN = 1 << 20
MAX_DRAINS = 16
# struct linger: on, zero seconds.
NO_LINGER = b"\1\0\0\0\0\0\0\0" if sys.byteorder == "little" else b"\0\0\0\1\0\0\0\0"


class Pipe:
    """A pipe that splice(2) goes through."""

    def __init__(self, *, large: bool) -> None:
        self.out, self.into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.size = DEFAULT_PIPE
        self.large = large
        for size in PIPE_SIZES if large else ():
            try:
                self.size = fcntl.fcntl(self.into, F_SETPIPE_SZ, size)
            except OSError:
                # EPERM: above the user's limit.
                continue
            break

    def close(self) -> None:
        """Give it back to the kernel."""
        os.close(self.out)
        os.close(self.into)


class Pipes:
    """Pipes for those who have bytes under way."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []
        self._large = 0

    def take(self) -> Pipe:
        """An empty pipe."""
        if self._spare:
            return self._spare.pop()
        large = self._large < LARGE_PIPES
        pipe = Pipe(large=large)
        self._large += large
        return pipe

    def put(self, pipe: Pipe, *, empty: bool) -> None:
        """Back again; one with bytes in it is of no use."""
        if empty and pipe.large and len(self._spare) < SPARE_PIPES:
            self._spare.append(pipe)
            return
        self._large -= pipe.large
        pipe.close()

    def close(self) -> None:
        """Close what is not in use."""
        while self._spare:
            self._spare.pop().close()


class Way:
    """One direction of a pair."""

    def __init__(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        self.origin = source
        self.source = source.fileno()
        self.sink = sink
        self.into = sink.fileno()
        # How many bytes may still go; None for any number. Not the end of the connection: after
        # the one request that was let through, the answer is still to come.
        self.left = left
        self.readable = True
        self.writable = True
        self.pipe: Pipe | None = None
        self.held = 0
        self.done = left == 0
        self.queued = False


class Pair:
    """Two sockets that are to be connected."""

    def __init__(
        self, client: socket.socket, server: socket.socket, account: Account | None,
        left: int | None, closed: Callable[[], object],
    ) -> None:  # fmt: skip
        self.sockets = (client, server)
        self.account = account
        self.up = Way(client, server, left)
        self.down = Way(server, client, None)
        self.closed = closed
        self.over = False


class Relay:
    """The thread and its pairs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._orders: deque[Callable[[], None]] = deque()
        self._pairs: dict[int, Pair] = {}
        self._ready: deque[tuple[Pair, Way]] = deque()
        self._pipes = Pipes()
        self._stop = False
        # Bytes, all in all.
        self._moved = 0
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(
        self, client: socket.socket, server: socket.socket, account: Account | None,
        *, left: int | None = None, closed: Callable[[], object],
    ) -> None:  # fmt: skip
        """Connect two sockets, which are ours from now on. `closed` is called in our thread.

        `left` limits what goes from the client to the server.
        """
        pair = Pair(client, server, account, left, closed)
        self._order(lambda: self._begin(pair))

    def review(self, allowed: Callable[[Account], bool]) -> None:
        """End every connection that is not allowed any more."""
        self._order(lambda: self._review(allowed))

    def close(self) -> None:
        """End all, and the thread."""
        self._order(self._halt)
        self._thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    def _halt(self) -> None:
        self._stop = True

    def _review(self, allowed: Callable[[Account], bool]) -> None:
        for pair in set(self._pairs.values()):
            if pair.account is not None and not allowed(pair.account):
                self._end(pair, broken=True)

    def _begin(self, pair: Pair) -> None:
        try:
            for one in pair.sockets:
                one.setblocking(False)  # noqa: FBT003 - positional only
                self._pairs[one.fileno()] = pair
                self._epoll.register(one.fileno(), EVENTS)
        except OSError:
            # ENOSPC: a user's processes have so many watches together, those in sandboxes included.
            self._end(pair, broken=True)
            return
        self._queue(pair, pair.up)
        self._queue(pair, pair.down)

    def _run(self) -> None:
        while not self._stop:
            events = self._epoll.poll(0 if self._ready else -1, BATCH)
            for fd, what in events:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    while self._orders:
                        self._orders.popleft()()
                elif fd in self._pairs:
                    self._note(self._pairs[fd], fd, what)
            # Those that became ready in this round wait for the next one: nobody is starved.
            moved = self._moved
            for _ in range(len(self._ready)):
                self._turn(*self._ready.popleft())
            if self._moved - moved >= BULK and not self._ready:
                time.sleep(REST)
        for pair in set(self._pairs.values()):
            self._end(pair)
        self._pipes.close()
        self._epoll.close()
        os.close(self._wake)

    def _note(self, pair: Pair, fd: int, what: int) -> None:
        """An edge: a socket can do more than before, or has failed."""
        for way in (pair.up, pair.down):
            if way.source == fd and what & ~select.EPOLLOUT:
                way.readable = True
                self._queue(pair, way)
            if way.into == fd and what & ~(select.EPOLLIN | select.EPOLLRDHUP):
                way.writable = True
                self._queue(pair, way)
        if what & select.EPOLLERR:
            # A reset. What the other side has sent cannot be delivered any more.
            self._end(pair, broken=True)

    def _queue(self, pair: Pair, way: Way) -> None:
        if not way.queued and not way.done:
            way.queued = True
            self._ready.append((pair, way))

    def _turn(self, pair: Pair, way: Way) -> None:
        way.queued = False
        if pair.over:
            return
        try:
            more = self._pump(pair, way)
        except (OSError, ValueError):
            self._end(pair, broken=True)
            return
        if more:
            self._queue(pair, way)
        elif pair.down.done and (pair.up.done or pair.up.left is not None):
            # A server that has answered a limited request is through with this client.
            self._end(pair)

    def _pump(self, pair: Pair, way: Way) -> bool:
        """Move what can be moved; True if there may be more after others had their turn."""
        turn = TURN
        while not way.done:
            if turn <= 0:
                return True
            moved = self._drain(way) if way.held else self._fill(pair, way)
            if not moved:
                return False
            turn -= moved
            self._moved += moved
        return False

    def _drain(self, way: Way) -> int:
        if not way.writable or way.pipe is None:
            return 0
        try:
            moved = os.splice(way.pipe.out, way.into, way.held, flags=FLAGS)
        except BlockingIOError:
            way.writable = False
            return 0
        way.held -= moved
        if not way.held:
            self._pipes.put(way.pipe, empty=True)
            way.pipe = None
            if way.left == 0:
                way.done = True
        return moved

    def _fill(self, pair: Pair, way: Way) -> int:
        if pair.account is None or not pair.account.capped:
            return self._take_in(pair, way)
        # What is taken and given back a moment later must not look used up meanwhile.
        with pair.account.turns:
            return self._take_in(pair, way)

    def _take_in(self, pair: Pair, way: Way) -> int:
        """Only into an empty pipe: so EAGAIN can only mean an empty socket."""
        if not way.readable:
            return 0
        pipe = self._pipes.take()
        up = way is pair.up
        want = pipe.size if way.left is None else min(pipe.size, way.left)
        granted = pair.account.take(want, up=up) if pair.account else want
        moved = 0
        try:
            if granted:
                moved = os.splice(way.source, pipe.into, granted, flags=FLAGS)
            elif way.origin.recv(1, socket.MSG_PEEK):
                # Exactly the budget is within the budget, one byte more is not.
                raise OSError(pair.account.cut() if pair.account else "over budget")
        except BlockingIOError:
            way.readable = False
            return 0
        finally:
            if not moved:
                self._pipes.put(pipe, empty=True)
            if pair.account:
                pair.account.give_back(granted - moved, up=up)
        if moved:
            way.pipe, way.held = pipe, moved
            if way.left is not None:
                way.left -= moved
        else:
            way.done = True
            way.sink.shutdown(socket.SHUT_WR)
        return moved

    def _end(self, pair: Pair, *, broken: bool = False) -> None:
        if pair.over:
            return
        pair.over = True
        for way in (pair.up, pair.down):
            way.done = True
            if way.pipe is not None:
                self._pipes.put(way.pipe, empty=not way.held)
                way.pipe = None
        for one in pair.sockets:
            if self._pairs.pop(one.fileno(), None) is not None:
                try:
                    self._epoll.unregister(one.fileno())
                except OSError:
                    # Never registered; see `_begin`.
                    pass
            close(one, broken=broken)
        pair.closed()


def close(one: socket.socket, *, broken: bool = False) -> None:
    """Close a socket: with a reset if the stream is cut off, else without one.

    A stream that is cut off must not look complete. And bytes that have come and were not read
    would make a reset of a proper end.
    """
    try:
        if broken:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        else:
            one.shutdown(socket.SHUT_WR)
            for _ in range(MAX_DRAINS):
                if not one.recv(DRAIN, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    break
    except OSError:
        # Closed by the other side already, or empty.
        pass
    one.close()
