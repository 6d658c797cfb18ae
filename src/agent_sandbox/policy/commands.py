"""Command rules: a program stands in for a command, in every place where the command is. Pure.

    false     blocked            @git      refuses what loses work (`gitguard`)
    true      as it is           a path    the user's script, which finds the real one

The stand-in covers the command's own files, as far as they are shown read-only, and comes first on
PATH. A link is covered itself and not followed: behind `ls` may be a program of many names. This
is a guard rail, not a wall: whoever brings a program along runs it.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import paths
from .decode import bad, is_text
from .model import README, RO, RW, Match, Mount, Setting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .model import HostFacts, Layer, Policy

    Rule = bool | str

PRESETS = ("@git",)
DIRECTORY = "/run/agent-sandbox/commands"
REAL = "/run/agent-sandbox/real"
SCRIPTS = "/run/agent-sandbox/scripts"
SHELL = "/bin/sh"
# What starts every command of a run (`bwrap._trampoline`).
STARTER = "/usr/bin/env"
WORDS = {"true": True, "false": False}


class Place(Record):
    """One way to a program: the links and the file that bear its name, and the file at the end."""

    covered: tuple[str, ...]
    file: str


class Program(Record):
    """A command as the host has it, in the order of PATH, and the user's script for it."""

    name: str
    places: tuple[Place, ...]
    # git calls itself by the path of its own directory.
    own: tuple[Place, ...] = ()
    script: Match | None = None
    text: str = ""


class Programs(Record):
    """What the rules name, and the two programs that every sandbox needs to start anything."""

    named: tuple[Program, ...]
    shell: Place
    starter: Place


class Standing(Record):
    """What a plan gets of the rules."""

    mounts: tuple[Mount, ...]
    # Covered paths → where the real program is inside.
    moved: Mapping[str, str]


def decode(value: object, key: str, where: str) -> dict[str, Rule]:
    """A table of rules, or the texts of flags: NAME=RULE, several with commas."""
    if isinstance(value, (list, tuple)):
        value = _pairs(value, where)
    if not isinstance(value, dict):
        raise bad(key, where, "must be a table of rules", value)
    for name, rule in value.items():
        _check(name, rule, key, where)
    return dict(value)


