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
    outer, name = _parent(init)
    # It may be gone already. Whoever adopts orphans is no bwrap.
    if not outer or _parent(int(outer))[1] != name:
        return os.path.exists(marker)
    polls = 0
    while not os.path.exists(marker):
        polls += 1
        # Now and then: it costs more than the look at the marker.
        if polls % 16 == 0 and _parent(init)[0] != outer:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError("bwrap did not finish building the root")
        time.sleep(PAUSE)
    return True


def _parent(pid: int) -> tuple[bytes, bytes]:
    """A process's parent and its own name; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            head, _, rest = file.read().rpartition(b")")
    except OSError:
        return b"", b""
    return rest.split()[1], head.partition(b"(")[2]
