"""Removes old files of the audit trail, and writes down their ends, so that the rest verifies."""

from __future__ import annotations

from . import places
from .lines import BadLine, parse, stamp
from .trail import PRUNE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..values import Agent
    from .lines import Line
    from .trail import AuditTrail, Trail

# So many ends fit into one line.
MOST_FILES = 200


def prune(audit: AuditTrail, actor: Agent | None, before: float) -> list[str]:
    """Remove the files whose every line is older; their names. The newest file stays.

    Written down first: a kill between leaves files that need not be there, never a gap. And only
    from the oldest on without a hole, so that what stays is one chain.
    """
    audit.check_removal()
    trail = audit.snapshot()
    removed: list[tuple[int, Line]] = []
    for number in sorted(trail.sizes)[:-1]:
        last = _last(trail, number)
        if last is None or str(last.record.get("ts", "")) >= stamp(before):
            break
        removed.append((number, last))
    for at in range(0, len(removed), MOST_FILES):
        ends = [
            {"file": number, "seq": line.seq, "hash": line.hash}
            for number, line in removed[at : at + MOST_FILES]
        ]
        audit.note(actor, PRUNE, {"removed": ends, "before": stamp(before)})
    for number, _ in removed:
        audit.remove(number)
    return [places.name_of(number) for number, _ in removed]


def _last(trail: Trail, number: int) -> Line | None:
    """The last line; None: there is none that can be trusted, so the file is evidence."""
    raw = next(trail.backwards(number), None)
    try:
        return parse(raw) if raw is not None else None
    except BadLine:
        return None
