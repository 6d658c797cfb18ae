"""`sandboxctl remote cp`: files and directories, in and out, by the rules of `cp -r`."""

from __future__ import annotations

import os
import posixpath
import sys

from ..client.errors import ApiError
from ..errors import HostError, UsageError, reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..client.sync import Client
    from ..client.sync_files import Files

STREAM = "-"
USAGE = "sandboxctl remote cp SOURCE TARGET; one of them is ID:PATH"
WORK = "/workspace"


def place(word: str) -> tuple[str, str] | None:
    """`ID:PATH` → both; None for a path of this machine. `./a:b` is one, too."""
    sandbox, colon, path = word.partition(":")
    if not colon or "/" in sandbox or not sandbox:
        return None
    return sandbox, path or WORK


def copy(client: Client, source: str, target: str) -> tuple[str, ...]:
    """Copy; the names of what was left out."""
    start, end = place(source), place(target)
    if (start is None) == (end is None):
        raise UsageError("one of both must be in a sandbox, and one here", hint=USAGE, code="usage")
    try:
        if start is not None:
            return _out(client.sandboxes.get(start[0]).files, start[1], target)
        assert end is not None  # noqa: S101 - one of both is
        _into(client.sandboxes.get(end[0]).files, source, end[1])
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else "the files"
        raise HostError(f"cannot copy '{name}': {reason(error)}", code="copy") from None
    return ()


def _into(files: Files, source: str, target: str) -> None:
    if source == STREAM:
        files.write(target, sys.stdin.buffer.read())
        return
    name = os.path.basename(os.path.abspath(source))
    if not os.path.isdir(source):
        files.upload(source, posixpath.join(target, name) if _takes(files, target) else target)
        return
    # "dir/." means what is in it; a directory that is there gets it as one more.
    inner = os.path.basename(source) == "."
    goal = posixpath.join(target, name) if not inner and _takes(files, target) else target
    files.make(goal)
    files.upload_tree(source, goal)


def _takes(files: Files, path: str) -> bool:
    """Whether a path inside is a directory, or is meant to be one."""
    if path.endswith("/"):
        return True
    try:
        return files.stat(path).kind == "directory"
    except ApiError as error:
        if error.status == 404:
            return False
        raise


def _out(files: Files, source: str, target: str) -> tuple[str, ...]:
    found = files.stat(source)
    if target == STREAM:
        if found.kind == "directory":
            raise UsageError("a directory cannot go to standard output", hint=USAGE, code="usage")
        sys.stdout.buffer.write(files.read(source))
        return ()
    inner = source.endswith("/.")
    name = posixpath.basename(posixpath.normpath(source))
    goal = os.path.join(target, name) if os.path.isdir(target) and not inner else target
    if found.kind == "directory":
        return files.download_tree(source, goal).skipped
    files.download(source, goal)
    return ()
