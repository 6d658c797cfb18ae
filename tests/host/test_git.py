"""Git's layout around a project, on real repositories."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.host import git
from agent_sandbox.host.facts import Place
from agent_sandbox.host.locate import Locator
from agent_sandbox.policy import triggers
from agent_sandbox.policy.explain import look_up
from agent_sandbox.policy.model import GitLayout, Match
from agent_sandbox.sandbox import prepare

IDENTITY = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": os.environ["PATH"],
}  # fmt: skip


def run(directory: Path, *arguments: str) -> str:
    """Real git."""
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *arguments],
        cwd=directory, env=IDENTITY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def repository(path: Path) -> Path:
    """A repository with one commit."""
    path.mkdir(parents=True)
    run(path, "init", "-q")
    (path / "f").write_text("x")
    run(path, "add", "f")
    run(path, "commit", "-qm", "one")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with a home in it that is nobody's parent."""
    real = Path(os.path.realpath(tmp_path))
    (real / "home").mkdir()
    return real


def layout(path: Path, base: Path, *, strict: bool = False) -> GitLayout | None:
    """What is believed about the repository around a path."""
    home = str(base / "home")
    at = Place(
        path=str(path), real=str(path), kind="dir", uid=os.getuid(), gid=os.getgid(), user="u",
        home=Match(path=home, real=home, kind="dir"), state_dir=f"{home}/state",
    )  # fmt: skip
    return git.layout(at, strict=strict)


def believed(path: Path, base: Path, *, strict: bool = False) -> GitLayout:
    """The layout, which must be there."""
    found = layout(path, base, strict=strict)
    assert found is not None
    return found


def refused(path: Path, base: Path, code: str = "git-link") -> PolicyError:
    """The refusal of a layout."""
    with pytest.raises(PolicyError) as caught:
        layout(path, base)
    assert caught.value.code == code
    assert str(path / ".git") in caught.value.message
    assert caught.value.hint
    return caught.value


def test_without_a_repository_there_is_no_layout(base: Path) -> None:
    """Nor an error."""
    (base / "p").mkdir()
    assert layout(base / "p", base) is None


def test_a_plain_repository_protects_config_and_hooks(base: Path) -> None:
    """And nothing is linked."""
    top = repository(base / "r")
    found = believed(top, base)
    assert (found.top, found.git_dir, found.common_dir) == (str(top), f"{top}/.git", f"{top}/.git")
    assert found.linked is False
    assert {f"{top}/.git/config", f"{top}/.git/hooks/"} <= set(found.control)
    assert found.absent == ()


def test_a_repository_is_found_from_a_subdirectory(base: Path) -> None:
    """The top is where `.git` is."""
    top = repository(base / "r")
    (top / "a/b").mkdir(parents=True)
    assert believed(top / "a/b", base).top == str(top)


def test_missing_hooks_are_listed_to_be_covered(base: Path) -> None:
    """So that they cannot be created inside."""
    top = repository(base / "r")
    shutil.rmtree(top / ".git/hooks")
    assert believed(top, base).absent == (f"{top}/.git/hooks",)


def test_other_control_files_are_protected_where_they_exist(base: Path) -> None:
    """Attributes select filters; config.worktree is configuration."""
    top = repository(base / "r")
    (top / ".git/info").mkdir(exist_ok=True)
    (top / ".git/info/attributes").write_text("* filter=x")
    (top / ".git/config.worktree").write_text("")
    found = set(believed(top, base).control)
    assert {f"{top}/.git/info/attributes", f"{top}/.git/config.worktree"} <= found


def test_a_repository_around_the_home_is_none_of_the_project_s(base: Path) -> None:
    """Dotfiles in a repository at the home do not make the home part of every project."""
    repository(base / "home" / "x")
    shutil.move(base / "home/x/.git", base / "home/.git")
    (base / "home/p").mkdir()
    assert layout(base / "home/p", base) is None


@pytest.mark.parametrize("name", ["w", "w x"])
def test_a_worktree_leads_to_its_main_repository(base: Path, name: str) -> None:
    """Checked in both directions."""
    main = repository(base / "main")
    run(main, "worktree", "add", "-q", "-b", "wb", str(base / name))
    found = believed(base / name, base)
    assert found.linked is True
    assert found.common_dir == f"{main}/.git"
    assert os.path.dirname(found.git_dir) == f"{main}/.git/worktrees"
    assert {f"{main}/.git/config", f"{main}/.git/hooks/", str(base / name / ".git")} <= set(
        found.control
    )
    assert {f"{found.git_dir}/commondir", f"{found.git_dir}/gitdir"} <= set(found.control)


