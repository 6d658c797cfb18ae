"""`sandboxctl profile`: which agents are known, what each may keep and reach, and one of your own.

`show` looks at this machine: paths as they are for this user, project and environment.
"""

from __future__ import annotations

import os
import sys

from ..errors import UsageError
from ..host import facts, files
from ..host.locate import Locator
from ..policy import profiles
from ..policy.model import GLOBAL
from ..policy.profiles.decode import decode
from ..policy.profiles.places import parts
from .output import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..host.facts import Place
    from ..policy.profiles import Profile
    from ..policy.profiles.places import Part

VERSION = 1
USAGE = "profile takes list, show NAME, or new NAME [--extends NAME]"


def main(arguments: list[str]) -> int:
    """List, show, or print a table for a new one."""
    import json

    as_json = "--json" in arguments
    words = [word for word in arguments if word != "--json"] or ["list"]
    base = ""
    if words[0] == "new" and words[2:3] == ["--extends"] and len(words) == 4:
        words, base = words[:2], words[3]
    wanted = {"list": 1, "show": 2, "new": 2}.get(words[0])
    if len(words) != wanted or any(word.startswith("-") for word in words):
        raise UsageError(USAGE, hint="see 'sandboxctl profile --help'", code="usage")
    place = facts.place(os.environ, None, Locator())
    own = _own(place)
    if words[0] == "list":
        rows = [_row(profile, name in own) for name, profile in _all(own).items()]
        data: dict[str, object] = {"version": VERSION, "profiles": rows}
        _write(json.dumps(data, indent=2) if as_json else _table(rows))
        return 0
    if words[0] == "show":
        profile = profiles.find(words[1], "the command line", own)
        data = {"version": VERSION, **_described(profile, place, words[1] in own)}
        _write(json.dumps(data, indent=2) if as_json else _text(data))
        return 0
    text = _new(words[1], base, own)
    _write(json.dumps({"version": VERSION, "toml": text}, indent=2) if as_json else text)
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _own(place: Place) -> dict[str, Profile]:
    """The profiles of the user's own file."""
    path = files.find(files.global_stem(os.environ, place.home.real))
    if path is None:
        return {}
    setting = files.read(path, GLOBAL).values.get("profiles")
    found = setting.value if setting is not None else ()
    listed = found if isinstance(found, tuple) else ()
    return {one.name: one for one in listed if isinstance(one, profiles.Profile)}


def _all(own: dict[str, Profile]) -> dict[str, Profile]:
    return {**profiles.known(), **own}


def _row(profile: Profile, is_own: bool) -> dict[str, object]:  # noqa: FBT001 - one caller
    return {
        "name": profile.name, "commands": list(profile.commands),
        "source": "yours" if is_own else "built in",
    }  # fmt: skip


