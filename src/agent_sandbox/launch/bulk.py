"""Makes many mounts at once in a sandbox that bwrap has built and holds back.

    python -I -S bulk.py PID FD

bwrap reads the whole mount table for every bind, so a thousand masks cost it seconds and ten
thousand do not fit its argument limit. This program joins the sandbox's user and mount namespaces
(allowed to the user who owns them) and makes the rest with plain mount(2) calls. FD holds the list:
NUL-separated triples of operation, source and destination.
"""

from __future__ import annotations

import os
import sys
import time

# linux/mount.h, linux/nsfs.h, linux/sched.h
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
# machine → (SYS_setns, SYS_mount)
NUMBERS = {"x86_64": (308, 165), "aarch64": (268, 40)}
READY_SECONDS = 30.0

# Operations: a copy of a mount that is there already, a bind onto itself, and a read-only one.
COPY, PIN, READ_ONLY = "copy", "pin", "ro"


def main() -> int:
    """Join, mount, report by exit code."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, package)
    import fcntl

    from agent_sandbox.launch.syscalls import syscall
    from agent_sandbox.policy.model import MARKER

    pid, listing = int(sys.argv[1]), int(sys.argv[2])
    setns, mount = NUMBERS[os.uname().machine]
    words = _read(listing).split(b"\0")[:-1]
    _wait_until_built(f"/proc/{pid}/root{MARKER}")
    space = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    # bwrap's mounts belong to its first user namespace; the command runs in a second one.
    owner = fcntl.ioctl(space, NS_GET_USERNS)
    syscall(setns, owner, CLONE_NEWUSER)
    syscall(setns, space, CLONE_NEWNS)
    for operation, source, dest in zip(words[0::3], words[1::3], words[2::3], strict=True):
        flags = MS_BIND | MS_REC if operation == PIN.encode() else MS_BIND
        syscall(mount, source + b"\0", dest + b"\0", 0, flags, 0)
        if operation == READ_ONLY.encode():
            again = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
            syscall(mount, 0, dest + b"\0", 0, again, 0)
    return 0


def _read(fd: int) -> bytes:
    chunks = []
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)


def _wait_until_built(marker: str) -> None:
    """The marker is bwrap's last step, and shows at the process's root only after pivot_root(2)."""
    deadline = time.monotonic() + READY_SECONDS
    while not os.path.exists(marker):
        if time.monotonic() > deadline:
            raise TimeoutError("bwrap did not finish building the root")
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
