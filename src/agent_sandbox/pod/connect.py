"""Standard streams to and from the agent's port, for a service that reaches a pod by exec only.

It carries TLS that it cannot read.
"""

from __future__ import annotations

import os
import select
import socket

from ..launch import syscalls
from . import confine, terms

PIECE = 1 << 16


def run() -> None:
    """Copy both ways until one side has ended."""
    machine = os.uname().machine
    # Before there is a socket: a command of the same user must not take it.
    confine.hide(machine)
    syscalls.no_new_privileges(machine)
    port = int(os.environ.get(terms.AT, terms.PORT))
    # No look-up, which would ask what the image has for it (nsswitch.conf(5)).
    with socket.socket(socket.AF_INET) as sock:
        sock.connect(("127.0.0.1", port))
        carry(sock, 0, 1)


def carry(sock: socket.socket, source: int, target: int) -> None:
    """From `source` to the socket, and from it to `target`. Either end ends both."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(source, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            data = sock.recv(PIECE) if fd == sock.fileno() else os.read(source, PIECE)
            if not data:
                return
            if fd == source:
                sock.sendall(data)
            else:
                _write(target, data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
