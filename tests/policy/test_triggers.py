"""What a change to a control file means, on snapshots made up here."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.policy import delayed, gitcontrol, triggers
from agent_sandbox.policy.triggers import (
    ANYWHERE,
    BARE,
    CLEANED,
    FORBIDDEN,
    GIT,
    HOOKS,
    INCLUDED,
    INFO,
    LINK_MARK,
    LISTED,
    MODULES,
    NOTABLE,
    QUARANTINED,
    QUIET,
    RESTORED,
    TODO,
    WORKTREES,
    Finding,
    Snapshot,
    context_below,
    is_critical,
    wanted,
)
from conftest import must_work

FILE, LINK, DIRECTORY = 0o100644, 0o120777, 0o040311
CLEAN = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
EVIL = CLEAN + b"\tfsmonitor = ./evil\n"


class Made:
    """A snapshot in the making."""

    def __init__(self) -> None:
        self.items: dict[str, triggers.Item] = {}
        self.texts: dict[str, bytes | None] = {}
        self.repositories: dict[str, tuple[int, int]] = {}

    def put(
        self,
        path: str,
        text: bytes | None,
        context: str = ANYWHERE,
        mode: int = FILE,
        names: int = 1,
    ) -> Made:
        size = len(text or b"")
        self.items[path] = (context, (mode, 1, 1, size, 0, 0, 7, 8, names))
        self.texts[path] = text
        return self

    def repository(self, path: str, inode: int = 1, config: bytes = CLEAN) -> Made:
        self.repositories[path] = (1, inode)
        return self.put(f"{path}/config", config, GIT)

    def snapshot(self, *, complete: bool = True) -> Snapshot:
        return Snapshot(
            items=self.items, text=self.texts.get, repositories=self.repositories, complete=complete
        )


def compared(before: Made, after: Made) -> tuple[Finding, ...]:
    """Findings other than that a repository is new."""
    changed = [
        p for p in {*before.items, *after.items}
        if before.items.get(p) != after.items.get(p) or before.texts.get(p) != after.texts.get(p)
    ]  # fmt: skip
    found = delayed.compare(before.snapshot(), after.snapshot(), changed)
    return tuple(f for f in found if f.what != "a new repository")


def one(before: Made, after: Made) -> Finding:
    (found,) = compared(before, after)
    return found


# --- the walk's rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "context"),
    [
        ("src", ANYWHERE),
        ("a/.vscode", ".vscode"),
        (".github/workflows/deep", ".github/workflows"),
        (".github/other", ANYWHERE),
        (".claude/hooks/x", ".claude/hooks"),
        (".claude/worktrees/x", ANYWHERE),
        (".claude/worktrees/x/.vscode", ".vscode"),
        ("node_modules/x/y", QUIET),
        ("node_modules/x/.vscode", QUIET),
        ("node_modules/x/.git", GIT),
        ("a/.git/hooks/sub", HOOKS),
        (".git/info", INFO),
        (".git/worktrees/x", GIT),
        (".git/modules/a/b", MODULES),
        (".git/rebase-merge", TODO),
    ],
)
def test_a_directory_has_the_context_of_its_place(path: str, context: str) -> None:
    found = ANYWHERE
    for part in path.split("/"):
        found = context_below(found, part)
    assert found == context


def test_a_bare_repository_keeps_what_mattered_there_before() -> None:
    """Else a planted HEAD would make the watched files of a directory disappear."""
    bare = ".husky" + BARE
    assert triggers.is_whole(bare)
    assert context_below(bare, "hooks") == HOOKS
    assert context_below(bare, "other") == ".husky"
    assert {"config", "commondir", "Makefile"} <= wanted(BARE)
    assert {"config", ".git"} <= wanted(QUIET + BARE)
    assert is_critical(BARE, "/p/config")
    assert not is_critical(BARE, "/p/Makefile")


def test_every_name_that_opens_a_context_counts_as_a_link() -> None:
    assert {".vscode", ".idea", ".husky", ".git", "HEAD"} <= wanted(ANYWHERE)
    assert "node_modules" not in wanted(ANYWHERE)


# --- git configuration ----------------------------------------------------------------------------

HARMLESS = (
    "core.bare=true", "core.autocrlf=input", "user.name=A B", "user.email=a@b", "color.ui=auto",
    "remote.origin.url=https://example.org/x.git", "remote.origin.url=git@example.org:x.git",
    "remote.origin.fetch=+refs/heads/*:refs/remotes/origin/*", "branch.a.b/c.merge=refs/heads/a",
    "branch.main.remote=origin", "submodule.lib.url=../lib", "submodule.lib.active=true",
    "submodule.lib.update=rebase", "commit.gpgsign=false", "advice.detachedhead=false",
    "extensions.objectformat=sha256", "filter.lfs.clean=git-lfs clean -- %f",
    "branch.x.description=uses std::map",
)  # fmt: skip
HARMFUL = (
    "core.fsmonitor=./x", "core.fsmonitor=true", "core.hookspath=x", "core.sshcommand=x",
    "core.editor=x", "core.pager=x", "core.attributesfile=x", "core.gitproxy=x",
    "core.askpass=x", "core.worktree=/home/me", "core.sharedrepository=0666",
    "include.path=x", "includeif.gitdir:/.path=x", "alias.st=!x", "filter.x.clean=x",
    "filter.lfs.clean=evil", "diff.external=x", "diff.x.textconv=x", "merge.x.driver=x",
    "credential.helper=x", "credential.https://e.helper=x", "protocol.ext.allow=always",
    "url.https://evil/.insteadof=https://example.org/", "http.proxy=x", "gpg.program=x",
    "remote.origin.uploadpack=x", "remote.origin.vcs=x", "remote.origin.url=ext::sh -c x",
    "branch.main.remote=ext::sh -c x", "extensions.partialclone=ext::sh",
    "submodule.lib.update=!x", "submodule.lib.url=-x", "sequence.editor=x", "trailer.x.command=x",
    "gc.recentobjectshook=x", "hook.x.command=x", "uploadpack.packobjectshook=x", "pager.log=x",
    "interactive.difffilter=x", "core.bare=!x", "user.name=!x", "core.x.bare=true",
    "safe.directory=*", "lfs.customtransfer.x.path=x", "maintenance.repo=x", "new.setting=x",
)  # fmt: skip


def written(name: str) -> bytes:
    """A setting as a line of a file."""
    key, _, value = name.partition("=")
    section, _, rest = key.partition(".")
    subsection, dot, last = rest.rpartition(".")
    if section == "url":
        subsection, last = rest.rsplit(".", 1)
    header = f'[{section} "{subsection}"]' if dot else f"[{section}]"
    return f'{header}\n\t{last} = "{value}"\n'.encode()


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_setting_is_nothing(name: str) -> None:
    before = Made().repository("/p/a/.git")
    after = Made().repository("/p/a/.git", config=CLEAN + written(name))
    assert compared(before, after) == ()
    assert compared(Made(), after) == ()


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_setting_is_put_back_or_taken_out(name: str) -> None:
    before = Made().repository("/p/a/.git")
    after = Made().repository("/p/a/.git", config=CLEAN + written(name))
    found = one(before, after)
    assert (found.severity, found.remedy, found.instead) == (FORBIDDEN, RESTORED, CLEAN)
    fresh = one(Made(), after)
    assert (fresh.severity, fresh.remedy) == (FORBIDDEN, CLEANED)
    assert fresh.instead is not None
    kept = gitcontrol.parse(fresh.instead)
    assert kept == gitcontrol.parse(CLEAN)


def test_a_users_own_harmful_settings_may_stay_and_go() -> None:
    """Only what is new or in another order counts."""
    own = CLEAN + b"[alias]\n\ta = !one\n\tb = !two\n"
    before = Made().repository("/p/a/.git", config=own)
    with_name = Made().repository("/p/a/.git", config=own + b"[user]\n\tname = x\n")
    assert compared(before, with_name) == ()
    without = Made().repository("/p/a/.git", config=CLEAN + b"[alias]\n\tb = !two\n")
    assert compared(before, without) == ()
    turned = Made().repository("/p/a/.git", config=CLEAN + b"[alias]\n\tb = !two\n\ta = !one\n")
    assert one(before, turned).remedy == RESTORED


def test_a_repository_in_anothers_place_is_judged_as_a_new_one() -> None:
    """Removed and cloned again: the old configuration does not belong there."""
    before = Made().repository("/p/a/.git", inode=1, config=EVIL)
    clean = Made().repository("/p/a/.git", inode=2)
    assert compared(before, clean) == ()
    evil = Made().repository("/p/a/.git", inode=2, config=CLEAN + b"\tpager = ./evil\n")
    assert one(before, evil).remedy == CLEANED


@pytest.mark.parametrize(
    "text",
    [
        b"[core] fsmonitor = ./x\n",
        b"[core]fsmonitor = ./x # ]\n",
        b'[core "x"]fsmonitor = "a"]\n',
        b"[core]\n\tbare = tr\\\nue\n",
        b'[core]\n\tbare = "true\n\tfsmonitor = x\n',
        b"[core]\r\n\tbare = true\r\n",
        b"\xef\xbb\xbf[core]\n\tbare = true\n",
        b'[core "hookspath\0"]\n\tbare = x\n',
        b"[core]\n\tbare\0 = x\n",
        b"bare = x\n",
        b"[core]\n\tbare = x\\q\n",
        b"[core]\n\t=x\n",
        b"[core\n]\n",
        b'[core"x"]\n\tbare = true\n',
        b"[]\n\tbare = true\n",
        b"[core]\n\tbare true\n",
        b"[core]\n\x0bfsmonitor = x\n",
    ],
)
def test_a_configuration_that_git_would_not_write_is_not_judged_harmless(text: bytes) -> None:
    assert gitcontrol.parse(text) is None
    found = one(Made(), Made().repository("/p/a/.git", config=text))
    assert (found.severity, found.remedy) == (FORBIDDEN, QUARANTINED)


def test_cannot_make_the_comparison_take_for_ever() -> None:
    """Many settings, many pointers to one configuration, many configurations: each ends soon."""
    many = b"".join(b"\ta%d = !x\n" % n for n in range(8000))
    names = b"".join(b"\tname = %d\n" % n for n in range(8000))
    after = Made().repository("/p/a/.git", config=b"[alias]\n" + many + b"[user]\n" + names)
    after.repository("/p/.git/modules/m", config=b"[user]\n" + names)
    for number in range(2000):
        after.put(f"/p/{number}/.git", b"gitdir: ../.git/modules/m\n")
    begun = time.process_time()
    found = compared(Made(), after)
    assert time.process_time() - begun < 20
    assert {f.severity for f in found} == {FORBIDDEN}
    assert len(found) == 2002


def test_a_configuration_that_there_is_no_time_for_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delayed, "MAX_JUDGED", 0)
    before = Made().repository("/p/a/.git")
    after = Made().repository("/p/a/.git", config=CLEAN + b"[user]\n\tname = x\n")
    found = one(before, after)
    assert (found.remedy, found.instead) == (RESTORED, CLEAN)


def test_a_configuration_that_cannot_be_read_is_put_away() -> None:
    before = Made().repository("/p/a/.git")
    for mode, text in ((LINK, LINK_MARK + b"x"), (FILE, None), (0o010644, None)):
        after = Made()
        after.repositories["/p/a/.git"] = (1, 1)
        after.put("/p/a/.git/config", text, GIT, mode)
        found = one(before, after)
        assert (found.severity, found.remedy, found.instead) == (FORBIDDEN, RESTORED, CLEAN)


def test_an_included_file_is_judged_as_configuration() -> None:
    before = Made().put("/p/a/.gitconfig", b"[user]\n\tname = x\n", INCLUDED)
    after = Made().put("/p/a/.gitconfig", b"[core]\n\tpager = x\n", INCLUDED)
    assert one(before, after).remedy == RESTORED


def test_a_changed_address_of_a_remote_is_worth_a_look() -> None:
    old = CLEAN + b'[remote "origin"]\n\turl = https://example.org/a\n'
    new = old.replace(b"example.org", b"evil.example")
    before = Made().repository("/p/a/.git", config=old)
    found = one(before, Made().repository("/p/a/.git", config=new))
    assert (found.severity, found.what) == (NOTABLE, "changed: remote.origin.url")
    assert compared(Made(), Made().repository("/p/a/.git", config=new)) == ()


def test_the_mode_and_the_owner_come_back_with_the_content() -> None:
    before = Made().repository("/p/a/.git")
    after = Made().repository("/p/a/.git", config=EVIL)
    found = one(before, after)
    assert (found.mode, found.owner) == (FILE, (7, 8))


LINES = st.sampled_from(
    [
        "[core]", '[core "a b"]', "[core.X]", '[remote "o\\"x"]', '[remote "a\\\\b"]', "[a-b]",
        "\tbare = true", "\tBare=true", "key", " key2 = a b  c ", 'k = "a  b" # x', "k = a ; b",
        'k = "a # b"', "k = a\\tb", 'k = \\"x\\"', "k = !x", "k =", "# c", "; c", "", "\t", "[",
        "]", "[core", '[core "x]', "k = \\", "=x", "k-1 = 2", "1k = 2", "k = a\\\\", 'k = "',
        "[core] k = v", '["x"]', "[core]]", "k = [core]", "K = ü", "k = a=b", "k\t=\tv\t",
    ]
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(LINES, max_size=6))
def test_what_is_judged_is_what_git_reads(tmp_path: Path, lines: list[str]) -> None:
    """A text that is accepted means the same to git; and what is rendered anew does, too."""
    must_work(shutil.which("git"), "needs git")
    data = "\n".join(lines).encode()
    parsed = gitcontrol.parse(data)
    if parsed is None:
        return
    file = tmp_path / "config"

    def read_by_git(text: bytes) -> list[tuple[str, str | None]] | None:
        file.write_bytes(text)
        done = subprocess.run(
            ["git", "config", "-f", str(file), "--null", "--list"], capture_output=True, check=False
        )
        if done.returncode:
            return None
        rows = [row.partition("\n") for row in done.stdout.decode().split("\0")[:-1]]
        return [(name, value if newline else None) for name, newline, value in rows]

    ours = [(gitcontrol.name(e), None if e.bare else e.value) for e in parsed]
    theirs = read_by_git(data)
    if theirs is not None:
        assert ours == theirs
        assert read_by_git(gitcontrol.rendered(parsed)) == theirs


# --- hooks, pointers, commondir -------------------------------------------------------------------


def test_a_hook_is_put_away_or_put_back() -> None:
    hook = "/p/a/.git/hooks/pre-commit"
    new = one(Made(), Made().put(hook, b"#!/bin/sh\n", HOOKS, 0o100755))
    assert (new.severity, new.remedy, new.instead) == (FORBIDDEN, QUARANTINED, None)
    before = Made().put(hook, b"mine", HOOKS, 0o100755)
    found = one(before, Made().put(hook, b"theirs", HOOKS, 0o100755))
    assert (found.remedy, found.instead, found.mode) == (RESTORED, b"mine", 0o100755)


def test_a_hook_that_becomes_executable_is_put_back() -> None:
    hook = "/p/a/.git/hooks/pre-commit"
    found = one(Made().put(hook, b"x", HOOKS), Made().put(hook, b"x", HOOKS, 0o100755))
    assert (found.remedy, found.mode) == (RESTORED, FILE)


def test_a_users_own_hook_may_move_with_its_repository() -> None:
    before = Made().put("/p/a/.git/hooks/pre-push", b"mine", HOOKS)
    after = Made().put("/p/b/.git/hooks/pre-push", b"mine", HOOKS)
    assert compared(before, after) == ()
    renamed = Made().put("/p/b/.git/hooks/pre-commit", b"mine", HOOKS)
    assert one(before, renamed).severity == FORBIDDEN


def test_a_users_own_settings_may_move_with_their_repository() -> None:
    """But not those that name a file in the work tree: there it is another file."""
    own = CLEAN + b"[alias]\n\ta = !one\n[include]\n\tpath = x\n"
    before = Made().repository("/p/a/.git", config=own)
    moved = Made().repository("/p/b/.git", config=CLEAN + b"[alias]\n\ta = !one\n")
    assert compared(before, moved) == ()
    with_include = Made().repository("/p/b/.git", config=own)
    assert one(before, with_include).remedy == CLEANED


def test_a_removed_hook_is_worth_a_look() -> None:
    before = Made().repository("/p/a/.git").put("/p/a/.git/hooks/pre-push", b"x", HOOKS)
    found = one(before, Made().repository("/p/a/.git"))
    assert (found.severity, found.what) == (NOTABLE, "a hook was removed")
    assert compared(before, Made()) == ()


def test_a_link_is_never_harmless_where_git_expects_its_own() -> None:
    for path, context in (
        ("/p/a/.git", ANYWHERE), ("/p/node_modules/a/.git", QUIET), ("/p/a/.git/hooks", GIT),
        ("/p/a/.git/modules", GIT), ("/p/a/.git/modules/x", MODULES), ("/p/b/hooks", BARE),
        ("/p/a/.git/worktrees/x", WORKTREES), ("/p/a/.git/info/attributes", INFO),
        ("/p/a/.git/hooks/pre-commit", HOOKS), ("/p/a/.git/commondir", GIT),
    ):  # fmt: skip
        found = one(Made(), Made().put(path, LINK_MARK + b"/x", context, LINK))
        assert (found.severity, found.remedy) == (FORBIDDEN, QUARANTINED), path


def worktree(common: str = "/p/.git", tree: str = "/p/wt", back: str = "") -> Made:
    """A worktree as `git worktree add` makes it."""
    home = f"{common}/worktrees/wt"
    made = Made().repository(common)
    made.repositories[home] = (1, 2)
    made.put(f"{home}/commondir", b"../..\n", GIT)
    made.put(f"{home}/gitdir", (back or f"{tree}/.git").encode() + b"\n", GIT)
    return made.put(f"{tree}/.git", f"gitdir: {home}\n".encode())


def submodule(named: str = "../../../lib") -> Made:
    """A submodule as `git submodule add` makes it."""
    home = "/p/.git/modules/lib"
    made = Made().repository("/p/.git")
    made.repository(home, config=CLEAN + f"\tworktree = {named}\n".encode())
    return made.put("/p/lib/.git", b"gitdir: ../.git/modules/lib\n")


def test_a_new_worktree_and_a_new_submodule_are_nothing() -> None:
    before = Made().repository("/p/.git")
    assert compared(before, worktree()) == ()
    assert compared(before, submodule()) == ()


@pytest.mark.parametrize(
    "text",
    [
        b"gitdir: /p/.git\n",
        b"gitdir: ../.git/worktrees/wt/../wt\n",
        b"gitdir: /home/me/.git\n",
        b"gitdir:/home/me/.git",
        b"gitdir: /p/.git/worktrees/wt\n\n/x",
        b"gitdir: ",
    ],
)
def test_a_pointer_that_is_not_answered_is_put_away(text: bytes) -> None:
    after = worktree().put("/p/x/.git", text)
    found = one(worktree(), after)
    assert (found.path, found.severity, found.remedy) == ("/p/x/.git", FORBIDDEN, QUARANTINED)


def test_a_pointer_that_was_bent_is_put_back() -> None:
    after = submodule().put("/p/lib/.git", b"gitdir: /home/me/.git\n")
    found = one(submodule(), after)
    assert (found.remedy, found.instead) == (RESTORED, b"gitdir: ../.git/modules/lib\n")


def test_a_git_file_that_points_nowhere_is_nothing() -> None:
    """Tests of programs make such files to mark a root."""
    assert compared(Made(), Made().put("/p/x/.git", b"")) == ()
    assert compared(Made(), Made().put("/p/x/.git", b"marker")) == ()


@pytest.mark.parametrize("named", ["/home/me", "../../../other", "../../../lib/../../home", ".."])
def test_a_work_tree_elsewhere_is_taken_out(named: str) -> None:
    """A checkout would write there."""
    found = [f for f in compared(Made(), submodule(named)) if f.path.endswith("/config")]
    assert [f.remedy for f in found] == [CLEANED]


def test_a_work_tree_around_its_own_repository_is_nothing() -> None:
    after = Made().repository("/p/a/.git", config=CLEAN + b"\tworktree = /p/a\n")
    assert compared(Made(), after) == ()


def test_commondir_belongs_only_to_a_worktree() -> None:
    for path, text in (
        ("/p/.git/commondir", b"../evil\n"), ("/p/.git/commondir", b"."),
        ("/p/.git/worktrees/wt/commondir", b"/evil\n"), ("/p/x/worktrees/wt/commondir", b"../..\n"),
    ):  # fmt: skip
        every = compared(Made().repository("/p/.git"), worktree().put(path, text, GIT))
        assert [(f.path, f.severity) for f in every if f.path == path] == [(path, FORBIDDEN)], text
    found = one(worktree(), worktree().put("/p/.git/worktrees/wt/commondir", b"/evil", GIT))
    assert (found.remedy, found.instead) == (RESTORED, b"../..\n")


def test_a_worktree_entry_may_lead_nowhere_but_not_elsewhere() -> None:
    """An agent's worktree in /tmp is gone with the sandbox."""
    before = Made().repository("/p/.git")
    after = worktree(back="/tmp/wt/.git")
    del after.items["/p/wt/.git"]
    assert compared(before, after) == ()
    assert one(worktree(), worktree(back="/p/other/.git")).remedy == RESTORED


