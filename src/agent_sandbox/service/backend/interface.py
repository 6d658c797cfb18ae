"""What a backend is. The service knows no more of it than this, nor where a sandbox is placed.

A backend keeps no state of its own that matters: sandboxes are in the store, and what a backend
finds on its machine or cluster that the store does not know is removed by `reconcile`.
"""

from __future__ import annotations

from typing import Protocol

from ...record import Record
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from ..values import Resources, Sandbox

    # Called with 1 (standard output, and all of a terminal) or 2 and the bytes, on the loop.
    Sink = Callable[[int, bytes], None]
    # Called with the id of a sandbox that is gone without our doing, and why, on the loop.
    Lost = Callable[[str, str], None]

# Where a command finds itself, in every backend.
WORK, HOME = "/workspace", "/home/agent"


class Support(Record):
    """What a backend can do here."""

    ok: bool
    # Why not, for `/readyz` and the start.
    reason: str = ""
    # By what each bound is kept: "cgroup", "rlimit", "server", "engine"; "" or missing: it is not.
    enforced: Mapping[str, str] = {}
    images: bool = False
    pause: bool = False
    networks: tuple[str, ...] = ("off",)
    runtimes: tuple[str, ...] = ()
    # Commands can be had behind bwrap here. Where not, who requires that is refused.
    inner: bool = False


class Warm(Record):
    """Sandboxes to have ready before somebody wants them."""

    template: str
    # As a wish for the template alone would be made; without id, owner and times.
    sandbox: Sandbox
    count: int


class Terminal(Record):
    """The size of a terminal."""

    rows: int = 24
    columns: int = 80


class Start(Record):
    """A command to start."""

    execution: str
    argv: tuple[str, ...]
    # Inside; "" is WORK.
    cwd: str = ""
    env: Mapping[str, str] = {}
    terminal: Terminal | None = None
    # Whether there will be input; otherwise it reads the end at once.
    input: bool = False

    def check(self) -> None:
        """INVALID for what no kernel can be told."""
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise Problem("INVALID", f"cannot set the variable {name!r}", field="env")
        if not self.argv or not self.argv[0] or any("\0" in word for word in self.argv):
            raise Problem("INVALID", "cannot run an empty command", field="command")
        if "\0" in self.cwd:
            raise Problem("INVALID", "cannot run there", field="cwd")


class Ended(Record):
    """How a command ended. `code` is 128 plus the number after a signal, as a shell has it."""

    code: int
    signal: str = ""
    # The limit that ended it, as the backend saw it: "memory" when the kernel killed for it.
    exceeded: str = ""
    cpu_ms: int = 0
    max_rss_kb: int = 0
    # It never ran, for this reason.
    error: str = ""
    # 126 and 127 are also what a command may exit with; this tells.
    started: bool = True
    # Nobody has seen its end: what it ran on is gone, or cannot be asked. `error` says why.
    lost: bool = False


class Running(Protocol):
    """A started command. All output has been given to the sink when `wait` returns."""

    async def wait(self) -> Ended:
        """The end. A child that keeps the pipes open delays it by a short grace, no more."""
        ...

    async def write(self, data: bytes) -> None:
        """Input; waits while the command does not read. After its end: BrokenPipeError."""
        ...

    async def close_input(self) -> None:
        """The end of the input (for a terminal: Ctrl-D)."""
        ...

    async def signal(self, number: int) -> None:
        """Signal the command itself, so that its handlers run."""
        ...

    async def kill(self) -> None:
        """End all of its processes at once."""
        ...

    async def resize(self, terminal: Terminal) -> None:
        """Change the size of its terminal."""
        ...


class Entry(Record):
    """A file in a sandbox."""

    # Inside, absolute.
    path: str
    # "file", "directory", "symlink" or "other".
    kind: str
    size: int
    mode: int
    modified: float
    target: str = ""


class Files(Protocol):
    """The files of one sandbox. Paths are inside, absolute, normalised, below WORK or HOME.

    No link is followed out: an operation that would leave its sandbox is a Problem, and nothing
    has been read or changed outside. Links inside that stay inside may be followed.
    """

    async def entry(self, path: str) -> Entry:
        """One entry; NOT_FOUND."""
        ...

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file. The iterator must be exhausted or closed (`aclose`)."""
        ...

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file as one step, parents made; more than `limit` bytes: TOO_LARGE."""
        ...

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link or a directory; a full one only with `recursive`."""
        ...

    async def make(self, path: str) -> Entry:
        """A directory with its parents; it may be there already."""
        ...

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below, sorted; and whether more than `most` were found."""
        ...

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as an uncompressed tar; names are relative to it."""
        ...

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar (also gzip) below a directory; the number of entries."""
        ...


class Backend(Protocol):
    """One kind of sandbox."""

    name: str
    # How often to compare again with what the store has; 0: at the start only.
    reconcile_seconds: float
    # Whether every replica of the service reaches its sandboxes. Where not, they are Failed while
    # their replica is away. Such a one ends nothing of others when it compares.
    shared: bool

    async def probe(self) -> Support:
        """What it can do here. Cheap enough for `/readyz`."""
        ...

    async def resolve(self, image: str) -> str:
        """The digest that an image name means now, for the pin; UNSUPPORTED without images."""
        ...

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        """Make it. A failure leaves nothing; creating the same id twice is an error.

        What keeps what in this very one, where that is more than `Support.enforced` said; it is
        shown. One that is lost before it is made is a failure, not a hang.
        """
        ...

    async def delete(self, sandbox: Sandbox) -> None:
        """End its processes and remove all of it. What is gone already is no error."""
        ...

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> Running:
        """Start a command in it."""
        ...

    async def pause(self, sandbox: Sandbox) -> None:
        """Stop its processes where they are; UNSUPPORTED where it cannot."""
        ...

    async def resume(self, sandbox: Sandbox) -> None:
        """Let them go on."""
        ...

    def files(self, sandbox: Sandbox) -> Files:
        """Its files."""
        ...

    async def usage(self, sandbox: Sandbox) -> Resources:
        """What it uses now: memory, pids and disk where known."""
        ...

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        """Remove whatever is not known, end what still runs; the known ids that still exist.

        `known` has what there is at the moment of the question: look around first, then ask it.
        Where `reconcile_seconds` wants it, this comes again, and nothing that runs in a known one
        is ended then.
        """
        ...

    def attend(self, lost: Lost) -> None:
        """Tell of sandboxes that are gone without our doing, from now on. Once, at the start.

        What `delete` removes is not lost. One that is told of is deleted afterwards, too.
        """
        ...

    async def prepare(self, wanted: tuple[Warm, ...]) -> None:
        """Have these ready, and no others. Called after the first `reconcile`."""
        ...

    async def renewed(self, sandbox: Sandbox) -> None:
        """It has another `expires`. A failure refuses the renewal."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Numbers for `/metrics`, by name without a prefix; a label: `name{label="value"}`."""
        ...

    async def close(self) -> None:
        """End everything that runs; sandboxes' files stay."""
        ...


class OnThisMachine:
    """What a backend need not do whose sandboxes live and end with this machine."""

    reconcile_seconds = 0.0
    shared = False

    def attend(self, lost: Lost) -> None:
        """Nothing is lost while the service runs."""

    async def prepare(self, wanted: tuple[Warm, ...]) -> None:
        """To make one is fast."""

    async def renewed(self, sandbox: Sandbox) -> None:
        """The reaper alone keeps the time."""

    def gauges(self) -> Mapping[str, float]:
        """None of its own."""
        return {}
