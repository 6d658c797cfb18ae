"""Starts a command: its streams, its process, and how it turns out that it cannot be started."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import termios

from ..policy.owned import VARIABLES, WORK
from ..record import Record
from . import ending, inner, terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Mapping

    from .confine import Bounds
else:
    import _signal

OUT, ERR = 1, 2
# What Python ignores, and what the agent handles, as a command expects to find it.
DEFAULTS = (
    _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP,
    _signal.SIGQUIT, _signal.SIGCHLD,
)  # fmt: skip
# The kernel ends a command before it ends the agent.
OOM_SCORE = 1000
# No dump, and no crash handler of the node either (as in `launch.guards`).
NO_CORE = 1
FAILED = 255
# Processes of ours that RLIMIT_NPROC counts with the command's, for each that runs: its
# supervisor, bwrap and its first process.
OWN_PROCESSES = 3
# And for each that waits: these, and the starter.
SPARE_PROCESSES = 4
# Descriptors of ours that bwrap or the starter is given by number are at least this, so that none
# is where another one is to be.
HIGH = 20


class Order(Record):
    """A command that the service asks for."""

    execution: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = WORK
    # Rows and columns; None: no terminal.
    terminal: tuple[int, int] | None = None
    input: bool = False


class Terms(Record):
    """What holds for all commands of a sandbox."""

    form: str = terms.NONE
    network: bool = False
    pids: int = 0
    disk: int = 0
    # Kills for memory before the command began.
    kills: int = 0
    # Whether its supervisor may wait for another command.
    stays: bool = False


class Streams:
    """The standard streams of a command: its ends, and ours."""

    def __init__(self, order: Order) -> None:
        self.outputs: dict[int, int] = {}
        self.input = -1
        self.is_terminal = order.terminal is not None
        if order.terminal is not None:
            master, slave = os.openpty()
            resize(master, *order.terminal)
            self.outputs[OUT] = self.input = master
            self.inside = (slave, slave, slave)
        else:
            stdin, self.input = os.pipe() if order.input else (os.open(os.devnull, os.O_RDONLY), -1)
            self.outputs[OUT], out = os.pipe()
            self.outputs[ERR], err = os.pipe()
            self.inside = (stdin, out, err)
        for fd in {*self.outputs.values(), self.input} - {-1}:
            os.set_blocking(fd, False)

    def handed_over(self) -> None:
        """Close the command's ends here, so that their end can be seen."""
        for fd in set(self.inside):
            os.close(fd)


def resize(master: int, rows: int, columns: int) -> None:
    """Set a terminal's size."""
    size = b"".join(value.to_bytes(2, "little") for value in (rows, columns, 0, 0))
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)


class Spawned:
    """A process that is, or is about to become, the command."""

    def __init__(
        self, pid: int, *, failure: int = -1, status: int = -1, init: int | None = None
    ) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid)
        # The first process of its namespace, with an inner layer.
        self.init = init
        self._failure = failure
        # Open to the end: bwrap, which writes into it, must not be ended by SIGPIPE.
        self._status = status

    def failure(self) -> tuple[str, int] | None:
        """Where it failed before it became the command, and why; waits until that is clear."""
        if self._failure < 0:
            return None
        with open(self._failure, "rb") as file:
            step, _, number = file.read().decode("ascii").partition(" ")
        self._failure = -1
        return (step, int(number)) if step else None

    def was_built(self) -> bool:
        """Whether bwrap, which has ended, had come as far as to wait for the command."""
        if self._status < 0:
            return True
        os.set_blocking(self._status, False)
        try:
            return b'"exit-code"' in os.read(self._status, 4096)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """It has ended: nobody asks any more."""
        for fd in (self.handle, self._status):
            if fd >= 0:
                os.close(fd)

    @property
    def command(self) -> int | None:
        """The command itself, for a signal."""
        if self.init is None:
            return self.pid
        try:
            with open(f"/proc/{self.init}/task/{self.init}/children", encoding="ascii") as file:
                found = file.read().split()
        except OSError:
            return None
        return int(found[0]) if found else None


def environment(order: Order) -> dict[str, str]:
    """The variables of a command: none of the agent's own, none of the image's."""
    found = {**VARIABLES, **order.env, "PWD": order.cwd}
    if order.terminal is not None:
        found.setdefault("TERM", "xterm-256color")
    return found


def spawn(
    order: Order, settled: Terms, streams: Streams, bounds: Bounds, bundle: inner.Bundle
) -> Spawned:
    """Start it."""
    if settled.form == terms.NONE:
        return _plain(order, settled, streams, bounds)
    return _wrapped(order, settled, streams, bounds, bundle)


# --- without an inner layer


def _plain(order: Order, settled: Terms, streams: Streams, bounds: Bounds) -> Spawned:
    env = environment(order)
    failure, told = os.pipe()
    pid = os.fork()
    if not pid:
        step = "streams"
        try:
            _take_streams(streams)
            _limit(settled)
            step = "cwd"
            os.chdir(order.cwd)
            step = "confine"
            bounds.apply(network=settled.network)
            step = "exec"
            os.execvpe(order.argv[0], list(order.argv), env)  # noqa: S606 - that is its purpose
        except BaseException as error:  # noqa: BLE001 - nothing may run on in this process
            number = getattr(error, "errno", None) or errno.EINVAL
            os.write(told, f"{step} {number}".encode("ascii"))
        finally:
            os._exit(FAILED)
    os.close(told)
    return Spawned(pid, failure=failure)


def _take_streams(streams: Streams) -> None:
    """In the child: a session of its own, the streams, signals as a program finds them."""
    os.setsid()
    for number, fd in enumerate(streams.inside):
        os.dup2(fd, number)
    if streams.is_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _reset_signals()


