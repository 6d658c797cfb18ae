"""Which project files the user has read and agreed to: by path and content, never by path alone.

Records lie in the state directory, where no sandbox can write.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def _digest(data: bytes) -> str:
    # Only when a project file asks for more than it may.
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _record(state_dir: str, path: str) -> str:
    return f"{state_dir}/trust/{_digest(os.fsencode(path))}"


def is_trusted(state_dir: str, path: str, text: str) -> bool:
    """Whether exactly this content was trusted at this path."""
    try:
        with open(_record(state_dir, path), encoding="utf-8") as file:
            return file.readline().rstrip("\n") == _digest(text.encode())
    except OSError:
        return False


def records(state_dir: str) -> Iterator[tuple[str, str]]:
    """Every trusted path with the digest of its content."""
    base = f"{state_dir}/trust"
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return
    for name in names:
        with open(f"{base}/{name}", encoding="utf-8", errors="surrogateescape") as file:
            digest, _, path = file.read().partition("\n")
        yield path.rstrip("\n"), digest


def record_path(state_dir: str, path: str) -> str:
    """Where the trust in a path is recorded."""
    return _record(state_dir, path)


def content_digest(text: str) -> str:
    """What is recorded of a content."""
    return _digest(text.encode())
