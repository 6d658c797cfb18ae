"""Repositories with work that can be lost, git as it is, and git with the guard before it.

The guard is run outside of a sandbox, from the places where a sandbox has it: first on PATH, and in
git's own directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from agent_sandbox.policy import commands

GIT = shutil.which("git") or "/usr/bin/git"

# f: changed. g: changed and staged. u: unknown to git. k: put away, staged as v1, changed to v2.
# Branch side, tag only: commits of their own. origin has a commit of somebody else.
SCENE = r"""
set -e
git init -q --bare origin.git
git init -q work
cd work
git remote add origin ../origin.git
printf 'one\n' >f; printf 'one\n' >g; printf 'one\n' >k
git add f g k; git commit -qm first
git tag base
git push -q origin main
git checkout -q -b side; echo side >s; git add s; git commit -qm side
git rev-parse HEAD >../side
git checkout -q --detach base; echo only >o; git add o; git commit -qm only; git tag only
git rev-parse HEAD >../only
git checkout -q main; echo two >t; git add t; git commit -qm second
git branch merged base
git clone -q ../origin.git ../colleague
cd ../colleague
echo theirs >new; git add new; git commit -qm theirs; git push -q origin main
git rev-parse HEAD >../theirs
git push -q origin main:old main:theirs
git commit -q --allow-empty -m 'old only'; git push -q origin HEAD:old; git rev-parse HEAD >../old
git tag both; git push -q origin both
cd ../work
git tag both only
git fetch -q --no-tags origin
echo v1 >k; git add k; echo v2 >k; git stash push -q
echo mine >>f
echo staged >>g; git add g
echo mine >u
rm -r ../colleague
git repack -q -a -d; git -C ../origin.git repack -q -a -d
"""


class Lab:
    """A directory of one test: the scene, fresh, and how to run git in it."""

    def __init__(self, base: Path, template: Path, guard: Path) -> None:
        self.base = base
        self.guard = guard
        shutil.copytree(template, base, symlinks=True)
        self.work = base / "work"
        self.more: dict[str, str] = {}

    def env(self) -> dict[str, str]:
        return {**clean_env(self.guard.parent), **self.more}

    def plain(self, *argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Git as it is."""
        return run([GIT, *argv], self.work, self.env(), text)

    def guarded(self, *argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Git with the guard before it, also for what git itself starts."""
        env = {**self.env(), "GIT_EXEC_PATH": str(self.guard / "git-core")}
        env["PATH"] = f"{self.guard / 'bin'}:{env['PATH']}"
        return run([str(self.guard / "bin/git"), *argv], self.work, env, text)

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        """A script with git as it is."""
        return run(["sh", "-c", script], self.work, self.env())

    def holds(self, script: str) -> bool:
        """Whether a script says so."""
        return self.sh(script).returncode == 0


def clean_env(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
        "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org",
        "GIT_EDITOR": "true", "GIT_TEMPLATE_DIR": "/nonexistent",
    }  # fmt: skip


def run(
    argv: list[str], cwd: Path, env: dict[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=60, check=False
    )


def install(base: Path, shell: str = "/bin/sh") -> Path:
    """The guard as a sandbox has it: `bin/git` and `git-core/git`; and a home with settings."""
    text = commands.stand_in("git", "@git", shell, GIT)
    core = subprocess.check_output([GIT, "--exec-path"], text=True).strip()
    for name in ("bin", "git-core"):
        (base / name).mkdir(parents=True)
        (base / name / "git").write_text(text)
        (base / name / "git").chmod(0o755)
    for entry in os.scandir(core):
        if entry.name != "git":
            target = os.readlink(entry) if entry.is_symlink() else ""
            place = base / "git-core" / entry.name
            # What is a link to git there leads to the guard here.
            place.symlink_to("git" if target in ("git", "../../bin/git") else entry.path)
    (base.parent / ".gitconfig").write_text(
        '[init]\n\tdefaultBranch = main\n[protocol "file"]\n\tallow = always\n'
        "[advice]\n\tdetachedHead = false\n[gc]\n\tauto = 0\n"
    )
    return base


def make_template(base: Path, home: Path) -> Path:
    base.mkdir()
    subprocess.run(["sh", "-c", SCENE], cwd=base, env=clean_env(home), check=True)
    return base
