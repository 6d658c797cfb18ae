"""Who somebody is, as it was found a moment ago: for what stays open.

A stream asks again and again whether its token is still good. Where the state is a database on
another machine, each question is a round trip for which the loop waits, and there are hundreds of
streams. So for about a second one answer stands for all that the token has opened. And a database
that is away for a moment ends nothing that it has allowed, while this replica has its lease.
"""

from __future__ import annotations

import hashlib
import time

from .problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .tokens import Tokens
    from .values import Agent

    Key = bytes | int

# A revoked token loses what it has opened after so long.
SECONDS = 1.0
# An answer of the database stands for no longer than this, whether there is another or not. A
# silent stream asks every 10 s, and a lease ends 7 s after the last sign of life.
MOST = 20.0


class _Answer:
    """What the database said, when, and until when nobody asks again."""

    __slots__ = ("agent", "at", "until")

    def __init__(self, agent: Agent | None, at: float, until: float) -> None:
        self.agent = agent
        self.at = at
        self.until = until


class Recent:
    """The tokens, with a short memory. Only the loop may use it."""

    def __init__(
        self, tokens: Tokens, *, seconds: float = 0.0, held: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`seconds`: 0 for no memory at all. `held`: nobody else can act in our place."""
        self._tokens = tokens
        self._seconds = seconds
        self._held = held
        self._clock = clock
        self._answers: dict[Key, _Answer] = {}
        self._sweep = 0.0

    def check(self, token: str, *, fresh: bool) -> Agent | None:
        """The agent of a token; `fresh`: as the database has it now."""
        if not self._seconds:
            return self._tokens.check(token)
        # The memory is no second place where tokens can be read.
        key = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        return self._answer(key, lambda: self._tokens.check(token), fresh=fresh)

    def by_uid(self, uid: int, *, fresh: bool) -> Agent | None:
        """The agent of a caller on the unix socket."""
        if not self._seconds:
            return self._tokens.by_uid(uid)
        return self._answer(uid, lambda: self._tokens.by_uid(uid), fresh=fresh)

    def _answer(self, key: Key, ask: Callable[[], Agent | None], *, fresh: bool) -> Agent | None:
        before, known = self._clock(), self._answers.get(key)
        if known is not None and not fresh and before < known.until:
            return known.agent
        try:
            found = ask()
        except Problem as problem:
            if fresh or known is None or not self._stands(known, problem):
                raise
            # Counted from now: the question may have taken seconds, and is not for each of them.
            known.until = self._clock() + self._seconds
            return known.agent
        if found is not None or known is not None:
            # Not what never was: strangers could fill the memory with that.
            self._forget(before)
            self._answers[key] = _Answer(found, before, before + self._seconds)
        return found

    def _stands(self, known: _Answer, problem: Problem) -> bool:
        """Whether an earlier answer is good enough while there is no other."""
        away = problem.code == "STATE_UNAVAILABLE" and self._held()
        return away and self._clock() < known.at + MOST

    def _forget(self, now: float) -> None:
        if now >= self._sweep:
            self._answers = {k: one for k, one in self._answers.items() if now < one.at + MOST}
            self._sweep = now + MOST
