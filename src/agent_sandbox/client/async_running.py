"""Commands of the service, for asyncio. The twin of `sync_running`."""

from __future__ import annotations

import asyncio

from . import attempts, calls
from .errors import CommandFailed
from .following import Following, Output
from .shell import Talk
from .values import Event
from .wire import Broken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .asynchronous import AsyncClient
    from .calls import Call
    from .streams import Connection, Exchange
    from .values import Result


class AsyncStream:
    """The events of a command. A broken connection is made again, and goes on where it was.

    Closing it does not end the command.
    """

    def __init__(self, client: AsyncClient, following: Following, call: Call) -> None:
        self._client = client
        self._following = following
        self._patience = client.patience()
        self._exchange: Exchange | None = None
        self._call = call
        self._opened = False
        self._events = self._all()

    @property
    def id(self) -> str:
        """The command's id; "" before the first event."""
        return self._following.exec_id

    @property
    def execution(self) -> AsyncExecution:
        """Its handle, after the first event: for input, signals, the end."""
        return AsyncExecution(self._client, self.id)

    @property
    def result(self) -> Result | None:
        """How it ended, without its output; None while it runs."""
        return self._following.result

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def collect(self, *, check: bool = False) -> Result:
        """Wait for the end; the result has all output that has not been taken yet."""
        output = Output()
        async for event in self:
            output.take(event)
        assert self.result is not None  # noqa: S101 - the events end with it
        result = output.complete(self.result)
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    async def _all(self) -> AsyncIterator[Event]:
        if not self._opened:
            await self._open(self._call)
        while not self._following.ended:
            try:
                data = await self._read()
            except Broken as broken:
                await self._again(broken.error)
                continue
            self._patience.progress()
            for event in self._following.feed(data):
                yield event
        await self.close()

    async def _read(self) -> bytes:
        data = await self._exchange.read() if self._exchange is not None else b""
        if not data:
            raise Broken(ConnectionResetError("the stream ended before the command"), sent=True)
        return data

    async def _again(self, error: OSError) -> None:
        await self.close()
        if not self.id and not self._call.again:
            raise attempts.lost(self._client.settings)
        await asyncio.sleep(self._patience.broken(error))
        # Before the first event only a call with a key can tell which command it was.
        await self._open(self._following.resume() if self.id else self._call)

    async def _open(self, call: Call) -> None:
        self._opened = True
        self._exchange = await self._client.open(call)
        self._following.opened(self._exchange.head)

    async def close(self) -> None:
        """Hang up. The command goes on."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.close()

    async def __aenter__(self) -> AsyncStream:
        # So that a refusal is raised here and not by the first event.
        await self._open(self._call)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncExecution:
    """A command, by its id."""

    def __init__(self, client: AsyncClient, exec_id: str) -> None:
        self._client = client
        self.id = exec_id

    def __repr__(self) -> str:
        return f"AsyncExecution({self.id!r})"

    async def status(self) -> Result:
        """How far it is, with the output so far."""
        return await self._client.drive(calls.execution(self.id))

    def follow(self, *, after: str = "") -> AsyncStream:
        """Its events from the beginning, or behind the one with the id `after`."""
        following = Following(self.id, after)
        return AsyncStream(self._client, following, following.resume())

    async def wait(self, *, check: bool = False) -> Result:
        """Its end, with its output."""
        async with self.follow() as stream:
            return await stream.collect(check=check)

    async def logs(self) -> AsyncIterator[Event]:
        """What it has written so far, without waiting for more."""
        since, more = 0, True
        while more:
            part, since, more = await self._client.drive(calls.logs(self.id, since))
            for kind, data in (("stdout", part.out), ("stderr", part.err)):
                if data:
                    yield Event(kind=kind, data=data)

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Input; it must have been started with `keep_input` or a terminal."""
        await self._client.drive(calls.write_input(self.id, data, eof=eof))

    async def signal(self, name: str) -> None:
        """A signal by its name, for the command itself."""
        await self._client.drive(calls.signal(self.id, name))

    async def resize(self, rows: int, columns: int) -> None:
        """Another size for its terminal."""
        await self._client.drive(calls.resize(self.id, rows, columns))

    async def kill(self) -> Result:
        """End all of its processes."""
        return await self._client.drive(calls.kill(self.id))

    def terminal(self) -> AsyncTerminal:
        """Its terminal, for `async with`; it must have been started with `tty`."""
        return AsyncTerminal(self._client, self.id)


class AsyncTerminal:
    """A terminal, as bytes both ways. One task may read while others write."""

    def __init__(self, client: AsyncClient, exec_id: str) -> None:
        self._client = client
        self._talk = Talk(exec_id)
        self._line: Connection | None = None
        self._held = b""

    async def __aenter__(self) -> AsyncTerminal:
        exchange = await self._client.open(self._talk.call())
        async with exchange:
            self._talk.check(exchange.head)
            self._line, self._held = exchange.detach()
        return self

    async def read(self) -> bytes | None:
        """Output, maybe b""; None at the end. Waits for what comes next."""
        if self._over() or self._line is None:
            return None
        try:
            # The service asks whether we are there; between its questions it may be silent.
            data, self._held = self._held or await self._line.read_forever(), b""
        except OSError:
            data = b""
        out = self._talk.feed(data)
        await self._send(self._talk.answers())
        return out or (None if self._over() else out)

    def _over(self) -> bool:
        return self._talk.ended

    async def write(self, data: bytes) -> None:
        """Type."""
        await self._send(self._talk.keys(data))

    async def resize(self, rows: int, columns: int) -> None:
        """Another size."""
        await self._send(self._talk.order(type="resize", rows=rows, cols=columns))

    async def signal(self, name: str) -> None:
        """A signal for the command."""
        await self._send(self._talk.order(type="signal", signal=name))

    async def eof(self) -> None:
        """The end of input (Ctrl-D)."""
        await self._send(self._talk.order(type="eof"))

    @property
    def result(self) -> Result | None:
        """How the command ended, if its end was seen."""
        return self._talk.result

    @property
    def problems(self) -> tuple[str, ...]:
        """What the service did not do of what was asked, the newest last."""
        return tuple(self._talk.problems)

    async def _send(self, data: bytes) -> None:
        if not data or self._line is None:
            return
        try:
            await self._line.write(data)
        except OSError:
            # The reader sees the end, and there is nobody to tell.
            return

    async def close(self) -> None:
        """Hang up."""
        if not self._talk.ended:
            await self._send(self._talk.close())
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
