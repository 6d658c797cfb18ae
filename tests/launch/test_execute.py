"""What is done with a sandbox that is held back."""

from __future__ import annotations

import os

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import bwrap, execute

COMMAND = bwrap.Command(program="bwrap", options=(), command=("true",), texts=())


def test_a_sandbox_that_cannot_be_seen_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live process without the marker at its root is never taken for a checked one."""
    monkeypatch.setattr(execute, "BUILD_SECONDS", 0.05)
    with pytest.raises(HostError) as caught:
        execute.complete(COMMAND, os.getpid(), None)
    assert caught.value.code == "root-unseen"


def test_a_sandbox_that_is_gone_needs_no_check() -> None:
    """bwrap has failed; there is nothing to let go."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    execute.complete(COMMAND, child, None)
