"""Commands: bounded, watched, and kept for a client that went away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_sandbox.service.backend.interface import WORK, Terminal
from agent_sandbox.service.core import disk, jobs
from agent_sandbox.service.core.jobs import Job
from agent_sandbox.service.core.kept import Kept
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import EXITED, FAILED, RUNNING, Resources

from .lab import ALICE, BOB, Lab, cmd, go, lab, refused, run_wish, until


async def output(job: Job) -> bytes:
    return (await job.journal.collect(1 << 20)).stdout


async def sandbox(world: Lab) -> str:
    return (await world.service.create(ALICE, Wish())).id


def test_a_command_ends_with_its_code_its_output_and_its_cost(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            job = await world.service.execute(ALICE, box, cmd("echo", "hello", cwd="/workspace"))
            end = await job.wait()
            assert (end.state, end.exit_code, end.sandbox) == (EXITED, 0, box)
            assert (end.stdout_bytes, end.stderr_bytes, end.truncated) == (6, 0, False)
            assert await output(job) == b"hello\n"
            end = await (await world.service.execute(ALICE, box, cmd("false"))).wait()
            assert (end.state, end.exit_code) == (EXITED, 1)
            end = await (await world.service.execute(ALICE, box, cmd("true"))).wait()
            assert (end.cpu_ms, end.max_rss_kb) == (1, 1000)
            assert {name for name, _ in world.measured} == {"create", "queue", "start", "exec"}

    go(check())


def test_a_command_that_is_not_there_never_started(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            job = await world.service.execute(ALICE, await sandbox(world), cmd("missing"))
            end = await job.wait()
            assert (end.state, end.exit_code, end.error) == (FAILED, 127, "not found")

    go(check())


def test_a_start_that_fails_is_written_down_and_gives_its_place_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            with pytest.raises(RuntimeError):
                await world.service.execute(ALICE, box, cmd("broken"))
            with pytest.raises(RuntimeError):
                await world.service.run(ALICE, run_wish("broken"))
            await refused(world.service.execute(ALICE, box, cmd("unknown")), "UNSUPPORTED")
            await until(lambda: world.service.counts().running == 0)
            ends = world.service.executions(ALICE)
            assert [end.state for end in ends] == [FAILED] * 3
            # What the host said is for the log, not for the client.
            assert [end.error for end in ends][:2] == ["it could not be started"] * 2
            assert len(world.lines("exec.start")) == len(world.lines("exec.end")) == 3
            await until(lambda: list(world.backend.boxes) == [box])

    go(check())


# --- time


def test_a_timeout_ends_a_command_that_ignores_signals(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            job = await world.service.execute(ALICE, box, cmd("stubborn", timeout=0.05))
            running = world.command(job)
            await world.service.signal(ALICE, job.id, 15)
            assert running.signals == [15]
            end = await job.wait()
            assert (end.timed_out, end.signal, end.exit_code) == (True, "SIGKILL", 137)
            assert running.killed
            # The control: one that ends in time was not ended by it.
            quick = await world.service.execute(ALICE, box, cmd("true", timeout=0.05))
            assert not (await quick.wait()).timed_out

    go(check())


def test_the_clock_of_a_command_begins_with_the_command_not_in_the_queue(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_concurrent_execs=1)) as world:
            box = await sandbox(world)
            first = await world.service.execute(ALICE, box, cmd("hold"))
            second = asyncio.create_task(
                world.service.execute(ALICE, box, cmd("sleep", "0.01", timeout=0.2))
            )
            await asyncio.sleep(0.3)
            world.command(first).released.set()
            end = await (await second).wait()
            assert (end.timed_out, end.exit_code) == (False, 0)

    go(check())


def test_a_command_that_cannot_even_be_killed_is_given_up_and_its_sandbox_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KILL_GRACE", 0.05)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            job = await world.service.execute(ALICE, box, cmd("immortal", timeout=0.02))
            end = await job.wait()
            assert (end.timed_out, end.signal) == (True, "SIGKILL")
            assert "has not ended" in end.error
            await until(lambda: box not in world.backend.boxes)
            await until(lambda: world.service.counts().running == 0)
            assert world.lines("sandbox.reap")[0]["target"]["id"] == box

    go(check())


def test_a_timeout_beyond_the_limit_is_refused_not_clamped(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            problem = await refused(
                world.service.execute(ALICE, box, cmd("true", timeout=301.0)), "LIMIT_EXCEEDED"
            )
            assert problem.field == "timeout"
            run = world.service.run(ALICE, run_wish("true", timeout=301.0))
            await refused(run, "LIMIT_EXCEEDED")
            job = await world.service.execute(ALICE, box, cmd("true"))
            assert job.execution.timeout == 60.0

    go(check())


# --- the client


def test_a_client_that_goes_away_loses_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            job = await world.service.execute(ALICE, box, cmd("cat", keep_input=True))
            waiting = asyncio.create_task(job.wait())
            following = asyncio.ensure_future(anext(job.journal.follow()))
            await asyncio.sleep(0)
            for task in (waiting, following):
                task.cancel()
            await asyncio.gather(waiting, following, return_exceptions=True)
            assert not job.ended
            exec_id = job.id
            del job
            await world.service.stdin(ALICE, exec_id, b"later", eof=True)
            again = world.service.job(ALICE, exec_id)
            assert (await again.wait()).exit_code == 0
            stored = world.service.job(ALICE, exec_id)
            assert stored is not again
            assert await output(stored) == await output(again) == b"later"

    go(check())


def test_a_client_that_goes_away_during_the_start_leaves_a_whole_execution(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            release = asyncio.Event()

            async def hold() -> None:
                await release.wait()

            world.backend.before["start"] = hold
            for key in (None, "k"):
                world.backend.calls.clear()
                release.clear()
                gone = asyncio.create_task(world.service.run(ALICE, run_wish("echo", "x"), key=key))
                await until(lambda: [c for c in world.backend.calls if c[0] == "start"])
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                release.set()
            await until(lambda: len(world.service.executions(ALICE, state=EXITED)) == 2)
            await until(lambda: not world.backend.boxes)
            await until(lambda: world.service.counts().running == 0)
            again = await world.service.run(ALICE, run_wish("echo", "x"), key="k")
            assert await output(again) == b"x\n"
            assert len(world.service.executions(ALICE)) == 2

    go(check())


def test_one_who_leaves_the_queue_takes_no_place(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_concurrent_execs=1)) as world:
            box = await sandbox(world)
            first = await world.service.execute(ALICE, box, cmd("hold"))
            gone = asyncio.create_task(world.service.execute(ALICE, box, cmd("true")))
            await until(lambda: world.service.counts().queued == 1)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert world.service.counts().queued == 0
            world.command(first).released.set()
            await first.wait()
            assert len(world.service.executions(ALICE)) == 1

    go(check())


# --- places


def test_places_are_bounded_for_all_and_for_each(tmp_path: Path) -> None:
    async def check() -> None:
        limits = Limits(max_concurrent_execs=5, max_concurrent_execs_per_agent=3)
        async with lab(tmp_path / "d", limits=limits) as world:
            wish = run_wish("sleep", "0.005")
            runs = [world.service.run(agent, wish) for agent in (ALICE, BOB) for _ in range(20)]
            started = await asyncio.gather(*runs)
            ends = await asyncio.gather(*(job.wait() for job in started))
            assert {end.exit_code for end in ends} == {0}
            assert world.backend.most_running == 5
            await until(lambda: world.service.counts().running == 0)
            world.backend.most_running = 0
            jobs_ = await asyncio.gather(*(world.service.run(ALICE, wish) for _ in range(9)))
            await asyncio.gather(*(job.wait() for job in jobs_))
            assert world.backend.most_running == 3

    go(check())


def test_a_busy_agent_delays_another_by_no_more_than_its_share(tmp_path: Path) -> None:
    async def check() -> None:
        limits = Limits(max_concurrent_execs=4, max_concurrent_execs_per_agent=4)
        async with lab(tmp_path / "d", limits=limits) as world:
            order: list[str] = []

            async def one(name: str) -> None:
                agent = ALICE if name == "a" else BOB
                job = await world.service.run(agent, run_wish("sleep", "0.001"))
                order.append(name)
                await job.wait()

            many = [asyncio.create_task(one("a")) for _ in range(100)]
            await until(lambda: world.service.whoami(ALICE).queued == 96)
            few = [asyncio.create_task(one("b")) for _ in range(10)]
            await asyncio.gather(*many, *few)
            last = len(order) - 1 - order[::-1].index("b")
            # Four ran when b came, and from then on every second place is b's. Some may end
            # while b's requests are on their way.
            assert last <= 4 + 2 * 10 + 8

    go(check())


def test_a_full_queue_is_busy(tmp_path: Path) -> None:
    async def check() -> None:
        limits = Limits(
            max_concurrent_execs=1, max_queued_execs_per_agent=1, max_queue_seconds=0.05
        )
        async with lab(tmp_path / "d", limits=limits) as world:
            box = await sandbox(world)
            await world.service.execute(ALICE, box, cmd("hold"))
            waiting = asyncio.create_task(world.service.execute(ALICE, box, cmd("true")))
            await until(lambda: world.service.counts().queued == 1)
            problem = await refused(world.service.run(ALICE, run_wish("true")), "BUSY")
            assert problem.status == 429
            assert problem.retry_after
            await refused(waiting, "BUSY")
            # Nothing is left of those that never ran.
            assert len(world.service.executions(ALICE)) == 1

    go(check())


# --- one shot


def test_a_run_is_gone_with_its_command_but_its_result_stays(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            job = await world.service.run(ALICE, run_wish("echo", "x"))
            end = await job.wait()
            await until(lambda: world.backend.boxes == {})
            await until(lambda: world.service.counts().running == 0)
            assert world.service.sandboxes(ALICE) == []
            assert world.service.job(ALICE, job.id).execution == end
            assert await output(world.service.job(ALICE, job.id)) == b"x\n"
            # One who deletes it while it runs ends it.
            job = await world.service.run(ALICE, run_wish("stubborn"))
            assert [s.id for s in world.service.sandboxes(ALICE)] == [job.execution.sandbox]
            await world.service.delete(ALICE, job.execution.sandbox)
            assert (await job.wait()).signal == "SIGKILL"
            await until(lambda: world.service.counts().running == 0)

    go(check())


def test_the_same_key_runs_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            wish = run_wish("echo", "x")
            both = await asyncio.gather(
                *(world.service.run(ALICE, wish, key="k") for _ in range(4))
            )
            assert len({job.id for job in both}) == 1
            await both[0].wait()
            again = await world.service.run(ALICE, wish, key="k")
            assert again.id == both[0].id
            assert await output(again) == b"x\n"
            assert [verb for verb, _ in world.backend.calls].count("start") == 1
            other = world.service.run(ALICE, run_wish("echo", "y"), key="k")
            await refused(other, "IDEMPOTENCY_CONFLICT")

    go(check())


def test_a_thousand_runs_leave_nothing_in_memory(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            for _ in range(10):
                jobs_ = await asyncio.gather(
                    *(world.service.run(ALICE, run_wish("true")) for _ in range(100))
                )
                await asyncio.gather(*(job.wait() for job in jobs_))
            await until(lambda: world.service.counts().running == 0)
            context = world.service._context
            assert (context.live, context.jobs, context.owned) == ({}, {}, {})
            assert context.places._running == context.places._waiting == {}
            # The reaper's own thread aside, no task is left.
            await until(lambda: not context._tasks)
            assert list((tmp_path / "d" / "executions").iterdir()) == []

    go(check())


# --- input, signals, terminals


def test_input_comes_with_the_command_and_later(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service, box = world.service, await sandbox(world)
            job = await service.execute(ALICE, box, cmd("cat", stdin=b"all of it"))
            await job.wait()
            assert await output(job) == b"all of it"
            # None at all: the end at once.
            assert (await (await service.execute(ALICE, box, cmd("cat"))).wait()).exit_code == 0
            job = await service.execute(ALICE, box, cmd("cat", stdin=b"first ", keep_input=True))
            await service.stdin(ALICE, job.id, b"second ")
            await service.stdin(ALICE, job.id, b"third", eof=True)
            await job.wait()
            assert await output(job) == b"first second third"
            await refused(service.stdin(ALICE, job.id, b"x"), "WRONG_STATE")

    go(check())


def test_input_that_nobody_reads_hangs_neither_the_end_nor_the_writer(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service, box = world.service, await sandbox(world)
            wish = cmd("deaf", stdin=b"x", keep_input=True, timeout=0.1)
            job = await service.execute(ALICE, box, wish)
            stuck = [asyncio.create_task(service.stdin(ALICE, job.id, b"y")) for _ in range(3)]
            assert (await job.wait()).timed_out
            for one in stuck:
                await refused(one, "WRONG_STATE")

    go(check())


def test_a_closed_input_takes_no_more(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            job = await world.service.execute(
                ALICE, await sandbox(world), cmd("hold", keep_input=True)
            )
            await world.service.stdin(ALICE, job.id, b"", eof=True)
            await refused(world.service.stdin(ALICE, job.id, b"x"), "WRONG_STATE")

    go(check())


def test_a_signal_reaches_the_command_and_a_kill_all_of_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service, box = world.service, await sandbox(world)
            job = await service.execute(ALICE, box, cmd("hold"))
            await refused(service.signal(ALICE, job.id, 99), "INVALID")
            await service.signal(ALICE, job.id, 15)
            assert (await job.wait()).signal == "SIGTERM"
            await refused(service.signal(ALICE, job.id, 15), "WRONG_STATE")
            job = await service.execute(ALICE, box, cmd("stubborn"))
            end = await service.kill(ALICE, job.id)
            assert (end.signal, end.timed_out, end.error) == ("SIGKILL", False, "")
            # Ended already: the same answer.
            assert await service.kill(ALICE, job.id) == end

    go(check())


def test_a_terminal_is_resized(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service, box = world.service, await sandbox(world)
            job = await service.execute(ALICE, box, cmd("tty", terminal=Terminal()))
            await service.stdin(ALICE, job.id, b"?")
            await service.resize(ALICE, job.id, Terminal(rows=50, columns=132))
            await service.stdin(ALICE, job.id, b"?")
            await service.stdin(ALICE, job.id, b"", eof=True)
            assert (await job.wait()).tty
            assert (await output(job)).endswith(b"50x132")
            plain = await service.execute(ALICE, box, cmd("hold"))
            await refused(service.resize(ALICE, plain.id, Terminal()), "WRONG_STATE")

    go(check())


def test_forgetting_an_execution_drops_its_output(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service, box = world.service, await sandbox(world)
            job = await service.execute(ALICE, box, cmd("echo", "x"))
            await job.wait()
            kept = tmp_path / "d" / "executions" / job.id
            assert kept.exists()
            await service.forget(ALICE, job.id)
            assert not kept.exists()
            with pytest.raises(Problem):
                service.job(ALICE, job.id)
            running = await service.execute(ALICE, box, cmd("stubborn"))
            await service.forget(ALICE, running.id)
            assert service.executions(ALICE) == []
            assert service.counts().running == 0

    go(check())


# --- output


def test_output_beyond_the_limit_is_dropped_and_told(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_output_bytes=100_000)) as world:
            job = await world.service.execute(ALICE, await sandbox(world), cmd("flood", "300000"))
            end = await job.wait()
            assert (end.truncated, end.exit_code) == (True, 0)
            assert end.stdout_bytes >= 300_000
            assert len(await output(job)) == 100_000

    go(check())


def test_a_slow_follower_does_not_slow_the_command(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            job = await world.service.execute(
                ALICE, await sandbox(world), cmd("flood", str(8 << 20))
            )
            slow = job.journal.follow()
            read = len((await anext(slow)).data)
            assert (await job.wait()).exit_code == 0
            read += sum([len(frame.data) async for frame in slow])
            assert read == 8 << 20

    go(check())


def test_what_is_kept_is_bounded_per_agent_and_in_time(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            service._executions.kept = Kept(service._context, results=1000, size=100_000)
            other = await service.run(BOB, run_wish("flood", "20000"))
            await other.wait()
            for _ in range(20):
                await (await service.run(ALICE, run_wish("flood", "20000"))).wait()
            mine = service.executions(ALICE)
            assert 1 <= len(mine) <= 5
            files = {path.name for path in (tmp_path / "d" / "executions").iterdir()}
            assert files == {other.id, *(end.id for end in mine)}
            world.shift += 86401
            await service._reaper.tidy()
            assert service.executions(ALICE) == service.executions(BOB) == []
            assert list((tmp_path / "d" / "executions").iterdir()) == []

    go(check())


# --- disk


def test_a_command_that_fills_its_disk_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FIRST_LOOK", 0.01)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            wish = Wish(resources=Resources(disk=1000))
            box = (await service.create(ALICE, wish)).id
            within = await service.execute(ALICE, box, cmd("fill", "1000"))
            await until(lambda: [c for c in world.backend.calls if c == ("usage", box)][2:])
            assert not within.ended
            over = await service.execute(ALICE, box, cmd("fill", "1001"))
            end = await over.wait()
            assert (end.exceeded, end.signal, end.timed_out) == ("disk", "SIGKILL", False)
            assert (await within.wait()).exceeded == "disk"
            await refused(service.execute(ALICE, box, cmd("true")), "DISK_FULL")
            # It can be made free again.
            await service.files(ALICE, box).delete(f"{WORK}/filled", recursive=False)
            assert (await (await service.execute(ALICE, box, cmd("true"))).wait()).exit_code == 0

    go(check())


def test_a_command_that_starts_during_a_look_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FIRST_LOOK", 0.01)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish(resources=Resources(disk=1000)))).id
            release = asyncio.Event()

            async def hold() -> None:
                await release.wait()

            world.backend.before["usage"] = hold
            live = service._context.live[box]
            look = asyncio.create_task(service._executions.disks.measure(live))
            await until(lambda: ("usage", box) in world.backend.calls)
            job = await service.execute(ALICE, box, cmd("fill", "1001"))
            # The look under way tells of the time before.
            world.backend.boxes[box].content.clear()
            release.set()
            assert await look == 0
            world.backend.boxes[box].content[f"{WORK}/filled"] = bytes(1001)
            assert (await job.wait()).exceeded == "disk"

    go(check())


def test_a_short_command_is_not_measured_and_a_sandbox_of_its_own_never_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FIRST_LOOK", 0.05)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = await sandbox(world)
            await (await world.service.run(ALICE, run_wish("true"))).wait()
            await (await world.service.execute(ALICE, box, cmd("true"))).wait()
            assert "usage" not in [verb for verb, _ in world.backend.calls]
            await until(lambda: "usage" in [verb for verb, _ in world.backend.calls])
            await asyncio.sleep(0.15)
            # Once, after the last command; the sandbox that has gone, never.
            assert [c for c in world.backend.calls if c[0] == "usage"] == [("usage", box)]

    go(check())


# --- the end of the service


def test_a_drain_lets_commands_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_concurrent_execs=1)) as world:
            service, box = world.service, await sandbox(world)
            job = await service.execute(ALICE, box, cmd("hold"))
            waiting = asyncio.create_task(service.execute(ALICE, box, cmd("true")))
            await until(lambda: service.counts().queued == 1)
            assert await service.ready() == (True, "")
            stopping = asyncio.create_task(service.stop(10.0))
            await refused(waiting, "DRAINING")
            assert await service.ready() == (False, "draining")
            await refused(service.run(ALICE, run_wish("true")), "DRAINING")
            await refused(service.create(ALICE, Wish()), "DRAINING")
            assert not job.ended
            world.command(job).released.set()
            assert (await job.wait()).exit_code == 0
            await stopping
            assert world.backend.closed
            assert box in world.backend.boxes

    go(check())


def test_what_does_not_finish_in_the_drain_is_ended_and_says_why(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            job = await world.service.execute(ALICE, await sandbox(world), cmd("stubborn"))
            await world.service.stop(0.02)
            assert (await job.wait()).error == "the service was stopped"
            assert world.store.get_execution(job.id) == job.execution
            assert job.execution.state != RUNNING

    go(check())
