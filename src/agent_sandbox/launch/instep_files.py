"""Files that are kept in step: how they are read, written, replaced and locked.

What a sandbox may have written is opened in a directory that is ours, never through a link, as a
plain file of limited size. The agent's own lock is held for a moment only, to look whether anything
has changed and to rename: whoever waits for it longer than ten seconds takes it for left over, and
two would write.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from contextlib import contextmanager

from agent_sandbox.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_BYTES = 16 << 20
# How much larger than the host's a file inside may be.
MORE_BYTES = 2 << 20
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITING = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# In the name of a version that is not in place yet, after the file's.
MARK = ".agent-sandbox-tmp."
# As agents do it: a lock that nobody has touched for so long is left over.
STALE = 10.0
# A lock of ours that is older was held up (a stopped process, a machine asleep): it may be lost.
HELD = 5.0
EXCLUSIVE_SECONDS = 2.0
# Another run that starts in the moment in which a version is made takes it for left over.
SWEPT = "another run has swept it"
# The sandbox may fill its directory.
MOST_NAMES = 10_000


class Refused(Exception):
    """A version that cannot be used; nothing is changed because of it."""


class Busy(Refused):
    """Somebody else is writing: it may be tried again."""


def head(raw: bytes | None) -> bytes:
    """Lines of comment at the beginning: Copilot has some in its JSON."""
    end = 0
    while raw is not None and raw.startswith(b"//", end):
        end = raw.find(b"\n", end) + 1
        if not end:
            return raw
    return raw[:end] if raw is not None else b""


def document(raw: bytes | None) -> dict[str, object] | None:
    """A JSON object, or None where there is no file. One reading: what is odd is refused."""
    if raw is None:
        return None
    body = raw[len(head(raw)) :]
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON") from error
    if not isinstance(value, dict):
        raise Refused("not a table")
    return value


def _constant(name: str) -> object:
    raise ValueError(name)


def dump(value: dict[str, object]) -> bytes:
    """The text of a document; given up as soon as it is too large to be read again."""
    made = bytearray()
    try:
        for part in json.JSONEncoder(indent=2, allow_nan=False).iterencode(value):
            made += part.encode("ascii")
            if len(made) > MAX_BYTES:
                raise Refused("too large")
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON") from error
    return bytes(made)


def read(directory: int, name: str, most: int = MAX_BYTES) -> bytes | None:
    """A plain file of limited size, not through a link; None where there is none."""
    try:
        fd = os.open(name, READING, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused("not a plain file") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > most:
            raise Refused("not a plain file, or too large")
        data = bytearray()
        while chunk := os.read(fd, 1 << 20):
            data += chunk
            if len(data) > most:
                raise Refused("too large")
        return bytes(data)
    finally:
        os.close(fd)


def size(directory: int, name: str) -> int:
    """How large a file is; 0 where there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except OSError:
        return 0


def mode(directory: int, name: str) -> int:
    """The mode for a file's next version. A link has one too, and it says nothing."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return 0o600
    return stat.S_IMODE(info.st_mode) & 0o666 | 0o600 if stat.S_ISREG(info.st_mode) else 0o600


def identity(info: os.stat_result) -> tuple[int, ...]:
    """What is not the same for two versions of a file."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class Staged:
    """The next version of a file: written beside it, then put in its place in one piece."""

    def __init__(self, directory: int, name: str, data: bytes, bits: int = 0o600) -> None:
        self._directory, self._name = directory, name
        self._fresh = f"{name}{MARK}{os.urandom(6).hex()}"
        self._fd = os.open(self._fresh, WRITING, 0o600, dir_fd=directory)
        self._there = True
        try:
            # Until it is in place: `sweep` removes those that nobody holds.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fchmod(self._fd, bits)
            os.fsync(self._fd)
        except BlockingIOError as error:
            self.drop()
            raise Busy(SWEPT) from error
        except BaseException:
            self.drop()
            raise

    def put(self) -> None:
        """Put it in place."""
        here = self._directory
        try:
            os.rename(self._fresh, self._name, src_dir_fd=here, dst_dir_fd=here)
        except FileNotFoundError as error:
            raise Busy(SWEPT) from error
        self._there = False

    def identity(self) -> tuple[int, ...]:
        """Of this version, as it is in its place."""
        return identity(os.fstat(self._fd))

    def drop(self) -> None:
        """Close it; remove it if it was not put in place."""
        try:
            if self._there:
                os.unlink(self._fresh, dir_fd=self._directory)
        except OSError:
            pass
        finally:
            os.close(self._fd)


