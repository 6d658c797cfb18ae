"""`sandboxctl quarantine`: what runs have planted and what became of it. And the note at their end.

Names and contents here were chosen by a sandbox: they are shown with their control characters
taken out.
"""

from __future__ import annotations

import os
import sys

from ..errors import UsageError
from ..host import facts
from ..host.locate import Locator
from ..launch import quarantine, workspace
from ..policy import paths
from ..policy.triggers import FORBIDDEN, RESTORED
from .output import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..launch.quarantine import Kept
    from ..policy.triggers import Finding

VERSION = 1
USAGE = "quarantine takes [list] [--json], or one of show, restore, drop with an ID"
# How many names a note spells out.
SHOWN = 5
MAX_SHOWN_BYTES = 1 << 16


def main(arguments: list[str]) -> int:
    """List, show, put back or remove."""
    import json

    as_json = "--json" in arguments
    words = [word for word in arguments if word != "--json"] or ["list"]
    wanted = {"list": 1, "show": 2, "restore": 2, "drop": 2}.get(words[0])
    if len(words) != wanted or any(word.startswith("-") for word in words):
        raise UsageError(USAGE, hint="see 'sandboxctl quarantine --help'", code="usage")
    place = facts.place(os.environ, None, Locator())
    workspace.open_state(place.state_dir, place.uid)
    if words[0] == "list":
        kept = quarantine.listed(place.state_dir)
        data = {"version": VERSION, "files": [_row(k) for k in kept]}
        _write(json.dumps(data, indent=2) if as_json else _table(kept))
        return 0
    if words[0] == "show":
        run, one = quarantine.find(place.state_dir, words[1])
        text = _content(quarantine.place(run, one))
        row = {"version": VERSION, **_row(one), "content": text}
        _write(json.dumps(row, indent=2) if as_json else _described(one, text))
        return 0
    act, said = {
        "restore": (quarantine.restore, "put back"), "drop": (quarantine.drop, "removed"),
    }[words[0]]  # fmt: skip
    one = act(place.state_dir, words[1])
    row = {"version": VERSION, **_row(one)}
    _write(json.dumps(row, indent=2) if as_json else f"{said}: {_clean(one.path)}")
    return 0


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text + "\n")


def _row(kept: Kept) -> dict[str, object]:
    return {field: getattr(kept, field) for field in type(kept).__fields__ if field != "at"}


def _when(kept: Kept) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.time))


def _table(kept: Sequence[Kept]) -> str:
    return "\n".join(
        f"{k.id}  {_when(k)}  {k.action:<11}  {_clean(k.path)}  ({_clean(k.what)})" for k in kept
    )


def _described(kept: Kept, text: str) -> str:
    head = [
        f"path:   {_clean(kept.path)}",
        f"why:    {_clean(kept.what)}",
        f"done:   {kept.action}",
        f"when:   {_when(kept)}",
        f"mode:   {kept.mode & 0o7777:04o}",
    ]
    return "\n".join((*head, "", printable(text.replace("\t", "    ")).rstrip("\n")))


def _content(path: str) -> str:
    if os.path.islink(path):
        return f"link to {os.readlink(path)}"
    if not os.path.isfile(path):
        return "not a plain file"
    with open(path, "rb") as file:
        return file.read(MAX_SHOWN_BYTES).decode("utf-8", "replace")


def _clean(text: str) -> str:
    """A name on one line, whatever is in it."""
    return printable(text).replace("\n", "?")


def note(changes: Sequence[Finding], project: str) -> tuple[list[str], list[str]]:
    """What to say at the end of a run: warnings about what could not be done, and notices."""
    grave = [c for c in changes if c.severity == FORBIDDEN]
    failed = [c for c in grave if c.action.startswith(quarantine.FAILED)]
    reported = [c for c in grave if c.action == quarantine.REPORTED]
    done = [c for c in grave if c not in failed and c not in reported]
    # What could not be compared at all has no path.
    rest = [c for c in changes if c.severity != FORBIDDEN and c.path]
    warnings = [_clean(c.what) for c in changes if not c.path]
    warnings += [
        f"could not put away {_named(c, project)}: {_clean(c.action)}" for c in failed[:SHOWN]
    ]
    if len(failed) > SHOWN:
        warnings.append(f"and {len(failed) - SHOWN} more that could not be put away")
    if reported:
        warnings.append(f"left in place, because @git is off: {_list(reported, project)}")
    notices = []
    if done:
        count = f"{len(done)} file{'s' if len(done) > 1 else ''}"
        notices.append(f"{count} quarantined: {_list(done, project)} (see 'sandboxctl quarantine')")
    if rest:
        notices.append(f"changed, and acted on by tools outside: {_list(rest, project)}")
    return warnings, notices


def _list(changes: Sequence[Finding], project: str) -> str:
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(_named(c, project) for c in changes[:SHOWN]) + more


def _named(change: Finding, project: str) -> str:
    path = change.path
    if paths.below(path, project):
        path = path[len(project) + 1 :]
    path, what = _clean(path), _clean(change.what)
    if change.severity == FORBIDDEN:
        return f"{path} ({what}{'; restored' if change.action == RESTORED else ''})"
    if what in ("new", "changed"):
        return f"{path} ({change.who})"
    if what.startswith("scripts: "):
        return f"{path} {what} ({change.who})"
    return f"{path} ({change.who}: {what})" if change.who else f"{path} ({what})".strip()
