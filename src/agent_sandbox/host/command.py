"""Finds the command on the host and lists what must be visible inside for it to start."""

from __future__ import annotations

import os

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..policy.model import Match
    from .locate import Locator

# The kernel reads this much of a script's first line (BINPRM_BUF_SIZE).
SHEBANG_BYTES = 256


class Candidate(Record):
    """One place where the command may be found, with the interpreter that it names."""

    match: Match
    executable: bool
    interpreter: str = ""
    # The program that `#!/usr/bin/env NAME` looks up.
    looked_up: str = ""


def candidates(name: str, path: str, cwd: str, locator: Locator) -> Iterator[Candidate]:
    """Every file that execvp(3) would try, in its order."""
    if "/" in name:
        wanted = [name if name.startswith("/") else f"{cwd}/{name}"]
    else:
        wanted = [f"{part or cwd}/{name}" for part in path.split(":")]
    for place in wanted:
        match = locator.find(place if place.startswith("/") else f"{cwd}/{place}")
        if match is None or (match.kind == "dir" and "/" not in name):
            continue
        executable = match.kind == "file" and os.access(match.real, os.X_OK)
        interpreter, looked_up = _shebang(match.real) if executable else ("", "")
        yield Candidate(
            match=match, executable=executable, interpreter=interpreter, looked_up=looked_up
        )


def _shebang(path: str) -> tuple[str, str]:
    """The interpreter of a script, and the name behind `env` if it is one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return "", ""
    try:
        head = os.read(fd, SHEBANG_BYTES)
    finally:
        os.close(fd)
    if not head.startswith(b"#!"):
        return "", ""
    words = head[2:].split(b"\n", 1)[0].decode("utf-8", "surrogateescape").split()
    if not words:
        return "", ""
    if words[0].rpartition("/")[2] != "env":
        return words[0], ""
    named = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
    return words[0], named[0] if named else ""
