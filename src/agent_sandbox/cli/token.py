"""`sandboxctl token`: tokens of agents for the service. Works while the service runs."""

from __future__ import annotations

import json
import os
import sys
import time

from ..errors import HostError, UsageError
from ..record import Record
from ..service import limits, limits_units, store_address, store_private
from ..service.tokens import Tokens
from ..service.values import ADMIN, DEFAULT_SCOPES, Agent
from . import output
from .compose import arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..service.store_address import Database
    from ..service.tokens import TokenInfo

    T = TypeVar("T")

VERSION = 1
HINT = "see 'sandboxctl token --help'"
PLACES = ("--data", "--database")
NEW_FLAGS = ("--scope", "--image", "--template", "--quota", "--expires", "--uid")


class Place(Record):
    """Where a service has its state: a data directory, or a database."""

    data: str
    database: Database | None = None


class Work:
    """The state of a service, open for one action."""

    def __init__(self, place: Place, *, make: bool = False) -> None:
        data, database = place.data, place.database
        missing = database is None and not os.path.lexists(f"{data}/{store_private.DATABASE}")
        if missing and not make:
            raise HostError(
                f"no service has its data in '{data}'",
                hint="say where with --data DIR or SANDBOX_DATA",
                code="no-data",
            )
        tables = store_address.BEGIN if make else store_address.LOOK
        self.store = store_address.open_state(data, database, own=False, tables=tables)
        self.tokens = Tokens(self.store)
        # Before anything is changed: what cannot be written down is not done.
        self.audit = store_address.open_audit(self.store.data, database, tables=tables)

    def note(self, action: str, info: TokenInfo) -> None:
        """Write down what was done to a token."""
        self.audit.write(
            caller(), action, target=info.key,
            request={
                "name": info.name, "scopes": list(info.scopes), "images": info.images,
                "templates": info.templates, "quotas": dict(info.quotas), "uid": info.uid,
                "expires": info.expires,
            },
        )  # fmt: skip

    def close(self) -> None:
        """Done."""
        self.audit.close()
        self.store.close()


class Action(Record):
    """One word after `token`."""

    run: Callable[[arguments.Given, Place], int]
    switches: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    # How many words it takes.
    words: int = 0


def main(words: list[str]) -> int:
    """Make, show, end or renew tokens."""
    if not words or words[0] not in ACTIONS:
        raise UsageError(f"token takes one of: {', '.join(ACTIONS)}", hint=HINT, code="usage")
    action = ACTIONS[words[0]]
    given = parse(words[1:], action.switches, (*action.values, *PLACES), HINT)
    if len(given.rest) != action.words:
        what = "one name" if action.words else "no name"
        raise UsageError(f"token {words[0]} takes {what}", hint=HINT, code="usage")
    return action.run(given, place_of(given))


def parse(
    words: list[str], switches: tuple[str, ...], values: tuple[str, ...], hint: str
) -> arguments.Given:
    """The words of a verb, with the verb's own hint."""
    try:
        return arguments.parse(words, switches=switches, values=values)
    except UsageError as error:
        raise UsageError(error.message, hint=hint, code=error.code) from error


def place_of(given: arguments.Given) -> Place:
    """The data directory or database that is meant."""
    named, url = given.one("--data"), given.one("--database")
    data = os.path.abspath(named) if named else store_private.data_directory(os.environ)
    if named and not url and (variable := store_address.variable(os.environ)):
        # Neither wins in silence: a trail that was not looked at must not be called whole, nor a
        # token be made where no service looks for it.
        raise UsageError(
            f"--data names a directory, and {variable} a database",
            hint=f"unset {variable} for the directory, or leave --data out for the database",
            code="usage",
        )
    return Place(data=data, database=store_address.of(url, os.environ))


def caller() -> Agent:
    """Whoever may change the data directory: its owner."""
    uid = os.geteuid()
    return Agent(
        name="owner", key=f"uid:{uid}", scopes=frozenset({ADMIN}), uid=uid, address="sandboxctl"
    )


# --- actions