def test_attributes_of_a_repository_must_not_name_a_driver() -> None:
    path = "/p/a/.git/info/attributes"
    for text in (b"* filter=x\n", b"* -text diff=mine", b'"a b" merge=x', b"[attr]m filter=x"):
        assert one(Made(), Made().put(path, text, INFO)).severity == FORBIDDEN, text
    for text in (b"* text=auto\n", b"*.py diff=python", b"* merge=union", b"* -filter"):
        assert compared(Made(), Made().put(path, text, INFO)) == (), text
    before = Made().put(path, b"* filter=mine", INFO)
    assert compared(before, Made().put(path, b"* filter=mine\n*.c text", INFO)) == ()


def test_a_second_name_of_a_control_file_is_cut() -> None:
    """Under its other name it could be written by a run that does not watch this one."""
    before = Made().repository("/p/a/.git")
    after = Made().repository("/p/a/.git")
    after.put("/p/a/.git/config", CLEAN, GIT, names=2)
    found = one(before, after)
    assert (found.severity, found.remedy, found.instead) == (FORBIDDEN, CLEANED, CLEAN)
    assert compared(after, after) == ()


def test_a_rebase_that_would_run_something_is_worth_a_look() -> None:
    path = "/p/.git/rebase-merge/git-rebase-todo"
    before = Made().put(path, b"pick a\nexec make test\n", TODO)
    assert compared(before, Made().put(path, b"exec make test\n", TODO)) == ()
    found = one(before, Made().put(path, b"pick a\n x\trm -rf /\n", TODO))
    assert (found.severity, found.what) == (NOTABLE, "a rebase would run: rm -rf /")


