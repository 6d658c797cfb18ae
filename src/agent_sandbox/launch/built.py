"""Waits until bwrap has built a root: both the keeper and the supervisor have to."""

from __future__ import annotations

import os
import time

from ..policy.model import MARKER

PAUSE = 0.0002


def wait(init: int, seconds: float) -> bool:
    """Whether there is a finished root; raises TimeoutError when there is none in time.

    The marker is bwrap's last step, and shows at the process's root only after pivot_root(2). When
    bwrap's outer process is gone, its child waits for a word from it that never comes.
    """
    marker = f"/proc/{init}/root{MARKER}"
    deadline = time.monotonic() + seconds
    outer = _parent(init)
    polls = 0
    while not os.path.exists(marker):
        polls += 1
        # Now and then: it costs more than the look at the marker.
        if not outer or (polls % 16 == 0 and _parent(init) != outer):
            return False
        if time.monotonic() > deadline:
            raise TimeoutError("bwrap did not finish building the root")
        time.sleep(PAUSE)
    return True


def _parent(pid: int) -> bytes:
    """A process's parent, empty when it is gone. It changes when the parent ends."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[1]
    except OSError:
        return b""
