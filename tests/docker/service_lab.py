"""The docker backend of the service before a real engine."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from agent_sandbox.service.backend.docker import DockerBackend
from agent_sandbox.service.backend.interface import Ended, Running, Start
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import RUNNING, Resources, Sandbox
from engine import Engine

T = TypeVar("T")
MIB = 1 << 20
PATIENCE = 120.0
BOUNDS = Resources(memory=64 * MIB, cpus=2.0, pids=64, disk=16 * MIB)
# GNU's programs, as Debian's images have them.
GNU = [
    f"/usr/bin/{name}"
    for name in (
        "dash", "bash", "stat", "find", "head", "mkdir", "mv", "rm", "rmdir", "cat", "chmod",
        "readlink", "wc", "sleep", "id",
    )
]  # fmt: skip
SHELLS = ("busybox", "dash", "bash")


def shell_images(daemon: Engine) -> dict[str, str]:
    """An image for each shell that `/bin/sh` may be; two of them with GNU's programs."""
    daemon.image("gnu:base", programs=GNU)
    for shell in SHELLS[1:]:
        name = f"make-{shell}"
        daemon.run("run", "--network=none", f"--name={name}", "gnu:base",
                   "ln", "-sf", f"/usr/bin/{shell}", "/bin/sh")  # fmt: skip
        daemon.run("commit", name, f"{shell}:test")
        daemon.run("rm", name)
    return {shell: f"{shell}:test" for shell in SHELLS}


class Said(list[tuple[int, bytes]]):
    """What a command has said so far; tells when there is more."""

    def __init__(self) -> None:
        self._grown = asyncio.Event()

    def add(self, stream: int, data: bytes) -> None:
        self.append((stream, data))
        self._grown.set()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not enough():
                self._grown.clear()
                await self._grown.wait()

    async def word(self, word: str) -> None:
        """Wait until it has said this."""
        await self.until(lambda: word in joined(self, 1))


class Stage:
    """One sandbox, and what tests do to it."""

    def __init__(self, backend: DockerBackend, sandbox: Sandbox, daemon: Engine) -> None:
        self.backend = backend
        self.sandbox = sandbox
        self.daemon = daemon
        self.files = backend.files(sandbox)

    @property
    def name(self) -> str:
        return f"agent-sandbox-{self.backend._instance}-{self.sandbox.id}"

    async def start(self, *argv: str, **fields: Any) -> tuple[Running, Said]:
        said = Said()
        start = Start(execution=f"exc-{secrets.token_hex(4)}", argv=argv, **fields)
        running = await self.backend.start(self.sandbox, start, said.add)
        return running, said

    async def sh(self, text: str, **fields: Any) -> tuple[Ended, str, str]:
        """Run a shell command to its end: how it ended, output and errors."""
        running, said = await self.start("sh", "-c", text, **fields)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        return ended, joined(said, 1), joined(said, 2)

    async def processes(self) -> list[str]:
        """What commands are running, by the engine's own look from outside; ours left out."""
        found = self.daemon.run("top", self.name, "-eo", "pid,uid,args").stdout.splitlines()[1:]
        rows = [line.split(None, 2) for line in found]
        return [args for _, uid, args in rows if uid == "1000"]


def joined(said: list[tuple[int, bytes]], stream: int) -> str:
    return b"".join(data for number, data in said if number == stream).decode("utf-8", "replace")


async def bytes_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def content(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def tar(*entries: tuple[str, bytes, str]) -> bytes:
    """Files, or links where there is a target."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data, target in entries:
            info = tarfile.TarInfo(name)
            info.size, info.linkname = len(data), target
            info.type = tarfile.SYMTYPE if target else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


async def refused(doing: Coroutine[Any, Any, Any]) -> str:
    """The code of a refusal."""
    try:
        await doing
    except Problem as problem:
        return problem.code
    return ""


def perform(
    daemon: Engine, story: Callable[[Stage], Coroutine[Any, Any, T]], image: str = "busybox:test",
    **fields: Any,
) -> T:  # fmt: skip
    """Play a story in a new sandbox; see that nothing is left of it."""
    instance = secrets.token_hex(8)

    async def main() -> T:
        backend = DockerBackend(str(daemon.socket), instance=instance)
        base = {
            "id": f"sbx-{secrets.token_hex(4)}", "owner": "alice", "backend": "docker",
            "state": RUNNING, "image": image, "resources": BOUNDS,
        }  # fmt: skip
        try:
            digest = await backend.resolve(image)
            sandbox = Sandbox(**{**base, "digest": digest, **fields})
            await backend.create(sandbox)
            try:
                return await story(Stage(backend, sandbox, daemon))
            finally:
                await backend.delete(sandbox)
        finally:
            await backend.close()

    try:
        return asyncio.run(main())
    finally:
        assert left(daemon, instance) == []


def left(daemon: Engine, instance: str) -> list[str]:
    """Containers and volumes of a service."""
    label = f"label=org.agent-sandbox.service.instance={instance}"
    containers = daemon.run("ps", "-aq", "--filter", label).stdout.split()
    return containers + daemon.run("volume", "ls", "-q", "--filter", label).stdout.split()