@pytest.mark.parametrize(
    "path",
    [
        "rebase-merge/strategy", "rebase-merge/strategy_opts", "rebase-merge/gpg_sign_opt",
        "rebase-apply/apply-opt", "rebase-apply/0001", "sequencer/opts", "rebase-merge/new",
    ],
)  # fmt: skip
def test_a_change_to_how_a_rebase_goes_on_is_worth_a_look(path: str) -> None:
    """Its strategy names a program. What git itself rewrites at each step is nothing."""
    home = "/p/.git/" + path.partition("/")[0]
    before = Made().put(f"{home}/message", b"x", TODO)
    after = Made().put(f"{home}/message", b"y", TODO)
    assert compared(before, after) == ()
    found = one(before, after.put(f"/p/.git/{path}", b"x", TODO))
    assert (found.path, found.severity) == (f"/p/.git/{path}", NOTABLE)


def test_a_rebase_that_was_begun_is_named_once() -> None:
    """Whatever its files are called, and with the commands in it."""
    home = "/p/.git/rebase-merge"
    after = Made().put(f"{home}/git-rebase-todo", b"exec evil\n", TODO)
    after.put(f"{home}/strategy", b"evil", TODO).put(f"{home}/message", b"", TODO)
    found = one(Made(), after)
    assert (found.path, found.severity, found.who) == (home, NOTABLE, "git")
    assert found.what.endswith("it would run: evil")
    assert "would run" not in one(Made(), Made().put(f"{home}/x", b"", TODO)).what
    assert compared(after, Made()) == ()


