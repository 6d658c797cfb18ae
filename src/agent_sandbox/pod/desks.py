"""Between the agent and supervisors that stay after their command: who begins what, and what ended.

The agent alone knows which commands have been begun, so each is begun at most once, whoever reads
the request for it. What a supervisor says is there before it acts on it.
"""

from __future__ import annotations

import select
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A supervisor says that it has told the end of its command, or asks whether it may begin another.
HAS_TOLD, ASKS = b".", b"?"
# The agent says no; or yes, with two numbers: kills for memory, and processes of ours.
NO = b"no"
MOST = 1 << 11


class Desks:
    """The agent's ends, by descriptor."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._held: dict[int, tuple[socket.socket, int]] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._held

    def add(self, ours: socket.socket, pid: int) -> None:
        """Our end of a pair, and who has the other one."""
        ours.settimeout(0)
        self._poll.register(ours, select.POLLIN)
        self._held[ours.fileno()] = (ours, pid)

    def close(self) -> None:
        """In a child: these are not for it."""
        for desk, _ in self._held.values():
            desk.close()

    def of(self, pid: int) -> list[int]:
        """The descriptors that lead to a process."""
        return [fd for fd, (_, owner) in self._held.items() if owner == pid]

    def hear(self, *fds: int) -> Iterator[tuple[int, bytes]]:
        """What has been said on these, or on all: by whom, and what."""
        for fd in fds or tuple(self._held):
            desk, pid = self._held[fd]
            while (said := _said(desk)) is not None:
                if not said:
                    del self._held[fd]
                    self._poll.unregister(fd)
                    desk.close()
                    break
                yield pid, said

    def answer(self, pid: int, data: bytes) -> None:
        """Say something to a process. If it is dead, its status tells."""
        for fd in self.of(pid):
            try:
                self._held[fd][0].send(data)
            except OSError:
                continue


def pair() -> tuple[socket.socket, socket.socket]:
    """The agent's end and a supervisor's."""
    return socket.socketpair(type=socket.SOCK_SEQPACKET)


def _said(desk: socket.socket) -> bytes | None:
    """One message; nothing: the other end is closed; None: there is none now."""
    try:
        return desk.recv(MOST)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def ask(desk: socket.socket, execution: str) -> tuple[int, int] | None:
    """In a supervisor: whether it may begin this one, and what holds for it."""
    desk.send(ASKS + execution.encode("utf-8", "surrogatepass"))
    answer = desk.recv(MOST)
    if answer in (NO, b""):
        return None
    kills, own = map(int, answer.split())
    return kills, own


def asked(said: bytes) -> str:
    """The command that is asked for."""
    return said.removeprefix(ASKS).decode("utf-8", "surrogatepass")


def yes(kills: int, own: int) -> bytes:
    """The answer to it."""
    return b"%d %d" % (kills, own)
