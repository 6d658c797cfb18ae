"""Installs the agents of package-lock.json beside the repository, once per version of the lock.

    install.py [--all]     prints the prefix: `bin` and `lib/node_modules`, as npm -g has them

Install scripts are not run by npm: two packages have one that puts the native program in its
place, and these are called by name, with the Node that is installed here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs")
FLAGS = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
SECONDS = 900


def cache() -> Path:
    """Where prefixes are: root's must be readable to the user who runs the agents."""
    if os.geteuid() == 0:
        return Path("/var/cache/agent-sandbox-tests")
    named = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named).expanduser() / "agent-sandbox-tests"


def prefix(*, every: bool) -> Path:
    """The directory for this lock; `every` adds the agents that CI leaves out."""
    lock = (HERE / "package-lock.json").read_bytes()
    kind = "all" if every else "main"
    return cache() / f"agents-{hashlib.sha256(lock).hexdigest()[:12]}-{kind}"


def found() -> Path | None:
    """An installed prefix."""
    return next((p for p in (prefix(every=True), prefix(every=False)) if p.exists()), None)


def install(*, every: bool) -> Path:
    """Install what is missing; a prefix appears complete, or not at all."""
    target = prefix(every=every)
    for there in (prefix(every=True), target):
        if there.exists():
            return there
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o755)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    made.chmod(0o755)
    try:
        _fill(made, every=every)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return target


def _fill(root: Path, *, every: bool) -> None:
    lib = root / "lib"
    lib.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, lib)
    omit = () if every else ("--omit=dev",)
    _do("npm", "ci", *FLAGS, *omit, cwd=lib)
    modules = lib / "node_modules"
    # Of what the package `node` would fetch in an install script, pinned by the lock instead.
    (node,) = modules.glob("node-linux-*/bin/node")
    for script in SCRIPTS:
        _do(str(node), str(modules / script), cwd=(modules / script).parent)
    (root / "bin").mkdir()
    (root / "bin" / "node").symlink_to(os.path.relpath(node, root / "bin"))
    wanted = json.loads((lib / "package.json").read_text())
    for package in (*wanted["dependencies"], *(wanted["devDependencies"] if every else ())):
        described = json.loads((modules / package / "package.json").read_text())
        named = described["bin"]
        programs = named if isinstance(named, dict) else {package.rpartition("/")[2]: named}
        for name, program in programs.items():
            place = f"../lib/node_modules/{package}/{program}"
            (root / "bin" / name).symlink_to(os.path.normpath(place))
    subprocess.run(["chmod", "-R", "a+rX", root], check=True)


def _do(*argv: str, cwd: Path) -> None:
    done = subprocess.run(
        argv, cwd=cwd, capture_output=True, text=True, check=False, timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: {done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    print(install(every="--all" in sys.argv[1:]))
