"""What is another agent's does not exist: in every method, with the same words."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend.interface import Terminal
from agent_sandbox.service.core import ids
from agent_sandbox.service.core.files import AuditedFiles
from agent_sandbox.service.core.service import Service
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Agent

from .lab import ALICE, BOB, CHIEF, cmd, go, lab, refused, run_wish


async def data() -> AsyncIterator[bytes]:
    yield b"x"


# Method → the call with an id. Every method that takes one must be here.
BOXES: dict[str, Callable[[Service, Agent, str], Any]] = {
    "get": lambda s, a, i: s.get(a, i),
    "delete": lambda s, a, i: s.delete(a, i),
    "renew": lambda s, a, i: s.renew(a, i, timeout=5.0),
    "pause": lambda s, a, i: s.pause(a, i),
    "resume": lambda s, a, i: s.resume(a, i),
    "set_metadata": lambda s, a, i: s.set_metadata(a, i, {"x": "y"}),
    "usage": lambda s, a, i: s.usage(a, i),
    "files": lambda s, a, i: s.files(a, i),
    "execute": lambda s, a, i: s.execute(a, i, cmd("true")),
}
EXECUTIONS: dict[str, Callable[[Service, Agent, str], Any]] = {
    "job": lambda s, a, i: s.job(a, i),
    "stdin": lambda s, a, i: s.stdin(a, i, b"x"),
    "signal": lambda s, a, i: s.signal(a, i, 15),
    "kill": lambda s, a, i: s.kill(a, i),
    "resize": lambda s, a, i: s.resize(a, i, Terminal()),
    "forget": lambda s, a, i: s.forget(a, i),
}
FILES: dict[str, Callable[[AuditedFiles], Awaitable[object]]] = {
    "entry": lambda f: f.entry("x"),
    "read": lambda f: f.read("x"),
    "write": lambda f: f.write("x", data()),
    "delete": lambda f: f.delete("x", recursive=False),
    "make": lambda f: f.make("x"),
    "list": lambda f: f.list("", depth=1, most=10),
    "pack": lambda f: f.pack(""),
    "unpack": lambda f: f.unpack("", data()),
}


def test_the_tables_have_every_method_that_takes_an_id() -> None:
    def taking(name: str) -> set[str]:
        return {
            method
            for method, function in inspect.getmembers(Service, inspect.isfunction)
            if name in inspect.signature(function).parameters and not method.startswith("_")
        }

    assert taking("sandbox_id") == set(BOXES)
    assert taking("exec_id") == set(EXECUTIONS)
    public = {name for name, _ in inspect.getmembers(AuditedFiles, inspect.isfunction)}
    assert {name for name in public if not name.startswith("_")} == set(FILES)


async def outcome(call: Callable[..., Any], *words: object) -> Problem:
    async def work() -> object:
        found = call(*words)
        return await found if inspect.isawaitable(found) else found

    return await refused(work(), "NOT_FOUND")


@pytest.mark.parametrize("method", [*BOXES, *EXECUTIONS])
def test_cannot_reach_what_is_anothers(tmp_path: Path, method: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish())).id
            job = await service.execute(
                ALICE, box, cmd("tty", terminal=Terminal(), keep_input=True)
            )
            before = list(world.backend.calls), service.get(ALICE, box)
            lines = len(world.lines())
            table, own, fresh = (
                (BOXES, box, ids.new(ids.SANDBOX)) if method in BOXES
                else (EXECUTIONS, job.id, ids.new(ids.EXECUTION))
            )  # fmt: skip
            call = table[method]
            words = {
                (problem.message, problem.hint, problem.rule)
                for wrong in (own, fresh, "", "../../etc/passwd", "sbx-*", own.upper())
                for problem in [await outcome(call, service, BOB, wrong)]
            }
            # Another's and none: the same words, and nothing has happened.
            assert len(words) == 1
            assert own not in str(words)
            assert (list(world.backend.calls), service.get(ALICE, box)) == before
            assert len(world.lines()) == lines
            # The control: its owner and an admin get further.
            for agent in (ALICE, CHIEF):
                try:
                    found = call(service, agent, own)
                    if inspect.isawaitable(found):
                        await found
                except Problem as problem:
                    # The second of them comes after the first has deleted or paused it.
                    assert agent is CHIEF or problem.code == "WRONG_STATE"  # noqa: PT017

    go(check())


@pytest.mark.parametrize("method", FILES)
def test_cannot_use_files_of_a_sandbox_that_is_gone_or_changed_hands(
    tmp_path: Path, method: str
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish())).id
            files = service.files(ALICE, box)
            await files.write("x", data())
            await FILES[method](files)  # the control
            await service.delete(ALICE, box)
            await outcome(FILES[method], files)

    go(check())


def test_cannot_see_others_in_lists_or_counts(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish(metadata={"k": "v"}))).id
            job = await service.run(ALICE, run_wish("hold"))
            assert service.sandboxes(BOB) == service.executions(BOB) == []
            assert service.sandboxes(BOB, owner="alice") == []
            assert service.sandboxes(BOB, metadata={"k": "v"}) == []
            assert service.executions(BOB, owner="alice") == []
            assert service.executions(BOB, sandbox=box) == []
            identity = service.whoami(BOB)
            assert (identity.sandboxes, identity.running, identity.queued) == (0, 0, 0)
            # The control.
            assert len(service.sandboxes(CHIEF)) == 2
            assert [one.id for one in service.executions(CHIEF)] == [job.id]

    go(check())


def test_cannot_take_over_by_anothers_idempotency_key(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            mine = await world.service.run(ALICE, run_wish("echo", "secret"), key="k")
            theirs = await world.service.run(BOB, run_wish("echo", "secret"), key="k")
            assert mine.id != theirs.id

    go(check())


SCOPED: dict[str, tuple[str, Callable[[Service, Agent, str], Any]]] = {
    **{name: ("sandbox:create", BOXES[name]) for name in
       ("delete", "renew", "pause", "resume", "set_metadata")},
    "create": ("sandbox:create", lambda s, a, _: s.create(a, Wish())),
    "run": ("sandbox:create", lambda s, a, _: s.run(a, run_wish("true"))),
    "run exec": ("exec", lambda s, a, _: s.run(a, run_wish("true"))),
    "execute": ("exec", BOXES["execute"]),
    "files": ("files", BOXES["files"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCOPED)
def test_cannot_act_without_the_scope(tmp_path: Path, name: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            scope, call = SCOPED[name]
            calls = len(world.backend.calls)
            poor = ALICE.replace(scopes=ALICE.scopes - {scope})

            async def act() -> None:
                found = call(world.service, poor, box)
                if inspect.isawaitable(found):
                    await found

            await refused(act(), "SCOPE_MISSING")
            assert len(world.backend.calls) == calls

    go(check())


def test_what_an_admin_runs_in_a_sandbox_is_its_owners_to_see(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(CHIEF, box, cmd("echo", "x"))
            await job.wait()
            assert world.service.job(ALICE, job.id).execution.owner == "alice"
            assert world.lines("exec.start")[0]["actor"]["agent"] == "chief"

    go(check())
