"""HTTP/1.1 as a client, towards another replica: pinned TLS, strict answers, bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ssl
from time import monotonic

from ...proxy import http1
from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

CONNECT_SECONDS = 5.0
# A little less than a server waits for the next request.
IDLE_SECONDS = 30.0
MOST_IDLE = 16
HEAD_BYTES = 64 * 1024
FIELDS = 128
PIECE = 64 * 1024
BODILESS = (204, 304)
SWITCHING = 101


class Unreached(ConnectionError):
    """No byte of the request has left us: it may be tried again, or elsewhere."""


class Broken(ConnectionError):
    """The other end went away, or spoke nonsense, in the middle."""


class Address(Record):
    """Where a replica listens for others, and the certificate that it has."""

    host: str
    port: int
    # SHA-256 of the certificate, in hexadecimal; "": no TLS.
    fingerprint: str = ""

    @property
    def authority(self) -> str:
        """As a Host field has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Head(Record):
    """The head of an answer."""

    status: int
    fields: tuple[tuple[str, str], ...]
    # None: it is chunked, or ends with the connection.
    length: int | None
    chunked: bool
    keep: bool

    def field(self, name: str) -> str:
        """The value of a field; "" without one."""
        return next((value for key, value in self.fields if key == name), "")


def parse(data: bytes) -> Head:
    """A head with its empty line. Raises Broken for what two readers could read differently."""
    try:
        lines = data.removesuffix(http1.END_OF_HEAD).decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise Broken("an answer that is not ASCII") from None
    version, _, rest = lines[0].partition(" ")
    code = rest.partition(" ")[0]
    if version != "HTTP/1.1" or not (code.isdigit() and len(code) == 3) or len(lines) > FIELDS:
        raise Broken("an answer that is not HTTP/1.1")
    fields = tuple(map(_field, lines[1:]))
    lengths = [value for name, value in fields if name == "content-length"]
    codings = [value for name, value in fields if name == "transfer-encoding"]
    if len(lengths) + len(codings) > 1 or any(value != "chunked" for value in codings):
        raise Broken("an answer with two lengths")
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) <= http1.MAX_LENGTH_DIGITS):
        raise Broken("an answer with a length that is no number")
    return Head(
        status=int(code), fields=fields, length=int(lengths[0]) if lengths else None,
        chunked=bool(codings), keep=("connection", "close") not in fields,
    )  # fmt: skip


def _field(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    value = value.strip(" \t")
    if not colon or not name or not http1.TOKEN.issuperset(name) or not value.isprintable():
        raise Broken("an answer with a field that is none")
    return name.lower(), value


class Link:
    """One connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.since = monotonic()

    async def send(self, data: bytes) -> None:
        """Send, and wait while the other end does not read."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Head:
        """The next answer's head."""
        try:
            data = await self.reader.readuntil(http1.END_OF_HEAD)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise Broken("no answer") from error
        return parse(data)

    async def body(self, head: Head, method: str) -> AsyncIterator[bytes]:
        """The content, piece by piece. Raises Broken when it ends before its end."""
        if method == "HEAD" or head.status in BODILESS:
            return
        if head.chunked:
            chunks = http1.Chunks(framed=False)
            while not chunks.done:
                data = await self.read(PIECE)
                if not data:
                    raise Broken("an answer that is cut off")
                try:
                    content = chunks.feed(data)
                except http1.BadRequest as error:
                    raise Broken("an answer with bad chunks") from error
                if content:
                    yield content
            if chunks.rest:
                raise Broken("more than one answer")
            return
        left = head.length
        while left is None or left:
            data = await self.read(PIECE if left is None else min(PIECE, left))
            if not data:
                if left is None:
                    return
                raise Broken("an answer that is cut off")
            if left is not None:
                left -= len(data)
            yield data

    async def read(self, size: int) -> bytes:
        """Some bytes; b"" at the end."""
        try:
            return await self.reader.read(size)
        except OSError as error:
            raise Broken("the connection broke") from error

    def end_input(self) -> None:
        """Our client has gone: the other end learns it, and may still answer."""
        with contextlib.suppress(OSError, RuntimeError):
            if self.writer.can_write_eof():
                self.writer.write_eof()
            else:
                self.writer.close()

    @property
    def usable(self) -> bool:
        """Whether a further request may go out on it."""
        return (
            not self.reader.at_eof()
            and not self.writer.is_closing()
            and self.reader.exception() is None
            and monotonic() - self.since < IDLE_SECONDS
        )

    def close(self) -> None:
        """Now. Whoever reads is told."""
        self.writer.transport.abort()


class Upstream:
    """Connections to other replicas; a few stay open for the next request."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[Link]] = {}
        self._context: ssl.SSLContext | None = None

    async def open(self, address: Address) -> Link:
        """One that no other request uses. Raises Unreached."""
        if not address.port:
            # It has begun to live, and does not listen yet.
            raise Unreached("the replica does not listen yet")
        idle = self._idle.get(address, [])
        while idle:
            link = idle.pop()
            if link.usable:
                return link
            link.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._connect(address)
        except (OSError, TimeoutError) as error:
            raise Unreached(f"replica at {address.authority} does not answer") from error

    async def _connect(self, address: Address) -> Link:
        tls = self._tls() if address.fingerprint else None
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=tls, limit=HEAD_BYTES
        )
        link = Link(reader, writer)
        # Before a byte of anybody's token is sent.
        if tls is not None and not _is_pinned(writer, address.fingerprint):
            link.close()
            raise Unreached(f"replica at {address.authority} has another certificate")
        return link

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            # No authority says who a replica is: the state that all share has its certificate.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.set_alpn_protocols(["http/1.1"])
            self._context = context
        return self._context

    def keep(self, address: Address, link: Link) -> None:
        """It may be used again: its answer was read to the end."""
        idle = self._idle.setdefault(address, [])
        link.since = monotonic()
        if len(idle) < MOST_IDLE and link.usable:
            idle.append(link)
        else:
            link.close()

    def forget(self, address: Address) -> None:
        """Its replica is gone."""
        for link in self._idle.pop(address, ()):
            link.close()

    def close(self) -> None:
        """All of them."""
        for address in tuple(self._idle):
            self.forget(address)


def fingerprint(certificate: bytes) -> str:
    """Of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()


def _is_pinned(writer: asyncio.StreamWriter, wanted: str) -> bool:
    shown: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    certificate = shown.getpeercert(binary_form=True) if shown is not None else None
    return certificate is not None and hmac.compare_digest(fingerprint(certificate), wanted)


def request_head(
    method: str, target: str, fields: Iterable[tuple[str, str]], *, length: int | None
) -> bytes:
    """A head that goes out. `length` None: chunked."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
