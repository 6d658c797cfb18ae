"""The command line of `sandboxctl remote`: the tables of its actions and flags, and the reader."""

from __future__ import annotations

from ..errors import UsageError
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SWITCH, VALUE, REPEAT, PAIR = "switch", "value", "repeat", "pair"


class Flag(Record):
    """One flag. `kind` says what it takes; PAIR is a NAME=VALUE that may come again."""

    name: str
    help: str
    kind: str = VALUE
    short: str = ""
    metavar: str = "VALUE"
    # The value is a number.
    number: bool = False


class Action(Record):
    """One action: its flags by name, and what comes behind them."""

    name: str
    usage: str
    help: str
    flags: tuple[str, ...] = ()
    # The least and the most words; None: as many as there are.
    least: int = 0
    most: int | None = 0
    # So many words are ours; what follows is a command, whose flags are its own.
    before_command: int | None = None


FLAGS: tuple[Flag, ...] = (
    Flag(name="--url", metavar="URL", help="where the service is; else SANDBOX_API"),
    Flag(name="--token-file", metavar="FILE", help="the token; else SANDBOX_TOKEN"),
    Flag(name="--ca", metavar="FILE", help="the authority's certificate; else SANDBOX_CA"),
    Flag(name="--json", kind=SWITCH, help="for programs"),
    Flag(name="--template", metavar="NAME", help="a preset of the server"),
    Flag(name="--image", metavar="IMAGE", help="for backends with images"),
    Flag(name="--backend", metavar="NAME", help="the kind of sandbox"),
    Flag(name="--runtime", metavar="NAME", help="for backends with runtimes"),
    Flag(name="--memory", metavar="SIZE", help="bound of memory, e.g. 512M"),
    Flag(name="--cpus", metavar="N", number=True, help="bound of processors"),
    Flag(name="--pids", metavar="N", number=True, help="bound of processes"),
    Flag(name="--disk", metavar="SIZE", help="bound of its files"),
    Flag(name="--network", metavar="MODE", help="off or public"),
    Flag(name="--allow", metavar="HOST", kind=REPEAT, help="a host that may be reached"),
    Flag(name="--lifetime", metavar="SECONDS", number=True, help="until it expires"),
    Flag(name="--metadata", metavar="NAME=VALUE", kind=PAIR, help="a label"),
    Flag(name="--env", metavar="NAME=VALUE", kind=PAIR, help="a variable"),
    Flag(name="--cwd", metavar="PATH", help="where the command starts, inside"),
    Flag(name="--timeout", metavar="SECONDS", number=True, help="then the command is ended"),
    Flag(name="--interactive", short="-i", kind=SWITCH, help="pass our standard input on"),
    Flag(name="--retry", kind=SWITCH, help="run it once more if its machine is lost under it"),
    Flag(name="--tty", short="-t", kind=SWITCH, help="with a terminal"),
    Flag(name="--detach", short="-d", kind=SWITCH, help="do not wait; print the execution's id"),
    Flag(name="--command", short="-c", metavar="TEXT", help="a command line for /bin/sh"),
    Flag(name="--follow", short="-f", kind=SWITCH, help="wait for more"),
    Flag(name="--signal", short="-s", metavar="NAME", help="this signal, for the command itself"),
    Flag(name="--state", metavar="STATE", help="only those in this state"),
)  # fmt: skip
BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}
BY_SHORT: dict[str, Flag] = {flag.short: flag for flag in FLAGS if flag.short}

EVERYWHERE = ("--url", "--token-file", "--ca", "--json")
SANDBOX = (
    "--template", "--image", "--backend", "--runtime", "--memory", "--cpus", "--pids", "--disk",
    "--network", "--allow", "--lifetime", "--metadata", "--env",
)  # fmt: skip
COMMAND = ("--env", "--cwd", "--timeout", "--command")

ACTIONS: tuple[Action, ...] = (
    Action(
        name="run", usage="[flags] [-i] [-t] COMMAND [ARGUMENT…]|-c TEXT",
        help="run a command in a sandbox of its own", most=None, before_command=0,
        flags=(*SANDBOX, *COMMAND, "--retry", "--interactive", "--tty"),
    ),
    Action(name="create", usage="[flags]", help="make a sandbox and print its id", flags=SANDBOX),
    Action(name="list", usage="[--state STATE]", help="your sandboxes", flags=("--state",)),
    Action(
        name="exec", usage="[flags] [-i] [-t] [-d] ID COMMAND [ARGUMENT…]|-c TEXT",
        help="run a command in a sandbox", least=1, most=None, before_command=1,
        flags=(*COMMAND, "--interactive", "--tty", "--detach"),
    ),
    Action(
        name="shell", usage="[flags] [ID [COMMAND…]]", most=None, before_command=1,
        help="a shell with a terminal; without an id in a sandbox of its own",
        flags=(*SANDBOX, *COMMAND),
    ),
    Action(
        name="cp", usage="SOURCE TARGET", help="copy files; ID:PATH is inside, - is a stream",
        least=2, most=2,
    ),
    Action(
        name="ps", usage="[--state STATE] [ID]", help="commands, of one sandbox or of all", most=1,
        flags=("--state",),
    ),
    Action(
        name="logs", usage="[-f] EXECUTION", help="what a command has written", least=1, most=1,
        flags=("--follow",),
    ),
    Action(
        name="kill", usage="[-s SIGNAL] EXECUTION…", help="end commands", least=1, most=None,
        flags=("--signal",),
    ),
    Action(name="rm", usage="ID…", help="remove sandboxes", least=1, most=None),
    Action(name="whoami", usage="", help="who you are there, your limits and their use"),
)  # fmt: skip
ACTION_BY_NAME = {action.name: action for action in ACTIONS}


