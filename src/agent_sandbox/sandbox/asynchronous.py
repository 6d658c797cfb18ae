"""The library for asyncio: the same Process, waited for without blocking the loop."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial

from .library import Result, Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..policy.triggers import Finding
    from .containers import Containers
    from .process import Process
    from .traffic import Traffic


async def run(
    sandbox: Sandbox, argv: Sequence[str], *, input: bytes | str | None, capture: bool,
    timeout: float | None, cwd: str | None, env: Mapping[str, str | None] | None, check: bool,
) -> Result:  # fmt: skip
    """Run to the end on a worker thread; cancellation kills the command first."""
    started: list[Process] = []

    class Noted(Sandbox):
        """Hands out the process so that it can be killed from the loop."""

        def popen(self, *args: Any, **kwargs: Any) -> Process:  # noqa: ANN401 - passed through
            process = super().popen(*args, **kwargs)
            started.append(process)
            return process

    noted = Noted(sandbox.policy, environ=sandbox.environ)
    work = asyncio.ensure_future(
        asyncio.to_thread(
            noted.run,
            argv,
            input=input,
            capture=capture,
            timeout=timeout,
            cwd=cwd,
            env=env,
            check=check,
        )
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            for process in started:
                process.kill()
            await asyncio.wait([work], timeout=0.05)
        work.exception()
        raise


class AsyncProcess:
    """A running sandbox with asyncio streams."""

    def __init__(
        self, process: Process, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:  # fmt: skip
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr

    @property
    def pid(self) -> int:
        """The pid of bwrap on the host."""
        return self._process.pid

    @property
    def changes(self) -> tuple[Finding, ...]:
        """What the run did to files that tools outside act on. Known when it has ended."""
        return self._process.changes

    @property
    def network(self) -> Traffic:
        """Whom the command reached or was refused. Known when it has ended."""
        return self._process.network

    @property
    def containers(self) -> Containers:
        """What the command asked of the container engine. Known when it has ended."""
        return self._process.containers

    @property
    def exceeded(self) -> str:
        """The limit that ended the command, or "keeper". Known when it has ended."""
        return self._process.exceeded

    async def wait(self) -> int:
        """Wait for the end."""
        return await asyncio.to_thread(self._process.wait)

    def send_signal(self, number: int) -> None:
        """Signal the command itself."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Ask the command to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End every process inside at once."""
        self._process.kill()

    async def close(self) -> None:
        """Kill what still runs and clean up."""
        self.stdin.close()
        await asyncio.to_thread(self._process.close)

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def start(
    sandbox: Sandbox, argv: Sequence[str], *, cwd: str | None,
    env: Mapping[str, str | None] | None,
) -> AsyncProcess:  # fmt: skip
    """Start a command and connect its pipes to the running loop."""
    process = await asyncio.to_thread(
        sandbox.popen, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=cwd, env=env,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    readers = []
    for stream in (process.stdout, process.stderr):
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), stream)
        readers.append(reader)
    transport, writer = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, process.stdin
    )
    stdin = asyncio.StreamWriter(transport, writer, None, loop)
    return AsyncProcess(process, stdin, readers[0], readers[1])
