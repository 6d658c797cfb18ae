"""Resources: a limit holds for all processes together, whatever they do."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from escape.attack import ROOT, USER, Attack, Run, Scene, Trial, finish, trials

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.kernel

PIDS = 20
# More than the limit, and ends by itself; counted from outside.
FORKS = """
i=0
while [ $i -lt 60 ]; do sleep $mark & i=$((i + 1)); done
sleep 0.3
kill $(jobs -p) 2>/dev/null
"""
LASTING = """
i=0
while [ $i -lt 60 ]; do sleep $mark & i=$((i + 1)); done
sleep 2
echo went on
kill $(jobs -p) 2>/dev/null
"""
SESSIONS = """
import os, time
for _ in range(60):
    try: child = os.fork()
    except OSError: break
    if not child:
        os.setsid()
        os.execvp("sleep", ["sleep", mark])
time.sleep(0.3)
"""
MEMORY = """
import os
def take(megabytes):
    block = bytearray(megabytes << 20)
    block[::4096] = b"x" * len(block[::4096])
    return block
pairs = []
for number in range(4):
    reader, writer = os.pipe()
    if os.fork() == 0:
        held = take(60)
        os.write(writer, b"x")
        os.read(os.pipe()[0], 1)
    os.close(writer)
    pairs.append(os.read(reader, 1))
print("held", 60 * pairs.count(b"x"), "megabytes")
"""

FLOOD = """
import time
block = bytes(1 << 20)
with open("/tmp/flood", "wb") as file:
    for _ in range(60):
        file.write(block)
time.sleep(1.5)
print("kept 60 megabytes")
"""


def counted(scene: Scene, argv: Sequence[str]) -> Run:
    """Count the sandbox's processes from outside for as long as it runs."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = scene.popen(argv, **streams)
    while process.poll() is None:
        scene.kept["most"] = max(scene.kept.get("most", 0), len(scene.asleep()))
        time.sleep(0.01)
    return finish(process)


def too_many(scene: Scene) -> bool:
    return bool(scene.kept["most"] > PIDS)


ATTACKS = (
    Attack(
        name="fork-bomb", invariant=8, what="more processes than --pids", drive=counted,
        flags=("--pids", str(PIDS)), script=FORKS, escaped=too_many, without="limits",
    ),
    Attack(
        name="fork-bomb-of-sessions", invariant=8, what="each in a session of its own",
        drive=counted, flags=("--pids", str(PIDS)), python=True, script=SESSIONS,
        escaped=too_many, without="limits",
    ),
    Attack(
        name="fork-bomb-without-a-limit", invariant=8, what="nobody has asked for one",
        who=(USER,), drive=counted, conditions=("small default limits",), script=FORKS,
        escaped=too_many, without="default limits",
    ),
    Attack(
        name="fork-bomb-of-root", invariant=8, what="nobody has asked for a limit; it goes on",
        who=(ROOT,), conditions=("small default limits",), script=LASTING,
        escaped=lambda s: "went on" in s.output, without="default limits",
    ),
    Attack(
        name="memory-of-a-tree", invariant=8, what="each process below --memory, not all",
        who=(ROOT,), flags=("--memory", "100M"), python=True, script=MEMORY,
        escaped=lambda s: "held 240 megabytes" in s.output, without="limits",
    ),
    Attack(
        name="flood-of-tmp", invariant=8, what="more than the private /tmp may hold",
        flags=("--tmp-size", "20M"), python=True, script=FLOOD,
        escaped=lambda s: "kept 60 megabytes" in s.output, without="size of /tmp",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_exceed_a_limit(trial: Trial) -> None:
    trial.run()
