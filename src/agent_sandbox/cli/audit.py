"""`sandboxctl audit`: the service's audit trail: read it, prove it, take a copy, shorten it."""

from __future__ import annotations

import json
import os
import sys
import time

from ..errors import HostError, UsageError, reason
from ..record import Record
from ..service import store_address, store_private
from ..service.audit import Audit, prune, read, verify
from . import output
from .token import PLACES, caller, parse, place_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..service.audit.trail import Where
    from .compose import arguments

VERSION = 1
HINT = "see 'sandboxctl audit --help'"
FILTERS = ("--agent", "--action", "--decision", "--target", "--since", "--until")
LINES = 20
FOLLOW_SECONDS = 0.25
DAY = 86400.0


class Action(Record):
    """One word after `audit`."""

    run: Callable[[arguments.Given, Where], int]
    switches: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


def main(words: list[str]) -> int:
    """Dispatch to an action."""
    if not words or words[0] not in ACTIONS:
        raise UsageError(f"audit takes one of: {', '.join(ACTIONS)}", hint=HINT, code="usage")
    action = ACTIONS[words[0]]
    given = parse(words[1:], action.switches, (*action.values, *PLACES), HINT)
    if given.rest:
        raise UsageError(f"audit {words[0]} takes no '{given.rest[0]}'", hint=HINT, code="usage")
    place = place_of(given)
    if place.database is not None:
        trail = store_address.open_audit("", place.database, tables=store_address.LOOK)
        try:
            return action.run(given, trail)
        finally:
            trail.close()
    directory = f"{place.data}/{store_private.AUDIT}"
    if not os.path.lexists(directory):
        raise HostError(
            f"there is no audit trail in '{directory}'",
            hint="say where the service has its data with --data DIR or SANDBOX_DATA",
            code="no-data",
        )
    return action.run(given, directory)


# --- actions


def tail(given: arguments.Given, where: Where) -> int:
    """The last lines that fit, and with `-f` those that come."""
    wanted = filter_of(given)
    show = as_json if "--json" in given.switches else as_text
    count = _number("-n", given.one("-n"), LINES)
    follower = read.Follower(where) if "-f" in given.switches else None
    for record in reversed(read.newest(where, wanted, count)):
        sys.stdout.write(show(record))
    sys.stdout.flush()
    try:
        while follower is not None:
            time.sleep(FOLLOW_SECONDS)
            for record in follower.new(wanted):
                sys.stdout.write(show(record))
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return 0


def check(given: arguments.Given, where: Where) -> int:
    """0: the trail is whole; 1: it is not, and what is wrong with it."""
    report = verify.report(where, _head(given.one("--head")))
    if "--json" in given.switches:
        shown = {
            "version": VERSION, "ok": not report.findings, "files": report.files,
            "lines": report.lines, "head": f"{report.seq}:{report.hash}", "torn": report.torn,
            "findings": [vars(finding) for finding in report.findings],
        }  # fmt: skip
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        for finding in report.findings:
            sys.stdout.write(output.printable(str(finding)) + "\n")
        word = "NOT whole" if report.findings else "whole"
        sys.stdout.write(f"{word}: {report.lines} lines in {report.files} files\n")
        sys.stdout.write(f"head {report.seq}:{report.hash}\n")
    return 1 if report.findings else 0


def export(given: arguments.Given, where: Where) -> int:
    """Lines as they are, so that a copy can be checked too."""
    wanted, path = filter_of(given), given.one("-o") or given.one("--output")
    if not path or path == "-":
        _copy(where, wanted, sys.stdout.buffer)
        return 0
    try:
        # It is new, or it is somebody's; and it is for the owner alone, like the trail.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, store_private.FILE_MODE), "wb") as file:
            count = _copy(where, wanted, file)
    except OSError as error:
        raise HostError(f"cannot write '{path}': {reason(error)}", code="audit-export") from error
    output.notice("sandboxctl", f"{count} lines in {path}")
    return 0


def _copy(where: Where, wanted: read.Filter, file: Any) -> int:  # noqa: ANN401 - a binary file
    count = 0
    for raw, _ in read.in_order(where, wanted):
        file.write(raw)
        count += 1
    file.flush()
    return count


def shorten(given: arguments.Given, where: Where) -> int:
    """Remove whole files whose lines are all older."""
    days = _number("--keep-days", given.one("--keep-days"), 0)
    if not days:
        raise UsageError("audit prune needs --keep-days N", hint=HINT, code="usage")
    if findings := verify.verify(where):
        # A damaged trail is evidence.
        raise HostError(
            f"the audit trail is not whole: {findings[0]}",
            hint="see 'sandboxctl audit verify'; nothing was removed",
            code="audit-broken",
        )
    audit = Audit(where) if isinstance(where, str) else where
    try:
        removed = prune.prune(audit, caller(), time.time() - days * DAY)
    finally:
        audit.close()
    for name in removed:
        sys.stdout.write(f"removed {name}\n")
    return 0


ACTIONS = {
    "tail": Action(run=tail, switches=("-f", "--json"), values=("-n", *FILTERS)),
    "verify": Action(run=check, switches=("--json",), values=("--head",)),
    "export": Action(run=export, values=("-o", "--output", *FILTERS)),
    "prune": Action(run=shorten, values=("--keep-days",)),
}


# --- words


def filter_of(given: arguments.Given) -> read.Filter:
    """Which lines are wanted."""
    return read.Filter(
        agent=given.one("--agent"), action=given.one("--action"), target=given.one("--target"),
        decision=given.one("--decision"), since=_moment("--since", given.one("--since")),
        until=_moment("--until", given.one("--until")),
    )  # fmt: skip


def _moment(flag: str, text: str) -> float | None:
    try:
        return read.moment(text, time.time()) if text else None
    except ValueError as error:
        raise UsageError(f"cannot use {flag} {text!r}: {error}", hint=HINT, code="usage") from error


def as_json(record: dict[str, Any]) -> str:
    """A line for programs."""
    return json.dumps(record, separators=(",", ":")) + "\n"


def as_text(record: dict[str, Any]) -> str:
    """A line for people. Its parts come from agents: nothing in it may drive the terminal."""
    actor, target = record.get("actor"), record.get("target")
    request = record.get("request")
    parts = [
        str(record.get("ts", "")), str(record.get("decision", "")), str(record.get("action", "")),
        str(actor.get("agent", "")) if isinstance(actor, dict) else "-",
        str(target.get("id", "")) if isinstance(target, dict) else "",
    ]  # fmt: skip
    if isinstance(request, dict):
        command = request.get("cmd") or request.get("command")
        parts.append(
            " ".join(map(str, command)) if isinstance(command, list) else str(command or "")
        )
    if record.get("decision") != "allow" or record.get("reason"):
        parts.append(f"[{record.get('rule', '')}] {record.get('reason', '')}")
    return output.printable(" ".join(part for part in parts if part)) + "\n"


def _head(text: str) -> tuple[int, str] | None:
    if not text:
        return None
    seq, colon, digest = text.partition(":")
    if not colon or not seq.isdecimal() or len(digest) != 64:
        raise UsageError("--head takes SEQ:HASH", hint="as 'audit verify' prints it", code="usage")
    return int(seq), digest.lower()


def _number(flag: str, text: str, default: int) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:10]) < 1_000_000:
        raise UsageError(f"{flag} takes a number above zero", hint=HINT, code="usage")
    return int(text)