def test_a_main_repository_protects_its_worktrees_control_files(base: Path) -> None:
    """Their `commondir` would redirect git there."""
    main = repository(base / "main")
    run(main, "worktree", "add", "-q", str(base / "w"))
    assert f"{main}/.git/worktrees/w/commondir" in believed(main, base).control


def test_a_submodule_leads_to_its_git_directory(base: Path) -> None:
    """Through core.worktree."""
    inner = repository(base / "inner")
    outer = repository(base / "outer")
    run(outer, "submodule", "--quiet", "add", str(inner), "sub")
    found = believed(outer / "sub", base)
    assert found.linked is True
    assert found.git_dir == found.common_dir == f"{outer}/.git/modules/sub"
    assert {f"{outer}/.git/modules/sub/config", str(outer / "sub/.git")} <= set(found.control)


def test_a_repository_protects_its_submodules_control_files(base: Path) -> None:
    """Host git runs their hooks too; missing hooks are covered as well."""
    inner = repository(base / "inner")
    outer = repository(base / "outer")
    run(outer, "submodule", "--quiet", "add", str(inner), "sub")
    found = believed(outer, base)
    module = f"{outer}/.git/modules/sub"
    assert {f"{module}/config", f"{module}/hooks/"} <= set(found.control)
    shutil.rmtree(f"{module}/hooks")
    assert f"{module}/hooks" in believed(outer, base).absent


# --- What a sandbox could have written ----------------------------------------------------------


def test_cannot_widen_by_a_forged_git_file(base: Path) -> None:
    """A `.git` file that names somebody else's repository is refused."""
    victim = repository(base / "victim")
    (base / "p").mkdir()
    (base / "p/.git").write_text(f"gitdir: {victim}/.git\n")
    refused(base / "p", base)


def test_cannot_widen_by_naming_another_worktree(base: Path) -> None:
    """It points back to its own place."""
    main = repository(base / "main")
    run(main, "worktree", "add", "-q", str(base / "w"))
    (base / "p").mkdir()
    (base / "p/.git").write_text(f"gitdir: {main}/.git/worktrees/w\n")
    refused(base / "p", base)


def test_cannot_widen_by_a_forged_worktree_with_a_foreign_commondir(base: Path) -> None:
    """A git directory inside the project that points back but shares somebody else's objects."""
    victim = repository(base / "victim")
    forged = base / "p/e/worktrees/x"
    forged.mkdir(parents=True)
    (forged / "gitdir").write_text(f"{base}/p/.git\n")
    (forged / "commondir").write_text(f"{victim}/.git\n")
    (base / "p/.git").write_text("gitdir: e/worktrees/x\n")
    refused(base / "p", base)


def test_cannot_widen_by_a_git_directory_that_is_a_link(base: Path) -> None:
    """`.git` as a link, and a `gitdir:` through a link to the home."""
    victim = repository(base / "victim")
    (base / "p").mkdir()
    (base / "p/.git").symlink_to(victim / ".git")
    refused(base / "p", base)
    (base / "q/e/worktrees").mkdir(parents=True)
    (base / "q/e/worktrees/x").symlink_to(base / "home")
    (base / "q/.git").write_text("gitdir: e/worktrees/x\n")
    refused(base / "q", base)


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "gitdir:", "gitdir: ", "gitdir: /no/such\n", "GITDIR: /x", "gitdir: ..\n"],
)
def test_a_git_file_that_makes_no_sense_is_refused(base: Path, text: str) -> None:
    """With a hint, since a sandbox may have written it."""
    (base / "p").mkdir()
    (base / "p/.git").write_text(text)
    refused(base / "p", base)


@pytest.mark.parametrize("kind", ["file", "link", "dir"])
def test_cannot_redirect_a_plain_repository_by_commondir(base: Path, kind: str) -> None:
    """Git would read configuration and hooks from elsewhere."""
    top = repository(base / "r")
    target = top / ".git/commondir"
    if kind == "file":
        target.write_text("/elsewhere\n")
    elif kind == "link":
        target.symlink_to("/no/where")
    else:
        target.mkdir()
    refused(top, base, "git-commondir")


