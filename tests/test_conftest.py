"""The identities themselves: a test that runs as the wrong user proves nothing."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import IS_ROOT, PATH, ROOT, must_work, processes_of

if TYPE_CHECKING:
    from conftest import As


def test_runs_under_its_own_uid_and_no_other_group(runner: As) -> None:
    done = runner.run(["id", "-u"])
    assert done.stdout.strip() == str(runner.uid)
    assert runner.run(["id", "-G"]).stdout.split() == [str(runner.gid)]


@pytest.mark.skipif(not IS_ROOT, reason="only root has other identities")
def test_the_user_is_not_root_and_cannot_read_what_is_roots(user: As) -> None:
    assert user.uid != 0
    assert user.run(["cat", "/etc/shadow"]).returncode != 0


def test_starts_with_a_clean_environment(runner: As, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    done = runner.run(["env"], env={"EXTRA": "1", "LANG": None})
    names = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert names == {
        "HOME": str(runner.home),
        "USER": runner.name,
        "LOGNAME": runner.name,
        "PATH": PATH,
        "EXTRA": "1",
    }


def test_projects_are_fresh_and_writable(runner: As) -> None:
    first, second = runner.project(), runner.project()
    assert first != second
    assert runner.run(["touch", "made"], cwd=first).returncode == 0
    assert (first / "made").stat().st_uid == runner.uid
    assert os.listdir(second) == []


def test_passes_input_and_exit_code(runner: As) -> None:
    done = runner.run(["sh", "-c", "cat; exit 3"], input="text")
    assert (done.stdout, done.returncode) == ("text", 3)


def test_a_timeout_takes_the_children_along(runner: As) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        runner.run(["sh", "-c", "sleep 987 & sleep 987"], timeout=0.5)
    if runner.uid != 0:
        # A killed process is gone when the kernel gets to it.
        deadline = time.monotonic() + 10
        while b"sleep\x00987\x00" in (lines := command_lines(runner.uid)):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)


def command_lines(uid: int) -> list[bytes]:
    """The command lines of a user's processes."""
    found = []
    for pid in processes_of(uid):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def test_runs_the_sandbox_commands(runner: As) -> None:
    assert runner.sandbox("--version").stdout.startswith("agent-sandbox ")
    assert runner.sandboxctl("--help").returncode == 0


def test_must_work_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    must_work(condition=True, reason="unused")
    monkeypatch.delenv("AGENT_SANDBOX_MUST_WORK", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no kernel"):
        must_work(condition=False, reason="no kernel")
    monkeypatch.setenv("AGENT_SANDBOX_MUST_WORK", "1")
    with pytest.raises(pytest.fail.Exception, match="no kernel"):
        must_work(condition=False, reason="no kernel")


@pytest.mark.skipif(not IS_ROOT, reason="only root makes users")
def test_the_user_goes_with_its_processes_even_when_a_test_fails(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "test_it.py").write_text(
        "def test_it(user):\n"
        "    user.popen(['sleep', '986'])\n"
        "    print('MADE', user.name, user.home, user.shared)\n"
        "    assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, tests], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "MADE" in line)
    name, home, shared = line.split("MADE ")[1].split()
    assert name not in {entry.pw_name for entry in pwd.getpwall()}
    assert not Path(home).exists()
    assert not Path(shared).exists()
    assert b"sleep\x00986\x00" not in _command_lines()


def _command_lines() -> list[bytes]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_bytes())
        except OSError:
            continue
    return found
