"""Budgets: how much may go to a host in one run. Pure.

Every budget that covers a host holds, whatever layer it is from. So one more can only tighten.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Key in a file → field, and what it counts.
CAPS = {"requests": "requests", "upload": "upload", "bytes": "total"}


class Budget(Record):
    """Caps for all hosts together that a rule covers; 0 means none."""

    host: str
    source: str = ""
    requests: int = 0
    # Bytes to the host, and in both directions.
    upload: int = 0
    total: int = 0


def decode(entries: object, where: str) -> tuple[Budget, ...]:
    """Every `[[budget]]` of a file."""
    if not isinstance(entries, (list, tuple)):
        raise _bad(where, "must be [[budget]] tables")
    return tuple(_entry(one, where) for one in entries)


def _entry(table: object, where: str) -> Budget:
    # The one that knows sizes; it imports us.
    from .decode import decode_value
    from .endpoints import parse

    if not isinstance(table, dict):
        raise _bad(where, "must be [[budget]] tables")
    unknown = [str(key) for key in table if key not in ("host", *CAPS)]
    if unknown:
        raise _bad(where, f"unknown key '{unknown[0]}'")
    host = table.get("host")
    if not isinstance(host, str):
        raise _bad(where, "host must be a rule such as example.com")
    parse(host, where, deny=True)
    caps: Mapping[str, int] = {
        CAPS[key]: _number(decode_value(ROWS[key], table[key], f"{where} '{host}'"))
        for key in CAPS
        if key in table
    }
    if not caps:
        raise _bad(where, f"'{host}' has no cap: give requests, upload or bytes")
    return Budget(host=host, source=where, **caps)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _bad(where: str, problem: str) -> PolicyError:
    return PolicyError(
        f"cannot use budget in {where}: {problem}",
        hint="write host, and one or more of requests, upload and bytes",
        code="bad-budget",
    )


ROWS: Mapping[str, settings.Row] = {
    "requests": settings.Row(key="budget.requests", kind=settings.COUNT, help="requests"),
    "upload": settings.Row(key="budget.upload", kind=settings.SIZE, help="bytes to the host"),
    "bytes": settings.Row(key="budget.bytes", kind=settings.SIZE, help="bytes both ways"),
}
