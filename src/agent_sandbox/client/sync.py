"""The client for programs without a loop. Safe to use from several threads."""

from __future__ import annotations

import contextlib
import os
import random
import time

from . import attempts, calls, reading
from .address import settings
from .attempts import Attempts, Patience
from .blocking import Pool
from .following import Following
from .sync_files import Files
from .sync_running import Execution, Stream
from .wire import Answer, Broken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypeVar, Unpack

    from .blocking import Exchange
    from .calls import Call, Command, Flow
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


class Client:
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
        self.sandboxes = Sandboxes(self)

    def __repr__(self) -> str:
        return f"Client({str(self.settings.address)!r})"

    # --- commands

    def run(
        self, command: Command, *, check: bool = False, **options: Unpack[RunOptions]
    ) -> Result:
        """A command in a sandbox of its own, to its end."""
        with self.stream(command, **options) as stream:
            return stream.collect(check=check)

    def stream(self, command: Command, **options: Unpack[RunOptions]) -> Stream:
        """A command in a sandbox of its own, event by event."""
        return Stream(self, Following(), calls.run(command, options))

    def execution(self, exec_id: str) -> Execution:
        """A command that was started before."""
        return Execution(self, exec_id)

    def executions(
        self, *, sandbox: str | None = None, state: str | None = None
    ) -> Iterator[Result]:
        """All of our own, without their output."""
        return self.pages(lambda after: calls.executions(sandbox, state, after))

    # --- about

    def whoami(self) -> dict[str, Any]:
        """Who we are to the service, our limits and what we use."""
        return self.drive(calls.whoami())

    def policy(self) -> dict[str, Any]:
        """What the service allows."""
        return self.drive(calls.policy())

    def check(self, **options: Unpack[SandboxOptions]) -> dict[str, Any]:
        """What would become of a sandbox with these options, and why. Nothing is made."""
        return self.drive(calls.check(options))

    def audit(self, **chosen: Unpack[AuditFilter]) -> Iterator[dict[str, Any]]:
        """Lines of the audit; needs the scope audit:read."""
        given: Mapping[str, Any] = chosen
        return self.pages(lambda after: calls.audit({**given, "after": after or None}))

    def request(self, method: str, path: str, body: object | None = None) -> object:
        """Whatever else the service offers: `client.request("GET", "/v1/policy")`."""
        return self.drive(calls.any_call(method, path, body))

    def close(self) -> None:
        """Close the connections. What was started goes on."""
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for the other classes of this package

    def drive(self, flow: Flow[T]) -> T:
        """Send what a flow wants to be sent; what it returns."""
        try:
            call = next(flow)
            while True:
                call = flow.send(self.ask(call))
        except StopIteration as stop:
            value: T = stop.value
            return value

    def pages(self, part: Callable[[str], Flow[Page]]) -> Iterator[Any]:
        """All parts of a list."""
        after = ""
        while True:
            page = self.drive(part(after))
            yield from page.items
            after = page.next
            if not after:
                return

    def open(
        self, call: Call, parts: Iterable[bytes] | None = None, tries: Attempts | None = None
    ) -> Exchange:
        """Send, and send again where that is safe; the answer's body is still to be read.

        `parts`: a body that is made while it is sent, and can be sent only once.
        """
        tries = tries or self._attempts(call, once=parts is not None)
        while True:
            try:
                exchange = self._pool.send(call, parts)
                if exchange.head.status < 300 or exchange.head.status in call.fine:
                    return exchange
                with exchange:
                    body = exchange.everything()
            except Broken as broken:
                delay = tries.failed(broken.error, sent=broken.sent)
            else:
                delay = tries.refused(exchange.head, body)
            time.sleep(delay)

    def ask(self, call: Call, parts: Iterable[bytes] | None = None) -> Answer:
        """As `open`, with all of the answer."""
        tries = self._attempts(call, once=parts is not None)
        while True:
            try:
                with self.open(call, parts, tries) as exchange:
                    head, body = exchange.head, exchange.everything()
                return Answer(status=head.status, headers=head.headers, body=body)
            except Broken as broken:
                delay = tries.failed(broken.error, sent=True)
            time.sleep(delay)

    @contextlib.contextmanager
    def body(self, call: Call) -> Iterator[Exchange]:
        """The body of an answer, to be read here."""
        with self.open(call) as exchange:
            try:
                yield exchange
            except Broken as broken:
                raise reading.cut_off(broken.error, self.settings) from None

    def _attempts(self, call: Call, *, once: bool) -> Attempts:
        return Attempts(call, self.settings, 0 if once else self._retries, random.random)

    def patience(self) -> Patience:
        """How often a broken stream is tried again."""
        return Patience(self.settings, self._retries, random.random)


