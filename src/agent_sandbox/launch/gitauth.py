"""What answers for keys and credentials of one run, as the supervisor sees it.

A socket in the workspace, where only the sandbox's mount leads to it, and a process behind it. It
is bound before bwrap needs it. Without the process nobody answers.
"""

from __future__ import annotations

import _socket
import os

from ..errors import HostError, reason
from ..policy.gitauth import INSIDE, SOCKET
from .egress import Proxy, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.gitauth import GitAuth
    from .bwrap import Command

PROGRAM = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/proxy/gitauth/main.py"
# Connections that may wait while the process starts.
BACKLOG = 64
LOST = (
    "what answers for git's keys and credentials ended before the command did: what was signed is "
    "only in the log"
)


def told(wanted: GitAuth, work: str) -> bytes:
    """What the process is told. Pure."""
    runs, _, run = work.rpartition("/")
    state = runs.rpartition("/")[0]
    orders = {
        "ssh": wanted.ssh, "https": wanted.https, "hosts": wanted.hosts,
        "any_host": wanted.any_host, "names": wanted.names, "agent": wanted.agent,
        "known_hosts": wanted.known_hosts, "env": dict(wanted.env),
        "log": f"{state}/audit/git.jsonl", "run": run,
    }  # fmt: skip
    return to_json(orders).encode("ascii")


class Authority:
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
        """The command has ended."""
        if self._process is not None:
            self._process.ask()

    def finish(self) -> bytes:
        """What was signed, handed in and refused, as JSON."""
        if self._over or self._process is None:
            return b""
        said = self._process.report()
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
    """The error for keys and credentials that nobody would answer for."""
    return HostError(
        f"cannot answer for git's keys and credentials: {why}",
        hint="use --git-auth=none, or install agent-sandbox anew",
        code="git-auth-failed",
    )


def answering(command: Command) -> Authority | None:
    """The process for a command that has one."""
    if not command.git_auth:
        return None
    place = dict(command.planned)[INSIDE]
    return Authority(command.git_auth, place.rpartition("/")[0])
