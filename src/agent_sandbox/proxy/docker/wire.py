"""Sockets and HTTP framing of the Docker filter: what is read is owned here, byte by byte.

Reading waits for readiness and only then takes bytes, so a wait that is cancelled loses nothing.
Nobody is read faster than the other side takes it: the kernel's flow control does the rest.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket

from ...record import Record
from .. import http1

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

PIECE = 256 * 1024
MAX_FIELDS = 128
CONNECT_ATTEMPTS = 500
CONNECT_SECONDS = 0.02


class Broken(OSError):
    """The other side ended in the middle, or spoke something else than HTTP/1.1."""


class Line:
    """A connected socket, and what was read from it and not used yet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self.sock = sock
        self.rest = b""
        self._loop = asyncio.get_running_loop()

    async def connect(self, path: str) -> None:
        """Connect to a unix socket, also when its queue is full."""
        for _ in range(CONNECT_ATTEMPTS):
            try:
                self.sock.connect(path)
            except BlockingIOError:
                # EAGAIN: the queue is full, and nothing tells when it is not.
                await asyncio.sleep(CONNECT_SECONDS)
            else:
                return
        raise Broken(errno.EAGAIN, "it does not accept connections")

    async def receive(self, count: int = PIECE) -> bytes:
        """What has come, at most `count` bytes; nothing at the end."""
        if self.rest:
            data, self.rest = self.rest[:count], self.rest[count:]
            return data
        while True:
            try:
                return self.sock.recv(count)
            except BlockingIOError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)

    async def _wait(
        self, add: Callable[..., object], remove: Callable[[int], object]
    ) -> None:  # fmt: skip
        future = self._loop.create_future()
        fd = self.sock.fileno()
        add(fd, _wake, future)
        try:
            await future
        finally:
            remove(fd)

    async def head(self) -> bytes:
        """A head with its empty line; nothing if the other side has ended instead."""
        data = b""
        while not (length := http1.head_length(data)):
            piece = await self.receive()
            if not piece:
                if data:
                    raise Broken("ended in the middle of a head")
                return b""
            data += piece
        data, self.rest = data[:length], data[length:] + self.rest
        return data

    def end(self) -> None:
        """Say that nothing more will be sent."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            # It is gone already.
            return

    def abort(self) -> None:
        """End both directions, also for whoever is waiting for it here."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Give it back to the kernel."""
        self.sock.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Hangup:
    """Tells when the other side of a unix socket is gone for good, not only done with sending.

    An epoll that asks for nothing is told of hang-ups all the same, and is readable itself then.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._epoll = select.epoll()
        self._epoll.register(sock.fileno(), 0)
        self._loop.add_reader(self._epoll.fileno(), self._note)

    def _note(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        _wake(self.gone)

    def __enter__(self) -> Hangup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


# --- bodies


class Body:
    """The body of one message, taken from its line as far as its framing says and no further."""

    def __init__(self, line: Line, *, length: int | None, chunked: bool) -> None:
        self._line = line
        # None without chunks: until the other side ends.
        self.left = length
        self._chunks = http1.Chunks(framed=False) if chunked else None
        self.done = length == 0 and not chunked

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content, without its framing."""
        while not self.done:
            piece = await self._next()
            if piece:
                yield piece

    async def _next(self) -> bytes:
        if self._chunks is not None:
            data = await self._line.receive()
            if not data:
                raise Broken("ended in the middle of a body")
            content = self._chunks.feed(data)
            if self._chunks.done:
                self._line.rest = self._chunks.rest + self._line.rest
                self.done = True
            return content
        data = await self._line.receive(PIECE if self.left is None else min(PIECE, self.left))
        if self.left is None:
            self.done = not data
        elif not data:
            raise Broken("ended in the middle of a body")
        else:
            self.left -= len(data)
            self.done = not self.left
        return data

    async def whole(self, most: int) -> bytes:
        """All of it."""
        found = []
        size = 0
        async for piece in self.pieces():
            size += len(piece)
            if size > most:
                raise http1.BadRequest(f"the body is larger than {most} bytes", 413)
            found.append(piece)
        return b"".join(found)


def request_body(line: Line, request: http1.Request) -> Body:
    """The body of a request that was parsed."""
    return Body(line, length=request.length, chunked=request.chunked)


# --- the engine's answers


class Answer(Record):
    """The head of an answer."""

    status: int
    reason: str
    # In lower case; a name that comes twice has its last value.
    fields: dict[str, str]

    @property
    def media_type(self) -> str:
        """The content's type without its parameters."""
        return self.fields.get("content-type", "").partition(";")[0].strip().lower()


def parse_answer(head: bytes) -> Answer:
    """A head of HTTP/1.1, as an engine writes it."""
    lines = head.removesuffix(http1.END_OF_HEAD).decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code, _, text = rest.partition(" ")
    good = version in ("HTTP/1.1", "HTTP/1.0") and len(code) == 3 and code.isascii()
    if not good or not code.isdigit() or len(lines) > MAX_FIELDS:
        raise Broken("the engine's answer is not HTTP/1.1")
    fields = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not http1.TOKEN.issuperset(name):
            raise Broken("the engine's answer has a field that is not NAME: VALUE")
        fields[name.lower()] = value.strip(" \t")
    return Answer(status=int(code), reason=text, fields=fields)


def answer_body(line: Line, answer: Answer, method: str) -> Body:
    """The body that belongs to an answer."""
    if method == "HEAD" or answer.status in (204, 304) or answer.status < 200:
        return Body(line, length=0, chunked=False)
    coding = answer.fields.get("transfer-encoding", "").lower()
    if coding:
        if coding != "chunked":
            raise Broken(f"the engine's answer is encoded as {coding}")
        return Body(line, length=None, chunked=True)
    length = answer.fields.get("content-length")
    if length is None:
        return Body(line, length=None, chunked=False)
    if not (length.isascii() and length.isdigit() and len(length) <= http1.MAX_LENGTH_DIGITS):
        raise Broken("the engine's answer has no sensible length")
    return Body(line, length=int(length), chunked=False)


def chunk(data: bytes) -> bytes:
    """One chunk of a body of unknown length; the last one for nothing."""
    return b"%x\r\n%b\r\n" % (len(data), data)
