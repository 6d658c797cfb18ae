"""HTTP/1.1 to one API server, over asyncio's streams: a few connections that are used again.

Not the official client: that is synchronous, loads 50 megabytes of generated classes in seconds,
and we make a dozen kinds of calls. The reader of answers is the one of our own client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from urllib.parse import urlencode

from ... import __version__
from ...client import wire
from ...errors import SandboxError
from ..problems import Problem
from .kube_objects import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from .kube_config import Access
    from .kube_credentials import Credentials

CONNECT_SECONDS, CALL_SECONDS = 10.0, 60.0
# The API server keeps idle connections for minutes, load balancers before it often for one.
IDLE_SECONDS, MOST_IDLE = 30.0, 16
# More calls than this at once wait for each other: a full API server would only answer 429.
MOST_CALLS = 64
MOST_BODY = 64 << 20
MOST_REFUSAL = 64 << 10
PIECE = 256 << 10
# How long an idle connection may take to begin its answer to what can be asked again.
FIRST_SECONDS = 10.0
# A dead connection is noticed within 10 + 3 * 5 seconds, also when nothing is to be sent.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)  # fmt: skip
AGENT = f"agent-sandbox/{__version__}"
JSON = "application/json"
# Reading is safe to repeat on a connection that turned out dead.
SAFE = frozenset({"GET"})


class Refusal(Exception):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


def unavailable(why: object) -> Problem:
    """The cluster cannot be used."""
    return Problem("BACKEND_UNAVAILABLE", f"the cluster is not usable: {why}", retry_after=2.0)


def watch_over(sock: socket.socket) -> None:
    """Let the kernel notice when the other side is gone without a word."""
    for level, name, value in KEEPALIVE:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, name, value)


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    async def send(self, data: bytes) -> None:
        """All of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> bytes:
        """What there is; b"" at the end."""
        return await self.reader.read(PIECE)

    def usable(self) -> bool:
        """Whether it may carry another request."""
        fresh = time.monotonic() - self.idle_since < IDLE_SECONDS
        return fresh and not self.reader.at_eof() and not self.writer.is_closing()

    def close(self) -> None:
        """At once. What TLS still wants to say is not worth a wait."""
        self.writer.transport.abort()


