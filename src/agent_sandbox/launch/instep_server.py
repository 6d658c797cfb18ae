"""Keeps files of an agent's state in step with the host's; a process of its own outside.

    python -I -S instep_server.py ORDERS NULL SUPERVISOR

Descriptors: orders in JSON, one that is not used, and a stream to the supervisor. The files inside
are hostile: they are opened in a directory that is ours, never through a link, as plain files of
limited size, and only `policy.instep` decides what of them goes to the host. Each step holds a lock
among all runs of the user, and the agent's own locks, so that no writer is undone. The host's file
is replaced in one piece; then the one inside; then what both had in common is written down. Killed
anywhere in between, the next step comes to the same end.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from agent_sandbox.launch.syscalls import syscall
from agent_sandbox.launch.watching import IN_CREATE, IN_MOVED_TO, NUMBERS, instance
from agent_sandbox.policy import instep
from agent_sandbox.policy.profiles import COPY
from agent_sandbox.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

READY = b"\n"
IN_CLOSE_WRITE = 0x8
MAX_BYTES = 16 << 20
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITING = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# At most this often, however often the sandbox writes; and at least, where nothing tells.
PAUSE = 0.1
GLANCE = 2.0
# As agents do it: a lock that nobody has touched for so long is left over.
STALE = 10.0
LOCK_SECONDS = 12.0
INNER_SECONDS = 1.0


class File(Record):
    """One file: its private directory and name, the host's path, and the last version in step."""

    mode: str
    root: str
    name: str
    outside: str
    keys: str
    base: str


class Refused(Exception):
    """A version that cannot be used; nothing is changed because of it."""


def _document(raw: bytes | None) -> dict[str, object] | None:
    """A JSON object, or None where there is no file. One reading: what is odd is refused."""
    if raw is None:
        return None
    body = raw[len(_head(raw)) :]
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON") from error
    if not isinstance(value, dict):
        raise Refused("not a table")
    return value


def _head(raw: bytes | None) -> bytes:
    """Lines of comment at the beginning: Copilot has some in its JSON."""
    end = 0
    while raw is not None and raw.startswith(b"//", end):
        end = raw.find(b"\n", end) + 1
        if not end:
            return raw
    return raw[:end] if raw is not None else b""


def _constant(name: str) -> object:
    raise ValueError(name)


def _dump(document: dict[str, object]) -> bytes:
    try:
        return json.dumps(document, indent=2, allow_nan=False).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON") from error


def read(directory: int, name: str) -> bytes | None:
    """A plain file of limited size, not through a link; None where there is none."""
    try:
        fd = os.open(name, READING, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused("not a plain file") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            raise Refused("not a plain file, or too large")
        data = b""
        while chunk := os.read(fd, 1 << 20):
            data += chunk
            if len(data) > MAX_BYTES:
                raise Refused("too large")
        return data
    finally:
        os.close(fd)


def write(directory: int, name: str, data: bytes) -> None:
    """Put a file there in one piece, with the mode of the one before it."""
    try:
        mode = stat.S_IMODE(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode) & 0o666
    except FileNotFoundError:
        mode = 0o600
    fresh = f"{name}.tmp.{os.urandom(6).hex()}"
    fd = os.open(fresh, WRITING, 0o600, dir_fd=directory)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode | 0o600)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        try:
            os.unlink(fresh, dir_fd=directory)
        except OSError:
            pass
        raise


class AgentLock:
    """The agent's own lock on a file: a directory beside it (npm's proper-lockfile)."""

    def __init__(self, directory: int, name: str, seconds: float, *, forced: bool = False) -> None:
        self._directory, self._name, self._seconds = directory, name, seconds
        # Go on without it when it cannot be had: the sandbox may hold it to stop us.
        self._forced = forced
        self._held = False

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                os.mkdir(self._name, 0o700, dir_fd=self._directory)
            except FileExistsError:
                self._drop_stale()
            except OSError as error:
                raise Refused(f"cannot lock it: {error.strerror}") from error
            else:
                self._held = True
                return
            if time.monotonic() >= deadline and self._forced:
                return
            if time.monotonic() >= deadline:
                raise Refused("it stays locked")
            time.sleep(0.02)

    def _drop_stale(self) -> None:
        try:
            info = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
            if time.time() - info.st_mtime > STALE:
                os.rmdir(self._name, dir_fd=self._directory)
        except OSError:
            return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if self._held:
                os.rmdir(self._name, dir_fd=self._directory)
        except OSError:
            return


