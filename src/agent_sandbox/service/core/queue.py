"""Places for executions, and who gets the next one: agents in turn, whoever waits the longest.

An agent with a hundred commands in the queue gets one place, then the next agent one.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ...record import Record
from ..problems import Problem

# What a refused client should wait. The queue moves with the commands of others: nobody knows.
RETRY_AFTER = 1.0


class Share(Record):
    """What one agent may have of the places."""

    running: int
    queued: int
    # Seconds in the queue.
    patience: float


class _Waiter:
    __slots__ = ("most", "place")

    def __init__(self, most: int, place: asyncio.Future[None]) -> None:
        self.most = most
        self.place = place


class Places:
    """A number of places. Only the loop may use it."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._running: dict[str, int] = {}
        # In the order of turns: the agent that got a place last is at the end.
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._closed = False

    def running(self, agent: str | None = None) -> int:
        """How many places are taken, by one agent or by all."""
        if agent is None:
            return sum(self._running.values())
        return self._running.get(agent, 0)

    def queued(self, agent: str | None = None) -> int:
        """How many wait."""
        if agent is None:
            return sum(map(len, self._waiting.values()))
        return len(self._waiting.get(agent, ()))

    async def take(self, agent: str, share: Share) -> None:
        """Wait for a place. BUSY when the queue is full, or for too long."""
        if self._closed:
            raise draining()
        # Its own earlier requests go first. Those of others that wait have reached their share.
        if self._free > 0 and agent not in self._waiting and self.running(agent) < share.running:
            self._occupy(agent)
            return
        if self.queued(agent) >= share.queued:
            raise busy(f"{share.queued} commands wait already", "MAX_QUEUED_EXECS_PER_AGENT")
        waiter = _Waiter(share.running, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(agent, deque()).append(waiter)
        try:
            async with asyncio.timeout(share.patience):
                await waiter.place
        except BaseException as error:
            self._leave(agent, waiter)
            if isinstance(error, TimeoutError):
                words = f"no place for the command in {share.patience:g} s"
                raise busy(words, "MAX_QUEUE_SECONDS") from None
            raise

    def give(self, agent: str) -> None:
        """Give a place back, to whoever is next."""
        self._free += 1
        left = self._running[agent] - 1
        if left:
            self._running[agent] = left
        else:
            del self._running[agent]
        self._turn()

    def close(self) -> None:
        """Send everybody away who waits, and who comes."""
        self._closed = True
        for queue in self._waiting.values():
            for waiter in queue:
                if not waiter.place.done():
                    waiter.place.set_exception(draining())
        self._waiting.clear()

    def _occupy(self, agent: str) -> None:
        self._free -= 1
        self._running[agent] = self.running(agent) + 1

    def _leave(self, agent: str, waiter: _Waiter) -> None:
        """One who waited goes: from the queue, or with a place that came at the same moment."""
        if waiter.place.done() and not waiter.place.cancelled():
            if waiter.place.exception() is None:
                self.give(agent)
            return
        queue = self._waiting.get(agent)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[agent]

    def _turn(self) -> None:
        while self._free > 0:
            for agent, queue in self._waiting.items():
                if self.running(agent) < queue[0].most:
                    break
            else:
                return
            del self._waiting[agent]
            waiter = queue.popleft()
            if queue:
                self._waiting[agent] = queue
            # Cancelled just now: its own `_leave` finds it gone from the queue.
            if not waiter.place.done():
                self._occupy(agent)
                waiter.place.set_result(None)


def busy(message: str, rule: str) -> Problem:
    """The refusal of a full house."""
    return Problem("BUSY", message, rule=rule, retry_after=RETRY_AFTER, hint="try again later")


def draining() -> Problem:
    """The refusal of a service that stops."""
    return Problem("DRAINING", "the service is stopping", rule="service.draining", retry_after=5.0)
