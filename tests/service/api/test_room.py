"""What open requests may hold: counted by who asks, and free again with their end."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox.service.api.room import SMALL, Room
from agent_sandbox.service.http.messages import Peer, Request
from agent_sandbox.service.problems import Problem

LARGE = SMALL + 1


def request() -> Request:
    return Request("GET", "/", {}, Peer(address="unix"))


def test_open_requests_are_counted_for_each() -> None:
    room = Room()
    held = [request() for _ in range(3)]
    for one in held:
        room.enter(one, "a", 3)
    with pytest.raises(Problem) as refused:
        room.enter(request(), "a", 3)
    assert (refused.value.code, refused.value.status) == ("BUSY", 429)
    assert refused.value.retry_after
    room.enter(request(), "b", 3)
    held[0].over()
    # Twice is once.
    held[0].over()
    room.enter(request(), "a", 3)
    with pytest.raises(Problem):
        room.enter(request(), "a", 3)


def test_memory_is_counted_for_each_and_for_all() -> None:
    room = Room(per_agent=2 * LARGE, every=3 * LARGE)
    first, second = request(), request()
    room.hold(first, "a", LARGE)
    room.hold(second, "a", LARGE)
    with pytest.raises(Problem):
        room.hold(request(), "a", LARGE)
    # What is small is not worth counting.
    room.hold(request(), "a", SMALL)
    room.hold(request(), "b", LARGE)
    with pytest.raises(Problem):
        room.hold(request(), "b", LARGE)
    # Who holds nothing gets one, however large, whatever the others hold.
    room.hold(request(), "c", 10 * LARGE)
    first.over()
    second.over()
    room.hold(request(), "a", LARGE)


def test_what_cannot_be_refused_waits() -> None:
    async def scene() -> None:
        room = Room(per_agent=LARGE)
        first, second = request(), request()
        await room.take(first, "a", LARGE)
        waiting = asyncio.ensure_future(room.take(second, "a", LARGE))
        await asyncio.sleep(0)
        assert not waiting.done()
        # Another's end wakes it, and it waits on.
        other = request()
        await room.take(other, "b", LARGE)
        other.over()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        first.over()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scene())
