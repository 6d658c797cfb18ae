"""`sandboxctl remote`: commands, shells and files in sandboxes of a service.

Where it is, and who we are, is in SANDBOX_API and SANDBOX_TOKEN.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ..client.sync import Client
from ..errors import EXIT_SIGNAL_BASE, EXIT_TIMEOUT, UsageError
from . import output, remote_options
from .remote_options import Parsed, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ..client.sync import Sandbox
    from ..client.values import Result

PROGRAM = "sandboxctl"
# The flags of a sandbox and of a command, as the client names them.
SANDBOX = (
    "template", "image", "backend", "runtime", "memory", "cpus", "pids", "disk", "lifetime",
    "metadata", "env",
)  # fmt: skip
COMMAND = ("cwd", "timeout", "env")
# The best shell that there is. Both read the profile of the private home.
SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"


def main(arguments: list[str]) -> int:
    """One action; the exit code is the command's."""
    if not arguments or {"-h", "--help"} & set(arguments[:2]):
        sys.stdout.write(remote_options.help_text(arguments[0] if arguments else ""))
        return 0
    parsed = parse(arguments)
    try:
        with connect(parsed) as client:
            return ACTS[parsed.action](client, parsed)
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT


def connect(parsed: Parsed) -> Client:
    """The client, as flags and environment say."""
    values = parsed.values
    token_file = values.get("--token-file")
    environ = dict(os.environ)
    if token_file is not None:
        environ.pop("SANDBOX_TOKEN", None)
        environ["SANDBOX_TOKEN_FILE"] = str(token_file)
    return Client(_text(values.get("--url")), ca_file=_text(values.get("--ca")), environ=environ)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def sandbox_options(parsed: Parsed) -> dict[str, Any]:
    """What a sandbox is to be, from the flags."""
    values = parsed.values
    found = {name: values[f"--{name}"] for name in SANDBOX if f"--{name}" in values}
    allowed, mode = values.get("--allow"), values.get("--network")
    if allowed and mode is not None:
        raise UsageError(
            "--allow and --network exclude each other", code="usage",
            hint="--allow HOST lets through that host alone",
        )  # fmt: skip
    if allowed or mode is not None:
        found["network"] = allowed or mode
    return found


def command_options(parsed: Parsed) -> dict[str, Any]:
    """How a command is started, from the flags."""
    found = {n: parsed.values[f"--{n}"] for n in COMMAND if f"--{n}" in parsed.values}
    if "--interactive" in parsed.values:
        found["keep_input"] = True
    return found


def command_of(parsed: Parsed, words: tuple[str, ...]) -> str | list[str]:
    """The command: words as they are, or a text for a shell."""
    text = parsed.values.get("--command")
    if (text is None) == (not words):
        raise remote_options.usage("give a command, or -c TEXT", parsed.action)
    return text if isinstance(text, str) else list(words)


# --- commands


def run(client: Client, parsed: Parsed) -> int:
    """In a sandbox of its own."""
    command = command_of(parsed, parsed.words)
    retry = "--retry" in parsed.values
    if retry and (both := [n for n in ("--tty", "--interactive") if n in parsed.values]):
        raise remote_options.usage(f"--retry and {both[0]} exclude each other", "run")
    if "--tty" in parsed.values:
        with client.sandboxes.create(**sandbox_options(parsed)) as sandbox:
            return terminal(client, sandbox, command, parsed)
    from .remote_running import follow

    options = {**sandbox_options(parsed), **command_options(parsed)}
    if retry:
        options["retry"] = True
    with client.stream(command, **options) as stream:
        return ended(follow(stream, feed="keep_input" in options, quiet=is_json(parsed)), parsed)


def execute(client: Client, parsed: Parsed) -> int:
    """In a sandbox that is there."""
    sandbox_id, *words = parsed.words
    command = command_of(parsed, tuple(words))
    sandbox = client.sandboxes.get(sandbox_id)
    options = command_options(parsed)
    if "--detach" in parsed.values:
        started = sandbox.start(command, **options)
        sys.stdout.write(f"{started.id}\n")
        return 0
    if "--tty" in parsed.values:
        return terminal(client, sandbox, command, parsed)
    from .remote_running import follow

    with sandbox.stream(command, **options) as stream:
        return ended(follow(stream, feed="keep_input" in options, quiet=is_json(parsed)), parsed)


def shell(client: Client, parsed: Parsed) -> int:
    """A terminal."""
    words = parsed.words[1:]
    command = command_of(parsed, words) if words or "--command" in parsed.values else SHELL
    if parsed.words:
        given = [f"--{n}" for n in (*SANDBOX, "allow", "network") if f"--{n}" in parsed.values]
        if given and given != ["--env"]:
            raise remote_options.usage(f"{given[0]} is for a new sandbox, without ID", "shell")
        return terminal(client, client.sandboxes.get(parsed.words[0]), command, parsed)
    with client.sandboxes.create(**sandbox_options(parsed)) as sandbox:
        return terminal(client, sandbox, command, parsed)


def terminal(client: Client, sandbox: Sandbox, command: str | list[str], parsed: Parsed) -> int:
    """Join our terminal with one inside."""
    from . import remote_running

    options = command_options(parsed)
    # A terminal always takes input.
    options.pop("keep_input", None)
    if "timeout" not in options:
        # The default is for commands. A person needs longer, so it is all that is allowed.
        limits = client.whoami().get("limits") or {}
        most = limits.get("maxExecutionTime")
        if isinstance(most, (int, float)):
            options["timeout"] = most
            output.notice(PROGRAM, f"the terminal is closed after {most:g} seconds")
    started = sandbox.start(command, tty=remote_running.size(), **options)
    return ended(remote_running.join(started), parsed)