class Http:
    """Calls to one API server. Only one loop may use it."""

    def __init__(self, access: Access, credentials: Credentials) -> None:
        self._access = access
        self._credentials = credentials
        self._idle: list[Line] = []
        self._room = asyncio.Semaphore(MOST_CALLS)
        self._context: ssl.SSLContext | None = None
        self._closed = False

    # --- connections

    async def connect(self) -> Line:
        """A new connection."""
        access = self._access
        await self._credentials.token()
        context = self._credentials.context()
        if context is not self._context:
            # Another certificate: the old connections are somebody else's.
            self._context = context
            self._drop()
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                access.host, access.port, ssl=context, limit=PIECE,
                server_hostname=(access.server_name or access.host) if context else None,
            )  # fmt: skip
        watch_over(writer.get_extra_info("socket"))
        return Line(reader, writer)

    def _reuse(self) -> Line | None:
        while self._idle:
            line = self._idle.pop()
            if line.usable():
                return line
            line.close()
        return None

    def _keep(self, line: Line, answer: wire.Reader) -> None:
        if self._closed or not answer.keep or answer.rest or len(self._idle) >= MOST_IDLE:
            line.close()
            return
        line.idle_since = time.monotonic()
        self._idle.append(line)

    def _drop(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        """Close what is idle; what is in use is closed by its users."""
        self._closed = True
        self._drop()
        # The loop closes their sockets in its next turn.
        await asyncio.sleep(0)

    # --- requests

    async def head(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: bytes,
        headers: Mapping[str, str], *, refused: bool = False,
    ) -> bytes:  # fmt: skip
        """The head of a request."""
        access = self._access
        target = access.prefix + path + (f"?{urlencode(query)}" if query else "")
        host = f"[{access.host}]" if ":" in access.host else access.host
        fields = {"Accept": JSON, "User-Agent": AGENT, **headers}
        token = await self._credentials.token(refused=refused)
        if token:
            fields["Authorization"] = f"Bearer {token}"
        if body or method not in SAFE:
            fields["Content-Length"] = str(len(body))
        return wire.request_head(method, target, f"{host}:{access.port}", fields.items())

    async def call(
        self, method: str, path: str, *, query: Sequence[tuple[str, str]] = (),
        document: object = None, kind: str = JSON,
    ) -> object:  # fmt: skip
        """A question; the document of its answer, or Refusal."""
        body = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
        data = await self._ask(method, path, query, body, {"Content-Type": kind} if body else {})
        try:
            return json.loads(data)
        except ValueError as error:
            raise unavailable("it answers what is not JSON") from error

    async def fetch(self, path: str, *, query: Sequence[tuple[str, str]] = ()) -> bytes:
        """What is no document, whole."""
        return await self._ask("GET", path, query, b"", {"Accept": "*/*"})

    async def _ask(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: bytes,
        headers: Mapping[str, str],
    ) -> bytes:  # fmt: skip
        with words():
            async with self._room, asyncio.timeout(CALL_SECONDS):
                status, data = await self._exchange(method, path, query, body, headers)
                if status == 401 and self._credentials.can_renew:
                    status, data = await self._exchange(
                        method, path, query, body, headers, refused=True
                    )
        if status >= 300:
            raise refusal(status, data)
        return data

    async def _exchange(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: bytes,
        headers: Mapping[str, str], *, refused: bool = False,
    ) -> tuple[int, bytes]:  # fmt: skip
        head = await self.head(method, path, query, body, headers, refused=refused)
        line = self._reuse()
        if line is not None:
            # Closed while it was idle, or forgotten by something in between, which says nothing.
            # What changes something is not sent twice: nobody knows whether the first one has
            # arrived.
            if method not in SAFE:
                return await self._once(line, method, head + body)
            with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
                return await self._once(line, method, head + body, FIRST_SECONDS)
        return await self._once(await self.connect(), method, head + body)

    async def _once(
        self, line: Line, method: str, request: bytes, first: float | None = None
    ) -> tuple[int, bytes]:
        """One request and its answer, whose head comes within `first` seconds."""
        answer = wire.Reader(method)
        done = False
        try:
            async with asyncio.timeout(first):
                await line.send(request)
                while answer.head is None:
                    answer.feed(await line.receive())
            parts: list[bytes] = []
            size = 0
            most = MOST_BODY if answer.head.status < 300 else MOST_REFUSAL
            while True:
                piece = answer.body()
                size += len(piece)
                if size > most:
                    raise unavailable("its answer is too large")
                parts.append(piece)
                if answer.done:
                    break
                if not piece:
                    answer.feed(await line.receive())
            done = True
            return answer.head.status, b"".join(parts)
        finally:
            if done:
                self._keep(line, answer)
            else:
                line.close()

    async def stream(
        self, path: str, *, query: Sequence[tuple[str, str]] = (), quiet: float = CALL_SECONDS
    ) -> AsyncGenerator[bytes]:  # fmt: skip
        """The body of a GET as it comes; nothing for `quiet` seconds is an end with an error.

        A body that is cut off ends with Problem, a whole one just ends. It must be closed.
        """
        with words():
            line = await self.connect()
        answer = wire.Reader("GET")
        try:
            with words():
                async with asyncio.timeout(CALL_SECONDS):
                    await line.send(await self.head("GET", path, query, b"", {}))
                    while answer.head is None:
                        answer.feed(await line.receive())
                    if answer.head.status >= 300:
                        raise refusal(answer.head.status, await _refused(line, answer))
            while True:
                with words():
                    piece = answer.body()
                    if not piece and not answer.done:
                        async with asyncio.timeout(quiet):
                            answer.feed(await line.receive())
                        continue
                if piece:
                    yield piece
                if answer.done:
                    return
        finally:
            line.close()


async def _refused(line: Line, answer: wire.Reader) -> bytes:
    data = b""
    while not answer.done and len(data) < MOST_REFUSAL:
        piece = answer.body()
        data += piece
        if not piece and not answer.done:
            answer.feed(await line.receive())
    return data


def refusal(status: int, data: bytes) -> Refusal:
    """A refusal in the API server's words (a Status), or in those of whoever stands before it."""
    try:
        document: object = json.loads(data)
    except ValueError:
        document = {}
    message = text(document, "message") or data[:200].decode("utf-8", "replace").strip()
    return Refusal(status, text(document, "reason"), message[:500])


@contextlib.contextmanager
def words() -> Iterator[None]:
    """Whatever goes wrong between us and the API server, as the one Problem that it is."""
    try:
        yield
    except TimeoutError as error:
        raise unavailable("it does not answer in time") from error
    except ssl.SSLCertVerificationError as error:
        raise unavailable(f"its certificate is not trusted: {error.verify_message}") from error
    except OSError as error:
        raise unavailable(error.strerror or error) from error
    except SandboxError as error:
        if isinstance(error, Problem):
            raise
        raise unavailable(error.message) from error
