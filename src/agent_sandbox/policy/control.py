"""Names in a project that the host acts on by itself: an editor, a shell, an agent, a later run.

Where they exist they are read-only inside (preset @control). Where they do not, they are held: an
agent that cannot change `.claude/settings.json` must not be able to create it either. Pure data.
"""

from __future__ import annotations

from ..record import Record
from .model import DIR, FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Read whole: whatever is in them may name a program to run.
DIRECTORIES = (
    ".vscode", ".idea", ".devcontainer", ".cursor", ".codex", ".agents", ".opencode", ".husky",
    ".githooks",
)  # fmt: skip
FILES = (
    ".envrc", ".mcp.json", "opencode.json", "opencode.jsonc",
    # Our own: a later run would read it.
    ".agent-sandbox.toml", ".agent-sandbox.json", ".agent-sandbox.jsonc",
)  # fmt: skip
# Directories in which only some names are acted on; the rest is the agent's to write.
PARTS = {
    ".claude": (
        ("settings.json", FILE), ("settings.local.json", FILE), ("hooks", DIR), ("commands", DIR),
        ("agents", DIR), ("skills", DIR),
    ),
}  # fmt: skip

# Files whose names tell that they hold settings, not a directory of them.
ENDINGS = (".json", ".jsonc", ".toml", ".md", ".yml", ".yaml")


def names(present: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Relative paths and kinds to protect, given the names that a project has."""
    for name in DIRECTORIES:
        yield name, DIR
    for name in FILES:
        yield name, FILE
    there = frozenset(present)
    for directory, parts in PARTS.items():
        if directory not in there:
            yield directory, DIR
            continue
        for name, kind in parts:
            yield f"{directory}/{name}", kind


def kind_by_name(path: str) -> str:
    """What a protected path of a profile is meant to be, when it is not there to ask."""
    return FILE if path.endswith(ENDINGS) else DIR


class Shown(Record):
    """What a held name shows inside: a file or directory that is generated with the root."""

    source: str
    # The generated file, the source itself or in it, and what it says.
    file: str
    text: str


_PLACE = "/run/agent-sandbox/"
EMPTY = Shown(source=f"{_PLACE}neutral", file=f"{_PLACE}neutral", text="")
JSON = Shown(source=f"{_PLACE}neutral.json", file=f"{_PLACE}neutral.json", text="{}")
# By name, where a program stumbles over a document that is merely empty.
SHOWN: dict[str, Shown] = {
    # Claude Code complains about a missing table.
    ".mcp.json": Shown(
        source=f"{_PLACE}mcp.json", file=f"{_PLACE}mcp.json", text='{"mcpServers": {}}'
    ),
    # opencode does not start when it finds the directory and cannot put this file into it. What it
    # says keeps git from showing it.
    ".opencode": Shown(
        source=f"{_PLACE}opencode", file=f"{_PLACE}opencode/.gitignore", text="*"
    ),
}  # fmt: skip


def shown(path: str, kind: str) -> Shown | None:
    """What covers a held name inside; None when its placeholder will do."""
    found = SHOWN.get(path.rpartition("/")[2])
    if found is not None or kind == DIR:
        return found
    return JSON if path.endswith((".json", ".jsonc")) else EMPTY


def neutral(path: str) -> str:
    """What a plain file says that holds a name: nothing, in the language that its name promises."""
    return "{}\n" if path.endswith((".json", ".jsonc")) else ""
