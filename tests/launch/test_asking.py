"""A program outside that is asked: what it prints, and what it may not do to who asks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from agent_sandbox.launch import asking

SH = "/bin/sh"


def ask(script: str, *, seconds: float = 20.0, most: int = 100) -> tuple[int | None, bytes | None]:
    return asking.answer(SH, ["sh", "-c", script], {}, seconds=seconds, most=most, silent=True)


@pytest.fixture
def takes_all_children() -> Iterator[None]:
    """The kernel takes every child that ends, as some programs wish it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_code_and_words() -> None:
    assert ask("echo yes; echo no >&2; exit 3") == (3, b"yes\n")


def test_nothing_when_it_takes_too_long_or_says_too_much() -> None:
    assert ask("exec sleep 100", seconds=0.1) == (-9, None)
    assert ask("yes") == (-9, None)


@pytest.mark.usefixtures("takes_all_children")
def test_a_child_that_somebody_else_takes_has_no_code() -> None:
    assert ask("echo yes; exit 3") == (None, b"yes\n")


@pytest.mark.usefixtures("takes_all_children")
def test_one_that_has_ended_and_been_taken_cannot_be_killed() -> None:
    """Its own child keeps the pipe open, so its end is not heard."""
    assert ask("sleep 3 & exit 0", seconds=1.0) == (None, None)
