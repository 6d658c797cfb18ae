"""Rates: token buckets that let a burst pass, then so many per time, for each agent alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.service import quotas
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.quotas import Buckets, Rate

RATE = Rate(count=10, seconds=1.0, rule="limits.rate_requests_per_sec")


def test_a_burst_passes_and_then_one_per_tenth_of_a_second() -> None:
    buckets = Buckets()
    found = [buckets.take("a", RATE, 100.0).allowed for _ in range(12)]
    assert found == [True] * 10 + [False] * 2
    assert not buckets.take("a", RATE, 100.05).allowed
    assert buckets.take("a", RATE, 100.15).allowed
    assert not buckets.take("a", RATE, 100.15).allowed


def test_one_agent_does_not_take_from_another() -> None:
    buckets = Buckets()
    while buckets.take("a", RATE, 1.0).allowed:
        pass
    assert buckets.take("b", RATE, 1.0).remaining == 9


def test_the_answer_says_how_long_to_wait_and_that_is_enough() -> None:
    buckets = Buckets()
    for _ in range(10):
        buckets.take("a", RATE, 5.0)
    with pytest.raises(Problem) as caught:
        buckets.check("a", RATE, 5.0)
    assert (caught.value.code, caught.value.status) == ("RATE_LIMITED", 429)
    wait = caught.value.retry_after
    assert wait is not None
    assert wait == pytest.approx(0.1)
    assert caught.value.headers == {
        "X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1",
    }  # fmt: skip
    assert buckets.take("a", RATE, 5.0 + wait + 1e-9).allowed


@given(st.lists(st.floats(0, 5), min_size=1, max_size=200))
def test_never_more_than_the_burst_and_the_rate(steps: list[float]) -> None:
    """In any span of time, whatever the pattern."""
    buckets, now, passed = Buckets(), 0.0, 0
    for step in steps:
        now += step / 50
        passed += buckets.take("a", RATE, now).allowed
    assert passed <= 10 + now * 10 + 1e-6


def test_a_clock_that_goes_back_fills_nothing() -> None:
    buckets = Buckets()
    for _ in range(10):
        buckets.take("a", RATE, 100.0)
    assert not buckets.take("a", RATE, 1.0).allowed
    assert not buckets.take("a", RATE, 100.0).allowed
    assert buckets.take("a", RATE, 100.2).allowed


def test_buckets_do_not_fill_the_memory_and_the_busy_ones_stay() -> None:
    buckets = Buckets(most=100)
    for _ in range(10):
        buckets.take("busy", RATE, 0.0)
    for number in range(1000):
        buckets.take(number, RATE, number / 1e6)
        assert not buckets.take("busy", RATE, number / 1e6).allowed
    assert len(buckets._levels) <= 101


def test_the_rates_of_an_agent_come_from_its_limits() -> None:
    found = quotas.rates(Limits(rate_create_per_min=6, rate_requests_per_sec=3))
    assert (found[quotas.CREATES].count, found[quotas.CREATES].seconds) == (6, 60.0)
    assert (found[quotas.REQUESTS].count, found[quotas.REQUESTS].seconds) == (3, 1.0)
