"""A compose project in a directory, read, checked and rewritten by the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.compose import read, rules
from agent_sandbox.compose.model import Host, Project
from agent_sandbox.compose.rules import Finding
from conftest import ROOT

HERE = Path(__file__).parent
TEAM = HERE / "team"
HOME = "/home/someone"


def machine(files: dict[str, str], **env: str) -> Host:
    """A host with these files, below /p unless their names say otherwise."""
    texts = {name if name.startswith("/") else f"/p/{name}": text for name, text in files.items()}
    return Host(read=texts.get, real=lambda path: path, env=env, home=HOME)


def load(text: str | dict[str, str], *names: str, **env: str) -> Project:
    """The project of `c.yml`, or of these files."""
    files = {"c.yml": text} if isinstance(text, str) else text
    return read.load([f"/p/{n}" for n in names or ("c.yml",)], machine(files, **env))


def found(text: str | dict[str, str], *names: str, **env: str) -> tuple[Finding, ...]:
    """What check says about it."""
    return rules.check(load(text, *names, **env), HOME)


def ids(findings: tuple[Finding, ...], *, least: str = "medium") -> list[str]:
    """rule@line, for what nobody has answered for."""
    return sorted({f"{f.rule.id}@{f.place.line}" for f in rules.failing(findings, least)})


class Ctl:
    """`sandboxctl compose` in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from agent_sandbox.cli.ctl import main; sys.exit(main())"
        clean = {"PATH": os.environ["PATH"], "HOME": str(self.directory), "LANG": "C.UTF-8"}
        return subprocess.run(
            [sys.executable, "-c", code, "compose", *map(str, words)],
            cwd=self.directory, capture_output=True, text=True, check=False, timeout=300,
            env={**clean, "PYTHONPATH": str(ROOT / "src"), **env},
        )  # fmt: skip

    def json(self, *words: str | Path, **env: str) -> Any:
        return json.loads(self(*words, "--json", **env).stdout)

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def ctl(tmp_path: Path) -> Ctl:
    return Ctl(tmp_path)
