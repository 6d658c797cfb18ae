"""Starts a Command and stays with it: descriptors, signals, the terminal, the end.

The command shares the caller's process group, so the terminal's own signals (Ctrl-C, Ctrl-Z,
resize) reach it directly. Signals that somebody sends to us are passed on to the command itself,
because bwrap would die of them and take the command with it unheard.
"""

from __future__ import annotations

import os
import select
import time

from ..errors import EXIT_SIGNAL_BASE, EXIT_TIMEOUT, HostError, reason
from ..record import Record
from . import keeper, sweeping
from .bwrap import SHIELDED
from .descriptors import (
    Descriptors,
    argument_vector,
    close_inherited,
    hide_descriptors,
    open_descriptors,
    release,
)
from .helping import Helpers
from .spawner import spawner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable

    from .bwrap import Command
    from .limits import Enforcer
else:
    # The C half of `signal`: the Python half builds enumerations for 6–8 ms.
    import _signal

# How long a command may take to end after the first signal or the timeout.
GRACE = 10.0
# `timeout` and shells signal a process and then its group: two deliveries within this time are one.
SAME_SIGNAL = 0.05
SI_KERNEL = 0x80
# How long a signal waits for a command that bwrap has not started yet.
START_SECONDS = 1.0
# How long it waits for the command's signals to be put back; one may ignore it for good.
RESET_SECONDS = 0.3

SHIELDED_NUMBERS = tuple(getattr(_signal, f"SIG{name}") for name in SHIELDED)
ENDING = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
PASSED_ON = (*ENDING, _signal.SIGUSR1, _signal.SIGUSR2)


class Outcome(Record):
    """How a run ended. `started` is false when bwrap failed before the command began."""

    code: int
    started: bool
    timed_out: bool = False
    exceeded: str = ""
    # What the user should know about how mounts and network were held.
    warnings: tuple[str, ...] = ()
    # What the network's proxy has seen, as JSON; nothing when there was none, or nothing to see.
    network: bytes = b""
    # What the Docker filter was asked, as JSON.
    docker: bytes = b""
    # What git had signed and handed in, as JSON.
    git_auth: bytes = b""


class ChildStatus:
    """Reads bwrap's status documents: the child's pid, and later its exit code."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._text = b""

    def child(self, outer: int) -> int | None:
        """The host's pid of the sandbox's pid 1; None when bwrap ended before there was one.

        bwrap's own end is watched: were it killed before it has written, its child, which waits
        for a word from it, would keep the pipe open for ever.
        """
        handle = os.pidfd_open(outer)
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(handle, select.POLLIN)
        try:
            while (pid := self._number(b'"child-pid"')) is None:
                ready = [fd for fd, _ in poller.poll()]
                chunk = os.read(self.fd, 4096) if self.fd in ready else b""
                if not chunk:
                    return None
                self._text += chunk
        finally:
            os.close(handle)
        return pid

    def reported_exit(self) -> bool:
        """Whether the command had been started. Call after bwrap has ended."""
        while chunk := os.read(self.fd, 4096):
            self._text += chunk
        os.close(self.fd)
        return self._number(b'"exit-code"') is not None

    def _number(self, key: bytes) -> int | None:
        _, found, rest = self._text.partition(key)
        digits = rest.lstrip(b": ")
        end = 0
        while end < len(digits) and digits[end : end + 1].isdigit():
            end += 1
        return int(digits[:end]) if found and 0 < end < len(digits) else None


def command_pid(init: int) -> int | None:
    """The command itself: the first child of the sandbox's pid 1, which ignores most signals."""
    try:
        with open(f"/proc/{init}/task/{init}/children", encoding="ascii") as file:
            children = file.read().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal at the moment."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            mask = file.read().partition("SigIgn:")[2].split(maxsplit=1)[0]
    except (OSError, IndexError):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)


