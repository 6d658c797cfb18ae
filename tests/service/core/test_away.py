"""The state is away for a moment: nothing of what was begun stays for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.core import disk
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import PAUSED, RUNNING, Resources

from .lab import ALICE, Lab, cmd, go, lab, refused, run_wish, until

ONE = Limits(max_sandboxes_per_agent=1)


def _away(*_: object) -> Any:
    raise Problem("STATE_UNAVAILABLE", "the database is away")


async def _reaped(world: Lab) -> None:
    """The reaper has done its work, and there is room again."""
    await world.service._reaper.sweep()
    await world.service._context.settle()
    assert world.service._context.live == {}
    assert world.backend.boxes == {}
    assert world.store.count_sandboxes() == 0
    await world.service.create(ALICE, Wish())


@pytest.mark.parametrize("one_shot", [False, True])
def test_a_sandbox_that_could_not_be_made_nor_forgotten_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, one_shot: bool
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=ONE) as world:
            # By hand: a turn while the state is away would put the next try off.
            await world.service._reaper.stop()
            context = world.service._context
            with monkeypatch.context() as patch:
                # As with replicas: those of one command are in the store, too.
                patch.setattr(context, "is_stored", lambda _: True)
                patch.setattr(world.store, "put_sandbox", _away)
                patch.setattr(world.store, "delete_sandbox", _away)
                if one_shot:
                    await refused(
                        world.service.run(ALICE, run_wish("true"), key=None),
                        "STATE_UNAVAILABLE",
                    )
                else:
                    await refused(world.service.create(ALICE, Wish()), "STATE_UNAVAILABLE")
            # It still counts: nobody knows what is left of it.
            assert context.used("alice") == 1
            await _reaped(world)

    go(check())


@pytest.mark.parametrize("step", ["put_sandbox", "delete_sandbox"])
def test_a_removal_that_could_not_be_written_down_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=ONE) as world:
            # By hand: a turn while the state is away would put the next try off.
            await world.service._reaper.stop()
            box = (await world.service.create(ALICE, Wish())).id
            with monkeypatch.context() as patch:
                patch.setattr(world.store, step, _away)
                await refused(world.service.delete(ALICE, box), "STATE_UNAVAILABLE")
            assert box in world.service._context.live
            await _reaped(world)

    go(check())


@pytest.mark.parametrize("verb", ["pause", "resume", "renew", "set_metadata"])
def test_a_change_that_could_not_be_written_down_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Else it is Paused here, runs inside, and is Running in the store."""

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish(metadata={"k": "old"}))).id
            if verb == "resume":
                await service.pause(ALICE, box)
            before = service.get(ALICE, box)
            acts: dict[str, Callable[[], Awaitable[object]]] = {
                "pause": lambda: service.pause(ALICE, box),
                "resume": lambda: service.resume(ALICE, box),
                "renew": lambda: service.renew(ALICE, box, timeout=7.0),
                "set_metadata": lambda: service.set_metadata(ALICE, box, {"k": "new"}),
            }
            with monkeypatch.context() as patch:
                patch.setattr(world.store, "put_sandbox", _away)
                await refused(acts[verb](), "STATE_UNAVAILABLE")
                assert service.get(ALICE, box) == before
                assert world.backend.boxes[box].paused is (verb == "resume")
            assert world.store.get_sandbox(box) == before
            # It can be asked for again.
            await acts[verb]()
            assert service.get(ALICE, box) == world.store.get_sandbox(box) != before

    go(check())


def test_a_pause_that_failed_is_undone_though_the_state_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            service = world.service
            box = (await service.create(ALICE, Wish())).id
            with monkeypatch.context() as patch:

                async def fail() -> None:
                    patch.setattr(world.store, "put_sandbox", _away)
                    raise ConnectionError("its machine does not answer")

                world.backend.before["pause"] = fail
                with pytest.raises(Problem):
                    await service.pause(ALICE, box)
                # Nothing is stopped inside, so it takes commands.
                assert service.get(ALICE, box).state == RUNNING
            found = world.store.get_sandbox(box)
            assert found is not None
            assert found.state == PAUSED
            # The store is told when it is back.
            service._reaper.save()
            found = world.store.get_sandbox(box)
            assert found is not None
            assert found.state == RUNNING

    go(check())


def test_a_sandbox_that_is_lost_is_no_fault_of_its_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "FIRST_LOOK", 0.01)

    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish(resources=Resources(disk=1000)))).id
            live = world.service._context.live[box]

            async def fail() -> None:
                raise ConnectionError("its machine is gone")

            world.backend.before["usage"] = fail
            assert await world.service._executions.disks.measure(live) is None
            # A word, and no more: it may be said for hundreds at once.
            assert "its machine is gone" in caplog.text
            assert "Traceback" not in caplog.text
            caplog.clear()
            live.lost = "its node is gone"
            assert await world.service._executions.disks.measure(live) is None
            assert caplog.text == ""

    go(check())


def test_no_look_begins_when_the_service_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FIRST_LOOK", 0.05)

    async def check() -> None:
        world = Lab(tmp_path / "d")
        await world.start()
        service = world.service
        box = (await service.create(ALICE, Wish(resources=Resources(disk=1000)))).id
        await (await service.execute(ALICE, box, cmd("true"))).wait()
        live = service._context.live[box]
        assert live.look is not None
        await world.stop()
        await until(lambda: live.look is None)
        # Its task would be destroyed with the loop.
        assert not service._context._tasks
        await asyncio.sleep(0)

    go(check())
