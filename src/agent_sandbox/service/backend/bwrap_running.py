"""A command that runs in a bwrap sandbox, on the event loop: its streams, its signals, its end.

No thread waits for anything here: descriptors of processes (pidfd_open(2)) and pipes tell.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import signal
import struct
import termios

from ...launch import execute
from ...sandbox import owned
from .interface import Ended, Terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from .interface import Sink

OUT, ERR = 1, 2
CHUNK = 1 << 18
# The most that is read after the end, in bytes: more than a pipe holds (pipe-max-size, pipe(7)).
# The command may have given its output to another execution's process, which writes for ever.
MOST_LEFT = 1 << 22
# What a pipe holds after the first time that it was full: fewer, larger pieces.
WIDE = 1 << 18
F_SETPIPE_SZ = 1031
CTRL_D = b"\x04"
# Between two looks for a command that is about to start, in seconds.
SIGNAL_PAUSE = 0.005
# What bwrap says, in pieces, when the command cannot be executed or its directory entered.
SAYS, MOST = b"bwrap: ", 1 << 13
CANNOT_EXECUTE, CANNOT_ENTER = b"bwrap: execvp ", b"bwrap: Can't chdir to "
MISSING = b"No such file or directory"
NOT_EXECUTABLE, NOT_FOUND = 126, 127


class Streams:
    """The standard streams of a command: its ends, and ours."""

    def __init__(self, null: int, *, wants_input: bool, terminal: Terminal | None) -> None:
        # Our ends: stream number → descriptor; and where input goes, or -1.
        self.outputs: dict[int, int] = {}
        self.input = -1
        self.is_terminal = terminal is not None
        self._theirs: list[int] = []
        if terminal is not None:
            master, slave = os.openpty()
            resize(master, terminal)
            self.outputs[OUT] = self.input = master
            self._theirs.append(slave)
            self.inside = (slave, slave, slave)
        else:
            stdin = null
            if wants_input:
                stdin, self.input = os.pipe()
                self._theirs.append(stdin)
            self.outputs[OUT], out = os.pipe()
            self.outputs[ERR], err = os.pipe()
            self._theirs += (out, err)
            self.inside = (stdin, out, err)
        for fd in {*self.outputs.values(), self.input} - {-1}:
            os.set_blocking(fd, False)

    def handed_over(self) -> None:
        """Close the command's ends here, so that their end can be seen."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def said_before_start(self) -> bytes:
        """What bwrap has said when it could not build; taken out, for the next attempt."""
        try:
            return os.read(self.outputs.get(ERR, self.outputs[OUT]), CHUNK)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close everything that is still open."""
        self.handed_over()
        for fd in {*self.outputs.values(), self.input} - {-1}:
            os.close(fd)
        self.outputs, self.input = {}, -1


def resize(master: int, terminal: Terminal) -> None:
    """Set a terminal's size; the kernel tells its foreground processes (SIGWINCH)."""
    fcntl.ioctl(
        master, termios.TIOCSWINSZ, struct.pack("HHHH", terminal.rows, terminal.columns, 0, 0)
    )


