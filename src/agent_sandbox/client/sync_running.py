"""Commands of the service: events, the handle of a command, its terminal."""

from __future__ import annotations

import threading
import time

from . import attempts, calls
from .errors import CommandFailed
from .following import Following, Output
from .shell import Talk
from .values import Event
from .wire import PIECE, Broken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .blocking import Exchange
    from .calls import Call
    from .sync import Client
    from .values import Result


class Stream:
    """The events of a command. A broken connection is made again, and goes on where it was.

    Closing it does not end the command.
    """

    def __init__(self, client: Client, following: Following, call: Call) -> None:
        self._client = client
        self._following = following
        self._patience = client.patience()
        # Opened now, so that a refusal is raised here and not by the first event.
        self._exchange: Exchange | None = None
        self._call = call
        self._open(call)
        self._events = self._all()

    @property
    def id(self) -> str:
        """The command's id; "" before the first event."""
        return self._following.exec_id

    @property
    def execution(self) -> Execution:
        """Its handle, after the first event: for input, signals, the end."""
        return Execution(self._client, self.id)

    @property
    def result(self) -> Result | None:
        """How it ended, without its output; None while it runs."""
        return self._following.result

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def collect(self, *, check: bool = False) -> Result:
        """Wait for the end; the result has all output that has not been taken yet."""
        output = Output()
        for event in self:
            output.take(event)
        assert self.result is not None  # noqa: S101 - the events end with it
        result = output.complete(self.result)
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    def _all(self) -> Iterator[Event]:
        while not self._following.ended:
            try:
                data = self._read()
            except Broken as broken:
                self._again(broken.error)
                continue
            self._patience.progress()
            yield from self._following.feed(data)
        self.close()

    def _read(self) -> bytes:
        data = self._exchange.read() if self._exchange is not None else b""
        if not data:
            raise Broken(ConnectionResetError("the stream ended before the command"), sent=True)
        return data

    def _again(self, error: OSError) -> None:
        self.close()
        if not self.id and not self._call.again:
            raise attempts.lost(self._client.settings)
        time.sleep(self._patience.broken(error))
        # Before the first event only a call with a key can tell which command it was.
        self._open(self._following.resume() if self.id else self._call)

    def _open(self, call: Call) -> None:
        self._exchange = self._client.open(call)
        self._following.opened(self._exchange.head)

    def close(self) -> None:
        """Hang up. The command goes on."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Execution:
    """A command, by its id."""

    def __init__(self, client: Client, exec_id: str) -> None:
        self._client = client
        self.id = exec_id

    def __repr__(self) -> str:
        return f"Execution({self.id!r})"

    def status(self) -> Result:
        """How far it is, with the output so far."""
        return self._client.drive(calls.execution(self.id))

    def follow(self, *, after: str = "") -> Stream:
        """Its events from the beginning, or behind the one with the id `after`."""
        following = Following(self.id, after)
        return Stream(self._client, following, following.resume())

    def wait(self, *, check: bool = False) -> Result:
        """Its end, with its output."""
        with self.follow() as stream:
            return stream.collect(check=check)

    def logs(self) -> Iterator[Event]:
        """What it has written so far, without waiting for more."""
        since, more = 0, True
        while more:
            part, since, more = self._client.drive(calls.logs(self.id, since))
            for kind, data in (("stdout", part.out), ("stderr", part.err)):
                if data:
                    yield Event(kind=kind, data=data)

    def write(self, data: bytes, *, eof: bool = False) -> None:
        """Input; it must have been started with `keep_input` or a terminal."""
        self._client.drive(calls.write_input(self.id, data, eof=eof))

    def signal(self, name: str) -> None:
        """A signal by its name, for the command itself."""
        self._client.drive(calls.signal(self.id, name))

    def resize(self, rows: int, columns: int) -> None:
        """Another size for its terminal."""
        self._client.drive(calls.resize(self.id, rows, columns))

    def kill(self) -> Result:
        """End all of its processes."""
        return self._client.drive(calls.kill(self.id))

    def terminal(self) -> Terminal:
        """Its terminal; it must have been started with `tty`."""
        return Terminal(self._client, self.id)


class Terminal:
    """A terminal, as bytes both ways. One thread may read while others write."""

    def __init__(self, client: Client, exec_id: str) -> None:
        self._talk = Talk(exec_id)
        exchange = client.open(self._talk.call())
        with exchange:
            self._talk.check(exchange.head)
            self._sock, self._held = exchange.detach()
        # The service asks whether we are there; between its questions it may be silent.
        self._sock.settimeout(None)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For `select`: readable means that `read` does not wait long."""
        return self._sock.fileno()

    def has_more(self) -> bool:
        """Whether `read` has something that `select` does not see."""
        pending = getattr(self._sock, "pending", None)
        return bool(self._held) or (pending is not None and pending() > 0)

    def read(self) -> bytes | None:
        """Output, maybe b""; None at the end. Waits for what comes next."""
        if self._over():
            return None
        try:
            data, self._held = self._held or self._sock.recv(PIECE), b""
        except OSError:
            data = b""
        with self._lock:
            out = self._talk.feed(data)
            answers = self._talk.answers()
        if answers:
            self._send(answers)
        return out or (None if self._over() else out)

    def _over(self) -> bool:
        return self._talk.ended

    def write(self, data: bytes) -> None:
        """Type."""
        self._send(self._talk.keys(data))

    def resize(self, rows: int, columns: int) -> None:
        """Another size."""
        self._send(self._talk.order(type="resize", rows=rows, cols=columns))

    def signal(self, name: str) -> None:
        """A signal for the command."""
        self._send(self._talk.order(type="signal", signal=name))

    def eof(self) -> None:
        """The end of input (Ctrl-D)."""
        self._send(self._talk.order(type="eof"))

    @property
    def result(self) -> Result | None:
        """How the command ended, if its end was seen."""
        return self._talk.result

    @property
    def problems(self) -> tuple[str, ...]:
        """What the service did not do of what was asked, the newest last."""
        return tuple(self._talk.problems)

    def _send(self, data: bytes) -> None:
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                # The reader sees the end, and there is nobody to tell.
                return

    def close(self) -> None:
        """Hang up."""
        if not self._talk.ended:
            self._send(self._talk.close())
        self._sock.close()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
