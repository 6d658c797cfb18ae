"""A launcher for `Sandbox.wrap`: gives up authority, then becomes bwrap.

    python -I -S shed.py KEPT_FDS BWRAP --args FD -- COMMAND…

Runs as a script, in the process that another program started, so it finds its package by its own
place. It closes every descriptor that is not named, since the caller may have left some open.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Close, restrict, execute."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from agent_sandbox.launch import landlock

    kept = {0, 1, 2, *(int(fd) for fd in sys.argv[1].split(","))}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                # The directory's own descriptor, closed by the time it is listed.
                continue
    landlock.restrict(os.uname().machine)
    os.execve(sys.argv[2], sys.argv[2:], {})  # noqa: S606 - the point of this program


if __name__ == "__main__":
    main()
