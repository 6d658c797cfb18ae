"""What the service tells of itself and of a wish."""

from __future__ import annotations

from ...record import Record
from ..problems import Problem
from ..store_rows import read_cursor
from .policy import consider

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..limits import Limits
    from ..values import Agent, Sandbox
    from .context import Context
    from .policy import Decision
    from .wishes import Wish


class Counts(Record):
    """Gauges for metrics and for `/readyz`."""

    sandboxes: Mapping[str, int]
    running: int
    queued: int
    # Since the start.
    lost: int = 0


class Identity(Record):
    """An agent with its limits, as they hold for it, and its use of them."""

    agent: Agent
    limits: Limits
    sandboxes: int
    running: int
    queued: int


class Refusal(Record):
    """One reason against a wish."""

    code: str
    rule: str
    reason: str
    hint: str = ""
    field: str = ""


class Check(Record):
    """The outcome of a dry run: all refusals, or what would be made."""

    allowed: bool
    refusals: tuple[Refusal, ...] = ()
    effective: Decision | None = None
    # Of the image, where there is one.
    digest: str = ""


def counts(context: Context) -> Counts:
    """How much there is."""
    states: dict[str, int] = {}
    for live in context.live.values():
        states[live.sandbox.state] = states.get(live.sandbox.state, 0) + 1
    places = context.places
    return Counts(
        sandboxes=states, running=places.running(), queued=places.queued(), lost=context.lost
    )


def identity(context: Context, agent: Agent) -> Identity:
    """An agent, as the service sees it."""
    places = context.places
    return Identity(
        agent=agent, limits=context.limits_of(agent), sandboxes=context.used(agent.name),
        running=places.running(agent.name), queued=places.queued(agent.name),
    )  # fmt: skip


def listed(
    context: Context, *, owner: str | None, state: str | None, metadata: Mapping[str, str],
    after: str | None, limit: int, newest: bool = False,
) -> list[Sandbox]:  # fmt: skip
    """A page of sandboxes, by creation: those of the store, and those for a single command."""
    found = context.store.sandboxes(
        owner=owner, state=state, metadata=metadata, after=after, limit=limit, newest=newest
    )
    cursor = read_cursor(after) if after is not None else None
    for live in context.live.values():
        one = live.sandbox
        if (
            not context.is_stored(one)
            and (cursor is None or _is_behind((one.created, one.id), cursor, newest=newest))
            and owner in (None, one.owner) and state in (None, one.state)
            and metadata.items() <= one.metadata.items()
        ):  # fmt: skip
            found.append(one)
    found.sort(key=lambda sandbox: (sandbox.created, sandbox.id), reverse=newest)
    # The store may have an older moment of the last use.
    live_ones = context.live
    return [live_ones[i.id].sandbox if i.id in live_ones else i for i in found[: max(limit, 0)]]


def _is_behind(place: tuple[float, str], cursor: tuple[float, str], *, newest: bool) -> bool:
    return place < cursor if newest else place > cursor


async def check(context: Context, agent: Agent, wish: Wish) -> Check:
    """What would become of a wish."""
    await context.probe_again()
    decision, problems = consider(agent, wish, context.world(agent))
    digest = ""
    if decision is not None and decision.image:
        try:
            digest = await context.backend(decision.backend).resolve(decision.image)
        except Problem as problem:
            problems = [problem]
    if problems:
        return Check(allowed=False, refusals=tuple(map(_refusal, problems)))
    return Check(allowed=True, effective=decision, digest=digest)


def _refusal(problem: Problem) -> Refusal:
    return Refusal(
        code=problem.code, rule=problem.rule, reason=problem.message, hint=problem.hint,
        field=problem.field,
    )  # fmt: skip
