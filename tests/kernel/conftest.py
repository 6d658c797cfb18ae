"""A small world per test: a home with a project in it, outside of /tmp, owned by the identity.

Projects lie where people have them. Below /tmp the sandbox's own /tmp would hide the rest, and a
test of the empty root would pass for the wrong reason.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import IS_ROOT, As, must_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.internet import Internet

    Done = subprocess.CompletedProcess[str]

_numbers = itertools.count(1)
_can_start: dict[int, str] = {}


class World:
    """One identity with its own home, project and neighbours, for the time of one test."""

    def __init__(self, runner: As, base: Path) -> None:
        self.runner = runner
        self.base = base
        self.home = runner.directory(base / "home" / "me")
        self.project = runner.directory(self.home / "work" / "project")
        self.state = self.home / ".local" / "state" / "agent-sandbox"

    def env(self, more: dict[str, str | None] | None = None) -> dict[str, str | None]:
        return {"HOME": str(self.home), **(more or {})}

    def path(self, name: str | Path) -> Path:
        """A path of this world: below the project, `~/…`, or absolute."""
        text = os.fspath(name)
        return self.home / text[2:] if text.startswith("~/") else self.project / text

    def write(self, name: str | Path, text: str = "", mode: int = 0o644) -> Path:
        """Make a file (and missing directories) that belongs to the identity."""
        path = self.path(name)
        if not path.parent.exists():
            self.runner.directory(path.parent)
        path.write_text(text)
        path.chmod(mode)
        return self.runner.own(path)

    def mkdir(self, name: str | Path) -> Path:
        """Make a directory that belongs to the identity."""
        return self.runner.directory(self.path(name))

    def link(self, name: str | Path, target: str | Path) -> Path:
        """Make a symbolic link that belongs to the identity."""
        path = self.path(name)
        if not path.parent.exists():
            self.runner.directory(path.parent)
        path.symlink_to(target)
        return self.runner.own(path)

    def global_config(self, text: str, suffix: str = "toml") -> Path:
        """The user's own policy file."""
        return self.write(f"~/.config/agent-sandbox/config.{suffix}", text)

    def project_config(self, text: str, suffix: str = "toml") -> Path:
        """The project's policy file."""
        return self.write(f".agent-sandbox.{suffix}", text)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        options["env"] = self.env(options.get("env"))
        options["cwd"] = options.get("cwd") or self.project
        return options

    def argv(self, *args: str | os.PathLike[str]) -> list[str]:
        """The command line of agent-sandbox."""
        return self.runner.command("run", *args)

    def sandbox(self, *args: str | os.PathLike[str], **options: Any) -> Done:
        """Run `agent-sandbox ARGS…` in the project."""
        return self.runner.run(self.argv(*args), **self._options(options))

    def sh(self, script: str, *flags: str | os.PathLike[str], **options: Any) -> Done:
        """Run a shell script inside, with these flags."""
        return self.sandbox(*flags, "sh", "-c", script, **options)

    def start(self, *args: str | os.PathLike[str], **options: Any) -> subprocess.Popen[str]:
        """Start agent-sandbox and do not wait."""
        return self.runner.popen(self.argv(*args), **self._options(options))

    def ctl(self, *args: str | os.PathLike[str], **options: Any) -> Done:
        """Run `sandboxctl ARGS…` in the project."""
        return self.runner.run(self.runner.command("ctl", *args), **self._options(options))

    def outside(self, *args: str | os.PathLike[str], **options: Any) -> Done:
        """Run a program on the host as the identity: the control of an attack."""
        return self.runner.run(list(args), **self._options(options))

    def workspaces(self) -> list[str]:
        """Names of the workspaces that exist now."""
        run = self.state / "run"
        return sorted(os.listdir(run)) if run.exists() else []

    def python(self, code: str, *args: str, **options: Any) -> Done:
        """Run Python with the library on the host as the identity."""
        search = {"PYTHONPATH": str(self.runner.source), "PYTHONDONTWRITEBYTECODE": "1"}
        options["env"] = {**search, **options.get("env", {})}
        return self.outside(self.runner.python, "-c", code, *args, **options)


@pytest.fixture(scope="session")
def places() -> Iterator[Path]:
    """A directory outside of /tmp that every identity can pass through."""
    parent = Path("/srv") if IS_ROOT else Path.home()
    path = Path(tempfile.mkdtemp(prefix="agsbx-test-", dir=parent))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def world(runner: As, places: Path) -> Iterator[World]:
    """A fresh world for the identity, on a machine where sandboxes can start."""
    must_start(runner)
    base = places / f"{runner.name}-{next(_numbers)}"
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    yield World(runner, base)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def net(places: Path, request: pytest.FixtureRequest) -> Iterator[Internet]:
    """An internet of a test module's own, on which sandboxes can be started."""
    must_work(IS_ROOT, "needs root for network namespaces of its own")
    from kernel.internet import Internet

    base = places / request.module.__name__
    base.mkdir()
    base.chmod(0o755)
    internet = Internet(base)
    yield internet
    internet.end()


def must_start(runner: As) -> None:
    """Skip (or, in CI, fail) where bwrap cannot make namespaces."""
    must_work(shutil.which("bwrap"), "needs bwrap")
    if runner.uid not in _can_start:
        done = runner.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
        _can_start[runner.uid] = "" if done.returncode == 0 else done.stderr or "?"
    must_work(not _can_start[runner.uid], f"bwrap cannot start: {_can_start[runner.uid]}")


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def running(*argv: str) -> list[int]:
    """Every live process with exactly this command line."""
    found = []
    wanted = b"".join(os.fsencode(word) + b"\0" for word in argv)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if line == wanted and not zombie:
            found.append(int(entry.name))
    return found


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process started in a session of its own, and whatever is in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def toml(values: dict[str, Any]) -> str:
    """A policy file; JSON strings and lists are TOML too."""
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