def new(given: arguments.Given, place: Place) -> int:
    """Print a new token alone on standard output: it is never shown again."""
    quotas = dict(map(_quota, given.every("--quota")))
    images, expires = _images(given), _expires(given.one("--expires"))
    uid = _uid(given.one("--uid"))
    work = Work(place, make=True)
    try:
        token, info = work.tokens.new(
            given.rest[0], scopes=given.every("--scope") or DEFAULT_SCOPES, images=images,
            templates=given.every("--template") or None, quotas=quotas, expires=expires, uid=uid,
        )  # fmt: skip
        _show(work, "token.new", token, info)
    finally:
        work.close()
    return 0


def rotate(given: arguments.Given, place: Place) -> int:
    """A new secret; the old one dies now, or after `--grace`."""
    grace = _time("--grace", given.one("--grace")) or 0.0
    work = Work(place)
    try:
        token, info = work.tokens.rotate(given.rest[0], grace)
        _show(work, "token.rotate", token, info)
    finally:
        work.close()
    return 0


def _show(work: Work, action: str, token: str, info: TokenInfo) -> None:
    try:
        work.note(action, info)
    except BaseException:
        # Nobody has seen it: nobody may use it.
        work.tokens.revoke(info.id)
        raise
    sys.stdout.write(token + "\n")
    sys.stdout.flush()
    until = f", until {_date(info.expires)}" if info.expires else ""
    output.notice("sandboxctl", f"{info.key} is {info.name} ({', '.join(info.scopes)}{until})")


def revoke(given: arguments.Given, place: Place) -> int:
    """End an agent's tokens, or one by its id. Running services know at once."""
    work = Work(place)
    try:
        for info in work.tokens.revoke(given.rest[0]):
            work.note("token.revoke", info)
            output.notice("sandboxctl", f"{info.key} of {info.name} is revoked")
    finally:
        work.close()
    return 0


def show(given: arguments.Given, place: Place) -> int:
    """All tokens, dead ones too; no secrets, not even their hashes."""
    work = Work(place)
    try:
        found = work.tokens.list()
    finally:
        work.close()
    now = time.time()
    if "--json" in given.switches:
        shown = {"version": VERSION, "tokens": [described(info, now) for info in found]}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write(table(found, now))
    return 0


ACTIONS = {
    "new": Action(run=new, values=NEW_FLAGS, words=1),
    "list": Action(run=show, switches=("--json",)),
    "revoke": Action(run=revoke, words=1),
    "rotate": Action(run=rotate, values=("--grace",), words=1),
}


# --- words


def described(info: TokenInfo, now: float) -> dict[str, object]:
    """A token for programs. Pure."""
    return {
        "id": info.key, "name": info.name, "state": info.state(now), "scopes": list(info.scopes),
        "images": info.images, "templates": info.templates, "quotas": dict(info.quotas),
        "uid": info.uid, "source": info.source, "createdAt": _date(info.created),
        "expiresAt": info.expires and _date(info.expires),
        "revokedAt": info.revoked and _date(info.revoked),
    }  # fmt: skip


def table(found: tuple[TokenInfo, ...], now: float) -> str:
    """Tokens for people. Pure."""
    rows = [("ID", "NAME", "STATE", "SCOPES", "EXPIRES")]
    rows += [
        (info.key, info.name, info.state(now), ",".join(info.scopes),
         _date(info.expires) if info.expires else "never")
        for info in found
    ]  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _images(given: arguments.Given) -> list[str] | None:
    found = given.every("--image")
    return [one for text in found for one in _read("--image", text, limits_units.images)] or None


def _quota(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError("--quota takes NAME=VALUE", hint="such as MAX_MEMORY=1G", code="usage")
    return limits.quota(name, value)


def _expires(text: str) -> float | None:
    seconds = _time("--expires", text)
    return None if seconds is None else time.time() + seconds


def _time(flag: str, text: str) -> float | None:
    return _read(flag, text, limits_units.seconds) if text else None


def _uid(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) >= 1 << 32:
        raise UsageError("--uid takes the number of a user", hint="see: id -u NAME", code="usage")
    return int(text)


def _read(flag: str, text: str, reader: Callable[[str], T]) -> T:
    try:
        return reader(text)
    except ValueError as error:
        raise UsageError(f"cannot use {flag} {text!r}: {error}", hint=HINT, code="usage") from error
