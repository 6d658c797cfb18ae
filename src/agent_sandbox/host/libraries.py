"""Finds the optional library that makes certificates, for the proxy, which runs without `site`."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "cryptography"


def find(is_safe: Callable[[str], bool]) -> str:
    """The directory to import it from, or nothing. `is_safe`: no sandbox can have written it."""
    return next((d for d in _candidates() if _has(d) and is_safe(os.path.realpath(d))), "")


def _has(directory: str) -> bool:
    return os.path.isfile(f"{directory}/{NAME}/__init__.py")


def _candidates() -> list[str]:
    """Where an installer has put it: beside us, beside our interpreter, in the system's place."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    base = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    beside = [
        f"{p}/{lib}/{version}/site-packages" for p in (prefix, base) for lib in ("lib", "lib64")
    ]
    found = [own, *beside, *(d for d in sys.path if d.endswith("-packages"))]
    # Debian's place is for its own interpreter alone.
    return [*found, "/usr/lib/python3/dist-packages"] if base == "/usr" else found
