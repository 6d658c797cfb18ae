"""`@git` refuses what loses work, and nothing else. Each refusal has its control with plain git."""

from __future__ import annotations

import itertools
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from policy import gitlab
from policy.gitguard_rows import ALLOWED, HOOK, KEPT, REFUSED, F, U

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], gitlab.Lab]:
    """Makes fresh labs."""
    base: Path = tmp_path_factory.mktemp("git")
    guard = gitlab.install(base / "guard")
    template = gitlab.make_template(base / "template", base)

    def make() -> gitlab.Lab:
        return gitlab.Lab(base / f"lab-{next(_numbers)}", template, guard)

    return make


HELD: dict[str, gitlab.Lab] = {}


def _scene(lab: Callable[[], gitlab.Lab], before: str) -> gitlab.Lab:
    one = lab()
    one.more = {"NO_HOOKS": "/dev/null", "FILTER_BRANCH_SQUELCH_WARNING": "1"}
    if before:
        one.sh(before)
    return one


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_loses_work(name: str, lab: Callable[[], gitlab.Lab]) -> None:
    argv, lost, before, text = REFUSED[name]
    control = _scene(lab, before)
    # What was refused has left everything as it was: good for the next one.
    held = HELD.get(before) or HELD.setdefault(before, _scene(lab, before))
    for one in (control, held):
        assert not one.holds(lost), "nothing to lose"
    done = control.plain(*argv, text=text)
    assert control.holds(lost), f"plain git loses nothing here: {done.stdout}{done.stderr}"
    done = held.guarded(*argv, text=text)
    assert not held.holds(lost), done.stdout + done.stderr
    assert "is blocked in this sandbox" in done.stderr
    assert "\nhint: " in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("name", ALLOWED)
def test_lets_through_what_loses_nothing(name: str, lab: Callable[[], gitlab.Lab]) -> None:
    argv, holds, before = ALLOWED[name]
    one = _scene(lab, before)
    done = one.guarded(*argv)
    assert "blocked" not in done.stderr
    assert one.holds(holds), done.stdout + done.stderr


@pytest.mark.parametrize(
    "argv",
    [[], ["chekout", "."], ["--help"], ["checkout", "nowhere"], ["log", "--bogus"], ["-C"],
     ["commit", "-m", "x", "--", "nowhere"], ["bogus"], ["reset", "nowhere"], ["stash", "bogus"]],
)  # fmt: skip
def test_mistakes_are_for_git_to_name(argv: list[str], lab: Callable[[], gitlab.Lab]) -> None:
    one, other = lab(), lab()
    plain, guarded = one.plain(*argv), other.guarded(*argv)
    assert guarded.stdout == plain.stdout
    assert guarded.stderr == plain.stderr
    assert guarded.returncode == plain.returncode
    assert guarded.returncode != 0 or argv == ["--help"]


def test_environment_settings_are_seen(lab: Callable[[], gitlab.Lab]) -> None:
    for key, value, argv in (
        ("alias.z", "reset --hard", ["z"]),
        ("core.hooksPath", "/dev/null", ["commit", "-m", "x"]),
        ("clean.requireForce", "false", ["clean"]),
    ):
        settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": key, "GIT_CONFIG_VALUE_0": value}
        control, held = lab(), lab()
        for one in (control, held):
            one.sh(HOOK)
            one.more = settings
        before = held.sh("git status; git log -1; cat f").stdout
        assert control.plain(*argv).returncode == 0
        assert control.sh("git status; git log -1; cat f").stdout != before
        assert held.guarded(*argv).returncode == 126
        assert held.sh("git status; git log -1; cat f").stdout == before


def test_options_git_does_not_know_are_not_guessed(lab: Callable[[], gitlab.Lab]) -> None:
    one = lab()
    for argv in (["reset", "--hard", "--bogus"], ["--bogus", "x", "checkout", "."]):
        done = one.guarded(*argv)
        assert done.returncode == 126, argv
        assert "nobody can tell" in done.stderr
    assert one.holds(KEPT)