class Parsed(Record):
    """What was asked for."""

    action: str
    values: Mapping[str, object]
    words: tuple[str, ...]


def parse(arguments: list[str]) -> Parsed:
    """Flags may stand before and behind the action, up to a command."""
    values: dict[str, object] = {}
    left = list(arguments)
    while left and left[0] != "--" and left[0].startswith("-"):
        _flag(left, EVERYWHERE, values, "")
    if not left:
        raise usage("remote needs an action", "")
    name = left.pop(0)
    action = ACTION_BY_NAME.get(name)
    if action is None:
        raise usage(f"remote has no action '{name}'", "")
    allowed = (*EVERYWHERE, *action.flags)
    words: list[str] = []
    while left:
        if left[0] == "--":
            words += left[1:]
            break
        if action.before_command is not None and len(words) > action.before_command:
            words += left
            break
        if left[0].startswith("-") and left[0] != "-":
            _flag(left, allowed, values, name)
        else:
            words.append(left.pop(0))
    _count(action, words)
    return Parsed(action=name, values=values, words=tuple(words))


def _count(action: Action, words: list[str]) -> None:
    if len(words) < action.least or (action.most is not None and len(words) > action.most):
        raise usage(f"remote {action.name} takes: {action.usage or 'nothing'}", action.name)


def _flag(left: list[str], allowed: tuple[str, ...], values: dict[str, object], name: str) -> None:
    """Take one flag from the words, with its value."""
    word, equals, given = left.pop(0).partition("=")
    flag = BY_NAME.get(word) or BY_SHORT.get(word)
    if flag is None or flag.name not in allowed:
        raise usage(f"unknown flag: {word}", name)
    if flag.kind == SWITCH:
        if equals:
            raise usage(f"{word} takes no value", name)
        values[flag.name] = True
        return
    if not equals:
        if not left:
            raise usage(f"{word} needs {flag.metavar}", name)
        given = left.pop(0)
    _put(flag, given, values, name)


def _put(flag: Flag, given: str, values: dict[str, object], name: str) -> None:
    if flag.kind == REPEAT:
        found = values.setdefault(flag.name, [])
        assert isinstance(found, list)  # noqa: S101 - only made here
        found.append(given)
    elif flag.kind == PAIR:
        key, equals, value = given.partition("=")
        if not equals or not key:
            raise usage(f"{flag.name} takes NAME=VALUE", name)
        pairs = values.setdefault(flag.name, {})
        assert isinstance(pairs, dict)  # noqa: S101 - only made here
        pairs[key] = value
    elif flag.number:
        values[flag.name] = _number(flag, given, name)
    else:
        values[flag.name] = given


def _number(flag: Flag, given: str, name: str) -> float:
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e12:
        raise usage(f"{flag.name} takes a number, not '{given}'", name)
    return int(found) if found == int(found) else found


def usage(message: str, action: str) -> UsageError:
    """An error with what can be written instead."""
    found = ACTION_BY_NAME.get(action)
    names = "|".join(one.name for one in ACTIONS)
    shown = f"{found.name} {found.usage}" if found else f"{names} …"
    return UsageError(message, hint=f"sandboxctl remote {shown}", code="usage")


def help_text(action: str = "") -> str:
    """Help, made from the tables."""
    found = ACTION_BY_NAME.get(action)
    if found is not None:
        lines = [f"Usage: sandboxctl remote {found.name} {found.usage}".rstrip(), "", found.help]
        return "\n".join([*lines, "", "Flags:", *_lines((*found.flags, *EVERYWHERE))]) + "\n"
    lines = ["Usage: sandboxctl remote ACTION …", "", "Actions:"]
    for one in ACTIONS:
        lines += [f"  {one.name} {one.usage}".rstrip(), f"      {one.help}"]
    lines += ["", "For all of them:", *_lines(EVERYWHERE)]
    lines += ["", "The exit code is the command's; 124: it took too long, 125: the service."]
    return "\n".join(lines) + "\n"


def _lines(names: tuple[str, ...]) -> list[str]:
    shown = []
    for flag in (BY_NAME[name] for name in dict.fromkeys(names)):
        short = f"{flag.short}, " if flag.short else ""
        value = "" if flag.kind == SWITCH else f" {flag.metavar}"
        shown.append(f"  {short}{flag.name}{value}\n      {flag.help}")
    return shown
