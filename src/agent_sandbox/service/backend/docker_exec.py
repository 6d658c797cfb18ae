"""A command in a container: its streams, its end, and the means to end it."""

from __future__ import annotations

import asyncio
import secrets

from ...record import Record
from ..problems import Problem
from . import docker_requests as requests
from . import docker_scripts as scripts
from .docker_engine import Refusal, unavailable
from .docker_stream import STDERR, STDOUT, BadStream, Frames, Words, signal_name
from .interface import Ended, Terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...proxy.docker import wire
    from ..values import Sandbox
    from .docker_engine import Engine
    from .interface import Sink, Start

START_SECONDS = 60.0
# How long processes that were killed may take to be gone, before the container is ended instead.
KILL_SECONDS = 3.0
# How long the engine may take to note the end of a process whose streams have ended.
NOTICE_SECONDS = 5.0
PIECE = 256 * 1024
MAX_ANSWER = 8 << 20
# What is held back until it is known that the command runs.
MAX_EARLY = 4 << 20
SIGKILL_CODE = 137

# Why a command did not start, by the wrapper's word.
FAILURES = {
    "cwd": (126, "the working directory does not exist or may not be entered"),
    "126": (126, "the command is not executable"),
    "127": (127, "the command was not found"),
}


class Result(Record):
    """What a script of ours has said."""

    code: int
    output: bytes
    complaint: str


