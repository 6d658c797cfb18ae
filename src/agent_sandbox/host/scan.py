"""Walks what a sandbox can write and finds the files that tools outside act on. Changes nothing.

A full walk reads every directory. So what was found is kept in the state directory, where no
sandbox can write, and a directory is read again only if its times or its inode have changed. The
kernel sets a directory's ctime when a name in it comes or goes, and nobody can set it back.
"""

from __future__ import annotations

import os
import time

from ..policy.triggers import (
    ANYWHERE,
    BARE,
    CRITICAL,
    GIT,
    HOOKS,
    LOGS,
    MAX_MODULES,
    MODULES,
    QUIET,
    SAMPLE_SUFFIX,
    WORKSPACE_SUFFIX,
    context_below,
    counts_links,
    enters,
    is_git,
    is_whole,
    wanted,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..policy.triggers import Identity, Item

    # dev, ino, ctime, mtime; the context asked for and the one found; sub-directories; names.
    Entry = tuple[int, int, int, int, str, str, tuple[str, ...], tuple[str, ...]]
    Listing = tuple[str, tuple[str, ...], tuple[str, ...]]

# A change within the same tick leaves the same ctime, and some file systems count whole seconds:
# younger than this, a time proves nothing.
SETTLED = 2_000_000_000
# Below this a walk costs less than finding out whether it can be avoided.
SMALL = 64
MAX_DIRECTORIES = 300_000
MAX_ITEMS = 100_000
# After so many seconds a half-written file is one that a killed run has left.
ABANDONED = 60.0
# Where a repository keeps the git directories of others.
KEPT = (".git/modules/", ".git/worktrees/")
# Local file systems that keep the times of directories as the rule above needs it.
KEEP_TIMES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "zfs", "bcachefs"}
)
FORMAT = 1
UNKNOWN = (0, 0, 0, 0, 0, 0, 0, 0, 0)
IS_DIRECTORY = 0o040000
TYPE_BITS = 0o170000


class Area:
    """What is walked: directories that a sandbox can write, and those in them that it cannot."""

    def __init__(self, roots: Collection[str], skip: Collection[str]) -> None:
        self.roots = sorted(roots)
        self.skip = frozenset(skip)

    def shape(self) -> list[object]:
        """What a kept walk must agree with."""
        return [FORMAT, self.roots, sorted(self.skip)]

    def covers(self, path: str) -> bool:
        """Whether a path is walked: the nearest directory above it decides."""
        while path:
            if path in self.skip:
                return False
            if path in self.roots:
                return True
            path = path.rpartition("/")[0]
        return False

    def joined(self, other: Area) -> Area:
        """The area that holds both."""
        skip = {p for p in self.skip if not other.covers(p)}
        skip |= {p for p in other.skip if not self.covers(p)}
        return Area({*self.roots, *other.roots}, skip)

    def overlaps(self, other: Area) -> bool:
        """Whether two areas have something in common."""
        return any(self.covers(root) for root in other.roots) or any(
            other.covers(root) for root in self.roots
        )