def test_so_many_modules_that_no_sandbox_would_start_are_named() -> None:
    home = "/p/.git/modules"
    before = Made().snapshot().replace(crowds={home: {"own"}})
    after = Made().snapshot().replace(crowds={home: {"own", "a", "b"}})
    (found,) = delayed.compare(before, after, [])
    assert (found.path, found.severity) == (home, NOTABLE)
    assert found.what.endswith("remove these 2 new ones: a, b")
    assert delayed.compare(after, after, []) == ()


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "context", "severity", "who"),
    [
        ("/p/.envrc", ANYWHERE, NOTABLE, "direnv"),
        ("/p/.vscode/tasks.json", ".vscode", NOTABLE, "VS Code"),
        ("/p/x.code-workspace", ANYWHERE, NOTABLE, "VS Code"),
        ("/p/.github/workflows/ci.yml", ".github/workflows", NOTABLE, "CI"),
        ("/p/.claude/hooks/a/b", ".claude/hooks", NOTABLE, "claude"),
        ("/p/.husky/modules", ".husky", NOTABLE, "git hooks"),
        ("/p/.husky/pre-commit", ".husky" + BARE, NOTABLE, "git hooks"),
        ("/p/venv/pyvenv.cfg", ANYWHERE, NOTABLE, "python"),
        ("/p/Makefile", ANYWHERE, LISTED, "make"),
        ("/p/Makefile", BARE, LISTED, "make"),
    ],
)
def test_a_file_of_the_table_is_named_with_who_acts_on_it(
    path: str, context: str, severity: str, who: str
) -> None:
    found = one(Made(), Made().put(path, b"x", context))
    assert (found.severity, found.who, found.what, found.remedy) == (severity, who, "new", "")


