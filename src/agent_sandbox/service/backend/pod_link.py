"""The service's line to the agent in one pod.

Each operation has a connection of its own, so nothing waits for anything else. One or two are made
beforehand: a handshake takes longer than most commands. A command's connection serves the next one
as well, for some seconds: at its other end a process has built a sandbox for it.
"""

from __future__ import annotations

import asyncio

from ...pod import frames, terms
from ...record import Record
from ..problems import Problem
from ..values import Resources
from .interface import Ended
from .pod_files import PodFiles
from .pod_running import LOST, QUIET, PodRunning
from .pod_wire import ANSWER_SECONDS, Broken, Peer, Wire, connect, request, unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .interface import Files, Running, Sink, Start
    from .pod_identity import Identity
    from .pod_wire import Dial

__all__ = ["QUIET", "Claim", "Hello", "PodLink"]

# Between attempts to have a connection in reserve again, in seconds.
AGAIN_SECONDS = 2.0
KILLED = 137
# How often, and how long apart, an agent is asked about a command whose connection broke.
FATE_TRIES, FATE_SECONDS = 50, 0.1
CLOSE_SECONDS = 1.0
# Connections that are kept for more commands.
MOST_KEPT = 2
# Nobody counts beyond this.
MOST_DISK = 1 << 62


class Hello(Record):
    """What an agent says of itself."""

    version: int
    # The sandbox that has claimed it; "": none yet.
    sandbox: str
    # The inner layer: "fresh", "bound" or "" (none). See terms.FORMS.
    inner: str
    guarantees: Mapping[str, str]


class Claim(Record):
    """What makes a pod a sandbox."""

    sandbox: str
    lease_seconds: float
    pids: int | None = None
    disk: int | None = None
    # "off" or "public".
    network: str = "off"
    # "preferred", "required" or "off".
    inner: str = "preferred"


