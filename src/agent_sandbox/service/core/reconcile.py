"""The start: what an earlier process has left, in the store and on the machine, is put in order.

An earlier process may have been killed at any moment. Whatever it had not acknowledged is removed;
whatever it had is there, or says why not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping

from ..backend.interface import Warm
from ..problems import Problem
from ..store_rows import cursor
from ..values import FAILED, LOST, PAUSED, RUNNING, Agent, Sandbox
from . import ids
from .context import STUCK, Live
from .orders import target as execution_target
from .policy import decide
from .sandboxes import target
from .wishes import Wish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..values import Execution
    from .context import Context
    from .templates import Template

log = logging.getLogger(__name__)
KILLED = "the service was stopped before it could finish"
GONE = "the backend does not have it any more"
_PAGE = 500


def load(context: Context) -> None:
    """Take over what is in the store. Nothing runs yet."""
    os.makedirs(context.journals, mode=0o700, exist_ok=True)
    _executions(context)
    idle = context.idle_times()
    for one in list(_stored(context)):
        sandbox = context.replicas.returned(one)
        if sandbox.one_shot or sandbox.state not in (RUNNING, PAUSED, FAILED):
            # Half made, half removed, or for a command that is lost. No backend gets to know of
            # it, so each removes what it finds of it.
            context.note(None, "sandbox.reap", target(sandbox), reason=KILLED)
            context.store.delete_sandbox(sandbox.id)
            continue
        if sandbox is not one:
            context.store.put_sandbox(sandbox)
        live = Live(sandbox, idle=idle.get(sandbox.owner, context.limits.idle_timeout))
        context.enter(live)
        if sandbox.state == FAILED and sandbox.reason != STUCK:
            # Backends do not get to know of it either: only its reason is left.
            context.uncount(live)
        # When it was used last is not known exactly: it gets a whole idle time.
        live.touch(context.clock())
    context.store.release_unanswered()


def _stored(context: Context) -> Iterator[Sandbox]:
    if (own := context.replicas.stored()) is not None:
        yield from own
        return
    after: str | None = None
    while page := context.store.sandboxes(after=after, limit=_PAGE):
        yield from page
        after = cursor(page[-1].created, page[-1].id)


def _executions(context: Context) -> None:
    """What ran is lost: nobody has seen its end."""
    now = context.clock()
    while page := _under_way(context):
        for old in page:
            lost = old.replace(state=LOST, ended=now, error=KILLED)
            context.note(None, "exec.end", execution_target(old), reason=KILLED,
                         result={"state": LOST})  # fmt: skip
            context.store.put_execution(lost)


def _under_way(context: Context) -> list[Execution]:
    own = context.replicas.under_way()
    return context.store.executions(state=RUNNING, limit=_PAGE) if own is None else own


async def sweep_journals(context: Context) -> None:
    """Remove output of executions that the store has forgotten. There may be many."""
    for number, name in enumerate(os.listdir(context.journals)):
        if number % 100 == 0:
            await asyncio.sleep(0)
        if not ids.is_id(ids.EXECUTION, name):
            log.warning("a strange file in %s is left alone", context.journals)
        elif name not in context.jobs and context.store.get_execution(name) is None:
            os.unlink(os.path.join(context.journals, name))


class Known(Mapping[str, Sandbox]):
    """The sandboxes that a backend should have, as they are at the moment of the question.

    While a backend looks around, others are made: of none of them may it think that it is unknown.
    """

    def __init__(self, context: Context, backend: str) -> None:
        self._context = context
        self._backend = backend

    def __getitem__(self, sandbox_id: str) -> Sandbox:
        """One that is made, or being made."""
        sandbox = self._context.live[sandbox_id].sandbox
        if sandbox.backend != self._backend or sandbox.state == FAILED:
            raise KeyError(sandbox_id)
        return sandbox

    def __iter__(self) -> Iterator[str]:
        """Their ids."""
        return (one for one in tuple(self._context.live) if one in self)

    def __len__(self) -> int:
        """How many there are."""
        return sum(1 for _ in self)


async def again(context: Context, name: str, lost: Callable[[str, str], None]) -> None:
    """Compare once more, while sandboxes are used: what is gone without a word is lost."""
    known = Known(context, name)
    # Those that were ready before the backend looked. One that is being made may have nothing yet.
    ready = [one for one, sandbox in known.items() if sandbox.state in (RUNNING, PAUSED)]
    there = await context.backends[name].reconcile(context.replicas.known(name, known))
    for sandbox_id in ready:
        # Not if somebody removes it, or has.
        still = known.get(sandbox_id)
        if sandbox_id not in there and still is not None and still.state in (RUNNING, PAUSED):
            lost(sandbox_id, GONE)


async def prepare(context: Context, name: str) -> None:
    """Tell a backend which sandboxes to have ready. Without them it is slower, no more."""
    wanted = [found for one in context.templates.values() if (found := _warm(context, one, name))]
    try:
        for place, one in enumerate(wanted):
            if one.sandbox.image:
                digest = await context.backends[name].resolve(one.sandbox.image)
                wanted[place] = one.replace(sandbox=one.sandbox.replace(digest=digest))
        await context.backends[name].prepare(tuple(wanted))
    except Exception:
        log.exception("backend %s: nothing is kept ready", name)


def _warm(context: Context, template: Template, name: str) -> Warm | None:
    """As many of a template as the operator wants, as a wish for nothing else would be made."""
    if not template.warm or (template.backend or context.default_backend) != name:
        return None
    nobody = Agent(name="", key="", scopes=frozenset())
    try:
        made = decide(nobody, Wish(template=template.name), context.world(nobody))
    except Problem as problem:
        log.warning("template %s: none is kept ready: %s", template.name, problem.message)
        return None
    sandbox = Sandbox(
        id="", owner="", backend=name, state="", template=template.name, image=made.image,
        runtime=made.runtime, env=made.env, resources=made.resources, enforced=made.enforced,
        network=made.network, inner=made.inner,
    )  # fmt: skip
    return Warm(template=template.name, sandbox=sandbox, count=template.warm)


async def backend(context: Context, name: str) -> bool:
    """Compare a backend's machine with the store, if it can be used now."""
    support = await context.probe(name)
    if not support.ok:
        log.warning("backend %s cannot be used: %s", name, support.reason)
        return False
    known = Known(context, name)
    before = tuple(known)
    there = await context.backends[name].reconcile(context.replicas.known(name, known))
    for sandbox_id in before:
        if sandbox_id not in there and sandbox_id in known:
            live = context.live[sandbox_id]
            context.note(None, "sandbox.reap", target(live.sandbox), reason=GONE)
            context.update(live, state=FAILED, reason=GONE)
            context.uncount(live)
    context.reconciled.add(name)
    await prepare(context, name)
    return True
