"""A launcher for controls: agent-sandbox with one protection taken away, everything else as it is.

    python -I -S weaken.py SOURCE NAME[,NAME…] run|ctl ARGUMENTS…

SOURCE holds the package; the names are those of `protections`. What follows is the command line of
agent-sandbox, or of sandboxctl.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Patch, and run the command line."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from escape.patching import module
    from escape.protections import CONDITIONS, PROTECTIONS

    source, names, tool = sys.argv[1:4]
    sys.path.insert(0, source)
    del sys.argv[1:4]
    # Everything is loaded before the first patch, so that none is lost to a later import.
    for name in ("cli.run", "sandbox.prepare", "launch.execute", "launch.joined"):
        module(name)
    for name in names.split(","):
        (PROTECTIONS | CONDITIONS)[name]()
    if tool == "ctl":
        sys.exit(module("cli.ctl").main())
    module("cli.run").script()


if __name__ == "__main__":
    main()