class Walk:
    """One walk: the directories and the files that matter."""

    def __init__(self, area: Area, known: Mapping[str, Entry], *, same_area: bool = False) -> None:
        # Before the first look: whatever changes from now on is younger.
        self.begun = time.time_ns()
        self.complete = True
        # How many directories were read.
        self.read = 0
        self.area = area
        stale = _stale(known)
        if same_area and known and not stale:
            self.dirs = known
        else:
            self.dirs = self._walk(known, stale)
        self.items = self._items()

    def _walk(
        self, known: Mapping[str, Entry], stale: Mapping[str, os.stat_result | None]
    ) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        skip = self.area.skip
        todo = [(root, _context_of(root)) for root in self.area.roots]
        while todo:
            path, context = todo.pop()
            entry = known.get(path)
            if entry is None or path in stale or entry[4] != context:
                fresh = self._look(path, context, stale.get(path))
                if fresh is None:
                    continue
                entry = fresh
            if len(found) >= MAX_DIRECTORIES:
                self.complete = False
                break
            found[path] = entry
            context = entry[5]
            for name in entry[6]:
                below = f"{path}/{name}"
                if below not in skip:
                    todo.append((below, context_below(context, name)))
        return found

    def _look(self, path: str, context: str, info: os.stat_result | None) -> Entry | None:
        """Read one directory. Its times come first: a change after them makes them differ."""
        self.read += 1
        try:
            if info is None:
                info = os.lstat(path)
            if info.st_mode & TYPE_BITS != IS_DIRECTORY:
                return None
            effective, subs, names = _listed(path, context)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            effective, subs, names = _probed(path, context)
            if info is None:
                return (0, 0, 0, 0, context, effective, subs, names)
        if info.st_ctime_ns > self.begun - SETTLED:
            return (0, 0, 0, 0, context, effective, subs, names)
        return (
            info.st_dev, info.st_ino, info.st_ctime_ns, info.st_mtime_ns, context, effective,
            subs, names,
        )  # fmt: skip

    def _items(self) -> dict[str, Item]:
        found: dict[str, Item] = {}
        for path, entry in self.dirs.items():
            if len(found) > MAX_ITEMS:
                # Nobody hides a hook behind heaps of other files.
                self.complete = False
                if entry[5] not in CRITICAL and not is_git(entry[5]):
                    continue
            if entry[7]:
                for name in entry[7]:
                    identity = identify(f"{path}/{name}")
                    if identity is not None or not name:
                        # Not even that much is known where a path has become too long.
                        found[f"{path}/{name}"] = (entry[5], identity or UNKNOWN)
                if len(found) > 2 * MAX_ITEMS:
                    break
        self.complete = self.complete and len(found) <= MAX_ITEMS
        return found

    def repositories(self) -> dict[str, tuple[int, int]]:
        """Git directories with device and inode."""
        found = {}
        for path, entry in self.dirs.items():
            if is_git(entry[5]):
                info = identify(path)
                found[path] = info[1:3] if info else (0, 0)
        return found

    def crowds(self) -> dict[str, set[str]]:
        """Where git keeps submodules or worktrees, and keeps too many: their names."""
        found: dict[str, set[str]] = {}
        for path, entry in self.dirs.items():
            if entry[5] not in (GIT, MODULES):
                continue
            for place in KEPT:
                home, inside, name = path.partition(place)
                if inside:
                    found.setdefault(home + place[:-1], set()).add(name)
        return {home: names for home, names in found.items() if len(names) > MAX_MODULES}


def _stale(known: Mapping[str, Entry]) -> dict[str, os.stat_result | None]:
    """Directories that are no longer as they were, with what they are now."""
    stale: dict[str, os.stat_result | None] = {}
    lstat = os.lstat
    for path, entry in known.items():
        try:
            info = lstat(path)
        except OSError:
            stale[path] = None
            continue
        if (
            info.st_ctime_ns != entry[2]
            or info.st_mtime_ns != entry[3]
            or info.st_ino != entry[1]
            or info.st_dev != entry[0]
        ):
            stale[path] = info
    return stale


def _context_of(root: str) -> str:
    context = context_below(ANYWHERE, root.rpartition("/")[2])
    return ANYWHERE if context == QUIET else context


def _listed(path: str, context: str) -> Listing:
    """The context that a directory turns out to have, its sub-directories, the names that count."""
    wants, whole, links = wanted(context), is_whole(context), counts_links(context)
    subs: list[str] = []
    names: list[str] = []
    every: list[str] = []
    with os.scandir(path) as scanned:
        for item in scanned:
            name = item.name
            every.append(name)
            if item.is_dir(follow_symlinks=False):
                subs.append(name)
            elif (
                whole
                or name in wants
                or name.endswith(WORKSPACE_SUFFIX)
                or (links and item.is_symlink())
            ):
                names.append(name)
    if _folds(path, every):
        _add_by_name(path, wants.difference(subs, names), subs, names)
    if "HEAD" in names and not is_git(context):
        if context == MODULES:
            return _listed(path, GIT)
        if context != HOOKS and _is_repository(path):
            return _listed(path, context + BARE)
    if context == HOOKS:
        names = [name for name in names if not name.endswith(SAMPLE_SUFFIX)]
    return _listing(context, [s for s in subs if enters(context, s)], names)


def _folds(path: str, every: list[str]) -> bool:
    """Whether a directory takes `.GIT` for `.git`, as others do and some directories of ext4.

    Asked of the kernel, with a name that has something to fold; most directories have none.
    """
    text = "".join(every)
    if text == text.lower() and text.isascii():
        return False
    for name in every:
        other = name.lower() if name != name.lower() else name.upper()
        if other != name:
            return other not in every and identify(f"{path}/{other}") is not None
    return False


