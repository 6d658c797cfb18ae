"""Lexical path and glob rules."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import paths


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/a//b///c", "/a/b/c"),
        ("/a/b/", "/a/b"),
        ("/a/./b/.", "/a/b"),
        ("/a/b/..", "/a"),
        ("/..", "/"),
        ("/a/../../../b", "/b"),
        ("/foo/../t", "/t"),
        ("/...", "/..."),
        ("/.a", "/.a"),
    ],
)
def test_normalise_resolves_dots_and_slashes_lexically(written: str, expected: str) -> None:
    """A path has one spelling."""
    assert paths.normalise(written) == expected


@given(st.text(alphabet="a./", max_size=30))
def test_normalise_is_idempotent_and_absolute(text: str) -> None:
    """Normalising twice changes nothing more."""
    once = paths.normalise(text)
    assert paths.normalise(once) == once
    assert once.startswith("/")
    assert ".." not in once.split("/")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("~", "/home/u"),
        ("~/", "/home/u"),
        ("~/x/y", "/home/u/x/y"),
        ("~bob", "/p/~bob"),
        ("~bob/x", "/p/~bob/x"),
        ("$HOME/x", "/p/$HOME/x"),
        ("x", "/p/x"),
        (".", "/p"),
        ("./x", "/p/x"),
        ("..", "/"),
        ("sub/..", "/p"),
        ("foo/../t", "/p/t"),
        ("/abs//x/", "/abs/x"),
        ("a b", "/p/a b"),
        ("a/~", "/p/a/~"),
    ],
)
def test_expand_knows_tilde_relative_and_absolute(written: str, expected: str) -> None:
    """`~` alone is the home; names of users and variables are literal."""
    assert paths.expand(written, base="/p", home="/home/u", where="w") == expected


@pytest.mark.parametrize(
    ("written", "code"),
    [("", "empty-path"), ("a\0b", "bad-path"), ("a\nb", "bad-path"), ("a/" * 3000, "bad-path")],
    ids=["empty", "nul", "newline", "too-deep"],
)
def test_expand_refuses_what_no_path_can_be(written: str, code: str) -> None:
    """The error names where the path was written."""
    with pytest.raises(PolicyError) as caught:
        paths.expand(written, base="/p", home="/home/u", where="file.toml: filesystem.ro")
    assert caught.value.code == code
    assert "file.toml: filesystem.ro" in caught.value.message


@pytest.mark.parametrize(
    ("path", "root", "inside", "strictly"),
    [
        ("/a", "/a", True, False),
        ("/a/b", "/a", True, True),
        ("/ab", "/a", False, False),
        ("/", "/", True, False),
        ("/a", "/", True, True),
        ("/", "/a", False, False),
        ("/a/bc", "/a/b", False, False),
    ],
)
def test_within_respects_component_boundaries(
    path: str, root: str, inside: bool, strictly: bool
) -> None:
    """A shared prefix of characters is not a shared directory."""
    assert paths.within(path, root) is inside
    assert paths.below(path, root) is strictly


def test_parents_end_at_the_root() -> None:
    """Nearest first."""
    assert paths.parents("/a/b/c") == ["/a/b", "/a", "/"]
    assert paths.parents("/") == []
    assert paths.parent("/a") == "/"
    assert [paths.depth(p) for p in ("/", "/a", "/a/b")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("pattern", "base", "rest"),
    [
        ("/a/b/*.x", "/a/b", ["*.x"]),
        ("/*", "/", ["*"]),
        ("/a/*/c/d", "/a", ["*", "c", "d"]),
        ("/a/**/x", "/a", ["**", "x"]),
        ("/a/b[12]", "/a", ["b[12]"]),
    ],
)
def test_split_glob_keeps_the_literal_start(pattern: str, base: str, rest: list[str]) -> None:
    """Only what follows the first wildcard has to be walked."""
    assert paths.split_glob(pattern) == (base, rest)


GLOBS = [
    ("*", ["", "a", ".a", "a.b"], []),
    ("*.py", ["a.py", ".py"], ["a.pyc", "py", "a.PY"]),
    (".env*", [".env", ".env.local"], ["env", "x.env"]),
    ("a*b", ["ab", "axb", "abb"], ["a", "b", "ba"]),
    ("ab*ba", ["abba", "abxba"], ["aba"]),
    ("a?c", ["abc", "a.c"], ["ac", "abbc"]),
    ("???", ["abc"], ["ab", "abcd"]),
    ("f[12]", ["f1", "f2"], ["f3", "f", "f12"]),
    ("f[!12]", ["f3", "f!"], ["f1", "f2", "f"]),
    ("f[^12]", ["f3"], ["f1"]),
    ("[a-c]x", ["ax", "bx", "cx"], ["dx", "-x"]),
    ("[a-]x", ["ax", "-x"], ["bx"]),
    ("[]]x", ["]x"], ["x", "[]x"]),
    ("[!]]x", ["ax"], ["]x"]),
    ("[]-a]", ["]", "^", "a"], ["b"]),
    ("[[]id[]]", ["[id]"], ["id", "i"]),
    ("[0-9a-f]*", ["0x", "fz"], ["gz", ""]),
    ("*[0-9]", ["a1", "1"], ["a", "1a"]),
    ("a*b*c", ["abc", "aXbYc", "abbc"], ["ab", "acb", "bc"]),
    ("*a*a*", ["aa", "xaxax"], ["a", ""]),
    ("a**b", ["ab", "axb"], ["a"]),
    # A backslash takes the next character literally, and so does a class of one.
    (r"a\*b*", ["a*b", "a*bc"], ["axb", r"a\xb"]),
    (r"a\*", ["a*"], ["ab", "a", "a\\", "a\\b"]),
    (r"\[a\]", ["[a]"], ["a"]),
    ("a[*]b", ["a*b"], ["axb", "a[*]b"]),
    ("plain", ["plain"], ["plain2", "Plain"]),
]


@pytest.mark.parametrize(("glob", "yes", "no"), GLOBS, ids=[g[0] for g in GLOBS])
def test_component_globs_match_exactly(glob: str, yes: list[str], no: list[str]) -> None:
    """Wildcards stay within one name, and match leading dots."""
    match = paths.compile_component(glob, "test")
    assert [name for name in yes if not match(name)] == []
    assert [name for name in no if match(name)] == []


@pytest.mark.parametrize("glob", ["[invalid", "a[", "x[!", "x[]", "x[!]", "*[a-"])
def test_an_unclosed_bracket_is_an_error_with_its_origin(glob: str) -> None:
    """A glob that cannot be meant is refused, never ignored."""
    with pytest.raises(PolicyError) as caught:
        paths.compile_component(glob, "flag --exclude")
    assert caught.value.code == "bad-glob"
    assert "flag --exclude" in caught.value.message


def test_matching_is_never_exponential() -> None:
    """Many stars against a name that almost matches take no time."""
    match = paths.compile_component("*a" * 40 + "b", "test")
    begun = time.perf_counter()
    assert not match("a" * 255)
    assert time.perf_counter() - begun < 1


@given(st.text(alphabet="ab*?", min_size=1, max_size=8), st.text(alphabet="ab", max_size=8))
def test_matching_agrees_with_the_plain_recursive_definition(glob: str, name: str) -> None:
    """The fast matcher is the definition."""

    def means(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(means(pattern[1:], text[i:]) for i in range(len(text) + 1))
        return bool(text) and pattern[0] in ("?", text[0]) and means(pattern[1:], text[1:])

    assert paths.compile_component(glob, "test")(name) == means(glob, name)
