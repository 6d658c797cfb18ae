"""The proxy for controls: the real program with some protections taken away.

    python -I -S weak_proxy.py ORDERS GATE SUPERVISOR [certified] SOURCE NAME[,NAME…]

`without_network` puts it in the place of the real one.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Patch, and be the proxy."""
    *_, source, names = sys.argv
    del sys.argv[-2:]
    sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), source]
    from escape.patching import module
    from escape.without_network import PROXY

    # Everything is loaded before the first patch, so that none is lost to a later import.
    for name in ("proxy.egress", "proxy.serving"):
        module(name)
    for name in names.split(","):
        PROXY[name]()
    module("proxy.egress").main()


if __name__ == "__main__":
    main()