class Sandboxed:
    """A running sandbox: how to signal it, kill it and wait for its last process."""

    def __init__(self, outer: int, init: int) -> None:
        self.outer = outer
        self.init = init
        try:
            self._handle = os.pidfd_open(init)
        except OSError:
            self._handle = -1

    def fileno(self) -> int:
        """Becomes readable when the last process inside is gone; -1 when that is not known."""
        return self._handle

    def send(self, number: int) -> None:
        """Signal the command itself, so that its handlers run; waits for one about to start."""
        deadline = time.monotonic() + START_SECONDS
        while (pid := command_pid(self.init)) is None:
            if time.monotonic() > deadline or not os.path.exists(f"/proc/{self.init}"):
                return
            time.sleep(0.002)
        # Until `env` has put it back, a shielded signal is ignored and would be lost.
        deadline = time.monotonic() + RESET_SECONDS
        while _ignores(pid, number) and time.monotonic() < deadline:
            time.sleep(0.002)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """End every process inside at once: the kernel kills a namespace with its pid 1."""
        try:
            if self._handle >= 0:
                _signal.pidfd_send_signal(self._handle, _signal.SIGKILL)
            else:
                os.kill(self.init, _signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Kill what is left when bwrap itself has gone; never by a number that may be reused."""
        if self._handle >= 0:
            self.kill()

    def join(self, seconds: float = 5.0) -> None:
        """Wait until the last process inside is gone, so that clean-up races with nobody."""
        if self._handle < 0:
            return
        poller = select.poll()
        poller.register(self._handle, select.POLLIN)
        poller.poll(int(seconds * 1000))
        os.close(self._handle)
        self._handle = -1


class Signals:
    """Holds back the signals that we pass on, from before the first directory is made.

    With `shield`, bwrap ignores those that would end it and take the command along.
    """

    def __init__(self) -> None:
        # What the caller had us ignore (nohup, a background job) stays ignored for the command.
        ignored = {n for n in PASSED_ON if _signal.getsignal(n) == _signal.SIG_IGN}
        self.watched = tuple(n for n in PASSED_ON if n not in ignored)
        self.heeded = tuple(
            name
            for name, number in zip(SHIELDED, SHIELDED_NUMBERS, strict=True)
            if number in self.watched
        )
        self.shielded: tuple[int, ...] = ()
        self.before = _signal.pthread_sigmask(_signal.SIG_BLOCK, (*self.watched, _signal.SIGCHLD))
        # At once: to ignore a signal later would throw away one that waits (signal(7)). One that
        # comes from now on waits though it is ignored, because it is blocked.
        for number in self._shieldable():
            _signal.signal(number, _signal.SIG_IGN)

    def _shieldable(self) -> tuple[int, ...]:
        return tuple(n for n in SHIELDED_NUMBERS if n in self.watched)

    def shield(self) -> None:
        """Let what is spawned from now on ignore the signals that `env` puts back."""
        self.shielded = self._shieldable()

    def pending(self) -> int | None:
        """A signal that asked us to end while nothing had been started."""
        return next((n for n in ENDING if n in _signal.sigpending()), None)

    def defaults(self) -> tuple[int, ...]:
        """Signals to set back for bwrap: Python itself ignores the first two."""
        return (
            _signal.SIGPIPE, _signal.SIGXFSZ,
            *(n for n in self.watched if n not in self.shielded),
        )  # fmt: skip


def spawn(command: Command, descriptors: Descriptors, signals: Signals) -> int:
    """Start bwrap on the spawner's thread, with nothing of our environment."""
    argv = argument_vector(command, descriptors)
    # dup2 onto itself clears close-on-exec in the child only (posix_spawn in glibc and musl).
    actions = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in descriptors.inherited]

    def start() -> int:
        return os.posix_spawn(
            command.program, argv, {}, file_actions=actions, setsigmask=signals.before,
            setsigdef=signals.defaults(),
        )  # fmt: skip

    try:
        return spawner().call(start)
    except OSError as error:
        raise HostError(
            f"cannot start '{command.program}': {reason(error)}",
            hint="run 'sandboxctl doctor'",
            code="bwrap-failed",
        ) from error


def run(
    command: Command, *, signals: Signals, timeout: float | None, shield: bool,
    enforcer: Enforcer | None = None, meanwhile: Callable[[], None] | None = None,
) -> Outcome:  # fmt: skip
    """Run a command in the foreground and say how it ended.

    `meanwhile` is called when the sandbox is being built and nothing runs in it yet.
    """
    number = signals.pending()
    if number is not None:
        return Outcome(code=EXIT_SIGNAL_BASE + number, started=True)
    hide_descriptors()
    kept = keeper.forked(keeper.orders_of(command))
    helpers = Helpers(command)
    descriptors = open_descriptors(command)
    if shield:
        signals.shield()
    helpers.start_first()
    outer = spawn(command, descriptors, signals)
    close_inherited(descriptors)
    # Loaded while bwrap is at work: that costs no time.
    from . import finish

    terminal = _Terminal()
    status = ChildStatus(descriptors.status)
    init = status.child(outer)
    sandboxed = Sandboxed(outer, init or outer)
    try:
        helpers.start()
        finished = finish.complete(
            command, init, enforcer, kept, meanwhile, network=helpers.network
        )  # fmt: skip
        helpers.ready()
    except BaseException:
        _give_up(sandboxed, descriptors, kept)
        helpers.abandon()
        raise
    if not finished and init is not None:
        # Whatever it waits for, it must not go on by itself.
        sandboxed.finish()
    release(descriptors)
    outcome = _Watch(sandboxed, signals, timeout, enforcer, kept).until_end()
    # bwrap may have been killed before it had tied its child's life to its own.
    sandboxed.finish()
    sandboxed.join()
    if init is None:
        sweeping.end_orphans(command.name)
    kept.end()
    helpers.ask()
    terminal.take_back(killed=outcome.code >= EXIT_TIMEOUT)
    # bwrap that fails to build ends with 1; one that was killed had started.
    reported = status.reported_exit()
    flooded = kept.dismiss()
    seen = helpers.finish()
    return outcome.replace(
        started=reported or outcome.code >= EXIT_SIGNAL_BASE,
        exceeded=outcome.exceeded or flooded,
        warnings=(*kept.warnings, *helpers.warnings),
        **seen,
    )


