"""Agent profiles: the agent keeps its state, and cannot change what the host would run of it."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import profiles
from kernel.conftest import World

pytestmark = pytest.mark.kernel

STATEFUL = [p for p in profiles.PROFILES if p.protect]


@pytest.mark.parametrize("profile", STATEFUL, ids=lambda p: p.name)
def test_cannot_change_what_the_host_would_run_of_an_agent(
    world: World, profile: profiles.Profile
) -> None:
    """Hooks, plugins and settings are read-only, and nothing around them can be moved."""
    for path in profile.protect:
        place = world.home / path.removeprefix("~/")
        is_file = "." in place.name
        (place if not is_file else place.parent).mkdir(parents=True, exist_ok=True)
        (place if is_file else place / "x").write_text("yours")
    world.runner.own(world.home)
    names = " ".join(f'"$HOME/{p.removeprefix("~/")}"' for p in profile.protect)
    attack = (
        f"for p in {names}; do [ -d $p ] && f=$p/x || f=$p; "
        "echo evil > $f; rm -f $f; mv $p $p.old; mkdir -p $p; echo evil > $f; done 2>/dev/null; "
        f"cat {names} 2>/dev/null; true"
    )
    done = world.sh(attack, "--profile", profile.name)
    assert done.returncode == 0, done.stderr
    for path in profile.protect:
        place = world.home / path.removeprefix("~/")
        assert (place if place.is_file() else place / "x").read_text() == "yours"
    # The control: without the profile's protection the same attack changes the same files.
    flags = [f"--rw={path}" for path in profile.protect]
    world.sh(attack, "--profile", profile.name, *flags)
    first = world.home / profile.protect[0].removeprefix("~/")
    kept = first if first.is_file() else first / "x"
    assert not kept.exists() or kept.read_text() == "evil\n"


def test_can_keep_the_state_of_an_agent(world: World) -> None:
    """What the agent writes beside them is there for the next run and outside."""
    (world.home / ".claude").mkdir()
    world.runner.own(world.home / ".claude")
    assert world.sh("mkdir ~/.claude/projects && echo s > ~/.claude/projects/s",
                    "--profile", "claude").returncode == 0  # fmt: skip
    assert (world.home / ".claude/projects/s").read_text() == "s\n"
    assert world.sh("cat ~/.claude/projects/s", "--profile", "claude").stdout == "s\n"
    assert world.sh("cat ~/.claude/projects/s").returncode != 0