def _pairs(texts: Sequence[object], where: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        if not isinstance(text, str):
            raise bad("commands", where, "must be a table of rules", text)
        for part in text.split(","):
            name, equals, rule = part.partition("=")
            if not equals or not rule:
                raise _wrong(f"invalid --cmd format '{part}' in {where}: must be NAME=RULE")
            found[name] = WORDS.get(rule, rule)
    return found


def _check(name: object, rule: object, key: str, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise _wrong(f"cannot use {key} in {where}: empty key")
    if "/" in name or name in (".", "..") or not is_text(name) or not name.isprintable():
        raise _wrong(f"cannot use {key} in {where}: '{name}' is not the name of a command")
    if isinstance(rule, bool):
        return
    if not isinstance(rule, str) or not rule or not is_text(rule):
        raise bad(f"{key}.{name}", where, "must be boolean or string", rule)
    if rule.startswith("@") and rule not in PRESETS:
        raise _wrong(f"cannot use {key}.{name} in {where}: unknown command preset '{rule}'")
    if rule.startswith("@") and rule != f"@{name}":
        raise _wrong(f"cannot use {key}.{name} in {where}: '{rule}' is for '{rule[1:]}'")


def _wrong(message: str) -> PolicyError:
    hint = "a rule is false, true, @git (for git), or the path of a script"
    return PolicyError(message, hint=hint, code="bad-command-rule")


def merge(layers: Iterable[Layer]) -> dict[str, Setting]:
    """The rules that hold, by name; later layers win."""
    found: dict[str, Setting] = {}
    for layer in layers:
        entry = layer.values.get("commands")
        if entry is not None and isinstance(entry.value, dict):
            for name, rule in entry.value.items():
                found[name] = Setting(value=rule, source=entry.source)
    return {name: setting for name, setting in found.items() if setting.value is not True}


def widenings(asked: object, below: Iterable[Layer]) -> list[str]:
    """Rules of an untrusted project file that take something back, or make us read a file.

    To block only tightens. A script is read outside: a project could name a key of the user.
    """
    lower = merge(below)
    found = []
    for name, rule in asked.items() if isinstance(asked, dict) else ():
        held = lower[name].value if name in lower else True
        if rule is False or rule == held or (rule in PRESETS and held is True):
            continue
        found.append(f"commands.{name} = {str(rule).lower() if rule is True else repr(rule)}")
    return found


def seen(programs: Programs, mounts: Iterable[Mount]) -> dict[str, str]:
    """How places of programs are seen inside, as far as they show the host's own file."""
    by_dest = {m.dest: m for m in mounts if m.kind not in ("symlink", "seal")}
    found: dict[str, str] = {}
    ways = [place for program in programs.named for place in (*program.places, *program.own)]
    for place in (*ways, programs.shell, programs.starter):
        for path in (*place.covered, place.file):
            above = next((by_dest[p] for p in (path, *paths.parents(path)) if p in by_dest), None)
            if above is not None and above.level in (RO, RW) and above.source == above.dest:
                found[path] = above.level
    return found


def standing(
    policy: Policy, facts: HostFacts, shown: Mapping[str, str], writable: Sequence[str]
) -> Standing:
    """Stand-ins and real programs. `shown`: how each place that may be covered is seen inside."""
    programs = facts.commands
    if programs is None:
        return Standing(mounts=(), moved={})
    covers: list[tuple[Program, str]] = []
    taken: set[str] = set()
    for program in programs.named:
        _check_script(policy, program, writable)
        for place in (*program.places, *program.own):
            # In a tree that can be written a mount would stand in the way of whoever installs
            # things there, and hold nobody.
            for path in place.covered:
                if shown.get(path) == RO and path not in taken:
                    taken.add(path)
                    covers.append((program, path))
    reals = _reals(policy, programs, shown, taken)
    shell = f"{REAL}/sh" if _is_met(programs.shell, taken) else SHELL
    moved = {path: f"{REAL}/{p.name}" for p, path in covers if p.name in reals}
    if "env" in reals:
        moved[STARTER] = f"{REAL}/env"
    mounts: list[Mount] = []
    for name, file in reals.items():
        mounts += _real(name, file, covered=file in taken)
    for program in programs.named:
        real = f"{REAL}/{program.name}" if program.name in reals else ""
        mounts += _stand_ins(program, policy.commands[program.name], shell, real)
    for program, path in covers:
        rule = f"commands.{program.name} ({policy.commands[program.name].source})"
        mounts.append(
            Mount(
                kind="cover", dest=path, source=f"{DIRECTORY}/{program.name}", level=RO, file=True,
                rule=rule,
            )
        )  # fmt: skip
    return Standing(mounts=tuple(mounts), moved=moved)


def _reals(
    policy: Policy, programs: Programs, shown: Mapping[str, str], taken: set[str]
) -> dict[str, str]:
    """Real programs that must be there, by their names: of commands that are not blocked."""
    found: dict[str, str] = {}
    for program in programs.named:
        setting = policy.commands[program.name]
        if setting.value is False:
            continue
        file = next((p.file for p in program.places if p.file in shown), "")
        if file:
            found[program.name] = file
        elif setting.value in PRESETS:
            raise PolicyError(
                f"cannot use commands.{program.name} ({setting.source}): "
                f"'{program.places[0].file}' is not visible in the sandbox",
                hint=f"show it with --ro '{program.places[0].file}', or take the rule out",
                code="command-rule-missing",
            )
    for name, place in (("sh", programs.shell), ("env", programs.starter)):
        if _is_met(place, taken):
            found.setdefault(name, place.file)
    return found


def _is_met(place: Place, taken: set[str]) -> bool:
    """Whether a stand-in is on the way to a program, or in its place."""
    return not taken.isdisjoint((*place.covered, place.file))


def _check_script(policy: Policy, program: Program, writable: Sequence[str]) -> None:
    """A link that a sandbox has planted must not choose what is read outside and shown inside."""
    from .resolve import planted

    match = program.script
    link = planted(match, writable) if match is not None else None
    if match is not None and link is not None:
        raise PolicyError(
            f"cannot follow '{link.at}' for commands.{program.name} "
            f"({policy.commands[program.name].source}): a sandbox can write there, and the link "
            f"leads out to '{match.real}'",
            hint=f"name '{match.real}' itself if you mean it, or remove the link",
            code="planted-link",
        )


def _real(name: str, file: str, *, covered: bool) -> list[Mount]:
    """The real program under its name: itself if its own place is covered, else a link to it.

    A link, because many scripts look for their parts where they really are.
    """
    dest = f"{REAL}/{name}"
    if not covered:
        return [Mount(kind="symlink", dest=dest, source=file, rule="command rules")]
    return [
        Mount(kind="text", dest=dest, source="", rule="command rules"),
        Mount(kind="cover", dest=dest, source=file, level=RO, file=True, rule="command rules"),
    ]


def _stand_ins(program: Program, setting: Setting, shell: str, real: str) -> list[Mount]:
    name = program.name
    rule = f"commands.{name} ({setting.source})"
    text = stand_in(name, setting.value, shell, real)
    mounts = [Mount(kind="program", dest=f"{DIRECTORY}/{name}", source=text, rule=rule)]
    if program.script is not None:
        mounts.append(
            Mount(kind="program", dest=f"{SCRIPTS}/{name}", source=program.text, rule=rule)
        )
    return mounts


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def stand_in(name: str, rule: object, shell: str, real: str) -> str:
    """The program that stands in for a command."""
    first = f"#!{shell}\nAGENT_SANDBOX_CMD={_quoted(name)} AGENT_SANDBOX_REAL={_quoted(real)}\n"
    if rule is False:
        message = _quoted(
            f"agent-sandbox: command '{name}' is blocked in this sandbox\n"
            f"hint: do without it, or ask your user; see {README}"
        )
        return f"#!{shell}\nprintf '%s\\n' {message} >&2\nexit 126\n"
    if rule == "@git":
        from .gitguard import program

        return first + program()
    return (
        f"{first}export AGENT_SANDBOX_CMD AGENT_SANDBOX_REAL\n"
        f'exec {_quoted(f"{SCRIPTS}/{name}")} "$@"\n'
    )


def put_first(env: dict[str, str]) -> None:
    """Stand-ins come first on PATH: also before what is installed inside, later."""
    for name in ("PATH", "AGENT_SANDBOX_PATH"):
        env[name] = ":".join(filter(None, (DIRECTORY, env.get(name, ""))))
