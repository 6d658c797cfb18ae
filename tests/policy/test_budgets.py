"""Budgets in policy files, and that a project can only add to them."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import budgets, merge
from agent_sandbox.policy.budgets import Budget
from agent_sandbox.policy.decode import decode
from agent_sandbox.policy.model import GLOBAL, PROJECT
from agent_sandbox.policy.network import outward

WHERE = "c.toml: budget"


@pytest.mark.parametrize(
    ("entry", "caps"),
    [
        ({"requests": 10}, {"requests": 10}),
        ({"upload": "10M"}, {"upload": 10 << 20}),
        ({"bytes": "1G"}, {"total": 1 << 30}),
        ({"bytes": 5, "requests": "7", "upload": 3}, {"total": 5, "requests": 7, "upload": 3}),
    ],
)
@pytest.mark.parametrize("host", ["a.example", "*.example:443", "*", "10.0.0.0/8", "localhost:80"])
def test_an_entry_is_read(host: str, entry: dict[str, object], caps: dict[str, int]) -> None:
    found = budgets.decode([{"host": host, **entry}], WHERE)
    assert found == (Budget(host=host, source=WHERE, **caps),)


@pytest.mark.parametrize(
    "entry",
    [
        {}, {"host": "a.example"}, {"requests": 1}, {"host": "a b", "requests": 1},
        {"host": "a.example", "requests": 0}, {"host": "a.example", "requests": -1},
        {"host": "a.example", "upload": "x"}, {"host": "a.example", "bytes": 0},
        {"host": "a.example", "total": 5}, {"host": "a.example", "requests": True},
        {"host": 1, "requests": 1},
    ],
)  # fmt: skip
def test_what_is_not_exactly_an_entry_is_an_error(entry: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        budgets.decode([entry], WHERE)


def test_a_project_adds_budgets_and_takes_none_away() -> None:
    """All of them hold: a larger one beside a smaller one changes nothing."""
    user = decode({"budget": [{"host": "a.example", "requests": 5}]}, rank=GLOBAL, file="g")
    project = decode({"budget": [{"host": "a.example", "requests": 500}]}, rank=PROJECT, file="p")
    policy = merge.merge([user, project], project="/p", home="/h", command="x", env={})
    assert [s.value.requests for s in policy.budgets] == [5, 500]  # type: ignore[attr-defined]
    assert merge.widenings(project, [user]) == []


def test_a_budget_that_nobody_keeps_is_an_error() -> None:
    """With the host's network nobody counts."""
    layer = decode({"budget": [{"host": "a.example", "requests": 5}]}, rank=GLOBAL, file="g")
    policy = merge.merge([layer], project="/p", home="/h", command="x", env={})
    with pytest.raises(PolicyError) as caught:
        outward(policy, [])
    assert caught.value.code == "budget-without-proxy"
