"""Looks at a project's control files before and after a run, and says what has changed.

    watch = Watch(plan, state_dir, run)
    watch.before()
    …                          the sandbox lives and dies
    findings = watch.after()
    …                          what is forbidden is put away
    watch.close()

The baseline of a running sandbox lies in the state directory. Another one that starts meanwhile in
the same place takes it over: what the first has planted must not count as the user's own. After a
crash the next run does the same, so nothing is lost with the supervisor.
"""

from __future__ import annotations

import fcntl
import os

from ..errors import HostError, reason
from ..policy import paths
from ..policy.triggers import (
    GIT_FILES,
    HOOKS,
    INCLUDED,
    LINK_MARK,
    SAMPLE_SUFFIX,
    Snapshot,
    is_critical,
)
from . import scan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..policy.model import Plan
    from ..policy.triggers import Finding, Item

    Texts = dict[str, bytes | None]

# Contents that are kept: enough for every file that a person would write.
MAX_CRITICAL = 1 << 20
MAX_TEXT = 1 << 16
MAX_TOTAL = 1 << 24
# Reading a configuration character by character takes its time.
MAX_PARSED = 1 << 18
# Files that configurations include, and hooks in directories that they name.
MAX_NAMED = 1024
FORMAT = 1
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
AS_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
IS_FILE, IS_LINK = 0o100000, 0o120000
# Read-only directories that are looked at all the same: few files, and tools act on them.
LOOKED_AT = ("preset @control", "preset @git: control file")


def area_of(plan: Plan) -> scan.Area:
    """What a plan makes writable on the host: the project, git's directories, other repositories.

    What is mounted over a part of them keeps that part as it is. Another directory that the user
    opens counts only if it is a repository: it may be a store of any size.
    """
    opened = set()
    skip = []
    for mount in plan.mounts:
        if mount.file or mount.kind in ("pin", "symlink", "mask-file", "text", "device"):
            continue
        if mount.kind == "hold" or mount.rule.startswith(LOOKED_AT):
            # Removed outside, it can be made anew inside before it is covered again.
            continue
        own = mount.kind == "rw" and mount.source == mount.dest
        if own and not mount.rule.startswith("profile "):
            opened.add(mount.dest)
        else:
            skip.append(mount.dest)
    everything = scan.Area(opened, skip)
    roots = {p for p in opened if paths.within(p, plan.project) or _is_repository(p)}
    if everything.covers(plan.project):
        roots.add(plan.project)
    return scan.Area(
        [path for path in roots if not scan.Area(roots - {path}, skip).covers(path)], skip
    )


def _is_repository(path: str) -> bool:
    return os.path.lexists(f"{path}/.git") or os.path.lexists(f"{path}/HEAD")


