"""Across runs: what one run leaves behind must not make the next one show or open more."""

from __future__ import annotations

import pytest

from escape.attack import USER, Attack, Scene, Trial, hide, steps, trials

pytestmark = pytest.mark.kernel

BESIDE = "a sandbox beside acts before the mounts"


def note_of_another_project(scene: Scene) -> None:
    """A run in another project has left something in its private home."""
    other = f"{scene.home}/work/other"
    for home in (f"none{other}/+home", "one"):
        scene.hide(scene.state / "homes" / home / "note")
    for part in (scene.state, scene.state / "homes"):
        part.chmod(0o700)


def home_in_a_home(scene: Scene) -> None:
    """The first run is the victim's, in a directory that is called like a private home."""
    scene.cwd = scene.mkdir("+home")
    scene.caller["NOTE"] = scene.secret


def racing(scene: Scene) -> None:
    """Another sandbox of the project swaps a directory for a link to the home."""
    scene.hide("~/.ssh/id")
    scene.write("a/.ssh/keep")
    scene.caller["AGSBX_MOMENT"] = (
        f"cd {scene.project} && {{ [ -L a ] || {{ mv a x && ln -s ../.. a; }}; }}"
    )


def put_back(scene: Scene) -> None:
    """The swap is undone, as a race does it all the time."""
    scene.outside("sh", "-c", "[ -L a ] && rm a && mv x a")


ATTACKS = (
    Attack(
        name="lose-an-exclude", invariant=3, what="move the directory above the hidden file",
        setup=hide("config/.env"), flags=("--exclude", "config/.env"),
        script="mv config config2; cat config2/.env", then="cat config2/.env", without="pins",
    ),
    Attack(
        name="lose-an-exclude-deep-down", invariant=3, what="any directory on the way",
        setup=hide("a/b/c/d/.env"), flags=("--exclude", "a/*/c/*/.env"),
        script="mv a/b/c/d a/b/c/x; mv a/b/c a/b/x; mv a/b a/x; mv a x",
        then="find . -name .env -exec cat {} +", without="pins",
    ),
    Attack(
        name="close-the-directory", invariant=1, what="chmod 0: the next plan takes it for missing",
        setup=hide("config/.env"), flags=("--exclude", "config/.env"), who=(USER,),
        script="chmod 0 config", then="chmod 755 config; cat config/.env", may_stop=(2,),
        without="closed directories stop the start + watched names",
    ),
    Attack(
        name="remove-the-link-to-it", invariant=3, what="an exclude that names a link",
        setup=lambda s: [s.hide("kept/real"), s.link("alias", "kept/real")],
        flags=("--exclude", "alias"), script="rm alias; mv kept x",
        then="cat kept/real x/real", without="memory of excludes",
    ),
    Attack(
        name="link-for-a-writable-path", invariant=4, what="the user opens it in the next run",
        setup=hide("~/private/key"), script="ln -s $home/private dist",
        then="cat dist/key; echo evil > dist/key", then_flags=("--rw", "dist"), may_stop=(2,),
        without="no planted links",
    ),
    Attack(
        name="chain-of-links-for-a-shown-path", invariant=4, what="by way of other links",
        setup=hide("~/private/key"),
        script="mkdir -p d; ln -s $home d/one; ln -s d/one two; ln -s two/private vendor",
        then="cat vendor/key", then_flags=("--ro", "vendor"), may_stop=(2,),
        without="no planted links",
    ),
    Attack(
        name="link-in-the-private-home", invariant=4, what="where a mount point has to be made",
        setup=lambda s: [
            s.write("~/.config/git/ignore"), s.watch(s.outside_dir / "git"),
        ],
        script="mv $home/.config $home/c; ln -s $outside $home/.config",
        without="mount points without links",
    ),
    Attack(
        name="link-in-a-profiles-state", invariant=4, what="where the profile shows a directory",
        setup=steps(hide("~/private/key"), lambda s: s.mkdir("~/.claude")),
        # Opened as a whole once; otherwise an agent's directory is the sandbox's own.
        first_flags=("--rw", "~/.claude"), script="ln -s $home/private $home/.claude/agents",
        then_flags=("--profile", "claude"),
        then="cat $home/.claude/agents/key $home/private/key",
        without="no links in an agent's state",
    ),
    Attack(
        name="link-in-the-state-of-another-profile", invariant=4, what="a run without the profile",
        setup=steps(hide("~/.ssh/id"), lambda s: s.mkdir("~/.claude")),
        first_flags=("--profile", "claude"), script="ln -s $home/.ssh $home/.claude/local",
        then="cat $home/.ssh/id $home/.claude/local/id",
        without="private state of agents + no links to secrets",
    ),
    Attack(
        name="link-for-a-toolchain", invariant=4, what="left by a run that could write there",
        setup=steps(hide("~/.ssh/id"), lambda s: s.mkdir("~/.local/share")),
        first_flags=("--rw", "~/.local/share"), script="ln -s $home/.ssh $home/.local/share/uv",
        then="cat $home/.ssh/id", without="no links to secrets",
    ),
    Attack(
        name="environment-around-a-path-directory", invariant=4, what="a pyvenv.cfg beside it",
        setup=lambda s: [
            s.mkdir("~/.claude/bin"), s.hide("~/.claude/history.jsonl"),
            s.caller.update(PATH=f"{s.home}/.claude/bin:/usr/bin:/bin"),
        ],
        first_flags=("--profile", "claude"), script="touch $home/.claude/pyvenv.cfg",
        then="cat $home/.claude/history.jsonl",
        without="private state of agents + an agent's state is no environment",
    ),
    Attack(
        name="link-for-a-path-directory", invariant=4, what="PATH has a directory of the project",
        setup=lambda s: [
            s.hide("~/private/key"),
            s.caller.update(PATH=f"{s.project}/bin:/usr/bin:/bin"),
        ],
        script="ln -s $home/private bin", then="cat $home/private/key bin/key",
        without="PATH in the project shows nothing",
    ),
    Attack(
        name="home-of-another-project", invariant=4, what="what its sandbox keeps",
        setup=note_of_another_project, script="cat $home/note; cat $home/../*/note",
        without="a home for each project",
    ),
    Attack(
        name="home-inside-a-home", invariant=4, what="a project is called like a home's inside",
        setup=home_in_a_home, host=lambda s: s.enter(s.project), first_flags=("--env", "NOTE"),
        script="echo $NOTE > $home/note", then="cat $home/+home/note",
        without="escaped names of homes",
    ),
    Attack(
        name="swap-while-another-starts", invariant=1, what="a link between plan and mounts",
        setup=racing, host=put_back, conditions=(BESIDE,),
        # Nested: bwrap makes these mounts itself, and follows links.
        flags=("--ro", "a", "--rw", "a/.ssh"),
        script="cat $home/.ssh/id; echo evil > $home/.ssh/id", may_stop=(1, 2),
        without="check of the built root",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_prepare_a_later_run(trial: Trial) -> None:
    trial.run()
