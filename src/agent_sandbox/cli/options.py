"""The command line of `agent-sandbox`: one table for parser, help, completion and docs. Pure.

Flags end at the first word that is none; everything after belongs to the command, untouched.
"""

from __future__ import annotations

from ..errors import UsageError
from ..policy import settings
from ..policy.model import FLAGS, Setting, Source
from ..record import Record

# How a flag takes its value.
SWITCH = "switch"
VALUE = "value"
REPEAT = "repeat"
OPTIONAL = "optional"


class Flag(Record):
    """One flag."""

    name: str
    takes: str
    help: str
    metavar: str = ""
    short: str = ""
    # Key of the settings table; empty for flags that only steer the command itself.
    key: str = ""
    choices: tuple[str, ...] = ()


def _from_row(row: settings.Row) -> Flag:
    takes = VALUE
    if row.boolean:
        takes = OPTIONAL
    elif row.kind in settings.LISTS:
        takes = REPEAT
    return Flag(
        name=row.flag, takes=takes, help=row.help, key=row.key, choices=row.choices,
        metavar=row.metavar or "|".join(reversed(row.choices)),
    )  # fmt: skip


TABLE: tuple[Flag, ...] = (
    *(_from_row(row) for row in settings.ROWS if row.flag),
    Flag(
        name="--env", takes=REPEAT, metavar="NAME[=VALUE]", help="pass a variable, or set it"
    ),
    Flag(name="--cwd", short="-C", takes=VALUE, metavar="DIR", help="run in DIR"),
    Flag(
        name="--config", short="-c", takes=VALUE, metavar="FILE",
        help="FILE instead of the project's config",
    ),
    Flag(name="--keep-workspace", takes=SWITCH, help="leave /tmp of the run on disk, say where"),
    Flag(name="--report", takes=VALUE, metavar="FILE", help="write the run's report as JSON"),
    Flag(name="--dry-run", takes=SWITCH, help="print the bwrap command, start nothing"),
    Flag(name="--debug", takes=SWITCH, help="say where each value and mount comes from"),
    Flag(
        name="--check", takes=SWITCH, help="inside a sandbox? exit 0, else 1; -v: what is allowed"
    ),
    Flag(name="--help", short="-h", takes=SWITCH, help="show this help"),
    Flag(name="--version", short="-v", takes=SWITCH, help="show the version"),
)  # fmt: skip

BY_NAME: dict[str, Flag] = {
    **{flag.name: flag for flag in TABLE},
    **{flag.short: flag for flag in TABLE if flag.short},
}


class Parsed(Record):
    """What the command line says."""

    command: tuple[str, ...]
    values: dict[str, Setting]
    cwd: str | None = None
    config: str | None = None
    report: str | None = None
    switches: frozenset[str] = frozenset()


def parse(arguments: list[str]) -> Parsed:
    """Parse the flags; stops at the command."""
    given: list[tuple[Flag, str]] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        flag, value = _split(word)
        if value is None and flag.takes in (VALUE, REPEAT):
            index += 1
            if index >= len(arguments):
                raise _usage(f"flag {flag.name} needs a value: {flag.metavar}")
            value = arguments[index]
        given.append((flag, value if value is not None else ""))
        index += 1
    return _collect(given, tuple(arguments[index:]))


def _split(word: str) -> tuple[Flag, str | None]:
    """One word as flag and attached value."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        flag = BY_NAME.get(name)
        if flag is None:
            raise _usage(f"unknown flag: {name}")
        if equals and flag.takes == SWITCH:
            raise _usage(f"flag {name} takes no value")
        if equals and not value and flag.takes != SWITCH:
            raise _usage(f"flag {name} needs a value: {flag.metavar}")
        if not equals and flag.takes == OPTIONAL:
            return flag, "on"
        return flag, value if equals else None
    flag = BY_NAME.get(word[:2])
    if flag is None or (flag.takes == SWITCH and len(word) > 2):
        raise _usage(f"unknown flag: {word}")
    return flag, word[2:].removeprefix("=") or None


def _usage(message: str) -> UsageError:
    return UsageError(message, hint="see 'agent-sandbox --help'", code="usage")


def _collect(given: list[tuple[Flag, str]], command: tuple[str, ...]) -> Parsed:
    if not given:
        return Parsed(command=command, values={})
    # Only with flags: it takes a part of every start.
    from ..policy.decode import decode_value

    values: dict[str, Setting] = {}
    lists: dict[str, list[str]] = {}
    plain: dict[str, str] = {}
    for flag, value in given:
        if flag.takes == REPEAT:
            lists.setdefault(flag.name, []).append(value)
        elif flag.key:
            decoded = decode_value(settings.BY_KEY[flag.key], value, f"flag {flag.name}")
            values[flag.key] = _setting(decoded, flag.name)
        else:
            plain[flag.name] = value
    for name, items in lists.items():
        flag = BY_NAME[name]
        if flag.key:
            decoded = decode_value(settings.BY_KEY[flag.key], items, f"flag {name}")
            values[flag.key] = _setting(decoded, name)
        else:
            _environment(items, values)
    return Parsed(
        command=command,
        values=values,
        cwd=plain.pop("--cwd", None),
        config=plain.pop("--config", None),
        report=plain.pop("--report", None),
        switches=frozenset(plain),
    )


def _setting(value: object, flag: str) -> Setting:
    return Setting(value=value, source=Source(layer=FLAGS, where=f"flag {flag}"))


def _environment(items: list[str], values: dict[str, Setting]) -> None:
    """`--env NAME` passes, `--env NAME=VALUE` sets."""
    keep = [item for item in items if "=" not in item]
    put = dict(item.split("=", 1) for item in items if "=" in item)
    from ..policy.decode import check_variable

    for name in (*keep, *put):
        check_variable("--env", name, "flags")
    if keep:
        values["env.keep"] = _setting(tuple(keep), "--env")
    if put:
        values["env.set"] = _setting(put, "--env")


def help_text() -> str:
    """Usage that fits a screen, made from the table."""
    lines = [
        "Usage: agent-sandbox [flags] [--] COMMAND [ARGS…]",
        "",
        "Run COMMAND in a filesystem sandbox: the project (the current directory) is writable,",
        "the system is read-only, secrets and other projects are out of sight.",
        "",
        "Flags:",
    ]
    for flag in TABLE:
        name = f"{flag.short}, {flag.name}" if flag.short else f"    {flag.name}"
        if flag.takes == OPTIONAL:
            name += f"[={flag.metavar}]"
        elif flag.takes in (VALUE, REPEAT):
            name += f" {flag.metavar}"
        lines.append(f"  {name:<32} {flag.help}")
    lines += [
        "",
        "Examples:",
        "  agent-sandbox claude",
        "  agent-sandbox --network=off --ro vendor npm test",
        "  agent-sandbox --exclude '.env*' -- bash",
        "",
        "AGENT_SANDBOX=false in the environment runs COMMAND plain. See also: sandboxctl --help",
    ]
    return "\n".join(lines) + "\n"
