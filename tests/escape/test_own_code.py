"""Our own code and helpers: the host runs them, so no sandbox may change or supply them."""

from __future__ import annotations

import shutil

import pytest

from escape.attack import Attack, Scene, Trial, trials

pytestmark = pytest.mark.kernel


def code_in_the_project(scene: Scene) -> None:
    """agent-sandbox is installed in the project that it guards."""
    copy = scene.project / "vendor" / "src"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(scene.source, copy, ignore=ignored)
    scene.runner.own(scene.project)
    scene.source = copy


def path_with_the_project(scene: Scene) -> None:
    """The user's PATH begins with a directory of the project."""
    scene.mkdir("bin")
    scene.caller["PATH"] = f"{scene.project}/bin:/usr/bin:/bin"


def python_path(scene: Scene) -> None:
    """The user's PYTHONPATH names a directory of the project, and there is a policy file."""
    scene.mkdir("lib")
    scene.caller["PYTHONPATH"] = f"{scene.project}/lib"
    scene.global_config("")


def program(name: str) -> str:
    """A script that leaves a program in the project's bin."""
    text = f'#!/bin/sh\\ntouch %s\\nexec /usr/bin/{name} "$@"\\n'
    return f"printf '{text}' $marker > bin/{name}; chmod +x bin/{name}"


ATTACKS = (
    Attack(
        name="own-code", invariant=4, what="a line for the next start",
        setup=code_in_the_project,
        script="echo \"open('$marker', 'w').close()\" >> vendor/src/agent_sandbox/errors.py",
        without="own code read-only",
    ),
    Attack(
        name="own-bytecode", invariant=4, what="Python reads it instead of the source",
        setup=code_in_the_project, python=True,
        script="""
import importlib.util, marshal, os
place = "vendor/src/agent_sandbox"
source = f"{place}/errors.py"
try:
    os.makedirs(f"{place}/__pycache__", exist_ok=True)
    text = open(source).read() + f"\\nopen({marker!r}, 'w').close()\\n"
    info = os.stat(source)
    head = importlib.util.MAGIC_NUMBER + bytes(4)
    head += int(info.st_mtime).to_bytes(4, "little") + info.st_size.to_bytes(4, "little")
    with open(importlib.util.cache_from_source(source), "wb") as file:
        file.write(head + marshal.dumps(compile(text, source, "exec")))
except OSError as error: print(error)
""", without="own code read-only",
    ),
    Attack(
        name="replace-own-code", invariant=4, what="move the directory above it",
        setup=code_in_the_project,
        script="""
            mv vendor x; cp -r x vendor
            echo "open('$marker', 'w').close()" >> vendor/src/agent_sandbox/errors.py
        """, without="pins",
    ),
    Attack(
        name="bwrap-on-path", invariant=4, what="a bwrap of the project",
        setup=path_with_the_project, script=program("bwrap"), without="bwrap of the system",
    ),
    Attack(
        name="env-on-path", invariant=4, what="an env of the project",
        setup=path_with_the_project, script=program("env"), without="env of the system",
    ),
    Attack(
        name="modules-on-pythonpath", invariant=4, what="a tomllib of the project",
        setup=python_path,
        script="echo \"open('$marker', 'w').close()\" | tee lib/tomllib.py > lib/sitecustomize.py",
        without="isolated interpreter",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_supply_what_the_host_runs(trial: Trial) -> None:
    trial.run()
