"""Listeners, the connections behind them, their bounds, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import socket
from time import monotonic

from ..problems import Problem
from . import answers, listening
from .connection import Connection
from .limits import Limits
from .messages import problem_response
from .watching import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from ssl import SSLContext

    from .messages import Handler, Peer, Request

__all__ = ("Limits", "Server")

# Connections that are taken at once before others have their turn.
ACCEPTS = 64
# No descriptors left: wait for some.
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
PAUSE_SECONDS = 0.2
# What is cancelled may clean up for so long.
CLOSE_SECONDS = 10.0
FULL = Problem("BUSY", "too many connections", rule="http.connections", retry_after=1)


def _log_error(request: Request, error: BaseException) -> None:
    import logging

    logging.getLogger(__name__).error(
        "%s: %s %s", request.id, request.method, request.path, exc_info=error
    )


class _Listener:
    """A socket that listens, and what is done about its file."""

    __slots__ = ("made", "path", "sock", "tls")

    def __init__(
        self, sock: socket.socket, tls: SSLContext | None, path: str = "",
        made: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.sock = sock
        self.tls = tls
        self.path = path
        self.made = made


class Server:
    """HTTP for one handler."""

    def __init__(
        self, handler: Handler, limits: Limits | None = None, *,
        on_bad: Callable[[Peer, Problem], None] | None = None,
        on_error: Callable[[Request, BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_bad` hears of what never became a request, `on_error` of faults of ours."""
        self.handler = handler
        self.limits = limits or Limits()
        self.draining = False
        self.waiting: dict[Connection, None] = {}
        # Handlers that run, also those whose clients have gone.
        self.running: set[asyncio.Task[None]] = set()
        self.watch = Watch()
        self._on_bad = on_bad
        self._on_error = on_error or _log_error
        self._loop = asyncio.get_running_loop()
        self._listeners: list[_Listener] = []
        self._connections: set[Connection] = set()
        self._counts: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._openings: set[asyncio.Task[None]] = set()
        self._interval = _interval(self.limits)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- listening

    async def listen_tcp(
        self, host: str, port: int, ssl: SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen; the address that was bound (port 0: any)."""
        sock = await asyncio.to_thread(listening.tcp, host, port, self.limits.backlog)
        self._listen(_Listener(sock, ssl))
        name = sock.getsockname()
        return str(name[0]), int(name[1])

    async def listen_unix(self, path: str, mode: int = 0o600) -> None:
        """Listen at a path. A stale socket is removed, if nobody answers there."""
        sock, made = listening.unix(path, mode, self.limits.backlog)
        self._listen(_Listener(sock, None, path, made))

    async def adopt(self, sock: socket.socket, ssl: SSLContext | None = None) -> None:
        """Take a socket that somebody else has bound (systemd)."""
        sock.settimeout(0)
        sock.listen(self.limits.backlog)
        self._listen(_Listener(sock, ssl))

    def _listen(self, listener: _Listener) -> None:
        self._listeners.append(listener)
        self._loop.add_reader(listener.sock.fileno(), self._accept, listener)

    def _accept(self, listener: _Listener) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self._rest(listener)
                return
            try:
                self._take(listener, sock, address)
            except OSError:
                # The client went away in the meantime.
                sock.close()

    def _rest(self, listener: _Listener) -> None:
        """Without descriptors the listener would be ready, in vain, all the time."""
        self._evict("")
        self._loop.remove_reader(listener.sock.fileno())
        self._loop.call_later(PAUSE_SECONDS, self._wake, listener)

    def _wake(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.sock.fileno(), self._accept, listener)

    def _take(self, listener: _Listener, sock: socket.socket, address: object) -> None:
        sock.settimeout(0)
        peer, key = listening.peer(sock, address, tls=listener.tls is not None)
        if not self._has_room(key):
            self.bad(peer, FULL)
            _turn_away(sock, tls=peer.tls)
            return
        connection = Connection(self, peer, key, sock.fileno())
        self._connections.add(connection)
        self._counts[key] = self._counts.get(key, 0) + 1
        self.waiting[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._tick)
        task = self._loop.create_task(self._open(connection, sock, listener.tls))
        connection.opening = task
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    async def _open(
        self, connection: Connection, sock: socket.socket, tls: SSLContext | None
    ) -> None:
        # The handshake counts as the head's time: a client that never ends it is a slow client.
        seconds = self.limits.head_seconds if tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, sock, ssl=tls, ssl_handshake_timeout=seconds
            )
        except OSError:
            # A handshake that failed. It is the client's to complain.
            pass
        finally:
            connection.opening = None
            if connection.transport is None:
                sock.close()
                self.forget(connection)

    # --- bounds

    def _has_room(self, key: str) -> bool:
        """Make room if need be: a client that waits gives way to one that comes.

        So a crowd of clients that say nothing, or say it slowly, keeps nobody out.
        """
        if self._counts.get(key, 0) >= self.limits.connections_per_peer:
            return self._evict(key)
        return len(self._connections) < self.limits.connections or self._evict("")

    def _evict(self, key: str) -> bool:
        """Close the one that has waited longest; "" for anybody's."""
        for connection in self.waiting:
            if not key or connection.key == key:
                connection.abort()
                # Its place is free now, not when the loop comes round to it.
                self.forget(connection)
                return True
        return False

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self.waiting.pop(connection, None)
        left = self._counts[connection.key] - 1
        if left:
            self._counts[connection.key] = left
        else:
            del self._counts[connection.key]
        self._changed.set()

    def finished(self, task: asyncio.Task[None]) -> None:
        """A request is done."""
        self.running.discard(task)
        if self.draining:
            self._changed.set()

    def _tick(self) -> None:
        now = monotonic()
        for connection in tuple(self._connections):
            connection.tick(now)
        again = self._connections and not self._closed
        self._timer = self._loop.call_later(self._interval, self._tick) if again else None

    # --- what connections tell

    def bad(self, peer: Peer, problem: Problem) -> None:
        """A request that never became one."""
        if self._on_bad is not None:
            self._on_bad(peer, problem)

    def error(self, request: Request, error: BaseException) -> None:
        """A fault of ours."""
        self._on_error(request, error)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    # --- the end

    async def drain(self, seconds: float) -> bool:
        """Take nothing new, let what runs finish; whether everything has."""
        self.draining = True
        self._stop_listening()
        for connection in tuple(self.waiting):
            connection.close_if_idle()
        return await self._settled(seconds)

    async def _settled(self, seconds: float) -> bool:
        """Wait until nothing runs; whether that was in time."""
        try:
            async with asyncio.timeout(seconds):
                while self._connections or self.running:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End everything now: handlers are cancelled, WebSockets told."""
        if self._closed:
            return
        self._closed = self.draining = True
        self._stop_listening()
        for connection in tuple(self._connections):
            connection.stop()
        for task in (*self.running, *self._openings):
            task.cancel()
        if not await self._settled(CLOSE_SECONDS):
            for connection in tuple(self._connections):
                connection.abort()
            await self._settled(CLOSE_SECONDS)
        if self._timer is not None:
            self._timer.cancel()
        self.watch.close()

    def _stop_listening(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            self._loop.remove_reader(listener.sock.fileno())
            listener.sock.close()
            if listener.path:
                listening.remove(listener.path, listener.made)


def _interval(limits: Limits) -> float:
    """How often time is looked at: often enough for the shortest wait."""
    shortest = min(
        limits.head_seconds, limits.idle_seconds, limits.body_seconds, limits.send_seconds,
        limits.half_closed_seconds, limits.linger_seconds, limits.ping_seconds,
    )  # fmt: skip
    return min(0.5, max(0.01, shortest / 4))


def _turn_away(sock: socket.socket, *, tls: bool) -> None:
    """Say why, if that can be done at once."""
    if not tls:
        response = problem_response(FULL, "")
        body = response.body if isinstance(response.body, bytes) else b""
        plan = answers.plan(
            response.status, response.headers, len(body),
            method="GET", version="HTTP/1.1", request_id="", keep=False,
        )  # fmt: skip
        try:
            sock.send(plan.head + body, socket.MSG_DONTWAIT)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
    sock.close()