class Watch:
    """The control files of one run."""

    def __init__(self, plan: Plan, state_dir: str, run: str) -> None:
        self.area = area_of(plan)
        self.project = plan.project
        self._plan = plan
        self.run = run
        self._base = f"{state_dir}/scans"
        parts = ["+" + p if p.startswith("+") else p for p in plan.project.split("/") if p]
        self._cache = "/".join((self._base, "projects", *parts, "+dirs"))
        self._first: scan.Walk | None = None
        self._baseline: Snapshot | None = None
        self._configs: Texts = {}
        self._lock = -1
        # Whether there was more after the run than could be looked at, and not before it.
        self.overrun = False

    def before(self) -> None:
        """Remember what is there."""
        try:
            # While anybody looks, no record goes away: see `close`.
            looking = self._open_lock()
            try:
                fcntl.flock(looking, fcntl.LOCK_SH)
                self._remember()
            finally:
                os.close(looking)
        except OSError as error:
            raise HostError(
                f"cannot look at the project's control files: {error.filename or ''} "
                f"{reason(error)}",
                hint="check the permissions of the project, and free space for the state directory",
                code="scan-failed",
            ) from error

    def _open_lock(self) -> int:
        try:
            return os.open(f"{self._base}/lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            os.makedirs(f"{self._base}/open", mode=0o700, exist_ok=True)
            return os.open(f"{self._base}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def _remember(self) -> None:
        dead = [r for r in self._records() if r.dead and r.area.overlaps(self.area)]
        for record in dead:
            # A crash left more unchecked than our part of it.
            self.area = self.area.joined(record.area)
        known, same = scan.load(self._cache, self.area)
        walk = _walk(self.area, known, same=same)
        items = dict(walk.items)
        texts = _read_all(items)
        self._configs = {p: t for p, t in texts.items() if t and p.rpartition("/")[2] in GIT_FILES}
        named = _named(self._configs, self.area)
        items.update(named)
        texts.update({path: read(path, item) for path, item in named.items()})
        # Read last: whoever has changed something by now had written its record before.
        others = [*dead, *(r for r in self._records() if not r.dead)]
        for record in sorted(others, key=lambda r: r.begun, reverse=True):
            record.overrule(self.area, items, texts)
        self._first = walk
        self._baseline = Snapshot(
            items=items, text=texts.get, repositories=walk.repositories(), complete=walk.complete
        )
        self._lock = _open_record(
            f"{self._base}/open", self.run, _dump(walk.begun, self.area, items, texts)
        )
        for record in dead:
            _remove(record.file)

    def _records(self) -> list[_Record]:
        base = f"{self._base}/open"
        found = (_load_record(f"{base}/{name}") for name in os.listdir(base) if name[0] != ".")
        return [record for record in found if record is not None]

    def after(self) -> tuple[Finding, ...]:
        """What has changed since. Call when nothing of the sandbox lives any more.

        What it raises means that nothing was compared: then `abandon`, not `close`.
        """
        first, baseline = self._first, self._baseline
        if first is None or baseline is None:
            return ()
        self._first = self._baseline = None
        return self._compared(first, baseline)

    def _compared(self, first: scan.Walk, baseline: Snapshot) -> tuple[Finding, ...]:
        known = scan.reusable(first.dirs)
        # A directory may have become a repository.
        joined = self.area.joined(area_of(self._plan))
        same = joined.shape() == self.area.shape()
        self.area = joined
        walk = _walk(self.area, known, same=first.complete and same)
        # A few directories are read again faster than everything is written.
        if walk.complete and max(first.read, walk.read) * 64 > len(walk.dirs) >= scan.SMALL:
            scan.save(self._cache, self.area, scan.reusable(walk.dirs))
        self.overrun = first.complete and not walk.complete
        items = {**walk.items, **_named(self._configs, self.area)}
        # Without times to rely on, contents decide.
        settled = first.begun - scan.SETTLED if known else 0
        texts: Texts = {}
        changed = [
            path
            for path, item in items.items()
            if _differs(path, item, baseline, texts, settled=settled)
        ]
        gone = [path for path in baseline.items if path not in items]
        crowds = walk.crowds() if walk.dirs is not first.dirs else {}
        if not changed and not gone and walk.complete and not crowds:
            return ()
        # Only now: most runs change no control file.
        from ..policy.delayed import compare

        def text(path: str) -> bytes | None:
            if path not in texts and path in items:
                texts[path] = read(path, items[path])
            return texts.get(path)

        now = Snapshot(
            items=items, text=text, repositories=walk.repositories(), complete=walk.complete,
            crowds=crowds,
        )  # fmt: skip
        if crowds:
            baseline = baseline.replace(crowds=first.crowds())
        return compare(baseline, now, [*changed, *gone])

    def close(self) -> None:
        """Forget the baseline: whatever had to be done has been done."""
        if self._lock < 0:
            return
        looking = self._open_lock()
        try:
            # Somebody who looks right now may have seen what this run had planted. Then the record
            # stays; it will be found dead, taken over and removed.
            fcntl.flock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(f"{self._base}/open/{self.run}")
            # Nobody writes a record now: what is half written was left by a start that was killed.
            for name in os.listdir(f"{self._base}/open"):
                if name[0] == ".":
                    _remove(f"{self._base}/open/{name}")
        except BlockingIOError:
            pass
        finally:
            os.close(looking)
            self.abandon()

    def abandon(self) -> None:
        """Leave the baseline behind: the next run here finds it dead and makes up for this one."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _walk(area: scan.Area, known: Mapping[str, scan.Entry], *, same: bool) -> scan.Walk:
    try:
        return scan.Walk(area, known, same_area=same)
    except (TypeError, ValueError, IndexError, AttributeError):
        # The kept file was damaged in a way that could still be read.
        return scan.Walk(area, {})


def _differs(
    path: str, item: Item, before: Snapshot, texts: Texts, *, settled: int
) -> bool:  # fmt: skip
    """Whether a file is another one than before; `touch` alone makes no difference."""
    was = before.items.get(path)
    if was is None:
        return True
    # On tmpfs a page that is mapped can be written without a new time: what git acts on is
    # compared by its content, always.
    if was[1] == item[1] and was[1][5] < settled and not is_critical(item[0], path):
        return False
    old, new = before.text(path), read(path, item)
    texts[path] = new
    if old is None or new is None:
        return was[1] != item[1]
    if old != new or (is_critical(item[0], path) and was[1][8] < item[1][8]):
        return True
    # A hook's mode decides whether git runs it.
    return item[0] == HOOKS and was[1][0] != item[1][0]


def read(path: str, item: Item) -> bytes | None:
    """The content of a file or the text of a link; None when it cannot be kept.

    Only of the one that was looked at. Another sandbox may swap a directory on the way for a link:
    what lies behind it would be put back into the project, where that one reads it.
    """
    kind = item[1][0] & scan.TYPE_BITS
    limit = MAX_CRITICAL if is_critical(item[0], path) else MAX_TEXT
    if kind not in (IS_FILE, IS_LINK) or (kind == IS_FILE and item[1][3] > limit):
        return None
    try:
        fd = os.open(path, READ if kind == IS_FILE else AS_LINK)
        try:
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) != item[1][1:3]:
                return None
            if kind == IS_LINK:
                return LINK_MARK + os.fsencode(os.readlink("", dir_fd=fd))
            data = os.read(fd, item[1][3] + 1)
            if len(data) > item[1][3]:
                # It has grown since it was looked at.
                data += os.read(fd, limit)
        finally:
            os.close(fd)
    except OSError:
        return None
    return data if len(data) <= limit else None


def _read_all(items: Mapping[str, Item]) -> Texts:
    """The contents of all files, git's own first, as far as there is room."""
    texts: Texts = {}
    left = MAX_TOTAL
    for path in sorted(items, key=lambda p: not is_critical(items[p][0], p)):
        texts[path] = data = read(path, items[path]) if left > 0 else None
        left -= len(data or b"")
    return texts


def _named(configs: Mapping[str, bytes | None], area: scan.Area) -> dict[str, Item]:
    """Files in the work tree that a repository's configuration makes part of itself."""
    found: dict[str, Item] = {}
    todo = list(configs.items())
    while todo and len(found) < MAX_NAMED:
        config, data = todo.pop()
        low = (data or b"").lower()
        if (b"include" not in low and b"hookspath" not in low) or len(low) > MAX_PARSED:
            continue
        from ..policy.gitconfig import entries, includes, value_of

        parsed = entries((data or b"").decode("utf-8", "surrogateescape"))
        home = paths.parent(config)
        new = {_resolved(name, home) for name in includes(parsed)}.difference(found)
        todo += [(p, read(p, found[p])) for p in new if _note(found, p, INCLUDED, area)]
        hooks = value_of(parsed, "core", "hookspath")
        if hooks and home.endswith("/.git"):
            _note_hooks(found, _resolved(hooks, paths.parent(home)), area)
    return found


def _resolved(name: str, base: str) -> str:
    return paths.normalise(name if name.startswith(("/", "~")) else f"{base}/{name}")


def _note(found: dict[str, Item], path: str, context: str, area: scan.Area) -> bool:
    identity = scan.identify(path) if area.covers(path) else None
    if identity is not None:
        found[path] = (context, identity)
    return identity is not None


def _note_hooks(found: dict[str, Item], directory: str, area: scan.Area) -> None:
    try:
        names = sorted(os.listdir(directory)) if area.covers(directory) else []
    except OSError:
        return
    for name in names[:MAX_NAMED]:
        if not name.endswith(SAMPLE_SUFFIX) and not os.path.isdir(f"{directory}/{name}"):
            _note(found, f"{directory}/{name}", HOOKS, area)


class _Record:
    """The baseline of another run."""

    def __init__(self, file: str, *, dead: bool, content: tuple[int, list[str], list[str]],
                 items: Mapping[str, tuple[Item, bytes | None]]) -> None:  # fmt: skip
        self.file = file
        self.dead = dead
        self.begun, roots, skip = content
        self.area = scan.Area(roots, skip)
        self._items = items

    def overrule(self, area: scan.Area, items: dict[str, Item], texts: Texts) -> None:
        """Put an older state of git's files in the place of what is there now."""
        for path in [p for p, item in items.items() if is_critical(item[0], p)]:
            if path not in self._items and self.area.covers(path):
                del items[path]
        for path, (item, text) in self._items.items():
            if area.covers(path):
                items[path], texts[path] = item, text


def _dump(begun: int, area: scan.Area, items: Mapping[str, Item], texts: Texts) -> bytes:
    import marshal

    critical = {
        path: (_sure(item, begun), texts.get(path))
        for path, item in items.items()
        if is_critical(item[0], path)
    }
    return marshal.dumps((FORMAT, begun, area.roots, sorted(area.skip), critical))


def _sure(item: Item, begun: int) -> Item:
    """An item whose time counts only if it proves something."""
    context, known = item
    if known[5] < begun - scan.SETTLED:
        return item
    return context, (*known[:5], -1, *known[6:])


def _open_record(base: str, run: str, data: bytes) -> int:
    """Write a record; its lock tells others that its owner lives."""
    hidden = f"{base}/.{run}"
    fd = os.open(hidden, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.rename(hidden, f"{base}/{run}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _load_record(file: str) -> _Record | None:
    import marshal

    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            dead = True
        except BlockingIOError:
            dead = False
        try:
            # Our own file, in a directory that no sandbox can see.
            version, begun, roots, skip, items = marshal.loads(opened.read())  # noqa: S302
            if version == FORMAT:
                return _Record(file, dead=dead, content=(begun, roots, skip), items=items)
        except (ValueError, EOFError, TypeError):
            pass
    if dead:
        _remove(file)
    return None


def _remove(file: str) -> None:
    try:
        os.unlink(file)
    except FileNotFoundError:
        return
