"""The process beside one command: its streams to and from the service, and its end.

It is a child subreaper, so whatever the command leaves behind becomes its child, and it leaves
nothing behind itself. When the service is gone it ends the command: nobody would see its end.
"""

from __future__ import annotations

import errno
import os
import select
import time

from ..launch import syscalls
from . import ending, figures, frames, inner, spawn, terms
from .line import Gone

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable

    from .confine import Bounds
    from .inner import Bundle
    from .line import Line
else:
    import _signal

OUT, ERR = spawn.OUT, spawn.ERR
KINDS = {OUT: frames.OUT, ERR: frames.ERR}
# Output that the service has not taken: beyond it the command has to wait.
MOST_HELD = 1 << 19
# The most that is read after the end: somebody else's process may have the pipe and write for ever.
MOST_LEFT = 1 << 22
# How long the service may take for the last words, in seconds.
LAST_SECONDS = 30.0
CTRL_D = b"\x04"
# Between two looks at a terminal that nobody has open, in seconds: poll would return at once.
NAP = 0.1
NOT_EXECUTABLE, NOT_FOUND, KILLED = 126, 127, 137
# What bwrap says, in pieces, when the command cannot be executed or its directory entered.
SAYS, MOST_SAID = b"bwrap: ", 1 << 13
CANNOT_EXECUTE, CANNOT_ENTER = b"bwrap: execvp ", b"bwrap: Can't chdir to "
# And what the starter says, with the number of its line and the code with which it ends.
STARTER_SAYS = f"{inner.STARTER[-1]}: ".encode("ascii")
CANNOT_GO_ON = 1
STARTER_CODES = {CANNOT_GO_ON: b": cd: ", NOT_EXECUTABLE: b": exec: ", NOT_FOUND: b": exec: "}
MISSING = b"No such file or directory"
# How this process ends: told the end; the service had gone; could not end what it had started.
TOLD, UNHEARD, STUCK = 0, 3, 4
# Told the end, and can serve another command on the same connection. No process ends so.
AGAIN = 5


