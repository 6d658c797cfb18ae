"""Puts away what a run has planted, and puts back what it has changed.

Everything is done relative to directory descriptors with O_NOFOLLOW: another sandbox may still run
in the project and swap directories for links meanwhile. Then the step fails, and that is said; it
never reaches outside. Nothing is written in place, because a file may have a second name.

    <state>/quarantine/<run>/index    a line of JSON for each file: where from, why, when
    <state>/quarantine/<run>/1, 2, …  the files themselves
    <state>/quarantine/accepted       digests of what the user has put back
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ..errors import HostError, UsageError, reason
from ..policy import paths
from ..policy.triggers import FORBIDDEN, LINK_MARK, Finding
from ..record import Record
from . import sweeping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# O_PATH: a directory that may be entered but not listed is enough.
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What is larger, or a directory, is not copied to another file system but renamed where it is.
MAX_COPY = 1 << 24
INDEX = "index"
ACCEPTED = "accepted"
REPORTED = "reported"
FAILED = "failed"


class Kept(Record):
    """One file in quarantine."""

    id: str
    path: str
    what: str
    action: str
    time: float
    mode: int
    # Where it lies: a number in the run's directory, or a path beside its old one.
    at: str


def settle(
    findings: Sequence[Finding], *, state_dir: str, run: str, act: bool
) -> tuple[Finding, ...]:
    """Do what has to be done about each finding, and say on it what was done.

    `act` is false when the user has switched git's protection off: then nothing is moved.
    """
    store = _Store(state_dir, run)
    settled = []
    for finding in findings:
        if finding.severity != FORBIDDEN:
            settled.append(finding)
        elif not act:
            settled.append(finding.replace(action=REPORTED))
        else:
            try:
                done = _put_away(finding, store)
            except FileNotFoundError:
                # Another run was faster, or it has gone by itself.
                continue
            except OSError as error:
                done = _disable(finding, error)
            if done is not None:
                settled.append(done)
    return tuple(settled)


def _put_away(finding: Finding, store: _Store) -> Finding | None:
    """None when the user has agreed to exactly this content at this place."""
    path = finding.path.rstrip("/")
    name = path.rpartition("/")[2]
    here = _open_parent(path)
    try:
        if store.accepted and _digest(here, name, path) in store.accepted:
            return None
        try:
            kept = _exchange(here, name, finding, store)
        except PermissionError:
            # A directory that was made read-only; it is ours, or we are root.
            link = f"/proc/self/fd/{here}"
            os.chmod(link, stat.S_IMODE(os.stat(link).st_mode) | 0o700)
            kept = _exchange(here, name, finding, store)
    finally:
        os.close(here)
    return finding.replace(action=finding.remedy, id=kept)


def _disable(finding: Finding, error: OSError) -> Finding:
    """Where nothing can be kept, as on a full disk: give it a name on which nobody acts."""
    if error.errno == errno.EAGAIN:
        # Another sandbox is at work in the project; the end of that one will look again.
        return finding.replace(action=f"{FAILED}: {reason(error)}")
    path = finding.path.rstrip("/")
    name = path.rpartition("/")[2]
    aside = f"{name}.quarantined-{os.urandom(4).hex()}"
    try:
        here = _open_parent(path)
        try:
            os.rename(name, aside, src_dir_fd=here, dst_dir_fd=here)
        finally:
            os.close(here)
    except OSError:
        return finding.replace(action=f"{FAILED}: {reason(error)}")
    return finding.replace(action=f"{FAILED}: {reason(error)}; it is now '{aside}'")


def _exchange(here: int, name: str, finding: Finding, store: _Store) -> str:
    """Take a file away and, where there is something to put there instead, put that there."""
    fresh = _write_beside(here, finding) if finding.instead is not None else ""
    try:
        kept = store.take(here, name, finding)
        if fresh:
            os.rename(fresh, name, src_dir_fd=here, dst_dir_fd=here)
    except OSError:
        if fresh:
            os.unlink(fresh, dir_fd=here)
        raise
    return kept


def _open_parent(path: str) -> int:
    """The directory that holds a path, entered step by step: no link is followed anywhere."""
    here = os.open("/", DIRECTORY)
    for part in paths.parent(path).split("/")[1:]:
        try:
            deeper = os.open(part, DIRECTORY, dir_fd=here) if part else os.dup(here)
        finally:
            os.close(here)
        here = deeper
    return here


def _write_beside(here: int, finding: Finding) -> str:
    """Write a file, or make a link, under a name that nobody knows."""
    name = f".agent-sandbox-{os.urandom(8).hex()}"
    data = finding.instead or b""
    if stat.S_ISLNK(finding.mode):
        os.symlink(data.removeprefix(LINK_MARK), name, dir_fd=here)
        return name
    fd = os.open(name, CREATE, 0o600, dir_fd=here)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        if finding.owner is not None and os.geteuid() == 0:
            os.fchown(fd, *finding.owner)
        os.fchmod(fd, finding.mode & 0o777)
    finally:
        os.close(fd)
    return name


def _digest(here: int, name: str, path: str) -> str:
    """A digest of a file's place, kind and content; '' when it cannot be read."""
    import hashlib

    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            data = os.fsencode(os.readlink(name, dir_fd=here))
        elif stat.S_ISREG(info.st_mode) and info.st_size <= MAX_COPY:
            data = _read(here, name)
        else:
            return ""
    except OSError:
        return ""
    kind = str(stat.S_IFMT(info.st_mode)).encode()
    return hashlib.sha256(b"\0".join((os.fsencode(path), kind, data))).hexdigest()


