"""What is counted of the disk that a command fills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.pod import ending, held
from agent_sandbox.service.backend import tree_steps

from .ground import Pod, play, sh, start

pytestmark = pytest.mark.kernel

MIB = 1 << 20
# Holds 24 MiB in files without a name; with a word it first closes itself to others.
HOLD = """
import ctypes, os, sys, time
if "closed" in sys.argv:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
held = []
for number in range(3):
    file = open(f"/workspace/{number}", "wb")
    os.unlink(file.name)
    file.write(bytes(8 << 20)); file.flush(); os.fsync(file.fileno())
    held.append(file)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("word", ["open", "closed"])
def test_cannot_hide_files_by_removing_their_names(pod: Pod, form: str, word: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form, disk=16 * MIB)
        before = (await link.usage()).disk or 0
        assert before < MIB
        process = await start(link, "python3", "-c", HOLD, word, input=True)
        await process.until("held")
        used = (await link.usage()).disk or 0
        assert 24 * MIB <= used < 26 * MIB
        # The control: names alone tell nothing of it.
        assert tree_steps.disk_usage(str(pod.data)) < MIB
        await process.running.close_input()
        assert (await process.end()).code == 0
        assert ((await link.usage()).disk or 0) < MIB

    play(scene())


def test_a_program_that_cannot_be_read_is_taken_for_full(pod: Pod, form: str) -> None:
    """The kernel closes what was executed without the right to read it (execve(2))."""

    async def scene() -> None:
        link = await pod.claimed(inner=form, disk=16 * MIB)
        script = "cp /bin/sleep s; chmod {mode} s; ./s 1000 & echo on; wait"
        process = await start(link, "sh", "-c", script.format(mode="111"))
        await process.until("on")
        assert ((await link.usage()).disk or 0) > 16 * MIB
        await process.running.kill()
        await process.end()
        # The control.
        process = await start(link, "sh", "-c", script.format(mode="755"))
        await process.until("on")
        assert ((await link.usage()).disk or 0) < MIB
        await process.running.kill()
        await process.end()

    play(scene())


def test_a_program_that_wants_to_be_closed_goes_on(pod: Pod, form: str) -> None:
    """As ssh-agent does; it is told yes."""

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        code = "import ctypes; c = ctypes.CDLL(None); print(c.prctl(4, 0, 0, 0, 0), c.prctl(3))"
        assert await sh(link, f"python3 -c '{code}'") == "0 1\n"

    play(scene())


def test_a_process_that_comes_and_goes_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may live for a moment, and leave what it holds to the next."""
    file = tmp_path / "held"
    script = "import os, sys; f = open(sys.argv[1], 'wb'); f.write(bytes(1 << 20)); f.flush()\n"
    script += "os.unlink(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        gone = subprocess.Popen(["true"])
        gone.wait()
        looks = [[gone.pid], [gone.pid], [other.pid]]
        monkeypatch.setattr(ending, "descendants", lambda _: looks.pop(0) if looks else [])
        assert held.weight([1], tmp_path.stat().st_dev) >= MIB
        assert looks == []
        other.kill()
