"""Agent profiles as data: which state an agent keeps, how it is shared, and what else it needs.

An agent's directory of state is private to the sandbox (kept, per project and profile), and single
parts of the host's own are shown in it. So a file that no table knows never reaches the host, which
might run it. The built-in table, in `builtin`, is loaded only for a command that has a profile.
"""

from __future__ import annotations

from ...errors import PolicyError
from ...record import Record
from ..model import BUILT_IN, Setting, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NONE = "none"

# How a part of an agent's state is shared.
PRIVATE = "private"
RW = "rw"
RO = "ro"
COPY = "copy"
MERGE = "merge"
MODES = {
    PRIVATE: "the sandbox's own, kept for this project",
    RW: "the host's own, writable",
    RO: "the host's own, read-only",
    COPY: "copied in when the host's has changed; changes stay inside",
    MERGE: "kept in step with the host's; only listed keys travel out",
}

# Which profile a command has by its name.
BY_COMMAND: dict[str, str] = {
    "claude": "claude", "codex": "codex", "opencode": "opencode", "gemini": "gemini",
    "qwen": "qwen", "pi": "pi", "copilot": "copilot", "aider": "aider",
}  # fmt: skip
NAMES: tuple[str, ...] = tuple(BY_COMMAND)


class State(Record):
    """One part of an agent's state. `path` is written with `~`; braces stand for the project."""

    path: str
    mode: str
    # MERGE: the name of the table of keys (`policy.instep`), and where the file is on the host
    # when it is not at the same path.
    keys: str = ""
    outside: str = ""


class Profile(Record):
    """What one agent needs."""

    name: str
    commands: tuple[str, ...]
    state: tuple[State, ...] = ()
    # Read-only below what is writable, and not to be created where it is missing.
    protect: tuple[str, ...] = ()
    # Variables of the caller that pass.
    env: tuple[str, ...] = ()
    # Variables that are set inside; those of `root_env` only for uid 0.
    set_env: tuple[tuple[str, str], ...] = ()
    root_env: tuple[tuple[str, str], ...] = ()
    # Variables that move a directory of the state: (variable, what it is otherwise).
    moved: tuple[tuple[str, str], ...] = ()
    # Rules for hosts that --network=allow and learn begin with.
    hosts: tuple[str, ...] = ()
    # What it makes in the sandbox's own /tmp.
    tmp: tuple[str, ...] = ()
    # What people should know: how the agent's own sandbox is switched off, and what it says.
    notes: tuple[str, ...] = ()


EMPTY = Profile(name=NONE, commands=())


def known() -> dict[str, Profile]:
    """The built-in profiles by name."""
    from .builtin import PROFILES

    return {profile.name: profile for profile in PROFILES}


def find(name: str, where: str, own: Mapping[str, Profile] | None = None) -> Profile:
    """The profile of that name; the user's own come before ours."""
    if name == NONE:
        return EMPTY
    if own and name in own:
        return own[name]
    if name in NAMES:
        return known()[name]
    raise PolicyError(
        f"cannot use profile '{name}' in {where}: unknown profile",
        hint="known profiles: none, " + ", ".join(dict.fromkeys((*NAMES, *(own or ())))),
        code="unknown-profile",
    )


def hosts(profile: Profile, mode: str) -> tuple[Setting, ...]:
    """What an agent must reach, where nothing is reached without a rule."""
    if not profile.hosts or mode not in ("allow", "learn"):
        return ()
    source = Source(layer=BUILT_IN, where=f"profile {profile.name}")
    return tuple(Setting(value=host, source=source) for host in profile.hosts)


def by_command(command: str, own: Mapping[str, Profile] | None = None) -> str:
    """The profile that a command has by its name."""
    name = command.rpartition("/")[2]
    for profile in (own or {}).values():
        if name in profile.commands:
            return profile.name
    return BY_COMMAND.get(name, NONE)
