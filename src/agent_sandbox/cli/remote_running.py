"""A command of the service at our own terminal: output, input, signals, a terminal inside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty

from ..client.errors import ClientError, Unreachable
from ..client.following import OUTPUT, Output
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from ..client.sync_running import Execution, Stream, Terminal
    from ..client.values import Event, Result

PROGRAM = "sandboxctl"
STDIN, STDOUT, STDERR = 0, 1, 2
TARGETS = {"stdout": STDOUT, "stderr": STDERR}
PIECE = 64 * 1024
# Those that a person or a supervisor sends to end a command. The second one ends it for good.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def put(event: Event) -> None:
    """Output where it belongs, as bytes."""
    if event.kind == "retry":
        output.notice(PROGRAM, "the command was lost; it is run again, from its beginning")
    if event.kind in OUTPUT:
        write_all(TARGETS[event.kind], event.data)


def write_all(fd: int, data: bytes) -> None:
    """All of it, also into a slow pipe."""
    while data:
        data = data[os.write(fd, data) :]


def follow(stream: Stream, *, feed: bool, quiet: bool, ours: bool = True) -> Result:
    """Show what a command writes, until its end.

    `ours`: it is our command, so our signals and our end are its own.
    """
    gathered = Output()
    with contextlib.ExitStack() as stack:
        for event in stream:
            if event.kind == "start" and ours:
                stack.enter_context(forwarding(stream.execution))
                if feed:
                    pump(stream.execution)
            if quiet:
                gathered.take(event)
                continue
            try:
                put(event)
            except BrokenPipeError:
                # Whoever read our output has gone. A local command would end by SIGPIPE.
                if ours:
                    stream.execution.kill()
                raise
    assert stream.result is not None  # noqa: S101 - the events end with it
    return gathered.complete(stream.result)


@contextlib.contextmanager
def forwarding(execution: Execution) -> Iterator[None]:
    """Signals for us are signals for it. They are sent by threads: we may be within a read."""
    seen: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        seen.append(number)
        name = "" if len(seen) > 1 else signal.Signals(number).name
        threading.Thread(target=_send, args=(execution, name), daemon=True).start()
        if len(seen) > 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(execution: Execution, name: str) -> None:
    # One that has ended meanwhile, or a service that is gone: the stream tells.
    with contextlib.suppress(ClientError):
        if name:
            execution.signal(name)
        else:
            execution.kill()


def pump(execution: Execution) -> None:
    """Pass our standard input on, in a thread that ends with us."""

    def work() -> None:
        # A command that reads no more, or has ended, wants no input.
        with contextlib.suppress(ClientError):
            while data := os.read(STDIN, PIECE):
                execution.write(data)
            execution.write(b"", eof=True)

    threading.Thread(target=work, daemon=True).start()


# --- a terminal


def size() -> tuple[int, int]:
    """Rows and columns of our terminal."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            found = os.get_terminal_size(fd)
        except OSError:
            continue
        if found.lines and found.columns:
            return found.lines, found.columns
    return 24, 80


def join(execution: Execution) -> Result:
    """Our terminal becomes the one inside, until the command ends."""
    try:
        with execution.terminal() as terminal, raw(), resizes() as changed:
            _talk(terminal, changed)
            result = terminal.result
    except BaseException:
        # A terminal that nobody sees must not stay.
        with contextlib.suppress(ClientError):
            execution.kill()
        raise
    if result is None:
        found = execution.status()
        if found.running:
            raise Unreachable(
                "the connection broke; the command still runs",
                hint=f"sandboxctl remote logs -f {execution.id}, or kill {execution.id}",
            )
        result = found
    return result


def _talk(terminal: Terminal, changed: int) -> None:
    watched = [STDIN, changed, terminal.fileno()]
    while True:
        ready = [terminal.fileno()]
        if not terminal.has_more():
            ready, _, _ = select.select(watched, [], [])
        if changed in ready:
            os.read(changed, PIECE)
            terminal.resize(*size())
        if STDIN in ready:
            data = os.read(STDIN, PIECE)
            if data:
                terminal.write(data)
            else:
                terminal.eof()
                watched.remove(STDIN)
        if terminal.fileno() in ready:
            out = terminal.read()
            if out is None:
                return
            write_all(STDOUT, out)


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """Every key goes inside, Ctrl-C too. Ours is as it was afterwards, whatever happens."""
    if not os.isatty(STDIN):
        yield
        return
    before = termios.tcgetattr(STDIN)

    def give_up(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers = {n: signal.signal(n, give_up) for n in (signal.SIGTERM, signal.SIGHUP)}
    # Not flushed: what was typed before is typed.
    tty.setraw(STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def resizes() -> Iterator[int]:
    """A descriptor that can be read when our terminal has another size."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def note(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b".")

    before = signal.signal(signal.SIGWINCH, note)
    # It may have changed before we listened.
    note()
    try:
        yield reader
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(reader)
        os.close(writer)
