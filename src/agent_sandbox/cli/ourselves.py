"""Where our own commands are, for files that call them later: shims, other programs' settings."""

from __future__ import annotations

import os
import sys

from ..errors import HostError


def find(name: str) -> str:
    """The absolute path of `agent-sandbox` or `sandboxctl`, as the user would start it.

    Links are kept: a package manager moves what is behind them.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [
        # An installed script's neighbour, or the checkout that this file is in.
        os.path.dirname(os.path.abspath(sys.argv[0])),
        os.path.dirname(os.path.dirname(package)),
        *(part for part in os.environ.get("PATH", "").split(":") if part.startswith("/")),
    ]
    for place in places:
        path = f"{place}/{name}"
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise HostError(
        f"cannot find our own command '{name}'",
        hint="install agent-sandbox, or put its directory on PATH",
        code="no-command-of-ours",
    )
