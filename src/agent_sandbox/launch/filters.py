"""Remembers built seccomp programs: building one costs more than a millisecond at every start.

They lie in the state directory, which no sandbox can see. A program is used only as long as the
modules that it was built from have not changed.
"""

from __future__ import annotations

import os

SOURCES = ("seccomp.py", "surface.py")


def program(state_dir: str, machine: str, level: str) -> bytes:
    """The filter of a level, from memory where it is still the one that would be built."""
    identity = f"{machine} {level} {_identity()}\n".encode()
    path = f"{state_dir}/filters/{machine}-{level}"
    try:
        with open(path, "rb") as file:
            known = file.read()
        if known.startswith(identity):
            return known[len(identity) :]
    except OSError:
        pass
    # Only when it is not known yet.
    from . import seccomp

    built = seccomp.build(machine, level)
    store(path, identity + built)
    return built


def _identity() -> str:
    """Which code builds programs."""
    here = os.path.dirname(__file__)
    infos = [os.stat(f"{here}/{name}") for name in SOURCES]
    return " ".join(f"{i.st_dev}:{i.st_ino}:{i.st_size}:{i.st_mtime_ns}" for i in infos)


def store(path: str, data: bytes) -> None:
    """Write a file of the state directory, never half.

    Another start may do the same: the last one wins.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fresh = f"{path}.{os.urandom(4).hex()}"
    fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(fresh, path)
