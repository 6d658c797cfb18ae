"""What CI may run a second time."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AGAIN = Path(__file__).parents[1] / ".ci" / "again"


@pytest.fixture(scope="module")
def again() -> Any:
    loader = importlib.machinery.SourceFileLoader("again", str(AGAIN))
    spec = importlib.util.spec_from_loader("again", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([], False),
        (["tests/kernel/test_process.py::test_a"], True),
        (["tests/kernel/test_process.py::test_a"] * 3, True),
        (["tests/kernel/test_process.py::test_a"] * 4, False),
        (["tests/kernel/test_process.py"], False),
        (["tests/escape/test_files.py::test_a"], False),
        (["tests/chaos/test_kill.py::test_a"], False),
        (["tests/fuzz/test_plan.py::test_a"], False),
        (["tests/service/isolation/test_a.py::test_a"], False),
        (["tests/docker/test_attacks.py::test_a"], False),
        (["tests/kernel/test_a.py::test_cannot_see_it[root]"], False),
        (["tests/kernel/test_a.py::test_a", "tests/escape/test_files.py::test_a"], False),
    ],
)
def test_an_attack_is_never_tried_twice(again: Any, tests: list[str], expected: bool) -> None:
    assert again.may_repeat(tests) is expected


def make(place: Path, ended: int) -> None:
    """A target whose test fails."""
    noted, told = ".pytest_cache/v/cache", ".pytest_cache/v/agent-sandbox"
    failing = (
        f"mkdir -p {noted} {told}; echo {ended} > {told}/ended; "
        f"""echo '{{"tests/test_x.py::test_a": true}}' > {noted}/lastfailed"""
    )
    (place / "Makefile").write_text(f"test:\n\t{failing}; false\n")


@pytest.mark.parametrize("ended", [2, 3, 4, 5])
def test_a_run_that_was_cut_short_is_not_made_up_for(
    again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """Interrupted, broken, badly called or empty: the other tests have not been run."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path, ended)
    monkeypatch.setattr(again, "PYTEST", ["true"])
    assert again.main("test") == 2
    # A control: the same after a whole run.
    make(tmp_path, 1)
    assert again.main("test") == 0


@pytest.mark.parametrize(
    ("body", "ended"), [("assert False", "1"), ("raise KeyboardInterrupt", "2"), ("pass", "0")]
)
def test_pytest_tells_how_it_ended(again: Any, tmp_path: Path, body: str, ended: str) -> None:
    """By the hook that all tests here have, where it is looked for."""
    tests = Path(__file__).parent
    (tmp_path / "conftest.py").write_text("from hooks import pytest_sessionfinish\n")
    (tmp_path / "hooks.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(f"def test_a(): {body}\n")
    env = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'src'}"}
    env.pop("PYTEST_ADDOPTS", None)
    line = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "test_x.py"]
    subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, check=False, timeout=120)
    assert (tmp_path / again.ENDED).read_text().strip() == ended


def test_one_that_fails_once_is_run_alone(
    again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And its second result counts."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path, ended=1)
    for code in (0, 1):
        monkeypatch.setattr(again, "PYTEST", ["sh", "-c", f"echo again $0; exit {code}"])
        assert again.main("test") == code
        shown = capfd.readouterr().out
        assert "UNSTABLE" in shown
        assert "again tests/test_x.py::test_a\n" in shown
