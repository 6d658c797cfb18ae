"""How long a file is open when it is saved outside while it is hidden inside.

    make bench

A reader inside tries to open the file as fast as it can and says how long it could, for each of
some saves outside. What is shown is the time between the first and the last success.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAVES = int(os.environ.get("BENCH_SAVES", "40"))
READER = """
import os, sys, time
spans, first, last = [], 0.0, 0.0
print("ready", flush=True)
while not os.path.exists("end"):
    for _ in range(2000):
        try:
            os.close(os.open("secret", os.O_RDONLY))
        except OSError:
            if first:
                spans.append(last - first)
                first = 0.0
        else:
            last = time.perf_counter()
            first = first or last
print(*spans)
"""


def main() -> None:
    """Print one line."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as place:
        project = Path(place)
        (project / "secret").write_text("0")
        process = subprocess.Popen(
            [ROOT / "agent-sandbox", "--exclude", "secret", "python3", "-c", READER],
            cwd=project, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if process.stdout is None or process.stdout.readline() != "ready\n":
            sys.exit("the reader did not start")
        for number in range(SAVES):
            time.sleep(0.05)
            (project / "new").write_text(str(number))
            (project / "new").rename(project / "secret")
        time.sleep(0.2)
        (project / "end").touch()
        spans = [float(word) * 1000 for word in process.stdout.read().split()]
        process.wait()
    print(
        f"a hidden file saved outside {SAVES} times: a busy reader saw {len(spans)} of them, "
        f"open for {statistics.median(spans):.2f} ms (median), {max(spans):.2f} ms (longest)"
        if spans
        else f"a hidden file saved outside {SAVES} times: never seen by a busy reader"
    )


if __name__ == "__main__":
    main()
