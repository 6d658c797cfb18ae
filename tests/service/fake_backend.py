"""A backend in memory: its commands are small coroutines, its files a dictionary.

Commands: `true`, `false`, `echo TEXT…`, `error TEXT…` (to standard error), `cat`, `flood BYTES`,
`drip COUNT` (one byte per frame), `fill BYTES` (files), `hold` (until it is let go), `stubborn`
(ignores signals), `immortal` (ignores even the kill), `deaf` (never reads), `sleep SECONDS`,
`env NAME`, `tty` (tells its size), `missing` (127, never started), `broken` (its start fails).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from agent_sandbox.service.backend.interface import (
    WORK,
    Ended,
    Entry,
    Start,
    Support,
    Terminal,
    Warm,
)
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Resources, Sandbox

Sink = Callable[[int, bytes], None]
Lost = Callable[[str, str], None]
CHUNK = 64 * 1024
ENFORCED = {"memory": "cgroup", "cpus": "cgroup", "pids": "cgroup", "disk": "server"}


class FakeFiles:
    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content

    async def entry(self, path: str) -> Entry:
        if path not in self.content:
            raise Problem("NOT_FOUND", f"there is no '{path}'")
        return self._entry(path)

    def _entry(self, path: str) -> Entry:
        size = len(self.content[path])
        return Entry(path=path, kind="file", size=size, mode=0o644, modified=0.0)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        entry = await self.entry(path)

        async def parts() -> AsyncIterator[bytes]:
            yield self.content[path][offset:]

        return entry, parts()

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        assert mode
        whole = b""
        async for part in data:
            whole += part
            if len(whole) > limit:
                raise Problem("TOO_LARGE", "too large")
        self.content[path] = whole
        return self._entry(path)

    async def delete(self, path: str, *, recursive: bool) -> None:
        assert recursive in {True, False}
        if path not in self.content:
            raise Problem("NOT_FOUND", f"there is no '{path}'")
        del self.content[path]

    async def make(self, path: str) -> Entry:
        return Entry(path=path, kind="directory", size=0, mode=0o755, modified=0.0)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        assert depth
        below = sorted(name for name in self.content if name.startswith(f"{path}/"))
        return [self._entry(name) for name in below[:most]], len(below) > most

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        async def parts() -> AsyncIterator[bytes]:
            yield b"tar of " + path.encode()

        return parts()

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        await self.write(f"{path}/unpacked", data, limit=limit)
        return 1


class FakeRunning:
    """One command of the fake."""

    def __init__(self, box: FakeBox, start: Start, sink: Sink) -> None:
        self.box = box
        self.start = start
        self.sink = sink
        self.signals: list[int] = []
        self.killed = False
        self.released = asyncio.Event()
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._size = start.terminal
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        name, *words = self.start.argv
        if name == "immortal":
            return
        try:
            ended = await COMMANDS[name](self, words)
        except asyncio.CancelledError:
            ended = Ended(code=137, signal="SIGKILL")
        if not self._ended.done():
            self._ended.set_result(ended)

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def write(self, data: bytes) -> None:
        await self._put(data)

    async def close_input(self) -> None:
        await self._put(None)

    async def _put(self, data: bytes | None) -> None:
        put = asyncio.ensure_future(self._input.put(data))
        await asyncio.wait((put, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not put.done():
            put.cancel()
            raise BrokenPipeError

    async def read(self) -> bytes | None:
        return await self._input.get() if self.start.input else None

    async def signal(self, number: int) -> None:
        self.signals.append(number)
        if self.start.argv[0] not in ("stubborn", "immortal") and not self._ended.done():
            name = signal.Signals(number).name
            self._ended.set_result(Ended(code=128 + number, signal=name))
            self._task.cancel()

    async def kill(self) -> None:
        self.killed = True
        if self.start.argv[0] != "immortal":
            self._task.cancel()

    async def resize(self, terminal: Terminal) -> None:
        self._size = terminal

    # --- commands

    async def true(self, _words: list[str]) -> Ended:
        return Ended(code=0, cpu_ms=1, max_rss_kb=1000)

    async def false(self, _words: list[str]) -> Ended:
        return Ended(code=1)

    async def echo(self, words: list[str]) -> Ended:
        self.sink(1, " ".join(words).encode() + b"\n")
        return Ended(code=0)

    async def error(self, words: list[str]) -> Ended:
        self.sink(2, " ".join(words).encode() + b"\n")
        return Ended(code=0)

    async def cat(self, _words: list[str]) -> Ended:
        while (data := await self.read()) is not None:
            self.sink(1, data)
        return Ended(code=0)

    async def flood(self, words: list[str]) -> Ended:
        left = int(words[0])
        while left > 0:
            self.sink(1, bytes([65 + left % 26]) * min(CHUNK, left))
            left -= CHUNK
            await asyncio.sleep(0)
        return Ended(code=0)

    async def drip(self, words: list[str]) -> Ended:
        for number in range(int(words[0])):
            self.sink(1 + number % 2, bytes([65 + number % 26]))
            if number % 100 == 0:
                await asyncio.sleep(0)
        return Ended(code=0)

    async def fill(self, words: list[str]) -> Ended:
        self.box.content[f"{WORK}/filled"] = bytes(int(words[0]))
        return await self.hold([])

    async def hold(self, _words: list[str]) -> Ended:
        await self.released.wait()
        return Ended(code=0)

    async def sleep(self, words: list[str]) -> Ended:
        await asyncio.sleep(float(words[0]))
        return Ended(code=0)

    async def env(self, words: list[str]) -> Ended:
        self.sink(1, self.start.env.get(words[0], "").encode())
        return Ended(code=0)

    async def tty(self, _words: list[str]) -> Ended:
        while await self.read() is not None:
            assert self._size is not None
            self.sink(1, f"{self._size.rows}x{self._size.columns}".encode())
        return Ended(code=0)

    async def missing(self, _words: list[str]) -> Ended:
        return Ended(code=127, started=False, error="not found")


COMMANDS: dict[str, Callable[[FakeRunning, list[str]], Awaitable[Ended]]] = {
    **{
        name: getattr(FakeRunning, name)
        for name in "true false echo error cat flood drip fill hold sleep env tty missing".split()
    },
    "stubborn": FakeRunning.hold,
    "deaf": FakeRunning.hold,
}


class FakeBox:
    """A sandbox of the fake."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.content: dict[str, bytes] = {}
        self.running: dict[str, FakeRunning] = {}
        self.paused = False


