"""What a keeper does, from the moment it knows its sandbox to the end of the run."""

from __future__ import annotations

import os
import select
import sys

from . import joined
from .flood import Flood
from .keeper import READY, Orders
from .watching import Watching

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

# How often places are looked at when the kernel has no watches left, in seconds.
LOOK_EVERY = 0.25


def _forget_files() -> None:
    """Import nothing from now on.

    Soon every path leads into the sandbox: a module that it has put there would run outside of its
    pid namespace and its filter.
    """
    sys.path.clear()
    sys.meta_path.clear()
    sys.path_hooks.clear()


def keep(init: int, orders: Orders, report: int, life: int) -> None:
    """Finish the sandbox's mounts, say so, and hold them until the supervisor lets go."""
    _forget_files()
    post = Post(init, orders, report)
    os.write(report, READY)
    try:
        post.hold(life)
    except OSError:
        # Something could not be covered again.
        post.end("keeper")


class Post:
    """A keeper at its place: it has joined the sandbox and made what it had to make."""

    def __init__(self, init: int, orders: Orders, report: int) -> None:
        self._report = report
        self._handle = os.pidfd_open(init)
        table = joined.join(init)
        joined.make(list(orders.bulk))
        self._watching = Watching(list(orders.duties), table)
        self._watching.look()
        self._flood = Flood(orders.tmp_bytes) if orders.tmp_bytes else None
        pauses = [self._flood.every] if self._flood else []
        pauses += [LOOK_EVERY] if self._watching.fd < 0 and orders.duties else []
        self._pause = int(min(pauses) * 1000) if pauses else None

    def hold(self, life: int) -> None:
        """Wait for changes until the supervisor lets go."""
        poller = select.poll()
        poller.register(life, select.POLLIN)
        if self._watching.fd >= 0:
            poller.register(self._watching.fd, select.POLLIN)
        while True:
            events = poller.poll(self._pause)
            if any(fd == life for fd, _ in events):
                return
            if events:
                self._watching.heed()
            elif self._watching.fd < 0:
                self._watching.look()
            if self._flood is not None and self._flood.exceeded():
                self._flood = None
                self.end("tmp-size")

    def end(self, why: str) -> None:
        """End the sandbox, and tell the supervisor why."""
        os.write(self._report, f"{why}\n".encode())
        _signal.pidfd_send_signal(self._handle, _signal.SIGKILL)
