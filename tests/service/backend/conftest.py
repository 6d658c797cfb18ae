"""Scenes with a real backend, as root and as an ordinary user."""

from __future__ import annotations

import inspect
import itertools
import json
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import IS_ROOT, As, must_work

from . import lab as lab_module
from .lab import Lab

Scene = Callable[[Lab], Awaitable[object]]
PRELUDE = """
import asyncio, fcntl, io, os, struct, sys, tarfile, time, signal, json, socket, stat, resource
from pathlib import Path
from agent_sandbox.service.backend.interface import Start, Terminal
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network, Resources, Sandbox
from agent_sandbox.launch import kin
from agent_sandbox.service.backend.bwrap import BwrapBackend
from lab import Lab, Process, archive, gone, got, living, pieces, play, put
"""
_numbers = itertools.count(1)


class Bench:
    """Plays scenes as one identity, each with a data directory of its own unless it says so."""

    def __init__(self, identity: As, base: Path) -> None:
        self.identity = identity
        self.base = base
        self.data = base / "data"

    def script(self, scene: Scene, **values: object) -> list[str]:
        """The program of a scene; values are constants that it may name."""
        modules = self.base / "modules"
        if not modules.exists():
            self.identity.directory(modules)
            shutil.copy(lab_module.__file__, modules / "lab.py")
            (modules / "lab.py").chmod(0o644)
        source = textwrap.dedent(inspect.getsource(scene))
        given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        path = modules / f"scene{next(_numbers)}.py"
        path.write_text(f"{PRELUDE}\n{given}\n{source}\nplay({scene.__name__})\n")
        path.chmod(0o644)
        return [self.identity.python, str(path), str(self.data)]

    def env(self) -> dict[str, str | None]:
        search = f"{self.identity.source}:{self.base / 'modules'}"
        return {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "SERVER_SECRET": "hidden"}

    def start(self, scene: Scene, **values: object) -> subprocess.Popen[str]:
        """Start a scene and do not wait."""
        return self.identity.popen(
            self.script(scene, **values), env=self.env(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def play(self, scene: Scene, timeout: float = 120, **values: object) -> Any:
        """Run a scene to its end; what it returns."""
        done = self.identity.run(self.script(scene, **values), env=self.env(), timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A directory that no sandbox shows, outside of /tmp, for every identity."""
    parent = Path("/srv") if IS_ROOT else Path.home()
    path = Path(tempfile.mkdtemp(prefix="agsbx-test-", dir=parent))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def bench(runner: As, ground: Path) -> Iterator[Bench]:
    must_work(not runner.obstacle, f"no sandbox for {runner.name}: {runner.obstacle}")
    base = runner.directory(ground / f"{runner.name}-{next(_numbers)}")
    yield Bench(runner, base)
    shutil.rmtree(base, ignore_errors=True)
