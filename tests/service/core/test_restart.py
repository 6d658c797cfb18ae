"""A service that was killed at any moment: what it acknowledged is there, the rest is gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agent_sandbox.service.audit import Audit
from agent_sandbox.service.backend.interface import Support
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.values import EXITED, FAILED, LOST, PAUSED, RUNNING, STOPPING

from ..fake_backend import ENFORCED, FakeBackend
from .lab import ALICE, Lab, cmd, go, lab, refused, run_wish, until


def test_running_executions_are_lost_with_a_line_and_sandboxes_stay_usable(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish(metadata={"a": "b"}))).id
            done = await service.execute(ALICE, box, cmd("echo", "done"))
            await done.wait()
            job = await service.execute(ALICE, box, cmd("hold"))
            shot = await service.run(ALICE, run_wish("hold"))
            await service.files(ALICE, box).make("directory")
            await world.kill()
            service = await world.start()
            for lost in (job, shot):
                end = service.job(ALICE, lost.id).execution
                assert (end.state, end.exit_code) == (LOST, None)
                assert end.ended > 0
                assert "stopped" in end.error
                assert await service.job(ALICE, lost.id).wait() == end
            lines = [line for line in world.lines("exec.end") if "actor" not in line]
            assert {line["target"]["id"] for line in lines} == {job.id, shot.id}
            assert {line["result"]["state"] for line in lines} == {LOST}
            # What had ended has its output.
            again = service.job(ALICE, done.id)
            assert (await again.journal.collect(100)).stdout == b"done\n"
            assert again.execution == done.execution
            # The sandbox is there, works, and nothing of the others is.
            assert [s.id for s in service.sandboxes(ALICE)] == [box]
            assert service.get(ALICE, box).metadata == {"a": "b"}
            assert list(world.backend.boxes) == [box]
            assert world.backend.boxes[box].running == {}
            assert (await (await service.execute(ALICE, box, cmd("true"))).wait()).exit_code == 0
            identity = service.whoami(ALICE)
            assert (identity.sandboxes, identity.running) == (1, 0)

    go(check())


def test_the_output_of_a_lost_execution_is_there_as_far_as_it_was_written(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(ALICE, box, cmd("cat", keep_input=True))
            await world.service.stdin(ALICE, job.id, b"x" * 100_000)
            await until(lambda: job.journal.end > 100_000)
            await world.kill()
            service = await world.start()
            stored = service.job(ALICE, job.id).journal
            assert sum([len(frame.data) async for frame in stored.follow()]) >= 65536

    go(check())


@pytest.mark.parametrize("moment", ["create", "after"])
def test_a_key_is_the_same_sandbox_after_a_restart(tmp_path: Path, moment: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            if moment == "create":

                async def die() -> None:
                    await asyncio.Event().wait()

                world.backend.before["create"] = die
                asyncio.create_task(world.service.create(ALICE, Wish(), key="k")).add_done_callback(
                    lambda task: task.cancelled() or task.exception()
                )
                await until(lambda: world.backend.calls)
                first = ""
            else:
                first = (await world.service.create(ALICE, Wish(), key="k")).id
            await world.kill()
            world.backend.before.clear()
            service = await world.start()
            again = await service.create(ALICE, Wish(), key="k")
            # What was never made is made now; what was made is found.
            assert again.id == first or not first
            assert list(world.backend.boxes) == [again.id]
            assert [s.id for s in service.sandboxes(ALICE)] == [again.id]
            other = service.create(ALICE, Wish(timeout=9.0), key="k")
            await refused(other, "IDEMPOTENCY_CONFLICT")

    go(check())


def test_a_key_does_not_run_a_command_twice_after_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            ended = await world.service.run(ALICE, run_wish("echo", "x"), key="ended")
            await ended.wait()
            job = await world.service.run(ALICE, run_wish("hold"), key="k")
            await world.kill()
            service = await world.start()
            again = await service.run(ALICE, run_wish("hold"), key="k")
            assert (again.id, again.execution.state) == (job.id, LOST)
            again = await service.run(ALICE, run_wish("echo", "x"), key="ended")
            assert (again.id, again.execution.state) == (ended.id, EXITED)
            assert [verb for verb, _ in world.backend.calls].count("start") == 2

    go(check())


@pytest.mark.parametrize("verb", ["create", "delete"])
def test_what_was_half_made_or_half_removed_is_gone(tmp_path: Path, verb: str) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service

            async def die() -> None:
                await asyncio.Event().wait()

            world.backend.before[verb] = die
            work: asyncio.Task[object]
            if verb == "create":
                work = asyncio.create_task(service.create(ALICE, Wish()))
            else:
                box = (await service.create(ALICE, Wish())).id
                work = asyncio.create_task(service.delete(ALICE, box))
            await until(lambda: [c for c in world.backend.calls if c[0] == verb])
            if verb == "delete":
                assert service.sandboxes(ALICE)[0].state == STOPPING
            await world.kill()
            await asyncio.gather(work, return_exceptions=True)
            world.backend.before.clear()
            service = await world.start()
            assert service.sandboxes(ALICE) == []
            assert world.backend.boxes == {}
            assert world.lines("sandbox.reap")

    go(check())


def test_a_sandbox_that_the_machine_lost_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_sandboxes_per_agent=1)) as world:
            box = (await world.service.create(ALICE, Wish(timeout=100.0))).id
            await world.kill()
            world.backend.boxes.clear()
            service = await world.start()
            lost = service.get(ALICE, box)
            assert lost.state == FAILED
            assert "does not have it" in lost.reason
            problem = await refused(service.execute(ALICE, box, cmd("true")), "WRONG_STATE")
            assert "does not have it" in problem.message
            # It takes up no room, survives another restart, and goes when its time is over.
            await service.create(ALICE, Wish())
            await world.kill()
            service = await world.start()
            await service._reaper.sweep()
            assert service.get(ALICE, box).state == FAILED
            assert service.whoami(ALICE).sandboxes == 1
            world.shift += 101
            await service._reaper.sweep()
            await until(lambda: box not in {s.id for s in service.sandboxes(ALICE)})

    go(check())


def test_a_paused_sandbox_stays_paused(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            await world.service.pause(ALICE, box)
            await world.kill()
            service = await world.start()
            assert service.get(ALICE, box).state == PAUSED
            assert (await service.resume(ALICE, box)).state == RUNNING

    go(check())


def test_an_idle_time_begins_anew_with_the_service(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(idle_timeout=100.0)) as world:
            box = (await world.service.create(ALICE, Wish())).id
            world.shift += 99
            await (await world.service.execute(ALICE, box, cmd("true"))).wait()
            # Not saved yet: only memory knew of the last use.
            await world.kill()
            world.shift += 50
            service = await world.start()
            await service._reaper.sweep()
            assert box in world.backend.boxes
            world.shift += 101
            await service._reaper.sweep()
            await until(lambda: box not in world.backend.boxes)

    go(check())


def test_the_last_use_is_saved_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            world.shift += 50
            await (await world.service.execute(ALICE, box, cmd("true"))).wait()
            now = world.service.get(ALICE, box).last_used
            assert world.service.sandboxes(ALICE)[0].last_used == now
            stored = world.store.get_sandbox(box)
            assert stored is not None
            assert stored.last_used < now
            await world.service._reaper.tidy()
            stored = world.store.get_sandbox(box)
            assert stored is not None
            assert stored.last_used == now

    go(check())


def test_output_that_the_store_forgot_is_removed(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(ALICE, box, cmd("echo", "x"))
            await job.wait()
            world.store.delete_execution(job.id)
            file = tmp_path / "d" / "executions" / job.id
            strange = file.with_name("strange")
            strange.touch()
            assert file.exists()
            await world.kill()
            await world.start()
            await until(lambda: not file.exists())
            assert strange.exists()

    go(check())


def test_a_backend_that_is_away_at_the_start_is_taken_in_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_sandbox.service.core.context.PROBE_AGAIN", 0.0)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish(timeout=100.0))).id
            await world.kill()
            here = world.backend.support
            world.backend.support = Support(ok=False, reason="the engine is down")
            service = await world.start()
            assert await service.ready() == (False, "backend")
            await refused(service.execute(ALICE, box, cmd("true")), "BACKEND_UNAVAILABLE")
            await refused(service.create(ALICE, Wish()), "BACKEND_UNAVAILABLE")
            await refused(service.usage(ALICE, box), "BACKEND_UNAVAILABLE")
            await refused(service.run(ALICE, run_wish("true")), "BACKEND_UNAVAILABLE")
            # It may be there: so it stays, even beyond its time.
            world.shift += 101
            await service._reaper.sweep()
            assert service.get(ALICE, box).state == RUNNING
            world.shift -= 101
            world.backend.support = here
            await service._reaper.sweep()
            assert await service.ready() == (True, "")
            assert (await (await service.execute(ALICE, box, cmd("true"))).wait()).exit_code == 0
            # Away for a while, and seen so: the next request asks again.
            world.backend.support = Support(ok=False)
            assert await service.ready() == (False, "backend")
            world.backend.support = here
            assert (await (await service.run(ALICE, run_wish("true"))).wait()).exit_code == 0

    go(check())


def test_a_stopped_service_starts_again_with_everything(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            job = await world.service.execute(ALICE, box, cmd("stubborn"))
            await world.stop(0.01)
            service = await world.start()
            assert service.get(ALICE, box).state == RUNNING
            end = service.job(ALICE, job.id).execution
            assert (end.state, end.error) == (EXITED, "the service was stopped")

    go(check())


def test_killed_at_every_line_of_the_audit_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """The process dies while it writes line N, for every N of a short life."""

    class Died(BaseException):
        pass

    async def life(world: Lab, known: dict[str, str]) -> None:
        service = world.service
        known["box"] = (await service.create(ALICE, Wish(), key="c")).id
        job = await service.execute(ALICE, known["box"], cmd("echo", "x"))
        end = await job.wait()
        known["ended"] = end.id
        run = await service.run(ALICE, run_wish("echo", "y"), key="r")
        await run.wait()
        known["run"] = run.id
        await service.delete(ALICE, known["box"])
        known["deleted"] = known.pop("box")

    async def check(number: int) -> bool:
        data = tmp_path / f"d{number}"
        async with lab(data, backend=FakeBackend(Support(ok=True, enforced=ENFORCED))) as world:
            known: dict[str, str] = {}
            write, left = world.audit.write, number

            def dying(*words: object, **named: object) -> int:
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError("killed")
                return write(*words, **named)  # type: ignore[arg-type]

            world.audit.write = dying  # type: ignore[method-assign]
            task = asyncio.create_task(life(world, known))
            await asyncio.wait((task,), timeout=5)
            finished = task.exception() is None
            await world.kill()
            world.audit = Audit(os.fspath(data / "audit"))
            world.audit.close()
            service = await world.start()
            boxes = {s.id for s in service.sandboxes(ALICE)}
            assert set(world.backend.boxes) == boxes
            if "box" in known:
                # Its deletion was not acknowledged: it is there, or its removal had begun.
                assert known["box"] in boxes or world.lines("sandbox.delete")
            if "deleted" in known:
                assert known["deleted"] not in boxes
            for name in ("ended", "run"):
                if name in known:
                    assert service.job(ALICE, known[name]).execution.state == EXITED
            assert service.executions(ALICE, state=RUNNING) == []
            return finished

    finished = [go(check(number)) for number in range(12)]
    # The control: some lives were cut short, the last ones were not.
    assert finished[0] is False
    assert finished[-1] is True
