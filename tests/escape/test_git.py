"""Git: what the host's git would execute, or where it would look, stays as it was."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from escape.attack import Attack, Scene, Trial, hide, steps, trials

if TYPE_CHECKING:
    from pathlib import Path

    from escape.attack import Step

pytestmark = pytest.mark.kernel

# A program that only the host can run to an effect.
HOOK = "printf '#!/bin/sh\\ntouch %s\\n' $marker"
FSMONITOR = "printf '[core]\\n\\tfsmonitor = \"touch %s; false\"\\n' $marker"
# A git directory of the attacker's own, with everything that git asks for.
OWN_REPOSITORY = f"""
    own() {{
        mkdir -p $1/objects $1/refs; echo 'ref: refs/heads/main' > $1/HEAD
        printf '[core]\\n\\trepositoryformatversion = 0\\n' > $1/config; {FSMONITOR} >> $1/config
    }}
"""


def git(scene: Scene, *args: str, cwd: Path | None = None) -> str:
    """Git on the host, as the identity."""
    done = scene.outside("git", "-c", "protocol.file.allow=always", *args, cwd=cwd or scene.project)
    assert done.returncode == 0, done.stderr
    return done.stdout


def repository(scene: Scene, path: Path | None = None) -> Path:
    """A repository with one commit."""
    must_work(shutil.which("git"), "needs git")
    if not scene.path("~/.gitconfig").exists():
        identity = "[user]\n\tname = Me\n\temail = me@example.com\n[init]\n\tdefaultBranch = main\n"
        scene.write("~/.gitconfig", identity)
    path = path or scene.project
    if not path.exists():
        scene.runner.directory(path)
    git(scene, "init", "-q", cwd=path)
    scene.write(path / "file", "one\n")
    git(scene, "add", ".", cwd=path)
    git(scene, "commit", "-qm", "first", cwd=path)
    return path


def configured(*pairs: str) -> Step:
    """A repository with settings: 'name=value'."""

    def setup(scene: Scene) -> None:
        repository(scene)
        for pair in pairs:
            git(scene, "config", *pair.split("=", 1))

    return setup


def without_hooks(scene: Scene) -> None:
    repository(scene)
    shutil.rmtree(scene.project / ".git" / "hooks")


def worktree(scene: Scene) -> None:
    """The project is a worktree of a repository elsewhere."""
    main = repository(scene, scene.home / "main")
    scene.project.rmdir()
    git(scene, "worktree", "add", "-q", "-b", "side", str(scene.project), cwd=main)
    scene.facts["main"] = str(main)


def worktree_elsewhere(scene: Scene) -> None:
    """The project has a worktree elsewhere, in which the user works."""
    repository(scene)
    side = scene.home / "side"
    git(scene, "worktree", "add", "-q", "-b", "side", str(side))
    scene.facts["side"] = str(side)


def submodule(scene: Scene) -> None:
    """The project has a submodule, 'lib'."""
    library = repository(scene, scene.home / "library")
    repository(scene)
    git(scene, "submodule", "--quiet", "add", str(library), "lib")
    git(scene, "commit", "-qm", "submodule")


def strict(scene: Scene) -> None:
    """@git-strict, with a second branch and a tag that must not move."""
    repository(scene)
    git(scene, "branch", "other")
    git(scene, "tag", "v1")
    scene.global_config('[filesystem]\npresets = ["@git-strict"]\n')
    scene.watch(scene.project / ".git/refs/heads/other")
    scene.watch(scene.project / ".git/refs/tags/v1")


def private_repository(scene: Scene) -> None:
    """Another repository of the user, which no sandbox is to see."""
    scene.hide("~/private/key")
    scene.write("~/private/HEAD", "ref: refs/heads/main\n")


def look(scene: Scene) -> None:
    """What shells, editors and people do all the time."""
    scene.outside("git", "status")


def commit(scene: Scene) -> None:
    look(scene)
    scene.outside("git", "commit", "-q", "--allow-empty", "-m", "mine")


def look_in(name: str) -> Step:
    """`git status` in another directory."""
    return lambda s: s.outside("git", "status", cwd=s.path(s.facts.get(name, name)))


def commit_in_lib(scene: Scene) -> None:
    scene.outside("git", "commit", "-q", "--allow-empty", "-m", "mine", cwd=scene.project / "lib")


ATTACKS = (
    Attack(
        name="new-hook", invariant=9, what="the next commit on the host runs it",
        setup=repository, host=commit,
        script=f"{HOOK} > .git/hooks/post-commit; chmod +x .git/hooks/post-commit",
        without="git control files + quarantine",
    ),
    Attack(
        name="change-a-hook", invariant=9, what="append to one that is there",
        setup=steps(
            repository, lambda s: s.guard(".git/hooks/pre-commit", "#!/bin/sh\n", mode=0o755)
        ),
        host=commit,
        script="echo touch $marker >> .git/hooks/pre-commit",
        without="git control files + quarantine",
    ),
    Attack(
        name="remove-a-hook", invariant=9, what="one that guards something",
        setup=steps(
            repository, lambda s: s.guard(".git/hooks/pre-commit", "#!/bin/sh\n", mode=0o755)
        ),
        script="rm -f .git/hooks/pre-commit", without="git control files",
    ),
    Attack(
        name="hooks-where-there-were-none", invariant=9, what="make the directory",
        setup=without_hooks, host=commit,
        script=f"mkdir .git/hooks; {HOOK} > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
        without="held names + quarantine",
    ),
    Attack(
        name="fsmonitor", invariant=9, what="git status runs what core.fsmonitor says",
        setup=repository, host=look, script=f"{FSMONITOR} >> .git/config",
        without="git control files + quarantine",
    ),
    Attack(
        name="replace-the-config", invariant=9, what="rename another file over it",
        setup=repository, host=look,
        script=f"(cat .git/config; {FSMONITOR}) > c; mv -f c .git/config",
        without="git control files + quarantine",
    ),
    Attack(
        name="replace-the-git-directory", invariant=9, what="mv .git x; cp -r x .git",
        setup=repository, host=look,
        script=f"mv .git x; cp -r x .git; {FSMONITOR} >> .git/config", without="pins + quarantine",
    ),
    Attack(
        name="replace-the-hooks-directory", invariant=9, what="mv .git x; cp -r x .git, and a hook",
        setup=repository, host=commit,
        script=f"mv .git x; cp -r x .git; {HOOK} > .git/hooks/post-commit;"
        " chmod +x .git/hooks/post-commit",
        without="pins + quarantine",
    ),
    Attack(
        name="git-file-for-a-directory", invariant=9, what="move .git away, point elsewhere",
        setup=repository, host=look,
        script=f"{OWN_REPOSITORY} mv .git x; own e; echo 'gitdir: e' > .git",
        without="pins + quarantine",
    ),
    Attack(
        name="hooks-path", invariant=9, what="core.hooksPath lies in the project",
        setup=steps(
            configured("core.hooksPath=ci/hooks"),
            lambda s: s.guard("ci/hooks/pre-commit", "#!/bin/sh\n", mode=0o755),
        ),
        host=commit,
        script=f"echo touch $marker >> ci/hooks/pre-commit; {HOOK} > ci/hooks/post-commit;"
        " chmod +x ci/hooks/post-commit",
        without="git control files + quarantine",
    ),
    Attack(
        name="hooks-path-missing", invariant=9, what="core.hooksPath names a missing directory",
        setup=configured("core.hooksPath=ci/hooks"), host=commit,
        script=f"mkdir -p ci/hooks; {HOOK} > ci/hooks/pre-commit; chmod +x ci/hooks/pre-commit",
        without="held names + quarantine",
    ),
    Attack(
        name="hooks-path-of-the-user", invariant=9, what="~/.gitconfig names a relative directory",
        setup=steps(
            repository, lambda s: git(s, "config", "--global", "core.hooksPath", "ci/hooks"),
            lambda s: s.mkdir("ci/hooks"),
        ),
        host=commit,
        script=f"{HOOK} > ci/hooks/pre-commit; chmod +x ci/hooks/pre-commit",
        without="git control files",
    ),
    Attack(
        name="included-file", invariant=9, what="the configuration includes a file of the project",
        setup=steps(
            configured("include.path=../.gitsettings"),
            lambda s: s.guard(".gitsettings", "# shared\n"),
        ),
        host=look, script=f"{FSMONITOR} >> .gitsettings", without="git control files + quarantine",
    ),
    Attack(
        name="included-file-missing", invariant=9, what="it includes a file that is not there",
        setup=configured("include.path=../.gitsettings"),
        host=look, script=f"{FSMONITOR} > .gitsettings", without="held names + quarantine",
    ),
    Attack(
        name="worktree-config", invariant=9, what="config.worktree where git would read it",
        setup=configured(
            "core.repositoryFormatVersion=1", "extensions.worktreeConfig=true"
        ),
        host=look, script=f"{FSMONITOR} > .git/config.worktree", without="held names + quarantine",
    ),
    Attack(
        name="git-file-of-a-worktree", invariant=9, what="point it to a repository of one's own",
        setup=worktree, host=look,
        script=f"{OWN_REPOSITORY} own e; echo 'gitdir: e' > .git;"
        " echo 'gitdir: e' > n; mv -f n .git",
        without="git control files + quarantine",
    ),
    Attack(
        name="commondir-of-a-worktree", invariant=9, what="configuration from another place",
        setup=worktree, host=look,
        script=f"{OWN_REPOSITORY} own e; echo $project/e > $main/.git/worktrees/project/commondir",
        without="git control files + quarantine",
    ),
    Attack(
        name="commondir-of-a-worktree-elsewhere", invariant=9, what="the user works there",
        setup=worktree_elsewhere, host=look_in("side"),
        script=f"{OWN_REPOSITORY} own e; echo $project/e > .git/worktrees/side/commondir",
        without="git control files + quarantine",
    ),
    Attack(
        name="submodule-config", invariant=9, what="a submodule's git directory is git's, too",
        setup=submodule, host=look_in("lib"),
        script=f"{FSMONITOR} >> .git/modules/lib/config", without="git control files + quarantine",
    ),
    Attack(
        name="submodule-hooks", invariant=9, what="hooks of a submodule",
        setup=submodule, host=commit_in_lib,
        script=f"{HOOK} > .git/modules/lib/hooks/pre-commit;"
        " chmod +x .git/modules/lib/hooks/pre-commit",
        without="git control files + quarantine",
    ),
    Attack(
        name="git-file-of-a-submodule", invariant=9, what="point it elsewhere",
        setup=submodule, host=look_in("lib"),
        script=f"{OWN_REPOSITORY} own e; echo 'gitdir: ../e' > n; mv -f n lib/.git",
        without="git control files + quarantine",
    ),
    Attack(
        name="move-a-protected-branch", invariant=2, what="branch -f, tag -d, by hand",
        setup=strict,
        script="""
            echo x >> file; git commit -qam x; git branch -f other HEAD; git tag -d v1
            git rev-parse HEAD > .git/refs/heads/other; rm -f .git/refs/tags/v1
        """, without="references of @git-strict",
    ),
    Attack(
        name="forged-git-file", invariant=4, what="a .git file that names a private directory",
        setup=private_repository, script='echo "gitdir: $home/private" > .git',
        then="cat $home/private/key", may_stop=(2,),
        without="a repository points back + quarantine",
    ),
    Attack(
        name="link-posing-as-a-worktree", invariant=4, what="the git directory is a link",
        setup=private_repository,
        script="""
            mkdir -p e/.git/worktrees; ln -sfn $home/private e/.git/worktrees/x
            echo "gitdir: $project/e/.git/worktrees/x" > .git
        """, then="cat $home/private/key", may_stop=(2,),
        without="a repository points back + quarantine",
    ),
    Attack(
        name="credentials-of-git", invariant=7, what="tokens in ~/.gitconfig and its includes",
        setup=lambda s: [
            s.write("~/.gitconfig", "[include]\n\tpath = ~/.gitmore\n"),
            s.write(
                "~/.gitmore",
                f'[http "https://x"]\n\textraHeader = Authorization: {s.secret}\n'
                f'[url "https://me:{s.secret}@x/"]\n\tinsteadOf = https://x/\n',
            ),
        ],
        script="git config --list; cat $home/.gitconfig $home/.gitmore",
        without="git credentials taken out",
    ),
    Attack(
        name="git-settings-in-the-project", invariant=4, what="name a key as the ignore file",
        setup=steps(
            hide("~/.ssh/id"),
            lambda s: [s.write("gitconfig"), s.link("~/.gitconfig", "work/project/gitconfig")],
        ),
        script="printf '[core]\\n\\texcludesFile = ~/.ssh/id\\n' > gitconfig",
        then="cat $home/.ssh/id", without="git settings of the project name nothing",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_make_git_work_for_the_attacker(trial: Trial) -> None:
    trial.run()
