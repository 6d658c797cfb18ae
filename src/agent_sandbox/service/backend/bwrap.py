"""The bwrap backend: a sandbox is a directory, an execution a fresh bwrap around it.

    DIR/sandboxes/<id>/workspace, home/agent, tmp    what a command sees at these places
    DIR/base                                         masks, filters: what all of them share

Nothing runs between executions. What runs dies with this process: bwrap with the thread that has
started it, the rest with bwrap.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ...errors import HostError, PolicyError, SandboxError, reason
from ...launch import descriptors, flood, kin, slices, spawner, sweeping, syscalls
from ...launch.limits import NPROC_PER_NAMESPACE, kernel_version
from ...policy.model import Limits
from ...sandbox import owned
from ...sandbox.starting import end_with_us
from ..problems import Problem
from ..values import Resources
from . import tree
from .bwrap_running import CANNOT_ENTER, BwrapRunning, Streams
from .interface import WORK, OnThisMachine, Support

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from ..values import Sandbox
    from .interface import Files, Sink, Start

    T = TypeVar("T")

NETWORKS = ("off", "public", "allow")
# Starts at a time: each is mostly waiting for bwrap. What reads and writes files. And what may take
# long and nobody's start or upload should wait for: trees that are measured or removed, pauses.
STARTERS, WALKERS, SWEEPERS = 8, 4, 4
# A start that finds the machine changed under it, or whose helpers somebody has killed, is made
# again: nothing has run yet.
ATTEMPTS = 4
CHANGED = ("root-changed", owned.NOT_BUILT, "mounts-failed", "network-failed")
# bwrap's own two processes are in a sandbox's control group as well.
OWN_PROCESSES = 2
# How long a pause or an end may take to reach every process, in seconds.
END_SECONDS = 10.0
BURY_SECONDS = 5.0


class _Live:
    """A sandbox in which something runs or starts."""

    def __init__(self) -> None:
        self.group: slices.Slice | None = None
        self.turn = threading.Lock()
        self.starting = 0
        # Set while nothing is starting.
        self.settled = asyncio.Event()
        self.settled.set()
        self.running: set[BwrapRunning] = set()
        self.is_paused = False
        # Nothing starts any more.
        self.is_ending = False
        # Set when the last of it has ended.
        self.idle = asyncio.Event()

    def begin(self) -> None:
        """Something is about to start."""
        self.starting += 1
        self.settled.clear()

    def finish(self) -> None:
        """It has started, or failed to."""
        self.starting -= 1
        if not self.starting:
            self.settled.set()

    def inits(self) -> list[int]:
        """The first process of each execution."""
        return [one.init for one in self.running if one.init is not None]


class BwrapBackend(OnThisMachine):
    """Sandboxes on this machine, by bubblewrap."""

    name = "bwrap"

    def __init__(self, data: str) -> None:
        self._data = os.path.realpath(data)
        self._sandboxes = f"{self._data}/sandboxes"
        for path in (self._data, self._sandboxes):
            os.makedirs(path, mode=0o700, exist_ok=True)
        # By the first the processes of a service that was killed are found, by the second ours.
        self._mark = "serve-" + hashlib.sha256(os.fsencode(self._data)).hexdigest()[:12]
        self._ground = owned.Ground(f"{self._data}/base")
        # What whoever started the service has left open is not for its sandboxes.
        descriptors.hide_descriptors()
        self._spawner = spawner.Detached()
        # bwrap's child outlives bwrap by a moment: as its new parent we learn what it has used.
        syscalls.adopt_orphans(os.uname().machine)
        self._name = f"{self._mark}-{os.urandom(4).hex()}"
        self._groups = slices.Slices(self._name)
        end_with_us(f"{self._name}-")
        self._starters = ThreadPoolExecutor(STARTERS, "sandbox-start")
        self._walkers = ThreadPoolExecutor(WALKERS, "sandbox-files")
        self._sweepers = ThreadPoolExecutor(SWEEPERS, "sandbox-sweep")
        self._live: dict[str, _Live] = {}
        self._null = _null()
        # Children that were dead at the last look, and when the next one is due.
        self._dead: set[int] = set()
        self._next_look = 0.0
        self._enforced = self._bounds()

    def _bounds(self) -> dict[str, str]:
        kept = dict.fromkeys(self._groups.kept & {"memory", "cpus", "pids"}, "cgroup")
        bounds = {"memory": "", "cpus": "", "pids": "", **kept, "disk": "server"}
        if not bounds["pids"]:
            counts = kernel_version(os.uname().release) >= NPROC_PER_NAMESPACE
            # Root is exempt from RLIMIT_NPROC: there the keeper counts.
            bounds["pids"] = "server" if os.getuid() == 0 else "rlimit" if counts else ""
        return bounds

    # --- what it can do

    async def probe(self) -> Support:
        """What it can do here."""
        try:
            await self._start_step(partial(self._ground.template, owned.Grant()))
        except SandboxError as error:
            return Support(ok=False, reason=error.message)
        return Support(
            ok=True, reason=self._groups.reason, enforced=self._enforced, pause=True,
            networks=NETWORKS, inner=True,
        )  # fmt: skip

    async def resolve(self, image: str) -> str:
        """It has no images."""
        raise Problem("UNSUPPORTED", "this backend has no images", field="image", rule=image)

    def _start_step(self, job: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._starters, job)

    def _long_step(self, job: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._sweepers, job)

    def _place(self, sandbox: Sandbox) -> str:
        if not sandbox.id or "/" in sandbox.id or sandbox.id.startswith("."):
            raise Problem("NOT_FOUND", "no such sandbox")
        return f"{self._sandboxes}/{sandbox.id}"

    # --- life

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        """Make its directories. The network policy is checked: it may not be readable."""
        place = self._place(sandbox)
        if sandbox.image:
            raise Problem("UNSUPPORTED", "this backend has no images", field="image")
        grant = _grant(sandbox)
        if grant != owned.Grant():
            await self._start_step(partial(_checked, self._ground, grant))
        try:
            tree.make_place(place)
        except FileExistsError as error:
            raise Problem("CONFLICT", f"sandbox '{sandbox.id}' exists already") from error
        except OSError as error:
            raise Problem(
                "BACKEND_UNAVAILABLE", f"cannot make the sandbox's directories: {reason(error)}"
            ) from error
        return {}

    async def delete(self, sandbox: Sandbox) -> None:
        """End its processes and remove its files."""
        place = self._place(sandbox)
        if sandbox.id in self._live:
            await self._end(sandbox.id)
        if tree.remove_unused(place):
            return
        try:
            await self._long_step(partial(tree.remove_place, place))
        except OSError as error:
            raise Problem(
                "BACKEND_UNAVAILABLE",
                f"cannot remove the sandbox's files: {error.filename or ''} {reason(error)}",
            ) from error

    async def _end(self, name: str) -> None:
        """End everything in a sandbox, and wait for it."""
        live = self._live[name]
        live.is_ending = True
        for running in live.running:
            running.kill_now()
        if live.is_paused:
            # A frozen process dies when it is let go (cgroup v1), a stopped one at once.
            live.is_paused = False
            await self._freeze(live, on=False)
        self._forget(name)
        try:
            await asyncio.wait_for(live.idle.wait(), END_SECONDS)
        except TimeoutError as error:
            raise Problem("BACKEND_UNAVAILABLE", "the sandbox's processes do not end") from error

    # --- commands

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> BwrapRunning:
        """Start a command."""
        place = self._place(sandbox)
        live = self._live.get(sandbox.id)
        if live is None:
            live = self._live[sandbox.id] = _Live()
        if live.is_ending:
            raise Problem("NOT_FOUND", "no such sandbox")
        if live.is_paused:
            raise Problem("WRONG_STATE", "the sandbox is paused", hint="resume it first")
        live.begin()
        starting = asyncio.ensure_future(self._start(live, place, sandbox, start, sink))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # What a thread has begun cannot be called back: it is ended as soon as it runs.
            starting.add_done_callback(_unwanted)
            raise

    async def _start(
        self, live: _Live, place: str, sandbox: Sandbox, start: Start, sink: Sink
    ) -> BwrapRunning:
        streams = None
        try:
            call = self._call(place, sandbox, start)
            streams = Streams(self._null, wants_input=start.input, terminal=start.terminal)
            launched, kills = await self._start_step(
                partial(self._launch, live, call, sandbox, streams)
            )
            streams.handed_over()
            running = BwrapRunning(
                launched, streams, sink, executor=self._sweepers, argv=start.argv,
                exceeded=partial(_exceeded, live, kills),
                on_end=partial(self._ended, sandbox.id, live),
            )  # fmt: skip
        except BaseException as error:
            if streams is not None:
                streams.close()
            if isinstance(error, SandboxError) and not isinstance(error, Problem):
                raise _unavailable(error) from error
            raise
        else:
            live.running.add(running)
            if live.is_ending:
                running.kill_now()
            return running
        finally:
            live.finish()
            self._forget(sandbox.id)

    def _call(self, place: str, sandbox: Sandbox, start: Start) -> owned.Call:
        bounds = sandbox.resources
        if start.terminal is not None and not self._ground.setsid:
            raise Problem("UNSUPPORTED", "no terminal here: 'setsid' is missing on this machine")
        env = {**sandbox.env, **start.env}
        if start.terminal is not None:
            env.setdefault("TERM", "xterm-256color")
        start.replace(env=env).check()
        cwd = start.cwd or WORK
        counted = self._enforced["pids"] in ("rlimit", "server")
        return owned.Call(
            place=place, name=f"{self._name}-{start.execution}", argv=start.argv,
            cwd=cwd if cwd.startswith("/") else f"{WORK}/{cwd}", env=env,
            terminal=start.terminal is not None, file_bytes=bounds.disk or 0,
            processes=bounds.pids or 0 if counted else 0,
        )  # fmt: skip

    def _launch(
        self, live: _Live, call: owned.Call, sandbox: Sandbox, streams: Streams
    ) -> tuple[owned.Launched, int]:
        """On a thread: blocks for some milliseconds. Also what was killed there before."""
        if not os.path.isdir(call.place):
            raise Problem("NOT_FOUND", "no such sandbox")
        group = self._group(live, sandbox.resources)
        kills = group.kills() if group is not None else 0
        for attempt in range(ATTEMPTS):
            template = self._ground.template(_grant(sandbox))
            command = self._ground.command(template, call)
            try:
                return owned.launch(
                    command, streams.inside, call, spawner=self._spawner, enforcer=group
                ), kills
            except HostError as error:
                said = streams.said_before_start()
                if said.startswith(CANNOT_ENTER):
                    raise _no_directory(call.cwd) from error
                # A file that was to be covered was replaced meanwhile, by useradd for example.
                if error.code not in CHANGED or attempt + 1 == ATTEMPTS:
                    error.add_note(said.decode("utf-8", "replace"))
                    raise
                self._ground.forget()
        raise AssertionError

    def _group(self, live: _Live, bounds: Resources) -> slices.Slice | None:
        """The control group of a sandbox, where there are any."""
        if not self._groups.tops:
            return None
        kept = self._groups.kept
        limits = Limits(
            memory=bounds.memory if "memory" in kept else None,
            pids=bounds.pids + OWN_PROCESSES if bounds.pids and "pids" in kept else None,
            cpus=bounds.cpus if "cpus" in kept else None,
        )
        with live.turn:
            if live.group is None:
                live.group = self._groups.take(limits)
            return live.group

    def _ended(self, name: str, live: _Live, running: BwrapRunning) -> None:
        live.running.discard(running)
        self._forget(name)
        self._bury()

    def _bury(self) -> None:
        """Take the status of children that are ours since their parent was killed; now and then.

        Our own are waited for at once, but for proxies: who is dead at two looks is no other's.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + BURY_SECONDS
        dead = kin.dead_children()
        proxies = {one.proxy for live in self._live.values() for one in live.running}
        for pid in (dead & self._dead) - proxies:
            owned.reap(pid)
        self._dead = dead

    def _forget(self, name: str) -> None:
        """Give the control group back when nothing needs it any more."""
        live = self._live.get(name)
        if live is None or live.running or live.starting or live.is_paused:
            return
        del self._live[name]
        live.idle.set()
        if live.group is not None:
            # It may have to be removed, which can take a moment.
            self._sweepers.submit(live.group.close)

    # --- pause

    async def pause(self, sandbox: Sandbox) -> None:
        """Stop its processes where they are. What is starting is waited for."""
        live = self._live.setdefault(sandbox.id, _Live())
        live.is_paused = True
        try:
            await live.settled.wait()
            await self._freeze(live, on=True)
        except BaseException:
            await self.resume(sandbox)
            raise

    async def resume(self, sandbox: Sandbox) -> None:
        """Let them go on."""
        live = self._live.get(sandbox.id)
        if live is not None:
            live.is_paused = False
            await self._freeze(live, on=False)
            self._forget(sandbox.id)

    async def _freeze(self, live: _Live, *, on: bool) -> None:
        if live.group is not None and self._groups.can_freeze:
            await self._long_step(partial(live.group.freeze, on=on))
            return
        # Visible inside, to a shell that watches its children; but nobody is let down by it.
        for init in live.inits():
            try:
                await self._long_step(partial(kin.stop if on else kin.go_on, init))
            except TimeoutError as error:
                raise Problem("BACKEND_UNAVAILABLE", str(error)) from error

    # --- files and figures

    def files(self, sandbox: Sandbox) -> Files:
        """Its files."""
        return tree.Tree(self._place(sandbox), self._walkers)

    async def usage(self, sandbox: Sandbox) -> Resources:
        """What it uses now."""
        live = self._live.get(sandbox.id)
        inits = live.inits() if live is not None else []
        most = sandbox.resources.disk or tree.TOO_DEEP
        disk = await self._long_step(partial(_disk, self._place(sandbox), inits, most))
        if live is None or live.group is None:
            return Resources(disk=disk)
        used = live.group.usage()
        # bwrap's own are not the sandbox's.
        own = OWN_PROCESSES * len(live.running)
        pids = max(0, used.pids - own) if used.pids is not None else None
        return Resources(memory=used.memory, pids=pids, disk=disk)

    # --- the service's own life

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        """Remove what is not known, end what a killed service has left."""
        return await self._long_step(partial(self._reconcile, frozenset(known)))

    def _reconcile(self, known: frozenset[str]) -> frozenset[str]:
        sweeping.end_called(f"{self._mark}-")
        found = set(os.listdir(self._sandboxes))
        for name in found:
            clean = tree.tidy_place if name in known else sweeping.remove_tree
            try:
                clean(f"{self._sandboxes}/{name}")
            except OSError:
                # Tried again at the next start.
                continue
        return frozenset(found & known)

    async def close(self) -> None:
        """End everything that runs."""
        for name in list(self._live):
            await self._end(name)
        self._starters.shutdown(wait=True)
        self._walkers.shutdown(wait=True)
        self._sweepers.shutdown(wait=True)
        self._groups.close()