def ended(result: Result, parsed: Parsed) -> int:
    """The exit code; what is remarkable about an end is said."""
    if is_json(parsed):
        shown = {**result.raw, "stdout": result.stdout, "stderr": result.stderr}
        show_json(shown)
    if result.lost:
        output.notice(PROGRAM, f"the command was lost: {result.error}")
    elif result.timed_out:
        output.notice(PROGRAM, f"the service ended the command after {result.duration:.1f} s")
    elif result.exceeded:
        output.notice(PROGRAM, f"the command was ended by the limit '{result.exceeded}'")
    elif result.error and not result.raw.get("stderrBytes"):
        output.notice(PROGRAM, result.error)
    if result.truncated:
        output.notice(PROGRAM, "there was more output than the service keeps")
    return EXIT_TIMEOUT if result.timed_out and not result.lost else result.code


# --- sandboxes


def create(client: Client, parsed: Parsed) -> int:
    """Make one; its id alone on standard output."""
    made = client.sandboxes.create(**sandbox_options(parsed))
    if is_json(parsed):
        show_json(dict(made.info.raw))
    else:
        sys.stdout.write(f"{made.id}\n")
    return 0


def listed(client: Client, parsed: Parsed) -> int:
    """Sandboxes."""
    found = list(client.sandboxes.list(state=_text(parsed.values.get("--state"))))
    if is_json(parsed):
        show_json([dict(one.info.raw) for one in found])
        return 0
    rows = [("ID", "STATE", "BACKEND", "TEMPLATE", "EXPIRES", "METADATA")]
    for one in found:
        info = one.info
        expires = info.expires_at.isoformat(" ", "seconds") if info.expires_at else "-"
        labels = ",".join(f"{name}={value}" for name, value in info.metadata.items()) or "-"
        what = info.image or info.template or "-"
        rows.append((info.id, info.state, info.backend, what, expires, labels))
    show_table(rows)
    return 0


def commands(client: Client, parsed: Parsed) -> int:
    """Executions."""
    sandbox = parsed.words[0] if parsed.words else None
    if sandbox is not None:
        # Of a sandbox that is not there: an error, not an empty list.
        client.sandboxes.get(sandbox)
    found = list(client.executions(sandbox=sandbox, state=_text(parsed.values.get("--state"))))
    if is_json(parsed):
        show_json([dict(one.raw) for one in found])
        return 0
    rows = [("EXECUTION", "SANDBOX", "STATE", "CODE", "COMMAND")]
    for one in found:
        words = one.raw.get("command")
        shown = " ".join(str(word) for word in words) if isinstance(words, list) else ""
        code = "-" if one.running or one.lost else str(one.code)
        rows.append((one.id, one.sandbox_id, one.state, code, shown[:60]))
    show_table(rows)
    return 0


def remove(client: Client, parsed: Parsed) -> int:
    """Delete; one that is not there is told."""
    for sandbox_id in parsed.words:
        client.sandboxes.get(sandbox_id).delete()
    return 0


def kill(client: Client, parsed: Parsed) -> int:
    """All processes of a command, or a signal for the command itself."""
    name = _text(parsed.values.get("--signal"))
    for exec_id in parsed.words:
        if name is None:
            client.execution(exec_id).kill()
        else:
            client.execution(exec_id).signal(name.upper())
    return 0


def logs(client: Client, parsed: Parsed) -> int:
    """Output so far, or until the end."""
    from .remote_running import follow, put

    execution = client.execution(parsed.words[0])
    if "--follow" in parsed.values:
        with execution.follow() as stream:
            follow(stream, feed=False, quiet=False, ours=False)
        return 0
    for event in execution.logs():
        put(event)
    return 0


def whoami(client: Client, parsed: Parsed) -> int:
    """Identity, limits, usage."""
    found = client.whoami()
    if is_json(parsed):
        show_json(found)
        return 0
    scopes = found.get("scopes")
    lines = [
        f"agent    {found.get('agent', '')}",
        f"scopes   {', '.join(map(str, scopes)) if isinstance(scopes, list) else ''}",
    ]
    for title in ("usage", "limits"):
        members = found.get(title)
        for name, value in members.items() if isinstance(members, dict) else ():
            lines.append(f"{title:<8} {name} = {value}")
    sys.stdout.write("".join(output.printable(line) + "\n" for line in lines))
    return 0


def copy(client: Client, parsed: Parsed) -> int:
    """Files in and out."""
    from .remote_copying import copy as copy_between

    skipped = copy_between(client, *parsed.words)
    for name in skipped[:10]:
        output.notice(PROGRAM, f"left out: {name} (a link that leads out, or no plain file)")
    if len(skipped) > 10:
        output.notice(PROGRAM, f"and {len(skipped) - 10} more")
    return 1 if skipped else 0


# --- output


def is_json(parsed: Parsed) -> bool:
    """For programs."""
    return "--json" in parsed.values


def show_json(value: object) -> None:
    """One document."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def show_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Columns. Names in it may be anybody's."""
    lines = [[output.printable(cell) for cell in row] for row in rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


ACTS: dict[str, Callable[[Client, Parsed], int]] = {
    "run": run, "create": create, "list": listed, "exec": execute, "shell": shell, "cp": copy,
    "ps": commands, "logs": logs, "kill": kill, "rm": remove, "whoami": whoami,
}  # fmt: skip
