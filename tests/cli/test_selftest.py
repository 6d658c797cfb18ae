"""`sandboxctl selftest`: the table of attempts, how they are judged, and how that is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from agent_sandbox.cli import ctl, selftest
from agent_sandbox.cli.selftest import attacks, runs, verdicts, world
from agent_sandbox.cli.selftest.attacks import ATTACKS, RUNS, Attack, Evidence, Untried
from agent_sandbox.cli.selftest.attempts import frame
from agent_sandbox.cli.selftest.verdicts import (
    ESCAPED,
    HELD,
    NOT_TRIED,
    Ended,
    Outcome,
    judge,
    passed,
)
from agent_sandbox.errors import EXIT_CANNOT_BUILD, HostError, UsageError
from conftest import ROOT


class Still:
    """A canary that is no process: a test run with threads must not be forked."""

    pid = 1

    def close(self) -> None:
        pass


class Scene:
    """As much of a world as a verdict asks for."""

    def __init__(self, **values: object) -> None:
        self.lacking: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.secrets = {"home": "tag-0123"}
        vars(self).update(values)


def attack(verdict: attacks.Verdict = attacks.got, **fields: Any) -> Attack:
    return Attack(
        name="x", what="do x", invariant=3, layer="mount namespace", verdict=verdict, **fields
    )


def judged(tried: Attack, ended: Ended | None, **scene: object) -> Outcome:
    return judge(tried, cast("world.World", Scene(**scene)), ended)


def ended(
    answer: str | None = None, *, got: bool = False, code: int | None = 0, said: str = ""
) -> Ended:
    evidence = {} if answer is None else {"x": Evidence(answer=answer, got=got)}
    return Ended(evidence=evidence, broken={}, code=code, said=said)


# --- the table ------------------------------------------------------------------------------------


def test_there_is_an_attempt_for_every_row_and_no_other() -> None:
    steps = {step for run in RUNS for step in run.steps}
    assert set(frame.ATTEMPTS) == {row.name for row in ATTACKS} | steps
    assert len({row.name for row in ATTACKS}) == len(ATTACKS)
    assert len({row.what for row in ATTACKS}) == len(ATTACKS)


def test_the_rows_cover_the_invariants() -> None:
    """The eleventh and twelfth are about words, and cannot be attacked."""
    assert {row.invariant for row in ATTACKS} == set(range(1, 11))
    for_a_user = [row for row in ATTACKS if not row.root_only]
    assert 30 <= len(for_a_user) <= 40
    assert selftest.chosen(1000) == for_a_user
    assert selftest.chosen(0) == list(ATTACKS)


def test_every_row_is_made_in_a_run_that_exists() -> None:
    names = {run.name for run in RUNS}
    assert {row.run for row in ATTACKS} == names
    assert {run.after for run in RUNS} <= names | {""}


def test_a_row_brings_its_run_and_those_before_it() -> None:
    second = next(row for row in ATTACKS if row.run == "second")
    assert runs.needed([second]) == {"main", "second"}


def test_what_runs_inside_imports_nothing_of_ours() -> None:
    """It is copied into a world where the package is not."""
    for path in Path(frame.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "from .." not in text
        assert "agent_sandbox" not in text


def test_the_modules_are_short() -> None:
    for path in Path(selftest.__file__).parent.rglob("*.py"):
        assert len(path.read_text().splitlines()) < 500


# --- judging --------------------------------------------------------------------------------------


def test_without_evidence_nothing_held() -> None:
    """Neither a missing sandbox, nor one that said nothing, nor an attempt with a fault."""
    silent = judged(attack(), ended())
    assert (silent.result, silent.reason) == (NOT_TRIED, "its sandbox ended with 0")
    assert judged(attack(), None).result == NOT_TRIED
    late = judged(attack(), ended(code=None))
    assert (late.result, late.reason) == (NOT_TRIED, "its sandbox did not end")
    broken = Ended(evidence={}, broken={"x": "NameError: y"}, code=0, said="")
    assert judged(attack(), broken).reason == "the attempt failed: NameError: y"
    # Also when a later line looks like an answer.
    mixed = broken.replace(evidence={"x": Evidence(answer="EPERM")})
    assert judged(attack(), mixed).result == NOT_TRIED
    assert not any(passed([o]) for o in (silent, late, judged(attack(), mixed)))


def test_an_answer_is_judged_by_the_verdict() -> None:
    assert judged(attack(), ended("EPERM")).result == HELD
    out = judged(attack(), ended("pid 1", got=True))
    assert (out.result, out.reason) == (ESCAPED, "pid 1")
    leak = judged(attack(attacks.leaked("home")), ended("read: tag-0123"))
    assert (leak.result, leak.reason) == (ESCAPED, "a secret came out (home)")
    assert judged(attack(attacks.leaked("home")), ended("read: ENOENT")).result == HELD


def test_a_verdict_may_not_know() -> None:
    def verdict(_: object, seen: Evidence) -> str:
        raise Untried(f"ended with {seen.code}: {seen.said}")

    out = judged(attack(verdict), ended("ok", code=7, said="what"))
    assert (out.result, out.reason, out.excused) == (NOT_TRIED, "ended with 7: what", False)


def test_a_start_that_is_refused_as_promised_held() -> None:
    """Only with the right words, only when nothing ran, and only for attacks on the start."""
    said = "agent-sandbox: notice: x\nagent-sandbox: error: cannot follow 'cache'\nhint: y\n"
    tried = attack(refusal="cannot follow")
    out = judged(tried, ended(code=EXIT_CANNOT_BUILD, said=said))
    assert (out.result, out.answer) == (HELD, "cannot follow 'cache' hint: y")
    assert judged(tried, ended(code=1, said=said)).result == NOT_TRIED
    assert judged(tried, ended(code=EXIT_CANNOT_BUILD, said="another")).result == NOT_TRIED
    assert judged(attack(), ended(code=EXIT_CANNOT_BUILD, said=said)).result == NOT_TRIED
    # The host has the last word.
    seen = attack(lambda *_: "it ran", refusal="cannot follow")
    assert judged(seen, ended(code=EXIT_CANNOT_BUILD, said=said)).result == ESCAPED
    # A refusal in words does not help when the attempt was made all the same.
    got = ended("out", got=True, code=EXIT_CANNOT_BUILD, said=said)
    assert judged(tried, got).result == ESCAPED


def test_what_a_machine_lacks_is_excused_and_a_fault_is_not() -> None:
    lacking = judged(attack(), ended("EPERM"), lacking={"x": "git is not installed"})
    assert (lacking.result, lacking.excused) == (NOT_TRIED, True)
    assert passed([lacking])
    fault = judged(attack(), ended("EPERM"), faults={"x": "cannot listen"})
    assert (fault.result, fault.excused) == (NOT_TRIED, False)
    refused = ended(code=EXIT_CANNOT_BUILD, said="agent-sandbox: error: cannot limit pids")
    assert judged(attack(excuse="cannot limit"), refused).excused
    assert not judged(attack(), refused).excused


def test_a_flood_held_only_when_the_limit_ended_it() -> None:
    flood = next(row for row in ATTACKS if row.name == "flood").verdict
    some = cast("world.World", Scene())
    assert flood(some, Evidence(answer="…", code=137, said="exceeded its tmp-size limit")) == ""
    with pytest.raises(Untried):
        flood(some, Evidence(answer="…", code=137, said="killed"))
    assert flood(some, Evidence(answer="still here", got=True, code=0)) == "still here"


# --- showing --------------------------------------------------------------------------------------

OUTCOMES = (
    Outcome(attack=attack(), result=HELD, answer="EPERM"),
    Outcome(attack=attack(note="an old kernel"), result=ESCAPED, reason="it\x1b[2J got out"),
    Outcome(attack=attack(), result=NOT_TRIED, reason="git is not installed", excused=True),
)


def test_the_table_has_a_line_for_each_attempt() -> None:
    """With what stopped it, or what went wrong; nothing that could drive a terminal."""
    assert verdicts.render(OUTCOMES, 1.24, colour=False).splitlines() == [
        "attempt  result     stopped by       invariant",
        "do x     held       mount namespace  3",
        "do x     ESCAPED    it?[2J got out (3)",
        "        an old kernel",
        "do x     not tried  git is not installed (3)",
        "",
        "3 attempts in 1.2 s: 1 held, 1 ESCAPED, 1 not tried",
        "what ESCAPED is open on this machine; 'sandboxctl doctor' may know why",
    ]


def test_colour_is_only_for_results() -> None:
    text = verdicts.render(OUTCOMES, 1, colour=True)
    assert "\x1b[32mheld     \x1b[0m" in text
    assert "\x1b[1;31mESCAPED  \x1b[0m" in text
    assert text.count("\x1b") == 2 * len(OUTCOMES)


def test_the_last_line_tells_what_the_exit_code_does() -> None:
    assert verdicts.summary(OUTCOMES[:1], 1) == "1 attempts in 1.0 s: 1 held"
    assert passed(OUTCOMES[:1])
    assert "\n" not in verdicts.summary((OUTCOMES[0], OUTCOMES[2]), 1)
    missed = OUTCOMES[2].replace(excused=False)
    assert "not everything could be tried" in verdicts.summary((OUTCOMES[0], missed), 1)
    assert not passed((OUTCOMES[0], missed))
    assert not passed(OUTCOMES)


def test_the_report_is_json_for_programs() -> None:
    report = json.loads(verdicts.render_json(OUTCOMES, 1.239))
    assert (report["version"], report["ok"], report["seconds"]) == (1, False, 1.24)
    assert report["attacks"][1] == {
        "attack": "x", "what": "do x", "result": "escaped", "reason": "it\x1b[2J got out",
        "excused": False, "layer": "mount namespace", "invariant": 3, "answer": "",
    }  # fmt: skip
    text = (ROOT / "docs" / "reference.md").read_text().partition("selftest --json`\n")[2]
    section = text.partition("\n### ")[0]
    named = [*report, *(f"attacks[].{field}" for field in report["attacks"][0])]
    assert [name for name in named if f"`{name}`" not in section] == []


# --- the verb -------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["--yaml", "now", "--json=1"])
def test_unknown_arguments_are_errors(argument: str) -> None:
    """Nothing is tried then."""
    with pytest.raises(UsageError, match=argument):
        selftest.main([argument])


def test_help_is_that_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["selftest", "--help"]) == 0
    assert "sandboxctl selftest [--json]" in capsys.readouterr().out


def test_inside_a_sandbox_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marker").touch()
    monkeypatch.setattr(selftest, "MARKER", str(tmp_path / "marker"))
    with pytest.raises(HostError) as problem:
        selftest.main([])
    assert problem.value.code == "nested"


def test_facts_for_the_inside_hold_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever prints one must have read it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(world, "UNFIT", ())
    monkeypatch.setattr(world, "LONGEST", 1000)
    # The session keyring is the whole test run's.
    monkeypatch.setattr(world.World, "_add_key", lambda _: None)
    monkeypatch.setattr(world, "Canary", Still)
    made = world.World()
    try:
        known = json.dumps(runs.facts(made))
        assert not any(secret in known for secret in made.secrets.values())
        assert made.base.startswith(str(tmp_path))
    finally:
        made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_world_lies_where_no_sandbox_has_its_own_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a place that is shown to everybody or covered, and not too deep for a socket."""
    for name in ("shown", "cache", "deep" + "p" * 100):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(world, "UNFIT", (str(tmp_path / "shown"),))
    monkeypatch.setattr(world, "LONGEST", len(str(tmp_path)) + 8)
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))
    for name in ("shown", "deep" + "p" * 100, "missing"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        assert world._place() == str(tmp_path / "cache")
