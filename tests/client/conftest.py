"""Both clients behind one face, a stub of the service, and connections that break."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agent_sandbox.client import AsyncClient, Client
from service.conftest import Team, _root_team, _user_team, one, serve, team  # noqa: F401

SECRET = "sbx_abcd2345_" + "S3cretS3cret" * 3 + "abcdefg"


# --- both clients


class Blocking:
    """An object of the asynchronous client, used as its twin."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def _wrapped(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            return self._wrapped(self._loop.run_until_complete(value))
        if type(value).__module__.startswith("agent_sandbox.client.async"):
            return Blocking(value, self._loop)
        if isinstance(value, AsyncIterator):
            return self._items(value)
        return value

    def _items(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._wrapped(self._loop.run_until_complete(anext(items)))
            except StopAsyncIteration:
                return

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return self._wrapped(found)
        return lambda *args, **kwargs: self._wrapped(found(*args, **kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_inner", "_loop"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self._items(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __enter__(self) -> Any:
        return self._wrapped(self._inner.__aenter__())

    def __exit__(self, *problem: object) -> None:
        self._loop.run_until_complete(self._inner.__aexit__(*problem))


Connect = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Make a client; each test runs with both kinds."""
    made: list[Any] = []
    loop = asyncio.new_event_loop()

    def make(url: str | None = None, token: str | None = None, **options: Any) -> Any:
        options.setdefault("environ", {})
        if request.param == "sync":
            client: Any = Client(url, token, **options)
        else:
            client = Blocking(AsyncClient(url, token, **options), loop)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


# --- a stub


class Got:
    """A request, as it came."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = lines[0].split(" ")
        pairs = (line.partition(": ") for line in lines[1:])
        self.headers = {name.lower(): value for name, _, value in pairs}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answer(status: int, value: object = None, **headers: str) -> bytes:
    """An answer with JSON."""
    body = b"" if value is None else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


Act = Callable[[Got], bytes]


class Stub:
    """Answers as it is told; b"" as an answer hangs up. `got` are all requests."""

    def __init__(self, act: Act | None = None, path: str = "") -> None:
        self.got: list[Got] = []
        self.connections = 0
        self.act: Act = act or (lambda _: answer(200, {}))
        family = socket.AF_UNIX if path else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(path or ("127.0.0.1", 0))
        self._listener.listen()
        self.url = f"unix://{path}" if path else f"http://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file:
            try:
                while (got := self._read(file)) is not None:
                    self.got.append(got)
                    said = self.act(got)
                    if not said:
                        break
                    sock.sendall(said)
                    if b"\r\nConnection: close\r\n" in said:
                        break
            except OSError:
                return

    def _read(self, file: Any) -> Got | None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = file.readline()
            if not line:
                return None
            head += line
        got = Got(head[:-4], b"")
        if got.headers.get("transfer-encoding") == "chunked":
            while size := int(file.readline(), 16):
                got.body += file.read(size)
                file.readline()
            file.readline()
        else:
            got.body = file.read(int(got.headers.get("content-length", 0)))
        return got

    def close(self) -> None:
        # close() alone does not wake a thread that waits in accept().
        for sock in (self._listener, *self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """Start stubs."""
    started: list[Stub] = []

    def start(act: Act | None = None, path: str = "") -> Stub:
        started.append(Stub(act, path))
        return started[-1]

    yield start
    for one_stub in started:
        one_stub.close()


# --- connections that break


class Cutter:
    """A relay before a service. `cut(number, sent)` says when a connection is to break.

    `number` counts connections, `sent` the bytes that went to the client on this one.
    """

    def __init__(self, host: str, port: int, cut: Callable[[int, int], bool]) -> None:
        self._target = (host, port)
        self._cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.broken = 0
        self._open = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            self._open += [client, server]
            for work in (self._up, self._down):
                thread = threading.Thread(
                    target=work, args=(client, server, self.connections), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _up(self, client: socket.socket, server: socket.socket, _: int) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
        except OSError:
            pass
        _hang_up(server)

    def _down(self, client: socket.socket, server: socket.socket, number: int) -> None:
        sent = 0
        try:
            # Few bytes at once, so that a cut can be anywhere.
            while data := server.recv(61):
                if self._cut(number, sent):
                    self.broken += 1
                    break
                client.sendall(data)
                sent += len(data)
        except OSError:
            pass
        _hang_up(client)
        _hang_up(server)

    def close(self) -> None:
        for sock in self._open:
            _hang_up(sock)
        for thread in self._threads:
            thread.join(10)
        for sock in self._open:
            sock.close()


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@pytest.fixture
def cutter() -> Iterator[Callable[[str, Callable[[int, int], bool]], Cutter]]:
    """Start relays."""
    started: list[Cutter] = []

    def start(url: str, cut: Callable[[int, int], bool]) -> Cutter:
        host, _, port = url.removeprefix("http://").rpartition(":")
        started.append(Cutter(host, int(port), cut))
        return started[-1]

    yield start
    for relay in started:
        relay.close()
