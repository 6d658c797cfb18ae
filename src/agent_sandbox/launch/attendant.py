"""A socket that a sandbox sees, and a process outside that answers on it, for one run.

The socket lies in the workspace, where only the sandbox's mount leads to it. It is bound before
bwrap needs it; the process takes over what has queued up. Without the process nobody answers.
"""

from __future__ import annotations

import _socket
import os
import time

from ..errors import reason
from ..record import Record
from .egress import REPORT_SECONDS, Proxy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import HostError

PROGRAMS = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/proxy"


class Kind(Record):
    """What such a process is: its program below `proxy/`, its socket, and what is said of it."""

    program: str
    socket: str
    # The error for one that cannot be had.
    failed: Callable[[str], HostError]
    # What the user is told when it ended before the command did.
    lost: str
    # How long it may take to sum up, and what is said when it takes longer and goes on by itself.
    seconds: float = REPORT_SECONDS
    late: str = ""
    # Connections that may wait while the process starts.
    backlog: int = 64


class Attendant:
    """Socket and process. `start`, `ready`; `ask` and `finish`, or `abandon`."""

    def __init__(self, kind: Kind, orders: bytes, work: str) -> None:
        self._kind = kind
        self._told = orders
        self._process: Proxy | None = None
        self._over = False
        # What the user should know. Complete after `finish`.
        self.warnings: tuple[str, ...] = ()
        try:
            self._listener: _socket.socket | None = _listen(work, kind)
        except OSError as error:
            raise kind.failed(f"cannot make its socket: {reason(error)}") from error

    def start(self) -> None:
        """Start the process."""
        listener = self._listener
        if listener is None:
            return
        try:
            program = f"{PROGRAMS}/{self._kind.program}"
            self._process = Proxy(self._told, listener.fileno(), program)
        except OSError as error:
            raise self._kind.failed(f"cannot start its process: {reason(error)}") from error
        finally:
            # Ours must go: a socket that nobody accepts from would keep clients waiting for ever.
            listener.close()
            self._listener = None

    def ready(self) -> None:
        """Wait until the process serves; raises when it does not."""
        if self._process is None or not self._process.is_ready():
            raise self._kind.failed("its process ended")

    def ask(self) -> None:
        """The command has ended: let the process tidy up and sum up."""
        if self._process is not None:
            self._process.ask()

    def finish(self) -> bytes:
        """What it has to tell, as JSON. Waits for the process."""
        process = self._process
        if self._over or process is None:
            return b""
        begun = time.monotonic()
        said = process.report(self._kind.seconds)
        if not said and self._kind.late and time.monotonic() - begun >= self._kind.seconds:
            # It goes on by itself, and ends itself.
            self.warnings += (self._kind.late,)
            self._over = True
            return b""
        if not said:
            self.warnings += (self._kind.lost,)
        self.abandon()
        return said

    def abandon(self) -> None:
        """End it without asking. Safe to call twice."""
        if self._over:
            return
        self._over = True
        if self._listener is not None:
            self._listener.close()
        if self._process is not None:
            self._process.end()


def _listen(work: str, kind: Kind) -> _socket.socket:
    """A socket in the workspace, whose path may be longer than a socket's address."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    here = os.open(work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{here}/{kind.socket}")
        os.chmod(kind.socket, 0o600, dir_fd=here)
        listener.listen(kind.backlog)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(here)
    return listener
