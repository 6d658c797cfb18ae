"""The thread that starts sandboxes, and a signal that comes while it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import agent_sandbox

SOURCE = str(Path(agent_sandbox.__file__).parent.parent)
# A handler raises while the job is under way, as Ctrl-C does.
INTERRUPTED = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from agent_sandbox.launch.spawner import spawner
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
undone = []
def job():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.3)
    return "first"
try:
    spawner().call(job, undone.append)
except Stop:
    print("stopped", undone, spawner().call(lambda: "second"))
"""


def test_an_interrupted_start_is_undone() -> None:
    """Neither is what it has made left alone, nor does the next start get it."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, SOURCE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "stopped ['first'] second\n", done.stderr
