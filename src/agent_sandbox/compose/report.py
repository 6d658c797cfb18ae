"""Findings as text, JSON and SARIF. Names in compose files are others': they are cleaned."""

from __future__ import annotations

from .rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .rules import Finding

VERSION = 1
COLOURS = {"critical": "\033[1;31m", "high": "\033[31m", "medium": "\033[33m", "low": "\033[36m"}
PLAIN = "\033[0m"
SARIF_LEVELS = {"critical": "error", "high": "error", "medium": "warning", "low": "note"}
# What code scanning sorts by.
SARIF_SCORES = {"critical": "9.5", "high": "8.0", "medium": "5.0", "low": "2.0"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def clean(text: str) -> str:
    """Text on one line that cannot drive a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _who(finding: Finding) -> str:
    profiles = f" (profile {', '.join(finding.profiles)})" if finding.profiles else ""
    return f"{finding.service}{profiles}: " if finding.service else ""


def text(findings: Sequence[Finding], show: Callable[[str], str], *, colour: bool) -> str:
    """For people: a finding, why it matters, what to do. The reasons of a rule are said once."""
    lines: list[str] = []
    said: set[str] = set()
    for finding in findings:
        grade = "accepted" if finding.accepted else finding.severity
        label = f"{COLOURS[grade]}{grade}{PLAIN}" if colour and grade in COLOURS else grade
        where = f"{show(finding.place.file)}:{finding.place.line}"
        head = f"{clean(where)}: {label}: {clean(_who(finding) + finding.message)}"
        lines.append(f"{head} [{finding.rule.id}]")
        if finding.accepted:
            lines.append(f"    accepted by label: {clean(finding.answer) or 'no reason given'}")
        elif finding.rule.id not in said:
            said.add(finding.rule.id)
            lines.append(f"    why: {finding.rule.why}")
            lines.append(f"    fix: {finding.rule.fix}")
    return "".join(line + "\n" for line in lines)


def summary(findings: Sequence[Finding]) -> str:
    """How many of each kind, on one line."""
    counts: dict[str, int] = {}
    for finding in findings:
        grade = "accepted" if finding.accepted else finding.severity
        counts[grade] = counts.get(grade, 0) + 1
    order = ("critical", "high", "medium", "low", "accepted")
    return ", ".join(f"{counts[g]} {g}" for g in order if g in counts) or "nothing found"


def rows(findings: Sequence[Finding], show: Callable[[str], str]) -> list[dict[str, object]]:
    """The findings for programs."""
    return [
        {
            "rule": f.rule.id, "severity": f.severity, "service": f.service,
            "profiles": list(f.profiles), "message": f.message, "why": f.rule.why,
            "fix": f.rule.fix, "file": show(f.place.file), "line": f.place.line,
            "accepted": f.accepted, "answer": f.answer,
        }
        for f in findings
    ]  # fmt: skip


def sarif(
    findings: Sequence[Finding], show: Callable[[str], str], version: str
) -> dict[str, object]:
    """SARIF 2.1.0, as code scanning takes it; an accepted finding is a suppressed one."""
    driver = {
        "name": "sandboxctl compose check",
        "version": version,
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.title},
                "fullDescription": {"text": rule.why},
                "help": {"text": rule.fix},
                "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
                "properties": {"security-severity": SARIF_SCORES[rule.severity]},
            }
            for rule in RULES
        ],
    }
    results = [_result(f, show) for f in findings]
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(finding: Finding, show: Callable[[str], str]) -> dict[str, object]:
    place = finding.place
    result: dict[str, object] = {
        "ruleId": finding.rule.id,
        "level": SARIF_LEVELS[finding.severity],
        "message": {"text": _who(finding) + finding.message + ". " + finding.rule.fix},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(show(place.file))},
                    "region": {"startLine": place.line},
                }
            }
        ],
    }
    if finding.accepted:
        result["suppressions"] = [{"kind": "inSource", "justification": finding.answer}]
    return result


def _uri(path: str) -> str:
    """A path as a URI; only what may stand in one stays as it is."""
    safe = "/-._~"
    return "".join(
        c
        if c.isascii() and (c.isalnum() or c in safe)
        else "".join(f"%{b:02X}" for b in c.encode())
        for c in path
    )
