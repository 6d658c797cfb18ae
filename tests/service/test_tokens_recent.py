"""A short memory of who somebody is: one question for all that is open, and never for long."""

from __future__ import annotations

from typing import cast

import pytest

from agent_sandbox.service.problems import Problem
from agent_sandbox.service.tokens import Tokens
from agent_sandbox.service.tokens_recent import MOST, SECONDS, Recent
from agent_sandbox.service.values import Agent

ALICE = Agent(name="alice", key="sbx_aaaaaaaa", scopes=frozenset({"exec"}))
AWAY = Problem("STATE_UNAVAILABLE", "the database is away")


class Place:
    """Tokens that count the questions, a clock, and a lease."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.asked = 0
        self.answer: Agent | Problem | None = ALICE
        self.now = 100.0
        self.held = True
        self.recent = Recent(
            cast("Tokens", self), seconds=seconds, held=lambda: self.held, clock=lambda: self.now
        )

    def check(self, _token: str) -> Agent | None:
        self.asked += 1
        if isinstance(self.answer, Problem):
            raise self.answer
        return self.answer

    def by_uid(self, _uid: int) -> Agent | None:
        return self.check("")

    def again(self, token: str = "t") -> Agent | None:
        return self.recent.check(token, fresh=False)


def test_one_question_a_second_for_all_that_a_token_has_opened() -> None:
    place = Place()
    assert place.recent.check("t", fresh=True) is ALICE
    for _ in range(300):
        assert place.again() is ALICE
    assert place.asked == 1
    place.now += SECONDS
    for _ in range(300):
        assert place.again() is ALICE
    assert place.asked == 2
    # A request is never let in by memory.
    assert place.recent.check("t", fresh=True) is ALICE
    assert place.asked == 3


def test_answers_are_not_mixed_up() -> None:
    place = Place()
    assert place.again("one") is ALICE
    place.answer = None
    assert place.again("another") is None
    assert place.recent.by_uid(7, fresh=False) is None
    assert place.again("one") is ALICE


@pytest.mark.parametrize("by", ["again", "fresh"])
def test_a_revoked_token_is_known_as_such_within_a_second(by: str) -> None:
    place = Place()
    assert place.again() is ALICE
    place.answer = None
    if by == "fresh":
        # Whoever has found out tells all others.
        assert place.recent.check("t", fresh=True) is None
    else:
        place.now += SECONDS
    asked = place.asked
    for _ in range(300):
        assert place.again() is None
    assert place.asked - asked <= 1


def test_a_database_that_is_away_ends_nothing_while_the_lease_is_held() -> None:
    place = Place()
    assert place.recent.check("t", fresh=True) is ALICE
    place.answer = AWAY
    place.now += SECONDS
    for _ in range(300):
        assert place.again() is ALICE
    # One try a second: each may hold up everybody.
    assert place.asked == 2
    # But it lets nobody in.
    with pytest.raises(Problem):
        place.recent.check("t", fresh=True)
    with pytest.raises(Problem):
        place.again("another")
    place.now += SECONDS
    place.held = False
    with pytest.raises(Problem):
        place.again()


def test_what_was_refused_stays_so_while_the_database_is_away() -> None:
    place = Place()
    assert place.again() is ALICE
    place.answer = None
    place.now += SECONDS
    assert place.again() is None
    place.answer = AWAY
    place.now += SECONDS
    assert place.again() is None


def test_no_answer_stands_for_long() -> None:
    """Whatever the lease says: somebody may have revoked it before the database went away."""
    place = Place()
    assert place.again() is ALICE
    place.answer = AWAY
    while place.now < 100.0 + MOST - SECONDS:
        place.now += SECONDS
        assert place.again() is ALICE
    place.now += SECONDS
    with pytest.raises(Problem):
        place.again()


def test_another_error_is_not_taken_for_an_absence() -> None:
    place = Place()
    assert place.again() is ALICE
    place.answer = Problem("REPLICA_UNAVAILABLE", "this replica has lost its lease")
    place.now += SECONDS
    with pytest.raises(Problem):
        place.again()


def test_the_memory_does_not_grow() -> None:
    place = Place()
    place.answer = None
    for number in range(100):
        assert place.recent.check(f"guess {number}", fresh=True) is None
    assert place.recent._answers == {}
    place.answer = ALICE
    for number in range(100):
        place.again(f"token {number}")
    place.now += MOST
    place.again("one more")
    assert len(place.recent._answers) == 1
    assert b"one more" not in next(iter(place.recent._answers), b"one more")  # type: ignore[operator]


def test_without_replicas_nothing_is_remembered() -> None:
    place = Place(seconds=0.0)
    for _ in range(5):
        assert place.again() is ALICE
        assert place.recent.by_uid(7, fresh=False) is ALICE
    assert place.asked == 10
    place.answer = None
    assert place.again() is None
    place.answer = AWAY
    with pytest.raises(Problem):
        place.again()
