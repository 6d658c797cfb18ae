"""`sandboxctl trust`: agree to a project's policy file as it is now, list or take back."""

from __future__ import annotations

import os
import sys

from ..errors import UsageError
from ..host import facts, files, trust
from ..host.locate import Locator
from ..launch import workspace
from ..policy.decode import decode
from ..policy.model import PROJECT


def main(arguments: list[str]) -> int:
    """Trust the project's file in the current directory, or FILE."""
    flags = {word for word in arguments if word.startswith("-")}
    names = [word for word in arguments if not word.startswith("-")]
    if flags - {"--list", "--remove"} or len(flags) > 1 or len(names) > 1:
        raise UsageError(
            "trust takes [--list|--remove] [FILE]", hint="see 'sandboxctl --help'", code="usage"
        )
    place = facts.place(os.environ, None, Locator())
    workspace.open_state(place.state_dir, place.uid)
    if "--list" in flags:
        for path, digest in trust.records(place.state_dir):
            current = "current" if _is_current(path, digest) else "changed since"
            sys.stdout.write(f"{path}  {digest[:12]}  {current}\n")
        return 0
    path = _file(names, place.real)
    record = trust.record_path(place.state_dir, path)
    if "--remove" in flags:
        if os.path.exists(record):
            os.unlink(record)
            sys.stdout.write(f"no longer trusted: {path}\n")
            return 0
        raise UsageError(f"cannot remove '{path}': it is not trusted", code="not-trusted")
    text = files.read_text(path)
    # A file with errors would fail later, when nobody remembers what was agreed to.
    decode(files.parse(text, path), rank=PROJECT, file=path)
    os.makedirs(os.path.dirname(record), mode=0o700, exist_ok=True)
    fresh = f"{record}.{os.urandom(4).hex()}"
    with open(fresh, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{trust.content_digest(text)}\n{path}\n")
    os.replace(fresh, record)
    sys.stdout.write(f"trusted as it is now: {path}\n")
    return 0


def _file(names: list[str], project: str) -> str:
    if names:
        path = os.path.realpath(names[0])
        if not os.path.isfile(path):
            raise UsageError(f"cannot trust '{names[0]}': no such file", code="config-missing")
        return path
    found = files.find(f"{project}/{files.PROJECT_STEM}")
    if found is None:
        raise UsageError(
            "cannot trust anything here: no .agent-sandbox.toml or .json in this directory",
            code="config-missing",
        )
    return found


def _is_current(path: str, digest: str) -> bool:
    try:
        return trust.content_digest(files.read_text(path)) == digest
    except Exception:  # noqa: BLE001 - a record of a file that is gone or unreadable
        return False
