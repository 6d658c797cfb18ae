"""Network control of one run, as the supervisor sees it: a gate at the sandbox, a proxy outside.

The gate makes the sockets inside, the proxy decides and dials. What either of them cannot do, the
command cannot do: it has no other way out than the proxy.
"""

from __future__ import annotations

import _json
import _socket
import os
import select
import sys
import time

from ..errors import HostError, reason
from . import gate
from .descriptors import memory_file
from .netns import WILDCARD

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Mapping, Sequence

    from ..policy.network import Egress, Publish
    from .bwrap import Command
    from .netns import Listener
else:
    import _signal

PROGRAM = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/proxy/egress.py"
# What a proxy says when it has the gate's listeners, and how long that may take.
READY = b"\n"
READY_SECONDS = 30.0
# How long a proxy may take to say what it has seen.
REPORT_SECONDS = 5.0
MAX_REPORT = 64 << 20
# What a proxy says that has seen nothing; worth no JSON parser.
NOTHING_SEEN = b'{"hosts": [], "learned": []}\n'
LOST_GATE = (
    "the process that makes the sandbox's sockets was killed: from then on no further port could "
    "be reached or published"
)
LOST_PROXY = (
    "the network's proxy ended before the command did: the network ended with it, and what was "
    "reached or refused before is not known"
)


def to_json(value: object) -> str:
    """JSON of texts, numbers, lists and tables: the module of that name costs a start 10 ms."""
    if isinstance(value, str):
        return str(_json.encode_basestring_ascii(value))
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, dict):
        pairs = (f"{to_json(str(name))}: {to_json(part)}" for name, part in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_json(part) for part in value) + "]"
    raise TypeError(type(value).__name__)


def listeners(egress: Egress) -> tuple[Listener, ...]:
    """What the gate listens on from the start. Pure."""
    from ..policy.network import DNS_PORT, PROXY_PORT, capture

    captured = (("tcp", address or WILDCARD, port) for address, port in capture(egress))
    return (
        ("udp", WILDCARD, DNS_PORT), ("tcp", WILDCARD, DNS_PORT),
        ("tcp", "127.0.0.1", PROXY_PORT), *captured,
    )  # fmt: skip


def told(
    egress: Egress | None, publish: Sequence[Publish], work: str, *,
    bases: Sequence[int] = (), more: Mapping[str, object] = {},
) -> tuple[bytes, bytes]:  # fmt: skip
    """What gate and proxy are told; nothing at all where neither is needed. Pure.

    `bases` are ports inside that stand for a host, `more` is further orders of the proxy.
    """
    if egress is None and not publish:
        return b"", b""
    orders = {
        "mode": egress.mode if egress is not None else "off",
        "allow": [(rule.text, rule.source) for rule in egress.allow] if egress else [],
        "deny": [(rule.text, rule.source) for rule in egress.deny] if egress else [],
        "publish": [(p.address, p.port, p.inner_port) for p in publish],
        "control": f"{work}/control" if egress is not None else "",
        "secrets": [],
        "budgets": [],
        **more,
    }
    own = tuple(("tcp", "127.0.0.1", port) for port in bases)
    taken = (*listeners(egress), *own) if egress else ()
    wanted = gate.Orders(capture=egress is not None, listeners=taken)
    return wanted.dump(), to_json(orders).encode("ascii")


class Proxy:
    """The process outside, which accepts what the command connects to and dials for it."""

    def __init__(
        self, told: bytes, line: int, program: str = PROGRAM, arguments: Sequence[str] = ()
    ) -> None:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        text = memory_file(told)
        passed = (text, line, theirs.fileno())
        argv = [sys.executable, "-I", "-S", *_bytecode(), program, *(str(fd) for fd in passed)]
        argv += arguments
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2),
            # dup2 onto itself clears close-on-exec in the child only.
            *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in passed),
        ]  # fmt: skip

        def start() -> int:
            # A session of its own: Ctrl-C and Ctrl-Z are the command's. And not by the spawner: in
            # the Landlock domain of its sandboxes, they could signal it.
            return os.posix_spawn(
                sys.executable, argv, {}, file_actions=actions, setsid=True, setsigmask=(),
                setsigdef=(_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT),
            )  # fmt: skip

        try:
            self.pid = start()
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(text)
            theirs.close()
        self._control = ours
        self._words = ""
        self._handle = _pidfd(self.pid)

    def is_ready(self) -> bool:
        """Wait until it has the gate's listeners; False when it ended before, or takes too long."""
        if not _readable(self._control.fileno(), READY_SECONDS):
            return False
        try:
            said = self._control.recv(len(READY))
        except OSError:
            return False
        self._words = said.decode("utf-8", "replace")
        return said == READY

    def last_words(self) -> str:
        """Why it ended, if it said so in place of being ready."""
        if not _readable(self._control.fileno(), 0.0):
            return ""
        try:
            return self._words + self._control.recv(1 << 12).decode("utf-8", "replace").strip()
        except OSError:
            return self._words

    def ask(self) -> None:
        """Ask for the report, and the end."""
        try:
            self._control.shutdown(_socket.SHUT_WR)
        except OSError:
            # It has ended.
            return

    def report(self, seconds: float = REPORT_SECONDS) -> bytes:
        """What it has seen; nothing when it was killed or does not answer."""
        said = b""
        deadline = time.monotonic() + seconds
        while _readable(self._control.fileno(), deadline - time.monotonic()):
            try:
                chunk = self._control.recv(1 << 16)
            except OSError:
                return b""
            if not chunk:
                return said
            said += chunk
            if len(said) > MAX_REPORT:
                break
        return b""

    def end(self) -> None:
        """End it, whatever it is doing."""
        self._control.close()
        if self._handle >= 0:
            try:
                _signal.pidfd_send_signal(self._handle, _signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(self._handle)
            self._handle = -1
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            # A library's host program waits for any child of its own, and has taken it.
            return


def _bytecode() -> tuple[str, ...]:
    """Let the proxy's modules come from where ours come from, not be compiled at every start."""
    prefix = sys.pycache_prefix
    return ("-X", f"pycache_prefix={prefix}") if prefix else ()


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def _readable(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, int(seconds * 1000))))