def write(directory: int, name: str, data: bytes) -> None:
    """Put a file there in one piece, for nobody else to read."""
    staged = Staged(directory, name, data)
    try:
        staged.put()
    finally:
        staged.drop()


def sweep(directory: int, name: str) -> None:
    """Remove versions of a file that a killed process has left beside it."""
    found = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MOST_NAMES:
                break
            if entry.name.startswith(name) and MARK in entry.name:
                found.append(entry.name)
    for left in found:
        try:
            fd = os.open(left, READING, dir_fd=directory)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.unlink(left, dir_fd=directory)
        except OSError:
            # Its process is alive.
            continue
        finally:
            os.close(fd)


class AgentLock:
    """The agent's own lock on a file: a directory beside it (npm's proper-lockfile)."""

    def __init__(self, directory: int, place: str, name: str, *, forced: bool = False) -> None:
        self._directory, self.place, self.name = directory, place, name
        # Go on without it when it cannot be had: the sandbox may hold it to stop us.
        self._forced = forced
        self._ours: tuple[int, ...] | None = None
        self._since = 0.0

    def is_free(self) -> bool:
        """Whether it can be had now; one that was left over is removed, as agents do."""
        try:
            info = os.stat(self.name, dir_fd=self._directory, follow_symlinks=False)
            if time.time() - info.st_mtime > STALE:
                os.rmdir(self.name, dir_fd=self._directory)
                return True
        except FileNotFoundError:
            return True
        except OSError:
            pass
        return self._forced

    def take(self, mark: int) -> bool:
        """Take it without waiting, and give it a time of change by which it is known as ours."""
        try:
            os.mkdir(self.name, 0o700, dir_fd=self._directory)
        except FileExistsError:
            return self._forced
        except OSError as error:
            raise Refused(f"cannot lock it: {error.strerror}") from error
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            os.utime(self.name, ns=(mark, mark), dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            pass
        self._ours = _known(self._directory, self.name)
        return True

    def is_held(self) -> bool:
        """Whether nobody can have taken it for left over; also for one that goes without."""
        if self._ours is None:
            return self._forced
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - self._since
        return age < HELD and _known(self._directory, self.name) == self._ours

    def release(self) -> None:
        """Give it back, unless somebody else has it by now."""
        try:
            if self._ours is not None and _known(self._directory, self.name) == self._ours:
                os.rmdir(self.name, dir_fd=self._directory)
        except OSError:
            return


def _known(directory: int, name: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mtime_ns


class Journal(Record):
    """What the holder of `exclusive` is about to lock, for whoever comes after its death."""

    fd: int

    def note(self, rows: Sequence[tuple[str, str, int]]) -> None:
        """Write down (directory, name, time of change) of each lock."""
        os.ftruncate(self.fd, 0)
        if rows:
            os.pwrite(self.fd, json.dumps(rows).encode("ascii"), 0)

    def clear(self) -> None:
        """Remove what a killed holder has left, where it is surely that.

        Nobody else gives a lock this very nanosecond, and whoever wrote it down is dead: the
        journal is ours now.
        """
        try:
            rows = json.loads(os.pread(self.fd, 1 << 16, 0) or b"[]")
            for place, name, mark in rows:
                _remove(str(place), str(name), mark)
        except (ValueError, TypeError):
            pass
        os.ftruncate(self.fd, 0)


def _remove(place: str, name: str, mark: object) -> None:
    try:
        directory = os.open(place, DIRECTORY)
    except OSError:
        return
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if info.st_mtime_ns == mark:
            os.rmdir(name, dir_fd=directory)
    except OSError:
        return
    finally:
        os.close(directory)


@contextmanager
def exclusive(path: str) -> Iterator[Journal]:
    """One at a time among all runs of a user."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + EXCLUSIVE_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise Busy("another run keeps files in step") from error
                time.sleep(0.005)
        journal = Journal(fd=fd)
        journal.clear()
        yield journal
    finally:
        os.close(fd)


@contextmanager
def locked(journal: Journal, locks: Sequence[AgentLock]) -> Iterator[None]:
    """Hold the agents' locks. None is waited for while another one is held."""
    now = int(time.time()) * 10**9
    marks = [now + int.from_bytes(os.urandom(8)) % 10**9 for _ in locks]
    journal.note([(lock.place, lock.name, mark) for lock, mark in zip(locks, marks, strict=True)])
    try:
        if not all(lock.take(mark) for lock, mark in zip(locks, marks, strict=True)):
            raise Busy("it stays locked")
        yield
    finally:
        for lock in locks:
            lock.release()
        journal.note(())
