"""The client for asyncio. The twin of `sync`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

from . import attempts, calls, reading
from .address import settings
from .async_files import AsyncFiles
from .async_running import AsyncExecution, AsyncStream
from .attempts import Attempts, Patience
from .following import Following
from .streams import Pool
from .wire import Answer, Broken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from typing import Any, TypeVar, Unpack

    from .calls import Call, Command, Flow
    from .streams import Exchange
    from .values import (
        AuditFilter,
        ExecOptions,
        Page,
        Result,
        RunOptions,
        SandboxInfo,
        SandboxOptions,
    )  # fmt: skip

    T = TypeVar("T")


class AsyncClient:
    """The sandbox service. Without arguments: SANDBOX_API, SANDBOX_TOKEN and SANDBOX_CA say how.

    `timeout` is how long the service may be silent, not how long a command may take.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, ca_file: str | None = None,
        timeout: float = attempts.TIMEOUT, retries: int = attempts.RETRIES,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        env = os.environ if environ is None else environ
        self.settings = settings(url, token, ca_file, env)
        self._pool = Pool(self.settings, env, timeout)
        self._retries = retries
        self.sandboxes = AsyncSandboxes(self)

    def __repr__(self) -> str:
        return f"AsyncClient({str(self.settings.address)!r})"

    # --- commands

    async def run(
        self, command: Command, *, check: bool = False, **options: Unpack[RunOptions]
    ) -> Result:
        """A command in a sandbox of its own, to its end."""
        async with self.stream(command, **options) as stream:
            return await stream.collect(check=check)

    def stream(self, command: Command, **options: Unpack[RunOptions]) -> AsyncStream:
        """A command in a sandbox of its own, event by event."""
        return AsyncStream(self, Following(), calls.run(command, options))

    def execution(self, exec_id: str) -> AsyncExecution:
        """A command that was started before."""
        return AsyncExecution(self, exec_id)

    def executions(
        self, *, sandbox: str | None = None, state: str | None = None
    ) -> AsyncIterator[Result]:
        """All of our own, without their output."""
        return self.pages(lambda after: calls.executions(sandbox, state, after))

    # --- about

    async def whoami(self) -> dict[str, Any]:
        """Who we are to the service, our limits and what we use."""
        return await self.drive(calls.whoami())

    async def policy(self) -> dict[str, Any]:
        """What the service allows."""
        return await self.drive(calls.policy())

    async def check(self, **options: Unpack[SandboxOptions]) -> dict[str, Any]:
        """What would become of a sandbox with these options, and why. Nothing is made."""
        return await self.drive(calls.check(options))

    def audit(self, **chosen: Unpack[AuditFilter]) -> AsyncIterator[dict[str, Any]]:
        """Lines of the audit; needs the scope audit:read."""
        given: Mapping[str, Any] = chosen
        return self.pages(lambda after: calls.audit({**given, "after": after or None}))

    async def request(self, method: str, path: str, body: object | None = None) -> object:
        """Whatever else the service offers: `client.request("GET", "/v1/policy")`."""
        return await self.drive(calls.any_call(method, path, body))

    async def close(self) -> None:
        """Close the connections. What was started goes on."""
        await self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- for the other classes of this package

    async def drive(self, flow: Flow[T]) -> T:
        """Send what a flow wants to be sent; what it returns."""
        try:
            call = next(flow)
            while True:
                call = flow.send(await self.ask(call))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def pages(self, part: Callable[[str], Flow[Page]]) -> AsyncIterator[Any]:
        """All parts of a list."""
        after = ""
        while True:
            page = await self.drive(part(after))
            for item in page.items:
                yield item
            after = page.next
            if not after:
                return

    async def open(
        self, call: Call, parts: AsyncIterator[bytes] | None = None, tries: Attempts | None = None
    ) -> Exchange:
        """Send, and send again where that is safe; the answer's body is still to be read.

        `parts`: a body that is made while it is sent, and can be sent only once.
        """
        tries = tries or self._attempts(call, once=parts is not None)
        while True:
            try:
                exchange = await self._pool.send(call, parts)
                if exchange.head.status < 300 or exchange.head.status in call.fine:
                    return exchange
                async with exchange:
                    body = await exchange.everything()
            except Broken as broken:
                delay = tries.failed(broken.error, sent=broken.sent)
            else:
                delay = tries.refused(exchange.head, body)
            await asyncio.sleep(delay)

    async def ask(self, call: Call, parts: AsyncIterator[bytes] | None = None) -> Answer:
        """As `open`, with all of the answer."""
        tries = self._attempts(call, once=parts is not None)
        while True:
            try:
                async with await self.open(call, parts, tries) as exchange:
                    head, body = exchange.head, await exchange.everything()
                return Answer(status=head.status, headers=head.headers, body=body)
            except Broken as broken:
                delay = tries.failed(broken.error, sent=True)
            await asyncio.sleep(delay)

    @contextlib.asynccontextmanager
    async def body(self, call: Call) -> AsyncIterator[Exchange]:
        """The body of an answer, to be read here."""
        async with await self.open(call) as exchange:
            try:
                yield exchange
            except Broken as broken:
                raise reading.cut_off(broken.error, self.settings) from None

    def _attempts(self, call: Call, *, once: bool) -> Attempts:
        return Attempts(call, self.settings, 0 if once else self._retries, random.random)

    def patience(self) -> Patience:
        """How often a broken stream is tried again."""
        return Patience(self.settings, self._retries, random.random)


