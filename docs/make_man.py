#!/usr/bin/env python3
"""Write docs/man/*.1 from the tables that the two commands themselves use.

`python3 docs/make_man.py` writes the pages, `--check` ends with 1 when one is stale.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "src"))

from agent_sandbox import __version__  # noqa: E402
from agent_sandbox.cli import ctl, options  # noqa: E402
from agent_sandbox.policy import presets, profiles, settings  # noqa: E402

EXIT_CODES = (
    ("the command's own", "the command ran; this is how it ended"),
    ("124", "the command reached \\-\\-timeout and was ended"),
    ("125", "the sandbox could not be built, or the flags or the policy are wrong"),
    ("126", "the command was found but cannot be executed or is not visible inside"),
    ("127", "the command was not found"),
    ("128 + n", "signal n ended the command"),
)
VARIABLES = (
    (
        "AGENT_SANDBOX",
        "false, 0, off or no: agent-sandbox runs the command without a sandbox and says so",
    ),
    ("XDG_CONFIG_HOME", "where agent-sandbox/config.toml is looked for, instead of ~/.config"),
    ("XDG_STATE_HOME", "where agent-sandbox keeps its state, instead of ~/.local/state"),
    ("DOCKER_HOST, DOCKER_CONTEXT", "with \\-\\-docker: which socket to show"),
    ("NO_COLOR", "no colour in messages"),
)
FILES = (
    ("~/.config/agent-sandbox/config.toml", "your own policy; .json and .jsonc work too"),
    (".agent-sandbox.toml", "the project's policy; .json and .jsonc work too"),
    ("~/.local/state/agent-sandbox", "private homes, workspaces of running sandboxes, trust"),
)


def escape(text: str) -> str:
    """Text that roff prints as it stands."""
    text = text.replace("\\-", "-").replace("\\", "\\e").replace("-", "\\-")
    text = text.replace("…", "...").replace("→", "->")
    return "\\&" + text if text.startswith((".", "'")) else text


def header(name: str, summary: str) -> list[str]:
    """The title and the NAME section."""
    return [
        '.\\" Made by docs/make_man.py. Do not edit.',
        f'.TH {name.upper()} 1 "" "agent\\-sandbox {__version__}" "User Commands"',
        ".SH NAME",
        f"{escape(name)} \\- {escape(summary)}",
    ]


def flag_term(flag: options.Flag) -> str:
    """One flag as it is typed."""
    value = ""
    if flag.takes == options.OPTIONAL:
        value = f"[=\\fI{escape(flag.metavar)}\\fR]"
    elif flag.takes != options.SWITCH:
        value = f" \\fI{escape(flag.metavar)}\\fR"
    names = [flag.short, flag.name] if flag.short else [flag.name]
    return ", ".join(f"\\fB{escape(name)}\\fR" for name in names) + value


def entry(term: str, text: str) -> list[str]:
    """A term and its explanation."""
    return [".TP", term, escape(text)]


def bold(text: str) -> str:
    """A term in bold."""
    return f"\\fB{escape(text)}\\fR"


def flags() -> list[str]:
    """One entry per flag."""
    lines: list[str] = []
    for flag in options.TABLE:
        text = flag.help + "."
        if flag.takes == options.REPEAT:
            text += " May be given more than once."
        row = settings.BY_KEY.get(flag.key)
        if row is not None and isinstance(row.default, str):
            text += f" Default: {row.default}."
        lines += entry(flag_term(flag), text)
    return lines


def agent_sandbox() -> str:
    """The page of agent-sandbox."""
    lines = header("agent-sandbox", "run a command in a bubblewrap sandbox")
    lines += [
        ".SH SYNOPSIS",
        "\\fBagent\\-sandbox\\fR [\\fIflags\\fR] [\\fB\\-\\-\\fR] \\fICOMMAND\\fR",
        "[\\fIARGS\\fR...]",
        ".SH DESCRIPTION",
        "Runs COMMAND in the current directory with the same tools, but in a sandbox.",
        "The project (the current directory) is writable.",
        "System directories and language toolchains are read\\-only.",
        "The home directory is a private one, kept per project and agent.",
        "Secrets, other projects, container\\-engine sockets and other host sockets in files are",
        "not there.",
        "The host's network is shared unless \\fB\\-\\-network=off\\fR is given.",
        ".PP",
        "Flags end at the first word that is not a flag.",
        "Everything after it goes to the command untouched.",
        "Switches with an optional value take it with '=':",
        "\\fB\\-\\-network false\\fR runs a command called false.",
        ".SH OPTIONS",
        *flags(),
        ".SH POLICY FILES",
        "Layers, later wins: built\\-in, your own file, the project's file",
        "(or the one named with \\fB\\-c\\fR), flags.",
        "A project's file may only tighten, unless you ran \\fBsandboxctl trust\\fR on it.",
        "Keys:",
    ]
    for row in settings.ROWS:
        lines += entry(bold(row.key), row.help + ".")
    lines += [".SH PRESETS"]
    for preset in presets.PRESETS:
        lines += entry(bold(preset.name), preset.help + ".")
    lines += [
        ".SH PROFILES",
        "A profile is chosen by the command's name: "
        + escape(", ".join(profiles.NAMES))
        + ". \\fBnone\\fR is the profile of every other command.",
        ".SH EXIT STATUS",
    ]
    for code, text in EXIT_CODES:
        lines += entry(bold(code), text + ".")
    lines += [".SH ENVIRONMENT"]
    for name, text in VARIABLES:
        lines += entry(bold(name), text + ".")
    lines += [
        ".PP",
        "Inside, IN_AGENT_SANDBOX is 1, AGENT_WORK_DIR is a private directory and TMPDIR is /tmp.",
        ".SH FILES",
    ]
    for name, text in FILES:
        lines += entry(bold(name), text + ".")
    lines += [
        ".SH EXAMPLES",
        ".nf",
        "agent\\-sandbox claude",
        "agent\\-sandbox \\-\\-network=off \\-\\-ro vendor npm test",
        "agent\\-sandbox \\-\\-exclude '**/.env*' \\-\\- bash",
        ".fi",
        ".SH SEE ALSO",
        "\\fBsandboxctl\\fR(1), \\fBbwrap\\fR(1)",
    ]
    return "\n".join(lines) + "\n"


def sandboxctl() -> str:
    """The page of sandboxctl."""
    lines = header("sandboxctl", "look at and manage agent-sandbox")
    lines += [
        ".SH SYNOPSIS",
        "\\fBsandboxctl\\fR \\fIVERB\\fR [\\fIARGUMENTS\\fR...]",
        ".SH DESCRIPTION",
        "Everything about \\fBagent\\-sandbox\\fR(1) that is not running a command.",
        ".SH VERBS",
    ]
    for verb in ctl.VERBS:
        lines += entry(f"{bold(verb.name)} {escape(verb.usage)}", verb.help + ".")
    lines += [
        ".TP",
        "\\fB\\-h\\fR, \\fB\\-\\-help\\fR",
        "Show the verbs.",
        ".TP",
        "\\fB\\-v\\fR, \\fB\\-\\-version\\fR",
        "Show the version.",
        ".SH EXIT STATUS",
        "0 on success, 125 on an error. \\fBdoctor\\fR ends with 1 when a check failed,",
        "\\fBselftest\\fR when an attempt escaped or was not made, \\fBcompose check\\fR",
        "when there are findings, \\fBcompose verify\\fR when an attack got through or was not",
        "tried.",
        ".SH SEE ALSO",
        "\\fBagent\\-sandbox\\fR(1)",
    ]
    return "\n".join(lines) + "\n"


PAGES = {"agent-sandbox.1": agent_sandbox, "sandboxctl.1": sandboxctl}


def stale() -> list[str]:
    """The names of the pages that differ from what the tables say."""
    found = []
    for name, make in PAGES.items():
        try:
            with open(os.path.join(HERE, "man", name), encoding="utf-8") as file:
                current = file.read()
        except FileNotFoundError:
            current = ""
        if current != make():
            found.append(name)
    return found


def main() -> int:
    """Write the pages, or check them."""
    if sys.argv[1:] == ["--check"]:
        names = stale()
        for name in names:
            sys.stderr.write(f"stale: docs/man/{name}; run python3 docs/make_man.py\n")
        return 1 if names else 0
    os.makedirs(os.path.join(HERE, "man"), exist_ok=True)
    for name, make in PAGES.items():
        with open(os.path.join(HERE, "man", name), "w", encoding="utf-8") as file:
            file.write(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
