"""Putting away and putting back, without ever reaching outside."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.cli import quarantine as cli
from agent_sandbox.errors import HostError, UsageError
from agent_sandbox.launch import quarantine
from agent_sandbox.policy.triggers import (
    CLEANED,
    FORBIDDEN,
    LINK_MARK,
    LISTED,
    NOTABLE,
    QUARANTINED,
    RESTORED,
    Finding,
)

RUN = "0123456789abcdef"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    real = Path(os.path.realpath(tmp_path))
    (real / "state").mkdir()
    (real / "p" / ".git" / "hooks").mkdir(parents=True)
    return real


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A state directory on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def finding(path: Path, remedy: str = QUARANTINED, **more: object) -> Finding:
    values: dict[str, object] = {
        "path": str(path), "severity": FORBIDDEN, "who": "git", "what": "why", "remedy": remedy,
    }  # fmt: skip
    return Finding(**{**values, **more})  # type: ignore[arg-type]


def settle(base: Path, *findings: Finding, act: bool = True, run: str = RUN) -> list[Finding]:
    state = base / "state" if (base / "state").exists() else base
    return list(quarantine.settle(findings, state_dir=str(state), run=run, act=act))


def contents(state: Path) -> dict[str, str]:
    """Kept files by their old path."""
    return {
        kept.path: Path(quarantine.place(run, kept)).read_text()
        for run, kept in (quarantine.find(str(state), k.id) for k in quarantine.listed(str(state)))
    }


# --- the end of a run -----------------------------------------------------------------------------


def test_a_new_file_is_moved_away(base: Path) -> None:
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("evil")
    hook.chmod(0o755)
    (done,) = settle(base, finding(hook))
    assert (done.action, done.id) == (QUARANTINED, "01234567-1")
    assert not hook.exists()
    assert contents(base / "state") == {str(hook): "evil"}
    (kept,) = quarantine.listed(str(base / "state"))
    assert (kept.mode & 0o777, kept.what, kept.action) == (0o755, "why", QUARANTINED)


@pytest.mark.parametrize("remedy", [RESTORED, CLEANED])
def test_a_changed_file_is_replaced(base: Path, remedy: str) -> None:
    config = base / "p" / ".git" / "config"
    config.write_text("evil")
    (done,) = settle(base, finding(config, remedy, instead=b"clean", mode=0o100640))
    assert done.action == remedy
    assert config.read_text() == "clean"
    assert config.stat().st_mode & 0o777 == 0o640
    assert contents(base / "state") == {str(config): "evil"}
    assert sorted(os.listdir(base / "p" / ".git")) == ["config", "hooks"]


def test_cannot_reach_another_file_by_a_second_name(base: Path) -> None:
    """Written in place, a hard link would carry the content to the other file."""
    precious = base / "precious"
    precious.write_text("evil")
    config = base / "p" / ".git" / "config"
    os.link(precious, config)
    config.write_text("still evil")
    assert precious.read_text() == "still evil"  # the control: both names are one file
    settle(base, finding(config, RESTORED, instead=b"clean"))
    assert config.read_text() == "clean"
    assert precious.read_text() == "still evil"


def test_a_link_is_moved_and_a_users_link_is_put_back(base: Path) -> None:
    link = base / "p" / ".git" / "hooks" / "x"
    link.symlink_to("/evil")
    settle(base, finding(link, RESTORED, instead=LINK_MARK + b"/mine", mode=0o120777))
    assert os.readlink(link) == "/mine"
    link.unlink()
    link.symlink_to(base / "precious")
    (base / "precious").write_text("precious")
    settle(base, finding(link), run="other")
    assert not os.path.lexists(link)
    assert (base / "precious").read_text() == "precious"


@pytest.mark.parametrize("how", ["a second name", "a descriptor"])
def test_cannot_change_what_is_in_quarantine(base: Path, how: str) -> None:
    """The user looks at it, and puts back what they have seen."""
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("seen")
    hook.chmod(0o755)
    os.link(hook, base / "p" / "second")
    with open(hook, "a") as kept_open:
        settle(base, finding(hook))
        if how == "a descriptor":
            kept_open.write("evil")
        else:
            (base / "p" / "second").write_text("evil")
    assert "evil" in (base / "p" / "second").read_text()  # the control: it was that file
    assert contents(base / "state") == {str(hook): "seen"}
    (kept,) = quarantine.listed(str(base / "state"))
    quarantine.restore(str(base / "state"), kept.id)
    assert (hook.read_text(), hook.stat().st_nlink) == ("seen", 1)
    assert hook.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("swapped", ["p", "p/.git", "p/.git/hooks"])
def test_cannot_be_led_outside_by_a_link(base: Path, swapped: str) -> None:
    """Another sandbox swaps a directory while this one tidies up."""
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("evil")
    outside = base / "outside"
    (outside / ".git" / "hooks").mkdir(parents=True)
    target = outside if swapped == "p" else outside / Path(swapped).relative_to("p")
    theirs = outside / ".git" / "hooks" / "pre-commit"
    theirs.write_text("precious")
    (base / swapped).rename(base / "moved")
    (base / swapped).symlink_to(target)
    assert hook.read_text() == "precious"  # the control: by its path it is another file
    for remedy, instead in ((QUARANTINED, None), (RESTORED, b"mine")):
        (done,) = settle(base, finding(hook, remedy, instead=instead))
        assert done.action.startswith("failed: ")
    assert theirs.read_text() == "precious"
    assert sorted(os.listdir(theirs.parent)) == ["pre-commit"]


def test_what_was_replaced_meanwhile_is_left_alone(base: Path) -> None:
    """A link was judged; now the user's repository is back in its place."""
    git = base / "p" / ".git"
    other = os.stat(base)
    (done,) = settle(base, finding(git, judged=(other.st_dev, other.st_ino)))
    assert done.action == "failed: it was replaced meanwhile, look at it yourself"
    assert git.is_dir()
    own = os.lstat(git)
    (done,) = settle(base, finding(git, judged=(own.st_dev, own.st_ino)))
    assert done.action == QUARANTINED


