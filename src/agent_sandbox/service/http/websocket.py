"""A WebSocket of the server, above the frames and below a handler."""

from __future__ import annotations

import asyncio
from collections import deque

from . import frames
from .limits import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Wire(Protocol):
        """The connection, as far as a WebSocket needs it."""

        def write(self, data: bytes) -> None:
            """Send, or keep until it can be sent."""

        def is_stuck(self) -> bool:
            """Whether the client does not read."""

        async def drained(self) -> None:
            """Return when the client reads again, or has gone."""

        def pause(self) -> None:
            """Read no more for now."""

        def resume(self) -> None:
            """Read again."""

        def hang_up(self) -> None:
            """Close when everything is sent."""

        def abort(self) -> None:
            """Close now."""


# Frames that are read before others have their turn: 256 KiB can be 40,000 of them.
AT_ONCE = 256


class WebSocketClosed(ConnectionError):
    """The other end has closed or gone."""


class WebSocket:
    """Messages both ways. `receive` gives None at the end; `send` then raises WebSocketClosed."""

    def __init__(self, wire: Wire, limits: Limits | None = None, protocol: str = "") -> None:
        self._wire = wire
        self._limits = limits or Limits()
        self.protocol = protocol
        # Why it ended: what the other end said, or 1006 if it just went.
        self.code: int | None = None
        self.reason = ""
        self._reader = frames.Reader(masked=True, limit=self._limits.message_bytes)
        self._queue: deque[bytes | str] = deque()
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._close_sent = False
        # The connection is gone; what came before that may still be unread.
        self._gone = False
        # The reader may have complete messages; they wait until the handler has fetched others.
        self._more = False
        self._full = False
        # The other end's close frame was read, or nothing will come.
        self._over = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()
        self._asked = False
        # The answer to the last ping, while the client does not read.
        self._pong: bytes | None = None

    # --- the handler's side

    async def receive(self) -> bytes | str | None:
        """The next message; None when there will be no more."""
        while not self._queue:
            if self._over.is_set():
                return None
            if self._waiter is not None:
                raise RuntimeError("two readers of one WebSocket")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._queue.popleft()
        self._held -= len(message)
        if self._full and not self._queue:
            self._read_on()
        return message

    async def send(self, data: bytes | str) -> None:
        """Send a message; return when the client keeps up."""
        if self._close_sent or self._gone or self._over.is_set():
            raise WebSocketClosed("the WebSocket is closed")
        if isinstance(data, str):
            self._wire.write(frames.encode(frames.TEXT, data.encode()))
        else:
            self._wire.write(frames.encode(frames.BINARY, bytes(data)))
        if self._wire.is_stuck():
            await self._wire.drained()
            self._send_pong()

    async def close(self, code: int = frames.NORMAL, reason: str = "") -> None:
        """Say so, wait for the other end to say so too, and hang up."""
        self.start_close(code, reason)
        if self._full:
            # Nobody fetches what waits; behind it is the other end's close.
            self._queue.clear()
            self._held = 0
            self._read_on()
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                await self._over.wait()
        except TimeoutError:
            self._wire.abort()
        else:
            self._wire.hang_up()

    # --- the connection's side

    def feed(self, data: bytes) -> None:
        """What the client has sent."""
        self._heard = asyncio.get_running_loop().time()
        self._asked = False
        if not self._over.is_set():
            self._reader.push(data)
            self._pump()

    def _read_on(self) -> None:
        """Another portion, after everybody else has had a turn."""
        self._full = False
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Read a portion of what has come. While there is more, nothing new is taken in."""
        try:
            self._more = self._read_some()
        except frames.FrameError as error:
            self.fail(error)
            return
        if self._over.is_set():
            return
        if self._more:
            self._wire.pause()
            self._full = self._is_full()
            if not self._full:
                self._read_on()
        elif self._gone:
            self._end(frames.ABNORMAL, "")
        else:
            self._wire.resume()

    def _read_some(self) -> bool:
        """Whether there may be more."""
        for _ in range(AT_ONCE):
            if self._is_full():
                return True
            message = self._reader.next()
            if message is None or self._over.is_set():
                return False
            self._take(*message)
        return True

    def fail(self, error: frames.FrameError) -> None:
        """The client broke the rules: tell it, and read no more."""
        self.start_close(error.code, str(error))
        self._end(error.code, str(error))
        self._wire.hang_up()

    def lost(self) -> None:
        """The connection is gone. What came before is still for the handler."""
        self._gone = True
        if not self._more:
            self._end(frames.ABNORMAL, "")

    def start_close(self, code: int, reason: str = "") -> None:
        """Send a close frame, once."""
        if not self._close_sent and not self._gone and not self._over.is_set():
            self._close_sent = True
            self._wire.write(frames.encode(frames.CLOSE, frames.close_payload(code, reason)))

    def tick(self, now: float, *, paused: bool) -> None:
        """Ask a silent client whether it is there. While we do not read, its silence is ours."""
        if paused or self._over.is_set():
            self._heard = now
        elif now - self._heard >= 2 * self._limits.ping_seconds:
            self._wire.abort()
        elif now - self._heard >= self._limits.ping_seconds and not self._asked:
            self._asked = True
            if not self._close_sent:
                self._wire.write(frames.encode(frames.PING, b""))

    def _take(self, kind: int, payload: bytes | str) -> None:
        if kind == frames.PING:
            self._pong = bytes(payload) if isinstance(payload, bytes) else b""
            self._send_pong()
        elif kind == frames.CLOSE and isinstance(payload, bytes):
            code, reason = frames.read_close(payload)
            self.start_close(code)
            self._end(code, reason)
            self._wire.hang_up()
        elif kind in (frames.TEXT, frames.BINARY) and not self._close_sent:
            # After our close frame there is nobody to read.
            self._keep(payload)

    def _send_pong(self) -> None:
        """Only the last ping needs an answer. A client that floods and never reads gets one."""
        if self._pong is not None and not self._wire.is_stuck() and not self._close_sent:
            self._wire.write(frames.encode(frames.PONG, self._pong))
            self._pong = None

    def _keep(self, message: bytes | str) -> None:
        self._queue.append(message)
        self._held += len(message)
        self._wake()

    def _is_full(self) -> bool:
        return (
            len(self._queue) >= self._limits.messages_held
            or self._held >= self._limits.messages_held_bytes
        )

    def _end(self, code: int, reason: str) -> None:
        if not self._over.is_set():
            self.code, self.reason = code, reason
            self._over.set()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
