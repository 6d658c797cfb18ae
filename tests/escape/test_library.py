"""The library: programs get the same protections as the command line."""

from __future__ import annotations

import pytest

from escape.attack import Attack, Scene, Trial, hide, trials
from escape.test_delayed import make, missing
from escape.test_git import FSMONITOR, look_in, repository
from escape.test_inherited import SEARCH, with_key
from escape.test_processes import survivors
from escape.test_sockets import ABSTRACT

pytestmark = pytest.mark.kernel

PROGRAM = ("started by a program",)


def token(scene: Scene) -> None:
    scene.caller["API_TOKEN"] = scene.secret


ATTACKS = (
    Attack(
        name="library-read-a-key", invariant=3, what="~/.ssh", conditions=PROGRAM,
        setup=hide("~/.ssh/id"), script="cat $home/.ssh/id", without="private home",
    ),
    Attack(
        name="library-variables", invariant=7, what="the program's own environment",
        conditions=PROGRAM, setup=token, script="env", without="list of variables",
    ),
    Attack(
        name="library-keyring", invariant=7, what="the program's own keys", conditions=PROGRAM,
        drive=with_key(-3), python=True, script=SEARCH, without="new keyring + seccomp",
    ),
    Attack(
        name="library-abstract-socket", invariant=5, what="a service of the host",
        conditions=PROGRAM, setup=lambda s: s.listen(f"\0agsbx-{s.token}"), python=True,
        script=f"{ABSTRACT}\nabstract(socket.SOCK_STREAM)", without="landlock",
    ),
    Attack(
        name="library-daemon", invariant=8, what="setsid, nohup", conditions=PROGRAM,
        script="setsid sleep $mark >/dev/null 2>&1 </dev/null & sleep 0.1", escaped=survivors,
        without="pid namespace",
    ),
    Attack(
        name="library-new-settings", invariant=9, what="names that tools outside act on",
        conditions=PROGRAM, setup=missing(".envrc", ".vscode/tasks.json"),
        script=make(".envrc", ".vscode/tasks.json"), without="held names",
    ),
    Attack(
        name="library-new-repository", invariant=9, what="with settings that run something",
        conditions=PROGRAM, setup=repository, host=look_in("new"),
        script=f"rm -rf new; git init -q new; {FSMONITOR} >> new/.git/config",
        without="quarantine",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_escape_from_a_program(trial: Trial) -> None:
    trial.run()
