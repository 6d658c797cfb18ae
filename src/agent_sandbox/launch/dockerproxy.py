"""The Docker filter of one run, as the supervisor sees it: a socket, and a process behind it.

The socket lies in the workspace, where only the sandbox's mount leads to it. It is bound before
bwrap needs it; the process takes over what has queued up. Without the process nobody answers.
"""

from __future__ import annotations

import _socket
import os
import time

from ..errors import HostError, reason
from ..policy.engines import INSIDE
from ..policy.model import README
from .egress import Proxy, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.dockerfilter import DockerFilter
    from .bwrap import Command

PROGRAM = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/proxy/docker/main.py"
SOCKET = "docker.sock"
# Connections that may wait while the process starts.
BACKLOG = 256
# Removing containers takes its time; the process gives up before this.
REPORT_SECONDS = 90.0
LOST = (
    "the Docker filter ended before the command did: what was asked is only in the audit log, and "
    "what the run has left in the engine is removed when the next one with --docker=filtered starts"
)
LATE = "the Docker filter is still removing what the run has made in the engine"


def told(wanted: DockerFilter, work: str) -> bytes:
    """What the process is told. Pure."""
    run, _, owner = work.rpartition("/")
    state = run.rpartition("/")[0]
    grants = {
        "owner": owner, "network": wanted.network, "read_only": wanted.read_only,
        "socket": f"{work}/{SOCKET}", "binds": wanted.binds, **wanted.granted,
    }  # fmt: skip
    orders = {
        "engine": wanted.engine, "keep": wanted.keep, "mode": wanted.mode, "work": work,
        "audit": f"{state}/audit/docker.jsonl", "records": f"{state}/docker", "grants": grants,
        "page": README,
    }  # fmt: skip
    return to_json(orders).encode("ascii")


class Filter:
    """Socket and process. `start`, `ready`; `ask` and `finish`, or `abandon`."""

    def __init__(self, orders: bytes, work: str) -> None:
        self._told = orders
        self._process: Proxy | None = None
        self._over = False
        # What the user should know. Complete after `finish`.
        self.warnings: tuple[str, ...] = ()
        try:
            self._listener: _socket.socket | None = _listen(work)
        except OSError as error:
            raise failed(f"cannot make its socket: {reason(error)}") from error

    def start(self) -> None:
        """Start the process."""
        listener = self._listener
        if listener is None:
            return
        try:
            self._process = Proxy(self._told, listener.fileno(), PROGRAM)
        except OSError as error:
            raise failed(f"cannot start its process: {reason(error)}") from error
        finally:
            # Ours must go: a socket that nobody accepts from would keep clients waiting for ever.
            listener.close()
            self._listener = None

    def ready(self) -> None:
        """Wait until the process serves; raises when it does not."""
        if self._process is None or not self._process.is_ready():
            raise failed("its process ended")

    def ask(self) -> None:
        """The command has ended: let the process remove what the run has made."""
        if self._process is not None:
            self._process.ask()

    def finish(self) -> bytes:
        """What was asked and removed, as JSON. Waits for the process."""
        process = self._process
        if self._over or process is None:
            return b""
        begun = time.monotonic()
        said = process.report(REPORT_SECONDS)
        if not said and time.monotonic() - begun >= REPORT_SECONDS:
            # It goes on by itself, and ends itself.
            self.warnings += (LATE,)
            self._over = True
            return b""
        if not said:
            self.warnings += (LOST,)
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


def _listen(work: str) -> _socket.socket:
    """A socket in the workspace, whose path may be longer than a socket's address."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    here = os.open(work, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{here}/{SOCKET}")
        os.chmod(SOCKET, 0o600, dir_fd=here)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(here)
    return listener


def failed(why: str) -> HostError:
    """The error for an engine that cannot be filtered."""
    return HostError(
        f"cannot filter the container engine: {why}",
        hint="run 'sandboxctl doctor', or use --docker=off",
        code="docker-failed",
    )


def filtered(command: Command) -> Filter | None:
    """The filter for a command that needs one."""
    if not command.docker:
        return None
    place = dict(command.planned)[INSIDE]
    return Filter(command.docker, place.rpartition("/")[0])