def test_a_link_in_the_place_of_a_watched_directory_is_named() -> None:
    found = one(Made(), Made().put("/p/.vscode", LINK_MARK + b"x", ANYWHERE, LINK))
    assert (found.who, found.what) == ("VS Code", "a new link")
    assert compared(Made(), Made().put("/p/.vscode", b"x")) == ()


def test_an_empty_or_removed_file_is_nothing() -> None:
    assert compared(Made(), Made().put("/p/.envrc", b"")) == ()
    assert compared(Made(), Made().put("/p/.envrc", None, mode=0o140600)) == ()
    assert compared(Made(), Made().put("/p/.mcp.json", b"{}\n")) == ()
    assert compared(Made().put("/p/.envrc", b"x"), Made()) == ()


def test_only_changed_scripts_of_a_package_are_named() -> None:
    old = b'{"scripts": {"test": "a", "lint": "b"}, "version": "1"}'
    before = Made().put("/p/package.json", old)
    same = Made().put("/p/package.json", old.replace(b'"1"', b'"2"'))
    assert compared(before, same) == ()
    new = Made().put(
        "/p/package.json", b'{"scripts": {"test": "c", "lint": "b", "prepare": "x"}, "husky": {}}'
    )
    assert one(before, new).what == "scripts: husky, prepare, test"
    broken = Made().put("/p/package.json", b"{" * 100_000)
    assert one(before, broken).what == "scripts: (cannot be parsed)"
    assert compared(Made(), Made().put("/p/package.json", b"[]")) == ()