class Sandboxes:
    """`client.sandboxes`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, **options: Unpack[SandboxOptions]) -> Sandbox:
        """A sandbox, ready. It lives until it is deleted or expires."""
        return Sandbox(self._client, self._client.drive(calls.create(options)))

    def get(self, sandbox_id: str) -> Sandbox:
        """One of our own."""
        return Sandbox(self._client, self._client.drive(calls.sandbox(sandbox_id)))

    def list(
        self, *, state: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> Iterator[Sandbox]:
        """All of our own, oldest first."""
        found = self._client.pages(lambda after: calls.sandboxes(state, metadata, after))
        return (Sandbox(self._client, info) for info in found)


class Sandbox:
    """A sandbox of the service. As a context manager it is deleted at the end."""

    def __init__(self, client: Client, info: SandboxInfo) -> None:
        self._client = client
        # As the service had it when it was last asked.
        self.info = info
        self.files = Files(client, info.id)

    @property
    def id(self) -> str:
        """Its name."""
        return self.info.id

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r}, {self.info.state})"

    def exec(
        self, command: Command, *, check: bool = False, **options: Unpack[ExecOptions]
    ) -> Result:
        """A command, to its end. Text is for a shell, a list is started as it is."""
        with self.stream(command, **options) as stream:
            return stream.collect(check=check)

    def stream(self, command: Command, **options: Unpack[ExecOptions]) -> Stream:
        """A command, event by event."""
        return Stream(self._client, Following(), calls.streamed(self.id, command, options))

    def start(self, command: Command, **options: Unpack[ExecOptions]) -> Execution:
        """A command that nobody waits for."""
        found = self._client.drive(calls.start(self.id, command, options))
        return Execution(self._client, found.id)

    def executions(self, *, state: str | None = None) -> Iterator[Result]:
        """What ran and runs in it, without output."""
        return self._client.executions(sandbox=self.id, state=state)

    def refresh(self) -> SandboxInfo:
        """Ask the service how it is."""
        return self._keep(calls.sandbox(self.id))

    def renew(self, seconds: float) -> SandboxInfo:
        """Let it live so long from now."""
        return self._keep(calls.renew(self.id, seconds))

    def pause(self) -> SandboxInfo:
        """Stop its processes where they are, where the backend can."""
        return self._keep(calls.change(self.id, "pause"))

    def resume(self) -> SandboxInfo:
        """Let them go on."""
        return self._keep(calls.change(self.id, "resume"))

    def set_metadata(self, changes: Mapping[str, str | None]) -> SandboxInfo:
        """Merge; None takes a name away."""
        return self._keep(calls.set_metadata(self.id, changes))

    def _keep(self, flow: Flow[SandboxInfo]) -> SandboxInfo:
        self.info = self._client.drive(flow)
        return self.info

    def usage(self) -> dict[str, Any]:
        """What it uses now."""
        return self._client.drive(calls.usage(self.id))

    def delete(self) -> None:
        """End what runs in it and remove it. One that is gone is no error."""
        self._client.drive(calls.delete(self.id))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()
