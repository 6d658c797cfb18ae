"""A server with a handler of the test's own, and raw clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent_sandbox.service.http.messages import Peer, Request, Response, json_response
from agent_sandbox.service.http.server import Limits, Server

if TYPE_CHECKING:
    from agent_sandbox.service.http.messages import Handler
    from agent_sandbox.service.problems import Problem

PATIENCE = 10.0
HOST = b"Host: x\r\n"


def get(path: str, extra: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path.encode(), HOST, extra)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """One test in a loop of its own; it must end, and leave no task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for _ in range(100):
            left = {task for task in left if not task.done()}
            if not left:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {left}")

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of a process that knows nothing of tests
            await asyncio.sleep(0.005)


class Answer:
    """What a client has read."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["code"])


class Client:
    """Bytes to the server and answers from it, with a reader of the test's own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(PATIENCE):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.removesuffix("\r\n\r\n").split("\r\n")
        pairs = [line.partition(": ") for line in lines]
        return int(first.split(" ")[1]), {name.lower(): value for name, _, value in pairs}

    async def answer(self, *, head_only: bool = False) -> Answer:
        status, headers = await self.head()
        async with asyncio.timeout(PATIENCE):
            body = b"" if head_only else await self._body(status, headers)
        return Answer(status, headers, body)

    async def _body(self, status: int, headers: dict[str, str]) -> bytes:
        if status in (101, 204, 304):
            return b""
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        found: list[bytes] = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            found.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return b"".join(found)

    async def rest(self) -> bytes:
        """Everything up to the end; a reset is an end too."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    def close(self) -> None:
        self.writer.close()


class Lab:
    """A server and what it told."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port
        self.bad: list[tuple[Peer, Problem]] = []
        self.errors: list[BaseException] = []
        self._clients: list[Client] = []

    async def client(self, tls: ssl.SSLContext | None = None, limit: int = 2**16) -> Client:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, limit=limit,
            server_hostname="localhost" if tls else None,
        )  # fmt: skip
        return self.adopt(Client(reader, writer))

    async def unix(self, path: str) -> Client:
        return self.adopt(Client(*await asyncio.open_unix_connection(path)))

    def adopt(self, client: Client) -> Client:
        self._clients.append(client)
        return client

    async def ask(self, data: bytes) -> Answer:
        """One request on a connection of its own."""
        client = await self.client()
        try:
            return await client.ask(data)
        finally:
            client.close()

    async def end(self) -> None:
        for client in self._clients:
            client.close()
        await self.server.close()


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, limits: Limits | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Lab]:
    lab: Lab
    server = Server(
        handler, limits,
        on_bad=lambda peer, problem: lab.bad.append((peer, problem)),
        on_error=lambda _, error: lab.errors.append(error),
    )  # fmt: skip
    _, port = await server.listen_tcp("127.0.0.1", 0, tls)
    lab = Lab(server, port)
    try:
        yield lab
    finally:
        await lab.end()


async def echo(request: Request) -> Response:
    """What was understood."""
    body = await request.body(10 * 1024 * 1024)
    seen = {
        "method": request.method, "path": request.path, "query": dict(request.query),
        "headers": dict(request.headers), "body": body.decode("latin-1"), "id": request.id,
    }  # fmt: skip
    return json_response(200, seen)


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's, with a certificate for localhost."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, secret = directory / "cert.pem", directory / "key.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ))  # fmt: skip
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(pem, secret)
    return server, ssl.create_default_context(cafile=str(pem))
