"""Two ends of a connection that is not relayed by the kernel: plain, or with TLS of our own."""

from __future__ import annotations

import asyncio
import socket
import ssl

from .relay import close

READ = 64 * 1024
HANDSHAKE_SECONDS = 10.0


class Broken(OSError):
    """TLS failed, or the other side is gone."""


class Plain:
    """A socket as it is. `data`: what was read from it already."""

    def __init__(self, sock: socket.socket, data: bytes = b"") -> None:
        self.sock = sock
        self._data = data
        self._loop = asyncio.get_running_loop()

    async def recv(self) -> bytes:
        """Some bytes; none at the end."""
        if self._data:
            data, self._data = self._data, b""
            return data
        return await self._loop.sock_recv(self.sock, READ)

    async def send(self, data: bytes) -> None:
        """All of it."""
        await self._loop.sock_sendall(self.sock, data)

    async def finish(self) -> None:
        """Say that nothing more comes."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            # The other side has closed.
            return

    def close(self, *, broken: bool = False) -> None:
        """The end; with a reset if what was sent is not whole."""
        close(self.sock, broken=broken)


class Secure(Plain):
    """TLS over a socket. One may read while another writes."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool = False,
        name: str | None = None, data: bytes = b"",
    ) -> None:  # fmt: skip
        super().__init__(sock)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._in.write(data)
        self._tls = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=name)
        self._sending = asyncio.Lock()
        # The other side ended without a word: perhaps somebody cut it off.
        self.ragged = False

    async def handshake(self) -> None:
        """Agree on keys; the certificate is checked here. ssl.SSLError, Broken, TimeoutError."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._fill():
                        raise Broken("closed during the TLS handshake") from None
                except ssl.SSLError:
                    # The alert tells the other side why.
                    await self._flush()
                    raise
                else:
                    await self._flush()
                    return

    async def recv(self) -> bytes:
        """Some bytes; none at the end."""
        while True:
            try:
                return self._tls.read(READ)
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    self.ragged = True
                    return b""
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise Broken(str(error.reason)) from None

    async def send(self, data: bytes) -> None:
        """All of it."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._tls.write(view) :]
            except ssl.SSLError as error:
                raise Broken(str(error.reason)) from None
        await self._flush()

    async def finish(self) -> None:
        """Say in TLS that nothing more comes."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            # It waits for the other side's word; ours is written.
            pass
        try:
            await self._flush()
        except OSError:
            return
        await super().finish()

    async def _fill(self) -> bool:
        data = await self._loop.sock_recv(self.sock, READ)
        self._in.write(data)
        return bool(data)

    async def _flush(self) -> None:
        # Records must leave in the order in which they were made.
        async with self._sending:
            if self._out.pending:
                await self._loop.sock_sendall(self.sock, self._out.read())
