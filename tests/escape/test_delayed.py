"""Delayed execution: what editors, shells, agents and git outside act on by themselves."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from escape.attack import Attack, Run, Scene, Trial, finish, guard, trials
from escape.test_git import FSMONITOR, HOOK, OWN_REPOSITORY, look, look_in, repository
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from escape.attack import Step

pytestmark = pytest.mark.kernel


def missing(*names: str) -> Step:
    """Names of the project (or '~/…') that are not there, and must not be afterwards."""
    return lambda s: [s.watch(s.path(name)) for name in names]


def make(*names: str) -> str:
    """A script that tries hard to create files."""
    lines = [f"mkdir -p $(dirname {name}); echo evil > {name}" for name in names]
    lines += [f"echo evil > /tmp/x; mv -f /tmp/x {name}; ln -sf /tmp/x {name}" for name in names]
    return "\n".join(lines)


EDITORS = (".vscode/tasks.json", ".idea/workspace.xml", ".devcontainer/devcontainer.json")
AGENTS = (
    ".mcp.json", ".claude/settings.json", ".claude/hooks/pre.sh", ".codex/config.toml",
    ".cursor/mcp.json", "opencode.json",
)  # fmt: skip
HOOKS = (".husky/pre-commit", ".githooks/pre-commit")
CLAUDE_AT_HOME = ("$home/.claude/settings.json", "$home/.claude/hooks/x")


def nested(scene: Scene) -> None:
    """A repository of the user's that lies somewhere below the project."""
    repository(scene)
    repository(scene, scene.project / "deep" / "nested")


def claude_without_settings(scene: Scene) -> None:
    scene.write(".claude/notes.md")
    scene.watch(scene.path(".claude/settings.json"))


def claude_at_home(scene: Scene) -> None:
    """The user's agent has a directory, but no settings and no hooks yet."""
    scene.mkdir("~/.claude")
    missing("~/.claude/settings.json", "~/.claude/hooks")(scene)


