"""Ends processes, all of them: those of one command, or those of the whole sandbox.

Whoever calls this is a child subreaper: what a command has left behind becomes its child, however
often it forked and whatever session it made. So when it has no children any more, nothing is left.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from resource import struct_rusage
else:
    import _signal

# How long the last process may take, in seconds; one that the kernel holds (a dead file server)
# cannot be ended by anybody.
SECONDS = 3.0
PAUSE = 0.001


def children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        # Gone meanwhile; or a kernel without these files (gVisor).
        return found if _has_children() else _by_parent(pid)
    except OSError:
        pass
    return found


def _has_children() -> bool:
    return os.path.exists("/proc/thread-self/children")


def _by_parent(pid: int) -> list[int]:
    """The same where the kernel does not list them."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == pid]


def _parent(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def descendants(pid: int, keep: frozenset[int] = frozenset()) -> list[int]:
    """Everything below a process, but for what is below those that are kept."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = [child for child in children(todo.pop()) if child not in keep]
        found += below
        todo += below
    return found


class Spent:
    """What the processes of one command have used. The process that waits serves several."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self.max_rss_kb = 0

    def add(self, used: struct_rusage) -> None:
        """One more that has ended, with those whose status it had taken itself."""
        self.cpu += used.ru_utime + used.ru_stime
        self.max_rss_kb = max(self.max_rss_kb, used.ru_maxrss)


def end_below(seconds: float = SECONDS, spent: Spent | None = None) -> bool:
    """End all descendants of this process and wait for them; False when some do not end.

    They may fork meanwhile: the next round finds what this one has missed.
    """
    deadline = time.monotonic() + seconds
    while True:
        for pid in descendants(os.getpid()):
            # The number is still theirs: nobody but us takes the status of our children, and a
            # process further down that ends becomes ours first, or its parent's.
            _kill(pid)
        if not _reap(spent or Spent()):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, _signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _reap(spent: Spent) -> bool:
    """Take the status of whoever has ended; whether any children are left."""
    while True:
        try:
            pid, _, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True
        spent.add(used)


def hold(pids: list[int], *, on: bool) -> bool:
    """Stop, or let go on, everything below these processes; False when some do not stop."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = [below for pid in pids for below in descendants(pid)]
        for pid in found:
            try:
                os.kill(pid, _signal.SIGSTOP if on else _signal.SIGCONT)
            except (ProcessLookupError, PermissionError):
                continue
        if not on or all(_is_stopped(pid) for pid in found):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)


def _is_stopped(pid: int) -> bool:
    """Stopped, or as good as gone; D as well, as in `launch.kin`."""
    return _state(pid) in b"TtDZXx"


def is_halted(pid: int) -> bool:
    """Stopped by a signal."""
    return _state(pid) == b"T"


def is_over(pid: int) -> bool:
    """Gone, or ended."""
    return _state(pid) in (b"", b"Z", b"X", b"x")


def _state(pid: int) -> bytes:
    """As in proc(5); nothing: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""