class Network:
    """Gate and proxy of one run. `start`, `attend`, `ready`; `ask` and `finish`, or `abandon`."""

    def __init__(
        self, at: gate.Gate, told: bytes, published: Sequence[tuple[str, int]] = (), *,
        certified: bool = False,
    ) -> None:  # fmt: skip
        self._gate = at
        # The proxy makes certificates first, which the command must see when it starts.
        self._arguments = ("certified",) if certified else ()
        self._told = told
        self._published = published
        self._proxy: Proxy | None = None
        self._over = False
        # What the user should know. Complete after `finish`.
        self.warnings: tuple[str, ...] = ()

    def start(self) -> None:
        """Start the proxy. It loads while bwrap builds; listeners hold what comes before it."""
        try:
            for address, port in self._published:
                _check_free(address, port)
            self._proxy = Proxy(self._told, self._gate.line, arguments=self._arguments)
        except OSError as error:
            self.abandon()
            raise failed(f"cannot start the proxy: {reason(error)}") from error
        except BaseException:
            self.abandon()
            raise
        self._gate.forget_line()

    @property
    def pid(self) -> int:
        """The proxy's process, which `finish` waits for; 0 when there is none."""
        return self._proxy.pid if self._proxy is not None else 0

    def attend(self, init: int) -> None:
        """Tell the gate which sandbox is its own."""
        self._gate.attend(init)

    def ready(self) -> None:
        """Wait until the command can be let go; raises when its network cannot be controlled."""
        why = self._gate.ready()
        if why:
            # It may have failed because the proxy has.
            raise failed((self._proxy.last_words() if self._proxy else "") or why)
        if self._proxy is None or not self._proxy.is_ready():
            said = self._proxy.last_words() if self._proxy else ""
            raise failed(said or "the proxy ended")

    def ask(self) -> None:
        """The command has ended: let the proxy sum up, while others tidy up."""
        if self._gate.has_ended():
            self.warnings += (LOST_GATE,)
        if self._proxy is not None:
            self._proxy.ask()

    def finish(self) -> bytes:
        """What the proxy has seen, as JSON; nothing when it has seen nothing. Ends both."""
        if self._over or self._proxy is None:
            self.abandon()
            return b""
        said = self._proxy.report()
        if not said:
            self.warnings += (LOST_PROXY,)
        self.abandon()
        return b"" if said == NOTHING_SEEN else said

    def abandon(self) -> None:
        """End both without asking. Safe to call twice."""
        if self._over:
            return
        self._over = True
        if self._proxy is not None:
            self._proxy.end()
        self._gate.dismiss()


def _check_free(address: str, port: int) -> None:
    """Refuse a start whose published port is taken. The proxy takes it a moment later."""
    probe = _socket.socket(_socket.AF_INET6 if ":" in address else _socket.AF_INET)
    try:
        # As the proxy does: connections of an earlier run may still be in TIME_WAIT.
        probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
    except OSError as error:
        raise HostError(
            f"cannot publish port {port} at {address}: {reason(error)}",
            hint="choose another port of this machine: --publish OTHER:PORT",
            code="port-taken",
        ) from error
    finally:
        probe.close()


def failed(why: str) -> HostError:
    """The error for a network that cannot be controlled."""
    return HostError(
        f"cannot control the sandbox's network: {why}",
        hint="run 'sandboxctl doctor', or use --network=off",
        code="network-failed",
    )


def network(
    command: Command, make: Callable[[gate.Orders], gate.Gate] = gate.forked
) -> Network | None:
    """Gate and proxy for a command that needs them. `make` starts the gate."""
    if not command.gate:
        return None
    return Network(
        make(gate.Orders.load(command.gate)), command.proxy, command.published,
        certified=command.certified,
    )  # fmt: skip
