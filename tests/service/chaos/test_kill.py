"""Whenever the service is killed: nothing of a sandbox outlives it, and nothing it said is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos import rounds
from conftest import IS_ROOT
from service.chaos.ground import Ground
from service.chaos.killing import DRAIN, LOAD, START, Chaos
from service.chaos.memory import LOST

pytestmark = [pytest.mark.chaos, pytest.mark.kernel]

# A sixth of the runs of `make chaos`: these rounds are long.
EACH = -(-rounds.RUNS // (6 * (2 if IS_ROOT else 1)))
ACTS = {"create", "exec", "run", "put", "unpack", "background", "follow", "delete", "token"}


def test_nothing_is_left_and_nothing_that_was_said_is_lost(ground: Ground) -> None:
    """Before the restart no process; after it every answer as it was, once, with its line."""
    chaos = Chaos(ground)
    for number in range(EACH):
        chaos.round(number)
    done = sum((memory.done for memory in (*chaos.agents, chaos.admin)), Counter())
    print(f"\n{ground.identity.name}: {dict(chaos.kills)}, {dict(done)}")
    assert not chaos.problems, "\n".join(chaos.problems)
    # A control: everything was under way when it was killed, in every stage.
    assert set(done) >= {*ACTS, LOST} or EACH < 15
    assert set(chaos.kills) == {LOAD, START, DRAIN} or EACH < 15
