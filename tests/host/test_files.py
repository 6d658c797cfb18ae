"""Finding and reading policy files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.host import files
from agent_sandbox.policy.model import GLOBAL, PROJECT

JSONC = [
    ("plain", '{"a": 1}', {"a": 1}),
    ("line-comment", '{"a": 1} // end', {"a": 1}),
    ("line-comment-first", '// top\n{"a": 1}', {"a": 1}),
    ("block-comment", '/* x */ {"a": /* y */ 1}', {"a": 1}),
    ("block-lines", '{\n/* x\n y */\n"a": 1}', {"a": 1}),
    ("trailing-comma", '{"a": [1, 2,],}', {"a": [1, 2]}),
    ("trailing-comma-comment", '{"a": [1, // x\n /* y */ ], }', {"a": [1]}),
    ("slashes-in-string", '{"a": "http://x//y"}', {"a": "http://x//y"}),
    ("comment-in-string", '{"a": "/* no */ // no"}', {"a": "/* no */ // no"}),
    ("comma-in-string", '{"a": ",]", "b": ",}"}', {"a": ",]", "b": ",}"}),
    ("quote-in-string", r'{"a": "\"//\\"}', {"a": '"//\\'}),
    ("star-in-comment", '{"a": 1 /* ** / */}', {"a": 1}),
    ("quote-in-comment", '{"a": 1} // "not a string', {"a": 1}),
    ("empty", "{}", {}),
    ("comment-without-newline", "{} //", {}),
]


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in JSONC], ids=[c[0] for c in JSONC])
@pytest.mark.parametrize("suffix", [".json", ".jsonc"])
def test_json_with_comments_and_trailing_commas_is_read(
    text: str, expected: object, suffix: str
) -> None:
    """In both suffixes; what stands in a string stays."""
    assert files.parse(text, f"x{suffix}") == expected


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_plain_json_is_never_changed(value: object) -> None:
    """Stripping comments is the identity on JSON without any."""
    text = json.dumps(value)
    assert files.strip_comments(text) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", "{"),
        ("x.json", '{"a": 1,, }'),
        ("x.json", '{"a" 1}'),
        ("x.json", "/* open"),
        ("x.json", '{"a": "open'),
        ("x.json", ""),
        ("x.json", '{"a": 1, "a": 2}'),
        ("x.jsonc", '{"f": {"ro": [], "ro": ["x"]}}'),
        ("x.json", "[" * 100_000),
        ("x.json", '{"a": ' + "9" * 5000 + "}"),
        ("x.toml", "a = "),
        ("x.toml", "a = 1\na = 2"),
        ("x.toml", "[a]\n[a]"),
        ("x.toml", "a = [" * 5000),
        ("x.toml", "{}"),
    ],
)
def test_syntax_errors_name_the_file(name: str, text: str) -> None:
    """Doubled keys too: one of them would be ignored."""
    with pytest.raises(PolicyError) as caught:
        files.parse(text, f"/cfg/{name}")
    assert caught.value.code == "bad-syntax"
    assert f"/cfg/{name}" in caught.value.message


def test_errors_in_commented_json_name_the_right_line() -> None:
    """Comments keep their line breaks."""
    with pytest.raises(PolicyError) as caught:
        files.parse('/* one\ntwo */\n// three\n{"a": nope}', "x.jsonc")
    assert "line 4" in caught.value.message


def test_toml_is_read() -> None:
    """The preferred form."""
    assert files.parse('network = "off"\n[filesystem]\nro = ["x"]', "x.toml") == {
        "network": "off", "filesystem": {"ro": ["x"]},
    }  # fmt: skip


@pytest.mark.parametrize("present", [(), (".toml",), (".json",), (".jsonc",)])
def test_find_takes_the_one_file_at_a_place(tmp_path: Path, present: tuple[str, ...]) -> None:
    """None is fine."""
    stem = str(tmp_path / "config")
    for suffix in present:
        Path(stem + suffix).write_text("")
    assert files.find(stem) == (stem + present[0] if present else None)


@pytest.mark.parametrize("pair", [(".toml", ".json"), (".json", ".jsonc"), (".toml", ".jsonc")])
def test_two_files_at_one_place_are_an_error_that_names_both(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    """One of them would be ignored."""
    stem = str(tmp_path / ".agent-sandbox")
    for suffix in pair:
        Path(stem + suffix).write_text("")
    with pytest.raises(PolicyError) as caught:
        files.find(stem)
    assert caught.value.code == "two-configs"
    assert all(stem + suffix in caught.value.message for suffix in pair)


@pytest.mark.parametrize("what", ["directory", "dangling", "fifo"])
def test_a_policy_file_that_cannot_be_one_is_an_error(tmp_path: Path, what: str) -> None:
    """A dangling link into moved dotfiles must not take the user's rules away without a word."""
    path = tmp_path / "config.toml"
    make = {
        "directory": path.mkdir,
        "dangling": lambda: path.symlink_to("gone"),
        "fifo": lambda: os.mkfifo(path),
    }
    make[what]()
    with pytest.raises(PolicyError) as caught:
        files.find(str(tmp_path / "config"))
    assert caught.value.code == "config-unreadable"


