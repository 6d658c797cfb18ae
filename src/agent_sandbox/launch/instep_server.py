"""Keeps files of an agent's state in step with the host's; a process of its own outside.

    python -I -S instep_server.py ORDERS NULL SUPERVISOR

Descriptors: orders in JSON, one that is not used, and a stream to the supervisor. The files inside
are hostile: `instep_files` reads them, and only `policy.instep` decides what of them goes to the
host. A step is made up without any lock, and what is inside is judged before that. Then, under a
lock among all runs of the user and the agent's own locks, all versions are looked at again: if one
has changed, the step begins anew, so no writer is undone. The host's file is replaced in one piece;
then the one inside; then what both had in common is written down. Killed anywhere in between, the
next step comes to the same end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import select
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from agent_sandbox.launch import instep_files as files
from agent_sandbox.launch.instep_files import AgentLock, Busy, Refused, Staged
from agent_sandbox.launch.syscalls import syscall
from agent_sandbox.launch.watching import IN_CREATE, IN_MOVED_TO, NUMBERS, instance
from agent_sandbox.policy import instep
from agent_sandbox.policy.profiles import COPY
from agent_sandbox.record import Record

READY = b"\n"
IN_CLOSE_WRITE = 0x8
# At most this often, however often the sandbox writes; and at least, where nothing tells.
PAUSE = 0.1
GLANCE = 2.0
# A step that took long is followed by a pause of this many times as long.
REST = 9
# How long a step is tried while others write: at the start and the end of a run longer than a lock
# that was left over lasts, else for a moment. Nothing is held meanwhile.
EDGE_SECONDS = 11.0
STEP_SECONDS = 1.0
# How long a lock inside is heeded at the start and the end.
INNER_SECONDS = 1.0
SHORTEST_WAIT, LONGEST_WAIT = 0.01, 0.2
MEMORY = 512 << 20
# Of a file inside that belongs to no file of the host for sure.
NOBODY = b"-"


class File(Record):
    """One file: its private directory and name, the host's path, and the last version in step."""

    mode: str
    root: str
    name: str
    outside: str
    keys: str
    base: str


class Versions(Record):
    """The bytes of all versions at one time."""

    inside: bytes | None
    host: bytes | None
    base: bytes | None


