"""Connections that block, kept for the next request."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from . import wire
from .address import proxy_of, tls_context
from .wire import Broken, Reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .address import Settings
    from .calls import Call
    from .wire import Head


class Exchange:
    """An answer that is being read. Close it, whatever happens."""

    def __init__(self, pool: Pool, sock: socket.socket, reader: Reader, head: Head) -> None:
        self._pool = pool
        self._sock: socket.socket | None = sock
        self._reader = reader
        self.head = head

    def read(self) -> bytes:
        """The next piece of the body; b"" at its end."""
        try:
            while self._sock is not None:
                data = self._reader.body()
                if data or self._reader.done:
                    return data
                self._reader.feed(self._sock.recv(wire.PIECE))
        except OSError as error:
            raise Broken(error, sent=True) from None
        return b""

    def everything(self) -> bytes:
        """The rest of the body."""
        pieces = []
        while piece := self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read():
            yield piece

    def detach(self) -> tuple[socket.socket, bytes]:
        """The socket, for another protocol, and what came already."""
        sock, self._sock = self._sock, None
        assert sock is not None  # noqa: S101 - asked once, after a 101
        return sock, self._reader.rest

    def close(self) -> None:
        """Keep the connection if it can be used again."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._reader.done and self._reader.keep and not self._reader.rest:
            self._pool.keep(sock)
        else:
            sock.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pool:
    """Connections to one service. Safe to use from several threads."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], timeout: float) -> None:
        self._settings = settings
        self._tls = tls_context(settings)
        self._proxy = proxy_of(settings.address, environ)
        self._timeout = timeout
        self._lock = threading.Lock()
        # The newest last, each with the time since when it is idle.
        self._idle: list[tuple[float, socket.socket]] = []
        self._closed = False

    def send(self, call: Call, parts: Iterable[bytes] | None = None) -> Exchange:
        """Send a request (`parts`: a body of unknown length) and read the head of its answer."""
        kept = self._reuse(wire.idle_seconds(call)) if parts is None else None
        if kept is not None:
            try:
                return self._exchange(kept, call, None)
            except Broken as broken:
                # It may have been closing. A fresh one tells.
                if broken.sent and not call.again:
                    raise
        try:
            sock = self._connect()
        except OSError as error:
            raise Broken(error, sent=False) from None
        return self._exchange(sock, call, parts)

    def _exchange(self, sock: socket.socket, call: Call, parts: Iterable[bytes] | None) -> Exchange:
        reader = Reader(call.method)
        try:
            whole = self._write(sock, call, parts)
            sock.settimeout(self._timeout * call.patience)
            head = self._head(sock, reader, sent=whole or parts is not None)
            sock.settimeout(self._timeout)
        except BaseException:
            sock.close()
            raise
        return Exchange(self, sock, reader, head)

    def _write(self, sock: socket.socket, call: Call, parts: Iterable[bytes] | None) -> bool:
        """Whether all of it went out. If not, there may be an answer that says why."""
        head = wire.head_of(call, self._settings, chunked=parts is not None)
        try:
            if parts is None:
                sock.sendall(head + call.body)
                return True
            sock.sendall(head)
        except OSError:
            return False
        for part in parts:
            try:
                if part:
                    sock.sendall(wire.chunk(part))
            except OSError:
                return False
        try:
            sock.sendall(wire.LAST_CHUNK)
        except OSError:
            return False
        return True

    def _head(self, sock: socket.socket, reader: Reader, *, sent: bool) -> Head:
        try:
            while reader.head is None:
                reader.feed(sock.recv(wire.PIECE))
        except OSError as error:
            raise Broken(error, sent=sent) from None
        return reader.head

    # --- sockets

    def _connect(self) -> socket.socket:
        address = self._settings.address
        if address.scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(wire.CONNECT_SECONDS)
                sock.connect(address.socket)
            except BaseException:
                sock.close()
                raise
        else:
            sock = socket.create_connection(
                self._proxy or (address.host, address.port), wire.CONNECT_SECONDS
            )
        try:
            if address.scheme != "unix":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._proxy:
                self._tunnel(sock)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=address.host)
            sock.settimeout(self._timeout)
        except BaseException:
            sock.close()
            raise
        return sock

    def _tunnel(self, sock: socket.socket) -> None:
        target = wire.tunnel_target(self._settings.address)
        sock.sendall(wire.request_head("CONNECT", target, target, ()))
        reader = Reader("HEAD")
        while reader.head is None:
            # Byte by byte: what follows the head is TLS, and not ours to read.
            reader.feed(sock.recv(1))
        wire.check_tunnel(reader.head)

    def keep(self, sock: socket.socket) -> None:
        """Take a connection back."""
        with self._lock:
            if not self._closed and len(self._idle) < wire.MOST_IDLE:
                self._idle.append((time.monotonic(), sock))
                return
        sock.close()

    def _reuse(self, seconds: float) -> socket.socket | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, sock = self._idle.pop()
            # Nothing was asked, so whatever can be read is the end.
            if time.monotonic() - since < seconds and not _readable(sock):
                return sock
            sock.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, sock in idle:
            with contextlib.suppress(OSError):
                sock.close()


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
