"""Whether a request is sent again, and when. Pure: chance comes in, time is the driver's.

What might act twice is never sent twice: only what has not reached the service, what the service
refused before it did anything, and what is safe by its nature or by its idempotency key.
"""

from __future__ import annotations

import random

from . import reading
from .errors import Unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .address import Settings
    from .calls import Call
    from .errors import ClientError
    from .wire import Head

RETRIES = 4
# How long the service may be silent. Streams have a heartbeat every 15 seconds.
TIMEOUT = 60.0
FIRST_DELAY, MOST_DELAY = 0.1, 5.0
# A longer wait than this is the caller's to decide.
MOST_RETRY_AFTER = 30.0
# The service refused before it did anything.
REFUSED = frozenset(("RATE_LIMITED", "BUSY", "DRAINING", "BACKEND_UNAVAILABLE"))
# A gateway in between lost the answer.
GATEWAY = frozenset((502, 503, 504))


class Attempts:
    """The tries of one request."""

    def __init__(
        self, call: Call, settings: Settings, most: int = RETRIES,
        chance: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._call = call
        self._settings = settings
        self._left = most
        self._delay = FIRST_DELAY
        self._chance = chance

    def failed(self, error: OSError, *, sent: bool) -> float:
        """How long to wait before the next try; raises when there is none."""
        if self._left <= 0 or (sent and not self._call.again) or reading.is_final(error):
            raise reading.unreachable(error, self._settings, sent=sent and not self._call.again)
        return self._next()

    def refused(self, head: Head, body: bytes) -> float:
        """How long to wait before the next try; raises the refusal when there is none."""
        wait = reading.retry_after(head.headers)
        code = reading.code(body)
        refused = code in REFUSED and (wait is not None or head.status != 429)
        lost = head.status in GATEWAY and not code and self._call.again
        if self._left <= 0 or (wait or 0) > MOST_RETRY_AFTER or not (refused or lost):
            raise reading.problem(head, body, self._settings)
        return self._next(wait or 0.0)

    def _next(self, least: float = 0.0) -> float:
        self._left -= 1
        # Spread, so that clients that failed together do not come back together.
        delay = self._delay * (0.5 + self._chance())
        self._delay = min(self._delay * 2, MOST_DELAY)
        return max(delay, least)


class Patience:
    """How long a broken stream is tried again: anew after each event that came through."""

    def __init__(self, settings: Settings, most: int, chance: Callable[[], float]) -> None:
        self._settings = settings
        self._most = most
        self._chance = chance
        self._failures = 0

    def progress(self) -> None:
        """Something came."""
        self._failures = 0

    def broken(self, error: OSError) -> float:
        """How long to wait; raises when it has been tried often enough."""
        if self._failures >= self._most or reading.is_final(error):
            raise reading.unreachable(error, self._settings, sent=False)
        self._failures += 1
        delay: float = min(FIRST_DELAY * 2 ** (self._failures - 1), MOST_DELAY)
        return delay * (0.5 + self._chance())


def lost(settings: Settings) -> ClientError:
    """A stream that broke before it told which command it is."""
    return Unreachable(
        f"the connection to {settings.address} broke before the command's id came",
        hint="it may be running: look at the executions of the sandbox before you start it again",
    )
