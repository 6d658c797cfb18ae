"""Connections of asyncio, kept for the next request. The twin of `blocking`."""

from __future__ import annotations

import asyncio
import contextlib

from . import wire
from .address import proxy_of, tls_context
from .wire import Broken, Reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from .address import Settings
    from .calls import Call
    from .wire import Head


class Connection:
    """A stream both ways, with a time limit on each step."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout
        # How many times longer than usual the next bytes may take.
        self.patience = 1
        self.idle_since = 0.0

    async def read(self) -> bytes:
        """What there is; b"" at the end."""
        async with asyncio.timeout(self._timeout * self.patience):
            return await self._reader.read(wire.PIECE)

    async def read_forever(self) -> bytes:
        """As `read`, however long it takes."""
        return await self._reader.read(wire.PIECE)

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        self._writer.write(data)
        async with asyncio.timeout(self._timeout):
            await self._writer.drain()

    async def start_tls(self, context: object, host: str) -> None:
        """Go on in TLS."""
        await self._writer.start_tls(context, server_hostname=host)  # type: ignore[arg-type]

    def is_alive(self) -> bool:
        """Nothing was asked, so whatever came is the end."""
        # `at_eof` is true only when the buffer is empty, too; a buffer with bytes is not idle.
        waiting = getattr(self._reader, "_buffer", b"")
        return not waiting and not self._reader.at_eof() and not self._writer.is_closing()

    def abort(self) -> None:
        """Close now."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close, and wait until it is closed."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()


class Exchange:
    """An answer that is being read. Close it, whatever happens."""

    def __init__(self, pool: Pool, line: Connection, reader: Reader, head: Head) -> None:
        self._pool = pool
        self._line: Connection | None = line
        self._reader = reader
        self.head = head

    async def read(self) -> bytes:
        """The next piece of the body; b"" at its end."""
        try:
            while self._line is not None:
                data = self._reader.body()
                if data or self._reader.done:
                    return data
                self._reader.feed(await self._line.read())
        except OSError as error:
            raise Broken(error, sent=True) from None
        return b""

    async def everything(self) -> bytes:
        """The rest of the body."""
        return b"".join([piece async for piece in self])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.read():
            yield piece

    def detach(self) -> tuple[Connection, bytes]:
        """The connection, for another protocol, and what came already."""
        line, self._line = self._line, None
        assert line is not None  # noqa: S101 - asked once, after a 101
        return line, self._reader.rest

    async def close(self) -> None:
        """Keep the connection if it can be used again."""
        line, self._line = self._line, None
        if line is None:
            return
        if self._reader.done and self._reader.keep and not self._reader.rest:
            await self._pool.keep(line)
        else:
            line.abort()
            await line.close()

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Pool:
    """Connections to one service, for one loop."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], timeout: float) -> None:
        self._settings = settings
        self._tls = tls_context(settings)
        self._proxy = proxy_of(settings.address, environ)
        self._timeout = timeout
        self._idle: list[Connection] = []
        self._closed = False

    async def send(self, call: Call, parts: AsyncIterator[bytes] | None = None) -> Exchange:
        """Send a request (`parts`: a body of unknown length) and read the head of its answer."""
        kept = await self._reuse(wire.idle_seconds(call)) if parts is None else None
        if kept is not None:
            try:
                return await self._exchange(kept, call, None)
            except Broken as broken:
                # It may have been closing. A fresh one tells.
                if broken.sent and not call.again:
                    raise
        try:
            async with asyncio.timeout(wire.CONNECT_SECONDS):
                line = await self._connect()
        except OSError as error:
            raise Broken(error, sent=False) from None
        return await self._exchange(line, call, parts)

    async def _exchange(
        self, line: Connection, call: Call, parts: AsyncIterator[bytes] | None
    ) -> Exchange:
        reader = Reader(call.method)
        try:
            whole = await self._write(line, call, parts)
            line.patience = call.patience
            head = await self._head(line, reader, sent=whole or parts is not None)
            line.patience = 1
        except BaseException:
            line.abort()
            raise
        return Exchange(self, line, reader, head)

    async def _write(
        self, line: Connection, call: Call, parts: AsyncIterator[bytes] | None
    ) -> bool:
        """Whether all of it went out. If not, there may be an answer that says why."""
        head = wire.head_of(call, self._settings, chunked=parts is not None)
        try:
            await line.write(head + call.body if parts is None else head)
        except OSError:
            return False
        if parts is None:
            return True
        async for part in parts:
            try:
                if part:
                    await line.write(wire.chunk(part))
            except OSError:
                return False
        try:
            await line.write(wire.LAST_CHUNK)
        except OSError:
            return False
        return True

    async def _head(self, line: Connection, reader: Reader, *, sent: bool) -> Head:
        try:
            while reader.head is None:
                reader.feed(await line.read())
        except OSError as error:
            raise Broken(error, sent=sent) from None
        return reader.head

    # --- sockets

    async def _connect(self) -> Connection:
        address = self._settings.address
        if address.scheme == "unix":
            streams = await asyncio.open_unix_connection(address.socket, limit=wire.PIECE)
            return Connection(*streams, self._timeout)
        if self._proxy is None:
            host = address.host if self._tls is not None else None
            streams = await asyncio.open_connection(
                address.host, address.port, limit=wire.PIECE, ssl=self._tls, server_hostname=host
            )
            return Connection(*streams, self._timeout)
        return await self._tunnelled(*self._proxy)

    async def _tunnelled(self, host: str, port: int) -> Connection:
        reader, writer = await asyncio.open_connection(host, port, limit=wire.PIECE)
        line = Connection(reader, writer, self._timeout)
        try:
            target = wire.tunnel_target(self._settings.address)
            await line.write(wire.request_head("CONNECT", target, target, ()))
            answer = Reader("HEAD")
            answer.feed(await reader.readuntil(wire.END))
            assert answer.head is not None  # noqa: S101 - it ends with the empty line
            wire.check_tunnel(answer.head)
            await line.start_tls(self._tls, self._settings.address.host)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            line.abort()
            raise ConnectionResetError("the proxy of https_proxy broke off") from None
        except BaseException:
            line.abort()
            raise
        return line

    async def keep(self, line: Connection) -> None:
        """Take a connection back."""
        if self._closed or len(self._idle) >= wire.MOST_IDLE:
            await line.close()
            return
        line.idle_since = asyncio.get_running_loop().time()
        self._idle.append(line)

    async def _reuse(self, seconds: float) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if now - line.idle_since < seconds and line.is_alive():
                return line
            await line.close()
        return None

    async def close(self) -> None:
        """Close what is idle; what is in use is closed when it is given back."""
        self._closed = True
        idle, self._idle = self._idle, []
        for line in idle:
            await line.close()
