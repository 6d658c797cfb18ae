"""Ids cannot be guessed, and nothing else passes for one."""

from __future__ import annotations

import pytest

from agent_sandbox.service.core import ids


def test_ids_are_fresh_and_of_130_bits() -> None:
    made = {ids.new(ids.SANDBOX) for _ in range(1000)}
    assert len(made) == 1000
    assert all(ids.is_id(ids.SANDBOX, one) for one in made)
    assert all(len(one) == 30 for one in made)
    assert len(set("".join(one[4:] for one in made))) == 32


@pytest.mark.parametrize(
    "text",
    ["", "sbx-", "sbx-" + "a" * 25, "sbx-" + "a" * 27, "exc-" + "a" * 26, "a" * 30,
     "sbx-" + "A" * 26, "sbx-" + "a" * 25 + "/", "sbx-" + "." * 26, "sbx-" + "é" * 26],
)  # fmt: skip
def test_what_is_not_an_id_is_none(text: str) -> None:
    assert not ids.is_id(ids.SANDBOX, text)
