"""`./agent-sandbox` from a fresh clone, in copies of the tree."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, ROOT, As, make_readable, must_work

if TYPE_CHECKING:
    from collections.abc import Callable

CLONED = ("agent-sandbox", "sandboxctl", "pyproject.toml", "requirements-dev.lock", "src")
# What the launcher may start while it sets up.
HELPERS = ("flock", "id", "ln", "mkdir", "readlink", "sh", "touch")
VERSION = "agent-sandbox "


@pytest.fixture
def clone(shared: Path) -> Callable[[As], Path]:
    """A function that makes a fresh clone for an identity."""

    def make(owner: As) -> Path:
        path = owner.project()
        for name in CLONED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, path / name, follow_symlinks=False)
        make_readable(path)
        return owner.own(path)

    return make


def programs(identity: As, *extra: str) -> Path:
    """A directory for PATH with little more than the launcher needs, and no bwrap."""
    directory = identity.project()
    for name in (*HELPERS, *extra):
        found = shutil.which(name)
        assert found, f"no {name} here"
        (directory / name).symlink_to(found)
    return directory


def fake(directory: Path, name: str, script: str) -> None:
    """Put a shell script into `directory`."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def versions(identity: As, checkout: Path) -> subprocess.CompletedProcess[str]:
    done = identity.run([checkout / "agent-sandbox", "--version"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(VERSION)
    return done


# --- The venv


def test_the_first_run_makes_a_venv_and_the_second_is_silent(
    runner: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(runner)
    assert versions(runner, checkout).stderr == f"agent-sandbox: making {checkout}/.venv\n"
    made = (checkout / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
    assert versions(runner, checkout).stderr == ""
    assert (checkout / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == made


def test_the_venv_holds_the_package_and_both_commands(
    user: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(user)
    versions(user, checkout)
    bin_dir = checkout / ".venv" / "bin"
    code = "import agent_sandbox; print(agent_sandbox.__file__)"
    done = user.run([bin_dir / "python", "-c", code])
    assert done.stdout.strip() == str(checkout / "src" / "agent_sandbox" / "__init__.py")
    assert user.run([bin_dir / "agent-sandbox", "--version"]).stdout.startswith(VERSION)
    assert user.run([bin_dir / "sandboxctl", "--help"]).stdout.startswith("Usage: sandboxctl")


def test_bytecode_is_made_even_where_the_environment_forbids_it(
    user: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(user)
    forbid = {"PYTHONDONTWRITEBYTECODE": "1"}
    user.run([checkout / "agent-sandbox", "--version"], env=forbid)
    assert list((checkout / "src" / "agent_sandbox" / "cli" / "__pycache__").glob("run.*.pyc"))


def newer(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


def older(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 1_000_000_000))


def lose_interpreter(link: Path) -> None:
    link.unlink()
    link.symlink_to("/nonexistent/python3")


STALE = {
    "pyproject-newer": lambda checkout: newer(checkout / "pyproject.toml"),
    "pyproject-older": lambda checkout: older(checkout / "pyproject.toml"),
    "lock-changed": lambda checkout: newer(checkout / "requirements-dev.lock"),
    "interpreter-upgraded": lambda checkout: newer(checkout / ".venv" / "stamp" / "python"),
    "interpreter-gone": lambda checkout: lose_interpreter(checkout / ".venv" / "bin" / "python"),
    "half-made": lambda checkout: shutil.rmtree(checkout / ".venv" / "stamp"),
}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_a_stale_venv_is_made_again_once(
    user: As, clone: Callable[[As], Path], change: Callable[[Path], None]
) -> None:
    checkout = clone(user)
    versions(user, checkout)
    change(checkout)
    assert "making" in versions(user, checkout).stderr
    assert versions(user, checkout).stderr == ""


def test_a_moved_checkout_gets_a_venv_of_its_own(user: As, clone: Callable[[As], Path]) -> None:
    checkout = clone(user)
    versions(user, checkout)
    moved = checkout.rename(checkout.with_name(checkout.name + "-moved"))
    assert "making" in versions(user, moved).stderr
    assert versions(user, moved).stderr == ""


def test_concurrent_first_runs_share_one_venv(user: As, clone: Callable[[As], Path]) -> None:
    checkout = clone(user)
    command, pipe = [str(checkout / "agent-sandbox"), "--version"], subprocess.PIPE
    running = [user.popen(command, stdout=pipe, stderr=pipe) for _ in range(8)]
    ends = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * 8, ends
    assert all(out.startswith(VERSION) for out, _ in ends)
    assert "".join(err for _, err in ends).count("making") == 1


def test_a_second_run_starts_no_other_program(user: As, clone: Callable[[As], Path]) -> None:
    checkout = clone(user)
    versions(user, checkout)
    empty = {"PATH": str(user.project())}
    done = user.run([checkout / "agent-sandbox", "--version"], env=empty)
    assert (done.returncode, done.stderr) == (0, "")


# --- From elsewhere


def test_works_through_symlinks_and_from_another_directory(
    runner: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(runner)
    links = runner.project()
    (links / "chain").symlink_to("box")
    (links / "box").symlink_to(os.path.relpath(checkout / "agent-sandbox", links))
    (links / "control").symlink_to(checkout / "sandboxctl")
    for here in (links, runner.home):
        assert runner.run([links / "chain", "--version"], cwd=here).stdout.startswith(VERSION)
    done = runner.run(["./control", "--help"], cwd=links)
    assert done.stdout.startswith("Usage: sandboxctl"), done.stderr
    done = runner.run(["sh", "agent-sandbox", "--version"], cwd=checkout)
    assert done.stdout.startswith(VERSION)
    found = {"PATH": f"{checkout}:{runner.environ()['PATH']}"}
    assert runner.run(["agent-sandbox", "--version"], env=found).stdout.startswith(VERSION)


@pytest.mark.kernel
def test_the_project_is_the_current_directory(runner: As, clone: Callable[[As], Path]) -> None:
    checkout, project = clone(runner), runner.project()
    done = runner.run(
        [checkout / "agent-sandbox", "sh", "-c", "pwd; touch made; exit 7"], cwd=project
    )
    assert (done.returncode, done.stdout) == (7, f"{project}\n"), done.stderr
    assert (project / "made").exists()


# --- Someone else's checkout


@pytest.mark.skipif(not IS_ROOT, reason="needs a checkout of another user")
def test_a_user_on_roots_checkout_gets_a_venv_in_the_cache(
    user: As, superuser: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(superuser)
    before = sorted(checkout.rglob("*"))
    cache = user.home / ".cache" / "agent-sandbox-dev"
    assert versions(user, checkout).stderr == f"agent-sandbox: making {cache}{checkout}/.venv\n"
    assert versions(user, checkout).stderr == ""
    assert sorted(checkout.rglob("*")) == before
    assert list(cache.rglob("run.*.pyc"))


@pytest.mark.skipif(not IS_ROOT, reason="needs a checkout of another user")
def test_a_user_shares_the_venv_that_root_made(
    user: As, superuser: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(superuser)
    versions(superuser, checkout)
    readable = user.run(["test", "-x", checkout / ".venv" / "bin" / "python"]).returncode == 0
    assert (versions(user, checkout).stderr == "") is readable


@pytest.mark.skipif(not IS_ROOT, reason="needs a checkout of another user")
def test_without_a_writable_home_it_runs_without_a_venv(
    user: As, superuser: As, clone: Callable[[As], Path]
) -> None:
    checkout = clone(superuser)
    nowhere = {"HOME": "/nonexistent"}
    done = user.run([checkout / "agent-sandbox", "--version"], env=nowhere, cwd="/")
    assert done.stdout.startswith(VERSION), done.stderr
    assert "running without a venv" in done.stderr


# --- Bubblewrap

MANAGERS = {
    "apt-get": "apt-get update && sudo apt-get install -y bubblewrap",
    "dnf": "dnf install -y bubblewrap",
    "pacman": "pacman -S --needed --noconfirm bubblewrap",
}


@pytest.mark.parametrize("manager", MANAGERS)
def test_without_bwrap_and_sudo_it_says_what_to_run(
    user: As, clone: Callable[[As], Path], manager: str
) -> None:
    checkout, path = clone(user), programs(user)
    fake(path, manager, "echo never >&2; exit 1")
    done = user.run([checkout / "agent-sandbox", "true"], env={"PATH": str(path)})
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.splitlines()[-2:] == [
        "agent-sandbox: error: cannot find 'bwrap'",
        f"hint: run: sudo {MANAGERS[manager]}",
    ]


def test_an_unknown_system_is_told_what_is_missing(user: As, clone: Callable[[As], Path]) -> None:
    checkout, path = clone(user), programs(user)
    done = user.run([checkout / "agent-sandbox", "true"], env={"PATH": str(path)})
    assert done.returncode == 125
    assert done.stderr.count("error:") == 1
    assert "install bubblewrap" in done.stderr


@pytest.mark.parametrize("flag", ["--version", "--help", "-h"])
def test_what_only_prints_needs_no_bwrap(user: As, clone: Callable[[As], Path], flag: str) -> None:
    checkout, path = clone(user), programs(user)
    done = user.run([checkout / "agent-sandbox", flag], env={"PATH": str(path)})
    assert done.returncode == 0, done.stderr
    assert "agent-sandbox" in done.stdout


@pytest.mark.kernel
def test_bwrap_is_installed_where_that_is_possible(runner: As, clone: Callable[[As], Path]) -> None:
    """As root directly; a user goes through sudo, which here only plays its part."""
    bwrap = shutil.which("bwrap")
    checkout, path = clone(runner), programs(runner, "true", "env")
    runner.own(path)
    fake(path, "apt-get", f'echo "apt-get $*"; [ $1 = update ] || /bin/ln -s {bwrap} {path}/bwrap')
    fake(path, "sudo", '[ "$1" = -n ] && shift && "$@"')
    command = [str(checkout / "agent-sandbox"), "true"]
    done = runner.run(command, env={"PATH": str(path)}, cwd=runner.project())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-2:] == ["apt-get update", "apt-get install -y bubblewrap"]
    done = runner.run(command, env={"PATH": str(path)}, cwd=runner.project())
    assert (done.returncode, done.stderr) == (0, "")


# --- pip


def test_the_wheel_has_both_commands_and_the_types(tmp_path: Path) -> None:
    for module in ("pip", "hatchling"):
        must_work(importlib.util.find_spec(module), f"needs {module} to build the wheel")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--no-index", "-w", tmp_path, tree], check=True)
    (wheel,) = tmp_path.glob("agent_sandbox-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        commands = archive.read(entry_points).decode()
    assert "agent_sandbox/py.typed" in names
    assert "agent-sandbox = agent_sandbox.cli.run:script" in commands
    assert "sandboxctl = agent_sandbox.cli.ctl:main" in commands