@pytest.mark.parametrize(
    ("env", "stem"),
    [
        ({}, "/home/u/.config/agent-sandbox/config"),
        ({"XDG_CONFIG_HOME": "/x"}, "/x/agent-sandbox/config"),
        ({"XDG_CONFIG_HOME": ""}, "/home/u/.config/agent-sandbox/config"),
        ({"XDG_CONFIG_HOME": "rel"}, "/home/u/.config/agent-sandbox/config"),
    ],
)
def test_the_global_file_follows_xdg(env: dict[str, str], stem: str) -> None:
    """Relative values are ignored, as the specification says."""
    assert files.global_stem(env, "/home/u") == stem


@pytest.fixture
def places(tmp_path: Path) -> tuple[dict[str, str], str, str]:
    """An environment, a home and a project."""
    (tmp_path / "home" / ".config" / "agent-sandbox").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    return {}, str(tmp_path / "home"), str(tmp_path / "project")


def test_layers_come_in_their_order(places: tuple[dict[str, str], str, str]) -> None:
    """Global, then the project's; each knows its file."""
    env, home, project = places
    Path(f"{home}/.config/agent-sandbox/config.toml").write_text('network = "off"')
    Path(f"{project}/.agent-sandbox.json").write_text('{"docker": false}')
    layers = files.read_layers(env, home, project, None)
    assert [layer.rank for layer in layers] == [GLOBAL, PROJECT]
    assert layers[1].file == f"{project}/.agent-sandbox.json"


def test_no_files_are_no_layers(places: tuple[dict[str, str], str, str]) -> None:
    """Defaults need no file."""
    assert files.read_layers(*places, None) == []


def test_an_explicit_file_replaces_only_the_project_s(
    places: tuple[dict[str, str], str, str], tmp_path: Path
) -> None:
    """The global one is still read; two files in the project do not matter then."""
    env, home, project = places
    Path(f"{home}/.config/agent-sandbox/config.toml").write_text('network = "off"')
    Path(f"{project}/.agent-sandbox.json").write_text("{broken")
    Path(f"{project}/.agent-sandbox.toml").write_text("broken")
    (tmp_path / "own.toml").write_text('docker = "off"')
    layers = files.read_layers(env, home, project, str(tmp_path / "own.toml"))
    assert [list(layer.values) for layer in layers] == [["network"], ["docker"]]


def test_a_missing_explicit_file_is_an_error_that_names_it(
    places: tuple[dict[str, str], str, str],
) -> None:
    """It was asked for."""
    with pytest.raises(PolicyError) as caught:
        files.read_layers(*places, "/no/such.toml")
    assert caught.value.code == "config-missing"
    assert "/no/such.toml" in caught.value.message


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"\xff\xfe", "bad-syntax"), (b"#" * (2 << 20), "config-unreadable")],
    ids=["not-utf-8", "too-large"],
)
def test_unreadable_content_is_an_error_that_names_the_file(
    tmp_path: Path, content: bytes, code: str
) -> None:
    """Never a traceback."""
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        files.read(str(path), GLOBAL)
    assert caught.value.code == code
    assert str(path) in caught.value.message


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_closed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    """With the kernel's reason."""
    path = tmp_path / "x.toml"
    path.write_text("")
    path.chmod(0)
    with pytest.raises(PolicyError) as caught:
        files.read(str(path), GLOBAL)
    assert "permission denied" in caught.value.message


@pytest.mark.parametrize("linked", [False, True])
def test_cannot_be_given_a_users_file_that_a_run_has_written(tmp_path: Path, linked: bool) -> None:
    """A run without the variable may write there. Control: elsewhere it is taken."""
    project, home = tmp_path / "project", tmp_path / "home"
    for place in (project / "cfg", home / "cfg"):
        (place / "agent-sandbox").mkdir(parents=True)
        (place / "agent-sandbox" / "config.toml").write_text('network = "off"\n')
    named = tmp_path / "link" if linked else project / "cfg"
    if linked:
        named.symlink_to(project / "cfg")
    with pytest.raises(PolicyError) as caught:
        files.read_layers({"XDG_CONFIG_HOME": str(named)}, str(home), str(project), None)
    assert caught.value.code == "config-in-project"
    env = {"XDG_CONFIG_HOME": str(home / "cfg")}
    assert len(files.read_layers(env, str(home), str(project), None)) == 1
