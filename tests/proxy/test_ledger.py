"""Counting, the report, the list that would have done, and budgets."""

from __future__ import annotations

import threading

import pytest

from agent_sandbox.policy import network
from agent_sandbox.proxy import ledger
from agent_sandbox.proxy.ledger import Budget, Ledger

YES = network.Verdict(allowed=True, rule="*.test", source="flag", reason="allowed")
NO = network.Verdict(allowed=False, rule="", source="", reason="no rule")


def budget(text: str, **caps: int) -> Ledger:
    return Ledger([Budget(rule=network.parse(text, "test", deny=True), **caps)])


def test_the_report_counts_by_host_port_and_verdict() -> None:
    held = Ledger()
    for _ in range(3):
        held.note("b.test", 443, NO)
    account = held.note("a.test", 80, YES)
    account.opened()
    assert account.take(10, up=True) == 10
    account.give_back(4, up=True)
    account.take(100, up=False)
    hosts = held.report()["hosts"]
    assert isinstance(hosts, list)
    refused, allowed = hosts
    assert (refused["host"], refused["count"], refused["allowed"]) == ("b.test", 3, False)
    assert (allowed["sent"], allowed["received"], allowed["rule"]) == (6, 100, "*.test")


def test_the_learned_list_has_what_was_reached_and_nothing_else() -> None:
    held = Ledger()
    for host, port in (("b.test", 443), ("a.test", 443), ("a.test", 22), ("2606::1", 80)):
        held.note(host, port, YES).opened()
        held.note(host, port, YES).opened()
    held.note("never.test", 443, YES)
    held.note("no.test", 443, NO)
    assert held.report()["learned"] == ["[2606::1]:80", "a.test:22", "a.test:443", "b.test:443"]


def test_the_report_has_a_limit() -> None:
    held = Ledger()
    for number in range(ledger.MAX_ENTRIES + 5):
        held.note(f"n{number}.test", 80, NO)
    report = held.report()
    assert len(report["hosts"]) == ledger.MAX_ENTRIES  # type: ignore[arg-type]
    assert report["more"] == 5


def test_requests_have_a_budget() -> None:
    held = budget("*.test", requests=2)
    for host in ("a.test", "b.test"):
        assert not held.exhausted(host, 443)
        held.note(host, 443, YES)
    refused = held.exhausted("c.test", 80)
    assert refused is not None
    assert "2 requests" in refused.reason
    assert (refused.allowed, refused.rule, refused.source) == (False, "budget *.test", "test")
    assert not held.exhausted("other.example", 80)


def test_refused_requests_do_not_count() -> None:
    held = budget("a.test", requests=1)
    held.note("a.test", 443, NO)
    assert not held.exhausted("a.test", 443)


@pytest.mark.parametrize(
    ("caps", "up", "down"),
    [({"upload": 10}, 10, 1000), ({"total": 10}, 10, 0), ({"upload": 5, "total": 8}, 5, 3)],
)
def test_bytes_have_budgets(caps: dict[str, int], up: int, down: int) -> None:
    held = budget("a.test", **caps)
    account = held.note("a.test", 443, YES)
    assert account.take(1000, up=True) == up
    assert account.take(1000, up=False) == down
    assert account.take(1000, up=True) == 0
    assert held.exhausted("a.test", 443)
    assert held.note("a.test", 443, YES).take(1, up=True) == 0


def test_a_budget_for_a_port_is_for_that_port() -> None:
    held = budget("a.test:443", upload=1)
    assert held.note("a.test", 80, YES).take(5, up=True) == 5
    assert held.note("a.test", 443, YES).take(5, up=True) == 1


def test_a_budget_that_cuts_a_connection_is_in_the_report() -> None:
    held = budget("a.test", upload=10)
    account = held.note("a.test", 443, YES)
    assert account.take(11, up=True) == 10
    assert account.cut() == "the budget of 10 bytes sent for a.test is used up"
    hosts = held.report()["hosts"]
    assert isinstance(hosts, list)
    assert [(h["allowed"], h["rule"], h["count"]) for h in hosts] == [
        (False, "budget a.test", 1), (True, "*.test", 1),
    ]  # fmt: skip


def test_bytes_that_are_taken_for_a_moment_do_not_look_used_up() -> None:
    """The relay takes what a pipe holds, and gives back what did not come."""
    held = budget("a.test", upload=10)
    account = held.note("a.test", 443, YES)
    seen: list[bool] = []
    with account.turns:
        assert account.take(10, up=True) == 10
        other = threading.Thread(target=lambda: seen.append(bool(held.exhausted("a.test", 443))))
        other.start()
        other.join(0.05)
        assert seen == []
        account.give_back(9, up=True)
    other.join()
    assert seen == [False]


def test_a_private_address_and_this_machine_are_learned_as_rules_that_open_them() -> None:
    held = Ledger()
    held.note("db.test", 5432, YES).opened("10.0.0.5")
    for host in ("127.0.0.1", "::1", "localhost"):
        held.note(host, 6000, YES).opened()
    assert held.report()["learned"] == ["10.0.0.5:5432", "db.test:5432", "localhost:6000"]
