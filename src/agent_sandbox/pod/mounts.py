"""Mounts of the pod that a command could write to and that are not the sandbox's own.

Engines give an image's VOLUME a directory of the node's disk, in spite of a read-only root.
"""

from __future__ import annotations

import os

# Fields of a line: mountinfo in proc(5).
PATH, OPTIONS = 4, 5


def foreign(text: str, own: tuple[str, ...]) -> list[str]:
    """Mount points of /proc/self/mountinfo that can be written and are not below these. Pure."""
    found: list[str] = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > OPTIONS and "ro" not in fields[OPTIONS].split(","):
            path = fields[PATH].encode("latin-1").decode("unicode_escape")
            if not any(path == one or path.startswith(f"{one}/") for one in own):
                found.append(path)
    return found


def writable(own: tuple[str, ...]) -> list[str]:
    """Those of this process; of single files only what its user may write."""
    with open("/proc/self/mountinfo", encoding="latin-1") as file:
        found = foreign(file.read(), (*own, "/proc", "/sys"))
    return [path for path in found if os.path.isdir(path) or os.access(path, os.W_OK)]
