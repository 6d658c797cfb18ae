"""Counts a root sandbox's processes against the default limit.

RLIMIT_NPROC does not bind root, and making a cgroup costs more than the whole start of a sandbox.
So the keeper counts. Who asks for a limit with --pids gets a cgroup, which the kernel enforces.
"""

from __future__ import annotations

import os

PLACE = "/proc"


class Crowd:
    """Knows how many processes and threads there may be. To be asked from time to time."""

    def __init__(self, limit: int, place: str = PLACE) -> None:
        self._limit = limit
        self._place = place

    def exceeded(self) -> bool:
        """Whether there are more. /proc shows the sandbox's own, and nobody can hide there."""
        pids = [name for name in os.listdir(self._place) if name.isdigit()]
        count = len(pids)
        for pid in pids:
            if count > self._limit:
                return True
            try:
                # A directory has a link from each directory in it, from itself and its parent.
                count += os.stat(f"{self._place}/{pid}/task").st_nlink - 3
            except OSError:
                continue
        return count > self._limit