class BwrapRunning:
    """A started command. `on_end` is called once, when nothing of it lives any more."""

    def __init__(
        self, launched: owned.Launched, streams: Streams, sink: Sink, *, executor: Executor,
        argv: tuple[str, ...], exceeded: Callable[[], str], on_end: Callable[[BwrapRunning], None],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._launched = launched
        self._streams = streams
        self._sink = sink
        self._executor = executor
        self._argv = argv
        self._limit = exceeded
        self._on_end = on_end
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._turn = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        self._outer = os.pidfd_open(launched.outer)
        self._init = -1
        self._code = 0
        self._exceeded = ""
        # What bwrap may have said, held back until it is clear who speaks.
        self._first_words = b""
        self._spoken = False
        for number, fd in streams.outputs.items():
            self._loop.add_reader(fd, self._read, number, fd)
        self._loop.add_reader(launched.keeper.fileno(), self._heed_keeper)
        self._loop.add_reader(self._outer, self._outer_ended)

    # --- output

    def _read(self, number: int, fd: int) -> int:
        """Hand on what there is; 0 when there is nothing more, now or for ever."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return 0
        except OSError as error:
            # EIO: nobody has the terminal open any more.
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self._close_output(number)
            return 0
        if len(data) == 1 << 16:
            self._widen(fd)
        self._say(number, data)
        return len(data)

    def _say(self, number: int, data: bytes) -> None:
        if number == ERR and not self._spoken:
            data = self._first_words + data
            self._first_words = data if _may_be_bwrap(data) else b""
            self._spoken = not self._first_words
            if not self._spoken:
                return
        self._sink(number, data)

    def _widen(self, fd: int) -> None:
        try:
            fcntl.fcntl(fd, F_SETPIPE_SZ, WIDE)
        except OSError:
            # The user's pipes have enough pages already (pipe(7)): it works without.
            return

    def _close_output(self, number: int) -> None:
        fd = self._streams.outputs.pop(number)
        self._loop.remove_reader(fd)
        if fd == self._streams.input:
            self._loop.remove_writer(fd)
            self._streams.input = -1
            self._wake()
        os.close(fd)

    # --- the end

    def _heed_keeper(self) -> None:
        """Nobody may run whose mounts nobody holds: a save outside would uncover what is hidden."""
        if not self._launched.keeper.hear():
            self._loop.remove_reader(self._launched.keeper.fileno())
            self._exceeded = "keeper"
            self._launched.sandboxed.kill()

    def _outer_ended(self) -> None:
        self._loop.remove_reader(self._outer)
        os.close(self._outer)
        self._outer = -1
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._launched.outer, 0)[1])
        # bwrap's death kills its child, and the kernel the rest; this is for a bwrap that was
        # killed before it had tied the two together.
        self._launched.sandboxed.finish()
        self._init = self._launched.sandboxed.fileno()
        if self._init < 0 or self._launched.init is None or _is_over(self._init):
            self._all_ended()
        else:
            self._loop.add_reader(self._init, self._all_ended)

    def _all_ended(self) -> None:
        """Nothing of it lives any more: all that it has written is in the pipes."""
        if self._init >= 0:
            self._loop.remove_reader(self._init)
        for number, fd in list(self._streams.outputs.items()):
            left = MOST_LEFT
            while left > 0 and number in self._streams.outputs:
                count = self._read(number, fd)
                left = left - count if count else 0
            if number in self._streams.outputs:
                self._close_output(number)
        self._close_input()
        launched = self._launched
        used = owned.reap(launched.init) if launched.init is not None else None
        launched.sandboxed.join(0)
        started = launched.status.reported_exit()
        self._loop.remove_reader(launched.keeper.fileno())
        launched.keeper.let_go()
        ended = self._verdict(started=started)
        if used is not None:
            cpu = int((used.ru_utime + used.ru_stime) * 1000)
            ended = ended.replace(cpu_ms=cpu, max_rss_kb=int(used.ru_maxrss))
        if launched.network is None:
            self._finish(ended)
        else:
            launched.network.ask()
            # Its report may take a moment.
            done = self._loop.run_in_executor(self._executor, launched.network.finish)
            done.add_done_callback(lambda _: self._finish(ended))

    def _finish(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            self._on_end(self)

    def _verdict(self, *, started: bool) -> Ended:
        code = self._code if self._code >= 0 else 128 - self._code
        # A limit that has ended something else inside, which the command got over, is no end.
        exceeded = self._exceeded or (self._limit() if code else "")
        words, self._first_words = self._first_words, b""
        if not started and code == 1 and words.startswith(CANNOT_EXECUTE):
            return self._not_executed(words)
        if not started and code and code < 128:
            said = words.decode("utf-8", "replace").strip().removeprefix(SAYS.decode())
            if words.startswith(CANNOT_ENTER):
                said = f"cannot enter the working directory: {said.rpartition(': ')[2]}"
            return Ended(code=NOT_EXECUTABLE, started=False, error=said or "bwrap failed")
        if words:
            self._sink(ERR, words)
        return Ended(code=code, signal=_signal_name(code), exceeded=exceeded)

    def _not_executed(self, words: bytes) -> Ended:
        missing = MISSING in words
        what = "command not found" if missing else "cannot execute"
        message = f"{self._argv[0]}: {what}"
        self._sink(ERR, message.encode("utf-8", "surrogateescape") + b"\n")
        code = NOT_FOUND if missing else NOT_EXECUTABLE
        return Ended(code=code, started=False, error=message)

    async def wait(self) -> Ended:
        """The end."""
        return await asyncio.shield(self._ended)

    # --- input

    async def write(self, data: bytes) -> None:
        """Input; waits while the command does not read."""
        async with self._turn:
            view = memoryview(data)
            while view:
                if self._streams.input < 0:
                    raise BrokenPipeError("the command reads no more")
                try:
                    view = view[os.write(self._streams.input, view) :]
                except BlockingIOError:
                    await self._wait_for_room()
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.EIO):
                        raise
                    self._close_input()
                    raise BrokenPipeError("the command reads no more") from error

    async def _wait_for_room(self) -> None:
        self._room = self._loop.create_future()
        fd = self._streams.input
        self._loop.add_writer(fd, self._wake)
        try:
            await self._room
        finally:
            self._room = None
            if fd == self._streams.input:
                self._loop.remove_writer(fd)

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def close_input(self) -> None:
        """The end of the input."""
        if self._streams.is_terminal:
            await self.write(CTRL_D)
            return
        async with self._turn:
            self._close_input()

    def _close_input(self) -> None:
        fd = self._streams.input
        if fd >= 0 and not self._streams.is_terminal:
            self._loop.remove_writer(fd)
            os.close(fd)
            self._streams.input = -1
        self._wake()

    # --- signals

    async def signal(self, number: int) -> None:
        """Signal the command itself."""
        deadline = self._loop.time() + execute.START_SECONDS
        # It may be about to start. No thread waits: somebody may send thousands.
        while not self._ended.done() and self._loop.time() < deadline:
            pid = execute.command_pid(self._launched.sandboxed.init)
            if pid is not None:
                _send(pid, number)
                return
            await asyncio.sleep(SIGNAL_PAUSE)

    async def kill(self) -> None:
        """End all of its processes at once."""
        self.kill_now()

    def kill_now(self, exceeded: str = "") -> None:
        """End all of its processes; says why in the end."""
        if not self._ended.done() and self._outer >= 0:
            self._exceeded = self._exceeded or exceeded
            self._launched.sandboxed.kill()

    async def resize(self, terminal: Terminal) -> None:
        """Change the size of its terminal."""
        if self._streams.is_terminal and self._streams.input >= 0:
            resize(self._streams.input, terminal)

    @property
    def proxy(self) -> int:
        """The process that carries its network; 0 when there is none."""
        return self._launched.network.pid if self._launched.network is not None else 0

    @property
    def init(self) -> int | None:
        """The sandbox's first process, as the host numbers it."""
        return None if self._ended.done() else self._launched.init


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It has ended meanwhile.
        return


def _may_be_bwrap(data: bytes) -> bool:
    """Whether these may be words of bwrap's own, before the command."""
    words = data[: len(SAYS)]
    return len(data) < MOST and SAYS.startswith(words)


def _is_over(handle: int) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(0))


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""
