"""What a start costs: one table, one run, each row as a ratio to bare bwrap.

    make bench

Rows are measured in turns, round by round, so that a busy moment hits all of them alike; the best
of all rounds counts. Needs bwrap; firejail and docker are measured where they are installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from agent_sandbox import Policy, Sandbox  # noqa: E402 - the path comes first

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "60"))
BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
POLICY = {"network": "on", "filesystem": {"exclude": [".env"], "ro": ["vendor"]}}
TOML = 'network = "on"\n[filesystem]\nexclude = [".env"]\nro = ["vendor"]\n'


def spawn(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> Callable[[], None]:
    """A row that starts a process."""

    def start() -> None:
        subprocess.run(argv, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)

    return start


def rows(work: Path) -> dict[str, Callable[[], None]]:
    """Everything to measure, by name."""
    plain, with_json, with_toml = (work / name for name in ("plain", "json", "toml"))
    for project in (plain, with_json, with_toml):
        project.mkdir()
        (project / ".env").write_text("SECRET=1\n")
        (project / "vendor").mkdir()
    (with_json / ".agent-sandbox.json").write_text(json.dumps(POLICY))
    (with_toml / ".agent-sandbox.toml").write_text(TOML)
    launcher = str(ROOT / "agent-sandbox")
    subprocess.run([launcher, "--version"], check=True, stdout=subprocess.DEVNULL)
    python = os.path.realpath(sys.executable)
    sandbox = Sandbox(Policy(project=str(plain)))
    table = {
        "bwrap … true": spawn([*BWRAP, "true"], plain),
        "true": spawn(["true"], plain),
        "python -c pass": spawn([python, "-c", "pass"], plain),
        "python -I -S -c pass": spawn([python, "-I", "-S", "-c", "pass"], plain),
        "agent-sandbox true": spawn([launcher, "true"], plain),
        "agent-sandbox --network=off true": spawn([launcher, "--network=off", "true"], plain),
        "agent-sandbox --network=allow true": spawn([launcher, "--network=allow", "true"], plain),
        "agent-sandbox true (JSON policy)": spawn([launcher, "true"], with_json),
        "agent-sandbox true (TOML policy)": spawn([launcher, "true"], with_toml),
        "library run(['true'])": lambda: _check(sandbox.run(["true"]).code),
    }
    if shutil.which("firejail"):
        table["firejail --noprofile true"] = spawn(
            ["firejail", "--quiet", "--noprofile", "true"], plain
        )
    image = _docker_image()
    if image:
        table["docker run --rm --network none"] = spawn(
            ["docker", "run", "--rm", "--network", "none", image, "true"], plain
        )
    return table


def _check(code: int) -> None:
    if code:
        raise SystemExit(f"the sandbox failed with {code}")


def _docker_image() -> str:
    """A local image to run, when an engine answers."""
    if not shutil.which("docker"):
        return ""
    listed = subprocess.run(
        ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return listed.stdout.split("\n", 1)[0] if listed.returncode == 0 else ""


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-bench-") as directory:
        table = rows(Path(directory))
        best = dict.fromkeys(table, float("inf"))
        for number in range(ROUNDS):
            for name, run in table.items():
                if name.startswith("docker") and number >= 5:
                    continue
                begun = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begun)
    bare = best["bwrap … true"]
    print(f"{'what':<36} {'best ms':>8} {'× bwrap':>8}")
    for name, seconds in best.items():
        print(f"{name:<36} {seconds * 1000:8.1f} {seconds / bare:8.2f}")
    both = best["python -c pass"] + bare
    print()
    print(f"agent-sandbox true / (python + bwrap): {best['agent-sandbox true'] / both:.2f}")
    off, allow = (best[f"agent-sandbox --network={mode} true"] for mode in ("off", "allow"))
    print(f"network allow - off: {(allow - off) * 1000:.1f} ms (bar: 30)")
    lib = best["library run(['true'])"]
    print(f"library / bwrap: {lib / bare:.2f}")


if __name__ == "__main__":
    main()
