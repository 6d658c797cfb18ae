"""Delayed execution (invariant 9): what a run plants for the host's tools is put away at its end.

The control of each attack is the same run with `!@git`: then nothing is put away, and the host's
git does run what was planted.
"""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import must_work
from kernel.conftest import World, end_group, eventually, toml

pytestmark = pytest.mark.kernel

UNPROTECTED = toml({"filesystem": {"presets": ["!@git"]}})


@pytest.fixture(autouse=True)
def _needs_git() -> None:
    must_work(shutil.which("git"), "needs git")


def git(world: World, *args: str, cwd: Path | None = None, check: bool = True) -> str:
    """Git on the host, as the identity."""
    done = world.outside("git", *args, cwd=cwd or world.project)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def repository(world: World, path: Path) -> Path:
    """A repository with one commit, and a user who may commit."""
    if not path.exists():
        world.runner.directory(path)
    if not world.path("~/.gitconfig").exists():
        world.write(
            "~/.gitconfig",
            "[user]\n\tname = Me\n\temail = me@example.com\n[init]\n\tdefaultBranch = main\n"
            '[protocol "file"]\n\tallow = always\n',
        )
    git(world, "init", "-q", cwd=path)
    world.write(path / "file", "one\n")
    git(world, "add", ".", cwd=path)
    git(world, "commit", "-qm", "first", cwd=path)
    return path


