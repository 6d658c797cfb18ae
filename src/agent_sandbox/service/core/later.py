"""What could not be written down when it happened, because the state was away for a moment.

Whoever asked was told that its end is not written. It is tried again until it
is: a record must not say for ever that something runs which has ended.
"""

from __future__ import annotations

import logging
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
# Each is a record and its line. Beyond that a start of the service finds what is not ended.
MOST = 10_000


class Later:
    """Groups of steps that wait. Only the loop may use it."""

    def __init__(self, most: int = MOST) -> None:
        self._waiting: deque[deque[Callable[[], object]]] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._waiting)

    def do(self, *steps: Callable[[], object]) -> None:
        """Do them now. From the first that fails on they wait; its error is raised."""
        left = deque(steps)
        try:
            _advance(left)
        except BaseException:
            if len(self._waiting) < self._most:
                self._waiting.append(left)
            else:
                log.exception("too much waits to be written down; this is left to the next start")
            raise

    def again(self) -> None:
        """Try those that wait, up to the first that fails: it goes to the end and holds up none."""
        for _ in range(len(self._waiting)):
            steps = self._waiting.popleft()
            try:
                _advance(steps)
            except Exception:  # noqa: BLE001 - whatever it is, others must not wait for it
                self._waiting.append(steps)
                log.warning("%d records still wait to be written down", len(self._waiting))
                return


def _advance(steps: deque[Callable[[], object]]) -> None:
    """Each step once: one that has succeeded is not repeated."""
    while steps:
        steps[0]()
        steps.popleft()
