"""The dashboard: static files that talk to `/v1` like any other client. No state, no templates.

`asset` hands out only what was found in this directory at the first call, so that a path of a
request is never joined to a path on the disk.
"""

from __future__ import annotations

import functools
import hashlib
import os

# The page needs no more than this. Trusted Types without any policy: `innerHTML`, `eval` and
# their like throw, so that text of an agent cannot become markup by a slip of ours.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

# What is served, by the end of its name. Anything else in the directory is not.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HERE = os.path.dirname(__file__)


def asset(path: str) -> tuple[bytes, str, str] | None:
    """The content, its type and its entity tag of a path below `/`; None: there is no such file."""
    return _files().get(path.removeprefix("/") or "index.html")


@functools.cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Every file by its path: `index.html` and `assets/NAME`."""
    found = {}
    for below in ("", "assets"):
        with os.scandir(os.path.join(HERE, below)) as entries:
            for entry in entries:
                kind = TYPES.get(os.path.splitext(entry.name)[1])
                if kind and entry.is_file():
                    with open(entry.path, "rb") as file:
                        content = file.read()
                    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                    found[os.path.join(below, entry.name)] = (content, kind, tag)
    return found
