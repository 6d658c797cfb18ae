"""What policy files said at earlier starts."""

from __future__ import annotations

import marshal
import os
import stat
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.host import files, parses
from agent_sandbox.policy.model import GLOBAL, PROJECT

if TYPE_CHECKING:
    from pathlib import Path

    from agent_sandbox.policy.model import Layer

TOML = '[filesystem]\nro = ["vendor"]\n'


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory."""
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


def written(tmp_path: Path, text: str = TOML, name: str = "p.toml") -> str:
    """A policy file."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def remember(state: Path, *layers: Layer) -> None:
    """Do what a start does."""
    data = parses.dump(parses.read(str(state)), layers)
    place = state / parses.NAME
    place.write_bytes(data)
    place.chmod(0o600)


def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every further parse an error."""

    def refuse(*_: object) -> object:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(files, "parse", refuse)


def test_a_known_text_is_not_parsed_again(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says the same."""
    path = written(tmp_path)
    first = files.read(path, PROJECT, str(state))
    assert first.parsed is not None
    remember(state, first)
    unparsed(monkeypatch)
    again = files.read(path, PROJECT, str(state))
    assert again == first.replace(parsed=None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(TOML + "\n", "p.toml", id="one character more"),
        pytest.param(TOML, "p.json", id="another language"),
    ],
)
def test_anything_else_is_parsed(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    """A near miss is a miss."""
    remember(state, files.read(written(tmp_path), PROJECT, str(state)))
    unparsed(monkeypatch)
    with pytest.raises(AssertionError, match="it was parsed"):
        files.read(written(tmp_path, text, name), PROJECT, str(state))


def test_another_parser_starts_anew(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older one has accepted, a newer one may refuse."""
    remember(state, files.read(written(tmp_path), PROJECT, str(state)))
    assert parses.read(str(state))
    monkeypatch.setattr(parses, "PARSER", written(tmp_path, "", "other.py"))
    assert parses.read(str(state)) == {}


@pytest.mark.parametrize("data", [b"", b"\xff", marshal.dumps(3), marshal.dumps((1, 2, 3))])
def test_a_damaged_file_is_no_file(state: Path, data: bytes) -> None:
    """A crash of the machine may leave anything."""
    (state / parses.NAME).write_bytes(data)
    (state / parses.NAME).chmod(0o600)
    assert parses.read(str(state)) == {}


def test_cannot_be_fed_by_others(state: Path, tmp_path: Path) -> None:
    """A file that others can write, or a link to one, is not believed."""
    remember(state, files.read(written(tmp_path), PROJECT, str(state)))
    place = state / parses.NAME
    assert parses.read(str(state))
    place.chmod(0o620)
    assert parses.read(str(state)) == {}
    place.chmod(0o600)
    place.rename(state / "elsewhere")
    place.symlink_to(state / "elsewhere")
    assert parses.read(str(state)) == {}
    if os.getuid() == 0:
        place.unlink()
        (state / "elsewhere").rename(place)
        assert parses.read(str(state))
        os.chown(place, 12345, 12345)
        assert parses.read(str(state)) == {}


def test_values_of_variables_are_not_copied(state: Path, tmp_path: Path) -> None:
    """They may be secrets."""
    layer = files.read(written(tmp_path, '[env.set]\nTOKEN = "s3cret"\n'), PROJECT, str(state))
    assert layer.parsed is not None
    assert parses.dump({}, [layer]) == b""
    for table, is_kept in (('set-env = { TOKEN = "s3cret" }', False), ('env = ["TOKEN"]', True)):
        path = written(tmp_path, f"[profiles.mine]\n{table}\n")
        assert bool(parses.dump({}, [files.read(path, GLOBAL, str(state))])) is is_kept


def test_only_a_few_texts_are_kept(state: Path, tmp_path: Path) -> None:
    """The oldest go first, and a very long one is never kept."""
    for number in range(parses.MOST + 2):
        path = written(tmp_path, f"{TOML}# {number}\n")
        remember(state, files.read(path, PROJECT, str(state)))
    kept = [text for _, text in parses.read(str(state))]
    assert kept == [f"{TOML}# {number}\n" for number in range(2, parses.MOST + 2)]
    long = files.read(written(tmp_path, TOML + "#" * parses.LONGEST), PROJECT, str(state))
    assert parses.dump({}, [long]) == b""


def test_the_start_writes_a_closed_file(state: Path) -> None:
    """Whatever the mask."""
    from agent_sandbox.launch import filters

    old = os.umask(0)
    try:
        filters.store(str(state / "x"), b"data")
    finally:
        os.umask(old)
    assert stat.S_IMODE((state / "x").stat().st_mode) == 0o600
    assert os.listdir(state) == ["x"]