@pytest.mark.parametrize(
    ("link", "target", "leaked"),
    [
        (".git/worktrees/x", "home/.aws", "config"),
        (".git/worktrees", "home", ".aws/config"),
        (".git/modules", "home", "repo/config"),
        (".git/info", "home/notes", "attributes"),
    ],
    ids=["worktree", "worktrees", "modules", "info"],
)
def test_cannot_show_a_secret_by_a_link_among_the_control_files(
    base: Path, link: str, target: str, leaked: str
) -> None:
    """Every control path is real: bwrap follows the source of a bind through a planted link."""
    for name in (".aws/config", "repo/config", "repo/HEAD", "notes/attributes"):
        path = base / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    top = repository(base / "r")
    place = top / link
    if place.is_dir():
        shutil.rmtree(place)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(base / target)
    assert (place / leaked).exists()  # a control: the link leads there
    for shown in believed(top, base).control:
        assert os.path.realpath(shown) == shown.rstrip("/")


@pytest.mark.parametrize("name", ["hooks", "config"])
def test_cannot_leave_a_control_file_unprotected_by_a_link(base: Path, name: str) -> None:
    """A link cannot be covered by a mount, and .git is writable: the start fails (invariant 1)."""
    top = repository(base / "r")
    (top / f".git/{name}").rename(top / f"moved-{name}")
    (top / f".git/{name}").symlink_to(f"../moved-{name}")
    with pytest.raises(PolicyError):
        layout(top, base)


# --- Hooks elsewhere ----------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["relative", "absolute"])
def test_hooks_path_in_the_repository_is_protected(base: Path, spelling: str) -> None:
    """husky and the like keep hooks in the work tree."""
    top = repository(base / "r")
    (top / ".husky").mkdir()
    run(top, "config", "core.hooksPath", ".husky" if spelling == "relative" else f"{top}/.husky")
    assert f"{top}/.husky/" in believed(top, base).control


def test_a_hooks_path_that_does_not_exist_yet_is_covered(base: Path) -> None:
    """Otherwise the sandbox creates what the host's next commit runs (invariant 9)."""
    top = repository(base / "r")
    run(top, "config", "core.hooksPath", ".husky/_")
    assert f"{top}/.husky/_" in believed(top, base).absent


def test_a_hooks_path_outside_is_not_shown(base: Path) -> None:
    """A config line widens nothing."""
    top = repository(base / "r")
    (base / "home/hooks").mkdir()
    run(top, "config", "core.hooksPath", str(base / "home/hooks"))
    assert not any(str(base / "home") in path for path in believed(top, base).control)


# --- @git-strict --------------------------------------------------------------------------------


def test_strict_protects_other_branches_tags_and_packed_refs(base: Path) -> None:
    """The current branch stays usable, and so does the directory for its lock files."""
    top = repository(base / "r")
    for name in ("other", "feature/x"):
        run(top, "branch", name)
    run(top, "tag", "v1")
    (top / ".git/packed-refs").write_text("# pack-refs with: peeled fully-peeled sorted\n")
    heads = f"{top}/.git/refs/heads"
    found = set(believed(top, base, strict=True).control)
    assert {f"{heads}/other", f"{heads}/feature/x", f"{top}/.git/refs/tags/"} <= found
    assert f"{top}/.git/packed-refs" in found
    assert not {f"{heads}/main", f"{heads}/", f"{heads}/feature/"} & found


def test_strict_protects_every_branch_when_detached(base: Path) -> None:
    """There is no current one."""
    top = repository(base / "r")
    run(top, "checkout", "-q", "--detach")
    assert f"{top}/.git/refs/heads/main" in believed(top, base, strict=True).control


def test_strict_works_without_tags_and_packed_refs(base: Path) -> None:
    """Nothing to protect is no error."""
    top = repository(base / "r")
    shutil.rmtree(top / ".git/refs/tags")
    believed(top, base, strict=True)


def test_strict_in_a_worktree_knows_its_own_branch(base: Path) -> None:
    """HEAD is the worktree's, the refs are the main repository's."""
    main = repository(base / "main")
    run(main, "worktree", "add", "-q", "-b", "wb", str(base / "w"))
    found = believed(base / "w", base, strict=True).control
    assert f"{main}/.git/refs/heads/main" in found
    assert f"{main}/.git/refs/heads/wb" not in found


