"""The host's files about names, for sandboxes that get versions of their own."""

from __future__ import annotations

import os

from ..policy.naming import FILES, NSSWITCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Match
    from .locate import Locator


def files(locator: Locator) -> tuple[Match, ...]:
    """Those that exist, and what they lead to where they are links."""
    located = (locator.find(path) for path in FILES)
    return tuple(match for match in located if match is not None)


def switch() -> str:
    """The text of nsswitch.conf, or nothing."""
    try:
        with open(NSSWITCH, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def own() -> str:
    """The host's name, if it can stand in a file."""
    name = os.uname().nodename
    return name if name.replace("-", "").replace(".", "").replace("_", "").isalnum() else ""
