"""A backend that several processes reach: a sandbox is a directory, a command is a program in it.

It keeps nothing in. It is for tests of what replicas do with each other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from agent_sandbox.service.backend.interface import (
    Ended,
    OnThisMachine,
    Start,
    Support,
    Terminal,
)
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Resources, Sandbox

from ..fake_backend import FakeFiles

Sink = Callable[[int, bytes], None]
PATH = "/usr/local/bin:/usr/bin:/bin"
LIMITS = {"memory": "cgroup", "cpus": "cgroup", "pids": "cgroup", "disk": "server"}


class Command:
    """A program, with its process group."""

    def __init__(self, process: asyncio.subprocess.Process, sink: Sink) -> None:
        self._process = process
        self._readers = [
            asyncio.ensure_future(_read(stream, number, sink))
            for number, stream in ((1, process.stdout), (2, process.stderr))
            if stream is not None
        ]

    async def wait(self) -> Ended:
        await asyncio.gather(*self._readers)
        code = await self._process.wait()
        if code < 0:
            return Ended(code=128 - code, signal=signal.Signals(-code).name)
        return Ended(code=code)

    async def kill(self) -> None:
        await self.signal(signal.SIGKILL)

    async def signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    async def write(self, data: bytes) -> None:
        raise BrokenPipeError(len(data))

    async def close_input(self) -> None:
        raise BrokenPipeError

    async def resize(self, terminal: Terminal) -> None:
        assert terminal


async def _read(stream: asyncio.StreamReader, number: int, sink: Sink) -> None:
    while data := await stream.read(65536):
        sink(number, data)


class Directories(OnThisMachine):
    """All replicas have the same directory above those of the sandboxes."""

    name = "directories"
    shared = True

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    async def probe(self) -> Support:
        return Support(ok=True, enforced=LIMITS)

    async def resolve(self, image: str) -> str:
        raise Problem("UNSUPPORTED", image)

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        (self.root / sandbox.id).mkdir()
        return {}

    async def delete(self, sandbox: Sandbox) -> None:
        shutil.rmtree(self.root / sandbox.id, ignore_errors=True)

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> Command:
        process = await asyncio.create_subprocess_exec(
            # As a pod's agent ends what nobody listens to any more.
            "setpriv", "--pdeathsig", "KILL", *start.argv, cwd=self.root / sandbox.id,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
            env={"PATH": PATH, **start.env},
        )  # fmt: skip
        return Command(process, sink)

    async def pause(self, sandbox: Sandbox) -> None:
        raise Problem("UNSUPPORTED", sandbox.id)

    async def resume(self, sandbox: Sandbox) -> None:
        raise Problem("UNSUPPORTED", sandbox.id)

    def files(self, sandbox: Sandbox) -> FakeFiles:
        assert sandbox
        return FakeFiles({})

    async def usage(self, sandbox: Sandbox) -> Resources:
        assert sandbox
        return Resources(memory=0, pids=0, disk=0)

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        there = {one.name for one in self.root.iterdir()}
        for gone in [one for one in there if one not in known]:
            shutil.rmtree(self.root / gone, ignore_errors=True)
            there.discard(gone)
        return frozenset(there)

    async def close(self) -> None:
        return
