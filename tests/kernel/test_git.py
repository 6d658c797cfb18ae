"""Git in the sandbox: it works, and what the host's git would execute stays as it was."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from kernel.conftest import World, toml

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.kernel

WORK = """
    set -e
    git status --short >/dev/null
    echo more > new-file; git add new-file; git commit -qm inside
    git branch topic; git switch -q topic; echo x >> new-file; git stash -q; git stash pop -q
    git commit -qam again; git log --format=%s -2; git tag t1; git gc -q
    git diff --stat HEAD~1 >/dev/null; git switch -q -
"""


@pytest.fixture(autouse=True)
def _needs_git() -> None:
    must_work(shutil.which("git"), "needs git")


def git(world: World, *args: str, cwd: Path | None = None) -> str:
    """Git on the host, as the identity."""
    done = world.outside("git", *args, cwd=cwd or world.project)
    assert done.returncode == 0, done.stderr
    return done.stdout


def identity(world: World) -> None:
    world.write(
        "~/.gitconfig",
        "[user]\n\tname = Me\n\temail = me@example.com\n[init]\n\tdefaultBranch = main\n",
    )


def repository(world: World, path: Path | None = None) -> Path:
    """A repository with one commit."""
    path = path or world.project
    if not path.exists():
        world.runner.directory(path)
    if not world.path("~/.gitconfig").exists():
        identity(world)
    git(world, "init", "-q", cwd=path)
    world.write(path / "file", "one\n")
    git(world, "add", ".", cwd=path)
    git(world, "commit", "-qm", "first", cwd=path)
    return path


def works(world: World, cwd: Path) -> None:
    done = world.sh(WORK, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "again\ninside\n"
    assert git(world, "log", "--format=%s", "-1", "topic", cwd=cwd) == "again\n"
    assert git(world, "fsck", "--no-progress", "--no-dangling", cwd=cwd) == ""


# --- it works -------------------------------------------------------------------------------------


def test_can_work_in_a_plain_repository(world: World) -> None:
    """status, add, commit, branch, stash, log, tag and gc; the host sees the result."""
    works(world, repository(world))


def test_can_work_in_a_sub_directory(world: World) -> None:
    """The rest of the repository is readable, its metadata usable, its files read-only."""
    top = repository(world)
    sub = world.mkdir("sub")
    works(world, sub)
    done = world.sh("cat ../file; echo x > ../file", cwd=sub)
    assert done.stdout == "one\n"
    assert done.returncode != 0
    assert (top / "file").read_text() == "one\n"


def test_can_work_in_a_worktree_of_a_repository_elsewhere(world: World) -> None:
    """Objects and refs of the main repository are usable, its working files are not shown."""
    main = repository(world, world.home / "main")
    tree = world.home / "work" / "tree"
    git(world, "worktree", "add", "-q", "-b", "side", str(tree), cwd=main)
    works(world, tree)
    assert world.sh(f"cat {main}/file", cwd=tree).returncode != 0
    for target in (
        f"{main}/.git/hooks/x",
        f"{main}/.git/config",
        f"{tree}/.git",
        f"{main}/.git/worktrees/tree/commondir",
    ):
        assert world.sh(f"echo x >> {target}", cwd=tree).returncode != 0, target
    assert git(world, "status", "--short", cwd=tree) == ""


def test_can_work_in_a_worktree_of_a_bare_repository(world: World) -> None:
    """A bare repository with worktrees beside it."""
    main = repository(world, world.home / "main")
    git(world, "clone", "-q", "--bare", str(main), str(world.home / "bare.git"))
    tree = world.home / "work" / "tree"
    git(world, "worktree", "add", "-q", "-b", "side", str(tree), cwd=world.home / "bare.git")
    works(world, tree)


def test_can_work_in_a_submodule(world: World) -> None:
    """Its git directory lies in the superproject's."""
    library = repository(world, world.home / "library")
    top = repository(world)
    git(
        world,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        str(library),
        "lib",
    )
    git(world, "commit", "-qm", "submodule")
    works(world, top / "lib")
    for target in ("config", "hooks/post-commit"):
        done = world.sh(f"echo x >> {top}/.git/modules/lib/{target}", cwd=top / "lib")
        assert done.returncode != 0, target


