"""A profile's state as absolute paths, for one user, project and environment. Pure."""

from __future__ import annotations

from ...errors import PolicyError
from ...record import Record
from .. import paths
from ..model import BUILT_IN, RO, RW, Rule, Source
from . import PRIVATE, Profile, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Longer, Claude Code cuts a project's name and adds a hash.
LONGEST = 200


class Part(Record):
    """One part of the state, placed."""

    mode: str
    # Where it is inside, and where it is on the host.
    path: str
    outside: str
    # The private directory that it lies in, and the name by which that is kept; both empty for
    # what lies in none.
    root: str = ""
    name: str = ""
    keys: str = ""
    # Whether a variable has moved it.
    moved: bool = False
    # A directory whose entries are shown one by one, for when its private directory is not ours.
    whole: bool = False


def _claude_name(project: str) -> str:
    """A project's name in Claude Code's directory of transcripts."""
    # JavaScript counts a character beyond U+FFFF as two.
    name = "".join(
        c if c.isascii() and c.isalnum() else "-" * (1 + (c > "\uffff")) for c in project
    )
    return name if len(name) <= LONGEST else ""


def _pi_name(project: str) -> str:
    """A project's name in pi's directory of sessions."""
    return "--" + "".join("-" if c in "/\\:" else c for c in project[1:]) + "--"


NAMES = {"{claude-project}": _claude_name, "{pi-project}": _pi_name}


def parts(profile: Profile, env: Mapping[str, str], *, home: str, project: str) -> tuple[Part, ...]:
    """Every part, with private directories first."""
    moved = _moved(profile, env)
    roots = [s for s in profile.state if s.mode == PRIVATE]
    found = []
    for state in (*roots, *(s for s in profile.state if s.mode != PRIVATE)):
        written = _filled(state.path, project)
        if not written:
            continue
        path, from_variable = _place(written, moved, home)
        root = _root(written, roots)
        outside = path
        if state.outside and not from_variable:
            outside = _place(state.outside, (), home)[0]
        if state.mode == PRIVATE:
            _check(path, home, project, profile.name)
        found.append(
            Part(
                mode=state.mode, path=path, outside=outside, keys=state.keys, moved=from_variable,
                root=_place(root.path, moved, home)[0] if root else "",
                name=key_of(root.path) if root else "",
            )
        )  # fmt: skip
    return tuple(found)


def rules(profile: Profile, placed: Sequence[Part], home: str) -> list[Rule]:
    """Rules for what lies in no private directory of the profile's own."""
    source = Source(layer=BUILT_IN, where=f"profile {profile.name}")
    found = [
        Rule(level=part.mode, pattern=part.path, glob=False, source=source, quiet=True)
        for part in placed
        if not part.root and part.mode in (RO, RW)
    ]
    for written in profile.protect:
        pattern = paths.expand(written, base=home, home=home, where=profile.name)
        found.append(
            Rule(level=RO, pattern=pattern, glob=False, source=source, quiet=True, held=True)
        )
    return found


def key_of(written: str) -> str:
    """The name of a private directory among those of its project."""
    return written[2:] if written.startswith("~/") else f"+root{written}"


def _root(written: str, roots: list[State]) -> State | None:
    """The deepest private directory that a path is or lies in."""
    held = [root for root in roots if paths.within(written, root.path)]
    return max(held, key=lambda root: len(root.path)) if held else None


def _moved(profile: Profile, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Directories that variables have moved: (what they are otherwise, where they are)."""
    found = []
    for variable, default in profile.moved:
        value = env.get(variable, "")
        if value.startswith("/") and "\0" not in value and "\n" not in value:
            found.append((default, paths.normalise(value)))
    return tuple(found)


def _place(written: str, moved: tuple[tuple[str, str], ...], home: str) -> tuple[str, bool]:
    for default, value in moved:
        if paths.within(written, default):
            return paths.normalise(value + written[len(default) :]), True
    return paths.expand(written, base=home, home=home, where="a profile"), False


def _filled(written: str, project: str) -> str:
    """A path with the project's name in it; empty when it has none there."""
    for mark, make in NAMES.items():
        if mark in written:
            name = make(project)
            return written.replace(mark, name) if name else ""
    return written


def _check(path: str, home: str, project: str, name: str) -> None:
    """Refuse state that the sandbox could reach around: in the project, or around it."""
    wide = paths.within(home, path) or paths.within(project, path) or paths.within(path, project)
    if wide:
        raise PolicyError(
            f"cannot use '{path}' for the state of profile '{name}': "
            "it is in the project, or holds it or your home",
            hint="keep an agent's state in a directory of its own; see 'sandboxctl profile show'",
            code="bad-state-path",
        )
