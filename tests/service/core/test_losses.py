"""A sandbox that is gone without our doing: who waits is told, nothing runs twice by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend.interface import Ended, Support
from agent_sandbox.service.core import losses
from agent_sandbox.service.core.jobs import Job
from agent_sandbox.service.core.journal import Journal
from agent_sandbox.service.core.templates import Template
from agent_sandbox.service.core.wishes import FilePut, Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import EXITED, FAILED, LOST, RUNNING, Resources

from ..fake_backend import ENFORCED, FakeBackend
from . import lab as labs
from .lab import ALICE, Lab, cmd, go, refused, run_wish, until

WHY = "node n1 does not answer"
# Far less than any timeout of these tests: what comes within it was not waited for.
AT_ONCE = 5.0
_gates: list[asyncio.Event] = []


@asynccontextmanager
async def one(data: Path, **options: Any) -> AsyncIterator[Lab]:
    async with labs.lab(data, **options) as world:
        try:
            yield world
        finally:
            # Else a test that fails at a gate would wait for the stop for ever.
            while _gates:
                _gates.pop().set()


async def ends(job: Job) -> Any:
    async with asyncio.timeout(AT_ONCE):
        return await job.wait()


def gate() -> tuple[asyncio.Event, asyncio.Event, Callable[[], Awaitable[None]]]:
    """A hook that tells when it is reached, and waits to be let go."""
    reached, opened = asyncio.Event(), asyncio.Event()
    _gates.append(opened)

    async def hook() -> None:
        reached.set()
        await opened.wait()

    return reached, opened, hook


def test_who_waits_for_a_command_of_a_lost_sandbox_is_told_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            service = world.service
            box = await service.create(ALICE, Wish())
            jobs = [await service.execute(ALICE, box.id, cmd("immortal")) for _ in range(2)]
            waiting = asyncio.ensure_future(ends(jobs[0]))
            await asyncio.sleep(0)
            world.backend.lost(box.id, WHY)
            for found in (await waiting, await ends(jobs[1])):
                assert (found.state, found.exit_code, found.error) == (LOST, None, WHY)
                assert service.store.get_execution(found.id) == found
            assert {(x["result"]["state"], x["result"]["error"])
                    for x in world.lines("exec.end")} == {(LOST, WHY)}  # fmt: skip
            assert "exitCode" not in world.lines("exec.end")[0]["result"]

    go(scene())


def test_a_lost_sandbox_says_why_takes_no_room_and_is_removed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path, limits=Limits(max_sandboxes_per_agent=1)) as world:
            service = world.service
            box = await service.create(ALICE, Wish())
            await refused(service.create(ALICE, Wish()), "QUOTA_EXCEEDED")
            world.backend.lost(box.id, WHY)
            found = service.get(ALICE, box.id)
            assert (found.state, found.reason) == (FAILED, WHY)
            assert service.store.get_sandbox(box.id) == found
            line = world.lines("sandbox.lost")[0]
            assert (line["target"]["id"], line["reason"]) == (box.id, WHY)
            assert service.counts().lost == 1
            await service.create(ALICE, Wish())
            error = await refused(service.execute(ALICE, box.id, cmd("true")), "WRONG_STATE")
            assert WHY in error.message
            await until(lambda: box.id not in world.backend.boxes)
            await service.delete(ALICE, box.id)
            await refused(_get(world, box.id), "NOT_FOUND")

    go(scene())


async def _get(world: Lab, sandbox_id: str) -> object:
    return world.service.get(ALICE, sandbox_id)


def test_a_loss_that_cannot_be_stored_is_a_loss_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise Problem("DISK_FULL", "no room")

    async def scene() -> None:
        async with one(tmp_path) as world:
            service = world.service
            box = await service.create(ALICE, Wish())
            job = await service.execute(ALICE, box.id, cmd("immortal"))
            with monkeypatch.context() as patched:
                patched.setattr(world.store, "put_sandbox", away)
                world.backend.lost(box.id, WHY)
                assert (await ends(job)).state == LOST
                await refused(service.execute(ALICE, box.id, cmd("true")), "WRONG_STATE")
                assert service.whoami(ALICE).sandboxes == 0
            # It is made up for as soon as it can be.
            service._reaper.save()
            stored = service.store.get_sandbox(box.id)
            assert stored is not None
            assert (stored.state, stored.reason) == (FAILED, WHY)

    go(scene())


def test_what_is_left_of_it_is_removed_when_the_backend_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "FIRST_PAUSE", 0.001)
    tries = 0

    async def fails() -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise Problem("BACKEND_UNAVAILABLE", "not now")

    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            world.backend.before["delete"] = fails
            world.backend.lost(box.id, WHY)
            # Also when its owner has it forgotten meanwhile.
            await world.service.delete(ALICE, box.id)
            await until(lambda: box.id not in world.backend.boxes)
            assert tries == 4

    go(scene())


def test_a_removal_that_does_not_end_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            reached, _, world.backend.before["delete"] = gate()
            world.backend.lost(box.id, WHY)
            await reached.wait()
            async with asyncio.timeout(AT_ONCE):
                await world.service.stop(30.0)
            world.backend.before.clear()
            world._close()
            # The next start knows only its reason, so the backend removes the rest.
            assert box.id in world.backend.boxes
            await world.start()
            assert box.id not in world.backend.boxes
            assert world.service.get(ALICE, box.id).reason == WHY

    go(scene())


def test_lost_twice_is_lost_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            job = await world.service.execute(ALICE, box.id, cmd("hold"))
            world.backend.lost(box.id, WHY)
            world.backend.lost(box.id, "another reason")
            assert (await ends(job)).error == WHY
            world.backend.lost(box.id, "another reason")
            assert world.service.get(ALICE, box.id).reason == WHY
            assert len(world.lines("sandbox.lost")) == 1
            assert len(world.lines("exec.end")) == 1

    go(scene())


def test_a_loss_after_the_end_changes_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            service = world.service
            box = await service.create(ALICE, Wish())
            before = await (await service.execute(ALICE, box.id, cmd("true"))).wait()
            shot = await (await service.run(ALICE, run_wish("true"))).wait()
            await until(lambda: shot.sandbox not in world.backend.boxes)
            for name in (box.id, shot.sandbox, "sbx-nobody-knows"):
                world.backend.lost(name, WHY)
            for found in (before, shot):
                assert service.job(ALICE, found.id).execution == found
                assert (found.state, found.exit_code) == (EXITED, 0)
            assert [line["target"]["id"] for line in world.lines("sandbox.lost")] == [box.id]

    go(scene())


def test_an_end_that_is_seen_in_the_same_moment_as_the_loss_is_written_once(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            for steps in range(8):
                box = await world.service.create(ALICE, Wish())
                job = await world.service.execute(ALICE, box.id, cmd("hold"))
                world.command(job).released.set()
                for _ in range(steps):
                    await asyncio.sleep(0)
                world.backend.lost(box.id, WHY)
                found = await ends(job)
                assert (found.state, found.exit_code) in {(LOST, None), (EXITED, 0)}
                ends_of = [x for x in world.lines("exec.end") if x["target"]["id"] == job.id]
                assert len(ends_of) == 1
            await until(lambda: world.service.whoami(ALICE).running == 0)

    go(scene())


def test_a_command_that_was_just_started_is_lost_before_its_first_step(tmp_path: Path) -> None:
    """The loss may come before the task that waits for the end has begun."""

    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            starting = asyncio.ensure_future(world.service.execute(ALICE, box.id, cmd("hold")))
            live = world.service._context.live[box.id]
            while not live.jobs or next(iter(live.jobs.values())).watch is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            world.backend.lost(box.id, WHY)
            assert (await ends(await starting)).state == LOST
            await until(lambda: world.service.whoami(ALICE).running == 0)

    go(scene())


def test_a_command_is_lost_while_it_starts_though_the_start_never_returns(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            reached, _, world.backend.before["start"] = gate()
            starting = asyncio.ensure_future(world.service.execute(ALICE, box.id, cmd("true")))
            await reached.wait()
            world.backend.lost(box.id, WHY)
            async with asyncio.timeout(AT_ONCE):
                job = await starting
            found = await ends(job)
            assert (found.state, found.exit_code, found.error) == (LOST, None, WHY)
            await until(lambda: world.service.whoami(ALICE).running == 0)

    go(scene())


def test_a_start_that_fails_because_of_the_loss_is_a_loss(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())

            async def broken() -> None:
                world.backend.lost(box.id, WHY)
                raise Problem("BACKEND_UNAVAILABLE", "the connection broke")

            world.backend.before["start"] = broken
            job = await world.service.execute(ALICE, box.id, cmd("true"))
            assert ((await ends(job)).state, (await ends(job)).error) == (LOST, WHY)

    go(scene())


def test_a_sandbox_that_is_lost_while_it_is_made_is_a_failure_that_leaves_nothing(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            reached, opened, world.backend.before["create"] = gate()
            for work in (world.service.create(ALICE, Wish()),
                         world.service.run(ALICE, run_wish("true"))):  # fmt: skip
                making = asyncio.ensure_future(work)
                await reached.wait()
                (sandbox_id,) = world.service._context.live
                world.backend.lost(sandbox_id, WHY)
                opened.set()
                error = await refused(making, "BACKEND_UNAVAILABLE")
                assert (error.rule, error.retry_after) == ("sandbox.lost", 1.0)
                assert WHY in error.message
                assert not world.backend.boxes
                assert not world.service._context.live
                await until(lambda: world.service.whoami(ALICE).running == 0)
                reached.clear()
                opened.clear()
            assert len(world.lines("sandbox.lost")) == 2

    go(scene())


def test_a_sandbox_that_is_lost_while_it_is_paused_stays_lost(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            for verb, act in (("pause", world.service.pause), ("renewed", _renew(world))):
                box = await world.service.create(ALICE, Wish())
                reached, opened, world.backend.before[verb] = gate()
                acting = asyncio.ensure_future(act(ALICE, box.id))
                await reached.wait()
                world.backend.lost(box.id, WHY)
                opened.set()
                with pytest.raises(Problem, match=WHY):
                    await acting
                assert world.service.get(ALICE, box.id).state == FAILED

    go(scene())


def _renew(world: Lab) -> Any:
    return lambda agent, box: world.service.renew(agent, box, timeout=60.0)


def test_a_command_does_not_wait_for_a_removal_that_a_dead_machine_holds_up(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish())
            job = await world.service.execute(ALICE, box.id, cmd("immortal"))
            reached, opened, world.backend.before["delete"] = gate()
            deleting = asyncio.ensure_future(world.service.delete(ALICE, box.id))
            await reached.wait()
            world.backend.lost(box.id, WHY)
            assert (await ends(job)).state == LOST
            opened.set()
            await deleting
            await refused(_get(world, box.id), "NOT_FOUND")
            assert not world.lines("sandbox.lost")

    go(scene())


def test_a_backend_may_lose_one_command_and_keep_its_sandbox(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            service = world.service
            box = await service.create(ALICE, Wish())
            job = await service.execute(ALICE, box.id, cmd("hold"))
            world.command(job)._ended.set_result(Ended(code=255, lost=True, error="cut off"))
            found = await ends(job)
            assert (found.state, found.exit_code, found.error) == (LOST, None, "cut off")
            assert service.get(ALICE, box.id).state == RUNNING
            await (await service.execute(ALICE, box.id, cmd("true"))).wait()

    go(scene())


# --- once more, where the request asks for it


async def lose_first(world: Lab, job: Job) -> str:
    """Lose the sandbox in which a command runs at the moment."""
    await until(lambda: job.running is not None)
    gone = job.execution.sandbox
    world.backend.lost(gone, WHY)
    return gone


async def second_start(job: Job) -> None:
    """Wait until it runs for the second time."""
    await until(lambda: job.execution.attempts == 2 and job.running is not None)


def test_cannot_run_a_lost_command_twice_without_being_asked(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold"))
            gone = await lose_first(world, job)
            found = await ends(job)
            assert (found.state, found.attempts, found.sandbox) == (LOST, 1, gone)
            await until(lambda: not world.backend.boxes)
            assert [verb for verb, _ in world.backend.calls].count("start") == 1
            # The control: with `retry` there is a second start.
            job = await world.service.run(ALICE, run_wish("hold").replace(retry=True))
            await lose_first(world, job)
            await second_start(job)
            assert [verb for verb, _ in world.backend.calls].count("start") == 3
            world.command(job).released.set()
            await ends(job)

    go(scene())


def test_a_retried_command_has_one_id_two_attempts_and_the_output_of_the_last(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold", timeout=50).replace(retry=True))
            first = world.command(job)
            first.sink(1, b"of the first time")
            gone = await lose_first(world, job)
            await second_start(job)
            # A dead machine that comes back must not speak for the second one.
            first.sink(1, b" and later")
            second = world.command(job)
            assert second.box.sandbox.id == job.execution.sandbox != gone
            second.sink(1, b"of the second")
            second.released.set()
            found = await ends(job)
            assert (found.state, found.exit_code, found.attempts) == (EXITED, 0, 2)
            assert found.stdout_bytes == len(b"of the second")
            # What the first wrote is dropped, wherever a reader begins.
            for offset in (0, 5, found.begins):
                last = await job.journal.collect(1 << 20, offset)
                assert last.stdout == b"of the second"
            # Both are in the audit.
            mine = [x for x in world.lines() if x["target"].get("id") == job.id]
            assert [(x["action"], x["target"]["sandbox"]) for x in mine] == [
                ("exec.start", gone), ("exec.end", gone),
                ("exec.start", found.sandbox), ("exec.end", found.sandbox),
            ]  # fmt: skip
            assert mine[1]["result"] == {"state": LOST, "attempt": 1, "error": WHY}
            assert (mine[2]["request"]["attempt"], mine[3]["result"]["attempt"]) == (2, 2)
            assert world.service.store.get_execution(job.id) == found

    go(scene())


def test_a_retried_command_keeps_no_more_output_than_one_start_may(tmp_path: Path) -> None:
    """The limit is that of one execution, in memory and on the disk, and all of it the second's."""
    most = 300_000

    async def scene() -> None:
        async with one(tmp_path, limits=Limits(max_output_bytes=most)) as world:
            job = await world.service.run(ALICE, run_wish("hold", timeout=50).replace(retry=True))
            file = tmp_path / "executions" / job.id
            world.command(job).sink(1, b"1" * (most + 1))
            assert most <= file.stat().st_size + job.journal.size <= 2 * most
            await lose_first(world, job)
            await second_start(job)
            assert (file.stat().st_size, job.journal.size) == (0, 0)
            second = world.command(job)
            second.sink(1, b"2" * most)
            second.released.set()
            found = await ends(job)
            assert (found.stdout_bytes, found.truncated, found.attempts) == (most, False, 2)
            # And as whoever finds it after a restart of the service.
            later = Journal.stored(str(file), found.begins)
            for journal in (job.journal, later):
                assert (await journal.collect(2 * most)).stdout == b"2" * most
                assert most < journal.size < most + 1000
            assert most < file.stat().st_size < most + 1000

    go(scene())


