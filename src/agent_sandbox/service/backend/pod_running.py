"""A command in a pod, as `interface.Running`."""

from __future__ import annotations

import asyncio

from ...pod import frames, terms
from .interface import Ended, Terminal
from .pod_wire import Broken, Wire, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .interface import Sink

OUTPUTS = {frames.OUT: 1, frames.ERR: 2}
# Seconds without a word from an agent that speaks every HEARTBEAT, before the engine is asked.
QUIET = 4 * terms.HEARTBEAT
LOST = 255
MOST_CODE = 255
# The signal names and limits that an agent may name.
EXCEEDED = ("", "memory")
MOST_NAME, MOST_ERROR = 16, 4096
# How long a command's supervisor may take to end it, before the agent itself is asked to.
KILL_SECONDS = 5.0


class PodRunning:
    """A started command. `broken` finds out what became of it when the connection is gone."""

    def __init__(
        self, wire: Wire, sink: Sink, *, broken: Callable[[str], Awaitable[Ended]],
        on_quiet: Callable[[], None], on_end: Callable[[PodRunning, Wire | None], None],
        force: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._wire = wire
        # Whether the agent takes another command on the same connection.
        self._again = False
        self._sink = sink
        self._broken = broken
        self._on_quiet = on_quiet
        self._on_end = on_end
        self._force = force
        self._forcing: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        # Input that may still be sent, and whoever waits for it.
        self._room = terms.WINDOW
        self._wants = asyncio.Event()
        self._reads = True
        self._turn = asyncio.Lock()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(QUIET, self._listen)
        self._task = self._loop.create_task(self._run())

    # --- what the agent says

    async def _run(self) -> None:
        try:
            ended = await self._follow()
        except Broken as error:
            ended = await self._broken(str(error))
        self._finish(ended)

    async def _follow(self) -> Ended:
        while True:
            kind, data = await self._wire.next()
            self._heard = self._loop.time()
            if kind in OUTPUTS:
                if not self._ended.done():
                    self._sink(OUTPUTS[kind], data)
            elif kind == frames.ROOM:
                # No more than the window, whatever it says.
                self._room = min(terms.WINDOW, self._room + int.from_bytes(data, "big"))
                self._wants.set()
            elif kind == frames.CLOSE:
                self._reads = False
                self._wants.set()
            elif kind == frames.ENDED:
                ended, again = read_end(data)
                self._again = again and self._wire.is_clear
                return ended
            elif kind != frames.ALIVE:
                self._wire.abort()
                raise Broken(f"an unexpected message {kind!r}")

    def _listen(self) -> None:
        """Ask about an agent that says nothing. It may be the network, the node, or a lie."""
        silent = self._loop.time() - self._heard
        if silent >= QUIET:
            self._on_quiet()
        self._timer = self._loop.call_later(max(QUIET - silent, QUIET / 2), self._listen)

    def _finish(self, ended: Ended) -> None:
        self._timer.cancel()
        if self._forcing is not None:
            self._forcing.cancel()
        if not self._ended.done():
            self._ended.set_result(ended)
            self._wants.set()
            self._on_end(self, self._wire if self._again else None)
        if not self._again:
            self._wire.abort()

    def lose(self, reason: str) -> None:
        """It is gone with its pod."""
        self._finish(Ended(code=LOST, lost=True, error=reason))
        self._task.cancel()

    # --- interface.Running

    async def wait(self) -> Ended:
        """The end."""
        return await asyncio.shield(self._ended)

    async def write(self, data: bytes) -> None:
        """Input; waits while the command does not read."""
        async with self._turn:
            view = memoryview(data)
            while view:
                while self._reads and not self._room and not self._ended.done():
                    self._wants.clear()
                    await self._wants.wait()
                if not self._reads or self._ended.done():
                    raise BrokenPipeError("the command reads no more")
                piece = view[: min(self._room, frames.CHUNK)]
                self._room -= len(piece)
                await self._say(frames.frame(frames.INPUT, bytes(piece)))
                view = view[len(piece) :]

    async def close_input(self) -> None:
        """The end of the input."""
        async with self._turn:
            if not self._ended.done():
                await self._say(frames.frame(frames.CLOSE))

    async def signal(self, number: int) -> None:
        """Signal the command itself."""
        await self._tell(frames.frame(frames.SIGNAL, bytes((number,))))

    async def kill(self) -> None:
        """End all of its processes.

        A command may have stopped its supervisor, or slowed it down: then the agent ends it. That
        must not depend on whether this connection takes another byte.
        """
        if self._forcing is None and not self._ended.done():
            self._forcing = self._loop.create_task(self._insist())
        await self._tell(frames.frame(frames.KILL))

    async def _insist(self) -> None:
        while True:
            await asyncio.sleep(KILL_SECONDS)
            await self._force()

    async def resize(self, terminal: Terminal) -> None:
        """Change the size of its terminal."""
        size = b"".join(
            min(n, 0xFFFF).to_bytes(2, "big") for n in (terminal.rows, terminal.columns)
        )
        await self._tell(frames.frame(frames.SIZE, size))

    async def _say(self, data: bytes) -> None:
        try:
            await self._wire.send(data)
        except Broken as error:
            raise BrokenPipeError("the command reads no more") from error

    async def _tell(self, data: bytes) -> None:
        """Send it; when the connection is gone, so is the command."""
        if not self._ended.done():
            try:
                await self._wire.send(data)
            except Broken:
                return


def read_end(data: bytes) -> tuple[Ended, bool]:
    """How an agent says that a command has ended, and whether it takes another one after it."""
    try:
        fields = frames.Fields(frames.document(data))
        ended = Ended(
            code=fields.whole("code", most=MOST_CODE), signal=fields.word("signal", most=MOST_NAME),
            exceeded=fields.word("exceeded", most=MOST_NAME), error=fields.word("error"),
            cpu_ms=fields.whole("cpu_ms"), max_rss_kb=fields.whole("max_rss_kb"),
            started=fields.switch("started"),
        )  # fmt: skip
        again = fields.switch("again", False)  # noqa: FBT003 - a value
        fields.end()
    except frames.BadFrame as error:
        raise Broken(str(error)) from error
    name = ended.signal
    named = not name or (name.isascii() and name.startswith("SIG") and _is_word(name))
    if ended.exceeded not in EXCEEDED or not named:
        raise Broken("an end that makes no sense")
    # Half a character, or a terminal's own commands, would go into the store and to people.
    return ended.replace(error=shown(ended.error)[:MOST_ERROR]), again


def _is_word(name: str) -> bool:
    return name.replace("+", "").replace("-", "").isalnum()
