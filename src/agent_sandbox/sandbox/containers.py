"""What a command asked of the container engine, as the filter in front of it tells at the end."""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# How many rules the line at the end of a run names.
SHOWN_RULES = 5


class Asked(Record):
    """How often one rule of the filter decided."""

    rule: str
    allowed: bool
    count: int


class Containers(Record):
    """Everything that the filter has seen in a run."""

    requests: int = 0
    rules: tuple[Asked, ...] = ()
    # What was changed in requests that were let through, and how often.
    mutations: Mapping[str, int] = {}
    # What was removed at the end, by kind, and what could not be.
    removed: Mapping[str, int] = {}
    left: tuple[str, ...] = ()
    kept: bool = False
    # Empty, or why the audit log is incomplete.
    audit: str = ""


def parse(data: bytes) -> Containers:
    """The report of a filter. Nothing at all is a run without one."""
    if not data:
        return Containers()
    import json

    try:
        table = json.loads(data)
        rules = tuple(Asked(**one) for one in table.pop("rules"))
        left = tuple(table.pop("left", ()))
        return Containers(rules=rules, left=left, **table)
    except (ValueError, KeyError, TypeError, AttributeError):
        # It was cut off: what is not whole is not worth guessing at.
        return Containers()


def refusals(found: Containers) -> str:
    """One line about what was refused, or nothing. Pure."""
    refused = [one for one in found.rules if not one.allowed]
    if not refused:
        return ""
    count = sum(one.count for one in refused)
    names = ", ".join(one.rule for one in refused[:SHOWN_RULES])
    more = ", …" if len(refused) > SHOWN_RULES else ""
    what = "request" if count == 1 else "requests"
    return f"{count} {what} to the container engine refused: {names}{more}"


def warnings(found: Containers) -> tuple[str, ...]:
    """What the user has to look after. Pure."""
    said = [f"the container engine still has {one}" for one in found.left]
    return (*said, *((found.audit,) if found.audit else ()))
