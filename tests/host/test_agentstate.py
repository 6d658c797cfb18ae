"""What is known of an agent's state on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.host import agentstate


def test_a_place_with_a_private_home_was_a_project(tmp_path: Path) -> None:
    (tmp_path / "homes/none/srv/work/+home").mkdir(parents=True)
    assert agentstate.was_project("/srv/work/deep", str(tmp_path))
    assert not agentstate.was_project("/srv", str(tmp_path))
    assert not agentstate.was_project("/srv/work", str(tmp_path / "new"))


def test_a_record_that_cannot_be_read_is_no_record_of_nothing(tmp_path: Path) -> None:
    """Control: see above."""
    (tmp_path / "homes").write_text("")
    with pytest.raises(NotADirectoryError):
        agentstate.was_project("/srv/work", str(tmp_path))