def test_what_is_gone_is_done(base: Path) -> None:
    hooks = base / "p" / ".git" / "hooks"
    assert settle(base, finding(hooks / "x"), finding(base / "p" / "gone" / "x")) == []
    assert settle(base, finding(hooks / "x", RESTORED, instead=b"x")) == []
    assert os.listdir(hooks) == []


def test_only_what_is_forbidden_is_touched(base: Path) -> None:
    file = base / "p" / "Makefile"
    file.write_text("x")
    findings = [finding(file, "", severity=NOTABLE), finding(file, "", severity=LISTED)]
    assert settle(base, *findings) == findings
    assert file.exists()
    (done,) = settle(base, finding(file), act=False)
    assert done.action == "reported"
    assert file.exists()
    assert not (base / "state" / "quarantine").exists()


def test_a_closed_directory_is_moved_as_a_whole(base: Path) -> None:
    hooks = base / "p" / ".git" / "hooks"
    (hooks / "x").write_text("evil")
    hooks.chmod(0o111)
    settle(base, finding(Path(f"{hooks}/")))
    assert not hooks.exists()
    (kept,) = quarantine.listed(str(base / "state"))
    place = base / "state" / "quarantine" / RUN / kept.at
    place.chmod(0o700)
    assert (place / "x").read_text() == "evil"


def test_a_directory_that_was_made_read_only_is_opened(base: Path) -> None:
    hooks = base / "p" / ".git" / "hooks"
    (hooks / "x").write_text("evil")
    hooks.chmod(0o555)
    (done,) = settle(base, finding(hooks / "x"))
    assert done.action == QUARANTINED
    hooks.chmod(0o755)
    assert os.listdir(hooks) == []


