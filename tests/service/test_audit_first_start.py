"""A kill in the very first moments of a trail is no damage: its head is whole from the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.service.audit import Audit
from agent_sandbox.service.audit.verify import verify

STEPS = ("rename", "ftruncate", "pwrite", "write", "open")


class Killed(BaseException):
    """Nothing of the program runs any more."""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, before: bool
) -> None:
    trail = tmp_path / "audit"
    calls = 0
    real = getattr(os, step)

    def stop(*words: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        if before and calls == number:
            raise Killed
        found = real(*words, **more)
        if calls == number:
            raise Killed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, step, stop)
        try:
            audit = Audit(str(trail))
            audit.write(None, "test")
            audit.close()
        except Killed:
            pass
    if (trail / "head").exists():
        assert verify(str(trail)) == ()
    again = Audit(str(trail))
    again.write(None, "test")
    again.close()
    assert verify(str(trail)) == ()


def test_a_head_that_was_emptied_is_found(tmp_path: Path) -> None:
    """The control."""
    trail = tmp_path / "audit"
    audit = Audit(str(trail))
    audit.write(None, "test")
    audit.close()
    (trail / "head").write_bytes(b"")
    assert verify(str(trail)) != ()
    (trail / "audit-000001.jsonl").unlink()
    assert verify(str(trail)) != ()
