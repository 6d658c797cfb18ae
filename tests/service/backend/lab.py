"""A backend with a data directory of its own, in the process that a test runs as some identity.

Copied to where that identity can read it, so it imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from typing import TYPE_CHECKING, Any

from agent_sandbox.service.backend.bwrap import BwrapBackend
from agent_sandbox.service.backend.interface import Ended, Start
from agent_sandbox.service.values import Network, Resources, Sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agent_sandbox.service.backend.bwrap_running import BwrapRunning

SECONDS = 60.0
OFF = Network()


class Process:
    """A started command and what it has said so far."""

    def __init__(self) -> None:
        self.said: dict[int, bytes] = {1: b"", 2: b""}
        self.pieces: list[int] = []
        self.heard = asyncio.Event()
        self.keeps = True
        self.running: BwrapRunning

    def sink(self, number: int, data: bytes) -> None:
        self.pieces.append(len(data))
        if self.keeps:
            self.said[number] += data
        self.heard.set()

    async def until(self, words: str) -> str:
        """Wait until it has said something; all that it has said."""
        while words.encode() not in self.said[1] + self.said[2]:
            self.heard.clear()
            await asyncio.wait_for(self.heard.wait(), SECONDS)
        return self.out

    async def end(self) -> Ended:
        return await asyncio.wait_for(self.running.wait(), SECONDS)

    @property
    def out(self) -> str:
        return self.said[1].decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.said[2].decode("utf-8", "replace")


class Lab:
    """What a test works with."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.backend = BwrapBackend(data)
        self._count = 0

    async def sandbox(self, name: str = "", *, network: Network = OFF, **bounds: Any) -> Sandbox:
        """A new sandbox; bounds are of its resources."""
        self._count += 1
        made = Sandbox(
            id=name or f"sbx-{self._count}", owner="a", backend="bwrap", state="Running",
            resources=Resources(**bounds), network=network,
        )  # fmt: skip
        await self.backend.create(made)
        return made

    async def start(
        self, sandbox: Sandbox, *argv: str, keeps: bool = True, **fields: Any
    ) -> Process:
        """Start a command."""
        self._count += 1
        process = Process()
        process.keeps = keeps
        start = Start(execution=f"exc-{self._count}", argv=argv, **fields)
        process.running = await self.backend.start(sandbox, start, process.sink)
        return process

    async def run(self, sandbox: Sandbox, *argv: str, **fields: Any) -> tuple[Process, Ended]:
        """Run a command to its end."""
        process = await self.start(sandbox, *argv, **fields)
        return process, await process.end()

    async def sh(self, sandbox: Sandbox, script: str, **fields: Any) -> str:
        """What a script inside says on both streams."""
        process, _ = await self.run(sandbox, "sh", "-c", script, **fields)
        return process.out + process.err

    async def write(self, sandbox: Sandbox, path: str, data: bytes, **fields: Any) -> Any:
        """Write a file from outside."""
        return await self.backend.files(sandbox).write(
            path, pieces(data), **{"limit": 1 << 30, **fields}
        )

    async def read(self, sandbox: Sandbox, path: str) -> bytes:
        """Read a file from outside."""
        _, data = await self.backend.files(sandbox).read(path)
        return b"".join([piece async for piece in data])


def archive(*members: tuple[str, bytes]) -> bytes:
    """A tar with these files."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, data in members or (("a/b", b"x"), ("secret", b"x")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return file.getvalue()


def put(path: str, text: str, mode: int = 0o600) -> str:
    """Write a file outside, as one that is saved: whole, then renamed."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    os.rename(f"{path}.new", path)
    return path


def got(path: str) -> str:
    """Read a file outside."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def living(word: str) -> list[int]:
    """Processes of this machine that have a word among their arguments."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(int(pid))
    return found


async def gone(word: str) -> bool:
    """Whether such processes end soon."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while living(word):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    """A body."""
    for piece in data:
        yield piece


def play(scene: Callable[[Lab], Awaitable[object]]) -> None:
    """Run a scene and print what it returns as the last line."""

    async def body() -> object:
        lab = Lab(sys.argv[1])
        await lab.backend.reconcile({})
        try:
            return await scene(lab)
        finally:
            await lab.backend.close()

    sys.stdout.write("\n" + json.dumps(asyncio.run(body())) + "\n")