def _read(here: int, name: str) -> bytes:
    with open(os.open(name, READ, dir_fd=here), "rb") as file:
        return file.read(MAX_COPY)


class _Store:
    """The quarantine of one run."""

    def __init__(self, state_dir: str, run: str) -> None:
        self._base = f"{state_dir}/quarantine"
        self._run = run
        self._count = 0
        self._fd = -1
        self.accepted = _accepted(self._base)

    def take(self, here: int, name: str, finding: Finding) -> str:
        """Move a file here. It is written down first, so that a crash loses nothing."""
        mode = _checked(here, name, finding)
        if self._fd < 0:
            os.makedirs(f"{self._base}/{self._run}", mode=0o700, exist_ok=True)
            self._fd = os.open(f"{self._base}/{self._run}", DIRECTORY)
        self._count += 1
        slot = str(self._count)
        kept = Kept(
            id=f"{self._run[:8]}-{slot}", path=finding.path.rstrip("/"), what=finding.what,
            action=finding.remedy, time=time.time(), mode=mode, at=slot,
        )  # fmt: skip
        beside = f"{name}.quarantined-{kept.id}"
        if not _fits(here, name, self._fd, mode):
            kept = kept.replace(at=f"{paths.parent(kept.path)}/{beside}")
        _append(f"{self._base}/{self._run}/{INDEX}", kept)
        if kept.at == slot:
            if _move(here, name, self._fd, slot):
                try:
                    _checked(self._fd, slot, finding)
                except OSError:
                    # Replaced in the last moment.
                    os.rename(slot, name, src_dir_fd=self._fd, dst_dir_fd=here)
                    raise
                _sever(self._fd, slot)
        else:
            os.rename(name, beside, src_dir_fd=here, dst_dir_fd=here)
        return kept.id


def _checked(here: int, name: str, finding: Finding) -> int:
    """The mode of a file that is the one that was judged."""
    info = os.stat(name, dir_fd=here, follow_symlinks=False)
    if finding.judged not in (None, (info.st_dev, info.st_ino)):
        raise OSError(errno.EAGAIN, "it was replaced meanwhile, look at it yourself")
    return info.st_mode


def _fits(here: int, name: str, there: int, mode: int) -> bool:
    """Whether a file can be moved from one directory to the other, or copied."""
    same = os.stat(here).st_dev == os.stat(there).st_dev
    if same or stat.S_ISLNK(mode):
        return True
    info = os.stat(name, dir_fd=here, follow_symlinks=False)
    return stat.S_ISREG(mode) and info.st_size <= MAX_COPY


def _move(here: int, name: str, there: int, slot: str) -> bool:
    """Move a file; across file systems copy it, and take the old one away. Tells if it moved."""
    try:
        os.rename(name, slot, src_dir_fd=here, dst_dir_fd=there)
    except OSError as error:
        if error.errno == errno.EXDEV:
            _copy(here, name, there, slot)
            return False
        if isinstance(error, PermissionError) and _is_directory(here, name):
            # Moving a directory rewrites its `..`, so it must be writable itself.
            _make_writable(here, name)
            os.rename(name, slot, src_dir_fd=here, dst_dir_fd=there)
        else:
            raise
    return True


def _is_directory(here: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _make_writable(here: int, name: str) -> None:
    handle = os.open(name, DIRECTORY, dir_fd=here)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def _copy(here: int, name: str, there: int, slot: str) -> None:
    info = os.stat(name, dir_fd=here, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=here), slot, dir_fd=there)
    else:
        _duplicate(here, name, there, slot)
    os.unlink(name, dir_fd=here)


def _duplicate(here: int, name: str, there: int, slot: str) -> None:
    """Write a new file with the content, the mode and, as far as we may, the owner of another."""
    with open(os.open(name, READ, dir_fd=here), "rb") as source:
        info = os.fstat(source.fileno())
        data = source.read(MAX_COPY)
    with open(os.open(slot, CREATE, 0o600, dir_fd=there), "wb") as file:
        file.write(data)
        if os.geteuid() == 0:
            os.fchown(file.fileno(), info.st_uid, info.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(info.st_mode) & 0o777)


