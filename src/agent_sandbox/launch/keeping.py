"""What a keeper does, from the moment it knows its sandbox to the end of the run."""

from __future__ import annotations

import os
import select
import sys
import time

from . import joined
from .crowd import Crowd
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
# How often /tmp and root's processes are measured.
MEASURE_EVERY = 0.5


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
    handle = os.pidfd_open(init)
    try:
        post = Post(init, orders, report, handle)
        os.write(report, READY)
        try:
            post.hold(life)
        except Exception:  # noqa: BLE001 - whatever it is, nobody holds the mounts any more
            post.end("keeper")
    finally:
        # When the supervisor lets go, the sandbox is dead; when it was killed, it must be.
        _kill(handle)


def _kill(handle: int) -> None:
    try:
        _signal.pidfd_send_signal(handle, _signal.SIGKILL)
    except ProcessLookupError:
        return


class Post:
    """A keeper at its place: it has joined the sandbox and made what it had to make."""

    def __init__(self, init: int, orders: Orders, report: int, handle: int) -> None:
        self._report = report
        self._handle = handle
        table = joined.join(init)
        joined.make(list(orders.bulk))
        self._watching = Watching(list(orders.duties), table)
        self._watching.look()
        # What is not the kernel's to limit, by the name of the limit.
        self._measured: dict[str, Flood | Crowd] = {}
        if orders.tmp_bytes:
            self._measured["tmp-size"] = Flood(orders.tmp_bytes)
        if orders.processes:
            self._measured["pids"] = Crowd(orders.processes)
        self._measured_at = time.monotonic()

    def hold(self, life: int) -> None:
        """Wait for changes until the supervisor lets go."""
        poller = select.poll()
        poller.register(life, select.POLLIN)
        if self._watching.fd >= 0:
            poller.register(self._watching.fd, select.POLLIN)
        while True:
            events = poller.poll(self._pause())
            if any(fd == life for fd, _ in events):
                return
            if events:
                self._watching.heed()
            elif self._watching.blind:
                self._watching.look()
            now = time.monotonic()
            if self._measured and now - self._measured_at >= MEASURE_EVERY:
                self._measured_at = now
                self._measure()

    def _pause(self) -> int | None:
        """How long to wait for an event, in milliseconds."""
        if self._watching.blind:
            return int(LOOK_EVERY * 1000)
        return int(MEASURE_EVERY * 1000) if self._measured else None

    def _measure(self) -> None:
        for name, measure in self._measured.items():
            if measure.exceeded():
                self._measured = {}
                self.end(name)
                return

    def end(self, why: str) -> None:
        """End the sandbox, and tell the supervisor why."""
        os.write(self._report, f"{why}\n".encode())
        _kill(self._handle)
