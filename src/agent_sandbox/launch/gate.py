"""The gate: one process per run that makes sockets in a sandbox's network namespace.

It joins the namespace from outside, as the keeper joins the mounts, and hands the sockets to the
proxy, which stays in the host's. So nothing of ours runs inside, and no socket file leads out. It
ends when the supervisor or the proxy ends: then the command has no network any more.
"""

from __future__ import annotations

import _socket
import marshal
import os
import select

from ..errors import reason
from ..record import Record
from . import apart
from .keeper import READY

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal

    from .netns import Listener
else:
    import _signal


class Orders(Record):
    """What a gate is told: whether every address is to be taken, and the first listeners."""

    capture: bool = False
    listeners: tuple[Listener, ...] = ()

    def dump(self) -> bytes:
        """The orders as bytes, for a process of our own."""
        return marshal.dumps((self.capture, self.listeners))

    @classmethod
    def load(cls, data: bytes) -> Orders:
        """The orders from bytes that `dump` has made."""
        capture, listeners = marshal.loads(data)  # noqa: S302 - our own
        return cls(capture=capture, listeners=listeners)


class Gate:
    """The supervisor's end. `attend` once, wait for `ready`, `dismiss` at the end."""

    def __init__(self, pid: int, report: int, life: int, line: int) -> None:
        # 0: somebody else's child.
        self._pid = pid
        self._report = report
        self._life = life
        # The proxy's end of the line to the gate, until the proxy has it.
        self.line = line

    def attend(self, init: int) -> None:
        """Tell the gate which sandbox is its own."""
        try:
            os.write(self._life, f"{init}\n".encode())
        except BrokenPipeError:
            # It has died; `ready` says so.
            return

    def ready(self) -> str:
        """Wait until routes and listeners are there; why not, if they could not be made."""
        said = b""
        while not said.endswith(b"\n"):
            chunk = os.read(self._report, 4096)
            if not chunk:
                break
            said += chunk
        if said == READY:
            return ""
        return said.decode("utf-8", "replace").strip() or "the gate ended"

    def has_ended(self) -> bool:
        """Whether the process is gone: then nobody holds the other end of its pipe."""
        poller = select.poll()
        poller.register(self._report, 0)
        return bool(poller.poll(0))

    def forget_line(self) -> None:
        """Close our copy of the proxy's end: only then does the gate see the proxy's death."""
        if self.line >= 0:
            os.close(self.line)
            self.line = -1

    def dismiss(self) -> None:
        """Let it go. Safe to call twice."""
        self.forget_line()
        for fd in (self._life, self._report):
            if fd >= 0:
                os.close(fd)
        self._life = self._report = -1
        if self._pid > 0:
            # It has nothing to tidy up. Not waited for, so the number is still its own.
            os.kill(self._pid, _signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def pair() -> tuple[int, int]:
    """A line between gate and proxy: one message is one datagram, and its end can be seen."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return ours.detach(), theirs.detach()


def forked(orders: Orders) -> Gate:
    """A gate that is our own child. Call it before any thread is started."""
    told, report = os.pipe()
    heard, life = os.pipe()
    line, proxys = pair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            serve(orders, report, heard, line)
        finally:
            os._exit(1)
    for fd in (report, heard, line):
        os.close(fd)
    return Gate(pid, told, life, proxys)


def _allow_descriptors() -> None:
    """Take as many as we may: there may be thousands of listeners.

    And what sandboxes have on its way in messages counts against the limit of whoever sends.
    """
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(orders: Orders, report: int, life: int, line: int) -> None:
    """Be a gate, in a process of its own; ends the process."""
    try:
        report, life, line = apart.strip(report, life, line)
        # Now, while bwrap starts.
        from . import netns

        _allow_descriptors()

        said = os.read(life, 64)
        if said:
            apart.forget_files()
            init = int(said)
            netns.join(init)
            netns.wait_for_loopback(init)
            ipv6 = netns.has_ipv6()
            if orders.capture:
                netns.add_routes(ipv6=ipv6)
            listeners = netns.listen_all(orders.listeners, ipv6=ipv6)
            post = netns.Post(line, life, ipv6=ipv6)
            post.announce(listeners)
            os.write(report, READY)
            post.serve()
    except (ProcessLookupError, FileNotFoundError):
        # bwrap failed, and says so itself.
        os.write(report, READY)
    except Exception as error:  # noqa: BLE001 - whatever it is, the sandbox must not start
        said_so = reason(error) if isinstance(error, OSError) else type(error).__name__
        os.write(report, said_so.encode("utf-8", "replace") + b"\n")
    os._exit(0)
