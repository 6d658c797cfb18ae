"""Idempotency keys: the same key with the same request is the same thing, made once.

The id of what will be made is in the store before it is made. So a request that is repeated after
the service was killed finds what was made, or that nothing was.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from ..problems import Problem
from ..replicas.interface import Elsewhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .context import Context

T = TypeVar("T")

# Statuses of an answer: the id is chosen, and what has it was made.
CHOSEN, MADE = 0, 201
KEEP_SECONDS = 86400.0


class Keys(Generic[T]):
    """What one kind of request makes, by key."""

    def __init__(self, context: Context, kind: str, find: Callable[[str], T | None]) -> None:
        """`find` gives what has an id, if it was made and is still there."""
        self._context = context
        self._kind = kind
        self._find = find
        self._under_way: dict[tuple[str, str], tuple[str, asyncio.Task[T]]] = {}

    async def once(
        self, owner: str, key: str, body: str, *, id: str, make: Callable[[str], Awaitable[T]]
    ) -> tuple[T, bool]:
        """What the key has made, or what `make` makes now with the id; and whether it was new."""
        body = f"{self._kind}:{body}"
        # From here to the end of the claim nothing waits: two requests cannot both get through.
        if (found := self._under_way.get((owner, key))) is not None:
            _same(found[0], body)
            return await asyncio.shield(found[1]), False
        while True:
            if (made := self._made(owner, key, body)) is not None:
                return made, False
            # False: another replica was faster; what it makes is what is wanted.
            if self._context.replicas.claim(owner, key, body, self._context.clock(), id):
                break
        task = self._context.spawn(self._make(owner, key, id, make))
        self._under_way[owner, key] = (body, task)
        task.add_done_callback(_seen)
        return await asyncio.shield(task), True

    def _made(self, owner: str, key: str, body: str) -> T | None:
        """What an earlier request with the key has made; None: nothing, and the key is free."""
        store = self._context.store
        if (row := store.idempotent(owner, key)) is None:
            return None
        _same(row[0], body)
        made_id = None
        if row[1] is not None:
            status, made_id = row[1]
            if status == CHOSEN and (peer := self._context.replicas.claimed(owner, key)):
                # It is under way there: that one waits for it, and answers.
                raise Elsewhere(peer)
            if (made := self._find(made_id)) is not None:
                return made
            if status == MADE:
                raise Problem("CONFLICT", f"the {self._kind} of this key is gone", rule="key",
                              hint="use a new Idempotency-Key")  # fmt: skip
        # Only what we have looked at: another replica may have come to the same end, and gone on.
        store.release(owner, key, made_id)
        return None

    async def _make(self, owner: str, key: str, id: str, make: Callable[[str], Awaitable[T]]) -> T:
        store = self._context.store
        try:
            try:
                made = await make(id)
            except BaseException:
                # A refusal holds for now, not for ever: the same request may succeed later.
                store.release(owner, key, id)
                raise
            store.made(owner, key, MADE, id)
        finally:
            del self._under_way[owner, key]
        return made


def _same(first: str, second: str) -> None:
    if first != second:
        raise Problem(
            "IDEMPOTENCY_CONFLICT", "this Idempotency-Key was used for another request",
            hint="use a new key for a new request", rule="key",
        )  # fmt: skip


def _seen(task: asyncio.Task[T]) -> None:
    """Whoever waited may have gone: an exception that nobody takes is not worth a warning."""
    if not task.cancelled():
        task.exception()
