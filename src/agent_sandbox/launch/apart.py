"""For processes that are forked to stay at a sandbox: what they must not take along."""

from __future__ import annotations

import os
import sys


def strip(*wanted: int) -> list[int]:
    """Keep these descriptors alone, under other numbers: the supervisor's would live on in here."""
    null = os.open("/dev/null", os.O_RDWR)
    high = [os.dup(fd) for fd in wanted]
    for number in (0, 1, 2):
        os.dup2(null, number)
    floor = max(high) + 1
    placed = [os.dup2(fd, floor + index) for index, fd in enumerate(high)]
    os.closerange(3, floor)
    os.closerange(floor + len(placed), 1 << 20)
    return placed


def forget_files() -> None:
    """Import nothing from now on.

    Soon paths lead into the sandbox: a module that it has put there would run outside of its pid
    namespace and its filter.
    """
    sys.path.clear()
    sys.meta_path.clear()
    sys.path_hooks.clear()
