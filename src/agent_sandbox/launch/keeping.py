"""What a keeper does, from the moment it knows its sandbox to the end of the run."""

from __future__ import annotations

import os
import select
import time

from . import apart, joined
from .crowd import Crowd
from .flood import Flood
from .keeper import BLIND, READY, Orders
from .watching import Watching

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

# How often places are looked at when the kernel has no watches left, in seconds. One lstat(2) for
# each name that is awaited: where a mount is lost, the kernel tells in any case.
LOOK_EVERY = 0.02
# How often /tmp and root's processes are measured.
MEASURE_EVERY = 0.5


def keep(init: int, orders: Orders, report: int, life: int, instance: int) -> None:
    """Finish the sandbox's mounts, say so, and hold them until the supervisor lets go."""
    apart.forget_files()
    handle = os.pidfd_open(init)
    try:
        post = Post(init, orders, report, handle, instance)
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

    def __init__(
        self, init: int, orders: Orders, report: int, handle: int, instance: int
    ) -> None:  # fmt: skip
        self._report = report
        self._handle = handle
        table = joined.join(init)
        joined.make(list(orders.bulk))
        self._watching = Watching(list(orders.duties), table, instance)
        self._watching.look()
        self._warned = False
        # What is not the kernel's to limit, by the name of the limit.
        self._measured: dict[str, Flood | Crowd] = {}
        if orders.tmp_bytes:
            self._measured["tmp-size"] = Flood(orders.tmp_bytes)
        if orders.processes:
            self._measured["pids"] = Crowd(orders.processes)
        self._measured_at = time.monotonic()

    def hold(self, life: int) -> None:
        """Wait for changes until the supervisor lets go."""
        watching = self._watching
        poller = select.poll()
        poller.register(life, select.POLLIN)
        poller.register(watching.table, select.POLLPRI)
        while True:
            if watching.fd >= 0:
                poller.register(watching.fd, select.POLLIN)
            if watching.blind:
                self._warn()
            events = {fd for fd, _ in poller.poll(self._pause())}
            if life in events:
                return
            if watching.fd in events:
                watching.heed()
            if watching.table in events:
                watching.look()
            elif watching.blind:
                watching.glance()
            now = time.monotonic()
            if self._measured and now - self._measured_at >= MEASURE_EVERY:
                self._measured_at = now
                self._measure()

    def _warn(self) -> None:
        """Tell the supervisor once that changes may be seen late."""
        if not self._warned:
            self._warned = True
            os.write(self._report, f"{BLIND}\n".encode())

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
