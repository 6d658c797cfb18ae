"""Sandboxes: made once, counted, bounded in time, gone when they are said to be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend.interface import Support
from agent_sandbox.service.core.wishes import FilePut, Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import EXITED, FAILED, PAUSED, RUNNING, Resources

from .lab import ALICE, BOB, CHIEF, cmd, go, lab, refused, run_wish, until


def failing(error: Exception) -> Any:
    async def fail() -> None:
        raise error

    return fail


def test_a_sandbox_keeps_its_wish_and_reports_what_holds(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            wish = Wish(
                env={"A": "1"}, metadata={"m": "n"}, timeout=100.0,
                resources=Resources(memory=1 << 20),
                files=(FilePut(path="a.txt", data=b"x"), FilePut(path="/home/agent/b", data=b"")),
            )  # fmt: skip
            made = await world.service.create(ALICE, wish)
            assert (made.owner, made.state, made.backend) == ("alice", RUNNING, "fake")
            assert (made.env, made.metadata) == ({"A": "1"}, {"m": "n"})
            assert made.expires - made.created == pytest.approx(100.0)
            assert made.resources.memory == 1 << 20
            assert made.enforced["disk"] == "server"
            content = world.backend.boxes[made.id].content
            assert content == {"/workspace/a.txt": b"x", "/home/agent/b": b""}
            assert world.service.get(ALICE, made.id) == made
            assert world.store.get_sandbox(made.id) == made
            # Its variables are there for every command.
            job = await world.service.execute(ALICE, made.id, cmd("env", "A"))
            await job.wait()
            assert (await job.journal.collect(10)).stdout == b"1"

    go(check())


def test_a_sandbox_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            world.backend.before["create"] = failing(Problem("BACKEND_UNAVAILABLE", "no room"))
            await refused(world.service.create(ALICE, Wish()), "BACKEND_UNAVAILABLE")
            world.backend.before["create"] = failing(RuntimeError("oops"))
            with pytest.raises(RuntimeError):
                await world.service.create(ALICE, Wish())
            del world.backend.before["create"]
            outside = Wish(files=(FilePut(path="x", data=b"x" * 100),))
            world.service._context.limits = Limits(max_upload_bytes=10)
            await refused(world.service.create(ALICE, outside), "TOO_LARGE")
            assert world.service.sandboxes(ALICE) == []
            assert world.backend.boxes == {}
            assert world.service.whoami(ALICE).sandboxes == 0

    go(check())


# --- quotas


@pytest.mark.parametrize("limit", ["max_sandboxes_per_agent", "max_sandboxes"])
def test_quotas_hold_when_all_ask_at_once(tmp_path: Path, limit: str) -> None:
    async def check() -> None:
        limits = Limits().replace(**{limit: 5})
        async with lab(tmp_path / "d", limits=limits) as world:

            async def slow() -> None:
                await asyncio.sleep(0.01)

            world.backend.before["create"] = slow
            answers = await asyncio.gather(
                *(world.service.create(ALICE, Wish()) for _ in range(30)), return_exceptions=True
            )
            made = [a for a in answers if not isinstance(a, BaseException)]
            codes = {a.code for a in answers if isinstance(a, Problem)}
            assert (len(made), codes) == (5, {"QUOTA_EXCEEDED"})
            assert len(world.backend.boxes) == 5
            # The others' quota is their own, but for the one of all.
            if limit == "max_sandboxes":
                problem = await refused(world.service.create(BOB, Wish()), "QUOTA_EXCEEDED")
                assert problem.status == 429
                assert problem.retry_after is not None
            else:
                await world.service.create(BOB, Wish())
            # One goes, one may come.
            await world.service.delete(ALICE, made[0].id)
            await world.service.create(ALICE, Wish())
            await refused(world.service.create(ALICE, Wish()), "QUOTA_EXCEEDED")

    go(check())


def test_a_failed_creation_gives_its_room_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_sandboxes_per_agent=1)) as world:
            world.backend.before["create"] = failing(RuntimeError("oops"))
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    await world.service.create(ALICE, Wish())
            del world.backend.before["create"]
            await world.service.create(ALICE, Wish())

    go(check())


def test_the_rate_of_creations_is_bounded_per_agent(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(rate_create_per_min=3)) as world:
            for _ in range(3):
                await world.service.create(ALICE, Wish())
            problem = await refused(world.service.create(ALICE, Wish()), "RATE_LIMITED")
            assert problem.retry_after
            assert "X-RateLimit-Limit" in problem.headers
            await world.service.create(BOB, Wish())
            world.shift += 61
            await world.service.create(ALICE, Wish())

    go(check())


def test_a_token_may_have_its_own_quota(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            small = ALICE.replace(quotas={"max_sandboxes_per_agent": 1, "max_memory": 1 << 20})
            await world.service.create(small, Wish())
            await refused(world.service.create(small, Wish()), "QUOTA_EXCEEDED")
            big = Wish(resources=Resources(memory=1 << 21))
            await refused(world.service.create(small, big), "LIMIT_EXCEEDED")
            await world.service.create(ALICE, big)

    go(check())


# --- keys


def test_the_same_key_is_the_same_sandbox_even_at_the_same_moment(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            release = asyncio.Event()

            async def hold() -> None:
                await release.wait()

            world.backend.before["create"] = hold
            both = [
                asyncio.create_task(world.service.create(ALICE, Wish(), key="k")) for _ in range(5)
            ]
            await until(lambda: world.backend.calls)
            await refused(
                world.service.create(ALICE, Wish(timeout=5.0), key="k"), "IDEMPOTENCY_CONFLICT"
            )
            release.set()
            made = await asyncio.gather(*both)
            assert len({one.id for one in made}) == 1
            assert [verb for verb, _ in world.backend.calls] == ["create"]
            assert (await world.service.create(ALICE, Wish(), key="k")).id == made[0].id
            other = Wish(metadata={"x": "y"})
            await refused(world.service.create(ALICE, other, key="k"), "IDEMPOTENCY_CONFLICT")
            # Keys belong to their agent.
            assert (await world.service.create(BOB, Wish(), key="k")).id != made[0].id
            # A key of a sandbox is none of an execution.
            run = world.service.run(ALICE, run_wish("true"), key="k")
            await refused(run, "IDEMPOTENCY_CONFLICT")

    go(check())


def test_a_refused_request_does_not_use_up_its_key(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            world.backend.before["create"] = failing(Problem("BACKEND_UNAVAILABLE", "not now"))
            await refused(world.service.create(ALICE, Wish(), key="k"), "BACKEND_UNAVAILABLE")
            del world.backend.before["create"]
            assert (await world.service.create(ALICE, Wish(), key="k")).state == RUNNING

    go(check())


def test_a_key_whose_sandbox_is_gone_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            made = await world.service.create(ALICE, Wish(), key="k")
            await world.service.delete(ALICE, made.id)
            await refused(world.service.create(ALICE, Wish(), key="k"), "CONFLICT")

    go(check())


def test_a_client_that_goes_away_while_a_sandbox_is_made_finds_it_by_its_key(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            release = asyncio.Event()

            async def hold() -> None:
                await release.wait()

            world.backend.before["create"] = hold
            for key in ("k", None):
                world.backend.calls.clear()
                gone = asyncio.create_task(world.service.create(ALICE, Wish(), key=key))
                await until(lambda: world.backend.calls)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            release.set()
            await until(lambda: len(world.service.sandboxes(ALICE, state=RUNNING)) == 2)
            made = await world.service.create(ALICE, Wish(), key="k")
            assert made.id in world.backend.boxes
            assert len(world.backend.boxes) == 2

    go(check())


# --- time


def test_a_sandbox_expires_and_takes_its_commands_along(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            made = await world.service.create(ALICE, Wish(timeout=100.0))
            stays = await world.service.create(ALICE, Wish(timeout=1000.0))
            job = await world.service.execute(ALICE, made.id, cmd("stubborn"))
            world.shift += 99
            await world.service._reaper.sweep()
            assert not job.ended
            world.shift += 2
            await world.service._reaper.sweep()
            end = await job.wait()
            assert (end.state, end.signal) == (EXITED, "SIGKILL")
            assert end.error == "its sandbox was removed"
            await until(lambda: made.id not in world.backend.boxes)
            await until(lambda: [s.id for s in world.service.sandboxes(ALICE)] == [stays.id])
            assert [line["target"]["id"] for line in world.lines("sandbox.expire")] == [made.id]
            with pytest.raises(Problem):
                world.service.get(ALICE, made.id)
            # What it said and how it ended is still there.
            assert world.service.job(ALICE, job.id).execution == end

    go(check())


def test_an_idle_sandbox_is_reaped_but_not_one_that_works_or_was_just_used(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(idle_timeout=100.0)) as world:
            service = world.service
            idle, busy, used, paused = [await service.create(ALICE, Wish()) for _ in range(4)]
            job = await service.execute(ALICE, busy.id, cmd("hold"))
            await service.pause(ALICE, paused.id)
            world.shift += 90
            await service.files(ALICE, used.id).write("x", _bytes(b"x"))
            world.shift += 20
            await service._reaper.sweep()
            await until(lambda: idle.id not in world.backend.boxes)
            left = {sandbox.id for sandbox in service.sandboxes(ALICE)}
            assert left == {busy.id, used.id, paused.id}
            assert [line["target"]["id"] for line in world.lines("sandbox.reap")] == [idle.id]
            world.command(job).released.set()
            await job.wait()
            # Its time begins with the end of the command.
            world.shift += 99
            await service._reaper.sweep()
            assert busy.id in world.backend.boxes
            world.shift += 2
            await service._reaper.sweep()
            await until(lambda: busy.id not in world.backend.boxes)

    go(check())


def test_an_agents_own_idle_time_counts(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            quick = ALICE.replace(quotas={"idle_timeout": 10.0})
            made = await world.service.create(quick, Wish())
            stays = await world.service.create(BOB, Wish())
            world.shift += 11
            await world.service._reaper.sweep()
            await until(lambda: made.id not in world.backend.boxes)
            assert stays.id in world.backend.boxes

    go(check())


def test_renewing_counts_from_now_and_is_bounded(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_lifetime=1000.0)) as world:
            service = world.service
            made = await service.create(ALICE, Wish(timeout=10.0))
            renewed = await service.renew(ALICE, made.id, timeout=500.0)
            assert renewed.expires == pytest.approx(world.clock() + 500, abs=1)
            renewed = await service.renew(ALICE, made.id, expires=world.clock() + 50)
            assert renewed.expires == pytest.approx(world.clock() + 50, abs=1)
            await refused(service.renew(ALICE, made.id, timeout=1001.0), "LIMIT_EXCEEDED")
            await refused(service.renew(ALICE, made.id, expires=world.clock() - 1), "INVALID")
            world.shift += 40
            await service._reaper.sweep()
            assert service.get(ALICE, made.id).state == RUNNING

    go(check())


# --- change and removal


def test_a_paused_sandbox_runs_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            made = await service.create(ALICE, Wish())
            assert (await service.pause(ALICE, made.id)).state == PAUSED
            assert world.backend.boxes[made.id].paused
            await refused(service.execute(ALICE, made.id, cmd("true")), "WRONG_STATE")
            await refused(service.pause(ALICE, made.id), "WRONG_STATE")
            assert (await service.resume(ALICE, made.id)).state == RUNNING
            await refused(service.resume(ALICE, made.id), "WRONG_STATE")
            await (await service.execute(ALICE, made.id, cmd("true"))).wait()
            world.backend.before["pause"] = failing(Problem("UNSUPPORTED", "no"))
            await refused(service.pause(ALICE, made.id), "UNSUPPORTED")
            assert service.get(ALICE, made.id).state == RUNNING

    go(check())


def test_pausing_is_refused_where_the_backend_cannot(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            made = await world.service.create(ALICE, Wish())
            world.service._context.supports["fake"] = Support(ok=True)
            await refused(world.service.pause(ALICE, made.id), "UNSUPPORTED")
            assert world.backend.calls[-1][0] == "create"

    go(check())


def test_metadata_is_merged_and_listed_by(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            made = await service.create(ALICE, Wish(metadata={"a": "1", "b": "2"}))
            changed = await service.set_metadata(ALICE, made.id, {"a": None, "c": "3"})
            assert changed.metadata == {"b": "2", "c": "3"}
            assert [s.id for s in service.sandboxes(ALICE, metadata={"c": "3"})] == [made.id]
            assert service.sandboxes(ALICE, metadata={"a": "1"}) == []
            # It does not grow without bound, one request after the other.
            await service.set_metadata(ALICE, made.id, {f"n{n}": "" for n in range(100)})
            more = {f"m{n}": "" for n in range(100)}
            await refused(service.set_metadata(ALICE, made.id, more), "INVALID")
            assert len(service.get(ALICE, made.id).metadata) == 102

    go(check())


def test_deleting_ends_what_runs_and_two_deletes_are_one(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            made = await service.create(ALICE, Wish())
            jobs = [await service.execute(ALICE, made.id, cmd("stubborn")) for _ in range(3)]
            await asyncio.gather(*(service.delete(ALICE, made.id) for _ in range(3)))
            assert [verb for verb, _ in world.backend.calls].count("delete") == 1
            # The ends are written down when the answer is there.
            assert all(job.ended for job in jobs)
            assert len(world.lines("exec.end")) == 3
            assert world.backend.boxes == {}
            assert service.counts().running == 0
            await refused(service.delete(ALICE, made.id), "NOT_FOUND")

    go(check())


def test_a_command_that_starts_while_its_sandbox_is_deleted_does_not_stay(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            made = await world.service.create(ALICE, Wish())
            release = asyncio.Event()

            async def hold() -> None:
                await release.wait()

            world.backend.before["start"] = hold
            starting = asyncio.create_task(world.service.execute(ALICE, made.id, cmd("stubborn")))
            await until(lambda: ("start", made.id) in world.backend.calls)
            deleting = asyncio.create_task(world.service.delete(ALICE, made.id))
            await asyncio.sleep(0.01)
            assert ("delete", made.id) not in world.backend.calls
            await refused(world.service.execute(ALICE, made.id, cmd("true")), "WRONG_STATE")
            release.set()
            job = await starting
            await deleting
            assert (await job.wait()).error == "its sandbox was removed"
            assert world.backend.boxes == {}

    go(check())


def test_what_could_not_be_removed_is_told_counts_and_is_tried_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_sandboxes_per_agent=1)) as world:
            service = world.service
            made = await service.create(ALICE, Wish())
            world.backend.before["delete"] = failing(RuntimeError("busy"))
            with pytest.raises(RuntimeError):
                await service.delete(ALICE, made.id)
            assert service.get(ALICE, made.id).state == FAILED
            await refused(service.create(ALICE, Wish()), "QUOTA_EXCEEDED")
            del world.backend.before["delete"]
            await service._reaper.sweep()
            await until(lambda: service.sandboxes(ALICE) == [])
            assert world.backend.boxes == {}

    go(check())


# --- lists


def test_lists_are_of_ones_own_and_pages_join_without_gap(tmp_path: Path) -> None:
    from agent_sandbox.service.store_rows import cursor

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            for number in range(5):
                await service.create(ALICE, Wish())
                await service.create(BOB, Wish())
                # Also those for a single command, which the store does not have.
                await service.run(ALICE, run_wish("hold"), request_id=f"{number}")
            everything = service.sandboxes(ALICE)
            assert len(everything) == 10
            assert {s.owner for s in everything} == {"alice"}
            pages, after = [], None
            while page := service.sandboxes(ALICE, after=after, limit=3):
                pages += page
                after = cursor(page[-1].created, page[-1].id)
            assert pages == everything
            assert len(service.sandboxes(CHIEF)) == 15
            assert len(service.sandboxes(CHIEF, owner="bob")) == 5
            assert service.sandboxes(ALICE, owner="bob") == []
            assert service.sandboxes(ALICE, state=PAUSED) == []
            identity = service.whoami(ALICE)
            assert (identity.sandboxes, identity.running, identity.queued) == (10, 5, 0)
            assert service.counts().sandboxes == {RUNNING: 15}

    go(check())


async def _bytes(data: bytes) -> AsyncIterator[bytes]:
    yield data
