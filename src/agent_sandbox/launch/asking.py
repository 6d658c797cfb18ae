"""Asks a program outside, and takes what it prints: so long, so much, and no longer or more."""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def answer(
    program: str, argv: Sequence[str], env: Mapping[str, str], *, seconds: float, most: int,
    silent: bool = False,
) -> tuple[int | None, bytes | None]:  # fmt: skip
    """Its exit code, and all that it printed.

    No output: it took too long or printed too much, and was killed. No code: the host program of a
    library waits for any child of its own, and has taken it. `silent` keeps its errors from the
    caller's terminal.
    """
    mine, theirs = os.pipe()
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, theirs, 1),
    ]  # fmt: skip
    if silent:
        actions.append((os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0))
    try:
        try:
            pid = os.posix_spawn(program, list(argv), env, file_actions=actions, setsigmask=())
        finally:
            os.close(theirs)
        said = _until_end(mine, seconds, most)
    finally:
        os.close(mine)
    if said is None:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            # It has ended, and been taken; a child of its own keeps the pipe open.
            return None, None
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
    except ChildProcessError:
        return None, said


def _until_end(fd: int, seconds: float, most: int) -> bytes | None:
    said = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + seconds
    while poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return said
        said += chunk
        if len(said) > most:
            return None
    return None
