"""How long a kind of pod that fails is left alone. Pure: times are given.

A pod that ends as soon as it runs (an image without the agent, a node that evicts at once) would
otherwise be made again for ever, and as fast as the cluster can.
"""

from __future__ import annotations

# After one failure, and after many, in seconds.
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 300.0
# A pod that ended younger than this has never been of use.
YOUNG_SECONDS = 60.0


class Patience:
    """When each kind may be tried again."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def is_over(self, kind: str, now: float) -> bool:
        """Whether it may be tried."""
        return now >= self._until.get(kind, 0.0)

    def failed(self, kind: str, now: float) -> bool:
        """One more failure; whether that was news: several pods of one try fail together."""
        if not self.is_over(kind, now):
            return False
        count = self._failures.get(kind, 0)
        self._failures[kind] = count + 1
        # A bound for the power as well: nobody resets a kind that never works.
        self._until[kind] = now + min(FIRST_SECONDS * 2 ** min(count, 10), LONGEST_SECONDS)
        return True

    def worked(self, kind: str) -> None:
        """One was of use."""
        self._failures.pop(kind, None)
        self._until.pop(kind, None)
