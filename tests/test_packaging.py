"""packaging/Dockerfile: its base cannot be pulled here, so its parts are tried one by one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from agent_sandbox.compose import solutions
from conftest import ROOT, must_work
from docker.fake import FakeEngine, place

RECIPE = ROOT / "packaging" / "Dockerfile"


def steps() -> list[tuple[str, str]]:
    """Instructions with their words, lines joined."""
    text = RECIPE.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def copied(directory: Path) -> Path:
    """What COPY brings to /build, below a directory."""
    for name, rest in steps():
        if name == "COPY":
            *sources, target = rest.split()
            assert target.startswith("/build/")
            for source in sources:
                path, to = ROOT / source, directory / target.strip("/")
                to.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, to, dirs_exist_ok=True)
                else:
                    shutil.copy(path, to)
    return directory / "build"


def test_the_recipe_is_what_compose_files_expect() -> None:
    found = dict(steps())
    assert json.loads(found["ENTRYPOINT"]) == ["sandboxctl"]
    assert found["USER"] not in ("root", "0")
    assert ":" in found["FROM"]
    name, _, tag = solutions.IMAGE.partition(":")
    assert tag == "latest"
    command = f"docker build -t {name} -f packaging/Dockerfile ."
    assert command in solutions.BUILD_IMAGE
    assert command in RECIPE.read_text()
    assert command in (ROOT / "docs" / "docker.md").read_text()


def test_what_the_recipe_copies_is_in_the_context() -> None:
    ignored = (RECIPE.parent / "Dockerfile.dockerignore").read_text().split()
    for name, rest in steps():
        for source in rest.split()[:-1] if name == "COPY" else ():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored


def test_the_package_that_the_recipe_installs_serves(tmp_path: Path) -> None:
    """`pip install` of what was copied, and the installed command before an engine."""
    for module in ("pip", "hatchling"):
        must_work(importlib.util.find_spec(module), f"needs {module} to build the package")
    build, site = copied(tmp_path), tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", "--target", site, build], check=True)
    shutil.rmtree(build)
    base = place()
    engine = FakeEngine(base / "engine.sock")
    engine.start()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["docker", "serve", "--read-only", f"--socket={base}/d.sock", "--audit=-"]
    command = [sys.executable, str(site / "bin" / "sandboxctl"), *words]
    try:
        with subprocess.Popen(
            [*command, f"--engine={engine.path}"], env=env, cwd=base, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            assert "serving" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert "ended after 0 requests" in process.stderr.read()
        assert process.returncode == 0
    finally:
        engine.stop()
        shutil.rmtree(base, ignore_errors=True)