def test_cannot_show_a_secret_by_a_link_among_the_refs(base: Path) -> None:
    """A planted link is no ref to protect."""
    top = repository(base / "r")
    (base / "home/key").write_text("secret")
    (top / ".git/refs/heads/evil").symlink_to(base / "home/key")
    for path in believed(top, base, strict=True).control:
        assert os.path.realpath(path) == path.rstrip("/")


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail instead of hanging."""

    def late(_number: int, _frame: object) -> None:
        pytest.fail(f"took more than {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_cannot_hang_the_next_start_by_links_among_the_refs(base: Path) -> None:
    """Two links to their own directory would be walked 2^40 times."""
    top = repository(base / "r")
    for name in ("a", "b"):
        (top / f".git/refs/heads/{name}").symlink_to(".")
    with at_most(5):
        believed(top, base, strict=True)


# --- The user's configuration -------------------------------------------------------------------


def user_config(home: Path, **env: str) -> dict[str, tuple[str, bool]]:
    """Where git will look → the real file, and whether a copy without credentials replaces it."""
    match = Match(path=str(home), real=str(home), kind="dir")
    return {
        c.path.removeprefix(f"{home}/"): (c.real, c.cleaned is not None)
        for c in git.user_config(match, env, Locator(), str(home / "project"))
    }


def test_includes_are_followed_through_links(base: Path) -> None:
    """~/.gitconfig may be a link into dotfiles, and include more."""
    home = base / "home"
    (home / "dot").mkdir()
    (home / "dot/gitconfig").write_text("[include]\npath = ~/inc/a\n[user]\nname = A\n")
    (home / ".gitconfig").symlink_to("dot/gitconfig")
    (home / "inc").mkdir()
    (home / "inc/a").write_text("[include]\npath = b\n")
    (home / "inc/b").write_text("[github]\ntoken = x\n")
    assert user_config(home) == {
        ".gitconfig": (f"{home}/dot/gitconfig", True),
        "inc/a": (f"{home}/inc/a", True),
        "inc/b": (f"{home}/inc/b", True),
    }


def test_include_cycles_and_missing_includes_end(base: Path) -> None:
    """Each file is read once."""
    home = base / "home"
    (home / ".gitconfig").write_text("[include]\npath = ~/.gitconfig\npath = ~/gone\npath = x\n")
    (home / "x").write_text("[include]\npath = .gitconfig\n")
    assert set(user_config(home)) == {".gitconfig", "x"}


def test_files_of_patterns_are_shown_as_they_are(base: Path) -> None:
    """Ignore and attributes files."""
    home = base / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/ignore").write_text("*.o\n")
    (home / ".gitconfig").write_text("[core]\nexcludesFile = ~/.ignore\n")
    (home / ".ignore").write_text("*.x\n")
    found = user_config(home)
    assert set(found) == {".gitconfig", ".ignore", ".config/git/ignore"}
    assert [found[n][1] for n in (".ignore", ".config/git/ignore")] == [False, False]


def test_moved_configuration_is_shown_at_the_default_place(base: Path) -> None:
    """The variables that moved it are not passed."""
    home = base / "home"
    (base / "moved").write_text("[user]\nname = A\n")
    assert user_config(home, GIT_CONFIG_GLOBAL=f"{base}/moved") == {
        ".gitconfig": (f"{base}/moved", True)
    }


def test_without_configuration_there_is_nothing(base: Path) -> None:
    """A directory of that name neither."""
    (base / "home/.gitconfig").mkdir()
    assert user_config(base / "home") == {}


# --- The whole plan -----------------------------------------------------------------------------


def writable(top: Path, base: Path, path: str) -> bool:
    """Whether a sandbox of the repository could write a path in it."""
    env = {
        "HOME": str(base / "home"), "PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(base / "state"),
    }  # fmt: skip
    request = prepare.Request(argv=("true",), values={}, env=env, cwd=str(top), read_files=False)
    return look_up(prepare.plan(request).plan, f"{top}/{path}").level == "rw"


def test_cannot_create_the_worktree_configuration_that_git_would_read(base: Path) -> None:
    """With extensions.worktreeConfig (sparse checkouts set it) the file is git configuration."""
    top = repository(base / "r")
    assert writable(top, base, ".git/index")  # a control: the rest of .git is writable
    run(top, "config", "extensions.worktreeConfig", "true")
    assert not writable(top, base, ".git/config.worktree")


@pytest.mark.parametrize("exists", [True, False], ids=["existing", "missing"])
def test_cannot_write_hooks_that_the_user_s_own_configuration_names(
    base: Path, exists: bool
) -> None:
    """A relative core.hooksPath in ~/.gitconfig makes the host run hooks of the work tree."""
    top = repository(base / "r")
    (base / "home/.gitconfig").write_text("[core]\n\thooksPath = .githooks\n")
    if exists:
        (top / ".githooks").mkdir()
    assert writable(top, base, "src")
    assert not writable(top, base, ".githooks/pre-commit")


# --- What a red team wrote next -------------------------------------------------------------------


def test_pointers_of_submodules_and_worktrees_are_protected(base: Path) -> None:
    """`gitdir: evil` in one of them makes the host's git run another repository's settings."""
    inner = repository(base / "inner")
    outer = repository(base / "outer")
    run(outer, "submodule", "--quiet", "add", str(inner), "sub")
    run(outer, "worktree", "add", "-q", "-b", "wb", str(outer / "wt"))
    run(outer, "worktree", "add", "-q", "-b", "elsewhere", str(base / "far"))
    found = set(believed(outer, base).control)
    assert {f"{outer}/sub/.git", f"{outer}/wt/.git"} <= found
    assert f"{base}/far/.git" not in found


def test_files_that_the_repository_s_configuration_includes_are_held(base: Path) -> None:
    """There: read-only, with what they include; missing: held by a placeholder."""
    top = repository(base / "r")
    (top / "one").write_text("[include]\npath = two\n")
    (top / "two").write_text("[user]\nname = A\n")
    run(top, "config", "include.path", "../one")
    run(top, "config", "--add", "include.path", "../missing")
    run(top, "config", "--add", "include.path", "~/mine")
    found = believed(top, base)
    assert {f"{top}/one", f"{top}/two"} <= set(found.control)
    assert found.absent_files == (f"{top}/.git/info/attributes", f"{top}/missing")


@pytest.mark.parametrize("what", ["include", "hooks"])
def test_cannot_hold_what_is_reached_through_a_link(base: Path, what: str) -> None:
    """A link in the work tree can be replaced: the start fails."""
    top = repository(base / "r")
    (top / "real").mkdir()
    (top / "real/f").write_text("")
    (top / "link").symlink_to("real")
    key, value = ("include.path", "../link/f") if what == "include" else ("core.hooksPath", "link")
    run(top, "config", key, value)
    with pytest.raises(PolicyError) as caught:
        layout(top, base)
    assert caught.value.code == "git-link"


def test_cannot_switch_protection_off_with_many_modules(base: Path) -> None:
    """More than can be looked at is an error, not a reason to stop looking."""
    top = repository(base / "r")
    for number in range(300):
        module = top / f".git/modules/zz/{number}"
        module.mkdir(parents=True)
        (module / "HEAD").write_text("")
    with pytest.raises(PolicyError) as caught:
        layout(top, base)
    assert caught.value.code == "git-modules"
    assert f"'{top}/.git/modules', and remove it" in caught.value.hint
    assert git.MAX_MODULES == triggers.MAX_MODULES


def test_an_error_about_many_modules_names_those_that_are_used(base: Path) -> None:
    """Whoever has to remove the others must know which."""
    top, library = repository(base / "r"), repository(base / "library")
    run(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    for number in range(300):
        (top / f".git/modules/{number}").mkdir()
        (top / f".git/modules/{number}/HEAD").write_text("")
    with pytest.raises(PolicyError) as caught:
        layout(top, base)
    assert f"'{top}/.git/modules', and remove all but 'lib';" in caught.value.hint


def test_cannot_slow_every_start_down_with_directories_of_modules(base: Path) -> None:
    """Directories in which none is found count, too."""
    top = repository(base / "r")
    for number in range(git.MAX_ENTERED):
        (top / f".git/modules/zz/{number}").mkdir(parents=True)
    with pytest.raises(PolicyError) as caught:
        layout(top, base)
    assert caught.value.code == "git-modules"


def test_an_included_file_of_the_project_names_nothing_to_show(base: Path) -> None:
    """The sandbox may have written it: its excludesFile would be shown in the next run."""
    home = base / "home"
    project = home / "project"
    project.mkdir()
    (home / ".gitconfig").write_text(f"[include]\npath = {project}/inc\n")
    (project / "inc").write_text("[core]\nexcludesFile = ~/.ssh/id\n[include]\npath = ~/x\n")
    for name in (".ssh/id", "x"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("secret")
    assert set(user_config(home)) == {".gitconfig", "project/inc"}