def test_only_attributes_with_a_new_driver_are_named() -> None:
    path = "/p/.gitattributes"
    before = Made().put(path, b"*.psd filter=lfs\n")
    assert compared(before, Made().put(path, b"*.psd filter=lfs\n*.md text")) == ()
    found = one(before, Made().put(path, b"*.psd filter=lfs diff=evil"))
    assert (found.severity, found.what) == (NOTABLE, "names diff evil")


def test_a_virtual_environment_counts_only_when_it_is_new() -> None:
    before = Made().put("/p/venv/pyvenv.cfg", b"a")
    assert compared(before, Made().put("/p/venv/pyvenv.cfg", b"b")) == ()


def test_a_closed_directory_is_named_and_put_away_where_git_would_enter() -> None:
    found = one(Made(), Made().put("/p/a/", None, ANYWHERE, DIRECTORY))
    assert (found.severity, found.what) == (NOTABLE, "cannot be looked into")
    hooks = one(Made(), Made().put("/p/a/.git/hooks/", None, HOOKS, DIRECTORY))
    assert (hooks.severity, hooks.remedy) == (FORBIDDEN, QUARANTINED)
    shut = one(Made(), Made().put("/p/a/.git/hooks/", None, HOOKS, 0o040000))
    assert shut.severity == NOTABLE


