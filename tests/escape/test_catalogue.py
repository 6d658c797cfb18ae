"""The attacks as a whole: enough of them, each with a control, and no protection unattacked."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

from escape.attack import BOTH, ROOT, USER, Attack
from escape.protections import CONDITIONS, PROTECTIONS

HERE = Path(__file__).parent
THEMES = sorted(p.stem for p in HERE.glob("test_*.py") if p.stem != Path(__file__).stem)
# 12 is about what is written down; tests/test_docs.py sees to that.
INVARIANTS = range(1, 12)


def attacks() -> list[Attack]:
    """Every attack of every theme."""
    modules = [importlib.import_module(f"escape.{theme}") for theme in THEMES]
    return [attack for module in modules for attack in module.ATTACKS]


ALL = attacks()


def test_there_are_enough_attacks() -> None:
    assert len(ALL) >= 120


def test_every_name_is_used_once() -> None:
    assert [name for name, count in Counter(a.name for a in ALL).items() if count > 1] == []


@pytest.mark.parametrize("number", INVARIANTS)
def test_every_invariant_is_attacked(number: int) -> None:
    assert [attack.name for attack in ALL if attack.invariant == number]


def test_every_attack_has_a_control() -> None:
    """A protection that the launcher can take away, or a flag that grants what is attacked."""
    lacking = [
        attack.name
        for attack in ALL
        for layer in attack.layers
        if not layer.startswith("--") and layer not in PROTECTIONS
    ]
    assert lacking == []


def test_every_protection_is_attacked() -> None:
    used = {layer for attack in ALL for layer in attack.layers}
    assert set(PROTECTIONS) - used == set()
    assert set(CONDITIONS) == {name for attack in ALL for name in attack.conditions}


def test_attacks_are_tried_by_root_and_by_a_user() -> None:
    """What only one of them can try is the exception."""
    assert all(set(attack.who) <= set(BOTH) and attack.who for attack in ALL)
    for who in (ROOT, USER):
        assert len([attack for attack in ALL if who in attack.who]) >= 100


def test_every_attack_runs_in_some_test() -> None:
    """Each theme gives its attacks to its tests, whole or in parts."""
    for theme in THEMES:
        text = (HERE / f"{theme}.py").read_text()
        assert "@trials(" in text
        assert "def test_cannot_" in text
        assert "pytest.skip" not in text
        assert "mark.skip" not in text
        assert "xfail" not in text
