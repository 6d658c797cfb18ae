"""Inherited authority: descriptors, keyrings, capabilities and standard streams of the caller."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from escape.attack import ROOT, Attack, Run, Scene, Trial, finish, trials
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from escape.attack import Drive

pytestmark = pytest.mark.kernel

STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
# machine → numbers of add_key, request_key, keyctl
KEY_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
# Put a key into a new session keyring (or the user's, -4), then become the sandbox.
HOLDER = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
keyring, token, secret = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3].encode()
if keyring == -3:
    libc.syscall({KEY_CALLS[2]}, 1, 0)
key = libc.syscall({KEY_CALLS[0]}, b"user", b"agsbx-" + token, secret, len(secret), keyring)
if key < 0:
    sys.exit("no keyrings here: " + os.strerror(ctypes.get_errno()))
# KEYCTL_SET_TIMEOUT: nothing is left of it in a minute.
libc.syscall({KEY_CALLS[2]}, 15, key, 60)
os.execvp(sys.argv[4], sys.argv[4:])
"""
SEARCH = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
name = b"agsbx-" + token.encode()
data = ctypes.create_string_buffer(200)
# KEYCTL_LINK: to possess a keyring is to possess its keys.
libc.syscall({KEY_CALLS[2]}, 8, -4, -3)
found = [libc.syscall({KEY_CALLS[2]}, 10, ring, b"user", name, 0) for ring in (-3, -4, -5)]
found.append(libc.syscall({KEY_CALLS[1]}, b"user", name, 0, 0))
for key in found:
    size = libc.syscall({KEY_CALLS[2]}, 11, key, data, 200) if key > 0 else -1
    print(data.raw[:size].decode() if size > 0 else "nothing")
"""


def holding(opened: Callable[[Scene], int]) -> Drive:
    """The caller has left a descriptor open."""

    def drive(scene: Scene, argv: Sequence[str]) -> Run:
        fd = opened(scene)
        try:
            return finish(scene.popen(argv, pass_fds=[fd], **STREAMS))
        finally:
            os.close(fd)

    return drive


def directory(scene: Scene) -> int:
    return os.open(scene.home, os.O_RDONLY | os.O_DIRECTORY)


def read_only_file(scene: Scene) -> int:
    return os.open(scene.home / "notes", os.O_RDONLY)


def memory(scene: Scene) -> int:
    fd = os.memfd_create("agsbx")
    os.write(fd, scene.secret.encode())
    return fd


def connection(scene: Scene) -> int:
    """A connection to a service that waits for its next order."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    peer.connect(f"\0agsbx-{scene.token}")
    return peer.detach()


def with_key(keyring: int) -> Drive:
    """The caller has a key in a keyring."""

    def drive(scene: Scene, argv: Sequence[str]) -> Run:
        start = [scene.runner.python, "-I", "-c", HOLDER, str(keyring), scene.token, scene.secret]
        run = finish(scene.popen([*start, *argv], **STREAMS))
        must_work("no keyrings" not in run.text, run.text)
        return run

    return drive


def watched(scene: Scene, argv: Sequence[str]) -> Run:
    """Look at a process of the sandbox from outside while it runs, then let it end."""
    process = scene.popen(argv, **{**STREAMS, "stdin": subprocess.PIPE})
    assert eventually(scene.asleep)
    scene.kept["status"] = Path(f"/proc/{scene.asleep()[0]}/status").read_text()
    return finish(process)


def has_capabilities(scene: Scene) -> bool:
    sets = re.findall(r"^Cap\w+:\t(\w+)$", scene.kept["status"], re.MULTILINE)
    assert len(sets) == 5
    return any(int(bits, 16) for bits in sets)


DESCRIPTORS = """
    for fd in /proc/self/fd/*; do
        case $fd in */0 | */1 | */2) continue ;; esac
        %s
    done
"""

ATTACKS = (
    Attack(
        name="directory-of-the-caller", invariant=7, what="read by way of an open directory",
        setup=lambda s: s.hide("~/.ssh/id"), drive=holding(directory),
        script=DESCRIPTORS % "cat $fd/.ssh/id", without="closed descriptors",
    ),
    Attack(
        name="write-by-a-directory", invariant=7, what="write by way of an open directory",
        setup=lambda s: s.guard("~/.bashrc"), drive=holding(directory),
        script=DESCRIPTORS % "echo evil > $fd/.bashrc", without="closed descriptors",
    ),
    Attack(
        name="reopen-a-file-of-the-caller", invariant=7, what="read-only, opened anew for writing",
        setup=lambda s: s.guard("~/notes"), drive=holding(read_only_file),
        script=DESCRIPTORS % "echo evil > $fd", without="closed descriptors",
    ),
    Attack(
        name="memory-of-the-caller", invariant=7, what="a file that only exists in memory",
        drive=holding(memory), script=DESCRIPTORS % "cat $fd", without="closed descriptors",
    ),
    Attack(
        name="connection-of-the-caller", invariant=7, what="send on an open socket",
        setup=lambda s: s.listen(f"\0agsbx-{s.token}", socket.SOCK_DGRAM),
        drive=holding(connection), flags=("--network=off",), python=True,
        script="""
import os
for name in os.listdir("/proc/self/fd"):
    try: int(name) > 2 and os.write(int(name), b"x")
    except OSError as error: print(error)
""", without="closed descriptors",
    ),
    Attack(
        name="session-keyring", invariant=7, what="keys that the caller possesses",
        drive=with_key(-3), python=True, script=SEARCH, without="new keyring + seccomp",
    ),
    Attack(
        name="user-keyring", invariant=7, what="keys of the user", who=(ROOT,),
        drive=with_key(-4), python=True, script=SEARCH, without="user namespace + seccomp",
    ),
    Attack(
        name="capabilities", invariant=7, what="as seen from outside while it runs",
        drive=watched, script="sleep $mark & read line", escaped=has_capabilities,
        without="dropped capabilities",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_inherit_authority(trial: Trial) -> None:
    trial.run()