def test_can_find_the_identity_through_links_and_includes(world: World) -> None:
    """~/.gitconfig as a link into a dotfiles directory, with an include of another file."""
    world.write(
        "~/dotfiles/gitconfig",
        '[include]\n\tpath = ~/dotfiles/git/me\n[includeIf "gitdir:~/work/"]\n\tpath = work.inc\n',
    )
    world.write("~/dotfiles/git/me", "[user]\n\tname = Included\n")
    world.write("~/dotfiles/work.inc", "[user]\n\temail = work@example.com\n")
    world.write("~/work.inc", "[user]\n\temail = work@example.com\n")
    world.link("~/.gitconfig", "dotfiles/gitconfig")
    git(world, "init", "-q")
    outside = world.outside("git", "config", "user.email").stdout
    done = world.sh("git config user.name; git config user.email; git config --global user.name X")
    assert done.stdout.splitlines() == ["Included", outside.strip()], done.stderr
    assert done.returncode != 0
    assert "Included" in world.path("~/dotfiles/git/me").read_text()


def test_can_use_the_xdg_configuration_and_ignore_file(world: World) -> None:
    """~/.config/git/config and ignore are read."""
    world.write("~/.config/git/config", "[user]\n\tname = Xdg\n\temail = x@example.com\n")
    world.write("~/.config/git/ignore", "*.ignored\n")
    git(world, "init", "-q")
    done = world.sh("touch a.ignored; git config user.name; git status --short")
    assert done.stdout == "Xdg\n", done.stderr


def test_can_commit_although_signing_is_configured(world: World) -> None:
    """The key is not inside, so signing is left out instead of failing every commit."""
    repository(world)
    with world.path("~/.gitconfig").open("a") as file:
        file.write("[commit]\n\tgpgsign = true\n")
    assert world.outside("git", "commit", "-q", "--allow-empty", "-m", "x").returncode != 0
    assert world.sh("git commit -q --allow-empty -m signed").returncode == 0


def test_without_a_repository_nothing_happens(world: World) -> None:
    """No placeholder, no notice."""
    done = world.sh("git status")
    assert done.returncode == 128
    assert os.listdir(world.project) == []


# --- what the host would execute ------------------------------------------------------------------


