"""The audit: a line before the act, for every act; no line, no act; no secrets in it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.audit import Audit
from agent_sandbox.service.backend.interface import Terminal
from agent_sandbox.service.core.later import Later
from agent_sandbox.service.core.service import Service
from agent_sandbox.service.core.wishes import FilePut, Wish
from agent_sandbox.service.problems import Problem

from .lab import ALICE, Lab, cmd, go, lab, refused, run_wish

SECRET = "hunter2-very-secret"


async def data() -> AsyncIterator[bytes]:
    yield SECRET.encode()


# Act → its action in the audit, and the call with a sandbox and an execution in it.
ACTS: dict[str, tuple[str, Callable[[Service, str, str], Any]]] = {
    "create": ("sandbox.create", lambda s, _b, _e: s.create(ALICE, Wish(
        env={"A": SECRET}, files=(FilePut(path="x", data=SECRET.encode()),)), request_id="r")),
    "renew": ("sandbox.renew", lambda s, b, _: s.renew(ALICE, b, timeout=5.0, request_id="r")),
    "pause": ("sandbox.pause", lambda s, b, _: s.pause(ALICE, b, request_id="r")),
    "metadata": ("sandbox.metadata",
                 lambda s, b, _: s.set_metadata(ALICE, b, {"x": SECRET}, request_id="r")),
    "delete": ("sandbox.delete", lambda s, b, _: s.delete(ALICE, b, request_id="r")),
    "execute": ("exec.start", lambda s, b, _: s.execute(ALICE, b, cmd(
        "echo", f"--password={SECRET}", env={"A": SECRET}, stdin=SECRET.encode()),
        request_id="r")),
    "run": ("exec.start", lambda s, _b, _e: s.run(ALICE, run_wish(
        "echo", "token=" + SECRET, sandbox=Wish(env={"B": SECRET})), request_id="r")),
    "stdin": ("exec.stdin", lambda s, _, e: s.stdin(ALICE, e, SECRET.encode(), request_id="r")),
    "resize": ("exec.resize", lambda s, _, e: s.resize(ALICE, e, Terminal(), request_id="r")),
    "signal": ("exec.signal", lambda s, _, e: s.signal(ALICE, e, 15, request_id="r")),
    "kill": ("exec.signal", lambda s, _, e: s.kill(ALICE, e, request_id="r")),
    "forget": ("exec.forget", lambda s, _, e: s.forget(ALICE, e, request_id="r")),
    "file entry": ("file.stat", lambda s, b, _: s.files(ALICE, b, request_id="r").entry("f")),
    "file read": ("file.get", lambda s, b, _: s.files(ALICE, b, request_id="r").read("f")),
    "file write": ("file.put",
                   lambda s, b, _: s.files(ALICE, b, request_id="r").write("f", data())),
    "file delete": ("file.delete", lambda s, b, _: s.files(
        ALICE, b, request_id="r").delete("f", recursive=True)),
    "file make": ("file.mkdir", lambda s, b, _: s.files(ALICE, b, request_id="r").make("d")),
    "file list": ("file.list", lambda s, b, _: s.files(
        ALICE, b, request_id="r").list("", depth=1, most=5)),
    "file pack": ("file.pack", lambda s, b, _: s.files(ALICE, b, request_id="r").pack("")),
    "file unpack": ("file.unpack",
                    lambda s, b, _: s.files(ALICE, b, request_id="r").unpack("", data())),
}  # fmt: skip


async def prepared(world: Lab) -> tuple[str, str]:
    """A sandbox with a file, and a terminal that runs in it."""
    box = (await world.service.create(ALICE, Wish())).id
    await world.service.files(ALICE, box).write("f", data())
    job = await world.service.execute(ALICE, box, cmd("tty", terminal=Terminal()))
    return box, job.id


@pytest.mark.parametrize("act", ACTS)
def test_the_line_is_there_before_the_answer(tmp_path: Path, act: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box, job = await prepared(world)
            action, call = ACTS[act]
            answer = call(world.service, box, job)
            if inspect.isawaitable(answer):
                answer = await answer
            (line,) = [line for line in world.lines(action) if line.get("requestId") == "r"]
            assert line["actor"] == {"agent": "alice", "key": "sbx_aaaaaaaa"}
            assert line["decision"] == "allow"
            if act not in ("create", "run", "execute"):
                assert line["target"]["id"] in (box, job)
            else:
                assert line["target"]["id"] == answer.id
                assert line["limits"]
            if act in ("execute", "run"):
                await answer.wait()
                (end,) = [line for line in world.lines("exec.end") if line["requestId"] == "r"]
                assert end["result"]["exitCode"] == 0
                assert end["target"] == line["target"]
            whole = "".join(path.read_text() for path in (tmp_path / "d" / "audit").iterdir())
            assert SECRET not in whole

    go(check())


@pytest.mark.parametrize("act", ACTS)
def test_without_a_line_there_is_no_act(tmp_path: Path, act: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box, job = await prepared(world)
            running = world.backend.running(job)
            before = list(world.backend.calls), dict(world.backend.boxes[box].content)
            state = service.get(ALICE, box), service.job(ALICE, job).execution
            write = world.audit.write

            def full(*_: object, **__: object) -> int:
                raise Problem("AUDIT_UNAVAILABLE", "no room")

            world.audit.write = full  # type: ignore[method-assign]

            async def call() -> None:
                answer = ACTS[act][1](service, box, job)
                if inspect.isawaitable(answer):
                    await answer

            await refused(call(), "AUDIT_UNAVAILABLE")
            world.audit.write = write  # type: ignore[method-assign]
            after = list(world.backend.calls), dict(world.backend.boxes[box].content)
            if act != "run":
                assert after == before
            else:
                # A sandbox was made for it, no command was started in it, and it goes again.
                assert "start" not in [verb for verb, _ in after[0][len(before[0]) :]]
            assert not running.killed
            assert running.signals == []
            assert (service.get(ALICE, box), service.job(ALICE, job).execution) == state
            assert len(service.sandboxes(ALICE)) <= 2
            assert [one.id for one in service.executions(ALICE)] == [job]

    go(check())


def test_an_end_that_cannot_be_written_down_is_no_answer(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(ALICE, box, cmd("hold"))
            write = world.audit.write

            def full(*_: object, **__: object) -> int:
                raise Problem("AUDIT_UNAVAILABLE", "no room")

            world.audit.write = full  # type: ignore[method-assign]
            world.command(job).released.set()
            await refused(job.wait(), "AUDIT_UNAVAILABLE")
            world.audit.write = write  # type: ignore[method-assign]
            # The service goes on.
            assert world.service.counts().running == 0
            assert (await (await world.service.execute(ALICE, box, cmd("true"))).wait()).ended

    go(check())


def test_an_end_that_could_not_be_written_down_is_written_later(tmp_path: Path) -> None:
    """Once, with its line: no record says for ever that something runs which has ended."""

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(ALICE, box, cmd("hold"))
            put = world.store.put_execution

            def away(*_: object) -> None:
                raise Problem("STATE_UNAVAILABLE", "the database is away")

            world.store.put_execution = away  # type: ignore[method-assign]
            world.command(job).released.set()
            await refused(job.wait(), "STATE_UNAVAILABLE")
            assert service_state(world, job.id) == "Running"
            world.store.put_execution = put  # type: ignore[method-assign]
            await world.service._reaper.sweep()
            assert service_state(world, job.id) == "Exited"
            await world.service._reaper.sweep()
            assert [line["target"]["id"] for line in world.lines("exec.end")] == [job.id]

    go(check())


def service_state(world: Lab, execution: str) -> str:
    return world.service.job(ALICE, execution).execution.state


def test_later_is_for_each_group_and_for_each_step_once() -> None:
    done: list[str] = []
    broken = {"b", "x"}

    def step(name: str) -> Callable[[], None]:
        def act() -> None:
            if name in broken:
                raise OSError(name)
            done.append(name)

        return act

    later = Later(most=2)
    for names in ("abc", "x", "y", "xz"):
        with contextlib.suppress(OSError):
            later.do(*map(step, names))
    assert done == ["a", "y"]
    # The third that failed had no room.
    assert len(later) == 2
    broken.remove("x")
    later.again()
    later.again()
    assert done == ["a", "y", "x"]
    broken.clear()
    later.again()
    assert done == ["a", "y", "x", "b", "c"]
    assert len(later) == 0


def test_a_replayed_key_leaves_a_line_of_its_own(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            for request in ("one", "two"):
                await world.service.create(ALICE, Wish(), key="k", request_id=request)
            first, second = world.lines("sandbox.create")
            assert first["target"] == second["target"]
            assert second["rule"] == "idempotency.replay"

    go(check())


def test_a_terminal_leaves_one_line_for_all_of_its_keys(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            _, job = await prepared(world)
            for _ in range(50):
                await world.service.stdin(ALICE, job, b"x", request_id="session")
            await world.service.stdin(ALICE, job, b"x", request_id="another")
            assert len(world.lines("exec.stdin")) == 2

    go(check())


def test_the_chain_of_a_busy_service_verifies(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            await prepared(world)
            for _ in range(5):
                await (await world.service.run(ALICE, run_wish("true"))).wait()
            await world.kill()
            await world.start()
        again = Audit(str(tmp_path / "d" / "audit"))
        again.close()
        actions = [line["action"] for line in world.lines()]
        assert "audit.recovered" not in actions
        assert [line["seq"] for line in world.lines()] == list(range(1, len(actions) + 1))

    go(check())