def test_git_under_other_names_is_the_same(lab: Callable[[], gitlab.Lab]) -> None:
    """Also `git-checkout`, which is a link to git in git's own directory."""
    control, held = lab(), lab()
    script = "PATH={}:$PATH; git-checkout -- f"
    control.sh(script.format("$(git --exec-path)"))
    assert control.holds(F)
    done = held.sh(script.format(held.guard / "git-core"))
    assert done.returncode == 126
    assert not held.holds(F)
    # A server's end of a clone.
    link = held.guard / "bin/git-upload-pack"
    if not link.exists():
        link.symlink_to("git")
    done = held.guarded("clone", "-q", "-u", str(link), ".", "../copy")
    assert done.returncode == 0, done.stderr
    assert (held.base / "copy/f").exists()


def test_what_git_does_itself_is_not_looked_at(lab: Callable[[], gitlab.Lab]) -> None:
    """`git stash` is `git reset --hard` within; a hook is the user's own."""
    one = lab()
    one.sh("mkdir .git/hooks; echo 'git clean -qf' >.git/hooks/post-commit; chmod +x .git/hooks/*")
    assert one.guarded("commit", "-qm", "x").returncode == 0
    assert one.holds(U)


def test_nobody_outside_of_git_passes_for_git(lab: Callable[[], gitlab.Lab]) -> None:
    one = lab()
    one.more = {"AGENT_SANDBOX_GIT_INNER": "all"}
    assert one.guarded("reset", "--hard").returncode == 126
    assert one.holds(KEPT)


@pytest.mark.parametrize("shell", ["bash", "busybox"])
def test_the_guard_runs_in_other_shells(
    shell: str, lab: Callable[[], gitlab.Lab], tmp_path: Path
) -> None:
    """/bin/sh is bash on some systems, and busybox on others."""
    found = shutil.which(shell)
    must_work(found, f"no {shell} here")
    assert found is not None
    (tmp_path / "sh").symlink_to(found)
    one = lab()
    one.guard = gitlab.install(tmp_path / "guard", str(tmp_path / "sh"))
    one.sh("git config alias.Q 'checkout  \"--\" '\\''f'\\'; git config alias.st '-c a.b=c status'")
    for argv in ("reset --har", "checkout .", "clean -fdx", "q", "commit -anm x", "push -fu",
                 "-C . stash drop", "-c core.hooksPath=x commit"):  # fmt: skip
        done = one.guarded(*argv.split())
        assert done.returncode == 126, (argv, done.stderr)
        assert "is blocked in this sandbox" in done.stderr
    for argv in ("st", "status", "checkout -b n", "commit -mn"):
        assert one.guarded(*argv.split()).returncode == 0, argv


def test_the_short_options_are_gits(lab: Callable[[], gitlab.Lab]) -> None:
    """`git COMMAND -h` names each; one that the table lacks would be refused for no reason."""
    from agent_sandbox.policy.gitguard_rules import RULES

    one = lab()
    checked = 0
    for command, shorts in _tables(RULES):
        usage = one.plain(*command.split(), "-h")
        for line in (usage.stdout + usage.stderr).splitlines():
            word = line.strip().partition(" ")[0].rstrip(",")
            if line.startswith("    -") and len(word) == 2 and word[1].isalnum():
                checked += 1
                rest = line.strip()[2:]
                takes = rest.lstrip(", ").startswith("<") or " <" in rest[:34].partition("  ")[0]
                listed = [s for s in shorts if s.partition(",")[0].rstrip("=?") == word[1]]
                assert listed, f"git {command}: {line}"
                assert listed[0].endswith("=") == takes, f"git {command}: {line}"
    assert checked > 150


def _tables(rules: str) -> list[tuple[str, list[str]]]:
    """Each command of the rules with its short options."""
    found = []
    for match in re.finditer(
        r"\n    ([a-z|-]+)\)\n(.*?)(?=\n    [a-z|-]+\)|\n    esac)", rules, re.DOTALL
    ):
        names = match[1].split("|")
        tables = re.findall(r"options '([^']*)'", match[2])
        if match[1] == "worktree":
            names = ["worktree add", "worktree remove", "worktree prune"]
        if match[1] == "reflog":
            names = ["reflog expire"]
        for index, name in enumerate(names):
            if tables:
                found.append((name, tables[min(index, len(tables) - 1)].split()))
    return found
