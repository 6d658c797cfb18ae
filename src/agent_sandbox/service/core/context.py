"""What the parts of the service share: its surroundings, and what is in memory of sandboxes."""

from __future__ import annotations

import asyncio
import os
import time

from .. import limits as bounds
from ..problems import Problem
from ..replicas.interface import Alone, Elsewhere
from ..values import FAILED
from . import access
from .policy import World
from .queue import draining

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any, TypeVar

    from ..audit import AuditTrail
    from ..backend.interface import Backend, Support
    from ..limits import Limits
    from ..replicas.interface import Replicas
    from ..state import State
    from ..tokens import Tokens
    from ..values import Agent, Sandbox
    from .jobs import Job
    from .templates import Template

    T = TypeVar("T")

# What `observe` is told, in seconds: of a sandbox, the time to make it; of a command, the time in
# the queue, the time to start it, and the time that it ran.
MEASURES = ("create", "queue", "start", "exec")
# One that failed for this reason takes up room all the same, and the reaper tries again.
STUCK = "it could not be removed"
# A backend that was not there is asked again after this many seconds, not for every request.
PROBE_AGAIN = 5.0


class Live:
    """A sandbox, with what only the running service knows of it."""

    __slots__ = (
        "counted", "dirty", "disk", "idle", "jobs", "lock", "look", "looking", "lost", "removal",
        "sandbox", "starting", "unpacking", "uploading",
    )  # fmt: skip

    def __init__(self, sandbox: Sandbox, *, idle: float) -> None:
        self.sandbox = sandbox
        # Seconds without use after which it ends.
        self.idle = idle
        # What runs in it, by id, and the starts that are under way.
        self.jobs: dict[str, Job] = {}
        self.starting: set[asyncio.Future[None]] = set()
        # Held by whoever changes its state.
        self.lock = asyncio.Lock()
        # Bytes of its files when last measured, with what was uploaded since (None: not known),
        # and of uploads that are under way.
        self.disk: int | None = None
        self.uploading = 0
        # Held by an archive on its way: how much it comes to is known when it is there.
        self.unpacking = asyncio.Lock()
        # The next look at it, and the one that is taken now.
        self.look: asyncio.TimerHandle | None = None
        self.looking: asyncio.Task[int | None] | None = None
        self.removal: asyncio.Task[None] | None = None
        # Why it is gone without our doing; "": it is not.
        self.lost = ""
        # It takes up room in its owner's quota.
        self.counted = False
        # The store has an older `last_used`.
        self.dirty = False

    @property
    def is_idle(self) -> bool:
        """Nothing runs in it, and nobody changes it or writes to it."""
        busy = self.jobs or self.starting or self.removal or self.uploading
        return not (busy or self.lock.locked() or self.unpacking.locked() or self.sandbox.one_shot)

    async def quiet(self) -> None:
        """Wait for the starts that are under way. The state must forbid new ones already."""
        while self.starting:
            await asyncio.wait(self.starting)

    def touch(self, now: float) -> None:
        """It is used."""
        self.sandbox = self.sandbox.replace(last_used=now)
        self.dirty = True


