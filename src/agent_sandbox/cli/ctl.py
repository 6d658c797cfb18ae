"""`sandboxctl`: everything that is not running a command. One file per verb, loaded on demand."""

from __future__ import annotations

import os
import sys

from ..errors import EXIT_SIGNAL_BASE, SandboxError, UsageError
from ..record import Record
from . import output

PROGRAM = "sandboxctl"
# Verbs that tell more about themselves than the table has.
OWN_HELP = ("doctor", "compose", "remote")


class Verb(Record):
    """One verb: the module that implements it has `main(arguments) -> exit code`."""

    name: str
    usage: str
    help: str


VERBS: tuple[Verb, ...] = (
    Verb(name="doctor", usage="[--json]", help="try each layer of the sandbox on this machine"),
    Verb(
        name="selftest", usage="[--json]",
        help="try to break out of sandboxes on this machine, and show what held",
    ),
    Verb(
        name="why", usage="[flags] [--json] PATH|HOST[:PORT]|@SOCKET",
        help="what the policy says about it, and which rule says so",
    ),
    Verb(
        name="net", usage="[list|allow RULE…|deny RULE…] [--run ID] [--json]",
        help="the network rules of a running sandbox: show them, add to them",
    ),
    Verb(
        name="trust", usage="[--list|--remove] [FILE]",
        help="agree to a project's policy file as it is now",
    ),
    Verb(
        name="quarantine", usage="[list|show ID|restore ID|drop ID] [--json]",
        help="what runs have planted in control files, and how to get it back",
    ),
    Verb(
        name="profile", usage="list|show NAME|new NAME [--extends NAME] [--json]",
        help="what each agent may keep, show and reach; a table for one of your own",
    ),
    Verb(
        name="compose",
        usage="check [FILE…]|secure FILE --solution NAME -o OUT|verify [FILE…] [--json]",
        help="find what hands the host to agents in compose files, make them safe, attack them",
    ),
    Verb(
        name="docker",
        usage="check [flags] [--json] FILE.json|serve --socket PATH [--read-only] [flags]",
        help="the filter of --docker=filtered: what it says to a request, or one for others",
    ),
    Verb(
        name="serve",
        usage="[--listen ADDR:PORT]… [--socket PATH|none] [--data DIR] [--database URL] "
        "[--advertise ADDR:PORT] "
        "[--backend bwrap|docker]… "
        "[--tls-cert FILE --tls-key FILE] [--plain-http] [--public-host NAME]… "
        "[--templates FILE] [--drain-seconds N] [--metrics-public] [--log json|text|off]",
        help="run commands of many agents over HTTP, with identity, limits and an audit trail",
    ),
    Verb(
        name="token",
        usage="new NAME [--scope S]… [--image GLOB]… [--template T]… [--quota NAME=VALUE]… "
        "[--expires 30d] [--uid UID]|list [--json]|revoke NAME|ID|rotate NAME [--grace 1h] "
        "[--data DIR] [--database URL]",
        help="tokens of agents for the service: made, shown, ended and renewed",
    ),
    Verb(
        name="audit",
        usage="tail [-n N] [-f] [--json] [filters]|verify [--head SEQ:HASH] [--json]|"
        "export [-o FILE] [filters]|prune --keep-days N [--data DIR] "
        "[--database URL]",
        help="the service's audit trail: filters are --agent, --action, --decision, --target, "
        "--since and --until",
    ),
    Verb(
        name="remote",
        usage="run|create|list|exec|shell|cp|ps|logs|kill|rm|whoami [flags] …",
        help="commands, shells and files in sandboxes of a service (SANDBOX_API, SANDBOX_TOKEN)",
    ),
    Verb(
        name="shim", usage="install NAME… [--rc]|status [--json]|remove NAME…|--all",
        help="launchers, first on PATH, by which typing an agent's name means the sandboxed one",
    ),
    Verb(
        name="mcp", usage="[flags]",
        help="tools of the Model Context Protocol, over standard input and output, that run "
        "commands and touch files in a sandbox with the flags of agent-sandbox",
    ),
    Verb(
        name="hook",
        usage="claude [--approve] [flags]|install|print|remove claude [--prefix] "
        "[--settings FILE] [--approve] [flags]",
        help="an agent that is not sandboxed runs its commands in sandboxes: for its settings",
    ),
    Verb(
        name="completion", usage="bash|zsh|fish", help="print shell completion for both commands"
    ),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Dispatch to a verb; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            sys.stdout.write(help_text())
            return 0
        if words[0] in ("-v", "--version"):
            from .. import __version__

            sys.stdout.write(f"{PROGRAM} {__version__}\n")
            return 0
        if words[0] not in {verb.name for verb in VERBS}:
            raise UsageError(
                f"unknown verb: {words[0]}", hint="see 'sandboxctl --help'", code="usage"
            )
        if words[1:] and words[1] in ("-h", "--help") and words[0] not in OWN_HELP:
            sys.stdout.write(verb_help(words[0]))
            return 0
        # One module per verb, so that `why` does not pay for `serve`.
        import importlib

        module = importlib.import_module(f"agent_sandbox.cli.{words[0]}")
        code: int = module.main(words[1:])
        sys.stdout.flush()
    except SandboxError as error:
        output.error(PROGRAM, error)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_SIGNAL_BASE + 13
    return code


def verb_help(name: str) -> str:
    """Usage of one verb."""
    verb = next(verb for verb in VERBS if verb.name == name)
    return f"Usage: sandboxctl {verb.name} {verb.usage}\n\n{verb.help}\n"


def help_text() -> str:
    """Usage, made from the table of verbs."""
    lines = ["Usage: sandboxctl VERB [ARGUMENTS…]", "", "Verbs:"]
    for verb in VERBS:
        lines.append(f"  {verb.name} {verb.usage}")
        lines.append(f"      {verb.help}")
    lines += ["", "To run a command in a sandbox: agent-sandbox --help"]
    return "\n".join(lines) + "\n"
