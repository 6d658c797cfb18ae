"""Looking paths up on real trees."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.host.locate import Locator, expand_globs


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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A real directory without links in its own path."""
    return Path(os.path.realpath(tmp_path))


def make(tree: Path, *names: str) -> None:
    """Files, with their directories."""
    for name in names:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_plain_paths_have_no_links_and_their_kind(tree: Path) -> None:
    """Files, directories, sockets and others are told apart."""
    make(tree, "d/f")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(tree)  # socket names are short
        listener.bind("s")
        os.chdir(here)
        found = {n: Locator().find(str(tree / n)) for n in ("d", "d/f", "fifo", "s")}
    assert {n: m.kind for n, m in found.items() if m} == {
        "d": "dir", "d/f": "file", "fifo": "other", "s": "socket",
    }  # fmt: skip
    assert all(m and m.real == m.path and m.links == () for m in found.values())


def test_a_missing_path_is_none(tree: Path) -> None:
    """So is a path through a file."""
    make(tree, "f")
    assert Locator().find(str(tree / "gone")) is None
    assert Locator().find(str(tree / "f/x")) is None


def test_a_link_is_noted_with_its_real_place_and_text(tree: Path) -> None:
    """Relative texts stay as they are."""
    make(tree, "real/f")
    (tree / "l").symlink_to("real")
    found = Locator().find(str(tree / "l/f"))
    assert found is not None
    assert found.real == str(tree / "real/f")
    assert found.path == str(tree / "l/f")
    assert [(k.at, k.text) for k in found.links] == [(str(tree / "l"), "real")]


def test_a_chain_is_noted_hop_by_hop(tree: Path) -> None:
    """Absolute, relative and upward links, in the middle and at the end."""
    make(tree, "c/real/f")
    (tree / "a").symlink_to(tree / "b")
    (tree / "b").symlink_to("c/../c")
    (tree / "c/last").symlink_to("real/f")
    found = Locator().find(str(tree / "a/last"))
    assert found is not None
    assert found.real == str(tree / "c/real/f")
    assert [k.at for k in found.links] == [str(tree / n) for n in ("a", "b", "c/last")]


@pytest.mark.parametrize("text", ["loop", "gone", "gone/x", "../loop-dir/loop"])
def test_loops_and_dangling_links_are_none(tree: Path, text: str) -> None:
    """They show nothing."""
    (tree / "loop").symlink_to(text)
    assert Locator().find(str(tree / "loop")) is None


def test_dots_after_a_link_mean_what_the_kernel_means(tree: Path) -> None:
    """`l/..` is the parent of the target."""
    make(tree, "deep/er/f", "deep/x")
    (tree / "l").symlink_to("deep/er")
    (tree / "m").symlink_to("l/../x")
    found = Locator().find(str(tree / "m"))
    assert found is not None
    assert found.real == str(tree / "deep/x")


def test_real_is_what_realpath_says_for_every_path(tree: Path) -> None:
    """One locator for many look-ups remembers nothing wrong."""
    make(tree, "a/b/c", "x/y")
    (tree / "a/up").symlink_to("..")
    (tree / "x/side").symlink_to("../a/b")
    (tree / "root").symlink_to("/")
    names = ["a/b/c", "a/up/x/y", "x/side/c", "a/up/x/side", "root/usr", "a/up/a/up/x"]
    locator = Locator()
    for name in names * 2:
        path = str(tree / name)
        found = locator.find(path)
        assert found is not None
        assert found.real == os.path.realpath(path)


def globbed(tree: Path, pattern: str) -> list[str]:
    """Matches of one glob, relative to the tree."""
    found = expand_globs([f"{tree}/{pattern}"])[f"{tree}/{pattern}"]
    return [path.removeprefix(f"{tree}/") for path in found]


