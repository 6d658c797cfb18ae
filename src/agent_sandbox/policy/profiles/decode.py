"""`[profiles.NAME]` in the user's own policy file becomes Profiles. Pure.

A project's file cannot have them: they choose what of the home a sandbox sees.
"""

from __future__ import annotations

from ...errors import PolicyError
from .. import paths
from . import COPY, NAMES, NONE, PRIVATE, RO, RW, Profile, State, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_NAME = 64
# Keys that are lists of paths of the state, and how those are shared.
STATE_KEYS = {"private": PRIVATE, "rw": RW, "ro": RO, "copy": COPY}
LIST_KEYS = ("commands", "protect", "env", "hosts", "tmp", "notes")
KEYS = ("extends", *STATE_KEYS, *LIST_KEYS, "set-env")


def decode(value: object, where: str) -> tuple[Profile, ...]:
    """Every table below `profiles`; each may extend a built-in profile, or one before it."""
    if not isinstance(value, dict):
        raise _bad(where, "must be tables, [profiles.NAME]", value)
    made: dict[str, Profile] = {}
    for name, table in value.items():
        at = f"{where}.{name}"
        _check_name(name, at)
        if not isinstance(table, dict):
            raise _bad(at, "must be a table", table)
        made[name] = _profile(name, table, made, at)
    return tuple(made.values())


def _check_name(name: str, where: str) -> None:
    """A name that is a directory of private homes, too."""
    plain = name.isascii() and all(c.isalnum() or c in "-_" for c in name)
    if not plain or not name or name == NONE or len(name) > LONGEST_NAME:
        raise _bad(where, "must have a name of letters, digits, '-' and '_'", name)


def _profile(name: str, table: dict[str, object], made: dict[str, Profile], at: str) -> Profile:
    for key in table:
        if key not in KEYS:
            raise PolicyError(
                f"cannot use {at}: unknown key '{key}'",
                hint="known keys: " + ", ".join(KEYS),
                code="unknown-key",
            )
    base = _base(name, table.get("extends"), made, at)
    states = [*base.state]
    roots = [state.path for state in base.state if state.mode == PRIVATE]
    for key, mode in STATE_KEYS.items():
        written = _list(table, key, at, _path)
        # What is named again is shared as it says now.
        states = [s for s in states if s.path not in written]
        states += [
            State(path=path, mode=mode)
            for path in written
            # In a private directory, what nothing else is said about is private already.
            if mode != PRIVATE or not any(paths.below(path, root) for root in roots)
        ]
    _check_copies(states, at)
    from ..decode import check_variable
    from ..endpoints import parse

    for host in _list(table, "hosts", at):
        parse(host, f"{at}.hosts")
    for variable in _list(table, "env", at):
        check_variable(f"{at}.env", variable, at)
    return base.replace(
        name=name,
        commands=_list(table, "commands", at) or base.commands or (name,),
        state=tuple(states),
        protect=(*base.protect, *_list(table, "protect", at, _path)),
        env=(*base.env, *_list(table, "env", at)),
        set_env=(*base.set_env, *_variables(table.get("set-env", {}), f"{at}.set-env")),
        hosts=(*base.hosts, *_list(table, "hosts", at)),
        tmp=(*base.tmp, *_list(table, "tmp", at)),
        notes=(*base.notes, *_list(table, "notes", at)),
    )


def _base(name: str, wanted: object, made: dict[str, Profile], at: str) -> Profile:
    if wanted is None:
        # One of ours that is written again is only added to: its protections stay.
        return find(name, at) if name in NAMES else Profile(name=name, commands=())
    if not isinstance(wanted, str):
        raise _bad(f"{at}.extends", "must be the name of a profile", wanted)
    base = find(wanted, f"{at}.extends", made)
    return base if wanted == name else base.replace(commands=())


def _list(
    table: dict[str, object], key: str, at: str, check: Callable[[str, str], None] | None = None
) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(_is_line(item) for item in value):
        raise _bad(f"{at}.{key}", "must be a list of strings", value)
    for item in value:
        if check is not None:
            check(item, f"{at}.{key}")
    return tuple(value)


def _is_line(item: object) -> bool:
    from ..decode import is_text

    return isinstance(item, str) and bool(item) and is_text(item) and "\n" not in item


def _path(item: str, where: str) -> None:
    """A path below the home, or absolute; no glob, since it is also made and kept."""
    plain = item.startswith(("~/", "/")) and not paths.is_glob(item)
    if not plain or paths.normalise(item.removeprefix("~")) in ("/", "") or ".." in item.split("/"):
        raise _bad(where, "must be paths that begin with ~/ or /, without * and ..", item)


def _check_copies(states: list[State], at: str) -> None:
    """A copy is a file of the sandbox's own, so it needs a directory of the sandbox's own.

    And no such directory in another: what is written in the outer one must not lead to the inner.
    """
    roots = {state.path for state in states if state.mode == PRIVATE}
    for root in roots:
        if any(paths.below(root, other) for other in roots):
            raise _bad(f"{at}.private", "must be directories that do not lie in each other", root)
    for state in states:
        if state.mode == COPY and state.path.rpartition("/")[0] not in roots:
            raise _bad(f"{at}.copy", "must be files right in one of 'private'", state.path)


def _variables(value: object, where: str) -> list[tuple[str, str]]:
    from ..decode import check_variable, is_text

    if not isinstance(value, dict):
        raise _bad(where, "must be a table of strings", value)
    for name, text in value.items():
        check_variable(where, str(name), where)
        if not isinstance(text, str) or not is_text(text):
            raise _bad(f"{where}.{name}", "must be a string", text)
    return list(value.items())


def _bad(where: str, expectation: str, value: object) -> PolicyError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "…"
    return PolicyError(f"cannot use {where}: {expectation}, not {shown}", code="bad-value")
