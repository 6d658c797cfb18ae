"""The process of one run that answers for keys and credentials, outside the sandbox.

    python -I -S main.py ORDERS LISTENER SUPERVISOR

Three descriptors: orders in JSON, the listening socket that the sandbox sees, and a stream to the
supervisor. When the supervisor shuts down its side of that stream, or dies, the report is written
and the process ends.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The process."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(here))))
    # asyncio would import OpenSSL, for a third of this start.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    import asyncio  # noqa: F401

    del sys.modules["ssl"]
    from agent_sandbox.proxy.gitauth.life import run

    told, listener, supervisor = (int(text) for text in sys.argv[1:4])
    run(told, listener, supervisor)


if __name__ == "__main__":
    main()
