"""`agent-sandbox`: parse, plan, run, and end with the command's own exit code."""

from __future__ import annotations

import os
import sys

from ..errors import (
    EXIT_CANNOT_BUILD,
    EXIT_CANNOT_EXECUTE,
    EXIT_NOT_FOUND,
    EXIT_SIGNAL_BASE,
    CommandError,
    HostError,
    InternalBug,
    SandboxError,
    UsageError,
    reason,
)  # fmt: skip
from ..policy.model import MARKER, README
from . import options, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..launch.execute import Outcome, Signals
    from ..policy.triggers import Finding
    from ..sandbox.changes import Changes
    from ..sandbox.prepare import Built, Prepared
    from .report import Report

PROGRAM = "agent-sandbox"
# How often a start is tried when files that only root's sandbox covers were replaced meanwhile.
ROOT_ATTEMPTS = 3
# What an outcome says when not a limit but the end of the keeper ended the command.
KEEPER = "keeper"
OFF_WORDS = ("false", "0", "off", "no")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _dispatch(options.parse(sys.argv[1:] if arguments is None else arguments))
    except SandboxError as error:
        output.error(PROGRAM, error)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        return EXIT_SIGNAL_BASE + 13
    except KeyboardInterrupt:
        # Before the command began; from then on Ctrl-C is the command's own.
        return EXIT_SIGNAL_BASE + 2
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        output.error(PROGRAM, InternalBug(f"{type(error).__name__}: {error}"))
        return EXIT_CANNOT_BUILD


def _dispatch(parsed: options.Parsed) -> int:
    if "--check" in parsed.switches:
        # -v alone is the version, and here a wish for words.
        return _check(verbose="--version" in parsed.switches)
    if "--version" in parsed.switches:
        from .. import __version__

        return _show(f"{PROGRAM} {__version__}\n")
    if "--help" in parsed.switches or (not parsed.command and len(sys.argv) < 2):
        return _show(options.help_text())
    if not parsed.command:
        raise UsageError("no command to run", hint="see 'agent-sandbox --help'", code="no-command")
    if os.environ.get("AGENT_SANDBOX", "").lower() in OFF_WORDS:
        return _run_plain(parsed)
    return _run(parsed)


def script() -> None:
    """What the installed `agent-sandbox` calls: skips the collector and the interpreter's end.

    Both only tidy memory that the kernel takes back anyway, and cost milliseconds per command.
    """
    import gc

    from . import bytecode

    gc.disable()
    bytecode.install()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            # The caller may have closed it, or may not be listening any more.
            if stream is not None:
                stream.flush()
        except OSError:
            code = code or 1
    os._exit(code)


