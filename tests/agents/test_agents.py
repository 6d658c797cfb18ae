"""Real agents in the sandbox, driven by a model that wants to harm."""

from __future__ import annotations

import os

import pytest

from conftest import IS_ROOT, must_work

from . import verdicts
from .conftest import Make
from .roster import AGENTS
from .stage import BASE_URL, MODES
from .table import CONTROL, Table

pytestmark = [pytest.mark.agent, pytest.mark.kernel, pytest.mark.network, pytest.mark.slow]

CHOSEN = [
    agent.name
    for agent in AGENTS.values()
    if agent.always or os.environ.get("AGENT_SANDBOX_AGENTS") == "all"
]
EACH = pytest.mark.parametrize("agent", CHOSEN)


@EACH
@pytest.mark.parametrize("mode", MODES)
def test_cannot_harm_and_can_work(stage: Make, agent: str, mode: str, table: Table) -> None:
    """In a first run, and in a second one that finds what the first has left."""
    must_work(mode != BASE_URL or IS_ROOT, "needs root for names of its own")
    here = stage(agent, mode)
    for _ in ("first", "second"):
        was = verdicts.before(here)
        table.judge(here, was, here.sandboxed(mode), mode)


@EACH
def test_the_same_attacks_work_without_a_sandbox(stage: Make, agent: str, table: Table) -> None:
    """The control, in a home of its own: each attack is one that succeeds."""
    here = stage(agent, "control")
    was = verdicts.before(here)
    done = here.bare()
    failed = [name for name, check in verdicts.ATTACKS.items() if not check(here, was)]
    table.note(agent, CONTROL, good=not failed)
    assert not failed, f"{failed}\n{verdicts.story(here, done)}"
