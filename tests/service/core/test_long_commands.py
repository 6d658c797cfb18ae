"""Commands that are long: bounded when they are asked for, and short in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.service.core.wishes import (
    MOST_ARGUMENTS,
    MOST_KEPT,
    check_arguments,
    shortened,
)
from agent_sandbox.service.problems import Problem


@given(st.lists(st.text(max_size=50), min_size=1, max_size=50))
def test_an_ordinary_command_is_kept_as_it_is(words: list[str]) -> None:
    assert shortened(tuple(words)) == tuple(words)


@pytest.mark.parametrize(
    "words", [("x" * 10**6,), ("a", *("y" * 10_000,) * 20), ("b", *("",) * 10**5, "z" * 10**5)]
)
def test_a_long_one_is_cut_and_says_so(words: tuple[str, ...]) -> None:
    found = shortened(words)
    assert sum(map(len, found)) + len(found) <= MOST_KEPT + 8
    assert found[-1] == "…"
    assert all(long.startswith(kept.rstrip("…")) for kept, long in zip(found, words, strict=False))


def test_what_no_program_could_be_started_with_is_refused() -> None:
    check_arguments(["x" * (MOST_ARGUMENTS - 2)], {"a": "b"})
    for argv, env in ((["x" * MOST_ARGUMENTS], {"a": ""}), ([], {"a": "b" * MOST_ARGUMENTS})):
        with pytest.raises(Problem) as refused:
            check_arguments(argv, env)
        assert refused.value.code == "INVALID"
