"""The processes beside a sandbox: all of them, or none."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import bwrap, helping

COMMAND = bwrap.Command(program="bwrap", options=(), command=("true",), texts=())


class Helper:
    """One that notes its end."""

    def __init__(self) -> None:
        self.ended = False

    def abandon(self) -> None:
        self.ended = True


def test_none_stays_behind_when_another_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the other one it goes on."""
    made = Helper()

    def refuse(_: bwrap.Command) -> None:
        raise HostError("no socket", hint="", code="x")

    monkeypatch.setattr(helping, "_network", lambda *_: made)
    helping.Helpers(COMMAND)
    assert not made.ended
    monkeypatch.setattr(helping, "_authority", refuse)
    with pytest.raises(HostError):
        helping.Helpers(COMMAND)
    assert made.ended
