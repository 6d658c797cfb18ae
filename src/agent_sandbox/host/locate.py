"""Finds paths on the host: what they really are, and through which links they are reached."""

from __future__ import annotations

import os
import stat

from ..errors import PolicyError
from ..policy import paths
from ..policy.model import DIR, FILE, OTHER, SOCKET, Link, Match
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The kernel's own limit on links in one look-up (MAXSYMLINKS).
MAX_LINKS = 40


def kind_of(mode: int) -> str:
    """The model's word for a file type."""
    if stat.S_ISDIR(mode):
        return DIR
    if stat.S_ISREG(mode):
        return FILE
    return SOCKET if stat.S_ISSOCK(mode) else OTHER


def check_open(path: str) -> None:
    """Refuse to take what lies in a closed directory of our own for missing.

    A sandbox can close a directory that it owns, and open it again in the next run: what should
    have been hidden or held there would be neither.
    """
    for directory in paths.parents(path):
        try:
            owner = os.lstat(directory).st_uid
        except OSError:
            continue
        if owner == os.getuid():
            raise PolicyError(
                f"cannot look into '{directory}': permission denied",
                hint=f"a sandbox may have closed it; open it: chmod u+rwx '{directory}'",
                code="closed-directory",
            )
        return


class Locator:
    """Looks paths up; remembers directories that are not links, since most paths share them."""

    def __init__(self) -> None:
        self._plain: set[str] = {"/"}
        self._listed: dict[str, frozenset[str]] = {}

    def learn(self, directory: str) -> None:
        """Read a directory below which many paths will be asked for, most of them in vain."""
        try:
            self._listed[directory + "/"] = frozenset(os.listdir(directory))
        except OSError:
            return

    def names(self, directory: str) -> frozenset[str]:
        """What a directory that was read holds."""
        return self._listed.get(directory + "/", frozenset())

    def find(self, path: str) -> Match | None:
        """The path as it is on the host; None when it is missing, dangling or unreachable."""
        for prefix, names in self._listed.items():
            if path.startswith(prefix):
                first = path[len(prefix) :].partition("/")[0]
                if first not in names and first not in ("", ".", ".."):
                    return None
        head, _, name = path.rpartition("/")
        try:
            if (head or "/") in self._plain and name not in ("", ".", ".."):
                mode = os.lstat(path).st_mode
                if not stat.S_ISLNK(mode):
                    # Most paths: one call tells everything.
                    if stat.S_ISDIR(mode):
                        self._plain.add(path)
                    return Match(path=path, real=path, kind=kind_of(mode))
            mode = os.stat(path).st_mode
        except PermissionError:
            check_open(path)
            return None
        except OSError:
            return None
        real, links = self._walk(path)
        if real is None:
            return None
        return Match(path=path, real=real, kind=kind_of(mode), links=links)

    def _walk(self, path: str) -> tuple[str | None, tuple[Link, ...]]:
        """Resolve component by component, as the kernel does, noting each link."""
        if path in self._plain:
            return path, ()
        links: list[Link] = []
        todo = [part for part in reversed(path.split("/")) if part]
        here = "/"
        while todo:
            part = todo.pop()
            if part == ".":
                continue
            if part == "..":
                here = paths.parent(here)
                continue
            step = here + part if here == "/" else f"{here}/{part}"
            if step in self._plain:
                here = step
                continue
            try:
                mode = os.lstat(step).st_mode
                text = os.readlink(step) if stat.S_ISLNK(mode) else ""
            except OSError:
                return None, ()
            if not text:
                if stat.S_ISDIR(mode):
                    self._plain.add(step)
                here = step
                continue
            links.append(Link(at=step, text=text))
            if len(links) > MAX_LINKS:
                return None, ()
            todo += [part for part in reversed(text.split("/")) if part]
            if text.startswith("/"):
                here = "/"
        return here, tuple(links)


class Position(Record):
    """How far a pattern has matched: where its hits go, its components, the next one to match."""

    hits: dict[str, None]
    parts: tuple[Callable[[str], bool] | None, ...]
    at: int = 0


def expand_globs(patterns: Iterable[str]) -> dict[str, list[str]]:
    """Every path that each glob matches, sorted. Each directory is read once for all patterns."""
    hits: dict[str, dict[str, None]] = {pattern: {} for pattern in patterns}
    by_base: dict[str, list[Position]] = {}
    for pattern, found in hits.items():
        base, parts = paths.split_glob(pattern)
        while len(parts) > 1 and parts[-1] == "**":
            parts.pop()
        compiled = tuple(
            None if part == "**" else paths.compile_component(part, pattern) for part in parts
        )
        by_base.setdefault(base, []).append(Position(hits=found, parts=compiled))
    for base, positions in by_base.items():
        todo = [(base, positions)]
        while todo:
            todo += _scan(*todo.pop())
    return {pattern: sorted(found) for pattern, found in hits.items()}


def _scan(directory: str, positions: list[Position]) -> list[tuple[str, list[Position]]]:
    """Match the entries of one directory; returns the directories to look into next."""
    try:
        scanned = os.scandir(directory)
    except PermissionError:
        check_open(directory + "/.")
        return []
    except OSError:
        return []
    anywhere, tries = _alternatives(positions)
    prefix = directory if directory == "/" else directory + "/"
    # Git's objects are many, and their names are hashes of content that is compressed anyway.
    skipped = "objects" if directory.endswith("/.git") else None
    todo = []
    with scanned:
        for item in scanned:
            name = item.name
            further = []
            for matches, last, position in tries:
                if matches is not None and not matches(name):
                    continue
                if last:
                    position.hits[prefix + name] = None
                else:
                    further.append(position.replace(at=position.at + 1))
            # A component that was named follows a link, as a shell does; `**` does not.
            if further and item.is_dir():
                plain = anywhere if item.is_dir(follow_symlinks=False) else []
                todo.append((prefix + name, [*plain, *further]))
            elif anywhere and name != skipped and item.is_dir(follow_symlinks=False):
                todo.append((prefix + name, anywhere))
    return todo


def _alternatives(
    positions: list[Position],
) -> tuple[list[Position], list[tuple[Callable[[str], bool] | None, bool, Position]]]:
    """Split positions: those that any directory continues (`**`), and those to try by name.

    Equal positions are kept once: with several `**` there are many ways to the same one.
    """
    anywhere: dict[tuple[int, int], Position] = {}
    tries: dict[tuple[int, int], Position] = {}
    for start in positions:
        position = start
        while position.parts[position.at] is None:
            anywhere[id(position.parts), position.at] = position
            if position.at + 1 == len(position.parts):
                break
            position = position.replace(at=position.at + 1)
        tries[id(position.parts), position.at] = position
    named = [(p.parts[p.at], p.at + 1 == len(p.parts), p) for p in tries.values()]
    return list(anywhere.values()), named
