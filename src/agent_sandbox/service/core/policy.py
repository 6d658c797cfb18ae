"""What becomes of a wish for a sandbox: pure. Every refusal names its rule; nothing is clamped."""

from __future__ import annotations

from ...errors import PolicyError
from ...policy import network as rules
from ...record import Record
from .. import limits as bounds
from ..problems import Problem
from ..values import REQUIRED, Network, Resources
from .templates import DEFAULT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..backend.interface import Support
    from ..limits import Limits
    from ..values import Agent
    from .templates import Template
    from .wishes import Wish


class World(Record):
    """What a decision depends on, beside the agent and its wish."""

    # Of this agent.
    limits: Limits
    templates: Mapping[str, Template]
    supports: Mapping[str, Support]
    default_backend: str


class Draft(Record):
    """A wish with the values of its template, before it is bounded."""

    template: str
    backend: str
    image: str
    runtime: str
    env: Mapping[str, str]
    timeout: float | None
    resources: Resources
    network: Network
    inner: str
    # Hosts that the agent itself has named; a template's are the operator's.
    named: tuple[str, ...]


class Decision(Record):
    """What a wish comes to. Each bound is in `enforced` with what keeps it; "": nothing does."""

    template: str
    backend: str
    image: str
    runtime: str
    env: Mapping[str, str]
    timeout: float
    resources: Resources
    enforced: Mapping[str, str]
    network: Network
    inner: str


def decide(agent: Agent, wish: Wish, world: World) -> Decision:
    """What to make; raises the first refusal."""
    return _decided(_checked_draft(agent, wish, world, _raise), world)


def consider(agent: Agent, wish: Wish, world: World) -> tuple[Decision | None, list[Problem]]:
    """What would be made, or every reason against it."""
    problems: list[Problem] = []
    try:
        draft = _checked_draft(agent, wish, world, problems.append)
    except Problem as problem:
        # What follows cannot be told without it.
        return None, [problem]
    return (None, problems) if problems else (_decided(draft, world), [])


def _raise(problem: Problem) -> None:
    raise problem


def _checked_draft(
    agent: Agent, wish: Wish, world: World, refuse: Callable[[Problem], None]
) -> Draft:
    draft = _draft(agent, wish, world)
    support = world.supports[draft.backend]
    for check in CHECKS:
        try:
            check(agent, draft, world.limits, support)
        except Problem as problem:
            refuse(problem)
    return draft


def _draft(agent: Agent, wish: Wish, world: World) -> Draft:
    """The wish over its template. Both must exist before anything else has a meaning."""
    name = wish.template or DEFAULT
    template = world.templates.get(name)
    bounds.check_template(agent, name)
    if template is None:
        raise _invalid("template", f"there is no template '{name[:80]}'", world.templates)
    backend = wish.backend or template.backend or world.default_backend
    if backend not in world.supports:
        raise _invalid("backend", f"there is no backend '{backend[:80]}'", world.supports)
    resources = {
        field: value if (value := getattr(wish.resources, field)) is not None
        else getattr(template.resources, field)
        for field in Resources.__fields__
    }  # fmt: skip
    return Draft(
        template=name, backend=backend, image=wish.image or template.image,
        runtime=wish.runtime or template.runtime, env={**template.env, **wish.env},
        timeout=template.timeout if wish.timeout is None else wish.timeout,
        resources=Resources(**resources), network=wish.network or template.network or Network(),
        inner=template.inner, named=wish.network.allow if wish.network is not None else (),
    )  # fmt: skip


def _decided(draft: Draft, world: World) -> Decision:
    """The values of a draft that no check refused."""
    kept = world.supports[draft.backend].enforced
    return Decision(
        template=draft.template, backend=draft.backend, image=draft.image, env=draft.env,
        runtime=bounds.check_runtime(world.limits, draft.runtime), network=draft.network,
        timeout=bounds.check_lifetime(world.limits, draft.timeout),
        resources=bounds.check_resources(world.limits, draft.resources),
        enforced={name: kept.get(name, "") for name in Resources.__fields__}, inner=draft.inner,
    )  # fmt: skip


# --- the checks


def _available(_agent: Agent, draft: Draft, _limits: Limits, support: Support) -> None:
    if not support.ok:
        raise Problem(
            "BACKEND_UNAVAILABLE", f"backend '{draft.backend}' cannot be used at the moment",
            rule="backend.available", field="backend", retry_after=5.0,
        )  # fmt: skip


