"""The start: what an earlier process has left, in the store and on the machine, is put in order.

An earlier process may have been killed at any moment. Whatever it had not acknowledged is removed;
whatever it had is there, or says why not.
"""

from __future__ import annotations

import asyncio
import logging
import os

from ..store_rows import cursor
from ..values import FAILED, LOST, PAUSED, RUNNING
from . import ids
from .context import Live
from .executions import target as execution_target
from .sandboxes import target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..values import Sandbox
    from .context import Context

log = logging.getLogger(__name__)
KILLED = "the service was stopped before it could finish"
_PAGE = 500


def load(context: Context) -> None:
    """Take over what is in the store. Nothing runs yet."""
    os.makedirs(context.journals, mode=0o700, exist_ok=True)
    _executions(context)
    idle = _idle_times(context)
    for sandbox in list(_stored(context)):
        if sandbox.one_shot or sandbox.state not in (RUNNING, PAUSED, FAILED):
            # Half made, half removed, or for a command that is lost. No backend gets to know of
            # it, so each removes what it finds of it.
            context.note(None, "sandbox.reap", target(sandbox), reason=KILLED)
            context.store.delete_sandbox(sandbox.id)
            continue
        live = Live(sandbox, idle=idle.get(sandbox.owner, context.limits.idle_timeout))
        context.enter(live)
        if sandbox.state == FAILED:
            # Backends do not get to know of it either: only its reason is left.
            context.uncount(live)
        # When it was used last is not known exactly: it gets a whole idle time.
        live.touch(context.clock())
    context.store.release_unanswered()


def _idle_times(context: Context) -> dict[str, float]:
    """The idle times of agents whose tokens have their own."""
    found: dict[str, float] = {}
    for info in context.tokens.list():
        value = info.quotas.get("idle_timeout")
        if isinstance(value, (int, float)):
            found[info.name] = float(value)
    return found


def _stored(context: Context) -> Iterator[Sandbox]:
    after: str | None = None
    while page := context.store.sandboxes(after=after, limit=_PAGE):
        yield from page
        after = cursor(page[-1].created, page[-1].id)


def _executions(context: Context) -> None:
    """What ran is lost: nobody has seen its end."""
    now = context.clock()
    while page := context.store.executions(state=RUNNING, limit=_PAGE):
        for old in page:
            lost = old.replace(state=LOST, ended=now, error=KILLED)
            context.note(None, "exec.end", execution_target(old), reason=KILLED,
                         result={"state": LOST})  # fmt: skip
            context.store.put_execution(lost)


async def sweep_journals(context: Context) -> None:
    """Remove output of executions that the store has forgotten. There may be many."""
    for number, name in enumerate(os.listdir(context.journals)):
        if number % 100 == 0:
            await asyncio.sleep(0)
        if not ids.is_id(ids.EXECUTION, name):
            log.warning("a strange file in %s is left alone", context.journals)
        elif name not in context.jobs and context.store.get_execution(name) is None:
            os.unlink(os.path.join(context.journals, name))


async def backend(context: Context, name: str) -> bool:
    """Compare a backend's machine with the store, if it can be used now."""
    support = await context.probe(name)
    if not support.ok:
        log.warning("backend %s cannot be used: %s", name, support.reason)
        return False
    known = {
        live.sandbox.id: live
        for live in context.live.values()
        if live.sandbox.backend == name and live.sandbox.state != FAILED
    }
    there = await context.backends[name].reconcile({i: live.sandbox for i, live in known.items()})
    for sandbox_id, live in known.items():
        if sandbox_id not in there:
            why = "the backend does not have it any more"
            context.note(None, "sandbox.reap", target(live.sandbox), reason=why)
            context.update(live, state=FAILED, reason=why)
            context.uncount(live)
    context.reconciled.add(name)
    return True
