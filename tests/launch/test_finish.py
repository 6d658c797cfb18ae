"""What is done with a sandbox that is held back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import bwrap, finish
from agent_sandbox.launch.keeper import READY, Keeper

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = bwrap.Command(program="bwrap", options=(), command=("true",), texts=())
# Larger than any process id may be.
GONE = 1 << 23


@pytest.fixture
def waiting() -> Iterator[int]:
    """A process that stands in for a sandbox: not this one, which would keep the limits.

    It has its parent's name, as bwrap's child has.
    """
    child = os.fork()
    if child == 0:
        signal.pause()
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def attending() -> Keeper:
    """A keeper that says at once that it is ready."""
    told, report = os.pipe()
    os.write(report, READY)
    os.close(report)
    heard, life = os.pipe()
    os.close(heard)
    return Deaf(0, told, life)


class Deaf(Keeper):
    """Nobody is at the other end."""

    def attend(self, init: int) -> None:
        """Tell nobody."""


def test_a_sandbox_that_cannot_be_seen_is_not_let_go(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live process without the marker at its root is never taken for a checked one."""
    monkeypatch.setattr(finish, "BUILD_SECONDS", 0.05)
    with pytest.raises(HostError) as caught:
        finish.complete(COMMAND, waiting, None, attending())
    assert caught.value.code == "root-unseen"


def test_a_sandbox_that_is_gone_needs_no_check() -> None:
    """bwrap has failed; there is nothing to let go."""
    assert not finish.complete(COMMAND, GONE, None, attending())


@pytest.mark.parametrize("killed", [False, True])
def test_a_sandbox_whose_keeper_fails_is_not_let_go(waiting: int, killed: bool) -> None:
    """Whatever the reason, and it is told: the keeper kills the sandbox before it says why."""
    told, report = os.pipe()
    os.write(report, b"no such luck\n")
    os.close(report)
    with pytest.raises(HostError) as caught:
        finish.complete(COMMAND, GONE if killed else waiting, None, Deaf(0, told, os.dup(told)))
    assert caught.value.code == "mounts-failed"
    assert "no such luck" in caught.value.message
