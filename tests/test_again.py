"""What CI may run a second time."""

from __future__ import annotations

import importlib.machinery
import importlib.util
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


def test_one_that_fails_once_is_run_alone(
    again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And its second result counts."""
    monkeypatch.chdir(tmp_path)
    noted = ".pytest_cache/v/cache"
    failing = (
        f"""mkdir -p {noted}; echo '{{"tests/test_x.py::test_a": true}}' > {noted}/lastfailed"""
    )
    (tmp_path / "Makefile").write_text(f"test:\n\t{failing}; false\n")
    for code in (0, 1):
        monkeypatch.setattr(again, "PYTEST", ["sh", "-c", f"echo again $0; exit {code}"])
        assert again.main("test") == code
        shown = capfd.readouterr().out
        assert "UNSTABLE" in shown
        assert "again tests/test_x.py::test_a\n" in shown
