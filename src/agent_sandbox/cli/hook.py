"""`sandboxctl hook`: an agent that is not sandboxed itself runs its commands in sandboxes.

For Claude Code there are two ways, both in its settings:

hook    PreToolUse: the command of each call is replaced by one that runs it in a sandbox.
prefix  CLAUDE_CODE_SHELL_PREFIX: whatever Claude hands to a shell is handed to us.

Both fail closed: when we cannot be started, or fail, the command does not run.
"""

from __future__ import annotations

import json
import os
import sys

from ..errors import HostError, UsageError, reason
from ..policy.model import MARKER
from . import options, ourselves, output
from .shim import change, place_of, write
from .shim_text import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

HINT = "see 'sandboxctl hook --help'"
AGENTS = ("claude",)
ACTIONS = ("install", "print", "remove")
# Tools of Claude Code that run commands. The rest (Edit, Write, WebFetch) are its own process.
MATCHER = "Bash|Monitor|PowerShell"
# Seconds; a start takes a tenth of one.
HOOK_SECONDS = 30
MOST_INPUT = 16 << 20
PREFIX = "CLAUDE_CODE_SHELL_PREFIX"
EVENT = "PreToolUse"
APPROVE = "--approve"

LAUNCHER = """\
#!/bin/sh
# Made by 'sandboxctl hook install claude --prefix': Claude Code hands commands to this.
# AGENT_SANDBOX is not heeded: a project's settings could set it.
[ -e {marker} ] && exec bash -c "$1"
export AGENT_SANDBOX=on
exec {sandbox} {flags}-- bash -c "$1"
"""


def main(arguments: list[str]) -> int:
    """The hook itself, or its installation."""
    word = arguments[0] if arguments else ""
    if word in AGENTS:
        return answer(arguments[1:])
    if word not in ACTIONS or arguments[1:2] not in [[agent] for agent in AGENTS]:
        raise UsageError(
            "hook takes: claude, or one of install, print, remove and claude",
            hint=HINT,
            code="usage",
        )
    settings, prefix, flags = _words(arguments[2:])
    if word == "remove":
        return remove(settings)
    return install(settings, flags, prefix=prefix, only_print=word == "print")


def _words(words: list[str]) -> tuple[str, bool, list[str]]:
    """Our own flags, and those for agent-sandbox, which are checked here and not at each call."""
    settings, prefix, rest, queue = "", False, [], list(words)
    while queue:
        word = queue.pop(0)
        if word == "--settings" and queue:
            settings = queue.pop(0)
        elif word.startswith("--settings="):
            settings = word.partition("=")[2]
        elif word == "--prefix":
            prefix = True
        else:
            rest.append(word)
    given = [word for word in rest if word != APPROVE]
    parsed = options.parse(given)
    if parsed.command or parsed.switches or (prefix and APPROVE in rest):
        raise UsageError("hook takes flags of agent-sandbox only", hint=HINT, code="usage")
    base = os.environ.get("CLAUDE_CONFIG_DIR") or f"{os.environ.get('HOME', '')}/.claude"
    return os.path.abspath(settings or f"{base}/settings.json"), prefix, rest


# --- the hook


def answer(flags: list[str]) -> int:
    """One call of a tool, from standard input. Whatever goes wrong blocks it."""
    try:
        data = sys.stdin.buffer.read(MOST_INPUT + 1)
        if os.path.exists(MARKER):
            # Claude is in a sandbox itself, and its commands with it.
            return 0
        approve = APPROVE in flags
        given = [word for word in flags if word != APPROVE]
        said = decide(data, ourselves.find("agent-sandbox"), given, approve=approve)
    except Exception as error:  # noqa: BLE001 - another code than 2 would let the command run
        sys.stderr.write(f"agent-sandbox: error: {type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def decide(
    data: bytes, sandbox: str, flags: list[str], *, approve: bool = False
) -> dict[str, object]:
    """The answer to a call: its input with another command in it. Pure."""
    if len(data) > MOST_INPUT:
        raise ValueError("the call is too large")
    asked = json.loads(data)
    tool, given = asked["tool_name"], asked["tool_input"]
    if asked["hook_event_name"] != EVENT or tool not in MATCHER.split("|"):
        raise ValueError(f"not a call that this hook knows: {str(tool)[:80]}")
    if tool == "PowerShell":
        return _refused("PowerShell cannot be sandboxed here: use Bash")
    command = given.get("command")
    if command is None and tool == "Monitor":
        # It opens a connection, and runs nothing.
        return _refused("a Monitor without a command cannot be sandboxed: use Bash")
    if not isinstance(command, str) or "\0" in command:
        raise ValueError("the call has no command that a shell could take")
    told: dict[str, object] = {
        "hookEventName": EVENT,
        "updatedInput": {**given, "command": wrapped(command, sandbox, flags)},
    }
    if approve:
        told["permissionDecision"] = "allow"
        told["permissionDecisionReason"] = "it runs in a sandbox of agent-sandbox"
    return {"hookSpecificOutput": told}


def _refused(why: str) -> dict[str, object]:
    told = {"hookEventName": EVENT, "permissionDecision": "deny", "permissionDecisionReason": why}
    return {"hookSpecificOutput": told}


def wrapped(command: str, sandbox: str, flags: list[str]) -> str:
    """A line for bash or zsh that runs a command in a sandbox. Pure.

    AGENT_SANDBOX is set: the environment may come from a project's settings.
    """
    line = [sandbox, *flags, "--", "bash", "-c", command]
    return "AGENT_SANDBOX=on " + " ".join(quoted(word) for word in line)


