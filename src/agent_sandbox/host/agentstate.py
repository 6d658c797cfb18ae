"""Looks up the state of the chosen agent profile. Only for a command that has one."""

from __future__ import annotations

import os

from ..policy import control, paths
from ..policy.model import DIR, Named
from ..policy.profiles.claims import Found

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..policy.model import Match
    from ..policy.profiles.places import Part
    from .locate import Locator


# Each is a mount.
MOST = 200


def find(parts: Iterable[Part], locator: Locator) -> tuple[Found, ...]:
    """Every part of the profile's state as it is on this machine."""
    found = []
    for part in _each(parts):
        match = locator.find(part.outside)
        above, rest = _above(part.outside, locator)
        at, parent = "", False
        # A dangling link leads to something that nobody has looked at.
        if match is None and above is not None and not os.path.islink(part.outside):
            parent = "/" not in rest
            at = f"{above.real}/{rest}" if os.access(above.real, os.W_OK | os.X_OK) else ""
        found.append(Found(part=part, match=match, at=at, parent=parent, above=above, rest=rest))
    return tuple(found)


def _each(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts; `/*` is every plain name in a directory. Those with a dot are the agent's."""
    for part in parts:
        if not part.outside.endswith("/*"):
            yield part
            continue
        directory = paths.parent(part.outside)
        # As a whole, where the user has opened the directory around it.
        yield part.replace(path=paths.parent(part.path), outside=directory, whole=True)
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names[:MOST]:
            if not name.startswith("."):
                path = f"{paths.parent(part.path)}/{name}"
                yield part.replace(path=path, outside=f"{directory}/{name}")


def held_state(path: str, made: Iterable[str]) -> list[Named]:
    """A protected path of a profile that is missing: it is held, or what is missing above it."""
    if os.path.islink(path):
        return []
    first = path
    while not os.path.lexists(paths.parent(first)):
        first = paths.parent(first)
    for root in made:
        # A directory of the state that will be there, and be writable, when the command starts.
        if root and paths.below(path, root):
            first = f"{root}/{path[len(root) + 1 :].partition('/')[0]}"
    kind = control.kind_by_name(path) if first == path else DIR
    return [Named(path=first, kind=kind, missing=True, tracked=False)]


def _above(path: str, locator: Locator) -> tuple[Match | None, str]:
    """The nearest directory above a path that is there, and the rest of the path."""
    for directory in paths.parents(path):
        match = locator.find(directory)
        if match is not None:
            rest = path[len(directory) :].lstrip("/")
            return (match, rest) if match.kind == DIR else (None, "")
        if os.path.islink(directory):
            return None, ""
    return None, ""