def quarantined(world: World) -> list[str]:
    """Paths in quarantine, relative to the project."""
    done = world.ctl("quarantine", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["files"]
    return sorted(os.path.relpath(row["path"], world.project) for row in rows)


# --- attacks --------------------------------------------------------------------------------------

# The script that runs inside, and the command of the host that would run $EVIL.
ATTACKS = {
    "config of a nested repository": (
        'git -C nested config core.fsmonitor "$EVIL"',
        "git -C nested status",
    ),
    "hook of a nested repository": (
        'cp "$EVIL" nested/.git/hooks/post-checkout',
        "git -C nested checkout -q -b x",
    ),
    "hooks path of a nested repository": (
        'mkdir nested/h; cp "$EVIL" nested/h/post-checkout; git -C nested config core.hooksPath h',
        "git -C nested checkout -q -b x",
    ),
    "included configuration of a nested repository": (
        'printf "[core]\\n\\tfsmonitor = %s\\n" "$EVIL" > nested/i; git -C nested config include.path ../i',
        "git -C nested status",
    ),
    "configuration of a worktree": (
        'git -C nested config extensions.worktreeConfig true; git -C nested config --worktree core.fsmonitor "$EVIL"',
        "git -C nested status",
    ),
    "new repository": (
        'git init -q fresh; git -C fresh config core.fsmonitor "$EVIL"; touch fresh/f; git -C fresh add f',
        "git -C fresh status",
    ),
    "new repository below node_modules": (
        'git init -q node_modules/a/b; git -C node_modules/a/b config core.fsmonitor "$EVIL"',
        "git -C node_modules/a/b status",
    ),
    "repository that stands in the open": (
        'git init -q --bare src/data; cd src/data; git config core.bare false; git config core.worktree .; git config core.fsmonitor "$EVIL"',
        "git -C src/data status",
    ),
    "commondir of the main repository": (
        'cp -r .git other; printf "[core]\\n\\tfsmonitor = %s\\n" "$EVIL" >> other/config; echo ../other > .git/commondir',
        "git status",
    ),
    "commondir of a nested repository": (
        'cp -r nested/.git nested/o; git config -f nested/o/config core.fsmonitor "$EVIL"; echo ../o > nested/.git/commondir',
        "git -C nested status",
    ),
    "pointer to another repository": (
        'mkdir sub hidden; cp -r nested/.git hidden/x; git config -f hidden/x/config core.fsmonitor "$EVIL"; echo "gitdir: ../hidden/x" > sub/.git',
        "git -C sub status",
    ),
    "link in place of a repository": (
        'cp -r nested/.git x; git config -f x/config core.fsmonitor "$EVIL"; mkdir sub; ln -s ../x sub/.git',
        "git -C sub status",
    ),
    "new submodule": (
        'mkdir -p lib .git/modules; git init -q --separate-git-dir .git/modules/lib lib; git -C lib config core.worktree "$PWD/lib"; git -C lib config core.fsmonitor "$EVIL"',
        "git -C lib status",
    ),
    "attributes of a nested repository": (
        'echo "* filter=mine" > nested/.git/info/attributes; touch nested/file',
        "git -C nested -c filter.mine.clean=$EVIL add file",
    ),
    "configuration behind a second name": (
        'rm nested/.git/config; git config -f innocent core.fsmonitor "$EVIL"; ln innocent nested/.git/config',
        "git -C nested status",
    ),
    "hook in a directory that cannot be listed": (
        'cp "$EVIL" nested/.git/hooks/post-checkout; chmod 311 nested/.git/hooks',
        "git -C nested checkout -q -b x",
    ),
    "hook in a directory that cannot be written": (
        'cp "$EVIL" nested/.git/hooks/post-checkout; chmod 555 nested/.git/hooks',
        "git -C nested checkout -q -b x",
    ),
    "configuration in a directory that cannot be listed": (
        'git -C nested config core.fsmonitor "$EVIL"; chmod 311 nested',
        "git -C nested status",
    ),
    "configuration that spells it another way": (
        'printf "[CORE]fsMonitor=\\\\\\n%s\\n" "$EVIL" >> nested/.git/config',
        "git -C nested status",
    ),
}  # fmt: skip


def attack(world: World, name: str) -> tuple[str, bool]:
    """Plant, and let the host's git walk into it; tells what was said and whether it ran."""
    inside, outside = ATTACKS[name]
    repository(world, world.project)
    repository(world, world.project / "nested")
    marker = world.home / "marker"
    evil = world.write("evil.sh", f"#!/bin/sh\ntouch {marker}\ncat\n", 0o755)
    done = world.sh(f"EVIL={evil}\nset -e\numask 022\n{inside}")
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    world.outside("sh", "-c", outside.replace("$EVIL", str(evil)))
    return done.stderr, marker.exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_can_make_the_host_run_it_without_the_protection(world: World, name: str) -> None:
    """The control: `!@git` only reports."""
    world.global_config(UNPROTECTED)
    said, ran = attack(world, name)
    assert "left in place, because @git is off" in said
    assert ran


@pytest.mark.parametrize("name", ATTACKS)
def test_cannot_make_the_hosts_git_run_something(world: World, name: str) -> None:
    said, ran = attack(world, name)
    assert "quarantined: " in said
    assert not ran
    assert quarantined(world) != []


def test_cannot_hide_behind_a_killed_supervisor(world: World) -> None:
    """The next run knows what was there before the one that nobody ended."""
    world.global_config(toml({"filesystem": {"presets": ["!@control"]}}))
    hook = repository(world, world.project / "nested") / ".git" / "hooks" / "post-checkout"
    script = "echo '#!/bin/sh' > nested/.git/hooks/post-checkout; echo ready; exec sleep 1000"
    process = world.start("sh", "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    end_group(process)
    assert hook.exists()
    done = world.sandbox("true")
    assert done.returncode == 0, done.stderr
    assert "1 file quarantined: nested/.git/hooks/post-checkout" in done.stderr
    assert not hook.exists()


def test_cannot_pass_a_plant_to_a_second_sandbox(world: World) -> None:
    """The second one starts while the first one's hook lies there, and plants it once more."""
    hook = repository(world, world.project / "nested") / ".git" / "hooks" / "post-checkout"
    plant = "printf '#!/bin/sh\\n' > nested/.git/hooks/post-checkout; echo ready; read x"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    first = world.start("sh", "-c", plant, **pipes)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    second = world.start("sh", "-c", f"echo up; read x; {plant}", **pipes)
    assert second.stdout is not None
    assert second.stdout.readline() == "up\n"
    assert len(os.listdir(world.state / "scans" / "open")) == 2
    _, said = first.communicate("\n")
    assert "1 file quarantined" in said
    assert not hook.exists()
    assert second.stdin is not None
    second.stdin.write("\n")
    second.stdin.flush()
    assert second.stdout.readline() == "ready\n"
    assert hook.exists()
    _, said = second.communicate("\n")
    assert "1 file quarantined" in said
    assert not hook.exists()
    end_group(first)
    end_group(second)


def test_cannot_change_a_file_outside_by_a_link_at_the_end(world: World) -> None:
    """Whatever stands in the way of putting a configuration back is not followed."""
    repository(world, world.project / "nested")
    precious = world.write("~/precious", "precious")
    done = world.sh(f"ln -sf {precious} nested/.git/config; ln -s {world.home} nested/.git/hooks/x")
    assert done.returncode == 0, done.stderr
    assert "2 files quarantined" in done.stderr
    assert precious.read_text() == "precious"
    assert git(world, "status", "--short", cwd=world.project / "nested") == ""


# --- what stays undisturbed -----------------------------------------------------------------------

WORK = {
    "git init": "git init -q new; cd new; echo x > f; git add f; git commit -qm one",
    "git init here": "git init -q; echo x > f; git add f; git commit -qm one",
    "git clone": "git clone -q nested cloned; cd cloned; echo x > f; git add f; git commit -qm x",
    "git clone --bare": "git clone -q --bare nested copy.git",
    "git worktree add": "git -C nested worktree add -q -b side ../side; cd side; echo x > f; git add f; git commit -qm x",
    "git worktree add elsewhere": "git -C nested worktree add -q -b side /tmp/side",
    "git submodule add": "git clone -q nested library; git -C nested submodule --quiet add ../library lib; git -C nested commit -qm lib",
    "git config": "git -C nested config user.name Other; git -C nested config pull.rebase true",
    "git remote add": "git -C nested remote add upstream https://example.org/x.git; git -C nested branch topic; git -C nested config branch.topic.remote upstream",
    "git commit": "cd nested; echo x > f; git add f; git commit -qm two; git switch -q -c b; git gc -q",
    "git rebase": "cd nested; echo x > f; git add f; git commit -qm two; git rebase -q --root",
    "a moved repository": "mv nested moved",
    "a copied repository": "cp -r nested copied",
    "a removed and cloned repository": "git clone -q nested n2; rm -rf nested; git clone -q n2 nested",
    "a touched configuration": "touch nested/.git/config nested/.git/hooks/pre-push",
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_can_work_with_git_undisturbed(world: World, name: str) -> None:
    """A nested repository of the user's, with a hook and an alias of their own."""
    nested = repository(world, world.project / "nested")
    world.write(nested / ".git" / "hooks" / "pre-push", "#!/bin/sh\n# mine\n", 0o755)
    git(world, "config", "alias.mine", "!echo mine", cwd=nested)
    done = world.sh(f"set -e; {WORK[name]}")
    assert done.returncode == 0, done.stderr
    assert "quarantined" not in done.stderr
    assert "warning" not in done.stderr
    assert quarantined(world) == []
    for found in world.project.glob("**/.git"):
        git(world, "status", "--short", cwd=found.parent)


def test_says_nothing_when_nothing_was_found(world: World) -> None:
    nested = repository(world, world.project / "nested")
    world.write(nested / ".git" / "hooks" / "pre-push", "#!/bin/sh\n", 0o755)
    world.write("package.json", '{"scripts": {"test": "true"}}')
    done = world.sh("echo x > src.c; touch package.json; cp package.json p; mv p package.json")
    assert (done.returncode, done.stderr) == (0, "")


# --- what is said ---------------------------------------------------------------------------------


def test_names_what_tools_outside_would_act_on(world: World) -> None:
    world.write("package.json", '{"scripts": {"test": "true"}, "version": "1"}')
    world.mkdir("a")
    done = world.sh(
        'echo \'{"scripts": {"test": "true", "prepare": "x"}, "version": "2"}\' > package.json;'
        "mkdir -p a/.github/workflows; echo x > a/.github/workflows/ci.yml; echo all: > Makefile",
        "--report",
        str(world.home / "report.json"),
    )
    assert done.stderr == (
        "agent-sandbox: notice: changed, and acted on by tools outside: "
        "a/.github/workflows/ci.yml (CI), package.json scripts: prepare (npm), Makefile (make)\n"
    )
    changes = json.loads((world.home / "report.json").read_text())["changes"]
    assert [(os.path.relpath(c["path"], world.project), c["severity"]) for c in changes] == [
        ("a/.github/workflows/ci.yml", "notable"),
        ("package.json", "notable"),
        ("Makefile", "listed"),
    ]


def test_keeps_the_commands_exit_code_and_tells_where_it_went(world: World) -> None:
    nested = repository(world, world.project / "nested")
    hook = nested / ".git" / "hooks" / "pre-commit"
    report = world.home / "report.json"
    done = world.sh("echo evil > nested/.git/hooks/pre-commit; exit 7", "--report", str(report))
    assert done.returncode == 7
    assert (
        "hooks/pre-commit (a hook that git would run) (see 'sandboxctl quarantine')" in done.stderr
    )
    (change,) = json.loads(report.read_text())["changes"]
    assert (change["severity"], change["action"]) == ("forbidden", "quarantined")
    shown = world.ctl("quarantine", "show", change["id"])
    assert "evil" in shown.stdout
    # Put back by the user, it stays, also through a run that began before.
    assert world.ctl("quarantine", "restore", change["id"]).returncode == 0
    assert hook.read_text() == "evil\n"
    assert world.sandbox("true").stderr == ""
    assert world.sh("echo other > nested/.git/hooks/pre-commit").stderr.count("quarantined") == 1
    assert hook.read_text() == "evil\n"


def test_quarantine_is_out_of_reach(world: World) -> None:
    repository(world, world.project / "nested")
    world.sh("echo evil > nested/.git/hooks/pre-commit")
    assert (world.state / "quarantine").exists()
    done = world.sh(f"ls {world.state}")
    assert done.returncode != 0 or done.stdout == ""


def test_the_library_tells_what_has_changed(world: World) -> None:
    repository(world, world.project / "nested")
    done = world.python(
        """
import asyncio, subprocess
from agent_sandbox import Policy, Sandbox
box = Sandbox(Policy(project="."))
plant = ["sh", "-c", "echo evil > nested/.git/hooks/pre-commit"]
def said(changes):
    return [(c.path.rpartition("/")[2], c.severity, c.action) for c in changes]
print(said(box.run(plant).changes))
with box.popen(plant) as process:
    process.wait()
print(said(process.changes))
with box.wrap(plant) as wrapped:
    subprocess.run(wrapped.argv, pass_fds=wrapped.fds, env=wrapped.env, check=True)
print(said(wrapped.changes))
async def main():
    print(said((await box.arun(plant)).changes))
    async with await box.apopen(plant) as process:
        await process.wait()
    print(said(process.changes))
asyncio.run(main())
print(box.run(["true"]).changes)
"""
    )
    assert done.returncode == 0, done.stderr
    one = "[('pre-commit', 'forbidden', 'quarantined')]"
    assert done.stdout.splitlines() == [one] * 5 + ["()"]
    assert done.stderr == ""
    assert os.listdir(world.state / "scans" / "open") == []


@pytest.mark.parametrize(
    ("plant", "use"),
    [
        ("rm -f .git/COMMIT_EDITMSG; ln -s {target} .git/COMMIT_EDITMSG", "commit -q --allow-empty -m x"),
        ("rm -f .git/FETCH_HEAD; ln -s {target} .git/FETCH_HEAD", "fetch -q ."),
        ("rm -f .git/logs/HEAD; ln -s {target} .git/logs/HEAD", "commit -q --allow-empty -m x"),
    ],
    ids=["message", "fetch", "log"],
)  # fmt: skip
def test_cannot_make_git_write_elsewhere(world: World, plant: str, use: str) -> None:
    """Git outside writes through a link in its directory. Control: with !@git it does."""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
    world.outside(*git, "init", "-q")
    world.outside(*git, "commit", "-q", "--allow-empty", "-m", "first")
    target = world.write("~/profile", "mine\n")
    world.sh(plant.format(target=target))
    world.outside(*git, *use.split())
    assert target.read_text() == "mine\n"
    world.sh(plant.format(target=target), "-c", str(world.write("~/off.toml", OFF)))
    world.outside(*git, *use.split())
    assert target.read_text() != "mine\n"


OFF = '[filesystem]\npresets = ["!@git"]\n'


def test_cannot_plant_a_held_directory_that_was_removed_outside_unseen(world: World) -> None:
    """The keeper makes placeholders again, but not for ever: what is made instead is named."""
    script = (
        "mkdir prep; echo '{\"tasks\": []}' > prep/tasks.json; touch go; "
        "until mv -T prep .vscode 2>/dev/null; do :; done; ls .vscode"
    )
    process = world.start("sh", "-c", script, stdout=-1, stderr=-1)
    assert eventually(world.path("go").exists)

    def taken() -> bool:
        """`git clean -d`, again and again."""
        with suppress(OSError):
            world.path(".vscode").rmdir()
        return world.path(".vscode/tasks.json").exists()

    assert eventually(taken)
    out, err = process.communicate(timeout=30)
    assert "tasks.json" in out
    assert ".vscode/tasks.json" in err


# --- operations of git that were begun ------------------------------------------------------------


def conflicting(world: World) -> Path:
    """A repository with a branch that cannot be rebased onto main without a conflict."""
    path = repository(world, world.project)
    git(world, "switch", "-q", "-c", "side", cwd=path)
    for name, text in (("file", "side\n"), ("more", "more\n")):
        world.write(path / name, text)
        git(world, "add", ".", cwd=path)
        git(world, "commit", "-qm", name, cwd=path)
    git(world, "switch", "-q", "main", cwd=path)
    world.write(path / "file", "main\n")
    git(world, "commit", "-qam", "second", cwd=path)
    git(world, "switch", "-q", "side", cwd=path)
    return path


def test_cannot_change_a_rebase_that_was_begun_unseen(world: World) -> None:
    """Its strategy is the name of a program. Control: git on the host does run it."""
    path = conflicting(world)
    git(world, "rebase", "main", cwd=path, check=False)
    marker = world.home / "marker"
    script = f"""
        mkdir git-merge-x; printf '#!/bin/sh\ntouch {marker}\nexit 1\n' > evil; chmod +x evil
        echo x/../evil > .git/rebase-merge/strategy; echo both > file; git add file
    """
    done = world.sh(script)
    assert done.returncode == 0, done.stderr
    assert ".git/rebase-merge/strategy" in done.stderr
    world.outside("git", "-c", "core.editor=true", "rebase", "--continue", cwd=path)
    assert marker.exists()


@pytest.mark.parametrize(
    ("begin", "name"),
    [
        ("git rebase main", "rebase-merge"),
        ("git rebase --apply main", "rebase-apply"),
        ("git revert --no-edit HEAD~1 HEAD~2 || true; git cherry-pick main main~1", "sequencer"),
    ],
)
def test_an_operation_that_was_begun_is_named(world: World, begin: str, name: str) -> None:
    """Once, as a whole; and going on with one that the user had begun is nothing."""
    conflicting(world)
    done = world.sh(f"{begin} >/dev/null 2>&1; ls .git")
    assert name in done.stdout.split()
    assert done.stderr.count(f".git/{name} (git: begun") == 1
    assert world.sandbox("true").stderr == ""


def test_going_on_with_a_rebase_is_nothing(world: World) -> None:
    path = conflicting(world)
    git(world, "rebase", "main", cwd=path, check=False)
    script = "echo both > file; git add file; GIT_EDITOR=true git rebase --continue >/dev/null 2>&1"
    done = world.sh(f"{script}; git log --oneline | wc -l")
    assert (done.stdout.strip(), done.stderr) == ("4", "")


# --- what would stop or mislead the next run ------------------------------------------------------


def test_cannot_stop_the_next_start_unseen(world: World) -> None:
    """So many submodules that they cannot be protected: named by both runs, with what to do."""
    repository(world, world.project)
    plant = "mkdir -p .git/modules/m$i; touch .git/modules/m$i/HEAD"
    done = world.sh(f"for i in $(seq 260); do {plant}; done")
    assert done.returncode == 0
    assert ".git/modules (git: 260 directories, and with" in done.stderr
    assert "remove these 260 new ones: m1, m10, m100," in done.stderr
    stopped = world.sandbox("true")
    assert stopped.returncode == 125
    assert f"look into '{world.project}/.git/modules', and remove it" in stopped.stderr
    shutil.rmtree(world.project / ".git/modules")
    assert world.sandbox("true").returncode == 0


# Runs the command line with a comparison that fails.
FAILING = """
import sys
from agent_sandbox.policy import delayed
from agent_sandbox.host import triggers
def compare(*_): raise MemoryError("too much")
delayed.compare = compare
{more}
from agent_sandbox.cli.run import main
sys.exit(main(sys.argv[1:]))
"""


FORGETTING = """
import os
def forget(watch):
    if watch._lock >= 0:
        os.unlink(f"{watch._base}/open/{watch.run}")
        os.close(watch._lock)
        watch._lock = -1
triggers.Watch.abandon = forget
"""


@pytest.mark.parametrize("forgets", [False, True], ids=["kept", "control"])
def test_cannot_make_a_plant_the_users_own_by_a_failed_comparison(
    world: World, forgets: bool
) -> None:
    """The record stays, and the next run makes up for it. Control: without it, it is accepted."""
    hook = repository(world, world.project / "nested") / ".git" / "hooks" / "post-checkout"
    code = FAILING.format(more=FORGETTING if forgets else "")
    plant = "echo '#!/bin/sh' > nested/.git/hooks/post-checkout"
    done = world.python(code, "sh", "-c", plant)
    assert done.returncode == 0
    assert "warning: control files could not be compared" in done.stderr
    assert hook.exists()
    later = world.sandbox("true")
    assert ("1 file quarantined" in later.stderr) is not forgets
    assert hook.exists() is forgets
    assert os.listdir(world.state / "scans" / "open") == []
