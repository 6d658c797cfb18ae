"""`sandboxctl compose check`: what in compose files hands the host to a container."""

from __future__ import annotations

import os
import sys

from ...compose import report, rules
from ...errors import UsageError
from .arguments import HINT, parse
from .files import found, host, load, shown

DEFAULT_FAIL_ON = "high"


def main(words: list[str]) -> int:
    """Say what is wrong."""
    given = parse(
        words, switches=("--json", "--sarif", "--no-accept", "--no-override"),
        values=("--fail-on", "--env-file"),
    )  # fmt: skip
    threshold = given.one("--fail-on") or DEFAULT_FAIL_ON
    if threshold not in rules.SEVERITIES:
        known = ", ".join(rules.SEVERITIES)
        raise UsageError(f"--fail-on takes one of: {known}", hint=HINT, code="usage")
    if "--json" in given.switches and "--sarif" in given.switches:
        raise UsageError("--json and --sarif exclude each other", hint=HINT, code="usage")
    files = found(given.rest, override="--no-override" not in given.switches)
    machine = host()
    project = load(given, files, machine)
    findings = rules.check(project, machine.home, accept="--no-accept" not in given.switches)
    bad = rules.failing(findings, threshold)
    if "--json" in given.switches:
        _json({
            "version": report.VERSION, "files": [shown(f) for f in project.files],
            "failOn": threshold, "failing": len(bad),
            "findings": report.rows(findings, shown),
        })  # fmt: skip
    elif "--sarif" in given.switches:
        from ... import __version__

        _json(report.sarif(findings, shown, __version__))
    else:
        colour = not os.environ.get("NO_COLOR") and sys.stdout.isatty()
        sys.stdout.write(report.text(findings, shown, colour=colour))
        names = ", ".join(report.clean(shown(f)) for f in project.files)
        sys.stdout.write(f"{names}: {report.summary(findings)}\n")
    return 1 if bad else 0


def _json(data: object) -> None:
    import json

    sys.stdout.write(json.dumps(data, indent=2) + "\n")
