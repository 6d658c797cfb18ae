"""Sandboxes from their creation to their removal, and who may have how many."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager

from .. import limits as bounds
from .. import quotas
from ..backend.interface import WORK
from ..problems import Problem
from ..values import CREATE, FAILED, PAUSED, PENDING, RUNNING, STOPPING, Sandbox
from . import ids
from .context import STUCK, Live
from .jobs import KILL_GRACE, REMOVED
from .keys import Keys
from .policy import decide
from .wishes import check_arguments, fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from ..backend.interface import Backend
    from ..values import Agent
    from .context import Context
    from .policy import Decision
    from .wishes import FilePut, Wish

log = logging.getLogger(__name__)
MOST_METADATA = 128


class Sandboxes:
    """All sandboxes of the service."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rates = context.replicas.buckets("creates")
        self._keys: Keys[Sandbox] = Keys(context, "sandbox", self._made)

    def _made(self, sandbox_id: str) -> Sandbox | None:
        context = self._context
        live = context.live.get(sandbox_id)
        found = live.sandbox if live is not None else None
        if live is None and context.replicas.shared:
            # Another replica's. One for a single command has a key of its command.
            found = context.store.get_sandbox(sandbox_id)
        return found if found is not None and found.state != PENDING else None

    # --- to make one

    async def create(
        self, agent: Agent, wish: Wish, *, key: str | None, request_id: str
    ) -> Sandbox:
        """One that stays until it is deleted, expires or is idle for too long."""
        context = self._context
        context.accept()
        bounds.check_scope(agent, CREATE)
        sandbox_id = ids.new(ids.SANDBOX)
        if key is None:
            return await context.finish(self._create(agent, wish, sandbox_id, request_id))
        sandbox, new = await self._keys.once(
            agent.name, key, fingerprint(wish), id=sandbox_id,
            make=lambda chosen: self._create(agent, wish, chosen, request_id),
        )  # fmt: skip
        if not new:
            context.note(agent, "sandbox.create", target(sandbox), rule="idempotency.replay",
                         request_id=request_id)  # fmt: skip
        return sandbox

    async def _create(self, agent: Agent, wish: Wish, sandbox_id: str, request_id: str) -> Sandbox:
        rate = quotas.rates(self._context.limits_of(agent))[quotas.CREATES]
        self._rates.check(agent.name, rate, self._context.clock())
        decision = await self.decide(agent, wish)
        live = await self.make(agent, wish, decision, sandbox_id, request_id=request_id)
        return live.sandbox

    async def decide(self, agent: Agent, wish: Wish) -> Decision:
        """What a wish comes to now."""
        check_arguments((), wish.env)
        await self._context.probe_again()
        world = self._context.world(agent)
        decision = decide(agent, wish, world)
        _check_files(world.limits, wish, decision)
        return decision

    async def make(
        self, agent: Agent, wish: Wish, decision: Decision, sandbox_id: str, *, request_id: str,
        one_shot_seconds: float | None = None,
    ) -> Live:  # fmt: skip
        """Reserve, write down, make what was decided. A failure leaves nothing."""
        context, begun = self._context, time.monotonic()
        backend = context.backend(decision.backend)
        digest = await backend.resolve(decision.image) if decision.image else ""
        now = context.clock()
        seconds = decision.timeout if one_shot_seconds is None else one_shot_seconds
        sandbox = Sandbox(
            id=sandbox_id, owner=agent.name, backend=decision.backend, state=PENDING,
            template=decision.template, image=decision.image, digest=digest,
            runtime=decision.runtime, env=decision.env, metadata=dict(wish.metadata),
            resources=decision.resources, enforced=decision.enforced, network=decision.network,
            inner=decision.inner, created=now, expires=now + seconds, last_used=now,
            one_shot=one_shot_seconds is not None,
        )  # fmt: skip
        live = Live(sandbox, idle=context.limits_of(agent).idle_timeout)
        live.disk = sum(len(file.data) for file in wish.files)
        # No wait between the count and the entry: what passes is counted for the next one.
        context.admit(live, lambda: self._check_counts(agent))
        async with live.lock:
            await self._build(agent, live, backend, wish.files, request_id)
        context.observe("create", time.monotonic() - begun)
        return live

    def _check_counts(self, agent: Agent) -> None:
        context = self._context
        own = context.used(agent.name)
        bounds.check_count(context.limits_of(agent), "max_sandboxes_per_agent", own, retry_after=1)
        every = context.used()
        bounds.check_count(context.limits, "max_sandboxes", every, retry_after=1)

    async def _build(
        self, agent: Agent, live: Live, backend: Backend, files: tuple[FilePut, ...],
        request_id: str,
    ) -> None:  # fmt: skip
        context, begun = self._context, False
        try:
            if not live.sandbox.one_shot:
                # In the store first: a kill leaves a trace. One for a single command never gets
                # there, and its line is that of the command: the start removes what it finds.
                if not context.replicas.shared:
                    # There it was written down when it was counted.
                    context.store.put_sandbox(live.sandbox)
                context.note(
                    agent, "sandbox.create", target(live.sandbox), request_id=request_id,
                    request=described(live.sandbox), limits=bounds_of(live.sandbox),
                )  # fmt: skip
            begun = True
            with _unless_lost(live):
                keeps = await backend.create(live.sandbox)
                live.sandbox = live.sandbox.replace(enforced=_kept(live.sandbox, keeps))
                for file in files:
                    path = file.path if file.path.startswith("/") else f"{WORK}/{file.path}"
                    await backend.files(live.sandbox).write(
                        path, _once(file.data), limit=len(file.data), mode=file.mode
                    )
            context.update(live, state=RUNNING)
        except BaseException:
            if begun:
                await self._undo(live, backend)
            self._forget(live)
            raise

    def _forget(self, live: Live) -> None:
        """Nothing is left of it; or, while the state is away, the reaper sees to that."""
        try:
            self._context.leave(live)
        except Exception:
            log.exception("sandbox %s was not made, and cannot be forgotten yet", live.sandbox.id)
            live.sandbox = live.sandbox.replace(state=FAILED, reason=STUCK)

    async def _undo(self, live: Live, backend: Backend) -> None:
        try:
            await backend.delete(live.sandbox)
        except Exception:
            log.exception("sandbox %s: what was half made stays", live.sandbox.id)

    # --- to change one

    async def renew(
        self, agent: Agent, sandbox_id: str, *, timeout: float | None, expires: float | None,
        request_id: str,
    ) -> Sandbox:  # fmt: skip
        """Another end, counted from now."""
        context = self._context
        live = self._changeable(agent, sandbox_id, (RUNNING, PAUSED))
        now = context.clock()
        if timeout is None and expires is not None:
            timeout = expires - now
        seconds = bounds.check_lifetime(context.limits_of(agent), timeout)
        context.note(agent, "sandbox.renew", target(live.sandbox), request_id=request_id,
                     limits={"lifetime": seconds})  # fmt: skip
        return await context.finish(self._renew(live, now, now + seconds))

    async def _renew(self, live: Live, now: float, expires: float) -> Sandbox:
        async with live.lock:
            _need(live, (RUNNING, PAUSED))
            # The backend first: an end that we have promised must not come early.
            backend = self._context.backend(live.sandbox.backend)
            with _unless_lost(live):
                await backend.renewed(live.sandbox.replace(expires=expires))
            return self._context.update(live, expires=expires, last_used=now)

    async def set_metadata(
        self, agent: Agent, sandbox_id: str, changes: Mapping[str, str | None], *, request_id: str
    ) -> Sandbox:
        """Merge: None removes."""
        live = self._changeable(agent, sandbox_id, (RUNNING, PAUSED))
        merged = {**live.sandbox.metadata, **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        if len(kept) > MOST_METADATA:
            # Each request is bounded by the front end; their sum is not.
            raise Problem("INVALID", f"a sandbox may have {MOST_METADATA} names of metadata",
                          field="metadata", rule="request")  # fmt: skip
        self._context.note(agent, "sandbox.metadata", target(live.sandbox), request_id=request_id,
                           request={"names": sorted(changes)})  # fmt: skip
        return self._context.update(live, metadata=kept)

    async def pause(self, agent: Agent, sandbox_id: str, *, request_id: str) -> Sandbox:
        """Stop its processes. Its time goes on, but it does not become idle."""
        live = self._changeable(agent, sandbox_id, (RUNNING,))
        return await self._context.finish(self._switch(agent, live, RUNNING, PAUSED, request_id))

    async def resume(self, agent: Agent, sandbox_id: str, *, request_id: str) -> Sandbox:
        """Let them go on."""
        live = self._changeable(agent, sandbox_id, (PAUSED,))
        return await self._context.finish(self._switch(agent, live, PAUSED, RUNNING, request_id))

    async def _switch(
        self, agent: Agent, live: Live, before: str, after: str, request_id: str
    ) -> Sandbox:
        context = self._context
        async with live.lock:
            _need(live, (before,))
            backend = context.backend(live.sandbox.backend)
            if not context.supports[backend.name].pause:
                raise Problem("UNSUPPORTED", f"backend '{backend.name}' cannot pause here",
                              rule="backend.support")  # fmt: skip
            action = "sandbox.pause" if after == PAUSED else "sandbox.resume"
            context.note(agent, action, target(live.sandbox), request_id=request_id)
            # Nothing may start while the processes are stopped.
            context.update(live, state=after if after == PAUSED else before)
            try:
                await live.quiet()
                with _unless_lost(live):
                    await (backend.pause if after == PAUSED else backend.resume)(live.sandbox)
            except BaseException:
                if not live.lost:
                    # In memory first: it is as it was, whether the state can be told now or later.
                    live.sandbox = live.sandbox.replace(state=before)
                    live.dirty = True
                    context.update(live)
                raise
            return context.update(live, state=after, last_used=context.clock())

    def _changeable(self, agent: Agent, sandbox_id: str, states: tuple[str, ...]) -> Live:
        bounds.check_scope(agent, CREATE)
        live = self._context.sandbox(agent, sandbox_id)
        _need(live, states)
        return live

    # --- to remove one

    async def delete(self, agent: Agent, sandbox_id: str, *, request_id: str) -> None:
        """For its owner. Whatever its state, it is gone afterwards."""
        bounds.check_scope(agent, CREATE)
        live = self._context.sandbox(agent, sandbox_id)
        self._context.note(agent, "sandbox.delete", target(live.sandbox), request_id=request_id)
        if sandbox_id not in self._context.live:
            # Its replica is away, and with it whatever there was.
            self._context.replicas.drop(sandbox_id)
            return
        await asyncio.shield(self.remove(live))

    def remove(self, live: Live) -> asyncio.Task[None]:
        """The removal of a sandbox: one, however many ask for it. Noted by the caller."""
        if live.removal is None:
            live.removal = self._context.spawn(self._remove(live))
        return live.removal

    async def _remove(self, live: Live) -> None:
        context = self._context
        try:
            async with live.lock:
                gone = live.sandbox.state == FAILED and not live.counted
                if live.sandbox.id not in context.live:
                    # It could not be made, and has been undone.
                    return
                # In memory first: should the state be away, the reaper goes on with it.
                live.sandbox = live.sandbox.replace(state=STOPPING)
                # Written down: after a kill it is removed, not kept.
                context.update(live)
                await self._end(live, gone=gone)
        finally:
            live.removal = None

    async def _end(self, live: Live, *, gone: bool) -> None:
        context = self._context
        for job in live.jobs.values():
            job.cause = job.cause or REMOVED
        try:
            await live.quiet()
            if not gone:
                await context.backend(live.sandbox.backend).delete(live.sandbox)
        except BaseException as error:
            # It still counts, and the reaper tries again.
            live.sandbox = live.sandbox.replace(state=FAILED, reason=STUCK)
            context.update(live)
            if not isinstance(error, Problem):
                log.exception("sandbox %s could not be removed", live.sandbox.id)
            raise
        if live.look is not None:
            live.look.cancel()
        await _over(live)
        context.leave(live)


async def _over(live: Live) -> None:
    """Wait until the ends of its commands are written down; who does not end is given up."""
    for job in tuple(live.jobs.values()):
        try:
            async with asyncio.timeout(KILL_GRACE):
                await job.concluded()
        except TimeoutError:
            if job.watch is not None:
                job.watch.cancel()


def target(sandbox: Sandbox) -> dict[str, str]:
    """What a line of the audit is about."""
    return {"type": "sandbox", "id": sandbox.id}


def _need(live: Live, states: tuple[str, ...]) -> None:
    if live.sandbox.state not in states:
        raise wrong_state(live.sandbox)


def wrong_state(sandbox: Sandbox) -> Problem:
    """The refusal of a sandbox that is not as it has to be."""
    why = f": {sandbox.reason}" if sandbox.reason else ""
    return Problem("WRONG_STATE", f"the sandbox is {sandbox.state}{why}", rule="sandbox.state")


@contextmanager
def _unless_lost(live: Live) -> Iterator[None]:
    """Refuse to go on with one that is lost while it is made, or changed: that is the reason."""
    try:
        yield
        failure: Exception | None = None
    except Exception as error:
        if not live.lost:
            raise
        failure = error
    if live.lost:
        raise Problem(
            "BACKEND_UNAVAILABLE", f"the sandbox was lost: {live.lost}", rule="sandbox.lost",
            hint="make another one", retry_after=1.0,
        ) from failure  # fmt: skip


def _kept(sandbox: Sandbox, keeps: Mapping[str, str]) -> dict[str, str]:
    """What keeps each bound, as it was decided, and as it came out."""
    for name, by in sandbox.enforced.items():
        if by and keeps.get(name) == "" and getattr(sandbox.resources, name, None) is not None:
            # It was promised; whoever asked may have relied on it.
            raise Problem("LIMIT_NOT_ENFORCEABLE", f"this sandbox could not be bound in {name}",
                          rule="backend.enforced", hint="try again, or ask the operator",
                          field=f"resources.{bounds.RESOURCES[name]}")  # fmt: skip
    return {**sandbox.enforced, **keeps}


def _check_files(limits: bounds.Limits, wish: Wish, decision: Decision) -> None:
    size = sum(len(file.data) for file in wish.files)
    bounds.check_upload(limits, size)
    if decision.resources.disk is not None and size > decision.resources.disk:
        raise Problem("DISK_FULL", "the files are larger than the sandbox's disk", field="files",
                      rule="resources.disk")  # fmt: skip


def described(sandbox: Sandbox) -> dict[str, object]:
    """A sandbox for the audit: names of variables, never their values."""
    fields: dict[str, object] = {
        "backend": sandbox.backend, "template": sandbox.template, "image": sandbox.image,
        "digest": sandbox.digest, "runtime": sandbox.runtime, "env": sorted(sandbox.env),
        "network": sandbox.network.mode, "allow": list(sandbox.network.allow),
        "deny": list(sandbox.network.deny), "oneShot": sandbox.one_shot,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value}


def bounds_of(sandbox: Sandbox) -> dict[str, object]:
    """Its limits, for the audit."""
    found = {name: getattr(sandbox.resources, name) for name in sandbox.resources.__fields__}
    return {**found, "lifetime": sandbox.expires - sandbox.created}


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
