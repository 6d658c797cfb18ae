"""The keeper: one process per run that joins the sandbox's mounts from outside and holds them.

It cuts the sandbox off from mounts that the host makes later, makes the mounts that are too many
for bwrap, and covers again what a save outside has uncovered (`watching`). It ends when the
supervisor ends, however that comes: the pipe between them closes.

The command line forks it before it has a second thread. A library must not fork its host program,
which may be large and have threads and hooks of its own: there a small server forks it
(`keeper_server`).
"""

from __future__ import annotations

import marshal
import os

from ..errors import HostError, reason
from ..record import Record
from . import apart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .bwrap import Command

READY = b"ready\n"
# Said by a keeper that gets no inotify instance, or no more watches.
BLIND = "blind"
WARNINGS = {
    BLIND: "this user has no inotify instance or watch left (fs.inotify.max_user_instances, "
    "max_user_watches): excluded names that appeared while the command ran were hidden late, "
    "since they were looked for only every 20 ms"
}


class Orders(Record):
    """What a keeper is told: mounts to make, paths to hold, how large /tmp may get."""

    bulk: tuple[tuple[str, str, str], ...] = ()
    duties: tuple[tuple[str, str], ...] = ()
    tmp_bytes: int = 0
    # How many processes there may be, where that is for the keeper to count.
    processes: int = 0

    def dump(self) -> bytes:
        """The orders as bytes, for a process of our own."""
        return marshal.dumps((self.bulk, self.duties, self.tmp_bytes, self.processes))

    @classmethod
    def load(cls, data: bytes) -> Orders:
        """The orders from bytes that `dump` has made."""
        bulk, duties, tmp_bytes, processes = marshal.loads(data)  # noqa: S302 - our own
        return cls(bulk=bulk, duties=duties, tmp_bytes=tmp_bytes, processes=processes)


def orders_of(command: Command) -> Orders:
    """What a command wants held."""
    return Orders(
        bulk=command.bulk, duties=command.duties, tmp_bytes=command.tmp_bytes,
        # Everybody else has RLIMIT_NPROC.
        processes=command.processes if os.getuid() == 0 else 0,
    )  # fmt: skip


class Keeper:
    """The supervisor's end. `attend` once, wait for `ready`, `dismiss` at the end."""

    def __init__(self, pid: int, report: int, life: int) -> None:
        self._pid = pid
        self._report = report
        self._life = life
        self._said = b""
        # What the user should know. Complete after `dismiss`.
        self.warnings: tuple[str, ...] = ()

    def attend(self, init: int) -> None:
        """Tell the keeper which sandbox is its own."""
        try:
            os.write(self._life, f"{init}\n".encode())
        except BrokenPipeError:
            # It has died; `ready` says so.
            return

    def ready(self) -> None:
        """Wait until the sandbox is finished; raises when the keeper could not do it."""
        said = b""
        while not said.endswith(b"\n"):
            chunk = os.read(self._report, 4096)
            if not chunk:
                break
            said += chunk
        if not said.startswith(READY):
            raise _failed(said.decode("utf-8", "replace").strip() or "the keeper ended")
        self._said = said.removeprefix(READY)

    def line(self) -> int:
        """A descriptor of the caller's own that hangs up when the keeper ends, however it ends."""
        return os.dup(self._report)

    def fileno(self) -> int:
        """Becomes readable when the keeper has something to say, or has ended."""
        return self._report

    def hear(self) -> bool:
        """Take what it says; False when it has ended."""
        said = os.read(self._report, 4096)
        self._said += said
        return bool(said)

    def let_go(self) -> None:
        """Let it go without waiting for what it has to say. Nothing inside may live any more."""
        self.end()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def has_died(self) -> bool:
        """Whether our child ended before it was told to."""
        if self._pid > 0 and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
            return True
        return False

    def end(self) -> None:
        """Let it go. It may take a moment; `dismiss` waits."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def dismiss(self) -> str:
        """Wait until it has let go; returns the limit that it saw exceeded.

        Its last act, in the kernel, is to take the mounts down, which may take tens of
        milliseconds: nobody has to wait for that.
        """
        self.end()
        said = self._said
        if self._report >= 0:
            while chunk := os.read(self._report, 4096):
                said += chunk
            os.close(self._report)
            self._report = -1
        if self._pid > 0:
            os.waitpid(self._pid, os.WNOHANG)
            self._pid = 0
        words = said.removeprefix(READY).decode("utf-8", "replace").split()
        self.warnings = tuple(WARNINGS[word] for word in words if word in WARNINGS)
        return next((word for word in words if word not in WARNINGS), "")


def _failed(said: str) -> HostError:
    """The error for mounts that could not be finished. Only words come through the pipe."""
    message = f"cannot finish the sandbox's mounts: {said}"
    if "no such file" in said:
        # Something that was to be covered was replaced meanwhile (ENOENT).
        return HostError(message, hint="try again", code="root-changed")
    old = "not implemented" in said
    hint = "this needs Linux 5.12 or newer" if old else "run 'sandboxctl doctor'"
    return HostError(message, hint=hint, code="mounts-failed")


def forked(orders: Orders) -> Keeper:
    """A keeper that is our own child. Call it before any thread is started."""
    told, report = os.pipe()
    heard, life = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            serve(orders, report, heard)
        finally:
            os._exit(1)
    os.close(report)
    os.close(heard)
    return Keeper(pid, told, life)


def serve(orders: Orders, report: int, life: int) -> None:
    """Be a keeper, in a process of its own; ends the process."""
    try:
        report, life = apart.strip(report, life)
        # Now, while bwrap starts; later there is no importing any more.
        from . import keeping, watching

        # The user's instances may be used up by then, by a sandbox even.
        instance = watching.instance() if orders.duties else -1
        line = os.read(life, 64)
        if line:
            keeping.keep(int(line), orders, report, life, instance)
    except ProcessLookupError:
        # bwrap failed, and says so itself.
        os.write(report, READY)
    except Exception as error:  # noqa: BLE001 - whatever it is, the sandbox must not start
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            said = f"{reason(error)}: '{error.filename}'" if error.filename else reason(error)
        os.write(report, said.encode("utf-8", "replace") + b"\n")
    # All is said. The kernel frees memory before it closes files, and nobody has to wait for that.
    os.close(report)
    os._exit(0)
