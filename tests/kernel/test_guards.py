"""Limits that hold without being asked for: processes, memory, core dumps, the private /tmp."""

from __future__ import annotations

import pytest

from .conftest import World

THREADS = """
import _thread, time, sys
_thread.stack_size(32768)
count = 0
try:
    while count < 5000:
        _thread.start_new_thread(time.sleep, (60,))
        count += 1
except RuntimeError:
    pass
print(count)
sys.stdout.flush()
import os
time.sleep(2)
os._exit(0)
"""


def test_cannot_start_processes_without_end(world: World) -> None:
    """By default: an ordinary user's are refused, root's sandbox is ended. The control lifts it."""
    done = world.sandbox("python3", "-c", THREADS)
    if world.runner.uid:
        assert 3000 < int(done.stdout) < 4097
    else:
        assert (done.returncode, done.stdout) == (137, "5000\n")
        assert "pids limit" in done.stderr
    assert int(world.sandbox("--pids", "none", "python3", "-c", THREADS).stdout) == 5000


def test_the_kernel_ends_the_sandbox_first_when_memory_is_short(world: World) -> None:
    """And nobody inside can change that."""
    done = world.sh("cat /proc/self/oom_score_adj; echo 0 > /proc/self/oom_score_adj; "
                    "cat /proc/self/oom_score_adj")  # fmt: skip
    assert done.stdout == "500\n500\n"
    control = world.outside("cat", "/proc/self/oom_score_adj")
    assert int(control.stdout) < 500


def test_cannot_reach_the_host_s_crash_handler(world: World) -> None:
    """A dump of one byte is none at all, also to a program that core_pattern names."""
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert world.sandbox("python3", "-c", code).stdout == "(1, 1)\n"
    raised = world.sh("ulimit -c unlimited; ulimit -c")
    assert "unlimited" not in raised.stdout


WRITE = "import os\nblock = bytes(1 << 20)\n"
FLOODS = {
    "a file": WRITE + "f = open('/tmp/x', 'wb')\nfor _ in range(400): f.write(block)",
    "a deleted file": WRITE
    + "f = open('/tmp/x', 'wb'); os.unlink('/tmp/x')\nfor _ in range(400): f.write(block)\n"
    "f.flush(); os.fsync(f.fileno())\nimport time\ntime.sleep(3)",
    "a closed directory": WRITE
    + "os.mkdir('/tmp/d'); f = open('/tmp/d/x', 'wb'); os.chmod('/tmp/d', 0)\n"
    "for _ in range(400): f.write(block)\nimport time\ntime.sleep(3)",
    "the workspace": WRITE
    + "f = open(os.environ['AGENT_WORK_DIR'] + '/x', 'wb')\nfor _ in range(400): f.write(block)\n"
    "import time\ntime.sleep(3)",
    "many files": "import os\nfor n in range(40000): open(f'/tmp/{n}', 'w').close()\n"
    "import time\ntime.sleep(3)",
}


@pytest.mark.parametrize("how", FLOODS)
def test_cannot_flood_the_private_tmp(world: World, how: str) -> None:
    """With bytes or with files; the control lifts the limit, and nothing stays on disk."""
    script = FLOODS[how] + "\nimport time\ntime.sleep(1.5)\nprint('through')"
    done = world.sandbox("--tmp-size", "40M", "python3", "-c", script)
    assert done.returncode == 137
    assert done.stdout == ""
    assert "tmp-size" in done.stderr
    assert world.workspaces() == []
    control = world.sandbox("--tmp-size", "none", "python3", "-c", script)
    assert control.stdout == "through\n"


def test_the_library_tells_of_a_flood(world: World) -> None:
    """As an exceeded limit of the result."""
    code = (
        "import os\nfrom agent_sandbox import Policy, Sandbox\n"
        "s = Sandbox(Policy(tmp_size='40M'))\n"
        f"r = s.run(['python3', '-c', {FLOODS['a closed directory']!r}], capture=True)\n"
        "print(r.exceeded, r.code)\n"
    )
    done = world.python(code, cwd=world.project)
    assert done.stdout == "tmp-size 137\n", done.stderr
