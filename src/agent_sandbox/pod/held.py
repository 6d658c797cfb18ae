"""Files that have no name any more and are still open: they take room, and no walk finds them."""

from __future__ import annotations

import os
import stat
import time

from . import ending

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK = 512
# How long is looked again when processes come and go meanwhile, or cannot be looked into.
SECONDS, PAUSE = 2.0, 0.02
MOST_LOOKS = 20


class Closed(Exception):
    """A process that cannot be looked into. What it holds may be anything."""


def weight(parents: Iterable[int], device: int) -> int:
    """Bytes of such files on this device, held by whatever is below these processes.

    A process that is about to end, or about to become a command, cannot be looked into for a
    moment; one that stays so has something to hide (Closed). One that is gone may have left what it
    held to a child that was not there before: so it is looked again, and nothing is forgotten.
    """
    found: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    looks = 0
    while True:
        pids = [below for pid in parents for below in ending.descendants(pid)]
        states = [_look(pid, device, found) for pid in pids]
        looks += 1
        if "closed" in states:
            if time.monotonic() > deadline:
                raise Closed
        elif "gone" not in states or looks >= MOST_LOOKS:
            return sum(found.values())
        time.sleep(PAUSE)


def _look(pid: int, device: int, found: dict[int, int]) -> str:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        # Also of one that has ended, and whose status nobody has taken yet.
        return "gone" if ending.is_over(pid) else "closed"
    except OSError:
        return "gone"
    for number in numbers:
        try:
            info = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if info.st_dev == device and not info.st_nlink and stat.S_ISREG(info.st_mode):
            found[info.st_ino] = info.st_blocks * BLOCK
    return "open"
