"""What explicit excludes have hidden before, so that they keep hold of it.

A rule names a path. What it hid in an earlier run may since have another name: a link was removed
through which it was reached, or a directory was renamed in a run that did not have the rule. The
state directory remembers the files themselves, by device and inode.
"""

from __future__ import annotations

import os

from ..policy import paths
from ..policy.model import BUILT_IN, EXCLUDE, Match
from ..record import Record
from .locate import kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..policy.model import Rule

FIELDS = 4
# Above this number only what was reached through a link is remembered: the rest is pinned anyway.
MANY = 1000


class Memory(Record):
    """One file or directory that a rule has hidden."""

    pattern: str
    real: str
    device: int
    inode: int


def place(state_dir: str, project: str) -> str:
    """Where a project's memories are. The path is the project's own, so none collide."""
    return f"{state_dir}/excludes{project}/+list"


def parse(text: str) -> tuple[Memory, ...]:
    """The memories in a file; what is damaged is forgotten."""
    words = text.split("\0")
    found = []
    for at in range(0, len(words) - FIELDS + 1, FIELDS):
        pattern, real, device, inode = words[at : at + FIELDS]
        if pattern.startswith("/") and real.startswith("/") and (device + inode).isdigit():
            found.append(Memory(pattern=pattern, real=real, device=int(device), inode=int(inode)))
    return tuple(found)


def dump(memories: Iterable[Memory]) -> str:
    """A file of memories."""
    return "".join(f"{m.pattern}\0{m.real}\0{m.device}\0{m.inode}\0" for m in memories)


def read(state_dir: str, project: str) -> tuple[Memory, ...]:
    """What is remembered of a project."""
    try:
        with open(place(state_dir, project), encoding="utf-8", errors="surrogateescape") as file:
            return parse(file.read())
    except OSError:
        return ()


def explicit(rules: Iterable[Rule]) -> set[str]:
    """The patterns of excludes that somebody has written."""
    return {r.pattern for r in rules if r.level == EXCLUDE and r.source.layer > BUILT_IN}


def renewed(
    old: Iterable[Memory], rules: Iterable[Rule], matches: Mapping[str, tuple[Match, ...]]
) -> tuple[Memory, ...]:
    """What is to be remembered from this run on; rules that it does not have keep theirs."""
    patterns = sorted(explicit(rules))
    many = sum(len(matches.get(p, ())) for p in patterns) > MANY
    found = [memory for memory in old if memory.pattern not in patterns][-MANY:]
    for pattern in patterns:
        for match in matches.get(pattern, ()):
            if many and not match.links:
                continue
            try:
                info = os.lstat(match.real)
            except OSError:
                continue
            found.append(
                Memory(
                    pattern=pattern, real=match.real, device=info.st_dev, inode=info.st_ino
                )
            )  # fmt: skip
    return tuple(found)


def recall(
    rules: Iterable[Rule], matches: Mapping[str, tuple[Match, ...]], state_dir: str, project: str
) -> dict[str, tuple[Match, ...]]:
    """What the rules of now have hidden before and do not name any more: by pattern."""
    patterns = explicit(rules)
    if not patterns:
        return {}
    known = {m.real for pattern in patterns for m in matches.get(pattern, ())}
    lost: dict[tuple[int, int], Memory] = {}
    found: dict[str, tuple[Match, ...]] = {}
    for memory in read(state_dir, project):
        if memory.pattern not in patterns or memory.real in known:
            continue
        match = _same(memory, memory.real)
        if match is None:
            lost[memory.device, memory.inode] = memory
        else:
            found[memory.pattern] = (*found.get(memory.pattern, ()), match)
    if lost:
        for pattern, match in _search(project, lost):
            if match.real not in known:
                found[pattern] = (*found.get(pattern, ()), match)
    return found


def still_there(memories: Iterable[Memory]) -> list[Match]:
    """Of what was hidden, what is where it was."""
    found = [_same(memory, memory.real) for memory in memories]
    return [match for match in found if match is not None]


def _same(memory: Memory, path: str) -> Match | None:
    """A path, if what was remembered is there."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    if (info.st_dev, info.st_ino) != (memory.device, memory.inode):
        return None
    return Match(path=path, real=path, kind=kind_of(info.st_mode))


def _search(project: str, lost: Mapping[tuple[int, int], Memory]) -> Iterable[tuple[str, Match]]:
    """Find what has another name now. A whole walk, but only when something is missing."""
    inodes = {inode for _, inode in lost}
    todo = [project]
    while todo:
        try:
            scanned = os.scandir(todo.pop())
        except OSError:
            continue
        with scanned:
            for item in scanned:
                if item.inode() in inodes:
                    info = item.stat(follow_symlinks=False)
                    memory = lost.get((info.st_dev, info.st_ino))
                    if memory is not None:
                        kind = kind_of(info.st_mode)
                        yield memory.pattern, Match(path=item.path, real=item.path, kind=kind)
                if item.is_dir(follow_symlinks=False) and not paths.within(item.path, "/proc"):
                    todo.append(item.path)
