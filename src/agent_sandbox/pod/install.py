"""Copies the bundle into a directory, in a container that has nothing but the bundle."""

from __future__ import annotations

import os
import sys

PIECE = 1 << 20


def run() -> None:
    """The last argument is the directory; it exists and is empty."""
    os.umask(0o022)
    copy(sys.prefix, sys.argv[-1])


def copy(source: str, target: str) -> None:
    """Directories and regular files, with their modes; the bundle has nothing else."""
    with os.scandir(source) as found:
        entries = list(found)
    for one in entries:
        to = f"{target}/{one.name}"
        if one.is_dir(follow_symlinks=False):
            os.mkdir(to, 0o755)
            copy(one.path, to)
        elif one.is_file(follow_symlinks=False):
            _copy_file(one.path, to, one.stat().st_mode & 0o777)


def _copy_file(source: str, target: str, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(source, "rb") as read, open(os.open(target, flags, mode), "wb") as write:
        while data := read.read(PIECE):
            write.write(data)
        os.fchmod(write.fileno(), mode)
