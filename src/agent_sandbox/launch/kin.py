"""The processes of a sandbox as the host sees them: found, stopped, let go on.

For machines without a freezer of our own. A number is never trusted: it may belong to somebody else
by the time it is used, so a process is held by a descriptor and asked for its namespace.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterator
else:
    import _signal

# How long the last process may take to stop, in seconds.
STOP_SECONDS = 5.0


def descendants(init: int) -> list[int]:
    """All processes below the first one of a sandbox. Orphans become its children, so none miss."""
    found: list[int] = []
    todo = [init]
    while todo:
        pid = todo.pop()
        below = [int(child) for children in _children(pid) for child in children.split()]
        found += below
        todo += below
    return found


def _children(pid: int) -> Iterator[str]:
    """The children of each thread (proc_pid_task(5))."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                yield file.read()
    except OSError:
        return


def dead_children() -> set[int]:
    """Children of this program that have ended, and for which nobody has waited yet."""
    pids = (int(child) for children in _children(os.getpid()) for child in children.split())
    return {pid for pid in pids if _state(pid) == b"Z"}


def stop(init: int) -> None:
    """Stop all of them; raises TimeoutError when they fork faster than they can be stopped."""
    deadline = time.monotonic() + STOP_SECONDS
    while True:
        _send_all(init, _signal.SIGSTOP)
        if all(_is_stopped(pid) for pid in descendants(init)):
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the sandbox's processes do not stop")


def go_on(init: int) -> None:
    """Let all of them go on."""
    _send_all(init, _signal.SIGCONT)


def _send_all(init: int, number: int) -> None:
    space = _namespace(init)
    for pid in descendants(init):
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            # After it is held: the number may have been given to another process before.
            if space and _namespace(pid) == space:
                _signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _is_stopped(pid: int) -> bool:
    """Whether a process that was told to is stopped, or as good as gone.

    D too: a shell that waits for its vforked child, which is stopped before it became a program,
    would never be anything else. It stops before it runs again.
    """
    return _state(pid) in b"TtDZXx"


def _state(pid: int) -> bytes:
    """The letter of a process's state; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""