def test_files_go_to_another_file_system(base: Path, elsewhere: Path) -> None:
    git = base / "p" / ".git"
    (git / "config").write_text("evil")
    (git / "hooks" / "x").symlink_to("/evil")
    (git / "hooks" / "big").write_bytes(b"")
    os.truncate(git / "hooks" / "big", quarantine.MAX_COPY + 1)
    done = settle(
        elsewhere,
        finding(git / "config", RESTORED, instead=b"clean"),
        finding(git / "hooks" / "x"),
        finding(git / "hooks" / "big"),
    )
    assert [d.action for d in done] == [RESTORED, QUARANTINED, QUARANTINED]
    assert (git / "config").read_text() == "clean"
    places = [
        quarantine.place(run, kept)
        for run, kept in (
            quarantine.find(str(elsewhere), k.id) for k in quarantine.listed(str(elsewhere))
        )
    ]
    assert Path(places[0]).read_text() == "evil"
    assert os.readlink(places[1]) == "/evil"
    # Too large to copy: it stays, under a name that git does not look for.
    assert places[2] == f"{git}/hooks/big.quarantined-01234567-3"
    assert os.listdir(git / "hooks") == ["big.quarantined-01234567-3"]
    quarantine.restore(str(elsewhere), "01234567-3")
    assert os.listdir(git / "hooks") == ["big"]
    quarantine.restore(str(elsewhere), "01234567-2")
    assert os.readlink(git / "hooks" / "x") == "/evil"


