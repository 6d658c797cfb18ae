"""Flags of the compose actions: switches, values, and words."""

from __future__ import annotations

from ...errors import UsageError
from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

HINT = "see 'sandboxctl compose --help'"


class Given(Record):
    """What was typed."""

    switches: frozenset[str]
    values: tuple[tuple[str, str], ...]
    rest: tuple[str, ...]

    def every(self, name: str) -> list[str]:
        """All values of a flag."""
        return [value for key, value in self.values if key == name]

    def one(self, name: str) -> str:
        """The last value of a flag, or nothing."""
        return (self.every(name) or [""])[-1]


def parse(words: Sequence[str], *, switches: Sequence[str], values: Sequence[str]) -> Given:
    """Sort words into flags and the rest; `--` ends the flags."""
    found: set[str] = set()
    pairs: list[tuple[str, str]] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            rest += queue
            break
        if word in switches:
            found.add(word)
        elif name in values and (equals or queue):
            pairs.append((name, value if equals else queue.pop(0)))
        elif name in values:
            raise UsageError(f"{name} needs a value", hint=HINT, code="usage")
        elif word.startswith("-"):
            raise UsageError(f"unknown flag: {word}", hint=HINT, code="usage")
        else:
            rest.append(word)
    return Given(switches=frozenset(found), values=tuple(pairs), rest=tuple(rest))
