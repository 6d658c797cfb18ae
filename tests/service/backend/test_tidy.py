"""What a killed service leaves beside the parts of a sandbox is removed, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from agent_sandbox.service.backend import tree


def test_half_of_an_upload_or_of_a_removal_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "box"
    tree.make_place(str(place))
    for part in ("workspace", "home/agent", "tmp"):
        (place / part / ".new-kept").write_text("the agent's own")
        (place / part / ".gone-kept").mkdir()
    (place / ".new-0011223344556677").write_text("half")
    (place / ".gone-0011223344556677" / "deep" / "er").mkdir(parents=True)
    (place / ".gone-0011223344556677" / "deep").chmod(0)
    outside = tmp_path / "outside"
    outside.write_text("stays")
    (place / ".new-link").symlink_to(outside)
    tree.tidy_place(str(place))
    assert sorted(os.listdir(place)) == ["home", "tmp", "workspace"]
    assert outside.read_text() == "stays"
    for part in ("workspace", "home/agent", "tmp"):
        assert sorted(os.listdir(place / part)) == [".gone-kept", ".new-kept"]
