"""What a proxy does before it is one: it waits for something to do.

Most commands are over in a moment and ask for nothing, and to load a proxy takes longer than they
do. So it is loaded with the first connection or question, or a little later by itself.
"""

from __future__ import annotations

import _socket
import os
import resource
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Protocol, address, port and descriptor of a listener.
    Found = tuple[str, str, int, int]

MAX_MESSAGE = 512
# Said first: the proxy holds the listeners, and the command may be let go. JSON does not mind it.
READY = b"\n"
# What a proxy says that has seen nothing; the supervisor knows it without a parser.
NOTHING_SEEN = b'{"hosts": [], "learned": []}\n'
# When nothing has come until then, the proxy is loaded to be there when something does.
IDLE_MILLISECONDS = 100


def close_others(*kept: int) -> None:
    """Keep the three descriptors alone: a library's host program may leave others open to us."""
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)


def receive(line: int, supervisor: int) -> list[Found]:
    """The gate's first listeners, until it says `ready`, or is gone, or the run is over."""
    found: list[Found] = []
    # A network of 256 addresses with four ports is more than most limits allow.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gate = _socket.socket(fileno=os.dup(line))
    poller = select.poll()
    poller.register(gate.fileno(), select.POLLIN)
    poller.register(supervisor, select.POLLIN)
    while supervisor not in (fd for fd, _ in poller.poll()):
        room = _socket.CMSG_SPACE(4)
        data, extra, _, _ = gate.recvmsg(MAX_MESSAGE, room, _socket.MSG_CMSG_CLOEXEC)
        words = data.decode("ascii", "replace").split(" ")
        if words == ["ready"]:
            os.write(supervisor, READY)
        if len(words) != 4 or not extra:
            break
        fd = int.from_bytes(extra[0][2][:4], sys.byteorder)
        found.append((words[1], words[2], int(words[3]), fd))
    gate.close()
    return found


def has_work(found: list[Found], supervisor: int) -> bool:
    """Wait for work, for a moment; False if the run is over and there was none."""
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    for *_, fd in found:
        poller.register(fd, select.POLLIN)
    # A connection counts, even one that the command has closed before it ended.
    return [fd for fd, _ in poller.poll(IDLE_MILLISECONDS)] != [supervisor]


def say_nothing(supervisor: int) -> None:
    """The report of a proxy that never was one."""
    try:
        _socket.socket(fileno=supervisor).sendall(NOTHING_SEEN)
    except OSError:
        # Nobody is there to read it.
        return