class PodLink:
    """The line to one pod. `dial` gives a connected, non-blocking socket."""

    def __init__(
        self, dial: Dial, fingerprint: str, identity: Identity, *,
        on_quiet: Callable[[], None] | None = None, idle: int = 1,
    ) -> None:  # fmt: skip
        self._peer = Peer(dial=dial, fingerprint=fingerprint, identity=identity)
        self._on_quiet = on_quiet or (lambda: None)
        self._most_idle = idle
        self._idle: list[Wire] = []
        # Those that take another command, and until when.
        self._kept: list[tuple[Wire, float]] = []
        # Everything that is open or about to be, so that a loss ends it at once.
        self._wires: set[Wire] = set()
        self._waiting: set[asyncio.Task[object]] = set()
        self._running: set[PodRunning] = set()
        self._filling: asyncio.Task[None] | None = None
        self._reason = ""

    # --- connections

    async def _take(self) -> Wire:
        """A connection, if possible one that is there already."""
        self._check()
        while self._idle:
            wire = self._idle.pop()
            if wire.is_alive:
                self._fill()
                return wire
            self._forget(wire)
        wire = await self._connect()
        self._fill()
        return wire

    async def _connect(self) -> Wire:
        self._check()
        wire = await connect(self._peer)
        if self._reason:
            wire.abort()
            raise Broken(self._reason)
        self._wires = {one for one in self._wires if one.is_alive}
        self._wires.add(wire)
        return wire

    def _check(self) -> None:
        if self._reason:
            raise Broken(self._reason)

    def _give_back(self, wire: Wire) -> None:
        if wire.is_alive and len(self._idle) < self._most_idle and not self._reason:
            self._idle.append(wire)
        else:
            self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        self._wires.discard(wire)
        wire.abort()

    def _keep(self, wire: Wire) -> None:
        """Another command may follow on it."""
        until = asyncio.get_running_loop().time() + terms.COUNTED_SECONDS
        if wire.is_alive and not self._reason:
            self._kept.append((wire, until))
        else:
            self._forget(wire)
        while len(self._kept) > MOST_KEPT:
            self._forget(self._kept.pop(0)[0])

    def _again(self) -> Wire | None:
        """A connection that has served a command already: the last one, the others are older."""
        now = asyncio.get_running_loop().time()
        while self._kept:
            wire, until = self._kept.pop()
            if wire.is_alive and now < until:
                return wire
            self._forget(wire)
        return None

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._keep_idle())

    async def _keep_idle(self) -> None:
        """Have a connection in reserve, as soon as the agent lets us."""
        tries = 0
        while len(self._idle) < self._most_idle and not self._reason and tries < 3:
            try:
                self._give_back(await self._connect())
            except Broken:
                tries += 1
                await asyncio.sleep(AGAIN_SECONDS)

    # --- questions

    async def _ask(self, operation: str, **fields: object) -> dict[str, object]:
        """A question with one answer. All of these may be asked twice, and are.

        A connection in reserve may turn out to be dead.
        """
        for last in (False, True):
            wire = None
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    wire = await self._take()
                    await wire.send(request(operation, **fields))
                    answer = await wire.document(frames.ANSWER)
            except (Broken, TimeoutError) as error:
                self._drop(wire)
                if last or self._reason:
                    raise unavailable(self._reason or str(error) or "no answer") from error
                continue
            except BaseException:
                self._drop(wire)
                raise
            if operation in ONE_AFTER_ANOTHER:
                self._give_back(wire)
            else:
                self._forget(wire)
            return answer
        raise AssertionError

    def _drop(self, wire: Wire | None) -> None:
        if wire is not None:
            self._forget(wire)

    async def hello(self) -> Hello:
        """Ask who it is; the first call also proves the certificate."""
        fields = frames.Fields(await self._ask("hello"))
        try:
            found = Hello(
                version=fields.whole("version"), sandbox=fields.word("sandbox", most=256),
                inner=fields.word("inner", most=16), guarantees=_guarantees(fields),
            )  # fmt: skip
            fields.end()
        except frames.BadFrame as error:
            raise unavailable(error) from error
        if found.version != terms.VERSION or found.inner not in terms.FORMS:
            raise unavailable("an agent of another version")
        return found

    async def claim(self, claim: Claim) -> Mapping[str, str]:
        """Make it a sandbox; what keeps what in it. The same claim again is no error."""
        answer = await self._ask(
            "claim", sandbox=claim.sandbox, lease=claim.lease_seconds, pids=claim.pids or 0,
            disk=claim.disk or 0, network=claim.network, inner=claim.inner,
        )  # fmt: skip
        fields = frames.Fields(answer)
        try:
            found = _guarantees(fields)
            fields.end()
        except frames.BadFrame as error:
            raise unavailable(error) from error
        if claim.pids is None:
            found["pids"] = ""
        return found

    async def renew(self, seconds: float) -> None:
        """The lease ends so many seconds from now."""
        await self._ask("renew", lease=seconds)

    async def usage(self, most: int | None = None) -> Resources:
        """What it uses now. Beyond `most` bytes on the disk nobody goes on counting."""
        fields = frames.Fields(await self._ask("usage", most=most or MOST_DISK))
        try:
            return Resources(
                memory=fields.whole("memory") or None, pids=fields.whole("pids"),
                disk=fields.whole("disk"),
            )  # fmt: skip
        except frames.BadFrame as error:
            raise unavailable(error) from error

    async def stop(self) -> None:
        """End all commands."""
        await self._ask("stop")

    async def pause(self) -> None:
        """Stop all processes of commands where they are."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Let them go on."""
        await self._ask("resume")

    def files(self) -> Files:
        """Its files."""
        return PodFiles(self._take)

    # --- commands

    async def start(self, start: Start, sink: Sink) -> Running:
        """Start a command. `start.env` is all of its variables beside the agent's own few."""
        start.check()
        size = start.terminal
        order = request(
            "exec", execution=start.execution, argv=list(start.argv), env=dict(start.env),
            cwd=start.cwd, input=start.input, terminal=size is not None,
            rows=size.rows if size else 0, columns=size.columns if size else 0,
        )  # fmt: skip
        if len(order) > frames.MOST_REQUEST:
            raise Problem("INVALID", "the command and its variables are too long", field="command")
        for last in (False, True):
            try:
                wire = None if last else self._again()
                return await self._start(start, order, sink, wire)
            except Broken as error:
                # A connection in reserve may have died unseen. Only if the agent has never heard
                # of this execution is it safe to ask again.
                fate = {} if self._reason else await self._fate(start.execution)
                if fate.get("state") == "running":
                    # Nobody would see its end; and it may have stopped whoever should see ours.
                    await self._force(start.execution)
                if last or self._reason or fate != {"state": "unknown"}:
                    raise unavailable(self._reason or error) from error
        raise AssertionError

    async def _start(self, start: Start, order: bytes, sink: Sink, wire: Wire | None) -> Running:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                wire = wire or await self._take()
                await wire.send(order)
                await wire.document(frames.ANSWER)
        except BaseException as error:
            self._drop(wire)
            if isinstance(error, TimeoutError):
                raise Broken("no answer") from error
            raise

        async def broken(why: str) -> Ended:
            return await self._what_became(start.execution, why)

        async def force() -> None:
            await self._force(start.execution)

        running = PodRunning(
            wire, sink, broken=broken, on_quiet=self._on_quiet, on_end=self._ended, force=force
        )
        self._running.add(running)
        return running

    def _ended(self, running: PodRunning, wire: Wire | None) -> None:
        self._running.discard(running)
        if wire is not None:
            self._keep(wire)

    async def _force(self, execution: str) -> None:
        """Have the agent itself end a command: nobody listens to it, or its supervisor does not."""
        try:
            await self._ask("kill", execution=execution)
        except Problem:
            # It is gone, or says so again when the next question is asked.
            return

    async def _fate(self, execution: str) -> dict[str, object]:
        try:
            return await self._ask("fate", execution=execution)
        except Problem:
            return {}

    async def _what_became(self, execution: str, why: str) -> Ended:
        """The end of a command whose connection broke."""
        fate: dict[str, object] = {"state": "running"}
        tries = 0
        # It closes its connections before it is dead, or is still ending what it has started.
        while fate.get("state") == "running" and not self._reason and tries < FATE_TRIES:
            await asyncio.sleep(FATE_SECONDS if tries else 0)
            tries += 1
            fate = await self._fate(execution)
        if fate.get("state") == "killed":
            # Its supervisor was killed: by the command itself, or by the kernel for memory.
            exceeded = "memory" if fate.get("exceeded") == "memory" else ""
            return Ended(code=KILLED, signal="SIGKILL", exceeded=exceeded)
        return Ended(code=LOST, lost=True, error=self._reason or f"the connection broke: {why}")

    # --- the end

    def lost(self, reason: str) -> None:
        """The pod is gone: every command ends now, lost for this reason; later calls fail."""
        if not self._reason:
            self._reason = reason
        for running in list(self._running):
            running.lose(reason)
        for wire in list(self._wires):
            self._forget(wire)
        self._idle.clear()
        self._kept.clear()

    async def close(self) -> None:
        """Close idle connections; commands that still run are ended by the agent."""
        self.lost(self._reason or "the service has let go of the pod")
        if self._filling is not None:
            # It sees that it is not wanted. To cancel a handshake would leave its socket behind.
            await asyncio.wait([self._filling], timeout=CLOSE_SECONDS)
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)


# What leaves the connection as it was.
ONE_AFTER_ANOTHER = frozenset(("hello", "claim", "renew", "fate", "kill"))


def _guarantees(fields: frames.Fields) -> dict[str, str]:
    """What an agent says that it keeps: known names with known values."""
    found = fields.table("guarantees", len(terms.GUARANTEES))
    for name, value in found.items():
        if value not in terms.GUARANTEES.get(name, ()):
            raise frames.BadFrame(f"a guarantee that nobody knows: {name[:64]}")
    return found