class Pair:
    """One file inside and its counterpart on the host."""

    def __init__(self, file: File, project: str, lock: str) -> None:
        self._file, self._project, self._lock = file, project, lock
        self._keys = instep.TABLES.get(file.keys)
        parent, _, self._outer = file.outside.rpartition("/")
        self._parent = parent or "/"
        self.inside = os.open(file.root, files.DIRECTORY)
        self.host = os.open(self._parent, files.DIRECTORY)
        os.makedirs(file.base, mode=0o700, exist_ok=True)
        self._bases = os.open(file.base, files.DIRECTORY)
        # The host's file by its path: another account in the same project has another one.
        self._tag = hashlib.sha256(os.fsencode(file.outside)).hexdigest()[:16]
        self._base = f"{file.name}.{self._tag}"
        self._seen: tuple[object, object] = (None, None)
        self.problem = ""
        self._old: set[str] = set()
        self._new: set[str] = set()
        self._claim()

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

    def _claim(self) -> None:
        """Make the file inside the counterpart of this file of the host.

        It may be another one's: CLAUDE_CONFIG_DIR names another account. A login in it would go to
        this one. That file is put aside until its own comes back. Two accounts at once are refused:
        their agents would write the same file. Held as long as this process lives.
        """
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        owner = os.open(f"{self._file.name}.of", flags, 0o600, dir_fd=self._bases)
        mine = self._tag.encode("ascii")
        with files.exclusive(self._lock):
            held = os.pread(owner, 100, 0)
            if held != mine:
                try:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise Refused("a sandbox with another account runs in this project") from error
                if held:
                    self._exchange(owner, held)
                _say(owner, mine)
            fcntl.flock(owner, fcntl.LOCK_SH)

    def _exchange(self, owner: int, held: bytes) -> None:
        """Put the file inside aside, and the one that was put aside for us in its place."""
        name = self._file.name
        try:
            data = files.read(self.inside, name)
        except Refused:
            data = None
        if data is not None and held != NOBODY:
            files.write(self._bases, f"{name}.{held.decode('ascii', 'replace')}.aside", data)
        # Killed from here on, what is inside is nobody's, and is not taken for a login of either.
        _say(owner, NOBODY)
        back = files.read(self._bases, f"{self._base}.aside")
        try:
            if back is not None:
                files.write(self.inside, name, back)
            elif _identity(self.inside, name) is not None:
                os.unlink(name, dir_fd=self.inside)
        except IsADirectoryError:
            # The sandbox made it. Nothing can be read from it.
            return

    def step(self, *, first: bool = False, last: bool = False) -> None:
        """Bring both sides in step. What cannot be used is left alone."""
        try:
            if first:
                for directory, name in (
                    (self.inside, self._file.name), (self.host, self._outer),
                    (self._bases, self._file.name),
                ):  # fmt: skip
                    files.sweep(directory, name)
            if self._file.mode != COPY:
                self._insist(first=first, last=last)
            elif first:
                with files.exclusive(self._lock):
                    self._copy()
            if self._file.mode == COPY:
                self._seen = self._now()
            self.problem = ""
        except Exception as error:  # noqa: BLE001 - no file of the sandbox may end this process
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.problem = (
                f"'{self._file.outside}' was not kept in step: {said or type(error).__name__}"
            )

    def _copy(self) -> None:
        """Copy the host's file in, unless it is as it was when it was last copied."""
        host, base = files.read(self.host, self._outer), files.read(self._bases, self._base)
        if host is None or (host == base and self._is_there()):
            return
        files.write(self.inside, self._file.name, host)
        files.write(self._bases, self._base, host)

    def _is_there(self) -> bool:
        try:
            return files.read(self.inside, self._file.name) is not None
        except Refused:
            return False

    def _insist(self, *, first: bool, last: bool) -> None:
        """Try until nobody else writes. Nothing is held in between."""
        began, wait = time.monotonic(), SHORTEST_WAIT
        most = EDGE_SECONDS if first or last else STEP_SECONDS
        while True:
            spent = time.monotonic() - began
            try:
                # Before and after a run only another one in this project has the lock rightly.
                self._attempt(first=first, forced=(first or last) and spent >= INNER_SECONDS)
            except Busy:
                if spent >= most:
                    raise
            else:
                return
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _attempt(self, *, first: bool, forced: bool) -> None:
        """One try: read, make up the next versions, put them in place if nothing has changed."""
        if self._keys is None:
            raise Refused("no table of keys")
        locks = self._locks(self._keys.lock, forced=forced)
        if not all(lock.is_free() for lock in locks):
            raise Busy("it stays locked")
        before = self._now()
        seen = self._read(first=first)
        inside, host = self._judged(seen, first=first), files.document(seen.host)
        base = files.document(seen.base) or {}
        merged = instep.merge(
            self._keys, self._project, base=base, host=host or {}, inside=inside
        )  # fmt: skip
        staged: dict[str, Staged] = {}
        try:
            top = files.head(seen.host)
            if merged.host != (host or {}):
                bits = files.mode(self.host, self._outer)
                text = top + files.dump(merged.host)
                staged["host"] = Staged(self.host, self._outer, text, bits)
            if merged.inside != inside and (merged.inside or inside is not None):
                text = top + files.dump(merged.inside)
                staged["inside"] = Staged(self.inside, self._file.name, text)
            if merged.base != base:
                staged["base"] = Staged(self._bases, self._base, files.dump(merged.base))
            self._seen = self._commit(seen, staged, locks, first=first) if staged else before
        finally:
            for version in staged.values():
                version.drop()
        # What an earlier run has left is no news.
        (self._old if first else self._new).update(merged.kept)

    def _locks(self, ending: str, *, forced: bool) -> list[AgentLock]:
        """The agent's own locks, the one inside first.

        While that cannot be had, the host's is not touched, however long the sandbox keeps it.
        """
        if not ending:
            return []
        name, outer = self._file.name + ending, self._outer + ending
        return [
            AgentLock(self.inside, self._file.root, name, forced=forced),
            AgentLock(self.host, self._parent, outer),
        ]

    def _read(self, *, first: bool) -> Versions:
        """All versions. At the start, one inside that cannot be used is replaced."""
        most = min(files.MAX_BYTES, files.size(self.host, self._outer) + files.MORE_BYTES)
        try:
            inside = files.read(self.inside, self._file.name, most)
        except Refused:
            if not first:
                raise
            inside = None
        host, base = files.read(self.host, self._outer), files.read(self._bases, self._base)
        return Versions(inside=inside, host=host, base=base)

    def _judged(self, seen: Versions, *, first: bool) -> dict[str, object] | None:
        """The version inside, as a document that costs little to work with."""
        try:
            inside = files.document(seen.inside)
            why = instep.excess(inside, self._project) if inside is not None else ""
        except Refused as error:
            inside, why = None, str(error)
        if why and not first:
            raise Refused(why)
        return inside if not why else None

    def _commit(
        self, seen: Versions, staged: dict[str, Staged], locks: list[AgentLock], *, first: bool
    ) -> tuple[object, object]:
        """Put the next versions in place, if those that they were made of are still there.

        What they are known by then: whatever is written in the next moment is a change again.
        """
        with files.exclusive(self._lock) as journal, files.locked(journal, locks):
            inside, host = self._now()
            if self._read(first=first) != seen:
                raise Busy("others write all the time")
            # Nobody waits so long for a lock that he would write in this moment, too.
            if not all(lock.is_held() for lock in locks):
                raise Busy("it was held up")
            for version in staged.values():
                version.put()
            if "host" in staged:
                host = staged["host"].identity()
            if "inside" in staged:
                inside = staged["inside"].identity()
        return inside, host


def _say(owner: int, text: bytes) -> None:
    os.ftruncate(owner, 0)
    os.pwrite(owner, text, 0)


def _identity(directory: int, name: str) -> tuple[int, ...] | None:
    try:
        return files.identity(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except OSError:
        return None


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
        began = time.monotonic()
        for pair in pairs:
            if pair.has_changed():
                pair.step()
        spent = time.monotonic() - began
        if any(fd == supervisor for fd, _ in poller.poll(int(GLANCE * 1000))):
            break
        # However often the sandbox writes, and however much there is to do each time.
        if over.poll(int(min(GLANCE, max(PAUSE, REST * spent)) * 1000)):
            break
        watch.drain()
    for pair in pairs:
        pair.step(last=True)


def main() -> None:
    """The process."""
    told, _, supervisor = (int(text) for text in sys.argv[1:4])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    # A document that takes more ends in an error of that step.
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    with open(told, "rb") as source:
        orders = json.loads(source.read())
    pairs = []
    for row in orders["files"]:
        try:
            pairs.append(Pair(File(**row), orders["project"], orders["lock"]))
        except (OSError, Refused) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            os.write(supervisor, f"{row['outside']}: {why}".encode("utf-8", "replace"))
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