def _table(rows: list[dict[str, object]]) -> str:
    return "\n".join(
        f"{row['name']!s:<12}  {row['source']!s:<9}  {' '.join(map(str, _list(row['commands'])))}"
        for row in rows
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _described(profile: Profile, place: Place, is_own: bool) -> dict[str, object]:  # noqa: FBT001
    """A profile on this machine."""
    placed = parts(profile, os.environ, home=place.home.real, project=place.real)
    home = place.home.path
    return {
        **_row(profile, is_own),
        "state": [_part(part) for part in placed],
        "protect": list(profile.protect),
        "env": [*profile.env, *(variable for variable, _ in profile.moved)],
        "set_env": dict((*profile.set_env, *(profile.root_env if place.uid == 0 else ()))),
        "hosts": list(profile.hosts),
        "tmp": list(profile.tmp),
        "notes": list(profile.notes),
        "home": home,
    }


def _part(part: Part) -> dict[str, object]:
    there = os.path.lexists(part.outside.removesuffix("/*"))
    return {
        "path": part.path, "mode": part.mode, "host": part.outside, "there": there,
        **({"keys": _keys(part.keys)} if part.keys else {}),
    }  # fmt: skip


def _keys(name: str) -> list[str]:
    """What travels out of a merged file."""
    from ..policy.instep import PROJECTS, TABLES

    table = TABLES[name]
    return [*table.top, *(f"{PROJECTS}.PROJECT.{key}" for key in table.project)]


def _text(data: dict[str, object]) -> str:
    home = str(data["home"])
    commands = ", ".join(map(str, _list(data["commands"])))
    lines = [f"{data['name']}: {data['source']}, for {commands or 'no command'}", "", "State:"]
    for row in _list(data["state"]):
        if isinstance(row, dict):
            lines += _state_lines(row, home)
    lines += ["  none"] if not data["state"] else []
    if data["state"]:
        lines += ["", *(f"  {mode:<8} {means}" for mode, means in profiles.MODES.items())]
    for title, key in (
        ("Read-only below what is writable, and not to be created:", "protect"),
        ("Variables that pass:", "env"), ("Hosts that --network=allow begins with:", "hosts"),
        ("In the sandbox's own /tmp:", "tmp"), ("Notes:", "notes"),
    ):  # fmt: skip
        values = _list(data[key])
        lines += ["", title, *(f"  {value}" for value in values)] if values else []
    values_set = data["set_env"]
    if isinstance(values_set, dict) and values_set:
        lines += ["", "Variables that are set:", *(f"  {k}={v}" for k, v in values_set.items())]
    return "\n".join(printable(line) for line in lines)


def _state_lines(row: dict[str, object], home: str) -> list[str]:
    def short(path: object) -> str:
        text = str(path)
        return "~" + text[len(home) :] if text.startswith(home + "/") else text

    # What is private has nothing to do with the host's.
    absent = not row["there"] and row["mode"] != profiles.PRIVATE
    what = short(row["path"])
    if row["host"] != row["path"]:
        what += f"  (on the host: {short(row['host'])})"
    return [f"  {row['mode']!s:<8} {what}{'  (not there)' if absent else ''}"]


EXAMPLE = """\
# Put this into your own policy file, ~/.config/agent-sandbox/config.toml. It is used for commands
# of these names, and with --profile {name}. 'sandboxctl profile show {name}' tells what it means.
[profiles.{name}]
{extends}commands = ["{name}"]
# Directories that are the sandbox's own, kept for each project. Nothing in them reaches the host.
private = [{private}]
# Files right in one of those, copied in whenever the host's has changed.
{c}copy = ["~/.{name}/config.json"]
# Shown in them, or elsewhere, as they are on the host: settings, instructions.
{c}ro = ["~/.{name}/settings.json"]
# The host's own, writable: whatever the agent outside runs or trusts must not be in there.
{c}rw = ["~/.{name}/sessions"]
# Read-only below 'rw', and not to be created: settings with hooks, plugins, commands, MCP servers.
{c}protect = ["~/.{name}/sessions/hooks"]
# Variables of yours that pass, and variables that are set inside.
{c}env = ["{upper}_API_KEY"]
{c}set-env = {{ {upper}_SANDBOX = "off" }}
# Hosts that --network=allow lets through from the start.
{c}hosts = ["api.example.com"]
{c}notes = ["how its own sandbox is switched off"]"""


def _new(name: str, base: str, own: dict[str, Profile]) -> str:
    """A table for the user's own policy file; what is printed can be read again."""
    if base:
        profiles.find(base, "--extends", own)
    elif name in profiles.NAMES:
        base = name
    text = EXAMPLE.format(
        name=name, upper=name.upper().replace("-", "_"), c="# ",
        extends=f'extends = "{base}"\n' if base else "",
        private="" if base else f'"~/.{name}"',
    )  # fmt: skip
    table: dict[str, object] = {"commands": [name], "private": [] if base else [f"~/.{name}"]}
    # The name is checked as the file's would be.
    decode({name: {**table, **({"extends": base} if base else {})}}, "profiles")
    return text
