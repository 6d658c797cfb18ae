"""Follows paths step by step, and notes each place: also where nothing is yet."""

from __future__ import annotations

import os
import stat

from ..policy import paths
from ..policy.trails import Way
from .locate import MAX_LINKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

USUAL = "/usr/local/bin:/usr/bin:/bin"


def follow(path: str) -> Way:
    """The way to an absolute path, as the kernel goes it.

    Unlike `Locator.find` it tells of missing files and plain directories too: both can be made or
    replaced by whoever can write there.
    """
    steps: list[str] = []
    links = 0
    todo = [part for part in reversed(path.split("/")) if part]
    here = "/"
    while todo:
        part = todo.pop()
        if part in (".", ".."):
            here = here if part == "." else paths.parent(here)
            continue
        here = f"{here.rstrip('/')}/{part}"
        steps.append(here)
        try:
            text = os.readlink(here) if stat.S_ISLNK(os.lstat(here).st_mode) else ""
        except (OSError, ValueError):
            continue
        links += bool(text)
        if not text or links > MAX_LINKS:
            continue
        todo += [part for part in reversed(text.split("/")) if part]
        here = "/" if text.startswith("/") else paths.parent(here)
    return Way(path=path, real=here, steps=tuple(dict.fromkeys((*steps, here))))


def search_path(env: Mapping[str, str]) -> tuple[Way, ...]:
    """The ways to the directories of PATH. A relative one is left out: it is the project's."""
    parts = env.get("PATH", USUAL).split(":")
    return tuple(follow(part) for part in parts if part.startswith("/"))
