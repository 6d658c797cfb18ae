"""Directories that are held open for the engine, so that no link can lead it elsewhere.

The engine follows links as root at every start of a container. A descriptor cannot be swapped:
`/proc/PID/fd/N` of this process names what was opened here, component by component. It is given to
the engine as the device of a volume, since the engine mounts volumes in its own mount namespace;
what is bound into a container is looked up in the container's, where a descriptor of ours is none.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

from ...policy.docker.values import OWNER_LABEL
from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...policy.docker.values import Bind

MAX_PINS = 256
FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# Who listens on an engine's socket that is on this machine: the engine, or systemd for it.
LISTENERS = ("dockerd", "systemd")


class Pin(Record):
    """A directory that is held open, and the volume that stands for it."""

    name: str
    device: str
    owner: str

    def volume(self) -> dict[str, object]:
        """The body of the request that makes the volume."""
        return {
            "Name": self.name, "Driver": "local", "Labels": {OWNER_LABEL: self.owner},
            "DriverOpts": {"type": "none", "o": "bind", "device": self.device},
        }  # fmt: skip


class Pins:
    """Descriptors for as long as the run lasts: containers may be started again."""

    def __init__(self, binds: Iterable[Bind], owner: str) -> None:
        fixed = [b.host_path for b in binds if not (b.swappable or b.hidden) and b.directory]
        # The deepest first.
        self._roots = sorted(fixed, key=len, reverse=True)
        self._owner = owner
        self._held: dict[tuple[int, int], int] = {}

    def hold(self, path: str) -> Pin | None:
        """Hold a directory open; None if a link is in the way, or it is none."""
        root = next((r for r in self._roots if path.startswith(f"{r.rstrip('/')}/")), None)
        if root is None:
            return None
        try:
            fd = walk(root, path[len(root.rstrip("/")) + 1 :].split("/"))
        except OSError:
            return None
        info = os.fstat(fd)
        held = self._held.get((info.st_dev, info.st_ino))
        if held is not None or len(self._held) >= MAX_PINS:
            os.close(fd)
            if held is None:
                return None
            fd = held
        self._held[info.st_dev, info.st_ino] = fd
        return Pin(
            name=f"agent-sandbox-{self._owner}-{info.st_dev:x}-{info.st_ino:x}",
            device=f"/proc/{os.getpid()}/fd/{fd}",
            owner=self._owner,
        )


def walk(root: str, names: list[str]) -> int:
    """Open a path below a root, which nobody inside can replace, and follow no link."""
    fd = os.open(root, FLAGS | os.O_DIRECTORY)
    for name in names:
        try:
            if name in ("", ".", ".."):
                raise NotADirectoryError(name)
            deeper = os.open(name, FLAGS, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            # With O_PATH a link is opened itself. Volumes stand for directories only.
            os.close(fd)
            raise NotADirectoryError(name)
    return fd


def can_be_used(sock: socket.socket) -> bool:
    """Whether the engine sees this process under the same number, in the same /proc.

    Otherwise the name would lead it to a descriptor of somebody else.
    """
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid = struct.unpack("3i", credentials)[0]
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        # 0: not in our namespace at all.
        return False
    # A number for each namespace on the way: one means that it has the same as we have.
    return lines["Name"].strip() in LISTENERS and len(lines["NSpid"].split()) == 1