class _NoLock:
    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class Pair:
    """One file inside and its counterpart on the host."""

    def __init__(self, file: File, project: str, lock: str) -> None:
        self._file, self._project, self._lock = file, project, lock
        self._keys = instep.TABLES.get(file.keys)
        parent, _, self._outer = file.outside.rpartition("/")
        self.inside = os.open(file.root, DIRECTORY)
        self.host = os.open(parent or "/", DIRECTORY)
        os.makedirs(file.base, mode=0o700, exist_ok=True)
        self._bases = os.open(file.base, DIRECTORY)
        self._seen: tuple[object, object] = (None, None)
        self.problem = ""
        self._old: set[str] = set()
        self._new: set[str] = set()

    def notes(self) -> list[str]:
        """What was changed inside in this run, and does not go out."""
        return [
            f"'{name}' of '{self._file.outside}' was changed inside, and stays inside"
            for name in sorted(self._new - self._old)
        ]

    def has_changed(self) -> bool:
        """Whether either side is not as it was after the last step."""
        return self._seen != self._now()

    def _now(self) -> tuple[object, object]:
        return _identity(self.inside, self._file.name), _identity(self.host, self._outer)

    def step(self, *, first: bool = False, last: bool = False) -> None:
        """Bring both sides in step. What cannot be used is left alone."""
        try:
            with _Exclusive(self._lock):
                if self._file.mode == COPY:
                    if first:
                        self._copy()
                else:
                    self._merge(first=first, last=last)
                self._seen = self._now()
                self.problem = ""
        except Exception as error:  # noqa: BLE001 - no file of the sandbox may end this process
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.problem = f"'{self._file.outside}' was not kept in step: {said}"

    def _copy(self) -> None:
        """Copy the host's file in, unless it is as it was when it was last copied."""
        host, base = read(self.host, self._outer), read(self._bases, self._file.name)
        if host is None or (host == base and self._is_there()):
            return
        write(self.inside, self._file.name, host)
        write(self._bases, self._file.name, host)

    def _is_there(self) -> bool:
        try:
            return read(self.inside, self._file.name) is not None
        except Refused:
            return False

    def _merge(self, *, first: bool, last: bool) -> None:
        keys, name = self._keys, self._file.name
        if keys is None:
            raise Refused("no table of keys")
        inner: AgentLock | _NoLock = _NoLock()
        outer: AgentLock | _NoLock = _NoLock()
        if keys.lock:
            # Before and after a run only another one in this project can hold the lock rightly.
            inner = AgentLock(self.inside, name + keys.lock, INNER_SECONDS, forced=first or last)
            outer = AgentLock(self.host, self._outer + keys.lock, LOCK_SECONDS)
        with outer, inner:
            host_raw = read(self.host, self._outer)
            host = _document(host_raw)
            inside = self._inner_document(first=first)
            base = _document(read(self._bases, name)) or {}
            merged = instep.merge(
                keys, self._project, base=base, host=host or {}, inside=inside
            )  # fmt: skip
            # What an earlier run has left is no news.
            (self._old if first else self._new).update(merged.kept)
            if merged.host != (host or {}):
                write(self.host, self._outer, _head(host_raw) + _dump(merged.host))
            if merged.inside != inside and (merged.inside or inside is not None):
                write(self.inside, name, _head(host_raw) + _dump(merged.inside))
            if merged.base != base:
                write(self._bases, name, _dump(merged.base))

    def _inner_document(self, *, first: bool) -> dict[str, object] | None:
        """The version inside. At the start, one that cannot be used is replaced."""
        try:
            return _document(read(self.inside, self._file.name))
        except Refused:
            if not first:
                raise
            return None


def _identity(directory: int, name: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class _Exclusive:
    """One step at a time among all runs of a user."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Watch:
    """Tells of changes in the directories of both sides; -1 where inotify has no more."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.fd = instance()
        wanted = IN_MOVED_TO | IN_CREATE | IN_CLOSE_WRITE
        for pair in pairs:
            for directory in (pair.inside, pair.host):
                self._add(directory, wanted)

    def _add(self, directory: int, wanted: int) -> None:
        if self.fd < 0:
            return
        path = f"/proc/self/fd/{directory}".encode() + b"\0"
        try:
            syscall(NUMBERS[os.uname().machine][1], self.fd, path, wanted)
        except OSError:
            # No more watches: the glance will tell.
            return

    def drain(self) -> None:
        """Forget what was told."""
        try:
            while self.fd >= 0 and os.read(self.fd, 1 << 16):
                pass
        except BlockingIOError:
            return


def serve(pairs: list[Pair], supervisor: int) -> None:
    """Keep in step until the supervisor has nothing more to say."""
    watch = Watch(pairs)
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    if watch.fd >= 0:
        poller.register(watch.fd, select.POLLIN)
    over = select.poll()
    over.register(supervisor, select.POLLIN)
    while True:
        for pair in pairs:
            if pair.has_changed():
                pair.step()
        if any(fd == supervisor for fd, _ in poller.poll(int(GLANCE * 1000))):
            break
        # However often the sandbox writes.
        if over.poll(int(PAUSE * 1000)):
            break
        watch.drain()
    for pair in pairs:
        pair.step(last=True)


def main() -> None:
    """The process."""
    told, _, supervisor = (int(text) for text in sys.argv[1:4])
    with open(told, "rb") as source:
        orders = json.loads(source.read())
    pairs = []
    for row in orders["files"]:
        try:
            pairs.append(Pair(File(**row), orders["project"], orders["lock"]))
        except OSError as error:
            os.write(supervisor, f"{row['outside']}: {error.strerror}".encode())
            return
    for pair in pairs:
        pair.step(first=True)
    os.write(supervisor, READY)
    serve(pairs, supervisor)
    lines = [pair.problem for pair in pairs if pair.problem]
    for pair in pairs:
        lines += pair.notes()
    text = "in step\n" + "".join(f"{_line(line)}\n" for line in lines[:20])
    try:
        os.write(supervisor, text.encode("utf-8", "replace"))
    except OSError:
        # Nobody listens any more.
        return


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


if __name__ == "__main__":
    main()
