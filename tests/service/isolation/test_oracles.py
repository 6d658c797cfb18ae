"""What is another's takes the same steps as what does not exist: no time tells them apart."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agent_sandbox.service.backend.interface import Terminal
from agent_sandbox.service.core import ids
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.problems import Problem
from service.core.lab import ALICE, BOB, Lab, cmd, go, lab
from service.core.test_isolation import BOXES, EXECUTIONS

Call = Callable[..., Any]
# The comparison of two names itself: no file, no statement, a tenth of a microsecond.
COMPARISON = {"may_see", "Agent.is_admin"}


class Steps:
    """Records the functions of ours that are called, and the statements of the database."""

    def __init__(self, world: Lab) -> None:
        self.world = world
        self.seen: list[str] = []

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and "agent_sandbox" in frame.f_code.co_filename:
            self.seen.append(frame.f_code.co_qualname)

    async def of(self, call: Call, *words: object) -> list[str]:
        """What is done for a call, until it is refused or has acted."""
        self.seen = []
        self.world.store.db.set_trace_callback(
            # Values are in the text.
            lambda sql: self.seen.append(sql.partition("'")[0])
        )
        sys.setprofile(self._note)
        try:
            found = call(*words)
            if inspect.isawaitable(found):
                await found
        except Problem:
            pass
        finally:
            sys.setprofile(None)
            self.world.store.db.set_trace_callback(None)
        return [step for step in self.seen if step not in COMPARISON]


@pytest.mark.parametrize("state", ["runs", "ended", "restarted"])
@pytest.mark.parametrize("method", [*BOXES, *EXECUTIONS])
def test_cannot_tell_by_what_is_done(tmp_path: Path, method: str, state: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(
                ALICE, box, cmd("tty", terminal=Terminal(), keep_input=True)
            )
            if state == "ended":
                await world.service.kill(ALICE, job.id)
            elif state == "restarted":
                await world.kill()
                await world.start()
            table, theirs, missing = (
                (BOXES, box, ids.new(ids.SANDBOX)) if method in BOXES
                else (EXECUTIONS, job.id, ids.new(ids.EXECUTION))
            )  # fmt: skip
            steps = Steps(world)
            foreign = await steps.of(table[method], world.service, BOB, theirs)
            absent = await steps.of(table[method], world.service, BOB, missing)
            assert foreign == absent
            assert foreign
            # The control: for its owner something else is done.
            assert await steps.of(table[method], world.service, ALICE, theirs) != absent

    go(check())
