"""Places: bounded for all and for each, and handed out in turn."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox.service.core.queue import Places, Share

from .lab import go, refused

WIDE = Share(running=100, queued=1000, patience=60.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_agent_with_a_hundred_waiting_does_not_delay_another_beyond_its_turn() -> None:
    async def check() -> None:
        places = Places(2)
        order: list[str] = []

        async def work(agent: str) -> None:
            await places.take(agent, WIDE)
            order.append(agent)
            await asyncio.sleep(0)
            places.give(agent)

        for _ in range(2):
            await places.take("z", WIDE)
        tasks = [asyncio.create_task(work("a")) for _ in range(100)]
        await settle()
        tasks += [asyncio.create_task(work("b")) for _ in range(10)]
        await settle()
        for _ in range(2):
            places.give("z")
        await asyncio.gather(*tasks)
        assert order == ["a", "b"] * 10 + ["a"] * 90
        assert (places.running(), places.queued()) == (0, 0)

    go(check())


@pytest.mark.parametrize("others", [1, 5])
def test_turns_go_round_over_all_agents(others: int) -> None:
    async def check() -> None:
        places = Places(1)
        await places.take("z", WIDE)
        order: list[str] = []

        async def work(agent: str) -> None:
            await places.take(agent, WIDE)
            order.append(agent)
            places.give(agent)

        names = [f"agent-{number}" for number in range(others)]
        tasks = [asyncio.create_task(work(name)) for name in names for _ in range(3)]
        await settle()
        places.give("z")
        await asyncio.gather(*tasks)
        assert order == names * 3

    go(check())


def test_an_agent_at_its_share_leaves_free_places_to_others() -> None:
    async def check() -> None:
        places = Places(3)
        narrow = WIDE.replace(running=1)
        await places.take("a", narrow)
        waiting = asyncio.create_task(places.take("a", narrow))
        await settle()
        assert not waiting.done()
        await places.take("b", narrow)
        places.give("b")
        await settle()
        assert not waiting.done()
        places.give("a")
        await waiting
        assert (places.running("a"), places.running()) == (1, 1)

    go(check())


def test_a_full_queue_and_a_long_wait_are_busy() -> None:
    async def check() -> None:
        places = Places(1)
        await places.take("a", WIDE)
        short = Share(running=1, queued=1, patience=0.02)
        waiting = asyncio.create_task(places.take("b", short))
        await settle()
        problem = await refused(places.take("b", short), "BUSY")
        assert problem.retry_after is not None
        assert problem.rule == "MAX_QUEUED_EXECS_PER_AGENT"
        problem = await refused(waiting, "BUSY")
        assert problem.rule == "MAX_QUEUE_SECONDS"
        assert places.queued() == 0
        places.give("a")
        await places.take("b", short)

    go(check())


def test_who_is_cancelled_leaves_the_queue_even_with_a_place_just_given() -> None:
    async def check() -> None:
        places = Places(1)
        await places.take("a", WIDE)
        waiting = asyncio.create_task(places.take("b", WIDE))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert places.queued() == 0
        late = asyncio.create_task(places.take("b", WIDE))
        await settle()
        places.give("a")  # its place is set now, and it is cancelled before it can run
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert (places.running(), places.queued()) == (0, 0)
        await places.take("c", WIDE)

    go(check())


def test_closing_sends_away_who_waits_and_who_comes() -> None:
    async def check() -> None:
        places = Places(1)
        await places.take("a", WIDE)
        waiting = asyncio.create_task(places.take("b", WIDE))
        await settle()
        places.close()
        await refused(waiting, "DRAINING")
        await refused(places.take("c", WIDE), "DRAINING")
        places.give("a")
        assert places.running() == 0

    go(check())