class Execution:
    """A started command, as `interface.Running`."""

    def __init__(
        self, engine: Engine, container: str, start: Start, sink: Sink, *,
        alone: Callable[[], bool], one_shot: bool, over: Callable[[Execution], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._container = container
        self._start = start
        self._sink = sink
        # Whether no other command runs in the sandbox: then all of its processes are ours.
        self._alone = alone
        self._one_shot = one_shot
        self._over = over
        self._id = ""
        self._line: wire.Line | None = None
        token = secrets.token_hex(16)
        self._token = token
        self._words = Words(token)
        self._begun = asyncio.Event()
        self._sending = asyncio.Lock()
        self._killed = False
        self._early: list[tuple[int, bytes]] = []
        self._task: asyncio.Task[Ended] | None = None

    async def launch(self, sandbox: Sandbox) -> None:
        """Start it; return when the command runs, or is known not to."""
        body = requests.execution(sandbox, self._start, self._token)
        found = await self._engine.ask("POST", f"/containers/{self._container}/exec", document=body)
        self._id = str(found["Id"]) if isinstance(found, dict) else ""
        tty = self._start.terminal is not None
        self._line = await self._engine.hijack(
            f"/exec/{self._id}/start", document={"Detach": False, "Tty": tty}
        )
        running = self._run(self._line)
        self._task = asyncio.create_task(running, name=f"execution {self._start.execution}")
        terminal = self._start.terminal
        # As early as the engine takes it; else when the command runs for certain.
        sized = terminal is None or await self._sized(terminal)
        waiting = asyncio.create_task(self._begun.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.kill()
            raise unavailable("a command did not start in time") from None
        finally:
            waiting.cancel()
        if terminal is not None and not sized:
            await self._sized(terminal)

    # --- interface.Running

    async def wait(self) -> Ended:
        """The end."""
        if self._task is None:
            raise RuntimeError("it was not launched")
        return await asyncio.shield(self._task)

    async def write(self, data: bytes) -> None:
        """Input."""
        async with self._sending:
            if self._line is None or self._task is None or self._task.done():
                raise BrokenPipeError("the command has ended")
            await self._line.send(data)

    async def close_input(self) -> None:
        """No more input."""
        if self._start.terminal is not None:
            await self.write(b"\x04")
            return
        async with self._sending:
            if self._line is not None:
                self._line.end()

    async def signal(self, number: int) -> None:
        """Signal the command itself."""
        begun = self._words.begun
        if self._task is None or self._task.done() or begun is None or not begun.pid:
            return
        words = scripts.script(scripts.SIGNAL, str(int(number)), str(begun.pid))
        await run(self._engine, self._container, words)

    async def kill(self) -> None:
        """End all of its processes."""
        if self._task is None or self._task.done():
            return
        self._killed = True
        if not self._one_shot:
            begun = self._words.begun
            await self._end_processes(begun.pid if begun is not None else 0)
        else:
            await end_container(self._engine, self._container)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.shield(self._task)
        except TimeoutError:
            await end_container(self._engine, self._container)

    async def resize(self, terminal: Terminal) -> None:
        """Change the terminal's size."""
        await self._sized(terminal)

    async def _sized(self, terminal: Terminal) -> bool:
        size = {"h": str(terminal.rows), "w": str(terminal.columns)}
        try:
            await self._engine.ask("POST", f"/exec/{self._id}/resize", size)
        except Refusal:
            # It has ended, or has not quite begun; the size is a wish.
            return False
        return True

    async def _end_processes(self, pid: int) -> None:
        """End what hangs together with a process, and what nobody owns; all, if nobody else runs.

        The processes may be so many, or so hostile, that nothing comes to its end beside them: then
        the container ends with them.
        """
        words = scripts.script(scripts.KILL_ONE, str(pid))
        if self._alone() or not pid:
            words = scripts.script(scripts.KILL_ALL)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                done = await run(self._engine, self._container, words)
                if done.code == 0:
                    return
        except (TimeoutError, Problem, Refusal):
            pass
        await end_container(self._engine, self._container)

    # --- the stream

    async def _run(self, line: wire.Line) -> Ended:
        try:
            await self._pump(line)
            return await self._ended()
        finally:
            line.close()
            self._begun.set()
            self._over(self)

    async def _pump(self, line: wire.Line) -> None:
        tty = self._start.terminal is not None
        frames = Frames()
        try:
            while data := await line.receive(PIECE):
                pieces = [(STDOUT, data)] if tty else frames.feed(data)
                for stream, piece in pieces:
                    self._take(stream, piece, told=tty or stream == STDERR)
        except BadStream as error:
            raise unavailable(error) from error
        except OSError:
            # The engine is gone, or has been stopped: what it says next decides.
            pass
        rest = self._words.end()
        if rest:
            self._give(STDOUT if tty else STDERR, rest)

    def _take(self, stream: int, piece: bytes, *, told: bool) -> None:
        """A piece of output; the wrapper speaks on one of the streams."""
        if told:
            piece = self._words.feed(piece)
        if self._words.begun is not None and not self._begun.is_set():
            self._begun.set()
            self._flush()
        if piece:
            self._give(stream, piece)

    def _give(self, stream: int, piece: bytes) -> None:
        if self._words.begun is not None:
            self._sink(stream, piece)
        else:
            # The streams are not in step: the command may be heard before the word that it runs.
            # If that word never comes, it is the engine or the shell that says why.
            self._early.append((stream, piece))
            if sum(len(held) for _, held in self._early) > MAX_EARLY:
                # No engine complains at such length.
                self._flush()

    def _flush(self) -> None:
        early, self._early = self._early, []
        for stream, piece in early:
            self._sink(stream, piece)

    # --- the end

    async def _ended(self) -> Ended:
        begun, finished = self._words.begun, self._words.finished
        if begun is None:
            if self._killed:
                return Ended(code=SIGKILL_CODE, signal="SIGKILL", started=False)
            return await self._never()
        if begun.failed:
            code, why = FAILURES.get(begun.failed, (126, "the command could not be started"))
            return Ended(code=code, error=why, started=False)
        if finished is not None:
            grown = finished.ooms > begun.ooms
            return Ended(
                code=finished.code, signal=signal_name(finished.code), cpu_ms=finished.cpu_ms,
                exceeded="memory" if grown and finished.code else "",
            )  # fmt: skip
        if self._killed:
            return Ended(code=SIGKILL_CODE, signal="SIGKILL")
        return await self._broken()

    async def _never(self) -> Ended:
        said = b"".join(piece for _, piece in self._early)
        text = " ".join(said.decode("utf-8", "replace").split())
        return Ended(
            code=126, started=False, error=f"the engine could not start it: {text[:300] or '?'}"
        )

    async def _broken(self) -> Ended:
        """The wrapper is gone: killed by its command, for memory, or with the container."""
        code = await exit_code(self._engine, self._id)
        state = await container_state(self._engine, self._container)
        if state.get("Running"):
            # What the command has left would outlive it; only this wrapper would have swept.
            await self._end_processes(1)
        over = code == SIGKILL_CODE and state.get("OOMKilled") is True
        return Ended(code=code, signal=signal_name(code), exceeded="memory" if over else "")


# --- small processes of ours


async def run(
    engine: Engine, container: str, command: list[str], *, data: bytes | None = None
) -> Result:
    """Run a script in a container, as the sandbox's user; Refusal when it cannot be started."""
    body = requests.process(command, stdin=data is not None)
    found = await engine.ask("POST", f"/containers/{container}/exec", document=body)
    number = str(found["Id"]) if isinstance(found, dict) else ""
    line = await engine.hijack(f"/exec/{number}/start", document={"Detach": False, "Tty": False})
    frames = Frames()
    said: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray()}
    try:
        if data is not None:
            await line.send(data)
            line.end()
        while (piece := await line.receive(PIECE)) and len(said[STDOUT]) <= MAX_ANSWER:
            for stream, content in frames.feed(piece):
                said.setdefault(stream, bytearray()).extend(content)
    except (OSError, BadStream) as error:
        raise unavailable(error) from error
    finally:
        line.close()
    code = await exit_code(engine, number)
    complaint = said[STDERR].decode("utf-8", "replace").strip()
    return Result(code=code, output=bytes(said[STDOUT]), complaint=complaint[:500])


async def exit_code(engine: Engine, execution: str) -> int:
    """How a process has ended, as soon as the engine knows."""
    pause = 0.002
    until = asyncio.get_running_loop().time() + NOTICE_SECONDS
    while True:
        try:
            found = await engine.ask("GET", f"/exec/{execution}/json")
        except Refusal:
            # The engine forgets executions of a container that has ended.
            return SIGKILL_CODE
        about = found if isinstance(found, dict) else {}
        if not about.get("Running") and isinstance(about.get("ExitCode"), int):
            return int(about["ExitCode"])
        if asyncio.get_running_loop().time() > until:
            return SIGKILL_CODE
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.2)


async def container_state(engine: Engine, container: str) -> dict[str, object]:
    """What the engine says of a container; nothing if it is gone."""
    try:
        found = await engine.ask("GET", f"/containers/{container}/json")
    except Refusal:
        return {}
    state = found.get("State") if isinstance(found, dict) else None
    return state if isinstance(state, dict) else {}


async def end_container(engine: Engine, container: str) -> None:
    """End all that runs in a container. The engine does it from outside: nothing can resist."""
    for path in ("unpause", "kill"):
        try:
            await engine.ask("POST", f"/containers/{container}/{path}")
        except Refusal:
            # Not paused, or not running.
            continue
