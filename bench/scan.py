"""What it costs to compare a project's control files before and after a run.

    make bench

50,000 files in 2,550 directories, some of them packages and nested repositories. Each row is the
best of several rounds, also as a ratio to one plain walk of the same tree with os.scandir.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from agent_sandbox.host import scan, triggers  # noqa: E402 - the path comes first
from agent_sandbox.policy.model import Limits, Mount, Plan  # noqa: E402

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "10"))
TOPS, SUBS, FILES = 50, 50, 20
LIMIT_MS = 50.0


def build(project: Path) -> None:
    """Make the tree, and wait until its times are old enough to count."""
    for top in range(TOPS):
        base = project / f"d{top}"
        base.mkdir(parents=True)
        for sub in range(SUBS):
            inner = base / f"s{sub}"
            inner.mkdir()
            for number in range(FILES):
                (inner / f"file{number}.txt").write_bytes(b"")
        (base / "package.json").write_text('{"scripts": {"test": "true"}}')
        (base / "Makefile").write_text("all:\n")
    for name in ("d0/s0", "d1/s1", "d2/s2", "d3/s3"):
        git = project / name / ".git"
        for part in ("hooks", "info", "objects", "refs"):
            (git / part).mkdir(parents=True)
        (git / "HEAD").write_text("ref: refs/heads/main\n")
        (git / "config").write_text("[core]\n\tbare = false\n")
    time.sleep(scan.SETTLED / 1e9 + 0.1)


def plan_of(project: str) -> Plan:
    """As much of a plan as the scan looks at."""
    mount = Mount(kind="rw", dest=project, source=project, level="rw", rule="the project")
    values: dict[str, object] = dict.fromkeys(Plan.__fields__, "")
    values.update(mounts=(mount,), project=project, limits=Limits(), env={}, env_sources={})
    return Plan(**values)  # type: ignore[arg-type]


def plain_walk(top: str) -> None:
    """The least that a walk without memory does."""
    todo = [top]
    while todo:
        with os.scandir(todo.pop()) as scanned:
            todo += [item.path for item in scanned if item.is_dir(follow_symlinks=False)]


def timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1000


def measure(project: str, state: str) -> dict[str, float]:
    """The best of each row, in milliseconds."""
    best: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        best[name] = min(best.get(name, value), value)

    for number in range(ROUNDS):
        note("plain walk", timed(lambda: plain_walk(project)))
        for kind in ("cold", "warm"):
            if kind == "cold":
                shutil.rmtree(f"{state}/scans", ignore_errors=True)
            watch = triggers.Watch(plan_of(project), state, f"{kind}{number}")
            before = timed(watch.before)
            after = timed(watch.after)
            watch.close()
            note(f"{kind}: before", before)
            note(f"{kind}: after", after)
            note(f"{kind}: before and after", before + after)
        changed = Path(project) / "d9" / "s9" / f"new{number}"
        watch = triggers.Watch(plan_of(project), state, f"changed{number}")
        before = timed(watch.before)
        changed.write_text("x")
        note("warm, one change: before and after", before + timed(watch.after))
        watch.close()
        changed.unlink()
    return best


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-bench-") as directory:
        project = Path(os.path.realpath(directory)) / "project"
        state = f"{directory}/state"
        os.mkdir(state)
        build(project)
        best = measure(str(project), state)
    walk = best["plain walk"]
    print(f"{'what':<36} {'best ms':>8} {'× walk':>8}")
    for name, value in best.items():
        print(f"{name:<36} {value:8.1f} {value / walk:8.2f}")
    warm = best["warm: before and after"]
    print(f"\nwarm, both together: {warm:.1f} ms of {LIMIT_MS:.0f}")


if __name__ == "__main__":
    main()
