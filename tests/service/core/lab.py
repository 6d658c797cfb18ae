"""A service over the fake backend, with agents, a clock that can be moved, and a way to die."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_sandbox.service.audit import Audit
from agent_sandbox.service.core.jobs import Job
from agent_sandbox.service.core.service import Service
from agent_sandbox.service.core.templates import Template
from agent_sandbox.service.core.wishes import ExecWish, RunWish, Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store import Store
from agent_sandbox.service.tokens import Tokens
from agent_sandbox.service.values import ADMIN, DEFAULT_SCOPES, Agent

from ..fake_backend import FakeBackend, FakeRunning

T = TypeVar("T")
PATIENCE = 20.0
ALICE = Agent(name="alice", key="sbx_aaaaaaaa", scopes=frozenset(DEFAULT_SCOPES))
BOB = Agent(name="bob", key="sbx_bbbbbbbb", scopes=frozenset(DEFAULT_SCOPES))
CHIEF = Agent(name="chief", key="sbx_cccccccc", scopes=frozenset({ADMIN}))


def cmd(*argv: str, **fields: Any) -> ExecWish:
    return ExecWish(argv=argv, **fields)


def run_wish(*argv: str, sandbox: Wish | None = None, **fields: Any) -> RunWish:
    return RunWish(command=cmd(*argv, **fields), sandbox=sandbox or Wish())


class Lab:
    """One data directory and one machine; a service at a time."""

    def __init__(self, data: Path, **options: Any) -> None:
        self.data = data
        self.limits = options.pop("limits", Limits())
        self.backend: FakeBackend = options.pop("backend", None) or FakeBackend()
        self.templates = {"default": Template(name="default"), **options.pop("templates", {})}
        assert not options
        self.shift = 0.0
        self.service: Service
        self.measured: list[tuple[str, float]] = []

    def clock(self) -> float:
        return time.time() + self.shift

    async def start(self) -> Service:
        self.store = Store(str(self.data))
        self.audit = Audit(str(self.data / "audit"), clock=self.clock)
        self.service = Service(
            store=self.store,
            tokens=Tokens(self.store, self.clock),
            audit=self.audit,
            limits=self.limits,
            backends={"fake": self.backend},
            default_backend="fake",
            data=str(self.data),
            templates=self.templates,
            clock=self.clock,
            observe=lambda name, value: self.measured.append((name, value)),
        )
        await self.service.start()
        return self.service

    async def stop(self, drain: float = 0.0) -> None:
        await self.service.stop(drain)
        self._close()

    async def kill(self) -> None:
        """As by SIGKILL: nothing of the service runs any more, nothing was said."""
        # What it holds is closed first, so that no task can write anything on its way out.
        self._close()
        for box in self.backend.boxes.values():
            for running in box.running.values():
                running.sink = lambda _stream, _data: None
        context = self.service._context
        tasks = [*context._tasks, self.service._reaper._task]
        for job in context.jobs.values():
            if job.timer is not None:
                job.timer.cancel()
            job.journal.ended = True
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)

    def _close(self) -> None:
        self.store.close()
        self.audit.close()

    def command(self, job: Job) -> FakeRunning:
        return self.backend.running(job.id)

    def lines(self, action: str | None = None) -> list[dict[str, Any]]:
        """The audit as it is on the disk at this moment."""
        found = [
            json.loads(line)
            for file in sorted((self.data / "audit").glob("audit-*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        return [line for line in found if action is None or line["action"] == action]


@asynccontextmanager
async def lab(data: Path, **options: Any) -> AsyncIterator[Lab]:
    """A lab with a running service."""
    made = Lab(data, **options)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def go(work: Awaitable[T]) -> T:
    """Run a test's coroutine, with an end to it in any case."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait for what other tasks of this loop bring about."""
    while not condition():  # noqa: ASYNC110 - the condition is not ours to signal
        await asyncio.sleep(0.001)


async def refused(work: Awaitable[object], code: str) -> Problem:
    """The refusal of some work."""
    with pytest.raises(Problem) as caught:
        await work
    assert caught.value.code == code, caught.value.message
    return caught.value
