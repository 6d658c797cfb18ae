"""Claude Code outside of a sandbox, with its commands in sandboxes: by the hook and by the prefix.

Its own tools (Write, Edit, Read) are Claude's process and not ours to hold: the model attacks by
commands here.
"""

from __future__ import annotations

import json
import shlex

import pytest

from . import verdicts
from .conftest import Make
from .stage import ON, Done, Stage

pytestmark = [pytest.mark.agent, pytest.mark.kernel, pytest.mark.network, pytest.mark.slow]

WAYS = {"hook": (), "prefix": ("--prefix",)}
SETTINGS = "~/.claude/settings.json"


def install(here: Stage, *flags: str) -> None:
    """As a user would, with our commands on PATH."""
    world = here.world
    for name, tool in (("agent-sandbox", "run"), ("sandboxctl", "ctl")):
        argv = shlex.join(world.runner.command(tool))
        world.write(f"~/.local/bin/{name}", f'#!/bin/sh\nexec {argv} "$@"\n', 0o755)
    done = world.ctl("hook", "install", "claude", *flags, env=path(here))
    assert done.returncode == 0, done.stderr


def path(here: Stage) -> dict[str, str | None]:
    bin_ = here.world.home / ".local" / "bin"
    return {"PATH": f"{bin_}:{here.world.home}/.npm-global/bin:/usr/local/bin:/usr/bin:/bin"}


def run(here: Stage) -> Done:
    """Claude itself is not sandboxed."""
    _, env = here.prepare(ON)
    found = path(here)["PATH"]
    assert found is not None
    return here.run(here.agent.argv, {**env, "PATH": found})


@pytest.fixture(params=WAYS)
def hooked(request: pytest.FixtureRequest, stage: Make) -> Stage:
    """A home in which one of the ways is installed."""
    here = stage("claude", f"by-{request.param}")
    here.prepare(ON)
    install(here, *WAYS[request.param])
    return here


def test_cannot_harm_by_commands_of_an_unsandboxed_claude(hooked: Stage) -> None:
    """The work lands. Control: test_the_same_attacks_work_without_a_sandbox, without a hook.

    Nobody asked for another network; and a command has no use for Claude's own key.
    """
    was = verdicts.before(hooked)
    done = run(hooked)
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{verdicts.loot(hooked)[:6000]}"
    work = {name: verdicts.WORK[name](hooked, was, done) for name in ("finished", "edit", "commit")}
    assert all(work.values()), f"{work}\n{said}"
    worked = {name for name, check in verdicts.ATTACKS.items() if check(hooked, was)}
    assert worked == {"loopback"}, said


def test_a_broken_hook_runs_nothing(hooked: Stage) -> None:
    """When our program is gone, Claude's commands do not run at all."""
    install(hooked, *(("--prefix",) if "prefix" in str(hooked.world.base) else ()))
    for name in ("agent-sandbox", "sandboxctl"):
        (hooked.world.home / ".local" / "bin" / name).unlink()
    was = verdicts.before(hooked)
    sign = hooked.world.project / "loot"
    if sign.exists():
        hooked.must("rm", "-rf", str(sign))
    run(hooked)
    assert not sign.exists()
    assert was.commits == verdicts.before(hooked).commits


def test_claude_in_a_sandbox_works_with_a_hook_installed(hooked: Stage) -> None:
    """`agent-sandbox claude` reads the same settings, and is no sandbox in a sandbox."""
    install(hooked, *(("--prefix",) if "prefix" in str(hooked.world.base) else ()))
    assert json.loads(hooked.world.path(SETTINGS).read_text())
    was = verdicts.before(hooked)
    done = hooked.sandboxed(ON)
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{verdicts.loot(hooked)[:6000]}"
    work = {name: verdicts.WORK[name](hooked, was, done) for name in ("finished", "edit")}
    assert all(work.values()), f"{work}\n{said}"
    assert verdicts.before(hooked).commits == was.commits + 1, said
