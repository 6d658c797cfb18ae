"""Judges the attempts by their evidence, and shows the result to people and to programs. Pure."""

from __future__ import annotations

import json

from ...errors import EXIT_CANNOT_BUILD
from ...record import Record
from .. import output
from .attacks import Evidence, Untried

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .attacks import Attack
    from .world import World

VERSION = 1
HELD, ESCAPED, NOT_TRIED = "held", "ESCAPED", "not tried"
COLOURS = {HELD: "\x1b[32m", ESCAPED: "\x1b[1;31m", NOT_TRIED: "\x1b[33m"}
PLAIN = "\x1b[0m"
# How much of a start's own words is repeated.
LONGEST = 300


class Ended(Record):
    """How a run ended, as far as a verdict needs it."""

    evidence: Mapping[str, Evidence]
    broken: Mapping[str, str]
    code: int | None
    # What the supervisor wrote.
    said: str


class Outcome(Record):
    """One row of the table."""

    attack: Attack
    result: str
    # Why it was not tried, or how it got out.
    reason: str = ""
    # What the attempt was told by the kernel.
    answer: str = ""
    # Not tried, and nobody is to blame: this machine has nothing to try it on.
    excused: bool = False


def judge(attack: Attack, world: World, ended: Ended | None) -> Outcome:
    """The verdict on one attempt. Without evidence that it was made there is none."""
    if attack.name in world.lacking:
        return _untried(attack, world.lacking[attack.name], excused=True)
    if attack.name in world.faults:
        return _untried(attack, world.faults[attack.name])
    if ended is None:
        return _untried(attack, "its sandbox was not started")
    if attack.name in ended.broken:
        return _untried(attack, f"the attempt failed: {ended.broken[attack.name]}")
    seen = ended.evidence.get(attack.name)
    if seen is None:
        return _without_evidence(attack, world, ended)
    return _judged(attack, world, seen.replace(code=ended.code, said=ended.said))


def _without_evidence(attack: Attack, world: World, ended: Ended) -> Outcome:
    """A start that was refused as it should be is a defence; any other silence is none."""
    said = _errors(ended.said)
    refused = ended.code == EXIT_CANNOT_BUILD
    if refused and attack.refusal and attack.refusal in said:
        return _judged(attack, world, Evidence(answer=said, code=ended.code, said=ended.said))
    if refused and attack.excuse and attack.excuse in said:
        return _untried(attack, said, excused=True)
    how = "did not end" if ended.code is None else f"ended with {ended.code}"
    return _untried(attack, f"its sandbox {how}: {said}" if said else f"its sandbox {how}")


def _judged(attack: Attack, world: World, seen: Evidence) -> Outcome:
    try:
        wrong = attack.verdict(world, seen)
    except Untried as problem:
        return _untried(attack, str(problem))
    result = ESCAPED if wrong else HELD
    return Outcome(attack=attack, result=result, reason=wrong, answer=seen.answer)


def _untried(attack: Attack, reason: str, *, excused: bool = False) -> Outcome:
    return Outcome(attack=attack, result=NOT_TRIED, reason=reason, excused=excused)


def _errors(said: str) -> str:
    """The errors of a start in one line, without its notices, and not too long."""
    lines = [line for line in said.splitlines() if ": notice: " not in line]
    text = " ".join(lines).removeprefix("agent-sandbox: error: ")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether everything that could be tried here was tried, and held."""
    return all(o.result == HELD or o.excused for o in outcomes)


def render(outcomes: Sequence[Outcome], seconds: float, *, colour: bool) -> str:
    """The table for a person, and the verdict."""
    first = ("attempt", "result", "stopped by", "invariant")
    rows = [first, *(_row(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    third = max(len(row[2]) for row in (first, *(_row(o) for o in outcomes if o.result == HELD)))
    lines = []
    for row, outcome in zip(rows, (None, *outcomes), strict=True):
        what, result, stopped, number = row
        shown = f"{result:<{widths[1]}}"
        if colour and outcome is not None:
            shown = COLOURS[outcome.result] + shown + PLAIN
        if outcome is not None and outcome.result != HELD:
            # A reason may be long, and nothing has stopped it.
            lines.append(f"{what:<{widths[0]}}  {shown}  {stopped} ({number})")
        else:
            lines.append(f"{what:<{widths[0]}}  {shown}  {stopped:<{third}}  {number}")
        if outcome is not None and outcome.result == ESCAPED and outcome.attack.note:
            lines.append(f"        {outcome.attack.note}")
    return "\n".join((*lines, "", summary(outcomes, seconds)))


def _row(outcome: Outcome) -> tuple[str, str, str, str]:
    attack = outcome.attack
    stopped = attack.layer if outcome.result == HELD else output.printable(outcome.reason)
    return attack.what, outcome.result, stopped, str(attack.invariant)


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The last line."""
    counts = {r: sum(o.result == r for o in outcomes) for r in (HELD, ESCAPED, NOT_TRIED)}
    shown = [f"{number} {result}" for result, number in counts.items() if number]
    told = f"{len(outcomes)} attempts in {seconds:.1f} s: {', '.join(shown)}"
    if counts[ESCAPED]:
        return f"{told}\nwhat ESCAPED is open on this machine; 'sandboxctl doctor' may know why"
    if not passed(outcomes):
        return f"{told}\nnothing escaped, but not everything could be tried"
    return told


def render_json(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The same for a program."""
    attacks = [
        {
            "attack": o.attack.name, "what": o.attack.what, "result": o.result.lower(),
            "reason": o.reason, "excused": o.excused, "layer": o.attack.layer,
            "invariant": o.attack.invariant, "answer": o.answer,
        }
        for o in outcomes
    ]  # fmt: skip
    report = {
        "version": VERSION, "ok": passed(outcomes), "seconds": round(seconds, 2),
        "attacks": attacks,
    }  # fmt: skip
    return json.dumps(report, indent=2, ensure_ascii=False)
