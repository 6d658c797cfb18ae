"""Random trees under random policies: what the rules promise is what really happens inside.

The specification below is written from the documented rules, not from the code: exact beats glob,
then the later layer, then exclude > ro > rw; for different paths the deeper one wins; a directory
that holds a protected path cannot be moved.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..conftest import As

NAMES = ("a", "b", "c.txt", ".d")
GLOBS = ("*", "a*", "*.txt", "?", ".*", "[ab]", "*/b", "a/*", "**/c.txt", "**/b", "**/.d", "*/*")
STRENGTH = {"rw": 0, "ro": 1, "exclude": 2}

# Asks the kernel about each path, leaving everything as it was.
PROBE = """
import json, os, sys

def attempt(action):
    try:
        return action() is not False
    except OSError:
        return False

def read(path):
    if os.path.isdir(path):
        return os.listdir(path)
    with open(path, "rb") as file:
        file.read(1)

def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW))

def create(path):
    new = path + "/+new"
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.unlink(new)

def rename(path):
    os.rename(path, path + "+moved")
    os.rename(path + "+moved", path)

def delete(path):
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(content)

answers = {}
for path in json.load(sys.stdin):
    is_dir = os.path.isdir(path)
    answers[path] = {
        "exists": os.path.lexists(path),
        "read": attempt(lambda: read(path)),
        "write": not is_dir and attempt(lambda: write(path)),
        "create": is_dir and attempt(lambda: create(path)),
        "rename": attempt(lambda: rename(path)),
        "delete": not is_dir and attempt(lambda: delete(path)),
    }
json.dump(answers, sys.stdout)
"""

paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
rules = st.tuples(
    st.sampled_from(("config", "flag")),
    st.sampled_from(("ro", "rw", "exclude")),
    st.one_of(paths, st.sampled_from(GLOBS)),
)


def build(root: Path, files: list[str], links: list[tuple[str, str]]) -> None:
    """Make the tree; a name that is taken by a file or directory already is left as it is."""
    for name in files:
        path = root / name
        if not any(p.is_file() for p in (path, *path.parents)) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    for name, target in links:
        path = root / name
        if path.parent.is_dir() and not os.path.lexists(path) and (root / target).exists():
            path.symlink_to(os.path.relpath(root / target, path.parent.resolve()))


def real_paths(root: Path) -> list[str]:
    """Everything in the tree that is not a link, relative."""
    found = []
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            if not path.is_symlink():
                found.append(str(path.relative_to(root)))
    return sorted(found)


def matches(root: Path, pattern: str) -> set[str]:
    """The real paths that a rule speaks about, relative to the project."""
    if any(c in pattern for c in "*?["):
        found = list(expanded(root, pattern.split("/")))
    else:
        found = [root / pattern]
    return {os.path.relpath(os.path.realpath(path), root) for path in found if path.exists()}


def expanded(directory: Path, parts: list[str]) -> Iterator[Path]:
    """As a shell does it: a component follows a link to a directory, `**` does not."""
    here, *rest = parts
    if here == "**":
        yield from expanded(directory, rest)
    for path in directory.iterdir():
        if here == "**":
            if path.is_dir() and not path.is_symlink():
                yield from expanded(path, parts)
        elif fnmatch.fnmatchcase(path.name, here):
            if not rest:
                yield path
            elif path.is_dir():
                yield from expanded(path, rest)


class Spec:
    """The documented rules."""

    def __init__(self, root: Path, policy: list[tuple[str, str, str]]) -> None:
        self.root = root
        self.claims: dict[str, tuple[tuple[bool, int, int], str]] = {}
        for layer, level, pattern in policy:
            exact = not any(c in pattern for c in "*?[")
            weight = (exact, ("config", "flag").index(layer), STRENGTH[level])
            for path in matches(root, pattern):
                if path not in self.claims or weight >= self.claims[path][0]:
                    self.claims[path] = (weight, level)
        self.paths = real_paths(root)

    def level(self, path: str) -> str:
        """The level of a path: the deepest claim on it or on what holds it."""
        while path not in ("", "."):
            if path in self.claims:
                return self.claims[path][1]
            path = os.path.dirname(path)
        return "rw"

    def visible(self, path: str) -> bool:
        """An excluded path is there itself; below it only what is shown again, and its way."""
        if self.level(path) != "exclude":
            return True
        if path in self.claims and self.visible(os.path.dirname(path) or "."):
            parent = os.path.dirname(path)
            if not parent or self.level(parent) != "exclude":
                return True
        return any(
            other.startswith(path + "/") and self.level(other) != "exclude" for other in self.paths
        )

    def predict(self, path: str) -> dict[str, bool]:
        """What the probe must answer."""
        level, is_dir = self.level(path), (self.root / path).is_dir()
        exists = self.visible(path)
        parent = os.path.dirname(path)
        held = any(
            other.startswith(path + "/") and self.level(other) != "rw" for other in self.paths
        )
        loose = exists and level == "rw" and self.level(parent) == "rw" and not held
        return {
            "exists": exists,
            "read": exists and (is_dir or level != "exclude"),
            "write": exists and not is_dir and level == "rw",
            "create": exists and is_dir and level == "rw",
            "rename": loose,
            "delete": loose and not is_dir,
        }


@settings(
    max_examples=int(os.environ.get("AGENT_SANDBOX_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    files=["a", "c.txt/c.txt/b"], links=[("b", "c.txt/c.txt")], policy=[("config", "ro", "*/b")]
)
@given(
    files=st.lists(paths, min_size=2, max_size=10),
    links=st.lists(st.tuples(paths, paths), max_size=2),
    policy=st.lists(rules, max_size=5),
)
def test_the_rules_predict_every_operation_on_every_path(
    runner: As,
    files: list[str],
    links: list[tuple[str, str]],
    policy: list[tuple[str, str, str]],
) -> None:
    """Reading, writing, creating, renaming and deleting work exactly where the rules say."""
    root = runner.project().resolve()
    try:
        build(root, files, links)
        runner.own(root)
        config = root.parent / f"{root.name}.json"
        config.write_text(json.dumps({"filesystem": in_config(policy)}))
        config.chmod(0o644)
        flags = [f"--{level}={pattern}" for layer, level, pattern in policy if layer == "flag"]
        spec = Spec(root, policy)

        done = runner.sandbox(
            "-c", config, *flags, "--", runner.python, "-I", "-S", "-c", PROBE,
            cwd=root, input=json.dumps(spec.paths),
        )  # fmt: skip

        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {path: spec.predict(path) for path in spec.paths}
    finally:
        shutil.rmtree(root)


def in_config(policy: list[tuple[str, str, str]]) -> dict[str, list[str]]:
    """The rules of the config layer as its `filesystem` table."""
    table: dict[str, list[str]] = {}
    for layer, level, pattern in policy:
        if layer == "config":
            table.setdefault(level, []).append(pattern)
    return table