def _unheard(sandbox: str, reason: str) -> None:
    raise AssertionError(f"nobody wants to know that {sandbox} is lost: {reason}")


class FakeBackend:
    """The backend. It outlives services, as a machine does."""

    name = "fake"
    shared = False

    def __init__(self, support: Support | None = None) -> None:
        self.support = support or Support(
            ok=True, enforced=ENFORCED, pause=True, networks=("off", "public", "allow")
        )
        self.boxes: dict[str, FakeBox] = {}
        # What was asked of it, in order: (verb, id).
        self.calls: list[tuple[str, str]] = []
        # Awaited before each call by its verb, where there is one: to hold or to fail it.
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.most_running = 0
        self.closed = False
        # What `create` says of each sandbox, and the numbers for metrics.
        self.keeps: dict[str, str] = {}
        self.numbers: dict[str, float] = {}
        self.reconcile_seconds = 0.0
        # What the service has asked to be told of, and to have ready.
        self.lost: Lost = _unheard
        self.wanted: tuple[Warm, ...] | None = None
        self.known: list[frozenset[str]] = []

    async def _call(self, verb: str, id: str) -> None:
        self.calls.append((verb, id))
        await self._hook(verb)

    async def _hook(self, verb: str) -> None:
        if verb in self.before:
            await self.before[verb]()

    def running(self, execution: str) -> FakeRunning:
        """The command of an execution."""
        return next(
            box.running[execution] for box in self.boxes.values() if execution in box.running
        )

    async def probe(self) -> Support:
        return self.support

    async def resolve(self, image: str) -> str:
        if not self.support.images:
            raise Problem("UNSUPPORTED", "no images")
        return f"sha256:{image}"

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        await self._call("create", sandbox.id)
        assert sandbox.id not in self.boxes
        self.boxes[sandbox.id] = FakeBox(sandbox)
        return self.keeps

    async def delete(self, sandbox: Sandbox) -> None:
        await self._call("delete", sandbox.id)
        box = self.boxes.pop(sandbox.id, None)
        if box is not None:
            for running in box.running.values():
                await running.kill()

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> FakeRunning:
        await self._call("start", sandbox.id)
        if start.argv[0] == "broken":
            raise RuntimeError("a secret of the host")
        if start.argv[0] not in COMMANDS and start.argv[0] != "immortal":
            raise Problem("UNSUPPORTED", f"the fake has no '{start.argv[0]}'")
        box = self.boxes[sandbox.id]
        running = FakeRunning(box, start, sink)
        box.running[start.execution] = running
        running._ended.add_done_callback(lambda _: box.running.pop(start.execution, None))
        now = sum(len(one.running) for one in self.boxes.values())
        self.most_running = max(self.most_running, now)
        return running

    async def pause(self, sandbox: Sandbox) -> None:
        await self._call("pause", sandbox.id)
        self.boxes[sandbox.id].paused = True

    async def resume(self, sandbox: Sandbox) -> None:
        await self._call("resume", sandbox.id)
        self.boxes[sandbox.id].paused = False

    def files(self, sandbox: Sandbox) -> FakeFiles:
        return FakeFiles(self.boxes[sandbox.id].content)

    async def usage(self, sandbox: Sandbox) -> Resources:
        await self._call("usage", sandbox.id)
        box = self.boxes[sandbox.id]
        return Resources(
            memory=1000, pids=len(box.running), disk=sum(map(len, box.content.values()))
        )

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        self.known.append(frozenset(known))
        await self._hook("reconcile")
        for gone in set(self.boxes) - set(known):
            del self.boxes[gone]
        if len(self.known) == 1:
            for box in self.boxes.values():
                await self._end(box)
        return frozenset(self.boxes)

    def attend(self, lost: Lost) -> None:
        self.lost = lost
        # A service starts: what runs is an earlier one's.
        self.known.clear()

    async def prepare(self, wanted: tuple[Warm, ...]) -> None:
        await self._hook("prepare")
        self.wanted = wanted

    async def renewed(self, sandbox: Sandbox) -> None:
        await self._call("renewed", sandbox.id)
        self.boxes[sandbox.id].sandbox = sandbox

    def gauges(self) -> Mapping[str, float]:
        return self.numbers

    async def close(self) -> None:
        self.closed = True
        for box in self.boxes.values():
            await self._end(box)

    async def _end(self, box: FakeBox) -> None:
        for running in tuple(box.running.values()):
            await running.kill()
        box.running.clear()