def _reset_signals() -> None:
    for number in DEFAULTS:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    os.umask(0o022)


def _limit(settled: Terms) -> None:
    """Bounds that pass to everything that a command starts, and that it cannot lift."""
    _bound(resource.RLIMIT_CORE, NO_CORE)
    if settled.pids:
        _bound(resource.RLIMIT_NPROC, settled.pids)
    if settled.disk:
        _bound(resource.RLIMIT_FSIZE, settled.disk)


def _bound(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def weigh(pid: int) -> None:
    """Let the kernel choose a process, and what it starts, when memory runs out.

    Not before it is executed: what was forked from the agent is closed even to itself (proc(5)).
    """
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(OOM_SCORE))
    except OSError:
        # It has ended; or the engine does not allow it: the larger one is chosen then.
        return


# --- with an inner layer


def _wrapped(
    order: Order, settled: Terms, streams: Streams, bounds: Bounds, bundle: inner.Bundle
) -> Spawned:
    wish = inner.Wish(
        argv=order.argv, env=environment(order), cwd=order.cwd, network=settled.network,
        terminal=streams.is_terminal,
    )  # fmt: skip
    built = _Built(
        settled, wish, inner.command(bundle, wish), streams, bounds=bounds, bundle=bundle
    )
    return built.settle()


class _Built:
    """A bwrap that has been started; it is held back until it is settled."""

    def __init__(
        self, settled: Terms, wish: inner.Wish, command: tuple[str, ...], streams: Streams, *,
        bounds: Bounds, bundle: inner.Bundle, given: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.status, told = os.pipe()
        block, self._release = os.pipe()
        options = inner.packed(inner.options(bundle, settled.form, wish))
        files = [
            _high(fd)
            for fd in (
                inner.in_memory("options", options),
                inner.in_memory("filter", bounds.usual.program), told, block,
            )
        ]  # fmt: skip
        argv = [*inner.vector(bundle, *files), *command]
        self.pid = _start(argv, settled, streams, bounds, files=files, given=given)
        for fd in files:
            os.close(fd)

    def settle(self) -> Spawned:
        """Wait until there is a first process, and let it go on."""
        init = _first_process(self.status)
        if init is not None:
            # It is held back, and what it starts inherits this.
            weigh(init)
        os.close(self._release)
        return Spawned(self.pid, status=self.status, init=init)


def _high(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
    finally:
        os.close(fd)


def _start(
    argv: list[str], settled: Terms, streams: Streams, bounds: Bounds, *, files: list[int],
    given: tuple[int, ...],
) -> int:  # fmt: skip
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            for number, fd in enumerate(streams.inside):
                os.dup2(fd, number)
            _reset_signals()
            _limit(settled)
            bounds.scope()
            for fd in files:
                os.set_inheritable(fd, True)  # noqa: FBT003 - positional only
            for number, fd in enumerate(given, inner.FIRST_GIVEN):
                os.dup2(fd, number)
            # Nothing of the caller's variables: LD_PRELOAD would work on bwrap itself.
            os.execve(argv[0], argv, {})  # noqa: S606 - that is its purpose
        except BaseException:  # noqa: BLE001, S110 - nothing may run on in this process
            pass
        finally:
            os._exit(FAILED)
    return pid


class Spare:
    """A sandbox that is built before its command is known: a shell in it waits for a line.

    The shell runs as the command will, with all that the command has given up, and becomes it.
    """

    def __init__(self, settled: Terms, bounds: Bounds, bundle: inner.Bundle) -> None:
        self.streams = Streams(Order(execution="", argv=(), env={}, input=True))
        script, self._script = os.pipe()
        files = [os.open(path, os.O_RDONLY) for path in inner.starter_files(bundle)]
        given = tuple(_high(fd) for fd in (*files, script))
        wish = inner.Wish(argv=(), env={}, cwd="/", network=settled.network)
        self._built = _Built(
            settled, wish, inner.starter(), self.streams, bounds=bounds, bundle=bundle, given=given
        )
        for fd in given:
            os.close(fd)
        self.streams.handed_over()
        self.is_building = True
        self.status = self._built.status

    @property
    def started(self) -> Spawned:
        """Its process."""
        return self._started

    def settle(self) -> None:
        """It has come as far as to wait for us."""
        if self.is_building:
            self.is_building = False
            self._started = self._built.settle()

    def serve(self, order: Order) -> bool:
        """Make it that command; whether it can be."""
        line = inner.line(order.argv, environment(order), order.cwd, reads=order.input)
        self.settle()
        if line is None or order.terminal is not None or self._has_ended():
            return False
        try:
            # It fits into the pipe, so this does not wait.
            os.write(self._script, line)
        except BrokenPipeError:
            return False
        os.close(self._script)
        if not order.input:
            os.close(self.streams.input)
            self.streams.input = -1
        return True

    def _has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self._started.handle, select.POLLIN)
        return bool(poller.poll(0)) or self._started.init is None

    def discard(self) -> None:
        """End it."""
        self.settle()
        ending.end_below()
        self._started.close()
        for fd in (self._script, self.streams.input, *self.streams.outputs.values()):
            os.close(fd)


def _first_process(status: int) -> int | None:
    """What bwrap says of its child: `{ "child-pid": 123, …`; None when it fails before that."""
    said = b""
    while b"}" not in said and (more := os.read(status, 4096)):
        said += more
    words = said.partition(b'"child-pid":')[2].replace(b",", b" ").replace(b"}", b" ").split()
    return int(words[0]) if words and words[0].isdigit() else None
