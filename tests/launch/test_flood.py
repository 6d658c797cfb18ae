"""What counts as being in /tmp: names, and files without one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.launch.flood import Flood

LIMIT = 8 << 20
# Parts of a program that writes twice the limit, and holds on to it in one way or another.
WRITE = """
import ctypes, mmap, os, sys, threading
path = os.path.join(sys.argv[1], "x")
def write():
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    for _ in range(16):
        os.write(fd, os.urandom(1 << 20))
    os.fsync(fd)
    return fd
def hold():
    print("held", flush=True)
    sys.stdin.read()
"""
WAYS = {
    "a name": "write(); hold()",
    "a descriptor": "write(); os.unlink(path); hold()",
    "a mapping": (
        "fd = write(); kept = mmap.mmap(fd, 16 << 20)\\n"
        "os.close(fd); os.unlink(path)\\n"
        # mmap keeps a copy of the descriptor.
        "os.closerange(3, 100); hold()"
    ).replace("\\n", "\n"),
    "a thread's own descriptors": """
CLONE_FILES = 0x400
def apart():
    assert ctypes.CDLL(None).unshare(CLONE_FILES) == 0
    write(); os.unlink(path); hold()
thread = threading.Thread(target=apart); thread.start(); thread.join()
""",
    "descriptors of a process whose first thread has ended": """
def rest():
    write(); os.unlink(path); hold(); os._exit(0)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_cannot_hold_bytes_that_do_not_count(tmp_path: Path, way: str) -> None:
    """The control is the same directory before and after."""
    flood = Flood(LIMIT, str(tmp_path))
    assert not flood.exceeded()
    with subprocess.Popen(
        [sys.executable, "-c", WRITE + WAYS[way], str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert flood.exceeded()
        process.kill()
    (tmp_path / "x").unlink(missing_ok=True)
    assert not Flood(LIMIT, str(tmp_path))._measure()


def test_a_long_mapping_of_a_short_file_is_not_taken_for_its_size(tmp_path: Path) -> None:
    flood = Flood(LIMIT, str(tmp_path))
    fd = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 1 << 33)
    with mmap.mmap(fd, 1 << 33):
        os.close(fd)
        os.unlink(tmp_path / "x")
        assert not flood._measure()
