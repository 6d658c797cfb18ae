"""The first process of a sandbox: only when it is gone is the sandbox over.

The kernel kills a pid namespace with its first process, which lasts until the last of the others
has gone (pid_namespaces(7)); but its arguments and mounts, by which it could be found, vanish at
the beginning of that. Whoever then clears up after a killed run would free names that a command
inside can still take. So the process is written down in the run's lock file before the command is
let go, with the time of its start, because numbers are used again.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

# How long the kernel may take to end all processes of a sandbox, in seconds.
END_SECONDS = 10.0


def note(lock: str, init: int) -> None:
    """Write down the first process of a run. Raises ProcessLookupError when it is gone."""
    start = _start_of(init)
    if not start:
        raise ProcessLookupError("the sandbox has ended")
    fd = os.open(lock, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.write(fd, b"%d %s\n" % (init, start))
    os.close(fd)


def end(lock: int) -> bool:
    """End the sandbox of a run if it still lives; False when it does not go."""
    words = os.pread(lock, 64, 0).split()
    if len(words) != 2:
        # It was never let go.
        return True
    pid, start = int(words[0]), words[1]
    if _start_of(pid) != start:
        return True
    # Only here: it has ended already after nearly every run.
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # Once more: from here on the number stands for the process that we hold.
        if _start_of(pid) != start:
            return True
        _signal.pidfd_send_signal(handle, _signal.SIGKILL)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(int(END_SECONDS * 1000)))
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)


def _start_of(pid: int) -> bytes:
    """When a process started, in clock ticks since boot; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name may have spaces and brackets in it. The rest begins with field 3 of 22.
            return file.read().rpartition(b")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return b""