def killed_at_first(scene: Scene, argv: Sequence[str]) -> Run:
    """The supervisor of the first run is killed: nobody looks at what it has left."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = scene.popen(argv, **streams)
    if not scene.codes:
        assert eventually(scene.asleep)
        process.kill()
    return finish(process)


def another_repository(scene: Scene) -> None:
    repository(scene)
    scene.watch(repository(scene, scene.home / "other") / ".git" / "config")


def put_everything_back(scene: Scene) -> None:
    """The user trusts what was quarantined, and has it put back after the second run."""
    if len(scene.codes) == 2:
        listed = scene.ctl_as_started("quarantine", "list")
        assert listed.stdout, listed.stderr
        for line in listed.stdout.splitlines():
            scene.ctl_as_started("quarantine", "restore", line.split()[0])


NAMES = (
    Attack(
        name="new-shell-environment", invariant=9, what="direnv runs .envrc",
        setup=missing(".envrc"), script=make(".envrc"), without="held names",
    ),
    Attack(
        name="new-editor-settings", invariant=9, what="tasks that run on opening",
        setup=missing(*EDITORS), script=make(*EDITORS), without="held names",
    ),
    Attack(
        name="new-agent-settings", invariant=9, what="hooks and tool servers of agents",
        setup=missing(*AGENTS), script=make(*AGENTS), without="held names",
    ),
    Attack(
        name="new-hook-directories", invariant=9, what="husky and the like",
        setup=missing(*HOOKS), script=make(*HOOKS), without="held names",
    ),
    Attack(
        name="agent-settings-beside-others", invariant=9, what="in a directory that is there",
        setup=claude_without_settings, script=make(".claude/settings.json"), without="held names",
    ),
    Attack(
        name="replace-the-agents-directory", invariant=9, what="mv .claude x; mkdir .claude",
        setup=claude_without_settings,
        script="mv .claude x; mkdir .claude; echo evil > .claude/settings.json", without="pins",
    ),
    Attack(
        name="new-settings-of-a-profile", invariant=9, what="CVE-2026-25725, beside its own state",
        setup=claude_at_home, flags=("--profile", "claude"), script=make(*CLAUDE_AT_HOME),
        without="private state of agents",
    ),
    Attack(
        name="new-settings-in-an-opened-state", invariant=9, what="the same with --rw ~/.claude",
        setup=claude_at_home, flags=("--profile", "claude", "--rw", "~/.claude"),
        script=make(*CLAUDE_AT_HOME), without="held names",
    ),
    Attack(
        name="change-what-is-there", invariant=9, what="existing settings of all of them",
        setup=guard(".envrc", *EDITORS, *AGENTS, *HOOKS),
        script="for f in .envrc .mcp.json $(find .[a-z]* -type f); do echo evil > $f; rm -f $f;"
        " done",
        without="read-only mounts",
    ),
    Attack(
        name="settings-behind-a-dangling-link", invariant=9, what="make what .envrc leads to",
        setup=lambda s: s.link(".envrc", "env/local"), script="mkdir -p env; echo evil > env/local",
        escaped=lambda s: s.path(".envrc").exists() and ".envrc" not in s.output,
        without="held names",
    ),
    Attack(
        name="settings-behind-a-link", invariant=9, what=".vscode leads elsewhere in the project",
        setup=lambda s: [
            s.guard("config/vscode/tasks.json"), s.link(".vscode", "config/vscode"),
        ],
        script="echo evil > config/vscode/tasks.json; mv config c; mkdir -p config/vscode;"
        " echo evil > config/vscode/tasks.json",
        without="read-only mounts",
    ),
)  # fmt: skip

REPOSITORIES = (
    Attack(
        name="commondir", invariant=9, what="git reads its configuration elsewhere",
        setup=repository, host=look,
        script=f"{OWN_REPOSITORY} own e; cp -r .git/objects .git/refs e/; cp .git/HEAD e/;"
        " echo ../e > .git/commondir",
        without="quarantine",
    ),
    Attack(
        name="new-repository", invariant=9, what="with settings of its own, below the project",
        setup=repository, host=look_in("deep/new"),
        script=f"mkdir -p deep; rm -rf deep/new; git init -q deep/new;"
        f" {FSMONITOR} >> deep/new/.git/config",
        without="quarantine",
    ),
    Attack(
        name="nested-repository", invariant=9, what="the configuration of one that is there",
        setup=nested, host=look_in("deep/nested"),
        script=f"{FSMONITOR} >> deep/nested/.git/config", without="quarantine",
    ),
    Attack(
        name="hook-of-a-nested-repository", invariant=9, what="and its hooks", setup=nested,
        host=lambda s: s.outside(
            "git", "commit", "-q", "--allow-empty", "-m", "x", cwd=s.project / "deep/nested"
        ),
        script=f"cd deep/nested/.git/hooks; {HOOK} > pre-commit; chmod +x pre-commit",
        without="quarantine",
    ),
    Attack(
        name="filter-of-a-nested-repository", invariant=9, what="attributes and a filter",
        setup=nested, host=look_in("deep/nested"),
        script="""
            cd deep/nested; echo '* filter=evil' > .gitattributes; touch file
            printf '[filter "evil"]\\n\\tclean = "touch %s; cat"\\n' $marker >> .git/config
        """, without="quarantine",
    ),
    Attack(
        name="include-of-a-nested-repository", invariant=9, what="a file that is included",
        setup=nested, host=look_in("deep/nested"),
        script=f"cd deep/nested; {FSMONITOR} > settings;"
        " printf '[include]\\n\\tpath = ../settings\\n' >> .git/config",
        without="quarantine",
    ),
    Attack(
        name="repository-in-another-directory", invariant=9, what="made writable by --rw",
        setup=lambda s: repository(s, s.home / "other"),
        host=lambda s: s.outside("git", "status", cwd=s.home / "other"),
        flags=("--rw", "~/other"), script=f"{FSMONITOR} >> $home/other/.git/config",
        without="quarantine",
    ),
    Attack(
        name="bare-repository", invariant=9, what="files that look like one, in any directory",
        setup=repository, host=look_in("docs"),
        script=f"{OWN_REPOSITORY} own docs; printf '[core]\\n\\tworktree = .\\n' >> docs/config",
        without="quarantine",
    ),
    Attack(
        name="git-file-in-a-directory", invariant=9, what="leads to a repository of its own",
        setup=repository, host=look_in("sub"),
        script=f"{OWN_REPOSITORY} mkdir -p sub; own .e; echo 'gitdir: ../.e' > sub/.git",
        without="quarantine",
    ),
    Attack(
        name="link-for-a-repository", invariant=9, what=".git is a link to one of its own",
        setup=repository, host=look_in("sub"),
        script=f"{OWN_REPOSITORY} mkdir -p sub; own .e; ln -sfn ../.e sub/.git",
        without="quarantine",
    ),
    Attack(
        name="second-name-of-a-config", invariant=9, what="a hard link, changed after the look",
        setup=nested, host=look_in("deep/nested"),
        script=f"""
            ln -f deep/nested/.git/config second 2>/dev/null
            cp deep/nested/.git/config third; {FSMONITOR} >> third
            ln -f third deep/nested/.git/config
        """, without="quarantine",
    ),
    Attack(
        name="planted-before-a-sudden-end", invariant=9, what="the next run must look",
        setup=nested, drive=killed_at_first,
        host=lambda s: look_in("deep/nested")(s) if len(s.codes) == 2 else None,
        script=f"{FSMONITOR} >> deep/nested/.git/config; sleep $mark", then="true",
        without="quarantine",
    ),
)  # fmt: skip

RESTORING = (
    Attack(
        name="restore-through-a-link", invariant=2, what="where a file is put back from quarantine",
        setup=another_repository, host=put_everything_back,
        script=f"git init -q new; {FSMONITOR} >> new/.git/config",
        then="mv new x; ln -s $home/other new", without="restoring through no link",
    ),
)  # fmt: skip

ATTACKS = NAMES + REPOSITORIES + RESTORING


@trials(NAMES)
def test_cannot_plant_what_tools_outside_act_on(trial: Trial) -> None:
    trial.run()


@trials(RESTORING)
def test_cannot_steer_what_is_put_back(trial: Trial) -> None:
    trial.run()


@trials(REPOSITORIES)
def test_cannot_plant_a_repository_that_runs_something(trial: Trial) -> None:
    trial.run()
