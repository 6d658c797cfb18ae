"""Rates that all replicas count together: one statement for each, by the clock of the database."""

from __future__ import annotations

from ..quotas import Buckets, Rate, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..store_postgres import PgStore

# What is left is refilled up to this moment. The row is locked while it is changed: whoever comes
# at the same moment sees what is left then.
TAKE = (
    "INSERT INTO rates AS r (key, level, at) VALUES (?, ?, seconds()) ON CONFLICT (key) DO UPDATE"
    " SET level = least(?, r.level + greatest(0, excluded.at - r.at) * ?) - ?,"
    " at = greatest(excluded.at, r.at)"
    " WHERE least(?, r.level + greatest(0, excluded.at - r.at) * ?) >= ? RETURNING level"
)  # fmt: skip
LOOK = "SELECT level + greatest(0, seconds() - at) * ? FROM rates WHERE key = ?"
# Buckets that nobody has used for so long are full.
FORGET_SECONDS = 3600.0


class SharedBuckets(Buckets):
    """As `Buckets`, but one for all replicas. The caller's clock does not matter."""

    def __init__(self, store: PgStore, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name

    def take(self, key: Hashable, rate: Rate, now: float, cost: float = 1.0) -> Verdict:
        """Take one if there is one."""
        del now
        words = key if isinstance(key, tuple) else (key,)
        text = "\x1f".join((self._name, *map(str, words)))
        most, per_second = float(rate.count), rate.count / rate.seconds
        level, allowed = 0.0, False
        if most >= cost:
            found = self._store.returning(
                TAKE, text, most - cost, most, per_second, cost, most, per_second, cost
            )
            allowed = bool(found)
            if found:
                level = float(found[0][0])
        if not allowed and (row := self._store.one(LOOK, per_second, text)) is not None:
            level = min(most, float(row[0]))
        return Verdict(
            allowed=allowed, limit=rate.count, remaining=int(level),
            retry_after=0.0 if allowed else max(cost - level, 0.0) / per_second,
            reset=(rate.count - level) / per_second,
        )  # fmt: skip


def tidy(store: PgStore) -> None:
    """Forget full ones."""
    store.change("DELETE FROM rates WHERE at < seconds() - ?", (FORGET_SECONDS,))
