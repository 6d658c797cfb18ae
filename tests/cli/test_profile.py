"""`sandboxctl profile`: list, show and new."""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.cli import ctl
from agent_sandbox.policy import profiles
from agent_sandbox.policy.profiles.decode import decode

if TYPE_CHECKING:
    from pathlib import Path

OWN = '[profiles.mine]\nprivate = ["~/.mine"]\nhosts = ["a.example"]\nnotes = ["\\u001b[2J"]\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a project of their own."""
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    for name in list(os.environ):
        if name.startswith(("XDG_", "CLAUDE_", "CODEX_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "home"


def configure(home: Path, text: str) -> None:
    """Write the user's own policy file."""
    place = home / ".config/agent-sandbox"
    place.mkdir(parents=True)
    (place / "config.toml").write_text(text)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `sandboxctl profile …` prints."""
    code = ctl.main(["profile", *words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_the_list_has_every_profile_and_the_user_s_own(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, and as JSON."""
    configure(home, OWN)
    assert said(capsys) == said(capsys, "list")
    rows = json.loads(said(capsys, "list", "--json"))["profiles"]
    assert [row["name"] for row in rows] == [*profiles.NAMES, "mine"]
    assert {row["source"] for row in rows if row["name"] == "mine"} == {"yours"}
    assert {row["source"] for row in rows if row["name"] != "mine"} == {"built in"}


@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_profile_is_shown_with_all_that_it_has(
    home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """In words and as JSON."""
    data = json.loads(said(capsys, "show", name, "--json"))
    text = said(capsys, "show", name)
    profile = profiles.find(name, "test")
    assert len(data["state"]) == len(profile.state)
    for row in data["state"]:
        assert row["path"].replace(str(home), "~") in text
    for value in (*profile.env, *profile.hosts, *profile.notes, *profile.tmp):
        assert value in text


def test_a_variable_that_moves_the_state_is_heeded(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show` looks at this machine."""
    (home / ".claude.json").write_text("{}")
    by_path = {r["path"]: r for r in json.loads(said(capsys, "show", "claude", "--json"))["state"]}
    row = by_path[f"{home}/.claude/.claude.json"]
    assert (row["host"], row["there"], row["mode"]) == (f"{home}/.claude.json", True, "merge")
    assert "oauthAccount" in row["keys"]
    assert "mcpServers" not in row["keys"]
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", "/data/c")
    assert "/data/c/.claude.json" in said(capsys, "show", "claude")


def test_a_profile_of_the_user_is_shown_without_control_characters(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its notes say."""
    configure(home, OWN)
    text = said(capsys, "show", "mine")
    assert "yours" in text
    assert "a.example" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("words", [("mine",), ("claude",), ("my-agent", "--extends", "codex")])
def test_what_new_prints_is_a_policy_file(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """As it is, and with every line that is commented out."""
    text = said(capsys, "new", *words)
    (made,) = decode(tomllib.loads(text)["profiles"], "printed")
    assert made.name == words[0]
    whole = "".join(
        line.removeprefix("# ") + "\n" for line in text.splitlines() if " = " in line or "[" in line
    )
    whole = whole.replace("private = []", f'private = ["~/.{words[0]}"]')
    assert decode(tomllib.loads(whole)["profiles"], "printed")
    configure(home, text)
    assert words[0] in said(capsys, "list")


@pytest.mark.parametrize(
    "words",
    [
        ["show"], ["show", "a", "b"], ["new"], ["drop", "x"], ["list", "x"], ["--all"],
        ["new", "x", "--extends"], ["new", "x", "--base", "claude"],
    ],
)  # fmt: skip
@pytest.mark.usefixtures("home")
def test_bad_usage_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With 125, as everywhere."""
    assert ctl.main(["profile", *words]) != 0
    assert "profile takes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["show", "nobody"], ["new", ".."], ["new", "x", "--extends", "y"]]
)
@pytest.mark.usefixtures("home")
def test_an_unknown_name_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As for --profile."""
    assert ctl.main(["profile", *words]) != 0
    assert "error:" in capsys.readouterr().err