def _add_by_name(path: str, wants: Collection[str], subs: list[str], names: list[str]) -> None:
    """Find what is there by its name, whatever it is called in the list."""
    for name in wants:
        identity = identify(f"{path}/{name}")
        if identity is not None:
            (subs if identity[0] & TYPE_BITS == IS_DIRECTORY else names).append(name)


def _listing(context: str, subs: list[str], names: list[str]) -> Listing:
    # Git replaces HEAD, and never writes through it; its record is another matter.
    return context, tuple(subs), tuple([n for n in names if n != "HEAD" or context == LOGS])


def _is_repository(path: str) -> bool:
    """Whether git takes a directory with a HEAD for a repository, when one works inside of it.

    With `commondir`, objects and references may lie elsewhere.
    """
    there = {n for n in ("commondir", "objects", "refs") if identify(f"{path}/{n}") is not None}
    return "commondir" in there or len(there) == 2


def _probed(path: str, context: str) -> Listing:
    """A directory that cannot be listed may still be entered by whoever knows a name in it."""
    subs: list[str] = []
    names = [""]
    _add_by_name(path, wanted(context), subs, names)
    if "HEAD" in names and not is_git(context) and _is_repository(path):
        return _probed(path, context + BARE)
    return _listing(context, subs, names)


def identify(path: str) -> Identity | None:
    """What the kernel says of a file, or None when there is none."""
    try:
        info = os.lstat(path)
    except (OSError, ValueError):
        return None
    return (
        info.st_mode, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns,
        info.st_uid, info.st_gid, info.st_nlink,
    )  # fmt: skip


def reusable(dirs: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Entries to compare times with; those that prove nothing never match. None for a few."""
    if len(dirs) < SMALL:
        return {}
    places = {entry[0]: path for path, entry in dirs.items()}
    places.pop(0, None)
    mounted = _mounted()
    unsure = {d for d, path in places.items() if file_system(path, mounted) not in KEEP_TIMES}
    if not unsure:
        return dirs
    return {
        path: (0, 0, 0, 0, *entry[4:]) if entry[0] in unsure else entry
        for path, entry in dirs.items()
    }


def file_system(path: str, mounted: Collection[tuple[str, str]]) -> str:
    """The type of the file system that holds a path; '' when nobody says.

    By the path and not by the device number, which btrfs makes up for each of its subvolumes.
    """
    best, kind = "", ""
    for point, its_kind in mounted:
        # The last of equal ones lies on top.
        if len(point) >= len(best) and (path == point or path.startswith(point + "/")):
            best, kind = point, its_kind
    return kind


def _mounted() -> list[tuple[str, str]]:
    """Mount points with the types of their file systems."""
    found = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields, _, rest = line.partition(" - ")
                point = fields.split(" ", 5)[4]
                found.append((_unescaped(point).rstrip("/"), rest.partition(" ")[0]))
    except OSError:
        return []
    return found


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def load(file: str, area: Area) -> tuple[dict[str, Entry], bool]:
    """What an earlier run kept, and whether it walked the same area. Damage counts as nothing."""
    try:
        with open(file, "rb") as opened:
            data = opened.read()
    except OSError:
        return {}, False
    # Our own file, in a directory that no sandbox can see: marshal need not fear its content.
    import marshal

    try:
        shape, dirs = marshal.loads(data)  # noqa: S302 - see above
        if shape[0] != FORMAT or not isinstance(dirs, dict):
            return {}, False
        return dirs, shape == area.shape()
    except (ValueError, EOFError, TypeError, IndexError):
        return {}, False


def save(file: str, area: Area, dirs: Mapping[str, Entry]) -> None:
    """Keep what was found. Another run may do the same: one wins, and the file is always whole."""
    import marshal

    # One name for all: what a killed run has left there is found, and does not pile up.
    fresh = f"{file}.new"
    try:
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        _clear_old(fresh)
        with open(fresh, "xb") as opened:
            opened.write(marshal.dumps((area.shape(), dict(dirs))))
        os.rename(fresh, file)
    except OSError:
        # Another run is writing at this moment, or the disk is full. Only speed is lost.
        return


def _clear_old(fresh: str) -> None:
    """Remove a file that nobody is writing any more."""
    try:
        if time.time() - os.lstat(fresh).st_mtime > ABANDONED:
            os.unlink(fresh)
    except FileNotFoundError:
        return