def _give_up(sandboxed: Sandboxed, descriptors: Descriptors, kept: keeper.Keeper) -> None:
    """End what was never released: what could not be finished must not run."""
    sandboxed.kill()
    sandboxed.join()
    os.waitpid(sandboxed.outer, 0)
    os.close(descriptors.release)
    os.close(descriptors.status)
    kept.dismiss()


class _Terminal:
    """Remembers that we were in the terminal's foreground, to be there again at the end."""

    def __init__(self) -> None:
        self._fd, self._ours = -1, False
        try:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return
        # Only with a terminal: it is a library to be loaded.
        import termios

        try:
            self._modes = termios.tcgetattr(self._fd)
            self._ours = os.tcgetpgrp(self._fd) == os.getpgrp()
        except (OSError, termios.error):
            return

    def take_back(self, *, killed: bool) -> None:
        """Be in the foreground again, and with a killed command's raw mode undone.

        An interactive shell inside makes itself the foreground; if it was killed it still is.
        """
        if self._ours:
            import termios

            old = _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGTTOU,))
            try:
                if os.tcgetpgrp(self._fd) != os.getpgrp():
                    os.tcsetpgrp(self._fd, os.getpgrp())
                if killed:
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)
            except (OSError, termios.error):
                pass
            finally:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, old)
        if self._fd >= 0:
            os.close(self._fd)


class _Watch:
    """The loop that waits for the end, a signal, the timeout or an exceeded limit."""

    def __init__(
        self, sandboxed: Sandboxed, signals: Signals, timeout: float | None,
        enforcer: Enforcer | None, kept: keeper.Keeper,
    ) -> None:  # fmt: skip
        self._sandboxed = sandboxed
        self._keeper = kept
        self._watched = (*signals.watched, _signal.SIGCHLD)
        now = time.monotonic()
        self._timeout_at = now + timeout if timeout is not None else None
        self._kill_at: float | None = None
        self._first_signal_at: float | None = None
        self._enforcer = enforcer
        self._timed_out = False
        self._exceeded = ""

    def until_end(self) -> Outcome:
        while True:
            info = self._next()
            if info is None:
                self._clock()
            elif info.si_signo == _signal.SIGCHLD:
                code = self._reap()
                if code is not None:
                    return self._outcome(code)
            else:
                self._pass_on(info.si_signo, info.si_code)

    def _next(self) -> _signal.struct_siginfo | None:
        due = [t for t in (self._timeout_at, self._kill_at) if t is not None]
        if self._enforcer is not None and self._enforcer.poll is not None:
            due.append(time.monotonic() + self._enforcer.poll)
        if not due:
            return _signal.sigwaitinfo(self._watched)
        return _signal.sigtimedwait(self._watched, max(0.0, min(due) - time.monotonic()))

    def _reap(self) -> int | None:
        pid, status = os.waitpid(self._sandboxed.outer, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            if self._keeper.has_died():
                # Nobody holds the mounts any more: a save outside would uncover what is hidden.
                self._exceeded = "keeper"
                self._sandboxed.kill()
            return None
        if os.WIFSTOPPED(status):
            # The command suspended its own process group; the caller's shell must see us stop.
            os.kill(os.getpid(), _signal.SIGSTOP)
            return None
        return (
            os.WEXITSTATUS(status)
            if os.WIFEXITED(status)
            else EXIT_SIGNAL_BASE + os.WTERMSIG(status)
        )

    def _outcome(self, code: int) -> Outcome:
        if self._enforcer is not None and not self._exceeded:
            self._exceeded = self._enforcer.exceeded() or ""
        if self._timed_out:
            code = EXIT_TIMEOUT
        return Outcome(code=code, started=True, timed_out=self._timed_out, exceeded=self._exceeded)

    def _pass_on(self, number: int, origin: int) -> None:
        # Ctrl-C and Ctrl-\ come from the terminal to the whole process group: the command has
        # them already, and what they mean is its own affair.
        from_terminal = origin == SI_KERNEL and number != _signal.SIGHUP
        if from_terminal:
            return
        now = time.monotonic()
        if number in ENDING:
            if self._first_signal_at is None:
                self._first_signal_at = now
                self._kill_at = now + GRACE
            elif now - self._first_signal_at > SAME_SIGNAL:
                self._sandboxed.kill()
                return
            else:
                return
        if origin != SI_KERNEL:
            self._sandboxed.send(number)

    def _clock(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._sandboxed.kill()
        if self._timeout_at is not None and now >= self._timeout_at:
            self._timeout_at = None
            self._timed_out = True
            self._kill_at = now + GRACE
            self._sandboxed.send(_signal.SIGTERM)
        if self._enforcer is not None and not self._exceeded:
            self._exceeded = self._enforcer.exceeded() or ""
            if self._exceeded:
                self._sandboxed.kill()
