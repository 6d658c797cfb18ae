"""Path rules: the laws of paths, and globs against a slow reference."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.host.locate import expand_globs
from agent_sandbox.policy import paths

from .bound import attempt, fuzz

# Every character that a rule treats in its own way, and some that Python or the kernel does.
ALPHABET = "ab./~*?[]!^-\\\0\n\r\x85 é\udc80{}$"
PATTERNS = st.text(ALPHABET, max_size=14)
COMPONENTS = st.text(ALPHABET.replace("/", "").replace("\0", ""), max_size=10)
NAMES = st.text("ab.*?[]!^-\\é", min_size=1, max_size=5)
REAL = st.lists(st.sampled_from(("a", "b", "ab", "a.b", ".a", "é", "\n")), max_size=5).map(
    lambda parts: "/" + "/".join(parts)
)


@fuzz(400, text=PATTERNS)
def test_normalise_says_what_the_path_says(text: str) -> None:
    """As the standard library, which keeps a doubled slash at the start."""
    made = paths.normalise(text)
    assert made == "/" + os.path.normpath("/" + text).lstrip("/")
    assert paths.normalise(made) == made


@fuzz(300, text=PATTERNS, base=REAL, home=REAL)
def test_expand_gives_a_normal_path_or_our_error(text: str, base: str, home: str) -> None:
    made = attempt(lambda: paths.expand(text, base=base, home=home, where="w"), PolicyError)
    if isinstance(made, SandboxError):
        assert made.code in ("empty-path", "bad-path")
        return
    assert made.startswith("/")
    assert made == paths.normalise(made)
    if not paths.is_glob(text) and not text.startswith(("/", "~")) and ".." not in text:
        assert paths.within(made, base)


@fuzz(300, path=REAL, root=REAL)
def test_within_below_and_parents_agree(path: str, root: str) -> None:
    assert paths.below(path, root) == (root in paths.parents(path))
    assert paths.within(path, root) == (path == root or paths.below(path, root))
    assert paths.depth(path) == len(paths.parents(path))
    assert paths.parents(path) == [str(p) for p in Path(path).parents]
    assert not (paths.below(path, root) and paths.within(root, path))


@fuzz(400, name=NAMES, other=NAMES)
def test_an_escaped_name_matches_itself_alone(name: str, other: str) -> None:
    pattern = paths.escape(name)
    assert paths.unescape(pattern) == name
    matches = paths.compile_component(pattern, "w")
    assert matches(name)
    assert matches(other) == (name == other)


Shape = tuple[str, frozenset[tuple[str, str]]]


def shapes(glob: str) -> list[Shape] | None:
    """A component by the documented rules; None when a bracket is not closed."""
    found: list[Shape] = []
    rest = glob
    while rest:
        char, rest = rest[0], rest[1:]
        if char in "*?":
            found.append((char, frozenset()))
        elif char == "\\" and rest:
            found.append(("=", frozenset({(rest[0], rest[0])})))
            rest = rest[1:]
        elif char != "[":
            found.append(("=", frozenset({(char, char)})))
        else:
            negated = rest[:1] in ("!", "^")
            body = rest[1:] if negated else rest
            # The first character of a class is never its end.
            end = body.find("]", 1)
            if end < 0:
                return None
            found.append(("!" if negated else "=", members(body[:end])))
            rest = body[end + 1 :]
    return found


def members(body: str) -> frozenset[tuple[str, str]]:
    """The ranges of a class."""
    found = set()
    while body:
        if len(body) > 2 and body[1] == "-":
            found.add((body[0], body[2]))
            body = body[3:]
        else:
            found.add((body[0], body[0]))
            body = body[1:]
    return frozenset(found)


def slow_match(wanted: list[Shape], name: str) -> bool:
    """Every way to fit a name is tried."""

    @cache
    def fits(at: int, start: int) -> bool:
        if at == len(wanted):
            return start == len(name)
        kind, ranges = wanted[at]
        if kind == "*":
            return any(fits(at + 1, i) for i in range(start, len(name) + 1))
        if start == len(name):
            return False
        inside = any(low <= name[start] <= high for low, high in ranges)
        return (kind == "?" or inside == (kind == "=")) and fits(at + 1, start + 1)

    return fits(0, 0)


@fuzz(800, glob=COMPONENTS, names=st.lists(st.one_of(NAMES, COMPONENTS), max_size=6))
def test_a_component_matches_what_the_slow_reference_matches(glob: str, names: list[str]) -> None:
    wanted = shapes(glob)
    matches = attempt(lambda: paths.compile_component(glob, "w"), PolicyError)
    if isinstance(matches, SandboxError):
        assert matches.code == "bad-glob"
        assert wanted is None
        return
    assert wanted is not None
    # The pattern itself is a name that often nearly fits.
    for name in (*names, glob, glob.replace("*", "a"), glob.replace("\\", "")):
        assert matches(name) == slow_match(wanted, name), (glob, name)


TREES = st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=1, max_size=6)
GLOBS = st.lists(
    st.one_of(
        NAMES,
        NAMES.map(paths.escape),
        st.sampled_from(("*", "**", "a*", "[ab]*", "?", "*.*", "\\*")),
    ),
    min_size=1,
    max_size=4,
).filter(lambda parts: parts[-1] != "**")


@fuzz(250, tree=TREES, glob=GLOBS)
def test_a_glob_finds_what_a_walk_finds(
    tmp_path: Path, tree: list[list[str]], glob: list[str]
) -> None:
    """On a real directory whose own name has every special character in it."""
    top = tmp_path / "t[*]\\?!"
    plant(top, tree)
    pattern = "/".join(glob)
    if not paths.is_glob(pattern) or {".", ".."} & set(glob):
        return
    expanded = paths.expand(pattern, base=str(top), home="/h", where="w")
    wanted = [None if part == "**" else shapes(part) for part in glob]
    if any(part is None and text != "**" for part, text in zip(wanted, glob, strict=True)):
        with pytest.raises(PolicyError):
            expand_globs([expanded])
        return
    expected = [
        f"{directory}/{name}"
        for directory, inner, files in os.walk(top)
        for name in (*inner, *files)
        if fits_path(wanted, os.path.relpath(f"{directory}/{name}", top).split("/"))
    ]
    assert expand_globs([expanded])[expanded] == sorted(expected)


def plant(top: Path, tree: list[list[str]]) -> None:
    """A tree of directories that end in a file each."""
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    for parts in tree:
        path = top.joinpath(*(part for part in parts if part not in (".", "..")))
        if path != top and not any(p.is_file() for p in (path, *path.parents)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text("")


def fits_path(wanted: list[list[Shape] | None], names: list[str]) -> bool:
    """Whether the components of a path fit those of a pattern."""
    if not wanted:
        return not names
    if wanted[0] is None:
        return any(fits_path(wanted[1:], names[i:]) for i in range(len(names) + 1))
    return bool(names) and slow_match(wanted[0], names[0]) and fits_path(wanted[1:], names[1:])
