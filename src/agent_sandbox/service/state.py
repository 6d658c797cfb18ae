"""The state of the service: sandboxes, executions, idempotency keys, and small secrets.

One set of statements for SQLite (`store`) and PostgreSQL (`store_postgres`): values stand for `?`,
never in the text, and what only one of them knows is a method of that one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from . import store_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager
    from typing import Any

    from .values import Execution, Sandbox

    # status and body of the first answer
    Answer = tuple[int, str]
    Where = tuple[str, tuple[object, ...]]

MOST = 1000


class State(ABC):
    """What the service knows. Calls are short and made on the loop; `tidy` is for a thread."""

    # Whether other replicas use it at the same time.
    shared: bool = False
    # The directory of this process, for what is not in the database; "": there is none.
    data: str = ""
    # So much is forgotten at once; 0: all, which takes no time.
    lot: int = 0

    # --- what a database gives

    @abstractmethod
    def change(self, sql: str, values: Iterable[object] = ()) -> int:
        """Run one statement as a transaction of its own; how many rows it changed."""

    @abstractmethod
    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Every row. A text that cannot be in the database (half a character) finds none."""

    @abstractmethod
    def transaction(self, about: str = "") -> AbstractContextManager[None]:
        """Several statements as one; nothing else may use the store meanwhile (no `await`).

        Two with the same `about` do not overlap, in whatever process or replica they are.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave it to others."""

    @abstractmethod
    def tidy(self) -> None:
        """Let the disk follow. For a thread."""

    def one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        """The first row."""
        found = self.rows(sql, *values)
        return found[0] if found else None

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """A small value that is made once, whoever asks first, and is the same for all."""
        sql = "SELECT value FROM kept WHERE name = ?"
        if (row := self.one(sql, name)) is None:
            self.change("INSERT INTO kept VALUES (?, ?) ON CONFLICT DO NOTHING", (name, make()))
            row = self.one(sql, name)
        if row is None:
            raise LookupError(name)
        return bytes(row[0])

    # --- sandboxes

    @abstractmethod
    def put_sandbox(self, sandbox: Sandbox) -> None:
        """Add or replace."""

    @abstractmethod
    def _labelled(self, key: str, value: str) -> Where:
        """The condition that a sandbox has this in its metadata."""

    def get_sandbox(self, id: str, owner: str | None = None) -> Sandbox | None:
        """One; None: whoever owns it."""
        row = self._one_of("sandboxes", id, owner)
        return store_rows.sandbox_of(row[0]) if row else None

    def _one_of(self, table: str, id: str, owner: str | None) -> tuple[Any, ...] | None:
        where = [("id = ?", (id,)), *_equal(owner=owner)]
        text = " AND ".join(part for part, _ in where)
        values = [value for _, given in where for value in given]
        return self.one(f"SELECT body FROM {table} WHERE {text}", *values)  # noqa: S608 - ours

    def sandboxes(
        self, *, owner: str | None = None, state: str | None = None,
        metadata: Mapping[str, str] | None = None, after: str | None = None, limit: int = 100,
        newest: bool = False,
    ) -> list[Sandbox]:  # fmt: skip
        """In the order of (created, id), or against it, from behind the cursor `after` on."""
        where = [self._labelled(key, value) for key, value in (metadata or {}).items()]
        where += _equal(owner=owner, state=state)
        rows = self._page("sandboxes", where, "created", after, limit, newest=newest)
        return [store_rows.sandbox_of(text) for text in rows]

    def delete_sandbox(self, id: str) -> None:
        """Forget one; its executions stay."""
        self.change("DELETE FROM sandboxes WHERE id = ?", (id,))

    def count_sandboxes(self, owner: str | None = None) -> int:
        """How many there are, of one owner or of all."""
        if owner is None:
            row = self.one("SELECT count(*) FROM sandboxes")
        else:
            row = self.one("SELECT count(*) FROM sandboxes WHERE owner = ?", owner)
        return int(row[0]) if row else 0

    # --- executions

    @abstractmethod
    def put_execution(self, execution: Execution) -> None:
        """Add or replace."""

    @abstractmethod
    def kept(self, most: int) -> dict[str, tuple[int, int]]:
        """By owner: how many have ended, and their bytes: of output, at most `most` of each."""

    def get_execution(self, id: str, owner: str | None = None) -> Execution | None:
        """One; None: whoever owns it."""
        row = self._one_of("executions", id, owner)
        return store_rows.execution_of(row[0]) if row else None

    def executions(
        self, *, sandbox: str | None = None, owner: str | None = None, state: str | None = None,
        after: str | None = None, limit: int = 100, newest: bool = False,
    ) -> list[Execution]:  # fmt: skip
        """In the order of (started, id), or against it, from behind the cursor `after` on."""
        where = _equal(sandbox=sandbox, owner=owner, state=state)
        rows = self._page("executions", where, "started", after, limit, newest=newest)
        return [store_rows.execution_of(text) for text in rows]

    def forget_executions(self, before: float) -> list[str]:
        """Remove those that ended before a moment, at most `lot`; their ids."""
        where = "ended > 0 AND ended < ?"
        ids = [str(row[0]) for row in self.rows(f"SELECT id FROM executions WHERE {where}", before)]  # noqa: S608
        if ids:
            self.change(f"DELETE FROM executions WHERE {where}", (before,))  # noqa: S608
        return ids

    def delete_execution(self, id: str) -> None:
        """Forget one."""
        self.change("DELETE FROM executions WHERE id = ?", (id,))

    def _page(
        self, table: str, where: list[Where], at: str, after: str | None, limit: int,
        *, newest: bool,
    ) -> list[str]:  # fmt: skip
        """Bodies of rows. The texts are ours; all that a client gave is in the values."""
        sign, down = ("<", " DESC") if newest else (">", "")
        if after is not None:
            where = [*where, (f"({at}, id) {sign} (?, ?)", store_rows.read_cursor(after))]
        text = " AND ".join(part for part, _ in where) or "1 = 1"
        values = [value for _, given in where for value in given]
        found = self.rows(
            f"SELECT body FROM {table} WHERE {text} ORDER BY {at}{down}, id{down} LIMIT ?",  # noqa: S608
            *values,
            max(0, min(limit, MOST)),
        )
        return [str(row[0]) for row in found]

    # --- idempotency keys

    def claim(self, owner: str, key: str, body_hash: str, now: float | None = None) -> bool:
        """Take a key for a request; False: it is taken, see `idempotent`."""
        made = time.time() if now is None else now
        changed = self.change(
            "INSERT INTO keys (owner, key, body_hash, made) VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (owner, key, body_hash, made),
        )
        return changed == 1

    def idempotent(self, owner: str, key: str) -> tuple[str, Answer | None] | None:
        """The hash of the first body with this key and its answer; None while there is none."""
        row = self.one(
            "SELECT body_hash, status, body FROM keys WHERE owner = ? AND key = ?", owner, key
        )
        if row is None:
            return None
        return str(row[0]), None if row[1] is None else (int(row[1]), str(row[2]))

    def answer(self, owner: str, key: str, status: int, body: str) -> None:
        """Keep the answer for whoever asks again."""
        self.change(
            "UPDATE keys SET status = ?, body = ? WHERE owner = ? AND key = ?",
            (status, body, owner, key),
        )

    def made(self, owner: str, key: str, status: int, id: str) -> None:
        """What was chosen is made; unless somebody else has the key by now."""
        self.change(
            "UPDATE keys SET status = ? WHERE owner = ? AND key = ? AND body = ?",
            (status, owner, key, id),
        )

    def release(self, owner: str, key: str, id: str | None = None) -> None:
        """The request failed: the key may be used again. `id`: if it still stands for that."""
        if id is None:
            self.change("DELETE FROM keys WHERE owner = ? AND key = ?", (owner, key))
            return
        # Another may have found that we are gone, and taken the key for itself.
        self.change(
            "DELETE FROM keys WHERE owner = ? AND key = ? AND body = ? AND status = 0",
            (owner, key, id),
        )

    def release_unanswered(self) -> int:
        """For the start: whoever claimed these was killed."""
        return self.change("DELETE FROM keys WHERE status IS NULL")

    def forget_keys(self, before: float) -> int:
        """Remove those that were claimed before a moment, at most `lot`; how many."""
        return self.change("DELETE FROM keys WHERE made < ?", (before,))


def _equal(**wanted: str | None) -> list[Where]:
    """Columns that must have a value; None: any."""
    return [(f"{name} = ?", (value,)) for name, value in wanted.items() if value is not None]
