"""Forks keepers for a library, whose host program must not be forked itself.

    python -I -S keeper_server.py FD

One such process serves a whole program, from its first sandbox to its end. FD is a socket; each
message holds the orders and the two descriptors of one keeper. Also the library's side of it.
"""

from __future__ import annotations

import _thread
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .keeper import Keeper, Orders

LENGTH = 8


class Server:
    """The library's end: starts the process, and asks it for keepers."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = theirs.fileno()
        self._socket = ours
        self._turn = _thread.allocate_lock()
        self._child = os.posix_spawn(
            sys.executable, [sys.executable, "-I", "-S", __file__, str(fd)], {},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd)], setsigmask=(),
        )  # fmt: skip
        theirs.close()

    def keeper(self, orders: Orders) -> Keeper:
        """A new keeper, forked by the server."""
        from .keeper import Keeper

        told, report = os.pipe()
        heard, life = os.pipe()
        try:
            data = orders.dump()
            size = len(data).to_bytes(LENGTH, "little")
            with self._turn:
                socket.send_fds(self._socket, [size], [report, heard])
                self._socket.sendall(data)
        except OSError:
            os.close(told)
            os.close(life)
            raise
        finally:
            os.close(report)
            os.close(heard)
        return Keeper(0, told, life)

    def close(self) -> None:
        """Let the process end, and take its exit status."""
        self._socket.close()
        try:
            os.waitpid(self._child, 0)
        except ChildProcessError:
            # The host program waits for any child of its own, and has taken it.
            return


def main() -> None:
    """Fork a keeper for every message, until the program is gone."""
    import signal

    os.setsid()
    # The children are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from agent_sandbox.launch import flood, joined, keeping, watching  # noqa: F401 - once for all
    from agent_sandbox.launch.keeper import Orders, serve

    line = socket.socket(fileno=int(sys.argv[1]))
    while True:
        size, fds, _, _ = socket.recv_fds(line, LENGTH, 2)
        if len(size) < LENGTH or len(fds) != 2:
            os._exit(0)
        data = b""
        wanted = int.from_bytes(size, "little")
        while len(data) < wanted:
            data += line.recv(wanted - len(data)) or os._exit(0)
        if os.fork() == 0:
            try:
                serve(Orders.load(data), *fds)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
