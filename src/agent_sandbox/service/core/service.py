"""The service as its front ends (HTTP, MCP) see it: every act has its agent, and leaves a line.

Each method raises `Problem`. What changes or reads something of a sandbox is in the audit before
it happens: a line that cannot be written stops the act. Lines of refusals are the front end's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ..problems import Problem
from . import about, access, reconcile
from .context import Context
from .executions import Executions
from .files import AuditedFiles
from .jobs import STOPPED
from .reaper import Reaper
from .sandboxes import Sandboxes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ..audit import AuditTrail
    from ..backend.interface import Backend, Support, Terminal
    from ..limits import Limits
    from ..replicas.interface import Peer, Replicas
    from ..state import State
    from ..tokens import Tokens
    from ..values import Agent, Execution, Resources, Sandbox
    from .about import Check, Counts, Identity
    from .jobs import Job
    from .templates import Template
    from .wishes import ExecWish, RunWish, Wish


log = logging.getLogger(__name__)
# Between two looks for sandboxes that have become idle, while the service stops.
LEAVE_SECONDS = 0.5


class Service:
    """All that the front ends may ask for. Only the loop may use it."""

    def __init__(
        self, *, store: State, tokens: Tokens, audit: AuditTrail, limits: Limits,
        backends: Mapping[str, Backend], default_backend: str, data: str,
        templates: Mapping[str, Template], clock: Callable[[], float] = time.time,
        observe: Callable[[str, float], None] | None = None, replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        """`observe` gets measurements for metrics: see `context.MEASURES`."""
        self.store = store
        self.tokens = tokens
        self.audit = audit
        self.limits = limits
        self.templates = templates
        self._context = Context(
            store=store, tokens=tokens, audit=audit, limits=limits, backends=backends,
            default_backend=default_backend, data=data, templates=templates, clock=clock,
            observe=observe, replicas=replicas,
        )  # fmt: skip
        self._sandboxes = Sandboxes(self._context)
        self._executions = Executions(self._context, self._sandboxes)
        self._losses = self._executions.losses
        self._reaper = Reaper(self._context, self._sandboxes, self._executions, self._losses)

    # --- its life

    @property
    def draining(self) -> bool:
        """Whether it has been told to stop."""
        return self._context.draining

    @property
    def supports(self) -> Mapping[str, Support]:
        """What each backend could do when last asked."""
        return self._context.supports

    async def start(self) -> None:
        """Bring the store and the backends into agreement, then watch over both."""
        context = self._context
        reconcile.load(context)
        self._executions.kept.load()
        self._losses.attend()
        for name in context.backends:
            # One that is away is asked again by the reaper.
            await reconcile.backend(context, name)
        context.spawn(reconcile.sweep_journals(context))
        self._reaper.start()

    async def stop(self, drain: float, others: Awaitable[object] | None = None) -> None:
        """Refuse new work, let what runs go on for `drain` seconds, then end it.

        `others`: requests that use the backends without a command, such as uploads.
        """
        context = self._context
        context.draining = True
        context.places.close()
        await self._reaper.stop()
        if context.replicas.fenced():
            # What it still removes may be another replica's by now.
            await self._losses.stop()
        leaving = asyncio.ensure_future(self._leave_idle())
        try:
            async with asyncio.timeout(max(drain, 0.0)):
                await context.settle()
                if others is not None:
                    await others
        except TimeoutError:
            for job in tuple(context.jobs.values()):
                self._executions.end(job, STOPPED)
            await context.settle()
        finally:
            leaving.cancel()
        await self._losses.stop()
        try:
            if not context.replicas.fenced():
                self._executions.later.again()
                self._reaper.save()
        except Problem as problem:
            # The next start finds what has no end; only moments of last uses are missing.
            log.warning("not all could be written down at the end: %s", problem.message)
        for backend in context.backends.values():
            await backend.close()
        await asyncio.to_thread(context.audit.sync)

    async def _leave_idle(self) -> None:
        """Leave sandboxes to other replicas while commands still run in others."""
        context = self._context
        while context.replicas.shared:
            for live in tuple(context.live.values()):
                try:
                    if live.is_idle and context.replicas.let_go(live):
                        context.let_go(live)
                except Problem as problem:
                    log.warning("sandboxes cannot be handed over now: %s", problem.message)
                    break
            await asyncio.sleep(LEAVE_SECONDS)

    def fence(self, reason: str) -> None:
        """The lease is lost: whatever runs is lost with it. Nothing is written down any more."""
        for job in tuple(self._context.jobs.values()):
            if job.running is not None:
                self._context.spawn(_kill(job))
            self._executions.lose(job, reason)

    def elsewhere(self, agent: Agent, sandbox: str, execution: str) -> Peer | None:
        """The other replica that has a sandbox or an execution; None: nobody but us is to ask."""
        context = self._context
        if not context.replicas.shared or not (sandbox or execution):
            return None
        live, job = context.live.get(sandbox), context.jobs.get(execution)
        owner = live.sandbox.owner if live is not None else job.execution.owner if job else None
        if owner is not None and access.may_see(agent, owner):
            return None
        # Another's that is here takes as long as what does not exist.
        return context.replicas.whereabouts(agent, sandbox, execution)

    async def ready(self) -> tuple[bool, str]:
        """Whether it can take work, or a short reason without detail."""
        context = self._context
        if context.draining:
            return False, "draining"
        if context.replicas.fenced():
            return False, "lease"
        name = context.default_backend
        support = await context.probe(name)
        if not support.ok or name not in context.reconciled:
            return False, "backend"
        return True, ""

    def counts(self) -> Counts:
        """Gauges: sandboxes by state, executions that run and that wait."""
        return about.counts(self._context)

    def gauges(self) -> dict[str, Mapping[str, float]]:
        """Numbers that backends give of themselves, by backend."""
        return {name: backend.gauges() for name, backend in self._context.backends.items()}

    # --- sandboxes

    async def create(
        self, agent: Agent, wish: Wish, *, key: str | None = None, request_id: str = ""
    ) -> Sandbox:
        """A sandbox, ready. The same key with the same wish is the same sandbox."""
        return await self._sandboxes.create(agent, wish, key=key, request_id=request_id)

    def get(self, agent: Agent, sandbox_id: str) -> Sandbox:
        """One of the agent's own; NOT_FOUND alike for none and for another's."""
        return self._context.sandbox(agent, sandbox_id).sandbox

    def sandboxes(
        self, agent: Agent, *, owner: str | None = None, state: str | None = None,
        metadata: Mapping[str, str] | None = None, after: str | None = None, limit: int = 100,
        newest: bool = False,
    ) -> list[Sandbox]:  # fmt: skip
        """The agent's own, oldest or `newest` first; an admin sees all, or those of `owner`."""
        if owner is not None and not access.may_see(agent, owner):
            return []
        return about.listed(
            self._context, owner=access.narrowed(agent, owner), state=state,
            metadata=metadata or {}, after=after, limit=limit, newest=newest,
        )  # fmt: skip

    async def delete(self, agent: Agent, sandbox_id: str, *, request_id: str = "") -> None:
        """End what runs in it and remove it."""
        await self._sandboxes.delete(agent, sandbox_id, request_id=request_id)

    async def renew(
        self, agent: Agent, sandbox_id: str, *, timeout: float | None = None,
        expires: float | None = None, request_id: str = "",
    ) -> Sandbox:  # fmt: skip
        """Let it expire in `timeout` seconds from now, or at `expires`."""
        return await self._sandboxes.renew(
            agent, sandbox_id, timeout=timeout, expires=expires, request_id=request_id
        )

    async def pause(self, agent: Agent, sandbox_id: str, *, request_id: str = "") -> Sandbox:
        """Stop its processes where they are. Timeouts of commands go on."""
        return await self._sandboxes.pause(agent, sandbox_id, request_id=request_id)

    async def resume(self, agent: Agent, sandbox_id: str, *, request_id: str = "") -> Sandbox:
        """Let them go on."""
        return await self._sandboxes.resume(agent, sandbox_id, request_id=request_id)

    async def set_metadata(
        self, agent: Agent, sandbox_id: str, changes: Mapping[str, str | None], *,
        request_id: str = "",
    ) -> Sandbox:  # fmt: skip
        """Merge: a None removes its name."""
        return await self._sandboxes.set_metadata(agent, sandbox_id, changes, request_id=request_id)

    async def usage(self, agent: Agent, sandbox_id: str) -> Resources:
        """What it uses now."""
        sandbox = self._context.sandbox(agent, sandbox_id).sandbox
        return await self._context.backend(sandbox.backend).usage(sandbox)

    def files(self, agent: Agent, sandbox_id: str, *, request_id: str = "") -> AuditedFiles:
        """Its files: the interface of `backend.interface.Files`, without `limit`."""
        return AuditedFiles(self._context, self._executions.disks, agent, sandbox_id, request_id)

    # --- executions

    async def execute(
        self, agent: Agent, sandbox_id: str, wish: ExecWish, *, request_id: str = ""
    ) -> Job:
        """A command, started. It may have waited for a place before."""
        return await self._executions.execute(agent, sandbox_id, wish, request_id)

    async def run(
        self, agent: Agent, wish: RunWish, *, key: str | None = None, request_id: str = ""
    ) -> Job:
        """A command in a sandbox of its own, started. The same key is the same execution."""
        return await self._executions.run(agent, wish, key=key, request_id=request_id)

    def job(self, agent: Agent, exec_id: str) -> Job:
        """An execution, running or ended."""
        return self._executions.job(agent, exec_id)

    def executions(
        self, agent: Agent, *, sandbox: str | None = None, owner: str | None = None,
        state: str | None = None, after: str | None = None, limit: int = 100, newest: bool = False,
    ) -> list[Execution]:  # fmt: skip
        """The agent's own, oldest or `newest` first; an admin sees all, or those of `owner`."""
        if owner is not None and not access.may_see(agent, owner):
            return []
        return self.store.executions(
            sandbox=sandbox, owner=access.narrowed(agent, owner), state=state, after=after,
            limit=limit, newest=newest,
        )  # fmt: skip

    async def stdin(
        self, agent: Agent, exec_id: str, data: bytes, *, eof: bool = False, request_id: str = ""
    ) -> None:
        """Input for it, and with `eof` the end of input; waits while it does not read."""
        await self._executions.stdin(agent, exec_id, data, eof=eof, request_id=request_id)

    async def signal(
        self, agent: Agent, exec_id: str, number: int, *, request_id: str = ""
    ) -> None:
        """A signal for the command itself."""
        await self._executions.signal(agent, exec_id, number, request_id)

    async def kill(
        self, agent: Agent, exec_id: str, *, reason: str = "", request_id: str = ""
    ) -> Execution:
        """End all of its processes; its end."""
        return await self._executions.kill(agent, exec_id, reason, request_id)

    async def resize(
        self, agent: Agent, exec_id: str, terminal: Terminal, *, request_id: str = ""
    ) -> None:
        """Change the size of its terminal."""
        await self._executions.resize(agent, exec_id, terminal, request_id)

    async def forget(self, agent: Agent, exec_id: str, *, request_id: str = "") -> None:
        """End it if it runs, and drop its result and its output."""
        await self._executions.forget(agent, exec_id, request_id)

    # --- about

    def whoami(self, agent: Agent) -> Identity:
        """Who asks, what it may use, and what it uses."""
        return about.identity(self._context, agent)

    async def policy_check(self, agent: Agent, wish: Wish) -> Check:
        """What would become of a wish, and why; nothing is made."""
        return await about.check(self._context, agent, wish)


async def _kill(job: Job) -> None:
    """Its processes must not go on beside what another replica starts in their sandbox."""
    running = job.running
    if running is not None:
        with contextlib.suppress(Exception):
            await running.kill()