def _sever(there: int, slot: str) -> None:
    """Make a kept file one that nobody else has.

    A sandbox may have a second name for it, or have it open, and would change what the user has
    looked at and puts back.
    """
    info = os.stat(slot, dir_fd=there, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_COPY:
        return
    fresh = f"{slot}.new"
    try:
        _duplicate(there, slot, there, fresh)
        os.rename(fresh, slot, src_dir_fd=there, dst_dir_fd=there)
    except OSError:
        # The disk is full. It is out of the way, and that is what counts.
        _unlink(fresh, there)


def _unlink(name: str, here: int) -> None:
    try:
        os.unlink(name, dir_fd=here)
    except FileNotFoundError:
        return


def _append(index: str, kept: Kept) -> None:
    import json

    row = {field: getattr(kept, field) for field in Kept.__fields__}
    with open(index, "a", encoding="ascii") as file:
        file.write(json.dumps(row) + "\n")


def _accepted(base: str) -> frozenset[str]:
    try:
        with open(f"{base}/{ACCEPTED}", encoding="ascii") as file:
            return frozenset(file.read().split())
    except (OSError, ValueError):
        return frozenset()


# --- what `sandboxctl quarantine` does ------------------------------------------------------------


def listed(state_dir: str) -> list[Kept]:
    """Everything in quarantine, the oldest first."""
    found = [kept for run in _runs(state_dir) for kept in _rows(run)]
    return sorted(found, key=lambda kept: kept.time)


def _runs(state_dir: str) -> list[str]:
    base = f"{state_dir}/quarantine"
    try:
        return [f"{base}/{name}" for name in sorted(os.listdir(base)) if name != ACCEPTED]
    except OSError:
        return []


def _rows(run: str) -> list[Kept]:
    import json

    found = []
    try:
        with open(f"{run}/{INDEX}", encoding="ascii") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return []
    for line in lines:
        try:
            kept = Kept(**json.loads(line))
        except (ValueError, TypeError):
            # A crash while it was written.
            continue
        if os.path.lexists(place(run, kept)):
            found.append(kept)
    return found


def place(run: str, kept: Kept) -> str:
    """Where a kept file lies."""
    return kept.at if kept.at.startswith("/") else f"{run}/{kept.at}"


def find(state_dir: str, id: str) -> tuple[str, Kept]:
    """The run's directory and the file of a name, or of the beginning of one."""
    found = [(run, kept) for run in _runs(state_dir) for kept in _rows(run)]
    exact = [pair for pair in found if pair[1].id == id]
    some = exact or [pair for pair in found if id and pair[1].id.startswith(id)]
    if len(some) != 1:
        raise UsageError(
            f"cannot choose a file in quarantine by '{id}': {len(some)} match",
            hint="'sandboxctl quarantine list' shows the names",
            code="no-such-id",
        )
    return some[0]


def restore(state_dir: str, id: str) -> Kept:
    """Put a file back where it was; what lies there now takes its place in quarantine.

    The user agrees to this content at this place: no later run moves it again.
    """
    run, kept = find(state_dir, id)
    try:
        here = _open_parent(kept.path)
        there = _open_parent(place(run, kept))
        try:
            left = _swap(here, kept.path.rpartition("/")[2], there, kept.at.rpartition("/")[2])
            agreed = _digest(here, kept.path.rpartition("/")[2], kept.path)
        finally:
            os.close(here)
            os.close(there)
        with open(f"{state_dir}/quarantine/{ACCEPTED}", "a", encoding="ascii") as file:
            file.write(f"{agreed}\n")
        if not left:
            _tidy(run)
    except OSError as error:
        raise HostError(
            f"cannot put '{kept.path}' back: {reason(error)}",
            hint=f"the file itself is '{place(run, kept)}'",
            code="quarantine-failed",
        ) from error
    return kept


def _swap(here: int, name: str, there: int, slot: str) -> bool:
    """Exchange two files, or move one; tells whether the slot holds something afterwards."""
    fresh = f".agent-sandbox-{os.urandom(8).hex()}"
    _move(there, slot, here, fresh)
    try:
        _move(here, name, there, slot)
        _sever(there, slot)
        left = True
    except FileNotFoundError:
        left = False
    except OSError:
        _move(here, fresh, there, slot)
        raise
    os.rename(fresh, name, src_dir_fd=here, dst_dir_fd=here)
    return left


def drop(state_dir: str, id: str) -> Kept:
    """Remove a file for good."""
    run, kept = find(state_dir, id)
    path = place(run, kept)
    try:
        there = _open_parent(path)
        try:
            if _is_directory(there, path.rpartition("/")[2]):
                sweeping.remove_tree(path)
            else:
                os.unlink(path.rpartition("/")[2], dir_fd=there)
        finally:
            os.close(there)
        _tidy(run)
    except OSError as error:
        raise HostError(
            f"cannot remove '{path}': {reason(error)}", code="quarantine-failed"
        ) from error
    return kept


def _tidy(run: str) -> None:
    """Remove the directory of a run of which nothing is left."""
    if not _rows(run):
        sweeping.remove_tree(run)
