"""An exclude keeps hold of what it has hidden, whatever an earlier run has done to its name."""

from __future__ import annotations

import os
import shutil

import pytest

from .conftest import World


def test_cannot_free_an_excluded_file_by_removing_the_link_to_it(world: World) -> None:
    """The rule names the link; its target stays hidden when the link has gone.

    Control: with the memory gone, it is readable.
    """
    world.write("secrets/prod.env", "top-secret")
    world.link(".env", "secrets/prod.env")
    world.sh("rm .env", "--exclude", ".env")
    assert not os.path.lexists(world.path(".env"))
    assert "top-secret" not in world.sh("cat secrets/*", "--exclude", ".env").stdout
    assert "top-secret" not in world.sh("cat secrets/*", "--exclude", ".env").stdout
    shutil.rmtree(world.state / "excludes")
    assert "top-secret" in world.sh("cat secrets/*", "--exclude", ".env").stdout


@pytest.mark.parametrize("what", ["conf/key.pem", "conf"])
def test_cannot_free_an_excluded_path_by_a_rename_in_a_run_without_the_rule(
    world: World, what: str
) -> None:
    """Found again by what it is, not by what it is called."""
    world.write("conf/key.pem", "top-secret")
    assert world.sh("true", "--exclude", what).returncode == 0
    world.sh("mkdir deep && mv conf deep/other")
    done = world.sh("cat deep/other/*", "--exclude", what)
    assert "top-secret" not in done.stdout
    shutil.rmtree(world.state / "excludes")
    assert "top-secret" in world.sh("cat deep/other/*", "--exclude", what).stdout


def test_what_was_really_removed_is_forgotten(world: World) -> None:
    """A rule that matches nothing says so, and nothing else."""
    world.write("key.pem", "x")
    world.sh("true", "--exclude", "key.pem")
    world.path("key.pem").unlink()
    done = world.sh("true", "--exclude", "key.pem")
    assert done.returncode == 0
    assert "matches nothing" in done.stderr


def test_a_rule_that_is_gone_hides_nothing(world: World) -> None:
    """Memory belongs to the rule."""
    world.write("key.pem", "x")
    world.sh("true", "--exclude", "key.pem")
    assert world.sh("cat key.pem").stdout == "x"