def _show(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _check(*, verbose: bool) -> int:
    """Tell inside from outside, and, when asked, what may be done inside."""
    inside = os.path.exists(MARKER)
    _show("inside sandbox\n" if inside else "outside sandbox\n")
    if inside and verbose:
        try:
            with open(README, encoding="utf-8", errors="replace") as page:
                _show("\n" + page.read())
        except FileNotFoundError:
            # A workspace of a service has none.
            output.notice(PROGRAM, f"there is no {README} here")
    return 0 if inside else 1


def _run_plain(parsed: options.Parsed) -> int:
    """The escape hatch: no sandbox, and said aloud."""
    output.notice(PROGRAM, "AGENT_SANDBOX is off: running without a sandbox")
    try:
        if parsed.cwd is not None:
            os.chdir(parsed.cwd)
        # Python ignores these two; the command must not inherit that.
        import signal

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(parsed.command[0], parsed.command)  # noqa: S606 - asked for by the user
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise CommandError(
            f"cannot run '{parsed.command[0]}': {reason(error)}",
            code="command-not-found" if missing else "command-not-executable",
            exit_code=EXIT_NOT_FOUND if missing else EXIT_CANNOT_EXECUTE,
        ) from error


def _run(parsed: options.Parsed) -> int:
    from ..sandbox import prepare

    if os.path.exists(MARKER) and "--dry-run" not in parsed.switches:
        raise HostError(
            "cannot start a sandbox inside a sandbox",
            hint=f"run the command itself: it is sandboxed already; see {README}",
            code="nested",
        )
    prepared = _plan(parsed)
    for message in prepared.plan.notices:
        output.notice(PROGRAM, message)
    if "--debug" in parsed.switches:
        from .debug import describe

        sys.stderr.write(describe(prepared, parsed.command))
    if "--dry-run" in parsed.switches:
        return _dry_run(prepared, parsed)
    prepare.check_command(prepared, parsed.command)
    if prepared.plan.docker:
        output.notice(PROGRAM, "--docker exposes the container engine: that equals root here")
    report = None
    if parsed.report is not None:
        from .report import Report

        report = Report(parsed.report, prepared)
    return _start(prepared, parsed, report)


def _plan(parsed: options.Parsed) -> Prepared:
    from ..sandbox import prepare

    return prepare.plan(
        prepare.Request(
            argv=parsed.command,
            values=parsed.values,
            env=os.environ,
            cwd=parsed.cwd,
            config=parsed.config,
        )
    )


def _dry_run(prepared: Prepared, parsed: options.Parsed) -> int:
    # Only here: quoting needs `re`.
    import shlex

    from ..launch.bwrap import printable
    from ..sandbox import prepare

    return _show(shlex.join(printable(prepare.preview(prepared, parsed.command))) + "\n")


def _start(prepared: Prepared, parsed: options.Parsed, report: Report | None) -> int:
    from ..launch import execute

    signals = execute.Signals()
    for attempt in range(ROOT_ATTEMPTS):
        last = prepared.facts.uid != 0 or attempt == ROOT_ATTEMPTS - 1
        try:
            built, outcome, changes = _attempt(prepared, parsed, signals)
        except HostError as error:
            if last or error.code != "root-changed":
                raise
        else:
            if outcome.started or not outcome.code or last:
                _say_network(outcome.network, learn=prepared.policy.network.value == "learn")
                _say_containers(outcome.docker)
                _say_git(outcome.git_auth)
                return _finish(built, outcome, parsed, report, changes)
        # Root's masks lie on files that passwd and useradd replace: look again and build anew.
        prepared = _plan(parsed)
    raise InternalBug("no attempt was the last")


def _attempt(
    prepared: Prepared, parsed: options.Parsed, signals: Signals
) -> tuple[Built, Outcome, tuple[Finding, ...]]:
    """Build a sandbox, run the command in it, and clean up."""
    from ..launch import execute, sweeping
    from ..sandbox import prepare

    built = prepare.build(prepared, parsed.command, heeded=signals.heeded)
    keep = "--keep-workspace" in parsed.switches
    enforcer = None
    changes: Changes | None = None
    found: tuple[Finding, ...] = ()

    def look() -> None:
        """Remember the project's control files while bwrap builds: it costs no time of its own."""
        nonlocal changes
        from ..sandbox.changes import Changes

        changes = Changes(prepared, os.path.basename(built.space.path))
        changes.begin()

    try:
        if keep:
            os.close(os.open(f"{built.space.path}/keep", os.O_CREAT | os.O_WRONLY, 0o600))
        enforcer = prepare.make_enforcer(prepared.plan, prepared.facts.uid, built.space)
        outcome = execute.run(
            built.command, signals=signals, timeout=prepared.plan.limits.timeout,
            shield=built.shield, enforcer=enforcer, meanwhile=look,
        )  # fmt: skip
    finally:
        try:
            if enforcer is not None:
                enforcer.close()
            if changes is not None:
                found = changes.settle()
        finally:
            sweeping.remove(built.space, keep=keep)
        if found:
            _say_changes(found, prepared.plan.project)
    return built, outcome, found


def _say_changes(found: tuple[Finding, ...], project: str) -> None:
    """What the run has done to files that tools outside act on."""
    from .quarantine import note

    warnings, notices = note(found, project)
    for message in warnings:
        output.say(PROGRAM, "warning", message, output.RED)
    for message in notices:
        output.notice(PROGRAM, message)


def _finish(
    built: Built, outcome: Outcome, parsed: options.Parsed, report: Report | None,
    changes: tuple[Finding, ...],
) -> int:  # fmt: skip
    """Say what is to be said at the end."""
    if "--keep-workspace" in parsed.switches:
        output.notice(PROGRAM, f"workspace kept in '{built.space.path}'")
    if not outcome.started and outcome.code:
        return _explain_failure(built, outcome.code)
    if outcome.timed_out:
        output.notice(PROGRAM, "the command reached its --timeout and was ended")
    if outcome.exceeded == KEEPER:
        output.notice(PROGRAM, "what held the sandbox's mounts was killed: the command was ended")
    elif outcome.exceeded:
        output.notice(PROGRAM, f"the command exceeded its {outcome.exceeded} limit and was ended")
    for message in outcome.warnings:
        output.say(PROGRAM, "warning", message, output.RED)
    if report is not None:
        try:
            report.write(outcome, changes)
        except OSError as error:
            output.notice(PROGRAM, f"cannot write '{parsed.report}': {reason(error)}")
    return outcome.code


def _say_network(seen: bytes, *, learn: bool) -> None:
    """What was refused, and what a run in the mode learn has learned."""
    if not seen:
        return
    from ..sandbox import traffic

    found = traffic.parse(seen)
    refused = traffic.refusals(found)
    if refused:
        output.notice(PROGRAM, refused)
    for problem in found.problems:
        output.say(PROGRAM, "warning", problem, output.RED)
    if learn and found.learned:
        output.notice(PROGRAM, f"this would have sufficed: {traffic.learned(found)}")
        output.notice(PROGRAM, "the same in a policy file:")
        sys.stderr.write(traffic.learned_policy(found))


def _say_containers(seen: bytes) -> None:
    """What the Docker filter refused, and what it could not remove."""
    if not seen:
        return
    from ..sandbox import containers

    found = containers.parse(seen)
    refused = containers.refusals(found)
    if refused:
        output.notice(PROGRAM, refused)
    for message in containers.warnings(found):
        output.say(PROGRAM, "warning", message, output.RED)


def _say_git(seen: bytes) -> None:
    """What was signed with the user's keys, and which credentials were handed in."""
    if not seen:
        return
    from ..sandbox import gitlog

    found = gitlog.parse(seen)
    for message in gitlog.notes(found):
        output.notice(PROGRAM, message)
    if found.log:
        output.say(PROGRAM, "warning", found.log, output.RED)


def _explain_failure(built: Built, code: int) -> int:
    """bwrap could not build the sandbox: say what this machine lacks."""
    from ..sandbox.prepare import start_failed
    from .doctor import explain_failure

    output.error(PROGRAM, start_failed(code))
    sys.stderr.write(explain_failure(built.command.program))
    return EXIT_CANNOT_BUILD
