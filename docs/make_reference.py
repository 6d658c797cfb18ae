#!/usr/bin/env python3
"""Fill the generated parts of docs/reference.md from the tables of the package.

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. `--check` ends with 1 when one
is stale.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(HERE, "reference.md")
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "src"))

from agent_sandbox.cli import ctl, options  # noqa: E402
from agent_sandbox.host import facts, git  # noqa: E402
from agent_sandbox.policy import (  # noqa: E402
    control,
    engines,
    environment,
    presets,
    profiles,
    secrets,
    settings,
    toolchains,
)
from agent_sandbox.service.backend import kube_settings  # noqa: E402

KINDS = {
    settings.CHOICE: "one of the values",
    settings.NAME: "name",
    settings.PATHS: "list of paths or globs",
    settings.HOSTS: "list of [rules](network.md#rules)",
    settings.PORTS: "list of [ports](network.md#publishing-a-port)",
    settings.IMAGES: "list of names of images, with `*`",
    settings.GIT_KEYS: "list of [keys](agents.md#git-and-credentials)",
    settings.GIT_HOSTS: "list of hosts, with ports or without",
    settings.PRESETS: "list of `@name` or `!@name`",
    settings.NAMES: "list of variable names",
    settings.TABLE: "table of strings",
    settings.SIZE: "number of bytes, or text such as `512M`, `4G`",
    settings.COUNT: "whole number above zero",
    settings.FILE: "path that begins with `/` or `~/`",
    settings.SECRETS: "tables: [`[[secret]]`](network.md#secrets)",
    settings.BUDGETS: "tables: [`[[budget]]`](network.md#budgets)",
    settings.PROFILES: "tables: [`[profiles.NAME]`](agents.md#profiles)",
    settings.COMMANDS: "table of [rules](agents.md#command-rules)",
    settings.DURATION: "number of seconds, or text such as `90`, `10m`, `2h`",
}

CONTROL_RULES = "in the project; read-only where it is there, not to be created where it is not"
GIT_RULES = (
    "the repository's metadata writable; when the project is a sub-directory, the rest of the "
    "repository read-only; read-only in every git directory: {}, the `.git` file of a worktree or "
    "submodule, and the directory of `core.hooksPath`"
)


def cell(text: str) -> str:
    """Text for a table cell."""
    return text.replace("|", "\\|")


def words(names: tuple[str, ...] | list[str]) -> str:
    """A list of names in code font."""
    return " ".join(f"`{cell(name)}`" for name in names)


def flag_table() -> list[str]:
    """Every flag of agent-sandbox."""
    lines = ["| flag | config key | meaning |", "|---|---|---|"]
    for flag in options.TABLE:
        name = f"{flag.short}, {flag.name}" if flag.short else flag.name
        if flag.takes == options.OPTIONAL:
            name += f"[={flag.metavar}]"
        elif flag.takes != options.SWITCH:
            name += f" {flag.metavar}"
        key = f"`{flag.key}`" if flag.key else ""
        again = "; repeatable" if flag.takes == options.REPEAT else ""
        lines.append(f"| `{cell(name)}` | {key} | {cell(flag.help)}{again} |")
    return lines


def key_table() -> list[str]:
    """Every key of a policy file."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for row in settings.ROWS:
        kind = " or ".join(f"`{choice}`" for choice in row.choices) or KINDS[row.kind]
        if row.boolean:
            kind += " (also `true`, `false`)"
        default = row.default
        shown = ", ".join(default) if isinstance(default, tuple) else default
        if row.kind == settings.SIZE and isinstance(default, int):
            shown = f"{default >> 30}G"
        lines.append(f"| `{row.key}` | {kind} | {f'`{shown}`' if shown else ''} | {row.help} |")
    return lines


def preset_table() -> list[str]:
    """Every preset."""
    default = presets.members("@all")
    lines = ["| preset | default | meaning | a project's file may |", "|---|---|---|---|"]
    for preset in presets.PRESETS:
        on = "on" if set(presets.members(preset.name)) <= set(default) else "off"
        may = "switch it off" if preset.grants else "switch it on"
        lines.append(f"| `{preset.name}` | {on} | {preset.help} | {may} |")
    return lines