GLOBS = [
    ("*", [".env", ".env.local", "a.py", "b.py", "lib", "pkg1", "pkg2"]),
    ("*.py", ["a.py", "b.py"]),
    (".env*", [".env", ".env.local"]),
    ("[ab].py", ["a.py", "b.py"]),
    ("pkg?", ["pkg1", "pkg2"]),
    ("pkg*/config.json", ["pkg1/config.json", "pkg2/config.json"]),
    ("*/config.json", ["pkg1/config.json", "pkg2/config.json"]),
    ("*/*/deep.py", ["lib/x/deep.py"]),
    ("**/*.py", ["a.py", "b.py", "lib/c.py", "lib/x/deep.py"]),
    ("**/deep.py", ["lib/x/deep.py"]),
    ("lib/**", ["lib/c.py", "lib/x", "lib/x/deep.py"]),
    ("lib/**/deep.py", ["lib/x/deep.py"]),
    # A directory stands for what is below it.
    ("**/x/**", ["lib/x"]),
    ("**/x/*", ["lib/x/deep.py"]),
    ("no*", []),
    ("no/**", []),
    ("a.py/*", []),
]


@pytest.mark.parametrize(("pattern", "expected"), GLOBS, ids=[g[0] for g in GLOBS])
def test_globs_find_exactly_these_sorted(tree: Path, pattern: str, expected: list[str]) -> None:
    """Leading dots match; `**` matches any depth, zero included."""
    make(
        tree, "a.py", "b.py", ".env", ".env.local", "pkg1/config.json", "pkg2/config.json",
        "lib/c.py", "lib/x/deep.py",
    )  # fmt: skip
    assert globbed(tree, pattern) == expected


def test_a_match_is_listed_once(tree: Path) -> None:
    """However many ways a pattern has to reach it."""
    make(tree, "a/a/a/b")
    assert globbed(tree, "**/a/**/b") == ["a/a/a/b"]
    assert globbed(tree, "**/**/b") == ["a/a/a/b"]


def test_double_stars_do_not_follow_links(tree: Path) -> None:
    """A link to a parent would never end; the link itself is a match."""
    make(tree, "d/f.py")
    (tree / "d/up").symlink_to("..")
    (tree / "l.py").symlink_to("d/f.py")
    assert globbed(tree, "**/*.py") == ["d/f.py", "l.py"]


def test_single_components_do_follow_links(tree: Path) -> None:
    """`*/secret` must hide what `link/secret` shows, as the shell's glob would find it."""
    make(tree, "deep/er/secret")
    (tree / "link").symlink_to("deep/er")
    assert globbed(tree, "*/secret") == ["link/secret"]


def test_git_objects_are_not_walked_but_other_directories_of_that_name_are(tree: Path) -> None:
    """Thousands of hashes hold no path that anybody names."""
    make(tree, ".git/objects/ab/x.py", "src/objects/x.py", ".git/hooks/x.py")
    assert globbed(tree, "**/x.py") == [".git/hooks/x.py", "src/objects/x.py"]


def test_many_double_stars_are_never_exponential(tree: Path) -> None:
    """An untrusted project may write any exclude: it must not stop the start (invariant 1)."""
    (tree / ("a/" * 40)).mkdir(parents=True)
    with at_most(5):
        assert len(globbed(tree, "**/a/" * 12 + "**/b")) == 0


def test_a_large_tree_is_read_once_for_all_patterns(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 files, several globs, each directory listed one time."""
    for directory in range(50):
        (tree / f"d{directory}").mkdir()
        for file in range(100):
            (tree / f"d{directory}" / f"f{file}.txt").touch()
    seen: list[str] = []
    real = os.scandir

    def counting(path: str) -> object:
        seen.append(path)
        return real(path)

    monkeypatch.setattr("agent_sandbox.host.locate.os.scandir", counting)
    wanted = [f"{tree}/**/{name}" for name in ("f1.txt", "*.pem", "f[23].txt", "f9?.txt")]
    found = expand_globs(wanted)
    assert [len(found[w]) for w in wanted] == [50, 0, 100, 500]
    assert len(seen) == len(set(seen)) == 51


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every directory")
def test_a_closed_directory_of_our_own_is_an_error(tree: Path) -> None:
    """A sandbox may have closed it, to open it again when nothing in it is hidden."""
    make(tree, "open/x", "closed/x")
    (tree / "closed").chmod(0)
    try:
        with pytest.raises(PolicyError, match="cannot look into"):
            globbed(tree, "*/x")
    finally:
        (tree / "closed").chmod(0o755)
