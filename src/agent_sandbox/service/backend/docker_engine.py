"""The engine's socket, for the service: questions, streams and archives, and refusals in words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import quote, urlencode

from ...proxy.docker import engine, wire
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

# Nothing that the engine does for one sandbox takes this long.
CALL_SECONDS = 120.0
MAX_MESSAGE = 64 << 10
TAR = (("Content-Type", "application/x-tar"),)
JSON = (("Content-Type", "application/json"),)


class Refusal(Exception):
    """The engine said no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def unavailable(why: object) -> Problem:
    """The engine cannot be used."""
    return Problem("BACKEND_UNAVAILABLE", f"the container engine is not usable: {why}")


class Engine:
    """An engine behind a unix socket, always asked in one version of its API."""

    def __init__(self, path: str) -> None:
        self._client = engine.Client(path)
        self._asked: asyncio.Task[None] | None = None
        self.podman = False

    @property
    def api(self) -> tuple[int, int]:
        """The version in use."""
        return engine.version(self._client.api)

    async def hello(self) -> None:
        """Agree on a version."""
        with _words():
            found = await self._client.probe()
        self.podman = found.name == "podman"

    async def _path(self, path: str) -> str:
        if not self._client.api:
            await self.hello()
        return f"/v{self._client.api}{path}"

    async def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None,
        document: object = None,
    ) -> object:  # fmt: skip
        """A question; the document of its answer, or Refusal."""
        target = await self._path(path)
        with _words():
            async with asyncio.timeout(CALL_SECONDS):
                answer, found = await self._client.ask(
                    method, target, urlencode(query or {}), document
                )
        if answer.status >= 300 and answer.status != 304:
            raise Refusal(answer.status, _message(found))
        return found

    async def head(self, path: str, query: Mapping[str, str]) -> Mapping[str, str]:
        """The fields of an answer without a body."""
        target = await self._path(path)
        with _words():
            async with asyncio.timeout(CALL_SECONDS):
                answer, _ = await self._client.ask("HEAD", target, urlencode(query))
        if answer.status >= 300:
            raise Refusal(answer.status, answer.reason)
        return answer.fields

    async def hijack(
        self, path: str, query: Mapping[str, str] | None = None, document: object = None
    ) -> wire.Line:
        """A connection that becomes a stream in both directions."""
        body = b"" if document is None else json.dumps(document).encode()
        target = await self._path(path)
        with _words():
            line = await self._client.connect()
            async with _closing_on_error(line):
                head = engine.head(
                    "POST", target, urlencode(query or {}), JSON if body else (),
                    length=len(body), upgrade=True,
                )  # fmt: skip
                await line.send(head + body)
                answer = await engine.first(line)
                if answer.status not in (101, 200):
                    raise Refusal(answer.status, await _refused(line, answer, "POST"))
        return line

    async def download(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """The body of an answer, as it comes. It must be exhausted or closed."""
        target = await self._path(path)
        with _words():
            line = await self._client.connect()
            async with _closing_on_error(line):
                await line.send(engine.head("GET", target, urlencode(query), ()))
                answer = await engine.first(line)
                if answer.status != 200:
                    raise Refusal(answer.status, await _refused(line, answer, "GET"))
        return _pieces(line, wire.answer_body(line, answer, "GET"))

    async def upload(
        self, method: str, path: str, query: Mapping[str, str], data: AsyncIterator[bytes]
    ) -> bytes:
        """Send a body of unknown length. If it breaks off, the engine is told by a cut line."""
        target = await self._path(path)
        with _words():
            line = await self._client.connect()
            try:
                head = engine.head(method, target, urlencode(query), TAR, chunked=True)
                await line.send(head)
                await _send_chunks(line, data)
                answer = await engine.first(line)
                body = await wire.answer_body(line, answer, method).whole(MAX_MESSAGE)
            finally:
                line.close()
        if answer.status >= 300:
            raise Refusal(answer.status, _text(body))
        return body


async def _send_chunks(line: wire.Line, data: AsyncIterator[bytes]) -> None:
    async for piece in data:
        if piece:
            try:
                await line.send(wire.chunk(piece))
            except (BrokenPipeError, ConnectionResetError):
                # The engine has refused before all of it was sent: its answer says why.
                return
    await line.send(wire.chunk(b""))


async def _pieces(line: wire.Line, body: wire.Body) -> AsyncGenerator[bytes]:
    try:
        async for piece in body.pieces():
            yield piece
    finally:
        line.close()


async def _refused(line: wire.Line, answer: wire.Answer, method: str) -> str:
    return _text(await wire.answer_body(line, answer, method).whole(MAX_MESSAGE))


def _text(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body.decode("utf-8", "replace").strip()


def _message(document: object) -> str:
    found = document.get("message") if isinstance(document, dict) else None
    return str(found or "no reason given")


@contextlib.asynccontextmanager
async def _closing_on_error(line: wire.Line) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        line.close()
        raise


@contextlib.contextmanager
def _words() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise unavailable("it does not answer in time") from error
    except (engine.EngineError, OSError, ValueError) as error:
        raise unavailable(error) from error


def segment(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe=":@/" if ":" in name or "/" in name else "")
