"""Presets: named sets of path rules, and the order in which they are switched.

`@all` is the default. A list is read left to right; the last mention of a preset wins.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import toolchains

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LINT_TS = (
    "biome.json", "biome.jsonc", ".eslintrc", ".eslintrc.js", ".eslintrc.cjs", ".eslintrc.json",
    ".eslintrc.yml", "eslint.config.js", "eslint.config.mjs", "eslint.config.cjs",
    "eslint.config.ts", ".oxlintrc.json", ".prettierrc", ".prettierrc.json", "prettier.config.js",
    "prettier.config.mjs", "tsconfig.json", "tsconfig.build.json", "deno.json", "deno.jsonc",
)  # fmt: skip
LINT_GO = (".golangci.yml", ".golangci.yaml", ".golangci.toml", ".golangci.json")
LINT_PYTHON = (
    "pyproject.toml", "setup.cfg", ".flake8", "mypy.ini", ".mypy.ini", ".pylintrc", "ruff.toml",
    ".ruff.toml", "tox.ini", "pyrightconfig.json",
)  # fmt: skip
LINT_ANY = (".editorconfig",)

# Caches that tools rewrite all the time. They live in the private home; without @caches they are
# forgotten at the end of the run.
CACHES = (
    "~/.cache", "~/.npm", "~/.cargo/registry", "~/.cargo/git", "~/go/pkg", "~/.bun/install",
    "~/.gradle/caches", "~/.m2/repository", "~/.nuget/packages", "~/.pub-cache", "~/.gem",
)  # fmt: skip


class Preset(Record):
    """One named rule set. `grants` tells a project's file what it may switch off, not on."""

    name: str
    help: str
    # True: switching it on shows more. False: switching it on protects more.
    grants: bool
    ro: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()


PRESETS: tuple[Preset, ...] = (
    Preset(name="@base", grants=True, help="system trees read-only, the project writable"),
    Preset(
        name="@toolchains", grants=True, ro=toolchains.ROOTS,
        help="language toolchains of the real home and other PATH directories, read-only",
    ),
    Preset(
        name="@caches", grants=True,
        help="keep package caches in the private home between runs",
    ),
    Preset(name="@agents", grants=True, help="the state of the chosen agent profile"),
    Preset(
        name="@git", grants=False,
        help="git metadata usable; hooks, config and other control files read-only",
    ),
    Preset(
        name="@git-strict", grants=False,
        help="@git, and every branch but the current one, tags and packed refs read-only",
    ),
    Preset(
        name="@control", grants=False,
        help="what editors, shells and agents outside act on by themselves: read-only, and not "
        "to be created",
    ),
    Preset(
        name="@lint/ts", grants=False, ro=LINT_TS + LINT_ANY,
        help="TypeScript and JavaScript linter settings read-only",
    ),
    Preset(
        name="@lint/go", grants=False, ro=LINT_GO + LINT_ANY,
        help="Go linter settings read-only",
    ),
    Preset(
        name="@lint/python", grants=False, ro=LINT_PYTHON + LINT_ANY,
        help="Python linter settings read-only",
    ),
    Preset(
        name="@lint/all", grants=False, includes=("@lint/ts", "@lint/go", "@lint/python"),
        help="all @lint presets",
    ),
    Preset(
        name="@host", grants=True,
        help="the whole host read-only minus secrets, instead of an empty root",
    ),
    Preset(
        name="@all", grants=True,
        includes=("@base", "@toolchains", "@caches", "@agents", "@git", "@control", "@lint/all"),
        help="the default: everything but @host and @git-strict",
    ),
)  # fmt: skip

BY_NAME: dict[str, Preset] = {preset.name: preset for preset in PRESETS}


def check_name(written: str, where: str) -> Preset:
    """The preset that `@x` or `!@x` names, or an error."""
    preset = BY_NAME.get(written.removeprefix("!"))
    if preset is None:
        raise PolicyError(
            f"cannot use preset '{written}' in {where}: unknown preset",
            hint="known presets: " + ", ".join(BY_NAME),
            code="unknown-preset",
        )
    return preset


def members(name: str) -> tuple[str, ...]:
    """The leaf presets that a name stands for."""
    preset = BY_NAME[name]
    if not preset.includes:
        return (name,)
    return tuple(leaf for inner in preset.includes for leaf in members(inner))


def switch(written: Iterable[str]) -> frozenset[str]:
    """The set of leaf presets that a list of toggles leaves on."""
    names = list(written)
    if not any(name.removeprefix("!") == "@all" for name in names):
        names.insert(0, "@all")
    active: dict[str, bool] = {}
    for name in names:
        for leaf in members(name.removeprefix("!")):
            active[leaf] = not name.startswith("!")
    on = {leaf for leaf, is_on in active.items() if is_on}
    if "@git-strict" in on:
        on.add("@git")
    return frozenset(on)
