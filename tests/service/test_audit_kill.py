"""`kill -9` in the middle of writes: the chain verifies, and nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from .audit_trails import findings, logs, split

SOURCE = Path(__file__).resolve().parents[2] / "src"
TURNS = 200

# One process that forks a writer for each word on its input: a start costs a millisecond. The
# writer acknowledges each line by its number, and some lines are larger than pages: a kill can
# leave a part of those.
NURSERY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.audit import Audit
for order in sys.stdin:
    directory, seed = order.split()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.write(1, b"dead\\n")
        continue
    os.write(1, f"child {os.getpid()}\\n".encode())
    audit = Audit(directory, rotate_bytes=1 << 20)
    for number in range(2000):
        size = (int(seed) * 7919 + number * 104729) % 97
        filler = "x" * (size * 3000 if size > 85 else size)
        seq = audit.note(None, "test", {"seed": seed, "number": number, "filler": filler})
        os.write(1, f"{seq} {seed}/{number}\\n".encode())
"""


class Nursery:
    """Writers, one at a time, to be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.buffer = b""

    def line(self) -> str:
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the nursery has died"
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()

    def turn(self, trail: Path, seed: int, chance: random.Random) -> dict[int, str]:
        """Let one write, kill it at a random moment; what it had acknowledged."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{trail} {seed}\n".encode())
        self.process.stdin.flush()
        child = int(self.line().split()[1])
        acknowledged: dict[int, str] = {}

        def take(line: str) -> None:
            seq, _, what = line.partition(" ")
            acknowledged[int(seq)] = what

        # Some are killed while they start and recover, most of them somewhere in their writes.
        for _ in range(chance.choice([0, 0, 1, 3, 10, 30])):
            take(self.line())
        until = time.perf_counter() + chance.random() * 0.005
        while time.perf_counter() < until:
            if select.select([self.process.stdout], [], [], 0)[0]:
                take(self.line())
        os.kill(child, signal.SIGKILL)
        while (line := self.line()) != "dead":
            take(line)
        return acknowledged

    def close(self) -> None:
        # A writer too, if there is one: it has our pipe.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_chain_and_loses_nothing(tmp_path: Path) -> None:
    """200 times; both before and after the next start."""
    chance = random.Random(20261116)
    nursery = Nursery()
    seen: Counter[str] = Counter()
    try:
        for series in range(10):
            trail = tmp_path / f"audit-{series}"
            acknowledged: dict[int, str] = {}
            for turn in range(TURNS // 10):
                new = nursery.turn(trail, series * 100 + turn, chance)
                assert not new.keys() & acknowledged.keys(), "a number was given twice"
                acknowledged |= new
                if trail.exists() and (trail / "head").exists():
                    assert findings(trail) == [], f"turn {turn} of {series}"
                    torn = logs(trail) and not logs(trail)[-1].read_bytes().endswith(b"\n")
                    seen["torn"] += bool(torn)
                seen["turns"] += 1
            present = {
                record["seq"]: f"{record['request']['seed']}/{record['request']['number']}"
                for path in logs(trail)
                for line in split(path)
                if line.endswith(b"\n") and (record := json.loads(line))["action"] == "test"
            }
            lost = {seq: what for seq, what in acknowledged.items() if present.get(seq) != what}
            assert lost == {}
            seen["lines"] += len(present)
            # A line that was written and not yet acknowledged may stay.
            seen["more"] += len(present) - len(acknowledged)
    finally:
        nursery.close()
    assert seen["turns"] == TURNS
    assert seen["lines"] > TURNS
    # The test meets what it is for.
    assert seen["torn"] > 0, seen
    assert seen["more"] > 0, seen


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from agent_sandbox.service.audit import Audit
from agent_sandbox.service.problems import Problem
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
audit = Audit(sys.argv[2])
for number in range(5):
    audit.write(None, "before", target=str(number))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
codes = set()
for number in range(20):
    try:
        audit.write(None, "while", target=str(number))
    except Problem as problem:
        codes.add(problem.code)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
audit.write(None, "after")
print(audit.seq, *codes)
"""


def test_a_full_disk_refuses_the_line_and_breaks_nothing(tmp_path: Path) -> None:
    """The kernel takes a part of a line and then no more: by a limit, as by a full disk."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.fail("files are limited here already")
    trail = tmp_path / "audit"
    done = subprocess.run(
        [sys.executable, "-c", FULL, SOURCE, trail], capture_output=True, text=True, check=True
    )
    seq, code = done.stdout.split()
    assert code == "AUDIT_UNAVAILABLE"
    assert findings(trail) == []
    actions = [json.loads(line)["action"] for path in logs(trail) for line in split(path)]
    assert len(actions) == int(seq) < 25
    # What was refused has left nothing that would have to be repaired.
    assert set(actions) == {"before", "while", "after"}
    assert actions[-1] == "after"
