"""Forks keepers and gates for a library, whose host program must not be forked itself.

    python -I -S keeper_server.py FD [PREFIX]

One such process serves a whole program, from its first sandbox to its end. FD is a socket; each
message holds the orders and the descriptors of one process: two for a keeper, three for a gate.
Also the library's side of it.

When the program is killed, bwrap dies with it; but one that was just starting may not be tied to
its parent yet, or may leave a child that waits for ever. With PREFIX, which only runs of that
program bear, these are ended from here.
"""

from __future__ import annotations

import _thread
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import gate
    from .keeper import Keeper, Orders

LENGTH = 8
KEEPERS, GATES = 2, 3
# Said by a program that lives on, or has ended its sandboxes itself.
FAREWELL = bytes(LENGTH)
# How long after the program's death a bwrap may still come up, in seconds: it was forked, and has
# not been executed yet.
SWEEP_SECONDS, SWEEP_PAUSE = 1.0, 0.02


class Server:
    """The library's end: starts the process, and asks it for keepers."""

    def __init__(self, ends: str = "") -> None:
        """`ends`: how the names of this program's runs begin, if they must not outlive it."""
        self.pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = theirs.fileno()
        self._socket = ours
        self._turn = _thread.allocate_lock()
        self._child = os.posix_spawn(
            sys.executable, [sys.executable, "-I", "-S", __file__, str(fd), ends], {},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd)], setsigmask=(),
        )  # fmt: skip
        theirs.close()

    def keeper(self, orders: Orders) -> Keeper:
        """A new keeper, forked by the server."""
        from .keeper import Keeper

        told, report = os.pipe()
        heard, life = os.pipe()
        self._ask(orders.dump(), (report, heard), (told, life))
        return Keeper(0, told, life)

    def gate(self, orders: gate.Orders) -> gate.Gate:
        """A new gate, forked by the server."""
        from . import gate

        told, report = os.pipe()
        heard, life = os.pipe()
        line, proxys = gate.pair()
        self._ask(orders.dump(), (report, heard, line), (told, life, proxys))
        return gate.Gate(0, told, life, proxys)

    def _ask(self, data: bytes, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
        """Send orders and descriptors to the server; closes ours, too, when that fails."""
        try:
            size = len(data).to_bytes(LENGTH, "little")
            with self._turn:
                socket.send_fds(self._socket, [size], theirs)
                self._socket.sendall(data)
        except OSError:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def close(self) -> None:
        """Let the process end, and take its exit status."""
        with self._turn:
            try:
                self._socket.send(FAREWELL)
            except OSError:
                # It is dead already.
                pass
            self._socket.close()
        try:
            os.waitpid(self._child, 0)
        except ChildProcessError:
            # The host program waits for any child of its own, and has taken it.
            return


def main() -> None:
    """Fork a keeper or a gate for every message, until the program is gone."""
    import signal

    os.setsid()
    # The children are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from agent_sandbox.launch import (  # noqa: F401 - once for all
        flood,
        gate,
        joined,
        keeper,
        keeping,
        netns,
        watching,
    )

    line = socket.socket(fileno=int(sys.argv[1]))
    while True:
        size, fds, _, _ = socket.recv_fds(line, LENGTH, GATES)
        if size == FAREWELL:
            os._exit(0)
        if len(size) < LENGTH or len(fds) not in (KEEPERS, GATES):
            _end(sys.argv[2])
        data = b""
        wanted = int.from_bytes(size, "little")
        while len(data) < wanted:
            data += line.recv(wanted - len(data)) or _end(sys.argv[2])
        if os.fork() == 0:
            try:
                if len(fds) == KEEPERS:
                    keeper.serve(keeper.Orders.load(data), *fds)
                gate.serve(gate.Orders.load(data), *fds)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


def _end(prefix: str) -> bytes:
    """The program is gone: end what it has left of its sandboxes, and this process."""
    if prefix:
        import time

        from agent_sandbox.launch import sweeping

        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline:
            sweeping.end_called(prefix)
            time.sleep(SWEEP_PAUSE)
    os._exit(0)


if __name__ == "__main__":
    main()
