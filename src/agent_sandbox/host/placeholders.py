"""Which names on the host are placeholders of runs, and will go with them.

A run that starts meanwhile must not take them for the user's: they may be gone a moment later.
"""

from __future__ import annotations

import os

# The file of a workspace that lists them, written before they are made.
LIST = "placeholders"


def listed(workspace: str) -> list[str]:
    """The placeholders of one run."""
    try:
        with open(f"{workspace}/{LIST}", encoding="utf-8", errors="surrogateescape") as file:
            return [path for path in file.read().split("\0") if path.startswith("/")]
    except (FileNotFoundError, NotADirectoryError):
        # Any other error is the caller's: a name that a run holds must not be taken for free.
        return []


def recorded(state_dir: str, but: str = "") -> frozenset[str]:
    """The placeholders of all runs, living or dead, but for one."""
    base = f"{state_dir}/run"
    try:
        names = os.listdir(base)
    except OSError:
        return frozenset()
    return frozenset(path for name in names if name != but for path in listed(f"{base}/{name}"))
