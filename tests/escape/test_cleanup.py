"""The end of a run: nothing is left behind, and clean-up harms nothing of the user's."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from escape.attack import USER, Attack, Run, Scene, Trial, finish, guard, trials
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.kernel

STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
DEEP = """
import os
os.chdir("/tmp")
for _ in range(1050):
    os.mkdir("d")
    os.chdir("d")
"""


def killed_at_first(scene: Scene, argv: Sequence[str]) -> Run:
    """The first run is killed with its supervisor; the second ends by itself."""
    process = scene.popen(argv, **STREAMS)
    if not scene.codes:
        assert eventually(scene.asleep)
        process.kill()
    return finish(process)


def left_behind(scene: Scene) -> bool:
    """Workspaces and placeholders, after a run that ended by itself."""
    return len(scene.codes) == 2 and bool(scene.workspaces() or scene.tampered())


def without_hooks(scene: Scene) -> None:
    """A repository in which a run makes a placeholder."""
    scene.outside("git", "init", "-q")
    hooks = scene.project / ".git" / "hooks"
    shutil.rmtree(hooks)
    scene.watch(hooks)


def any_workspace(scene: Scene) -> bool:
    return bool(scene.workspaces())


ATTACKS = (
    Attack(
        name="link-in-tmp", invariant=8, what="clean-up must not follow it",
        setup=guard("~/document", "kept/file"),
        script="""
            cd /tmp; ln -s $home h; ln -s $project p; mkdir -p d/e; ln -s $home d/e/h
            ln -s $project/kept d/k; ln -s .. d/up
        """, without="careful clean-up",
    ),
    Attack(
        name="link-for-the-work-directory", invariant=8, what="a directory of ours becomes one",
        setup=guard("~/document"),
        script="rmdir /tmp/agent-work; ln -s $home /tmp/agent-work", without="careful clean-up",
    ),
    Attack(
        name="deep-directories", invariant=8, what="deeper than Python recurses",
        python=True, script=DEEP, escaped=any_workspace, without="careful clean-up",
    ),
    Attack(
        name="closed-directories", invariant=8, what="modes that keep the user out", who=(USER,),
        script="cd /tmp; mkdir -p a/b r/s; touch a/b/f r/s/f; chmod 0 a/b a; chmod 555 r/s r;"
        " chmod 0 /tmp",
        escaped=any_workspace, without="careful clean-up",
    ),
    Attack(
        name="workspace-of-a-killed-run", invariant=8, what="the next start sweeps",
        drive=killed_at_first, script="echo x > /tmp/file; sleep $mark", then="true",
        escaped=left_behind, without="sweep",
    ),
    Attack(
        name="placeholder-of-a-killed-run", invariant=8, what="the next start removes it",
        setup=without_hooks, drive=killed_at_first, script="sleep $mark", then="true",
        escaped=left_behind, without="sweep",
    ),
    Attack(
        name="placeholder-of-a-run", invariant=8, what="it can be neither kept nor filled",
        setup=without_hooks,
        script="touch .git/hooks/x; mkdir .git/hooks/y; chmod 555 .git/hooks; exec 5<.git/hooks",
        without="read-only holds",
    ),
    Attack(
        name="report-through-a-link", invariant=2, what="--report names a link of the sandbox",
        setup=guard("~/.bashrc"), script="ln -s $home/.bashrc out.json",
        then_flags=("--report", "out.json"), may_stop=(2,), without="reports through no link",
    ),
    Attack(
        name="report-through-a-linked-directory", invariant=2, what="or a link on the way",
        setup=lambda s: s.watch(s.outside_dir / "out.json"),
        script="ln -s $outside reports", then_flags=("--report", "reports/out.json"),
        may_stop=(2,), without="reports through no link",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_abuse_the_end_of_a_run(trial: Trial) -> None:
    trial.run()
