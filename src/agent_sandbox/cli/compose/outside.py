"""Asks an agent's sockets from outside, for images that hold no program that could.

A child changes its root to the container's and becomes the container's user, so that links and
permissions are the agent's. From then on every path is the container's: it imports nothing any
more, or a module that lies there would run outside. Needs root, on the engine's own machine.
"""

from __future__ import annotations

import os
import socket
import sys

from ...compose import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_OUTPUT = 1 << 20


def ask(pid: int, targets: Sequence[str], rest: tuple[str, str, str]) -> str:
    """The probe's rows; nothing where it cannot be done."""
    who = identity(pid)
    if who is None or os.geteuid() != 0 or not targets:
        return ""
    tried = questions(rest)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receiver)
            _become(pid, *who)
            for target in targets:
                os.write(sender, (tried("outside", target) + "\n").encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as stream:
        data = stream.read(MAX_OUTPUT)
    os.waitpid(child, 0)
    return data.decode("utf-8", "replace")


def questions(rest: tuple[str, str, str]) -> Callable[[str, str], str]:
    """The probe's own function: one text, whether it runs inside or here."""
    namespace: dict[str, object] = {"sys": sys, "socket": socket}
    body = probe.PYTHON.replace("import sys, socket\n", "").replace(
        "name, image, label = sys.argv[1:4]", ""
    )
    namespace.update(zip(("name", "image", "label"), rest, strict=True))
    exec(compile(body, "probe", "exec"), namespace)  # noqa: S102 - our own constant
    tried = namespace["tried"]
    if not callable(tried):
        raise TypeError("the probe has no function")
    return tried


def identity(pid: int) -> tuple[int, int, list[int]] | None:
    """User, group and further groups of a process; None when it is gone or elsewhere."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        groups = [int(word) for word in fields["Groups"].split()]
        return int(fields["Uid"].split()[1]), int(fields["Gid"].split()[1]), groups
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _become(pid: int, uid: int, gid: int, groups: list[int]) -> None:
    sys.meta_path.clear()
    sys.path.clear()
    sys.path_hooks.clear()
    os.chroot(f"/proc/{pid}/root")
    os.chdir("/")
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
