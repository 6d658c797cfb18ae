"""The page about agents tells what was tested; without running any agent."""

from __future__ import annotations

from .roster import AGENTS
from .table import CHECKS, FULL_SCREEN, columns, of_page, versions


def test_the_page_has_a_column_for_each_agent_with_the_version_of_the_lock() -> None:
    assert {one[0]: one[1] for one in columns(of_page())} == {n: versions()[n] for n in AGENTS}


def test_the_page_has_a_row_for_each_check_and_all_of_them_held() -> None:
    titles = [line.split(" | ")[0].removeprefix("| ") for line in of_page().splitlines()[3:]]
    assert titles == [check.title for check in CHECKS.values()]
    for agent, _, *cells in columns(of_page()):
        expected = [
            "–" if name == FULL_SCREEN and agent != "claude" else check.good
            for name, check in CHECKS.items()
        ]
        assert cells == expected, agent