def _image(agent: Agent, draft: Draft, limits: Limits, support: Support) -> None:
    if not support.images:
        if draft.image and limits.allowed_images:
            # What the operator forbids is the answer, not what this backend happens to lack.
            bounds.check_image(limits, agent, draft.image)
        if draft.image:
            raise _unsupported(draft, "images", "image", "leave `image` out")
        return
    if not draft.image:
        raise Problem("INVALID", f"backend '{draft.backend}' needs an image", rule="backend.images",
                      field="image", hint="name one, or a template that has one")  # fmt: skip
    bounds.check_image(limits, agent, draft.image)


def _runtime(_agent: Agent, draft: Draft, limits: Limits, support: Support) -> None:
    runtime = bounds.check_runtime(limits, draft.runtime)
    if not runtime or runtime in support.runtimes:
        return
    if runtime == limits.required_runtime:
        # Also where the backend knows no runtimes: it would be a way around the rule.
        raise Problem(
            "RUNTIME_NOT_ALLOWED",
            f"backend '{draft.backend}' has no runtime '{runtime}', which is required here",
            hint="install it, or use a backend that has it", rule="limits.required_runtime",
            field="backend",
        )  # fmt: skip
    raise _unsupported(
        draft, f"runtime '{runtime[:40]}'", "runtime",
        f"it has: {', '.join(support.runtimes) or 'none to choose from'}",
    )  # fmt: skip


def _network(_agent: Agent, draft: Draft, limits: Limits, support: Support) -> None:
    bounds.check_network(limits, draft.network)
    if draft.network.mode not in support.networks:
        raise _unsupported(
            draft, f"network '{draft.network.mode}'", "network",
            f"it has: {', '.join(support.networks)}",
        )  # fmt: skip
    for text in draft.named:
        _open_host(text)


def _open_host(text: str) -> None:
    """Refuse a host that only whoever owns this machine may open.

    Who names an address reaches it, be it the machine's own loopback, its neighbours or the
    cloud's metadata.
    """
    try:
        rule = rules.parse(text, "network.allowOut")
    except PolicyError as error:
        raise Problem("INVALID", error.message, hint=error.hint, rule="request",
                      field="network.allowOut") from error  # fmt: skip
    if rules.opens_closed(rule):
        raise Problem(
            "NETWORK_NOT_ALLOWED", f"'{text[:80]}' could be this machine or one beside it",
            hint="name the host, or a public network; the operator can open it in a template",
            rule="network.closed", field="network.allowOut",
        )  # fmt: skip


def _resources(_agent: Agent, draft: Draft, limits: Limits, support: Support) -> None:
    bounds.check_resources(limits, draft.resources)
    for name, field in bounds.RESOURCES.items():
        # A default that nothing keeps is reported as such; a wish that nothing keeps is refused.
        if getattr(draft.resources, name) is not None and not support.enforced.get(name):
            raise Problem(
                "LIMIT_NOT_ENFORCEABLE", f"backend '{draft.backend}' cannot bound {name} here",
                hint="leave it out; what holds is in `effective`", rule="backend.enforced",
                field=f"resources.{field}",
            )  # fmt: skip


def _inner(_agent: Agent, draft: Draft, _limits: Limits, support: Support) -> None:
    if draft.inner == REQUIRED and not support.inner:
        raise _unsupported(
            draft, "bwrap inside, which the template requires", "template",
            "use another backend, or a template without `inner`",
        )  # fmt: skip


def _lifetime(_agent: Agent, draft: Draft, limits: Limits, _support: Support) -> None:
    bounds.check_lifetime(limits, draft.timeout)


CHECKS: tuple[Callable[[Agent, Draft, Limits, Support], None], ...] = (
    _available, _image, _runtime, _network, _resources, _inner, _lifetime,
)  # fmt: skip


def _invalid(field: str, message: str, known: Mapping[str, object]) -> Problem:
    return Problem("INVALID", message, field=field, rule="request",
                   hint=f"there is: {', '.join(known)}")  # fmt: skip


def _unsupported(draft: Draft, what: str, field: str, hint: str) -> Problem:
    return Problem("UNSUPPORTED", f"backend '{draft.backend}' has no {what}", field=field,
                   hint=hint, rule="backend.support")  # fmt: skip
