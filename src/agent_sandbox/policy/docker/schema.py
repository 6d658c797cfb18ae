"""A small table language: field → policy. What no table names is refused.

A policy takes the place and the value, and returns what is sent, or DROP. `null` is the default of
every field in Go, so it is never sent and never judged.
"""

from __future__ import annotations

import re

from .values import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .slots import Slot
    from .values import Grants

    Policy = Callable[["Site", object], object]
    Table = Mapping[str, Policy]

MAX_TEXT = 64 * 1024
MAX_LIST = 1000
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Drop:
    """The value of a field that is not sent."""


DROP = Drop()


class Site:
    """Where in a request we are, and what has been gathered on the way."""

    def __init__(
        self, grants: Grants, prefix: str, *, rule: str = "", parent: Site | None = None
    ) -> None:
        self.grants = grants
        self.prefix = prefix
        self.rule = rule or prefix
        self.mutations: list[str] = parent.mutations if parent else []
        self.needs: list[Slot] = parent.needs if parent else []
        # Things that a later step has to know.
        self.marks: set[str] = parent.marks if parent else set()
        # Mounts that follow from those that were asked for, by their place.
        self.derived: dict[str, dict[str, object]] = parent.derived if parent else {}

    def at(self, key: str) -> Site:
        """The same request, at one of its fields."""
        rule = f"{self.prefix}.{HUMP.sub('-', key).lower()}"
        return Site(self.grants, self.prefix, rule=rule, parent=self)

    def under(self, prefix: str) -> Site:
        """The same request, for a table with rules of its own."""
        return Site(self.grants, prefix, rule=prefix, parent=self)

    def refuse(self, message: str, status: int = 403) -> Refused:
        """A refusal by the rule of this place."""
        return Refused(self.rule, message, status)

    def changed(self, what: str = "") -> None:
        """Note that what is sent is not what was asked."""
        name = what or self.rule
        if name not in self.mutations:
            self.mutations.append(name)

    def need(self, slot: Slot) -> Slot:
        """Note what the shell has to look up."""
        if slot not in self.needs:
            self.needs.append(slot)
        return slot


def read(site: Site, table: Table, value: object) -> dict[str, object]:
    """A new object with what the table lets through."""
    result: dict[str, object] = {}
    for key, item in mapping(site, value).items():
        policy = table.get(key)
        if policy is None:
            raise Refused(
                f"{site.prefix}.unknown", f"{key[:60]!r} is not a field that is offered", 400
            )
        if item is None:
            continue
        sent = policy(site.at(key), item)
        if sent is not DROP:
            result[key] = sent
    return result


# --- shapes


def mapping(site: Site, value: object) -> dict[str, object]:
    """An object."""
    if not isinstance(value, dict):
        raise site.refuse(f"{site.rule}: must be an object", 400)
    return value


def sequence(site: Site, value: object) -> list[object]:
    """A list."""
    if not isinstance(value, list) or len(value) > MAX_LIST:
        raise site.refuse(f"{site.rule}: must be a list", 400)
    return value


def string(site: Site, value: object, pattern: re.Pattern[str] | None = None) -> str:
    """A text, that matches a pattern as a whole."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise site.refuse(f"{site.rule}: must be a string", 400)
    if pattern is not None and not pattern.fullmatch(value):
        raise site.refuse(f"{site.rule}: {value[:60]!r} is not allowed")
    return value


def whole(site: Site, value: object) -> int:
    """A number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise site.refuse(f"{site.rule}: must be a number", 400)
    return value


# --- policies


def flag(site: Site, value: object) -> object:
    """Any boolean; false is the default."""
    if not isinstance(value, bool):
        raise site.refuse(f"{site.rule}: must be true or false", 400)
    return value or DROP


def stated(site: Site, value: object) -> object:
    """Any boolean, sent as it is: false is not the default."""
    return flag(site, value) is True


def text(pattern: str = "") -> Policy:
    """Any text of a form; empty is the default."""
    compiled = re.compile(pattern) if pattern else None

    def policy(site: Site, value: object) -> object:
        return (string(site, value, compiled) if value != "" else "") or DROP

    return policy


def texts(pattern: str = "") -> Policy:
    """A list of texts of a form; empty is the default."""
    compiled = re.compile(pattern) if pattern else None

    def policy(site: Site, value: object) -> object:
        return [string(site, item, compiled) for item in sequence(site, value)] or DROP

    return policy


def number(low: int, high: int) -> Policy:
    """A number within bounds; 0 is the default."""

    def policy(site: Site, value: object) -> object:
        amount = whole(site, value)
        if amount != 0 and not low <= amount <= high:
            raise site.refuse(f"{site.rule}: must be from {low} to {high}")
        return amount or DROP

    return policy


def only(*defaults: object, why: str = "is not allowed") -> Policy:
    """Nothing but a default, which is not sent."""

    def policy(site: Site, value: object) -> object:
        # 0 == False in Python; to Go they are different types.
        if not any(type(item) is type(value) and item == value for item in defaults):
            raise site.refuse(f"{site.rule}: {why}")
        return DROP

    return policy


def off(why: str = "is not allowed") -> Policy:
    """Nothing but false."""
    no: object = False
    return only(no, why=why)


def ignored(policy: Policy) -> Policy:
    """Checked, and never sent."""

    def dropping(site: Site, value: object) -> object:
        policy(site, value)
        return DROP

    return dropping


def inner(table: Table) -> Policy:
    """An object with a table of its own; empty is the default."""

    def policy(site: Site, value: object) -> object:
        return read(site, table, value) or DROP

    return policy
