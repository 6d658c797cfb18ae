"""What open requests may hold of the service, for each who asks: their number, and memory.

A rate bounds how often somebody asks, not how long it keeps what it got: a stream that goes on, a
body that comes byte by byte, an answer that is not taken. Without a bound one agent could hold
every connection, or all memory, and the others would not be served.
"""

from __future__ import annotations

import asyncio
from functools import partial

from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..http.messages import Request

# Of whom nobody knows, by address. Only answers that are too large to be gone at once count.
STRANGERS = 128
# What is not worth counting.
SMALL = 64 * 1024
# Bodies and answers in memory: of one, and of all. Somebody who holds nothing gets any one.
PER_AGENT, ALL = 32 << 20, 256 << 20


class Room:
    """Counts. Only the loop may use it."""

    def __init__(self, per_agent: int = PER_AGENT, every: int = ALL) -> None:
        self._per_agent = per_agent
        self._every = every
        self._open: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def enter(self, request: Request, who: str, most: int) -> None:
        """One more request of somebody; BUSY when that is too many. It is over with the answer."""
        have = self._open.get(who, 0)
        if have >= most:
            raise Problem(
                "BUSY", f"{most} requests are open already",
                hint="close streams that are not needed, and read answers",
                rule="limits.max_open_requests_per_agent", retry_after=1.0,
            )  # fmt: skip
        self._open[who] = have + 1
        request.after(partial(_less, self._open, who, 1))

    def hold(self, request: Request, who: str, size: int) -> None:
        """Bytes that a request needs in memory until it is over; BUSY when those are too many."""
        if self._is_full(who, size):
            raise Problem(
                "BUSY", "the bodies and answers of open requests are too large together",
                hint="send and read fewer large ones at a time; files go by PUT",
                rule="http.memory", retry_after=1.0,
            )  # fmt: skip
        self._hold(request, who, size)

    async def take(self, request: Request, who: str, size: int) -> None:
        """As `hold`, for what cannot be refused any more: waits until there is room."""
        while self._is_full(who, size):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._hold(request, who, size)

    def _is_full(self, who: str, size: int) -> bool:
        have = self._held.get(who, 0)
        full = have + size > self._per_agent or sum(self._held.values()) + size > self._every
        return size > SMALL and have > 0 and full

    def _hold(self, request: Request, who: str, size: int) -> None:
        if size > SMALL:
            self._held[who] = self._held.get(who, 0) + size
            request.after(partial(self._drop, who, size))

    def _drop(self, who: str, size: int) -> None:
        _less(self._held, who, size)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def _less(counts: dict[str, int], who: str, number: int) -> None:
    left = counts[who] - number
    if left:
        counts[who] = left
    else:
        del counts[who]