class Supervisor:
    """One command."""

    def __init__(
        self, line: Line, order: spawn.Order, settled: spawn.Terms, bounds: Bounds,
        bundle: Bundle, *, spare: spawn.Spare | None = None,
    ) -> None:  # fmt: skip
        self._line = line
        self._order = order
        self._settled = settled
        self._input = bytearray()
        self._wants_end = False
        # What bwrap may have said, held back until it is clear who speaks.
        self._first_words = b""
        self._spoken = settled.form == terms.NONE
        self._killed = False
        # Until when nobody listens to a terminal that nobody has open.
        self._asleep = 0.0
        if spare is not None and spare.serve(order):
            self._streams, self._started = spare.streams, spare.started
        else:
            if spare is not None:
                spare.discard()
            self._streams = spawn.Streams(order)
            self._started = spawn.spawn(order, settled, self._streams, bounds, bundle)
            self._streams.handed_over()
        self._beat = time.monotonic()
        self._acts: dict[bytes, Callable[[bytes], None]] = {
            frames.INPUT: self._take_input, frames.CLOSE: self._close_input,
            frames.SIGNAL: self._signal, frames.SIZE: self._resize, frames.KILL: self._kill,
        }  # fmt: skip

    def run(self, bell: int) -> int:
        """Serve it to its end; `bell` can be read when we are told to end it."""
        failure = self._started.failure()
        if failure is not None and failure[0] == "cwd":
            self._refuse(failure[1])
            return TOLD
        if failure is None and self._started.init is None:
            spawn.weigh(self._started.pid)
        self._line.say(frames.text(frames.ANSWER, {}))
        try:
            # What came with the request is not in the socket any more, where poll would see it.
            self._heed()
            while not self._step(bell):
                pass
        except Gone:
            return UNHEARD if ending.end_below() else STUCK
        return self._conclude(failure)

    def _refuse(self, number: int) -> None:
        os.waitpid(self._started.pid, 0)
        what = os.strerror(number).lower()
        message = f"cannot enter '{self._order.cwd}': {what}"
        document = {"code": "INVALID", "message": message, "field": "cwd"}
        self._line.send(frames.text(frames.REFUSAL, document), LAST_SECONDS)
        self._line.finish(LAST_SECONDS)

    # --- what happens meanwhile

    def _step(self, bell: int) -> bool:
        """Wait for something and do it; whether the command has ended."""
        self._line.flush()
        poller = select.poll()
        poller.register(self._line, select.POLLIN | (select.POLLOUT if self._line.waiting else 0))
        poller.register(self._started.handle, select.POLLIN)
        poller.register(bell, select.POLLIN)
        wanted = self._wanted()
        for fd, events in wanted.items():
            poller.register(fd, events)
        now = time.monotonic()
        left = self._beat + terms.HEARTBEAT - now
        if self._asleep > now:
            left = min(left, self._asleep - now)
        ready = dict(poller.poll(max(0.0, left) * 1000))
        self._breathe()
        if bell in ready:
            os.read(bell, 64)
            self._kill(b"")
        if self._line.fileno() in ready:
            self._heed()
        for number, fd in list(self._streams.outputs.items()):
            if fd in ready and self._streams.outputs.get(number) == fd:
                self._read(number, fd)
        if self._streams.input in ready and self._input:
            self._write()
        return self._started.handle in ready

    def _heed(self) -> None:
        for kind, data in (*self._line.held(), *self._line.take()):
            act = self._acts.get(kind)
            if act is None:
                raise Gone("not for a command")
            act(data)

    def _wanted(self) -> dict[int, int]:
        found: dict[int, int] = {}
        if self._line.waiting < MOST_HELD and self._asleep <= time.monotonic():
            found = dict.fromkeys(self._streams.outputs.values(), select.POLLIN)
        fd = self._streams.input
        if fd >= 0 and self._input:
            found[fd] = found.get(fd, 0) | select.POLLOUT
        return found

    def _breathe(self) -> None:
        now = time.monotonic()
        if now - self._beat >= terms.HEARTBEAT:
            self._beat = now
            if not self._line.waiting:
                self._line.say(frames.frame(frames.ALIVE))

    # --- output

    def _read(self, number: int, fd: int) -> int:
        """Hand on what there is; 0 when there is nothing more, now or for ever."""
        try:
            data = os.read(fd, frames.CHUNK)
        except BlockingIOError:
            return 0
        except OSError as error:
            # EIO: nobody has the terminal open at the moment. The command may live on, or be about
            # to exit: if our end were closed now, the kernel would end it by SIGHUP.
            if error.errno != errno.EIO:
                raise
            self._asleep = time.monotonic() + NAP
            return 0
        if data:
            self._say(number, data)
        else:
            self._close_output(number)
        return len(data)

    def _say(self, number: int, data: bytes) -> None:
        if number == ERR and not self._spoken:
            data = self._first_words + data
            is_ours = len(data) < MOST_SAID and any(
                says.startswith(data[: len(says)]) for says in (SAYS, STARTER_SAYS)
            )
            self._first_words = data if is_ours else b""
            self._spoken = not is_ours
            if is_ours:
                return
        for at in range(0, len(data), frames.CHUNK):
            self._line.say(frames.frame(KINDS[number], data[at : at + frames.CHUNK]))

    def _close_output(self, number: int) -> None:
        fd = self._streams.outputs.pop(number)
        if fd == self._streams.input:
            self._streams.input = -1
        os.close(fd)

    # --- input

    def _take_input(self, data: bytes) -> None:
        self._input += data
        if len(self._input) > terms.WINDOW:
            raise Gone("more input than there is room for")
        self._write()

    def _close_input(self, _: bytes) -> None:
        self._wants_end = True
        if self._streams.is_terminal:
            self._input += CTRL_D
        self._write()

    def _write(self) -> None:
        fd = self._streams.input
        taken = len(self._input)
        if fd >= 0:
            try:
                while self._input:
                    del self._input[: os.write(fd, self._input)]
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._end_input()
                self._line.say(frames.frame(frames.CLOSE))
                return
        else:
            self._input.clear()
        taken -= len(self._input)
        if taken:
            self._line.say(frames.number(frames.ROOM, taken))
        if self._wants_end and not self._input:
            self._end_input()

    def _end_input(self) -> None:
        self._input.clear()
        if self._streams.input >= 0 and not self._streams.is_terminal:
            os.close(self._streams.input)
            self._streams.input = -1

    # --- signals

    def _signal(self, data: bytes) -> None:
        pid = self._started.command
        # Nobody but us takes its status, so the number is still the command's.
        if pid is not None and len(data) == 1 and 0 < data[0] < 65:
            try:
                os.kill(pid, data[0])
            except ProcessLookupError:
                return

    def _resize(self, data: bytes) -> None:
        if self._streams.is_terminal and self._streams.input >= 0 and len(data) == 4:
            rows, columns = int.from_bytes(data[:2], "big"), int.from_bytes(data[2:], "big")
            spawn.resize(self._streams.input, rows, columns)

    def _kill(self, _: bytes) -> None:
        """End all of it. The command goes first: then its handle tells."""
        self._killed = True
        for pid in (self._started.init, self._started.pid, *ending.descendants(os.getpid())):
            if pid is not None:
                try:
                    os.kill(pid, _signal.SIGKILL)
                except ProcessLookupError:
                    continue

    # --- the end

    def _conclude(self, failure: tuple[str, int] | None) -> int:
        _, status, used = os.wait4(self._started.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        spent = ending.Spent()
        spent.add(used)
        is_over = ending.end_below(spent=spent)
        for number, fd in list(self._streams.outputs.items()):
            left = MOST_LEFT
            while left > 0 and number in self._streams.outputs:
                count = self._read(number, fd)
                left = left - count if count else 0
        ended = self._verdict(code if code >= 0 else 128 - code, failure)
        ended["cpu_ms"] = int(spent.cpu * 1000)
        ended["max_rss_kb"] = spent.max_rss_kb
        again = self._settled.stays and is_over
        if again:
            ended["again"] = True
        try:
            self._line.send(frames.text(frames.ENDED, ended), LAST_SECONDS)
            if not again:
                self._line.finish(LAST_SECONDS)
        except Gone:
            return UNHEARD
        self._close()
        return (AGAIN if again else TOLD) if is_over else STUCK

    def _close(self) -> None:
        """Nothing of this command is open for the next one."""
        for number in list(self._streams.outputs):
            self._close_output(number)
        self._end_input()
        self._started.close()

    def _verdict(self, code: int, failure: tuple[str, int] | None) -> dict[str, object]:
        words, self._first_words = self._first_words, b""
        if failure is not None:
            if failure[0] == "exec":
                return self._not_executed(missing=failure[1] == errno.ENOENT)
            return _never(f"cannot start ({failure[0]}): {os.strerror(failure[1])}")
        built = self._started.was_built()
        if words and (found := self._not_become(code, words, built=built)) is not None:
            return found
        if not self._killed and code and code < 128 and not built:
            said = words.decode("utf-8", "replace").strip().removeprefix(SAYS.decode())
            if words.startswith(CANNOT_ENTER):
                said = f"cannot enter the working directory: {said.rpartition(': ')[2]}"
            return _never(said or "bwrap failed")
        if words:
            self._spoken = True
            self._say(ERR, words)
        # A limit that has ended something else inside, which the command got over, is no end.
        exceeded = "memory" if code and figures.kills() > self._settled.kills else ""
        return {
            "code": code, "signal": _signal_name(code), "exceeded": exceeded, "error": "",
            "started": True,
        }  # fmt: skip

    def _not_become(self, code: int, words: bytes, *, built: bool) -> dict[str, object] | None:
        """What bwrap or the starter says when it cannot become the command.

        Of its own end bwrap tells only if it has become it: a command that says bwrap's words is
        known by that. One that says the starter's words is believed; it belies itself alone.
        """
        if not built and code == 1 and words.startswith(CANNOT_EXECUTE):
            return self._not_executed(missing=MISSING in words)
        if code not in STARTER_CODES or not _starter_said(words, STARTER_CODES[code]):
            return None
        if code == CANNOT_GO_ON:
            return _never("cannot enter the working directory")
        return self._not_executed(missing=code == NOT_FOUND)

    def _not_executed(self, *, missing: bool) -> dict[str, object]:
        what = "command not found" if missing else "cannot execute"
        message = f"{self._order.argv[0]}: {what}"
        self._spoken = True
        self._say(ERR, message.encode("utf-8", "surrogateescape") + b"\n")
        return _never(message, NOT_FOUND if missing else NOT_EXECUTABLE)


def _starter_said(words: bytes, what: bytes) -> bool:
    rest = words.removeprefix(STARTER_SAYS)
    return rest != words and rest.lstrip(b"0123456789").startswith(what)


def _never(error: str, code: int = NOT_EXECUTABLE) -> dict[str, object]:
    return {"code": code, "signal": "", "exceeded": "", "error": error[:4096], "started": False}


def _signal_name(code: int) -> str:
    return NAMES.get(code - 128, "") if code > 128 else ""


# The module `signal` would make classes of them.
NAMES = {
    int(getattr(_signal, name)): name
    for name in sorted(dir(_signal), reverse=True)
    if name.startswith("SIG") and name[3:4] != "_" and name not in ("SIGCLD", "SIGPOLL", "SIGIOT")
}


def become(machine: str) -> int:
    """Make this freshly forked process a supervisor; what can be read when it is told to end."""
    syscalls.die_with_parent(machine)
    syscalls.adopt_orphans(machine)
    os.setsid()
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    _signal.signal(_signal.SIGTERM, lambda *_: None)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.set_wakeup_fd(ring)
    # The agent reads it from a descriptor instead.
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    return bell
