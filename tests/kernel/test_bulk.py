"""Hundreds of masks: made in one go after bwrap, with the same promises."""

from __future__ import annotations

import pytest

from .conftest import World

MANY = 5000


@pytest.fixture
def crowded(world: World) -> World:
    """A project with thousands of secrets in nested directories, and as many other files."""
    for number in range(MANY):
        directory = world.project / f"d{number % 50}" / "e"
        if number < 50:
            directory.mkdir(parents=True)
        (directory / f"k{number}.pem").write_text("SECRET")
        (directory / f"k{number}.txt").write_text("public")
    world.runner.own(world.project)
    return world


def test_cannot_read_any_of_thousands_of_excluded_files(crowded: World) -> None:
    """More than bwrap takes as arguments; a control shows them readable without the rule."""
    count = "find . -name '*.pem' -exec cat {} + 2>/dev/null | wc -c"
    assert crowded.sh(count).stdout == f"{MANY * len('SECRET')}\n"
    done = crowded.sh(f"{count}; cat d3/e/k3.txt", "--exclude", "**/*.pem")
    assert done.stdout == "0\npublic"


def test_cannot_move_directories_that_hold_excluded_files(crowded: World) -> None:
    """Pins are made in bulk too."""
    done = crowded.sh(
        "mv d3 x; mv d3/e d3/x; rm d3/e/k3.pem; echo new > d3/e/new; ls d3/e/new",
        "--exclude",
        "**/*.pem",
    )
    assert done.stdout == "d3/e/new\n"
    assert done.stderr.count("busy") == 3
    assert (crowded.project / "d3/e/k3.pem").read_text() == "SECRET"


def test_many_read_only_files_are_read_only(crowded: World) -> None:
    """Not only masks."""
    done = crowded.sh(
        "cat d3/e/k3.pem; echo x > d3/e/k3.pem; echo x > d3/e/k3.txt; echo $?",
        "--ro",
        "**/*.pem",
    )
    assert done.stdout == "SECRET0\n"
    assert "Read-only" in done.stderr
    assert (crowded.project / "d3/e/k3.pem").read_text() == "SECRET"


def test_a_failure_of_the_bulk_mounts_stops_the_start(crowded: World) -> None:
    """Nothing runs with half of its masks: here the interpreter that would make them is gone."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.executable = '/nonexistent'\n"
        "from agent_sandbox import Policy, Sandbox\n"
        "box = Sandbox(Policy(project=sys.argv[2], exclude=['**/*.pem']))\n"
        "try:\n    box.run(['touch', 'started'])\nexcept OSError as error:\n    print('refused')\n"
    )
    done = crowded.outside(
        crowded.runner.python, "-c", script, str(crowded.runner.source), str(crowded.project)
    )
    assert "refused" in done.stdout, done.stderr
    assert not (crowded.project / "started").exists()
