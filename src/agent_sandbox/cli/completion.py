"""`sandboxctl completion`: completion scripts for bash, zsh and fish, made from the tables."""

from __future__ import annotations

import sys

from ..errors import UsageError
from ..policy import profiles
from . import ctl, options, remote_options

PATH_FLAGS = ("--ro", "--rw", "--exclude", "--config", "-c", "--report")
DIRECTORY_FLAGS = ("--cwd", "-C")
# Verbs that take no more than this.
JSON_VERBS = ("doctor", "selftest")
QUARANTINE = ("list", "show", "restore", "drop", "--json")
COMPOSE = ("check", "secure", "verify")
COMPOSE_FLAGS = (
    "--json", "--sarif", "--fail-on", "--env-file", "--no-accept", "--no-override", "--solution",
    "--output", "--force", "--agent", "--read-access", "--allow-image", "--max-execution-time",
    "--no-runtime-check", "--project", "--service",
)  # fmt: skip
SOLUTIONS = ("no-socket", "dind", "sysbox", "service")
DOCKER = ("check", "serve")
DOCKER_FLAGS = (
    "--json", "--socket", "--engine", "--read-only", "--label", "--own-project", "--owner",
    "--mode", "--group", "--audit",
)  # fmt: skip
# Verbs with actions and flags, and no more to know: verb → actions, flags.
ACTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "token": (
        ("new", "list", "revoke", "rotate"),
        ("--scope", "--image", "--template", "--quota", "--expires", "--uid", "--grace", "--data",
         "--json"),
    ),
    "audit": (
        ("tail", "verify", "export", "prune"),
        ("--agent", "--action", "--decision", "--target", "--since", "--until", "--head",
         "--output", "--keep-days", "--data", "--json"),
    ),
    "profile": (("list", "show", "new"), ("--extends", "--json")),
    "shim": (("install", "status", "remove"), ("--rc", "--json", "--all")),
    "hook": (("claude", "install", "print", "remove"), ("--prefix", "--settings", "--approve")),
    "remote": (
        tuple(action.name for action in remote_options.ACTIONS),
        tuple(flag.name for flag in remote_options.FLAGS),
    ),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print the script for one shell."""
    makers = {"bash": bash, "zsh": zsh, "fish": fish}
    if len(arguments) != 1 or arguments[0] not in makers:
        raise UsageError("completion takes one of: bash, zsh, fish", code="usage")
    sys.stdout.write(makers[arguments[0]]())
    return 0


def _words() -> list[str]:
    """Every flag as it can be typed, choices included."""
    found = []
    for flag in options.TABLE:
        found.append(flag.name)
        if flag.short:
            found.append(flag.short)
        if flag.takes == options.OPTIONAL:
            found += [f"{flag.name}={choice}" for choice in flag.choices]
    return found


def _value_flags() -> list[str]:
    return [
        name
        for flag in options.TABLE
        if flag.takes in (options.VALUE, options.REPEAT)
        for name in (flag.name, flag.short)
        if name
    ]


def _bash_actions() -> str:
    return "".join(
        f"""\
    elif [[ ${{COMP_WORDS[1]}} == {verb} && $COMP_CWORD == 2 ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(actions)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == {verb} && $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(flags)}" -- "$cur") )
"""
        for verb, (actions, flags) in ACTIONS.items()
    )


def _zsh_actions() -> str:
    return "".join(
        f"""\
    elif [[ $words[2] == {verb} ]] && (( CURRENT == 3 )); then
        _values action {" ".join(actions)}
    elif [[ $words[2] == {verb} && $words[CURRENT] == -* ]]; then
        compadd -- {" ".join(flags)}
"""
        for verb, (actions, flags) in ACTIONS.items()
    )


def _fish_actions() -> list[str]:
    lines = []
    for verb, (actions, flags) in ACTIONS.items():
        seen = f"complete -c sandboxctl -n '__fish_seen_subcommand_from {verb}"
        lines.append(f"{seen}; and not __fish_seen_subcommand_from {' '.join(actions)}' "
                     f"-a '{' '.join(actions)}'")  # fmt: skip
        lines += [f"{seen}' -l {name[2:]}" for name in flags]
    return lines


def bash() -> str:
    """Bash: flags up to the command, then the command's own completion."""
    home, network = (options.BY_NAME[name].choices for name in ("--home", "--network"))
    return f"""\
# bash completion for agent-sandbox and sandboxctl
_agent_sandbox() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} i=1 word flag=${{COMP_WORDS[COMP_CWORD-1]}}
    # Bash takes the `=` of --flag=value for a word of its own.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $flag == = ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $flag == --network || $flag == --docker || $flag == --docker-keep ]]; then
        flag=
    fi
    while (( i < COMP_CWORD )); do
        word=${{COMP_WORDS[i]}}
        case $word in
            {"|".join(_value_flags())}) (( i += 2 )) ;;
            --) (( i += 1 )); break ;;
            =) (( i += 2 )) ;;
            -*) (( i += 1 )) ;;
            *) break ;;
        esac
    done
    if (( i < COMP_CWORD )) && [[ ${{COMP_WORDS[COMP_CWORD]}} != = ]]; then
        if declare -F _command_offset >/dev/null; then
            _command_offset "$i"
        else
            COMPREPLY=( $(compgen -f -- "$cur") )
        fi
        return
    fi
    case $flag in
        --network) COMPREPLY=( $(compgen -W "{" ".join(network)}" -- "$cur") ); return ;;
        --docker) COMPREPLY=( $(compgen -W "on off filtered" -- "$cur") ); return ;;
        --docker-keep) COMPREPLY=( $(compgen -W "on off" -- "$cur") ); return ;;
        {"|".join(PATH_FLAGS)}) COMPREPLY=( $(compgen -f -- "$cur") ); return ;;
        {"|".join(DIRECTORY_FLAGS)}) COMPREPLY=( $(compgen -d -- "$cur") ); return ;;
        --profile) COMPREPLY=( $(compgen -W "none {" ".join(profiles.NAMES)}" -- "$cur") )
            return ;;
        --home) COMPREPLY=( $(compgen -W "{" ".join(home)}" -- "$cur") ); return ;;
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(_words())}" -- "$cur") )
    else
        COMPREPLY=( $(compgen -c -- "$cur") )
    fi
}}
_sandboxctl() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}}
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{" ".join(v.name for v in ctl.VERBS)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == completion ]]; then
        COMPREPLY=( $(compgen -W "bash zsh fish" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == @({"|".join(JSON_VERBS)}) ]]; then
        COMPREPLY=( $(compgen -W "--json" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == quarantine ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(QUARANTINE)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == compose && $COMP_CWORD == 2 ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(COMPOSE)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == compose && ${{COMP_WORDS[COMP_CWORD-1]}} == --solution ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(SOLUTIONS)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == compose && $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(COMPOSE_FLAGS)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == docker && $COMP_CWORD == 2 ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(DOCKER)}" -- "$cur") )
    elif [[ ${{COMP_WORDS[1]}} == docker && $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{" ".join(DOCKER_FLAGS)}" -- "$cur") )
{_bash_actions()}\
    else
        COMPREPLY=( $(compgen -f -- "$cur") )
    fi
}}
complete -o bashdefault -o default -F _agent_sandbox agent-sandbox
complete -o bashdefault -o default -F _sandboxctl sandboxctl
"""


def zsh() -> str:
    """Zsh: `_arguments` for the flags, `_normal` for the command."""
    specs = []
    for flag in options.TABLE:
        text = flag.help.replace("[", "(").replace("]", ")").replace("'", "").replace(":", ";")
        star = "*" if flag.takes == options.REPEAT else ""
        action = ""
        if flag.takes == options.OPTIONAL:
            specs.append(f"'{flag.name}=-[{text}]::value:({' '.join(flag.choices)})'")
            continue
        if flag.takes in (options.VALUE, options.REPEAT):
            action = f":{flag.metavar.replace(':', ';').replace('[', '(').replace(']', ')')}:"
            if flag.name in PATH_FLAGS:
                action += "_files"
            elif flag.name in DIRECTORY_FLAGS:
                action += "_directories"
            elif flag.name == "--profile":
                action += f"(none {' '.join(profiles.NAMES)})"
            elif flag.choices:
                action += f"({' '.join(flag.choices)})"
        specs += [f"'{star}{name}[{text}]{action}'" for name in (flag.name, flag.short) if name]
    verbs = " ".join(f"'{v.name}:{_in_quotes(v.help)}'" for v in ctl.VERBS)
    lines = " \\\n        ".join(specs)
    return f"""\
#compdef agent-sandbox sandboxctl
# zsh completion for agent-sandbox and sandboxctl
_agent_sandbox() {{
    _arguments -S \\
        {lines} \\
        '*::command:_normal'
}}
_sandboxctl() {{
    local -a verbs
    verbs=({verbs})
    if (( CURRENT == 2 )); then
        _describe verb verbs
    elif [[ $words[2] == completion ]]; then
        _values shell bash zsh fish
    elif [[ $words[2] == ({"|".join(JSON_VERBS)}) ]]; then
        _values flag --json
    elif [[ $words[2] == quarantine ]]; then
        _values action {" ".join(QUARANTINE)}
    elif [[ $words[2] == compose ]] && (( CURRENT == 3 )); then
        _values action {" ".join(COMPOSE)}
    elif [[ $words[2] == compose && $words[CURRENT-1] == --solution ]]; then
        _values solution {" ".join(SOLUTIONS)}
    elif [[ $words[2] == compose && $words[CURRENT] == -* ]]; then
        compadd -- {" ".join(COMPOSE_FLAGS)}
    elif [[ $words[2] == docker ]] && (( CURRENT == 3 )); then
        _values action {" ".join(DOCKER)}
    elif [[ $words[2] == docker && $words[CURRENT] == -* ]]; then
        compadd -- {" ".join(DOCKER_FLAGS)}
{_zsh_actions()}\
    else
        _files
    fi
}}
compdef _agent_sandbox agent-sandbox
compdef _sandboxctl sandboxctl
# Loaded by the first Tab: this call is that completion.
if [[ -n $service ]]; then
    case $service in
        sandboxctl) _sandboxctl "$@" ;;
        *) _agent_sandbox "$@" ;;
    esac
fi
"""


def _in_quotes(text: str) -> str:
    """Text for the inside of a single-quoted word of sh and zsh."""
    return text.replace("'", "'\\''")


def _fish_quoted(text: str) -> str:
    """Text for the inside of a single-quoted word of fish."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


def fish() -> str:
    """Fish: flags only before the command, then the command's own completion."""
    lines = [
        "# fish completion for agent-sandbox and sandboxctl",
        "complete -c agent-sandbox -e",
        "complete -c agent-sandbox -x -a '(__fish_complete_subcommand)'",
    ]
    for flag in options.TABLE:
        text = _fish_quoted(flag.help)
        line = f"complete -c agent-sandbox -l {flag.name[2:]} -d '{text}'"
        if flag.short:
            line += f" -s {flag.short[1:]}"
        if flag.name in PATH_FLAGS:
            line += " -r -F"
        elif flag.name in DIRECTORY_FLAGS:
            line += " -x -a '(__fish_complete_directories)'"
        elif flag.name == "--profile":
            line += f" -x -a 'none {' '.join(profiles.NAMES)}'"
        elif flag.choices and flag.takes == options.VALUE:
            line += f" -x -a '{' '.join(flag.choices)}'"
        elif flag.takes in (options.VALUE, options.REPEAT):
            line += " -x"
        lines.append(line)
    lines.append("complete -c sandboxctl -f")
    lines += [
        f"complete -c sandboxctl -n __fish_use_subcommand -a {verb.name} "
        f"-d '{_fish_quoted(verb.help)}'"
        for verb in ctl.VERBS
    ]
    lines.append(
        "complete -c sandboxctl -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'"
    )
    lines.append(
        f"complete -c sandboxctl -n '__fish_seen_subcommand_from {' '.join(JSON_VERBS)}' "
        "-l json -d 'for programs'"
    )
    lines.append(
        "complete -c sandboxctl -n '__fish_seen_subcommand_from quarantine' "
        f"-a '{' '.join(QUARANTINE)}'"
    )
    seen = "complete -c sandboxctl -n '__fish_seen_subcommand_from compose"
    lines.append(f"{seen}; and not __fish_seen_subcommand_from {' '.join(COMPOSE)}' "
                 f"-a '{' '.join(COMPOSE)}'")  # fmt: skip
    # After the action come files, which the line for all verbs has switched off.
    lines.append(f"{seen}; and __fish_seen_subcommand_from {' '.join(COMPOSE)}' -F")
    for name in COMPOSE_FLAGS:
        values = f" -x -a '{' '.join(SOLUTIONS)}'" if name == "--solution" else ""
        lines.append(f"{seen}' -l {name[2:]}{values}")
    seen = "complete -c sandboxctl -n '__fish_seen_subcommand_from docker"
    lines.append(f"{seen}; and not __fish_seen_subcommand_from {' '.join(DOCKER)}' "
                 f"-a '{' '.join(DOCKER)}'")  # fmt: skip
    lines.append(f"{seen}; and __fish_seen_subcommand_from {' '.join(DOCKER)}' -F")
    lines += [f"{seen}' -l {name[2:]}" for name in DOCKER_FLAGS]
    lines += _fish_actions()
    return "\n".join(lines) + "\n"