def test_a_retried_command_gets_the_same_input_files_and_variables(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            file = FilePut(path="in.txt", data=b"a file")
            wish = run_wish(
                "cat", stdin=b"the input", env={"A": "b"}, sandbox=Wish(files=(file,))
            ).replace(retry=True)
            reached, opened, world.backend.before["start"] = gate()
            starting = asyncio.ensure_future(world.service.run(ALICE, wish))
            await reached.wait()
            (gone,) = world.backend.boxes
            reached.clear()
            world.backend.lost(gone, WHY)
            await reached.wait()
            (box,) = (world.backend.boxes[one] for one in world.backend.boxes if one != gone)
            assert box.content == {"/workspace/in.txt": b"a file"}
            opened.set()
            job = await starting
            found = await ends(job)
            assert (found.attempts, found.sandbox) == (2, box.sandbox.id)
            assert (await job.journal.collect(100)).stdout == b"the input"
            await until(lambda: world.service.whoami(ALICE).running == 0)

    go(scene())


def test_a_command_is_run_again_once_only(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold").replace(retry=True))
            await lose_first(world, job)
            await second_start(job)
            await lose_first(world, job)
            found = await ends(job)
            assert (found.state, found.attempts, found.error) == (LOST, 2, WHY)
            assert len(world.lines("exec.start")) == 2
            await until(lambda: world.service.whoami(ALICE).running == 0)
            assert world.service.whoami(ALICE).sandboxes == 0

    go(scene())


def test_a_loss_that_both_the_command_and_the_backend_tell_of_is_one(tmp_path: Path) -> None:
    """As a cut connection does: whichever word comes first, there are two attempts."""

    async def scene() -> None:
        async with one(tmp_path) as world:
            for steps in range(8):
                job = await world.service.run(ALICE, run_wish("hold").replace(retry=True))
                gone = job.execution.sandbox
                cut = Ended(code=255, lost=True, error="cut off")
                world.command(job)._ended.set_result(cut)
                for _ in range(steps):
                    await asyncio.sleep(0)
                world.backend.lost(gone, WHY)
                await second_start(job)
                world.command(job).released.set()
                found = await ends(job)
                assert (found.state, found.attempts, found.exit_code) == (EXITED, 2, 0)
                lines = [x for x in world.lines("sandbox.lost") if x["target"]["id"] == gone]
                assert len(lines) == 1

    go(scene())


def test_a_retry_under_a_key_is_one_request(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            service, wish = world.service, run_wish("hold").replace(retry=True)
            job = await service.run(ALICE, wish, key="k")
            await lose_first(world, job)
            # Asked again while the second time is prepared, while it runs, and at its end.
            assert (await service.run(ALICE, wish, key="k")) is job
            await second_start(job)
            assert (await service.run(ALICE, wish, key="k")) is job
            world.command(job).released.set()
            assert (await ends(job)).attempts == 2
            replayed = await service.run(ALICE, wish, key="k")
            assert replayed.execution == job.execution
            starts = [x for x in world.lines("exec.start") if x.get("rule") != "idempotency.replay"]
            assert len(starts) == 2
            # Whether to run it again is part of the request.
            await refused(service.run(ALICE, run_wish("hold"), key="k"), "IDEMPOTENCY_CONFLICT")

    go(scene())


def test_a_key_of_a_lost_command_gives_the_loss_and_never_a_second_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold"), key="k")
            await lose_first(world, job)
            await ends(job)
            again = await world.service.run(ALICE, run_wish("hold"), key="k")
            assert (again.id, again.execution.state) == (job.id, LOST)
            assert [verb for verb, _ in world.backend.calls].count("start") == 1

    go(scene())


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_cannot_run_again_what_was_ended_meanwhile(tmp_path: Path, how: str) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            service = world.service
            job = await service.run(ALICE, run_wish("hold").replace(retry=True))
            reached, opened, world.backend.before["create"] = gate()
            await lose_first(world, job)
            await reached.wait()
            if how == "kill":
                ending = asyncio.ensure_future(service.kill(ALICE, job.id))
            else:
                ending = asyncio.ensure_future(service.stop(0.0))  # type: ignore[arg-type]
            await until(lambda: job.cause)
            opened.set()
            await ending
            found = await ends(job)
            assert (found.state, found.attempts, found.exit_code) == (LOST, 1, None)
            assert found.error == f"{WHY}; not run again: it was ended meanwhile"
            assert [verb for verb, _ in world.backend.calls].count("start") == 1
            await until(lambda: not world.backend.boxes)

    go(scene())


def test_a_second_sandbox_that_cannot_be_had_leaves_the_loss_with_both_reasons(
    tmp_path: Path,
) -> None:
    async def full() -> None:
        raise Problem("BACKEND_UNAVAILABLE", "no node has room")

    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold").replace(retry=True))
            world.backend.before["create"] = full
            await lose_first(world, job)
            found = await ends(job)
            assert (found.state, found.attempts) == (LOST, 1)
            assert found.error == f"{WHY}; not run again: no node has room"
            await until(lambda: world.service.whoami(ALICE).running == 0)

    go(scene())


def test_a_retry_has_the_place_of_the_first_time_and_its_quota(tmp_path: Path) -> None:
    limits = Limits(max_sandboxes_per_agent=1, max_concurrent_execs=1)

    async def scene() -> None:
        async with one(tmp_path, limits=limits) as world:
            job = await world.service.run(ALICE, run_wish("hold").replace(retry=True))
            queued = asyncio.ensure_future(world.service.run(ALICE, run_wish("true")))
            await until(lambda: world.service.whoami(ALICE).queued == 1)
            await lose_first(world, job)
            await second_start(job)
            assert not queued.done()
            world.command(job).released.set()
            assert (await ends(job)).exit_code == 0
            assert (await ends(await queued)).exit_code == 0

    go(scene())


@pytest.mark.parametrize("fields", [{"keep_input": True}, {"terminal": "yes"}])
def test_input_that_comes_later_cannot_be_had_twice(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            wish = run_wish("hold", **fields).replace(retry=True)
            error = await refused(world.service.run(ALICE, wish), "INVALID")
            assert error.field == "retry"
            assert not world.backend.calls

    go(scene())


def test_a_kill_of_the_service_between_two_attempts_runs_nothing_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            job = await world.service.run(ALICE, run_wish("hold").replace(retry=True), key="k")
            reached, _, world.backend.before["create"] = gate()
            await lose_first(world, job)
            await reached.wait()
            await world.kill()
            world.backend.before.clear()
            await world.start()
            found = world.service.job(ALICE, job.id).execution
            assert found.state == LOST
            again = await world.service.run(ALICE, run_wish("hold").replace(retry=True), key="k")
            assert again.execution == found
            assert [verb for verb, _ in world.backend.calls].count("start") == 1

    go(scene())


# --- what a backend says of one sandbox, and is told


def test_what_keeps_what_in_this_very_sandbox_is_shown(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            world.backend.keeps = {"filesystem": "bwrap", "pids": "rlimit"}
            box = await world.service.create(ALICE, Wish())
            assert box.enforced == {**ENFORCED, "filesystem": "bwrap", "pids": "rlimit"}
            assert world.service.store.get_sandbox(box.id) == box
            # A bound that was promised and is not kept is no sandbox.
            world.backend.keeps = {"memory": ""}
            await refused(
                world.service.create(ALICE, Wish(resources=Resources(memory=1 << 20))),
                "LIMIT_NOT_ENFORCEABLE",
            )
            assert set(world.backend.boxes) == {box.id}

    go(scene())


def test_the_service_keeps_the_disk_where_it_is_one_of_those_who_do(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            world.backend.keeps = {"disk": "kubelet+server"}
            box = await world.service.create(ALICE, Wish(resources=Resources(disk=1000)))
            job = await world.service.execute(ALICE, box.id, cmd("fill", "2000"))
            assert (await job.wait()).exceeded == "disk"

    go(scene())


def test_a_renewal_is_for_the_backend_too_and_its_refusal_is_the_answer(tmp_path: Path) -> None:
    async def refuses() -> None:
        raise Problem("BACKEND_UNAVAILABLE", "the pod does not answer")

    async def scene() -> None:
        async with one(tmp_path) as world:
            box = await world.service.create(ALICE, Wish(timeout=100.0))
            renewed = await world.service.renew(ALICE, box.id, timeout=500.0)
            assert world.backend.boxes[box.id].sandbox.expires == renewed.expires > box.expires
            world.backend.before["renewed"] = refuses
            await refused(world.service.renew(ALICE, box.id, timeout=900.0), "BACKEND_UNAVAILABLE")
            assert world.service.get(ALICE, box.id).expires == renewed.expires

    go(scene())


# --- templates


def test_a_backend_gets_to_know_what_to_have_ready(tmp_path: Path) -> None:
    templates = {
        "fast": Template(name="fast", warm=3, inner="required", env={"A": "b"},
                         resources=Resources(memory=1 << 26)),
        "cold": Template(name="cold"),
        "other": Template(name="other", warm=2, backend="docker"),
        "wrong": Template(name="wrong", warm=2, image="none-here"),
    }  # fmt: skip
    support = Support(ok=True, enforced=ENFORCED, inner=True)

    async def scene() -> None:
        async with one(tmp_path, templates=templates, backend=FakeBackend(support)) as world:
            assert world.backend.wanted is not None
            (warm,) = world.backend.wanted
            assert (warm.template, warm.count) == ("fast", 3)
            box = await world.service.create(ALICE, Wish(template="fast"))
            same = ("backend", "template", "image", "digest", "runtime", "env", "resources",
                    "enforced", "network", "inner")  # fmt: skip
            for name in same:
                assert getattr(warm.sandbox, name) == getattr(box, name), name
            assert box.inner == "required"
        async with one(tmp_path) as world:
            # Without templates it is told so: what an earlier one wanted is surplus.
            assert world.backend.wanted == ()

    go(scene())


def test_a_pool_that_cannot_be_had_does_not_stop_the_service(tmp_path: Path) -> None:
    async def broken() -> None:
        raise RuntimeError("no")

    async def scene() -> None:
        backend = FakeBackend()
        backend.before["prepare"] = broken
        async with one(tmp_path, backend=backend) as world:
            await world.service.create(ALICE, Wish())

    go(scene())


def test_cannot_have_a_sandbox_without_the_layer_that_its_template_requires(tmp_path: Path) -> None:
    templates = {name: Template(name=name, inner=name) for name in ("required", "preferred", "off")}

    async def scene() -> None:
        async with one(tmp_path, templates=templates) as world:
            error = await refused(
                world.service.create(ALICE, Wish(template="required")), "UNSUPPORTED"
            )
            assert error.field == "template"
            for name in ("preferred", "off"):
                box = await world.service.create(ALICE, Wish(template=name))
                assert box.inner == name

    go(scene())


# --- compared again


def comparing(seconds: float = 0.01) -> FakeBackend:
    backend = FakeBackend()
    backend.reconcile_seconds = seconds
    return backend


async def compare(world: Lab) -> None:
    """One comparison, from its beginning to its end."""
    reaper = world.service._reaper
    await asyncio.sleep(0.02)
    await reaper._reconcile()
    await asyncio.gather(*reaper._comparing.values())


def test_what_is_gone_without_a_word_is_found_by_the_next_comparison(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path, backend=comparing()) as world:
            kept = await world.service.create(ALICE, Wish())
            gone = await world.service.create(ALICE, Wish())
            stays = await world.service.execute(ALICE, kept.id, cmd("hold"))
            job = await world.service.execute(ALICE, gone.id, cmd("immortal"))
            del world.backend.boxes[gone.id]
            await world.service._reaper._reconcile()
            await compare(world)
            assert (await ends(job)).state == LOST
            assert world.service.get(ALICE, gone.id).state == FAILED
            assert world.service.get(ALICE, kept.id).state == RUNNING
            assert not stays.ended
            world.command(stays).released.set()

    go(scene())


def test_a_comparison_never_takes_what_is_made_meanwhile_for_unknown(tmp_path: Path) -> None:
    class Slow(FakeBackend):
        """Looks around first, and asks later, as a cluster does."""

        async def reconcile(self, known: Any) -> frozenset[str]:
            await self._hook("reconcile")
            for name in tuple(self.boxes):
                if name not in known:
                    del self.boxes[name]
            return frozenset(self.boxes)

    async def scene() -> None:
        backend = Slow()
        backend.reconcile_seconds = 0.01
        async with one(tmp_path, backend=backend) as world:
            before, opened_create, hook = gate()
            backend.before["create"] = hook
            making = asyncio.ensure_future(world.service.create(ALICE, Wish()))
            await before.wait()
            reached, opened, backend.before["reconcile"] = gate()
            await world.service._reaper._reconcile()
            await asyncio.sleep(0.02)
            await world.service._reaper._reconcile()
            await reached.wait()
            # One that was being made when it began, and one that begins now.
            opened_create.set()
            first = await making
            second = await world.service.create(ALICE, Wish())
            shot = await world.service.run(ALICE, run_wish("hold"))
            removed = await world.service.create(ALICE, Wish())
            await world.service.delete(ALICE, removed.id)
            opened.set()
            await asyncio.gather(*world.service._reaper._comparing.values())
            assert set(backend.boxes) == {first.id, second.id, shot.execution.sandbox}
            assert world.service.get(ALICE, first.id).state == RUNNING
            assert not world.lines("sandbox.lost")
            world.command(shot).released.set()

    go(scene())


def test_a_comparison_that_hangs_holds_up_neither_the_reaper_nor_the_stop(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path, backend=comparing()) as world:
            box = await world.service.create(ALICE, Wish())
            reached, _, world.backend.before["reconcile"] = gate()
            await world.service._reaper.sweep()
            await asyncio.sleep(0.02)
            await world.service._reaper.sweep()
            await reached.wait()
            world.shift = 10**6
            await world.service._reaper.sweep()
            await until(lambda: box.id not in world.backend.boxes)
            async with asyncio.timeout(AT_ONCE):
                await world.service._reaper.stop()

    go(scene())


def test_a_comparison_that_fails_is_made_again_and_loses_nothing(tmp_path: Path) -> None:
    async def fails() -> None:
        raise Problem("BACKEND_UNAVAILABLE", "the API server is away")

    async def scene() -> None:
        async with one(tmp_path, backend=comparing()) as world:
            box = await world.service.create(ALICE, Wish())
            world.backend.before["reconcile"] = fails
            await world.service._reaper._reconcile()
            await asyncio.sleep(0.02)
            await world.service._reaper._reconcile()
            await until(lambda: not world.service._reaper._comparing)
            assert world.service.get(ALICE, box.id).state == RUNNING
            world.backend.before.clear()
            seen = len(world.backend.known)
            await compare(world)
            assert len(world.backend.known) == seen + 1

    go(scene())


def test_backends_that_do_not_ask_are_compared_at_the_start_only(tmp_path: Path) -> None:
    async def scene() -> None:
        async with one(tmp_path) as world:
            for _ in range(3):
                await world.service._reaper._reconcile()
            assert len(world.backend.known) == 1
            assert not world.service._reaper._comparing

    go(scene())