def test_a_full_disk_leaves_nothing_that_git_would_run(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("evil")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(quarantine, "_append", full)
    (done,) = settle(base, finding(hook))
    (name,) = os.listdir(hook.parent)
    assert done.action == f"failed: no space left on device; it is now '{name}'"
    assert name.startswith("pre-commit.quarantined-")


# --- afterwards -----------------------------------------------------------------------------------


def test_what_was_moved_comes_back_and_is_agreed_to(base: Path) -> None:
    state = str(base / "state")
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("mine")
    hook.chmod(0o755)
    settle(base, finding(hook))
    quarantine.restore(state, "0123")
    assert hook.read_text() == "mine"
    assert hook.stat().st_mode & 0o777 == 0o755
    assert quarantine.listed(state) == []
    # Another run that began before sees it as new: the user has agreed to it.
    assert settle(base, finding(hook), run="other") == []
    assert hook.exists()
    hook.write_text("other content")
    (done,) = settle(base, finding(hook), run="third")
    assert done.action == QUARANTINED


def test_a_replaced_file_is_exchanged(base: Path) -> None:
    state = str(base / "state")
    config = base / "p" / ".git" / "config"
    config.write_text("new")
    settle(base, finding(config, RESTORED, instead=b"old"))
    quarantine.restore(state, f"{RUN[:8]}-1")
    assert config.read_text() == "new"
    assert contents(base / "state") == {str(config): "old"}
    quarantine.restore(state, f"{RUN[:8]}-1")
    assert config.read_text() == "old"


def test_cannot_be_put_back_through_a_link(base: Path) -> None:
    hook = base / "p" / ".git" / "hooks" / "pre-commit"
    hook.write_text("evil")
    settle(base, finding(hook))
    (base / "outside").mkdir()
    hook.parent.rmdir()
    hook.parent.symlink_to(base / "outside")
    with pytest.raises(HostError) as caught:
        quarantine.restore(str(base / "state"), "0123")
    assert caught.value.code == "quarantine-failed"
    assert os.listdir(base / "outside") == []
    assert contents(base / "state") == {str(hook): "evil"}


def test_what_is_dropped_is_gone(base: Path) -> None:
    hooks = base / "p" / ".git" / "hooks"
    (hooks / "a").write_text("a")
    (hooks / "b").write_text("b")
    settle(base, finding(hooks / "a"), finding(hooks / "b"))
    quarantine.drop(str(base / "state"), f"{RUN[:8]}-1")
    assert contents(base / "state") == {str(hooks / "b"): "b"}
    quarantine.drop(str(base / "state"), f"{RUN[:8]}-2")
    assert os.listdir(base / "state" / "quarantine") == []


def test_a_name_must_choose_one(base: Path) -> None:
    hooks = base / "p" / ".git" / "hooks"
    for name in ("a", "b"):
        (hooks / name).write_text(name)
    settle(base, finding(hooks / "a"), finding(hooks / "b"))
    for name in ("", "0", "ffff"):
        with pytest.raises(UsageError) as caught:
            quarantine.find(str(base / "state"), name)
        assert caught.value.code == "no-such-id"


def test_a_damaged_index_loses_only_its_own_line(base: Path) -> None:
    hook = base / "p" / ".git" / "hooks" / "a"
    hook.write_text("a")
    settle(base, finding(hook))
    index = base / "state" / "quarantine" / RUN / "index"
    index.write_text('{"id": "half\n' + index.read_text() + "[]\n")
    assert [k.path for k in quarantine.listed(str(base / "state"))] == [str(hook)]


# --- what people read -----------------------------------------------------------------------------


@pytest.fixture
def of_user(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own state directory, as `sandboxctl` finds it."""
    (base / "home").mkdir()
    monkeypatch.setenv("HOME", str(base / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "xdg"))
    monkeypatch.chdir(base / "p")
    (base / "xdg" / "agent-sandbox").mkdir(parents=True, mode=0o700)
    return base / "xdg" / "agent-sandbox"


def test_the_verb_lists_shows_restores_and_drops(
    base: Path, of_user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = base / "p" / ".git" / "hooks" / "a\x1b[31m\nb"
    hook.write_text("#!/bin/sh\n\x1b]0;evil\x07\techo\n")
    settle(of_user, finding(hook))
    assert cli.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("01234567-1  ")
    assert line.endswith("hooks/a?[31m?b  (why)")
    assert cli.main(["show", "0123"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "mode:   0644" in shown
    assert "echo" in shown
    assert cli.main(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["files"]
    assert (row["id"], row["path"]) == ("01234567-1", str(hook))
    assert cli.main(["restore", "0123"]) == 0
    assert hook.exists()
    settle(of_user, finding(hook), run="b" * 16)
    capsys.readouterr()
    hook.write_text("x")
    settle(of_user, finding(hook), run="c" * 16)
    assert cli.main(["drop", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "cccccccc-1"
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words", [["show"], ["drop"], ["restore", "a", "b"], ["nope"], ["list", "x"], ["--all"]]
)
def test_a_wrong_use_of_the_verb_is_an_error(of_user: Path, words: list[str]) -> None:
    with pytest.raises(UsageError):
        cli.main(words)


def test_the_note_is_short_and_harmless() -> None:
    project = Path("/p")
    changes = [
        finding(project / "a/.git/hooks/x", what="a hook that git would run", action=QUARANTINED),
        finding(project / "a/.git/config", RESTORED, what="git would obey: x", action=RESTORED),
        finding(project / "b", what="w", action="failed: no space left on device"),
        finding(project / "c", what="w", action="reported"),
        finding(project / "evil\n\x1b[2Jname", "", severity=NOTABLE, who="CI", what="new"),
        finding(project / "package.json", "", severity=NOTABLE, who="npm", what="scripts: a, b"),
        finding(project / ".gitattributes", "", severity=NOTABLE, what="names filter x"),
        finding(project / "d/", "", severity=NOTABLE, who="", what="cannot be looked into"),
        *(
            finding(Path(f"/q/{n}/Makefile"), "", severity=LISTED, who="make", what="new")
            for n in range(9)
        ),
    ]
    warnings, notices = cli.note(changes, "/p")
    assert warnings == [
        "could not put away b (w): failed: no space left on device",
        "left in place, because @git is off: c (w)",
    ]
    assert len(notices) == 2
    assert notices[0] == (
        "2 files quarantined: a/.git/hooks/x (a hook that git would run), "
        "a/.git/config (git would obey: x; restored) (see 'sandboxctl quarantine')"
    )
    assert notices[1] == (
        "changed, and acted on by tools outside: evil??[2Jname (CI), package.json scripts: a, b "
        "(npm), .gitattributes (git: names filter x), d (cannot be looked into), "
        "/q/0/Makefile (make) and 8 more"
    )
    assert cli.note([], "/p") == ([], [])
