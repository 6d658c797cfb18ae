"""Reads the audit trail for people and for `GET /v1/audit`: filters, newest first or in order.

Reading checks nothing; `verify` does. A line that is no JSON object is passed over.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from ...record import Record
from . import places
from .lines import stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .trail import Where


class Filter(Record):
    """Which lines are wanted; an empty member wants all."""

    agent: str = ""
    # A whole action, or its beginning: "exec" is "exec.start" and "exec.end".
    action: str = ""
    decision: str = ""
    target: str = ""
    # Seconds since the epoch: from `since` on, before `until`.
    since: float | None = None
    until: float | None = None
    # Only lines before this number: the cursor of pages that go back.
    before: int | None = None
    after: int | None = None

    def fits(self, record: dict[str, Any]) -> bool:
        """Whether a line is wanted."""
        action, actor, seq = record.get("action", ""), record.get("actor"), record.get("seq", 0)
        at = record.get("ts", "")
        return (
            (not self.agent or (isinstance(actor, dict) and actor.get("agent") == self.agent))
            and (not self.action or action == self.action or action.startswith(f"{self.action}."))
            and (not self.decision or record.get("decision") == self.decision)
            and (not self.target or _id(record.get("target")) == self.target)
            and (self.since is None or at >= stamp(self.since))
            and (self.until is None or at < stamp(self.until))
            and (self.before is None or seq < self.before)
            and (self.after is None or seq > self.after)
        )


def _id(target: object) -> object:
    return target.get("id") if isinstance(target, dict) else None


def newest(where: Where, wanted: Filter, limit: int, look: int = 200_000) -> list[dict[str, Any]]:
    """The last lines that fit, newest first. At most `look` lines are looked at."""
    found: list[dict[str, Any]] = []
    trail = places.look(where)
    for number in sorted(trail.sizes, reverse=True):
        for raw in trail.backwards(number):
            record = decode(raw)
            look -= 1
            if record is not None and wanted.fits(record):
                found.append(record)
            if len(found) >= limit or look <= 0:
                return found
    return found


def in_order(where: Where, wanted: Filter) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line that fits, as it is and decoded, oldest first."""
    trail = places.look(where)
    for number in sorted(trail.sizes):
        for _, raw in trail.lines(number):
            record = decode(raw)
            if record is not None and wanted.fits(record):
                yield raw, record


class Follower:
    """The lines that come after a moment, in order, as often as it is asked."""

    def __init__(self, where: Where) -> None:
        self._where = where
        head = places.look(where).head
        self._file, self._end = (head.file, head.end) if head else (1, 0)

    def new(self, wanted: Filter) -> list[dict[str, Any]]:
        """What has come since."""
        trail = places.look(self._where)
        found = []
        for number in sorted(n for n in trail.sizes if n >= self._file):
            start = self._end if number == self._file else 0
            for end, raw in trail.lines(number, start):
                if not raw.endswith(b"\n"):
                    break
                self._file, self._end = number, end
                record = decode(raw)
                if record is not None and wanted.fits(record):
                    found.append(record)
        return found


def decode(raw: bytes) -> dict[str, Any] | None:
    """A line, or None."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def moment(text: str, now: float) -> float:
    """A moment as people write it: RFC 3339, a date, or `2h` ago; `ValueError`."""
    from ..limits_units import seconds

    try:
        return now - seconds(text)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("it must be a date, 2026-01-31T12:00:00Z, or a time ago like 2h") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