ATTACKS = {
    "hook": "echo evil > .git/hooks/post-commit",
    "hook through a link": "ln -s /tmp/x .git/hooks/post-commit",
    "delete a hook": "rm .git/hooks/existing",
    "replace the hooks": "mv .git/hooks .git/h && mkdir .git/hooks",
    "config": "git config core.fsmonitor evil",
    "config by hand": "echo '[core] fsmonitor = evil' >> .git/config",
    "replace the config": "(cat .git/config; echo) > c && mv c .git/config",
    "replace .git": "mv .git g && cp -r g .git",
    "swap .git": "mv .git g && git init -q",
    "attributes": "echo '* filter=evil' >> .git/info/attributes",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_cannot_change_what_git_executes(world: World, attack: str) -> None:
    """Hooks, configuration and attributes are read-only and cannot be moved out of the way."""
    repository(world)
    world.write(".git/hooks/existing", "#!/bin/sh\n", 0o755)
    world.write(".git/info/attributes", "")
    before = snapshot(world.project / ".git")
    assert world.sh(ATTACKS[attack]).returncode != 0
    assert snapshot(world.project / ".git") == before
    world.global_config(toml({"filesystem": {"presets": ["!@git"]}}))
    control = world.sh(ATTACKS[attack])
    assert control.returncode == 0, control.stderr
    assert snapshot(world.project / ".git") != before


def snapshot(path: Path) -> dict[str, str]:
    names = [path / "config", path / "info" / "attributes", *sorted((path / "hooks").iterdir())]
    found = {
        str(p): p.read_text() if p.is_file() else os.readlink(p) if p.is_symlink() else "gone"
        for p in names
    }
    return {**found, "inode": str(path.stat().st_ino), "hooks": str((path / "hooks").stat().st_ino)}


def test_cannot_create_hooks_where_there_were_none(world: World) -> None:
    """A repository without a hooks directory gets none, and no placeholder stays on the host."""
    repository(world)
    shutil.rmtree(world.project / ".git" / "hooks")
    script = (
        "mkdir -p .git/hooks; echo evil > .git/hooks/post-commit; git commit -q --allow-empty -m x"
    )
    done = world.sh(script)
    assert done.returncode == 0, done.stderr
    assert not (world.project / ".git" / "hooks").exists()
    assert git(world, "log", "--format=%s", "-1") == "x\n"


def test_a_killed_run_leaves_no_placeholder_for_long(world: World) -> None:
    """kill -9 of the supervisor: the next start of any sandbox removes it."""
    repository(world)
    hooks = world.project / ".git" / "hooks"
    shutil.rmtree(hooks)
    process = world.start("sh", "-c", "echo ready; sleep 1000", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert world.sh("true", cwd=world.mkdir("~/work/other")).returncode == 0
    assert not hooks.exists()


def test_two_runs_share_a_placeholder(world: World) -> None:
    """The first to end must not take the protection of the second away."""
    repository(world)
    hooks = world.project / ".git" / "hooks"
    shutil.rmtree(hooks)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = world.start("sh", "-c", "echo ready; read x", **options)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    attack = (
        "echo ready; read x; mkdir -p .git/hooks; echo evil > .git/hooks/post-commit; echo done"
    )
    second = world.start("sh", "-c", attack, stderr=subprocess.DEVNULL, **options)
    assert second.stdout is not None
    assert second.stdout.readline() == "ready\n"
    first.communicate("\n", 20)
    second.communicate("\n", 20)
    assert not (hooks / "post-commit").exists()
    assert not hooks.exists()


def test_cannot_set_the_hooks_path_of_husky(world: World) -> None:
    """core.hooksPath inside the repository names a directory that the host executes from."""
    repository(world)
    world.write(".husky/pre-commit", "#!/bin/sh\n", 0o755)
    git(world, "config", "core.hooksPath", ".husky")
    assert world.sh("echo evil > .husky/pre-commit").returncode != 0
    assert world.sh("touch .husky/post-commit").returncode != 0
    assert world.sh("mv .husky h").returncode != 0
    assert world.path(".husky/pre-commit").read_text() == "#!/bin/sh\n"


def test_a_planted_commondir_is_refused_at_the_next_start(world: World) -> None:
    """The file cannot be masked in advance, so it is looked for; the control shows what it does."""
    repository(world)
    ran = world.base / "ran"
    evil = (
        "mkdir -p e/hooks e/objects e/refs; cp .git/HEAD e/; cp -r .git/objects .git/refs e/; "
        f"printf '[core]\\n\\trepositoryformatversion = 0\\n\\tfsmonitor = \"touch {ran}; false\"\\n' > e/config; "
        "echo ../e > .git/commondir"
    )
    world.runner.own(world.base)
    done = world.sh(evil)
    planted = world.path(".git/commondir")
    if not planted.exists():
        return
    del done
    world.outside("git", "status")
    assert ran.exists()
    again = world.sh("true")
    assert again.returncode == 125
    assert "commondir" in again.stderr


def test_cannot_widen_with_a_forged_git_file(world: World) -> None:
    """A .git file that names a directory which does not point back is refused."""
    world.write("~/private/key", "s")
    world.write("~/private/.git/worktrees/x/HEAD", "ref: refs/heads/main\n")
    for text in (
        f"gitdir: {world.home}/private\n",
        f"gitdir: {world.home}/private/.git/worktrees/x\n",
        "gitdir: /nowhere\n",
        "garbage\n",
    ):
        world.write(".git", text)
        done = world.sh("cat ~/private/key")
        assert done.returncode == 125, text
        assert "cannot trust" in done.stderr
        world.path(".git").unlink()


def test_cannot_widen_with_a_link_posing_as_a_worktree(world: World) -> None:
    """Everything that the check reads was written by the sandbox: it must not open the home."""
    world.write("~/private/key", "s")
    forged = f"""
        mkdir -p e/.git/worktrees && ln -s {world.home}/private e/.git/worktrees/x
        echo 'gitdir: {world.project}/e/.git/worktrees/x' > .git
    """
    assert world.sh(forged).returncode == 0
    done = world.sh("cat ~/private/key; echo x > ~/private/key")
    assert done.returncode != 0
    assert "s" not in done.stdout.split()
    assert world.path("~/private/key").read_text() == "s"


def test_cannot_widen_with_a_repository_forged_outside_the_project(world: World) -> None:
    """A worktree forged in a second writable directory opens only what was writable anyway."""
    other = world.mkdir("~/other")
    forged = f"""
        mkdir -p {other}/.git/worktrees/x && cd {other}/.git && ln -s {world.home} objects
        echo 'ref: refs/heads/main' > HEAD; mkdir refs; cp HEAD worktrees/x/; echo ../.. > worktrees/x/commondir
        echo '{world.project}/.git' > worktrees/x/gitdir
        echo 'gitdir: {other}/.git/worktrees/x' > {world.project}/.git
    """
    world.write("~/document", "s")
    assert world.sh(forged, "--rw", str(other)).returncode == 0
    done = world.sh("cat ~/document .git/objects/document; ls -A ~")
    assert "s" not in done.stdout.split()


# --- credentials ----------------------------------------------------------------------------------


def test_cannot_read_credentials_of_the_configuration(world: World) -> None:
    """Tokens in ~/.gitconfig, its includes and ~/.git-credentials are not inside; identity is."""
    world.write(
        "~/.gitconfig",
        "[user]\n\tname = Me\n\temail = me@example.com\n"
        "[credential]\n\thelper = store --file ~/.tok-SECRET1\n"
        '[http "https://example.com"]\n\textraHeader = Authorization: SECRET2\n'
        '[url "https://oauth2:SECRET3@example.com/"]\n\tinsteadOf = https://example.com/\n'
        "[github]\n\ttoken = SECRET4\n[include]\n\tpath = ~/.gitsecret\n[alias]\n\tst = status\n",
    )
    world.write("~/.gitsecret", "[gitlab]\n\ttoken = SECRET5\n[core]\n\tpager = cat\n")
    world.write("~/.git-credentials", "https://me:SECRET6@example.com\n")
    git(world, "init", "-q")
    done = world.sh(
        "git config --list; cat ~/.gitconfig ~/.gitsecret ~/.git-credentials; git st --short; grep -rs SECRET ~ /proc/*/environ"
    )
    assert "SECRET" not in done.stdout + done.stderr
    assert "user.name=Me" in done.stdout
    assert "core.pager=cat" in done.stdout
    assert "SECRET4" in world.path("~/.gitconfig").read_text()


def test_other_branches_are_safe_under_git_strict(world: World) -> None:
    """@git-strict: commits on the current branch work, others and tags cannot be moved."""
    repository(world)
    git(world, "branch", "other")
    git(world, "tag", "v1")
    world.global_config(toml({"filesystem": {"presets": ["@git-strict"]}}))
    done = world.sh("echo x >> file; git commit -qam on-main")
    assert done.returncode == 0, done.stderr
    head = git(world, "rev-parse", "v1")
    for attack in (
        "git branch -f other HEAD",
        "git branch -D other",
        "git tag -d v1",
        "git tag v2",
    ):
        assert world.sh(attack).returncode != 0, attack
    assert git(world, "rev-parse", "other", "v1") == head * 2
    world.global_config("")
    assert world.sh("git branch -D other && git tag -d v1").returncode == 0
