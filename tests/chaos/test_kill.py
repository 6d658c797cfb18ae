"""Whatever of a sandbox is killed, and whenever: the next start leaves nothing of it behind."""

from __future__ import annotations

import pytest

from conftest import IS_ROOT
from kernel.conftest import World

from . import processes, rounds

pytestmark = pytest.mark.chaos

FRONTS = ("command line", "library")
EACH = -(-rounds.RUNS // (len(FRONTS) * (2 if IS_ROOT else 1)))
# On a busy machine moments come late, and the command is gone: then there are more rounds.
MOST = 4
ALL_ROLES = {processes.SUPERVISOR, processes.OUTER, processes.INIT, processes.COMMAND}


@pytest.mark.parametrize("front", FRONTS)
def test_nothing_is_left_and_nothing_is_lost(world: World, front: str) -> None:
    """No process, mount, workspace, placeholder or control group; every file as it was."""
    chaos = rounds.Chaos(world, front)
    for number in range(EACH * MOST):
        if number >= EACH and set(chaos.victims) >= ALL_ROLES:
            break
        chaos.round(number)
    print(f"\n{world.runner.name}, {front}: {dict(chaos.victims)}")
    assert not chaos.problems, "\n".join(chaos.problems)
    # A control: the moments were such that each part was there to be killed.
    assert set(chaos.victims) >= ALL_ROLES