def test_new_repositories_are_listed_without_their_inner_parts() -> None:
    before = Made()
    after = worktree().repository("/p/.git/modules/x").repository("/p/b.git")
    after.repositories["/p/b.git/worktrees/y"] = (1, 9)
    found = delayed.compare(before.snapshot(), after.snapshot(), [])
    assert [(f.path, f.severity) for f in found] == [("/p/.git", LISTED), ("/p/b.git", LISTED)]


def test_what_could_not_be_compared_is_said() -> None:
    made = Made()
    (found,) = delayed.compare(made.snapshot(), made.snapshot(complete=False), [])
    assert (found.severity, "not all were compared" in found.what) == (NOTABLE, True)


def test_nothing_is_moved_that_may_have_been_there_before() -> None:
    """A look that was cut off knows only a part of what the user had."""
    after = Made().put("/p/a/.git/hooks/x", b"x", HOOKS)
    found = delayed.compare(Made().snapshot(complete=False), after.snapshot(), [*after.items])
    assert [f.severity for f in found] == [NOTABLE]


def test_the_gravest_comes_first() -> None:
    after = (
        Made().put("/p/Makefile", b"x").put("/p/.envrc", b"x").put("/p/z/.git/hooks/x", b"", HOOKS)
    )
    assert [f.severity for f in compared(Made(), after)] == [FORBIDDEN, NOTABLE, LISTED]
