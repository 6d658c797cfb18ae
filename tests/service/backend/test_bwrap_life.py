"""The life of sandboxes and of the service: deleted, reconciled, killed at any moment."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.service.problems import Problem

from .lab import living

if TYPE_CHECKING:
    from .conftest import Bench
    from .lab import Lab

pytestmark = pytest.mark.kernel
SECONDS = 30.0
# Filled in for each scene.
WORD = ""


def test_delete_ends_what_runs_and_removes_everything(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        outside = Path(lab.data) / "mine"
        outside.write_text("kept")
        script = (
            f"ln -s {lab.data} link; ln -s / root; mkdir -p a/b c; echo x > c/f; chmod 000 c a;"
            "mkfifo pipe; touch -- -rf; python3 -c 'import socket; socket.socket(1).bind(\"s\")';"
            "echo up; sleep 101.1"
        )
        process = await lab.start(box, "sh", "-c", script)
        await process.until("up")
        await lab.backend.delete(box)
        ended = await process.end()
        # Twice is no error.
        await lab.backend.delete(box)
        return ended.code, os.listdir(f"{lab.data}/sandboxes"), outside.read_text()

    assert bench.play(scene) == [137, [], "kept"]


def test_deletes_trees_however_they_are_built(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        code = (
            "import os\nfor d in range(20):\n os.mkdir(f'd{d}')\n"
            " for n in range(1000): open(f'd{d}/{n}', 'w').close()\n"
            "os.mkdir('deep'); os.chdir('deep')\n"
            "for _ in range(2000): os.mkdir('d'); os.chdir('d')"
        )
        _, ended = await lab.run(box, "python3", "-c", code)
        before = time.monotonic()
        await lab.backend.delete(box)
        return ended.code, os.listdir(f"{lab.data}/sandboxes"), time.monotonic() - before

    code, left, seconds = bench.play(scene)
    assert (code, left) == (0, [])
    assert seconds < 30


def test_what_cannot_be_removed_is_said_and_tried_again(bench: Bench) -> None:
    if bench.identity.uid != 0:
        pytest.skip("only root can make a file that root cannot remove")

    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        await lab.write(box, "/workspace/f", b"x")
        path = f"{lab.data}/sandboxes/{box.id}/workspace/f"
        # Immutable (FS_IOC_SETFLAGS, FS_IMMUTABLE_FL): a command inside has no right to do that.
        held = os.open(path, os.O_RDONLY)
        fcntl.ioctl(held, 0x40086602, struct.pack("l", 0x10))
        code = ""
        try:
            await lab.backend.delete(box)
        except Problem as problem:
            code = problem.code
        stray = len(os.listdir(f"{lab.data}/sandboxes"))
        still = await lab.backend.reconcile({})
        fcntl.ioctl(held, 0x40086602, struct.pack("l", 0))
        await lab.backend.reconcile({})
        return code, stray, len(still), os.listdir(f"{lab.data}/sandboxes")

    assert bench.play(scene) == ["BACKEND_UNAVAILABLE", 1, 0, []]


def test_reconcile_keeps_the_known_and_removes_the_rest(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        one, two = await lab.sandbox("sbx-known"), await lab.sandbox("sbx-stray")
        for box in (one, two):
            await lab.write(box, "/workspace/f", b"x")
        found = await lab.backend.reconcile({one.id: one, "sbx-lost": two})
        return sorted(found), os.listdir(f"{lab.data}/sandboxes"), await lab.sh(one, "cat f")

    assert bench.play(scene) == [["sbx-known"], ["sbx-known"], "x"]


def test_nothing_survives_the_service(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox("sbx-kept", pids=100)
        script = "trap '' TERM HUP INT; setsid sleep 102.2 & sleep 102.2 & echo up; wait"
        process = await lab.start(box, "sh", "-c", script)
        await process.until("up")
        sys.stdout.write("up\n")
        sys.stdout.flush()
        await asyncio.sleep(1000)
        return None

    process = bench.start(scene)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    # They are forked when it says so; what they execute comes a moment later.
    assert soon(lambda: bool(living("102.2")))
    process.kill()
    process.wait()
    process.stdout.close()
    assert soon(lambda: not living("102.2"))

    async def after(lab: Lab) -> object:
        return os.listdir(f"{lab.data}/sandboxes")

    # The next service removes what its store does not know.
    assert bench.play(after) == []


def test_nothing_survives_a_service_that_is_killed_at_any_moment(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        async def one(number: int) -> None:
            box = await lab.sandbox(f"sbx-{WORD}-{number}")
            while True:
                await lab.run(box, "sh", "-c", "sleep 0.01", WORD)

        sys.stdout.write("up\n")
        sys.stdout.flush()
        await asyncio.gather(*(one(number) for number in range(4)))
        return None

    for round_ in range(6):
        word = f"round-{os.getpid()}-{bench.identity.uid}-{round_}"
        process = bench.start(scene, WORD=word)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(random.uniform(0.0, 0.5))
        process.kill()
        process.wait()
        process.stdout.close()
        # What is left may be a bwrap whose parent was killed before the two were tied together:
        # it runs nothing, and the next service ends it.
        assert soon(lambda word=word: not commands(word)), word

    async def after(lab: Lab) -> object:
        return os.listdir(f"{lab.data}/sandboxes"), lab.backend._mark

    left, mark = bench.play(after)
    assert left == []
    assert not [pid for pid in all_pids() if f"bwrap-{mark}-" in words(pid)]


def commands(word: str) -> list[int]:
    """Processes with a word among their arguments that are no bwrap."""
    return [pid for pid in living(word) if not words(str(pid)).startswith("bwrap-")]


def soon(condition: object) -> bool:
    deadline = time.monotonic() + SECONDS
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def words(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