def preset_rules() -> list[str]:
    """What each preset consists of."""
    lines = []
    for preset in presets.PRESETS:
        if preset.includes:
            lines += [f"- `{preset.name}`: {words(preset.includes)}"]
        elif preset.ro and preset.name != "@toolchains":
            lines += [f"- `{preset.name}`, read-only in the project: {words(preset.ro)}"]
    moved = words([f"${name}{suffix}" for name, suffix in toolchains.VARIABLES])
    roots, in_git = words(toolchains.ROOTS), words(git.CONTROL_FILES + git.CONTROL_DIRS)
    held = [f"{name}/{part}" for name, parts in control.PARTS.items() for part, _ in parts]
    return [
        *lines,
        f"- `@base`, read-only: {words(facts.SYSTEM_TREES)}; the project writable",
        f"- `@toolchains`, read-only: {roots}; each directory on `PATH`; what is named by {moved}",
        f"- `@caches`, kept in the private home: {words(presets.CACHES)}",
        "- `@agents`: the profile's paths, see [Profiles](#profiles)",
        f"- `@git`: {GIT_RULES.format(in_git)}",
        "- `@git-strict`: `@git`; also read-only: other branches, `refs/tags`, `packed-refs`",
        f"- `@control`, {CONTROL_RULES}: {words((*control.DIRECTORIES, *control.FILES, *held))}",
        "- `@host`: `/` read-only",
    ]


def shared(written: list[str]) -> str:
    """Paths, with those of one directory together."""
    by_parent: dict[str, list[str]] = {}
    for path in written:
        parent, _, name = path.rpartition("/")
        by_parent.setdefault(parent, []).append(name)
    return "; ".join(
        words([f"{parent}/{names[0]}"]) if len(names) == 1 else f"in `{parent}/`: {words(names)}"
        for parent, names in by_parent.items()
    )


def profile_table() -> list[str]:
    """Every profile."""
    modes = tuple(profiles.MODES)
    lines = [f"| profile | {' | '.join(modes)} | variables passed | hosts |"]
    lines.append("|---" * (len(modes) + 3) + "|")
    for profile in profiles.known().values():
        cells = [shared([s.path for s in profile.state if s.mode == mode]) for mode in modes]
        moved = [variable for variable, _ in profile.moved]
        cells += [words([*profile.env, *moved]), words(profile.hosts)]
        lines += [f"| `{profile.name}` | {' | '.join(cells)} |"]
    return [*lines, f"| `{profiles.NONE}` |" + " |" * (len(modes) + 2)]


def passed_variables() -> list[str]:
    """Variables that pass without being named."""
    prefixes = [f"{prefix}*" for prefix in environment.PASSED_PREFIXES]
    return [
        words(sorted(environment.PASSED) + prefixes),
        "",
        "Only with the network on: " + words(sorted(environment.PROXIES)),
    ]


def secret_paths() -> list[str]:
    """Paths that hold credentials."""
    patterns = [f"{directory}/{head}*{tail}" for directory, head, tail in secrets.SYSTEM_PATTERNS]
    return [
        "In the system trees: " + words([*secrets.SYSTEM, *patterns]),
        "",
        "In the home: " + words(secrets.HOME),
    ]


def sockets() -> list[str]:
    """Container-engine sockets."""
    return [
        words(engines.SYSTEM),
        "",
        "Below `$XDG_RUNTIME_DIR` and `/run/user/UID`: " + words(engines.RUNTIME),
        "",
        "In the home: " + words(engines.HOME),
        "",
        "Named by these variables, or by a docker context: " + words(engines.VARIABLES),
    ]


def verb_table() -> list[str]:
    """Every verb of sandboxctl."""
    lines = ["| verb | meaning |", "|---|---|"]
    for verb in ctl.VERBS:
        lines += [f"| `sandboxctl {verb.name} {cell(verb.usage)}` | {verb.help} |"]
    return lines


def kubernetes_settings() -> list[str]:
    """The settings of the kubernetes backend."""
    rows = [
        f"| `{row.variable}` | {cell(row.default)} | {cell(row.help)} |"
        for row in kube_settings.TABLE
    ]
    return ["| variable | default | meaning |", "|---|---|---|", *rows]


PARTS = {
    "flags": flag_table,
    "keys": key_table,
    "presets": preset_table,
    "preset rules": preset_rules,
    "profiles": profile_table,
    "variables": passed_variables,
    "secrets": secret_paths,
    "sockets": sockets,
    "verbs": verb_table,
    "kubernetes": kubernetes_settings,
}


def filled(text: str) -> str:
    """The page with every part made anew."""
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"docs/reference.md has no part '{name}'")
        text = before + begin + "\n".join(make()) + "\n" + end + after
    return text


def main() -> int:
    """Fill the page, or check it."""
    with open(PAGE, encoding="utf-8") as file:
        current = file.read()
    wanted = filled(current)
    if sys.argv[1:] == ["--check"]:
        if current != wanted:
            sys.stderr.write("stale: docs/reference.md; run python3 docs/make_reference.py\n")
        return int(current != wanted)
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