# --- settings


def install(settings: str, flags: list[str], *, prefix: bool, only_print: bool) -> int:
    """Put one of the ways into Claude's settings, or show what would be put there."""
    launcher = _launcher(settings)
    more = _prefix(launcher) if prefix else _hook(ourselves.find("sandboxctl"), flags)
    if only_print:
        sys.stdout.write(json.dumps(more, indent=2) + "\n")
        return 0
    was = _read(settings)
    found = merged(cleaned(_parsed(was, settings)), more)
    try:
        if prefix:
            text = launcher_text(ourselves.find("agent-sandbox"), flags)
            os.makedirs(os.path.dirname(launcher), exist_ok=True)
            write(launcher, text, 0o755)
        os.makedirs(os.path.dirname(settings), exist_ok=True)
        change(settings, was, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise _cannot(settings, error) from error
    what = "what Claude hands to a shell runs" if prefix else "commands of Claude's tools run"
    output.notice("sandboxctl", f"{what} in sandboxes, by {settings}")
    return 0


def remove(settings: str) -> int:
    """Take both ways out of Claude's settings."""
    was = _read(settings)
    parsed = _parsed(was, settings)
    now = cleaned(parsed)
    if now == parsed:
        output.notice("sandboxctl", f"there is nothing of ours in {settings}")
        return 0
    try:
        change(settings, was, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise _cannot(settings, error) from error
    if json.dumps(_launcher(settings)) in was:
        # Only now: a prefix that leads nowhere would stop every command.
        _remove_launcher(_launcher(settings))
    return 0


def _launcher(settings: str) -> str:
    """Beside settings for everybody, whom root's home is closed to; else with the shims."""
    shared = settings.startswith("/etc/")
    base = os.path.dirname(settings if shared else place_of(os.environ).directory)
    return f"{base}/agent-sandbox/claude-shell" if shared else f"{base}/claude-shell"


def _remove_launcher(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot(path, error) from error


def launcher_text(sandbox: str, flags: list[str]) -> str:
    """The program of the prefix. Pure."""
    given = "".join(quoted(word) + " " for word in flags)
    return LAUNCHER.format(marker=MARKER, sandbox=quoted(sandbox), flags=given)


def _hook(program: str, flags: list[str]) -> dict[str, Any]:
    line = " ".join(quoted(word) for word in (program, "hook", "claude", *flags))
    # Claude runs the command when a hook ends with 1, or is not found, or takes too long: 2 blocks
    # in every version, onFailure also when it takes too long. In a sandbox we may not be visible.
    entry = {
        "type": "command", "timeout": HOOK_SECONDS,
        "command": f"[ -e {MARKER} ] || {line} || exit 2",
        "onFailure": "block",
    }  # fmt: skip
    return {"hooks": {EVENT: [{"matcher": MATCHER, "hooks": [entry]}]}}


def _prefix(launcher: str) -> dict[str, Any]:
    return {"env": {PREFIX: launcher}}


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with more in them: tables and lists grow. Pure."""
    found = dict(settings)
    for name, value in more.items():
        old = found.get(name)
        if isinstance(value, dict):
            found[name] = merged(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, list):
            found[name] = [*(old if isinstance(old, list) else []), *value]
        else:
            found[name] = value
    return found


def cleaned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without anything of ours; what becomes empty by that goes, too. Pure."""
    found = dict(settings)
    hooks = found.get("hooks")
    before = hooks.get(EVENT) if isinstance(hooks, dict) else None
    if isinstance(hooks, dict) and isinstance(before, list):
        kept = [entry for entry in map(_without_ours, before) if entry is not None]
        _put(found, "hooks", _with({**hooks}, EVENT, kept))
    env = found.get("env")
    if isinstance(env, dict) and str(env.get(PREFIX, "")).endswith("/agent-sandbox/claude-shell"):
        _put(found, "env", {name: value for name, value in env.items() if name != PREFIX})
    return found


def _without_ours(entry: Any) -> Any:  # noqa: ANN401 - whatever the user wrote
    rows = entry.get("hooks") if isinstance(entry, dict) else None
    if not isinstance(rows, list):
        return entry
    kept = [row for row in rows if not (isinstance(row, dict) and _is_ours(row.get("command")))]
    return {**entry, "hooks": kept} if kept or not rows else None


def _is_ours(command: object) -> bool:
    return isinstance(command, str) and "/sandboxctl' 'hook' 'claude'" in command


def _with(table: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    _put(table, name, value)
    return table


def _put(table: dict[str, Any], name: str, value: object) -> None:
    if value:
        table[name] = value
    else:
        table.pop(name, None)


def _read(settings: str) -> str:
    try:
        with open(settings, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"cannot read '{settings}': {error}", code="bad-settings") from error


def _parsed(text: str, settings: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise HostError(
            f"cannot change '{settings}': it is no JSON: {error}",
            hint="mend it, or put in yourself what 'sandboxctl hook print claude' shows",
            code="bad-settings",
        ) from error
    if not isinstance(found, dict):
        raise HostError(f"cannot change '{settings}': it is no table", code="bad-settings")
    return found


def _cannot(path: str, error: OSError) -> HostError:
    return HostError(f"cannot write '{path}': {reason(error)}", code="cannot-write")