class Context:
    """The surroundings. Only the loop may use it."""

    def __init__(
        self, *, store: State, tokens: Tokens, audit: AuditTrail, limits: Limits,
        backends: Mapping[str, Backend], default_backend: str, data: str,
        templates: Mapping[str, Template],
        clock: Callable[[], float], observe: Callable[[str, float], None] | None,
        replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        self.replicas: Replicas = replicas or Alone(store)
        self.store = store
        self.tokens = tokens
        self.audit = audit
        self.limits = limits
        self.backends = backends
        self.default_backend = default_backend
        self.templates = templates
        self.clock = clock
        self.observe = observe or (lambda _name, _seconds: None)
        self.journals = os.path.join(data, "executions")
        self.live: dict[str, Live] = {}
        # How many of them count, by owner.
        self.owned: dict[str, int] = {}
        self.jobs: dict[str, Job] = {}
        self.places = self.replicas.places(limits.max_concurrent_execs)
        self.supports: dict[str, Support] = {}
        self.draining = False
        # How many sandboxes were lost since the start.
        self.lost = 0
        # Backends whose machine has been compared with the store since the start.
        self.reconciled: set[str] = set()
        self._probed: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.replicas.bind(self)

    # --- who may what

    def limits_of(self, agent: Agent) -> Limits:
        """The limits that hold for an agent."""
        return bounds.for_agent(self.limits, agent)

    def sandbox(self, agent: Agent, sandbox_id: str) -> Live:
        """One that the agent may see."""
        live = self._seen(agent, sandbox_id)
        if live is None and self.replicas.shared:
            # What is another's here, there or nowhere takes the same steps.
            live = self._away(agent, sandbox_id)
        if live is None:
            raise access.absent("sandbox")
        return live

    def _seen(self, agent: Agent, sandbox_id: str) -> Live | None:
        live = self.live.get(sandbox_id)
        return live if live is not None and access.may_see(agent, live.sandbox.owner) else None

    def _away(self, agent: Agent, sandbox_id: str) -> Live | None:
        """One that we do not have: another replica does, or did, and then only a reason is left."""
        if (peer := self.replicas.whereabouts(agent, sandbox_id, "")) is not None:
            raise Elsewhere(peer)
        # Adopted at this moment, or its replica is away.
        if (live := self._seen(agent, sandbox_id)) is not None:
            return live
        found = self.store.get_sandbox(sandbox_id, access.narrowed(agent, None))
        return None if found is None else Live(found, idle=self.limits.idle_timeout)

    def note(
        self, agent: Agent | None, action: str, target: Mapping[str, str], *, request_id: str = "",
        rule: str = "", reason: str = "", request: Mapping[str, object] | None = None,
        result: Mapping[str, object] | None = None, limits: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """Write a line of the audit. When that fails, so does the act: it must come after it.

        So does an act without a lease: another replica may have taken over by now.
        """
        self.replicas.check()
        self.audit.write(
            agent, action, target=target, rule=rule, reason=reason, request=request,
            result=result, limits=limits, request_id=request_id,
        )  # fmt: skip

    def accept(self) -> None:
        """Refuse new work when the service stops."""
        if self.draining:
            raise draining()
        self.replicas.check()

    # --- the table of sandboxes

    def enter(self, live: Live) -> None:
        """Add a sandbox, counted."""
        self.live[live.sandbox.id] = live
        live.counted = True
        owner = live.sandbox.owner
        self.owned[owner] = self.owned.get(owner, 0) + 1

    def admit(self, live: Live, check: Callable[[], None]) -> None:
        """Count it and enter it, or refuse it by `check`: as one step, for all replicas."""
        with self.replicas.counting():
            check()
            self.replicas.entered(live.sandbox)
        self.enter(live)

    def adopt(self, sandbox: Sandbox, idle: Mapping[str, float]) -> None:
        """Go on with one that a replica has left to us. `idle`: see `idle_times`."""
        live = Live(sandbox, idle=idle.get(sandbox.owner, self.limits.idle_timeout))
        self.enter(live)
        if sandbox.state == FAILED and sandbox.reason != STUCK:
            self.uncount(live)
        # When it was used last is not known exactly: it gets a whole idle time.
        live.touch(self.clock())

    def idle_times(self) -> dict[str, float]:
        """The idle times of agents whose tokens have their own."""
        found: dict[str, float] = {}
        for info in self.tokens.list():
            value = info.quotas.get("idle_timeout")
            if isinstance(value, (int, float)):
                found[info.name] = float(value)
        return found

    def let_go(self, live: Live) -> None:
        """It is another replica's. Its record stays."""
        self.uncount(live)
        self.live.pop(live.sandbox.id, None)

    def used(self, owner: str | None = None) -> int:
        """How many sandboxes count, of one owner or of all."""
        shared = self.replicas.used(owner)
        if shared is not None:
            return shared
        return sum(self.owned.values()) if owner is None else self.owned.get(owner, 0)

    def is_stored(self, sandbox: Sandbox) -> bool:
        """Those for a single command are not; but other replicas have to count them."""
        return not sandbox.one_shot or self.replicas.shared

    def uncount(self, live: Live) -> None:
        """It takes up no room any more; only its reason is left."""
        if not live.counted:
            return
        live.counted = False
        owner = live.sandbox.owner
        self.owned[owner] -= 1
        if not self.owned[owner]:
            del self.owned[owner]

    def leave(self, live: Live) -> None:
        """Forget a sandbox."""
        if self.is_stored(live.sandbox):
            self.store.delete_sandbox(live.sandbox.id)
        self.uncount(live)
        self.live.pop(live.sandbox.id, None)

    def update(self, live: Live, **changes: object) -> Sandbox:
        """Change a sandbox, in the store too: see `is_stored`."""
        self.replicas.check()
        changed = live.sandbox.replace(**changes)
        # First, so that what is refused has not half happened.
        if self.is_stored(changed):
            self.store.put_sandbox(changed)
        live.sandbox = changed
        live.dirty = False
        return changed

    # --- backends

    def world(self, agent: Agent) -> World:
        """What a decision about an agent's wish depends on."""
        return World(
            limits=self.limits_of(agent), templates=self.templates, supports=self.supports,
            default_backend=self.default_backend,
        )  # fmt: skip

    def backend(self, name: str) -> Backend:
        """The backend of a sandbox, if it can be used."""
        if name not in self.backends or name not in self.reconciled:
            raise Problem("BACKEND_UNAVAILABLE", f"backend '{name}' cannot be used at the moment",
                          rule="backend.available", retry_after=PROBE_AGAIN)  # fmt: skip
        return self.backends[name]

    async def probe(self, name: str) -> Support:
        """Ask a backend what it can do now."""
        support = await self.backends[name].probe()
        self.supports[name] = support
        self._probed[name] = time.monotonic()
        return support

    async def probe_again(self) -> None:
        """Ask those that could not be used, now and then."""
        now = time.monotonic()
        for name, support in tuple(self.supports.items()):
            if not support.ok and now - self._probed[name] >= PROBE_AGAIN:
                await self.probe(name)

    # --- work that goes on when whoever asked for it has gone

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the service itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to the end, also when the one who waits is cancelled."""
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody takes the exception any more; it has been told in the audit.
            task.add_done_callback(_seen)
            raise

    async def settle(self) -> None:
        """Wait for all such work."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
