"""A connection of the service, in the process that serves it: frames in, frames out, no waiting."""

from __future__ import annotations

import os
import select
import ssl
import time

from . import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 1 << 16


class Gone(Exception):
    """The service is not there any more, or does not speak the protocol."""


class Line:
    """One connection. `pump` moves what can be moved."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self._reader = frames.Reader(frames.TO_AGENT)
        self._out = bytearray()

    def fileno(self) -> int:
        """For poll."""
        return self.sock.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that the service has not taken yet."""
        return len(self._out)

    @property
    def is_empty(self) -> bool:
        """Whether no part of a frame has been received."""
        return self._reader.is_empty

    def say(self, data: bytes) -> None:
        """Send a frame as soon as there is room."""
        self._out += data

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._out:
                sent = self.sock.send(memoryview(self._out)[:PIECE])
                del self._out[:sent]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise Gone(str(error)) from error

    def take(self) -> Iterator[tuple[bytes, bytes]]:
        """Frames that are there now. Gone at the end of the stream."""
        while True:
            try:
                data = self.sock.recv(PIECE)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise Gone(str(error)) from error
            if not data:
                raise Gone("the service has closed the connection")
            self._reader.feed(data)
            yield from self.held()

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        """Frames that were received already, and those that are there now."""
        yield from self.held()
        yield from self.take()

    def held(self) -> Iterator[tuple[bytes, bytes]]:
        """Frames that were received already."""
        try:
            while (found := self._reader.next()) is not None:
                yield found
        except frames.BadFrame as error:
            raise Gone(str(error)) from error

    # --- for a process that does one thing after the other

    def next(self, seconds: float) -> tuple[bytes, bytes]:
        """The next frame, waited for."""
        deadline = time.monotonic() + seconds
        while True:
            for found in self.held():
                return found
            try:
                data = self.sock.recv(PIECE)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise Gone(str(error)) from error
            if not data:
                raise Gone("the service has closed the connection")
            self._reader.feed(data)

    def send(self, data: bytes, seconds: float) -> None:
        """Send, and wait until it is on its way."""
        deadline = time.monotonic() + seconds
        self.say(data)
        self.flush()
        while self._out:
            self._wait(select.POLLOUT, deadline)
            self.flush()

    def finish(self, seconds: float) -> None:
        """Wait until the service has seen the end: a close with input unread would cut it off."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                self.next(max(0.0, deadline - time.monotonic()))
        except Gone:
            return

    def _wait(self, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self.sock.fileno(), event)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise Gone("the service is too slow")

    def abandon(self) -> None:
        """Forget it without a word: another process speaks on it."""
        os.close(self.sock.detach())