class AsyncSandboxes:
    """`client.sandboxes`, for asyncio."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, **options: Unpack[SandboxOptions]) -> AsyncSandbox:
        """A sandbox, ready. It lives until it is deleted or expires."""
        return AsyncSandbox(self._client, await self._client.drive(calls.create(options)))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """One of our own."""
        return AsyncSandbox(self._client, await self._client.drive(calls.sandbox(sandbox_id)))

    def list(
        self, *, state: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncSandbox]:
        """All of our own, oldest first."""
        found = self._client.pages(lambda after: calls.sandboxes(state, metadata, after))
        return (AsyncSandbox(self._client, info) async for info in found)


class AsyncSandbox:
    """A sandbox of the service. As a context manager it is deleted at the end."""

    def __init__(self, client: AsyncClient, info: SandboxInfo) -> None:
        self._client = client
        # As the service had it when it was last asked.
        self.info = info
        self.files = AsyncFiles(client, info.id)

    @property
    def id(self) -> str:
        """Its name."""
        return self.info.id

    def __repr__(self) -> str:
        return f"AsyncSandbox({self.id!r}, {self.info.state})"

    async def exec(
        self, command: Command, *, check: bool = False, **options: Unpack[ExecOptions]
    ) -> Result:
        """A command, to its end. Text is for a shell, a list is started as it is."""
        async with self.stream(command, **options) as stream:
            return await stream.collect(check=check)

    def stream(self, command: Command, **options: Unpack[ExecOptions]) -> AsyncStream:
        """A command, event by event."""
        return AsyncStream(self._client, Following(), calls.streamed(self.id, command, options))

    async def start(self, command: Command, **options: Unpack[ExecOptions]) -> AsyncExecution:
        """A command that nobody waits for."""
        found = await self._client.drive(calls.start(self.id, command, options))
        return AsyncExecution(self._client, found.id)

    def executions(self, *, state: str | None = None) -> AsyncIterator[Result]:
        """What ran and runs in it, without output."""
        return self._client.executions(sandbox=self.id, state=state)

    async def refresh(self) -> SandboxInfo:
        """Ask the service how it is."""
        return await self._keep(calls.sandbox(self.id))

    async def renew(self, seconds: float) -> SandboxInfo:
        """Let it live so long from now."""
        return await self._keep(calls.renew(self.id, seconds))

    async def pause(self) -> SandboxInfo:
        """Stop its processes where they are, where the backend can."""
        return await self._keep(calls.change(self.id, "pause"))

    async def resume(self) -> SandboxInfo:
        """Let them go on."""
        return await self._keep(calls.change(self.id, "resume"))

    async def set_metadata(self, changes: Mapping[str, str | None]) -> SandboxInfo:
        """Merge; None takes a name away."""
        return await self._keep(calls.set_metadata(self.id, changes))

    async def _keep(self, flow: Flow[SandboxInfo]) -> SandboxInfo:
        self.info = await self._client.drive(flow)
        return self.info

    async def usage(self) -> dict[str, Any]:
        """What it uses now."""
        return await self._client.drive(calls.usage(self.id))

    async def delete(self) -> None:
        """End what runs in it and remove it. One that is gone is no error."""
        await self._client.drive(calls.delete(self.id))

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()
