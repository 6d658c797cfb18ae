"""`sandboxctl doctor`: shows whether this machine can run sandboxes, and what to do if not.

Thin: `host.kernel` looks and tries, `policy.diagnosis` judges, this renders.
"""

from __future__ import annotations

import json
import os
import sys

from ..errors import HostError, UsageError
from ..host import kernel, tools
from ..launch import bwrap as strategy
from ..launch import landlock, limits, seccomp
from ..policy import paths
from ..policy.diagnosis import FAIL, OK, START, WARN, Attempt, Finding, Probes, diagnose
from ..policy.model import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: sandboxctl doctor [--json] [--bwrap PATH]

Checks whether this machine can run agent-sandbox: looks at bwrap and the kernel, tries each layer
of the sandbox, and says for each failure what causes it and what to do. Exit code 0 when nothing
fails, 1 otherwise.

  --json          print {"version": 1, "ok": …, "checks": [{check, status, cause, remedy}, …]}
  --bwrap PATH    look at this bwrap instead of the one on the PATH
"""
VERSION = 1
WORDS = {OK: "ok", WARN: "warn", FAIL: "FAIL"}
COLOURS = {OK: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[1;31m"}
RESET = "\x1b[0m"


def main(argv: list[str]) -> int:
    """Run the verb; `argv` is what follows it."""
    as_json = False
    program = _find_bwrap()
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if flag in ("-h", "--help"):
            sys.stdout.write(USAGE)
            return 0
        if flag == "--json":
            as_json = True
        elif flag == "--bwrap" and rest:
            program = rest.pop(0)
        elif flag.startswith("--bwrap="):
            program = flag[len("--bwrap=") :]
        else:
            raise UsageError(
                f"unknown flag: {flag}", hint="see 'sandboxctl doctor --help'", code="usage"
            )
    findings = diagnose(_try_limits(examine(program)))
    report = render_json(findings) if as_json else render(findings, colour=_wants_colour())
    sys.stdout.write(report + "\n")
    return 0 if works(findings) else 1


def _find_bwrap() -> str | None:
    """The one that agent-sandbox would take here."""
    try:
        here = os.getcwd()
    except OSError:
        here = "/"
    # Above the system's programs nothing is a project, which could bring a bwrap of its own.
    above = any(paths.within(directory, here) for directory in tools.STANDARD_DIRS)
    return tools.find_bwrap(os.environ, "/nonexistent" if above else here)


def examine(program: str | None) -> Probes:
    """Look at the machine and try every layer."""
    machine = os.uname().machine
    abi = landlock.abi()
    probes = kernel.probe(
        program, required=strategy.REQUIRED_OPTIONS, machines=seccomp.MACHINES, landlock_abi=abi,
        env=os.environ,
    )  # fmt: skip
    if not program or probes.bwrap_error or not probes.machine_supported:
        return probes
    attempts = kernel.try_layers(
        program, filter_bytes=seccomp.build(machine),
        restrict=landlock.restrict if abi >= landlock.SCOPE_ABI else None,
    )  # fmt: skip
    return probes.replace(attempts=attempts)


def _try_limits(probes: Probes) -> Probes:
    """Make the cgroups of a run, and remove them."""
    wanted = Limits(memory=1 << 26, pids=64)
    try:
        name = f"doctor-{os.urandom(4).hex()}"
        enforcer = limits.enforcer(wanted, uid=os.getuid(), name=name)
    except HostError as error:
        return probes.replace(limits_error=error.message, limits_hint=error.hint)
    if enforcer is not None:
        enforcer.close()
    return probes.replace(limits="--memory and --pids tried, hold")


def works(findings: Sequence[Finding]) -> bool:
    """Whether nothing fails."""
    return all(finding.status != FAIL for finding in findings)


def explain_failure(bwrap: str | None, stderr: str = "") -> str:
    """Why a sandbox could not be started here: the failing findings, for agent-sandbox to print.

    When every layer works, it is the fault of that one sandbox, and `stderr` says which.
    """
    probes = examine(bwrap)
    findings = diagnose(probes)
    if works(findings):
        said = kernel.printable(stderr.encode()) or "bwrap ended before the command started"
        failed = Attempt(layer=START, ok=False, error=said)
        findings = diagnose(probes.replace(attempts=(*probes.attempts, failed)))
    failing = [finding for finding in findings if finding.status == FAIL]
    return "".join(f"{line}\n" for line in _lines(failing, colour=False))


def render(findings: Sequence[Finding], *, colour: bool) -> str:
    """The report for a person: a line for each check, remedies below, the verdict last."""
    failures = sum(finding.status == FAIL for finding in findings)
    verdict = "this machine can run agent-sandbox"
    if failures:
        checks = "1 check fails" if failures == 1 else f"{failures} checks fail"
        verdict = f"this machine cannot run agent-sandbox: {checks}"
    return "\n".join((*_lines(findings, colour=colour), "", verdict))


def render_json(findings: Sequence[Finding]) -> str:
    """The report for a program."""
    checks = [{field: getattr(f, field) for field in Finding.__fields__} for f in findings]
    report = {"version": VERSION, "ok": works(findings), "checks": checks}
    return json.dumps(report, indent=2, ensure_ascii=False)


def _lines(findings: Sequence[Finding], *, colour: bool) -> list[str]:
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    told: dict[str, str] = {}
    for finding in findings:
        word = f"{WORDS[finding.status]:<4}"
        if colour:
            word = COLOURS[finding.status] + word + RESET
        lines.append(f"{word}  {finding.check:<{width}}  {finding.cause}")
        if not finding.remedy:
            continue
        before = told.setdefault(finding.remedy, finding.check)
        remedy = finding.remedy if before == finding.check else f"as for '{before}'"
        lines += [f"        {line}".rstrip() for line in remedy.splitlines()]
    return lines


def _wants_colour() -> bool:
    # https://no-color.org: any value but the empty one.
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