def _null() -> int:
    """An empty input. Whatever was closed when we were started, 0 to 2 are taken afterwards."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    return fd


def _grant(sandbox: Sandbox) -> owned.Grant:
    wanted = sandbox.network
    if wanted.mode not in NETWORKS:
        raise Problem("UNSUPPORTED", f"no network '{wanted.mode}' here", field="network")
    allow = wanted.allow if wanted.mode == "allow" else ()
    deny = wanted.deny if wanted.mode != "off" else ()
    return owned.Grant(network=wanted.mode, allow=allow, deny=deny)


def _no_directory(cwd: str) -> Problem:
    return Problem("INVALID", f"cannot enter '{cwd}': no such directory", field="cwd")


def _checked(ground: owned.Ground, grant: owned.Grant) -> None:
    try:
        ground.check(grant)
    except PolicyError as error:
        raise Problem("INVALID", error.message, hint=error.hint, field="network") from error
    except SandboxError as error:
        raise _unavailable(error) from error


def _unavailable(error: SandboxError) -> Problem:
    if isinstance(error, Problem):
        return error
    return Problem("BACKEND_UNAVAILABLE", error.message, hint=error.hint, rule=error.code)


def _disk(place: str, inits: list[int], most: int) -> int:
    """What a sandbox has on the disk, files without a name included; no more than too much."""
    total = tree.disk_usage(place, most)
    if inits and total <= most:
        pids = [pid for init in inits for pid in kin.descendants(init)]
        total += flood.nameless(pids, os.stat(place).st_dev)
    return total


def _exceeded(live: _Live, kills: int) -> str:
    """The limit for which the kernel has killed since there were so many kills."""
    return "memory" if live.group is not None and live.group.kills() > kills else ""


def _unwanted(starting: asyncio.Future[BwrapRunning]) -> None:
    """End a command that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill_now()
