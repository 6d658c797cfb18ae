"""Parameters of a query: each route names those it takes, in one spelling."""

from __future__ import annotations

import re

from . import images, watching
from .documents import load
from .schema import mapping, sequence, string
from .values import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Policy, Site, Table

    Parameters = dict[str, object]

FALSE = frozenset(("", "0", "no", "false", "none", "off"))
TRUE = frozenset(("1", "yes", "true", "on"))
MAX_FILTERS = 100


def read(site: Site, table: Table, pairs: tuple[tuple[str, str], ...]) -> Parameters:
    """The parameters that a table lets through; empty ones are not sent."""
    found: Parameters = {}
    for key, value in pairs:
        policy = table.get(key)
        if policy is None:
            raise Refused(
                f"{site.prefix}.query", f"{key[:40]!r} is not a parameter that is offered", 400
            )
        if key in found:
            # One reader takes the first, another one the last.
            raise Refused(f"{site.prefix}.query", f"{key[:40]!r} is given twice", 400)
        found[key] = policy(site.at(key), value)
    return {key: value for key, value in found.items() if value != ""}


def boolean(site: Site, value: object) -> object:
    """Go and Python write them differently."""
    word = string(site, value).lower()
    if word not in FALSE | TRUE:
        raise site.refuse(f"{site.rule}: must be true or false", 400)
    return "1" if word in TRUE else "0"


def count(low: int, high: int) -> Policy:
    """A number within bounds."""

    def policy(site: Site, value: object) -> object:
        word = string(site, value)
        if not word:
            return ""
        if not re.fullmatch(r"-?[0-9]{1,18}", word) or not low <= int(word) <= high:
            raise site.refuse(f"{site.rule}: must be from {low} to {high}", 400)
        return str(int(word))

    return policy


def word(pattern: str) -> Policy:
    """A text of a form, or none."""
    compiled = re.compile(pattern)

    def policy(site: Site, value: object) -> object:
        return string(site, value, compiled) if value != "" else ""

    return policy


def default(*values: str, why: str = "is not allowed") -> Policy:
    """Nothing but defaults, which are not sent."""

    def policy(site: Site, value: object) -> object:
        if string(site, value) not in ("", *values):
            raise site.refuse(f"{site.rule}: {why}")
        return ""

    return policy


def ignored(policy: Policy) -> Policy:
    """Checked, and never sent."""

    def dropping(site: Site, value: object) -> object:
        policy(site, value)
        return ""

    return dropping


def filters(*names: str, owned: bool = True) -> Policy:
    """`filters`: lists of texts by known names, to which the owner is added."""

    def policy(site: Site, value: object) -> object:
        entries = mapping(site, load(string(site, value).encode()) if value != "" else {})
        found: dict[str, object] = {}
        for name, wanted in entries.items():
            if name not in names or (site.grants.watches and name in watching.TELLING):
                raise site.refuse(
                    f"{site.rule}: {name[:40]!r} is not a filter that is offered", 400
                )
            found[name] = _wanted(site, name, wanted)
        if owned and (labels := _with_owner(site, found.get("label", []))):
            found["label"] = labels
        return found

    return policy


def _wanted(site: Site, name: str, value: object) -> list[str]:
    if isinstance(value, dict):
        chosen: list[object] = [key for key, on in value.items() if on is True]
        if len(chosen) != len(value):
            raise site.refuse(f"{site.rule}: not a list of texts", 400)
    else:
        chosen = sequence(site, [value] if isinstance(value, str) else value)
    if len(chosen) > MAX_FILTERS:
        raise site.refuse(f"{site.rule}: too many", 400)
    texts = [string(site, item) for item in chosen]
    if name == "reference":
        return sorted({both for one in texts for both in _spellings(site, one)})
    return sorted(set(texts))


def _spellings(site: Site, pattern: str) -> tuple[str, ...]:
    """A pattern for tags, and the same in the run's own place."""
    own = images.namespace(site.grants)
    return (pattern,) if pattern.startswith(own) else (pattern, own + pattern)


def _with_owner(site: Site, wanted: object) -> list[str]:
    chosen = wanted if isinstance(wanted, list) else ()
    return sorted({*chosen, *watching.selectors(site.grants)})
