"""Rates: token buckets per agent. The clock comes in with each call. Pure but for their levels."""

from __future__ import annotations

import math

from ..record import Record
from .problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from .limits import Limits

REQUESTS, CREATES = "requests", "creates"
# Buckets of agents that have gone quiet are full again, and forgotten.
MOST_BUCKETS = 10_000


class Rate(Record):
    """So many per so many seconds, and as many at once."""

    count: int
    seconds: float
    # The limit's name, for the answer.
    rule: str = ""


class Verdict(Record):
    """Whether one more may pass, and what the client should know."""

    allowed: bool
    limit: int
    remaining: int
    # Seconds until one more may pass (0 if it may now), and until the bucket is full.
    retry_after: float
    reset: float

    def headers(self) -> tuple[tuple[str, str], ...]:
        """As the answer carries them, for refusals and for all others."""
        return (
            ("X-RateLimit-Limit", str(self.limit)),
            ("X-RateLimit-Remaining", str(self.remaining)),
            ("X-RateLimit-Reset", str(math.ceil(self.reset))),
        )


def rates(limits: Limits) -> dict[str, Rate]:
    """The rates of an agent, by what they count."""
    return {
        REQUESTS: Rate(
            count=limits.rate_requests_per_sec, seconds=1.0, rule="limits.rate_requests_per_sec"
        ),
        CREATES: Rate(
            count=limits.rate_create_per_min, seconds=60.0, rule="limits.rate_create_per_min"
        ),
    }


class Buckets:
    """One bucket per key, full at first. Time that goes backwards fills nothing."""

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        # key → what is left in it, and when that was so
        self._levels: dict[Hashable, tuple[float, float]] = {}
        self._most = most

    def take(self, key: Hashable, rate: Rate, now: float, cost: float = 1.0) -> Verdict:
        """Take one if there is one."""
        level, at = self._levels.get(key, (float(rate.count), now))
        per_second = rate.count / rate.seconds
        level = min(float(rate.count), level + max(0.0, now - at) * per_second)
        allowed = level >= cost
        if allowed:
            level -= cost
        if key not in self._levels and len(self._levels) >= self._most:
            self._shed()
        self._levels[key] = (level, max(now, at))
        return Verdict(
            allowed=allowed, limit=rate.count, remaining=int(level),
            retry_after=0.0 if allowed else (cost - level) / per_second,
            reset=(rate.count - level) / per_second,
        )  # fmt: skip

    def check(self, key: Hashable, rate: Rate, now: float) -> Verdict:
        """Take one, or raise RATE_LIMITED with what the client should wait."""
        verdict = self.take(key, rate, now)
        if not verdict.allowed:
            raise Problem(
                "RATE_LIMITED",
                f"more than {rate.count} in {rate.seconds:g} s",
                hint="wait as long as Retry-After says",
                rule=rate.rule,
                retry_after=verdict.retry_after,
                headers=dict(verdict.headers()),
            )
        return verdict

    def _shed(self) -> None:
        """Make room: forget the half that was used least recently.

        Forgetting a bucket fills it. So this helps only who can make that many keys, and keys are
        agents and addresses, not something that a request chooses.
        """
        old = sorted(self._levels.items(), key=lambda item: item[1][1])
        self._levels = dict(old[len(old) // 2 :])
