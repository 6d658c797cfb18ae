"""Built filters are remembered, and never used when they may be stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.launch import filters, seccomp


def test_a_filter_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads what the first one has built."""
    state = str(tmp_path)
    first = filters.program(state, "x86_64", "default")
    assert first == seccomp.build("x86_64", "default")
    monkeypatch.setattr(seccomp, "build", lambda *_: pytest.fail("built again"))
    assert filters.program(state, "x86_64", "default") == first


def test_levels_and_machines_do_not_mix(tmp_path: Path) -> None:
    """Each has its own."""
    for machine in ("x86_64", "aarch64"):
        for level in ("strict", "default", "off"):
            for _ in range(2):
                assert filters.program(str(tmp_path), machine, level) == seccomp.build(
                    machine, level
                )


def test_changed_code_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade must not go on with the old filter."""
    state = str(tmp_path)
    filters.program(state, "x86_64", "default")
    monkeypatch.setattr(filters, "_identity", lambda: "another")
    monkeypatch.setattr(seccomp, "build", lambda *_: b"fresh")
    assert filters.program(state, "x86_64", "default") == b"fresh"


def test_a_damaged_memory_is_not_used(tmp_path: Path) -> None:
    """It is built anew."""
    state = str(tmp_path)
    wanted = filters.program(state, "x86_64", "default")
    (tmp_path / "filters" / "x86_64-default").write_bytes(b"garbage")
    assert filters.program(state, "x86_64", "default") == wanted
