"""The limits of the service: one table, from the environment, per agent; and who may have what.

A wish beyond a limit is refused with the limit's name. Nothing is clamped without a word: what a
request leaves out gets the default, and the answer reports the effective value. Pure.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..policy.docker import images
from ..policy.docker.values import Refused
from ..record import Record
from . import limits_units as units
from .problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .values import Agent, Network, Resources

# Whose a limit is: the whole service's, or each agent's (then a token may have its own).
GLOBAL, AGENT = "global", "agent"
NETWORKS = ("off", "allow", "public")


class Limits(Record):
    """The limits of a service, or of one agent. Sizes are bytes, times are seconds."""

    allowed_images: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = NETWORKS
    required_runtime: str = ""
    max_execution_time: float = 300.0
    default_execution_time: float = 60.0
    max_sandboxes: int = 500
    max_sandboxes_per_agent: int = 50
    max_concurrent_execs: int = 64
    max_concurrent_execs_per_agent: int = 16
    max_queued_execs_per_agent: int = 256
    max_queue_seconds: float = 30.0
    max_open_requests_per_agent: int = 320
    max_memory: int = 2 << 30
    default_memory: int = 512 << 20
    max_cpus: float = 2.0
    default_cpus: float = 1.0
    max_pids: int = 512
    default_pids: int = 256
    max_disk: int = 1 << 30
    default_disk: int = 256 << 20
    max_output_bytes: int = 10 << 20
    max_inline_bytes: int = 1 << 20
    max_upload_bytes: int = 100 << 20
    rate_create_per_min: int = 6000
    rate_requests_per_sec: int = 200
    max_lifetime: float = 86400.0
    default_lifetime: float = 3600.0
    idle_timeout: float = 3600.0
    keep_executions: float = 86400.0


class Row(Record):
    """One limit. Its variable and the name of a quota is `name` in capitals."""

    name: str
    kind: str
    scope: str
    help: str
    # The limit that this one may not exceed: a default, its maximum.
    most: str = ""
    # Another name of the variable that people have in their files.
    alias: str = ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return self.name.upper()

    @property
    def default(self) -> object:
        """What holds without the variable."""
        return Limits.__defaults__[self.name]


def _row(name: str, kind: str, scope: str, help: str, most: str = "", *, alias: str = "") -> Row:
    return Row(name=name, kind=kind, scope=scope, help=help, most=most, alias=alias)


TABLE: tuple[Row, ...] = (
    _row("allowed_images", units.IMAGES, AGENT, "images that sandboxes may use; none by default"),
    _row("allowed_networks", units.NETWORKS, AGENT, "network modes that sandboxes may ask for"),
    _row("required_runtime", units.NAME, GLOBAL, "the only runtime of containers, such as runsc"),
    _row("max_execution_time", units.SECONDS, AGENT, "longest run of a command"),
    _row("default_execution_time", units.SECONDS, AGENT, "the same, for a request without timeout",
         "max_execution_time"),
    _row("max_sandboxes", units.COUNT, GLOBAL, "sandboxes of all agents"),
    _row("max_sandboxes_per_agent", units.COUNT, AGENT, "sandboxes of one agent"),
    _row("max_concurrent_execs", units.COUNT, GLOBAL, "commands of all agents that run at once"),
    _row("max_concurrent_execs_per_agent", units.COUNT, AGENT, "the same, of one agent"),
    _row("max_queued_execs_per_agent", units.COUNT, AGENT, "commands of one agent that wait"),
    _row("max_queue_seconds", units.SECONDS, AGENT, "how long a command waits before 429"),
    _row("max_open_requests_per_agent", units.COUNT, AGENT,
         "requests of one agent that are open at once, streams included"),
    _row("max_memory", units.SIZE, AGENT, "memory of a sandbox"),
    _row("default_memory", units.SIZE, AGENT, "the same, for a request without it", "max_memory"),
    _row("max_cpus", units.NUMBER, AGENT, "processors of a sandbox", alias="MAX_CPU"),
    _row("default_cpus", units.NUMBER, AGENT, "the same, for a request without it", "max_cpus"),
    _row("max_pids", units.COUNT, AGENT, "processes and threads of a sandbox"),
    _row("default_pids", units.COUNT, AGENT, "the same, for a request without it", "max_pids"),
    _row("max_disk", units.SIZE, AGENT, "files of a sandbox"),
    _row("default_disk", units.SIZE, AGENT, "the same, for a request without it", "max_disk"),
    _row("max_output_bytes", units.SIZE, AGENT, "output that is kept of a command"),
    _row("max_inline_bytes", units.SIZE, AGENT, "output that a JSON answer carries",
         "max_output_bytes"),
    _row("max_upload_bytes", units.SIZE, AGENT, "size of a request's body"),
    _row("rate_create_per_min", units.COUNT, AGENT, "sandboxes made per minute"),
    _row("rate_requests_per_sec", units.COUNT, AGENT, "requests per second"),
    _row("max_lifetime", units.SECONDS, AGENT, "from creation or renewal to the end of a sandbox"),
    _row("default_lifetime", units.SECONDS, AGENT, "the same, for a request without timeout",
         "max_lifetime"),
    _row("idle_timeout", units.SECONDS, AGENT, "a sandbox that is not used ends after this",
         "max_lifetime"),
    _row("keep_executions", units.SECONDS, GLOBAL, "how long results are kept"),
)  # fmt: skip
BY_NAME: Mapping[str, Row] = {row.name: row for row in TABLE}


# --- from the environment, and per agent


def load(environ: Mapping[str, str]) -> Limits:
    """The limits of the service. A variable that is set to nothing counts as not set."""
    given: dict[str, object] = {}
    for row in TABLE:
        text = (environ.get(row.variable, "") or environ.get(row.alias, "")).strip()
        if text:
            given[row.name] = _read(row, text)
    return _with(Limits(), given)


def for_agent(limits: Limits, agent: Agent) -> Limits:
    """The limits of one agent. Only who may make tokens sets quotas, so they may be higher too."""
    return _with(limits, agent.quotas) if agent.quotas else limits


def quota(name: str, text: str) -> tuple[str, object]:
    """A quota of a token from its text, `MAX_MEMORY=1G` split at the sign."""
    row = BY_NAME.get(name.strip().lower().replace("-", "_"))
    if row is None:
        raise PolicyError(
            f"there is no limit '{name}'",
            hint="one of: " + ", ".join(r.variable for r in TABLE if r.scope == AGENT),
            code="bad-limit",
        )
    if row.scope != AGENT:
        raise PolicyError(
            f"{row.variable} is one for all agents: a token cannot have its own", code="bad-limit"
        )
    value = _read(row, text)
    return row.name, list(value) if isinstance(value, tuple) else value


def _read(row: Row, text: str) -> object:
    try:
        return units.READERS[row.kind](text)
    except ValueError as error:
        raise PolicyError(
            f"cannot use {row.variable}={text!r}: {error}", hint=row.help, code="bad-limit"
        ) from error


def _with(base: Limits, given: Mapping[str, object]) -> Limits:
    """Limits with some values set. A default that was not set follows its maximum down."""
    known = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name in BY_NAME
    }
    merged = base.replace(**known)
    lowered = {}
    for row in TABLE:
        if not row.most:
            continue
        value, most = getattr(merged, row.name), getattr(merged, row.most)
        if value > most:
            if row.name in known:
                raise PolicyError(
                    f"{row.variable} is above {row.most.upper()}",
                    hint=f"{units.shown(row.kind, value)} > {units.shown(row.kind, most)}",
                    code="bad-limit",
                )
            lowered[row.name] = most
    return merged.replace(**lowered) if lowered else merged


def describe(limits: Limits) -> dict[str, object]:
    """Effective values by camelCase name, for `/v1/policy` and `/v1/whoami`."""
    found: dict[str, object] = {}
    for row in TABLE:
        first, *rest = row.name.split("_")
        value = getattr(limits, row.name)
        found[first + "".join(map(str.capitalize, rest))] = (
            list(value) if isinstance(value, tuple) else value
        )
    return found


# --- what a request may have


# Field of Resources → its name in a request.
RESOURCES = {"memory": "memory", "cpus": "cpu", "pids": "pids", "disk": "disk"}


def check_resources(limits: Limits, wish: Resources) -> Resources:
    """The resources of a sandbox: defaults for what is not wished."""
    values = {
        name: _bounded(limits, name, getattr(wish, name), f"resources.{field}")
        for name, field in RESOURCES.items()
    }
    return wish.replace(**values)


def check_timeout(limits: Limits, seconds: float | None) -> float:
    """How long a command may run."""
    return float(_bounded(limits, "execution_time", seconds, "timeout"))


def check_lifetime(limits: Limits, seconds: float | None) -> float:
    """How long a sandbox may live, from now."""
    return float(_bounded(limits, "lifetime", seconds, "timeout"))


def _bounded(limits: Limits, name: str, wish: float | None, field: str) -> float:
    """A wish within its maximum, or the default."""
    if wish is None:
        value: float = getattr(limits, f"default_{name}")
        return value
    # Not a number: no comparison holds.
    if not wish > 0:
        raise Problem("INVALID", f"{field} must be above zero", field=field, rule="request")
    check_most(limits, f"max_{name}", wish, field)
    return wish


def check_most(limits: Limits, name: str, wish: float, field: str = "") -> None:
    """Refuse what is beyond a limit, with the limit's name and value."""
    row, most = BY_NAME[name], getattr(limits, name)
    if wish <= most:
        return
    raise Problem(
        "LIMIT_EXCEEDED",
        f"{field or name} may be at most {units.shown(row.kind, most)}, "
        f"not {units.shown(row.kind, type(most)(wish) if wish < units.MOST_BYTES else wish)}",
        hint=f"the limit is {row.variable}; ask for less, or ask whoever runs the service",
        rule=f"limits.{name}", field=field,
    )  # fmt: skip


def check_count(limits: Limits, name: str, have: int, *, retry_after: float | None = None) -> None:
    """Refuse one more of what an agent, or the service, has enough of."""
    most = getattr(limits, name)
    if have < most:
        return
    row = BY_NAME[name]
    raise Problem(
        "QUOTA_EXCEEDED", f"there are {have} of at most {most} {row.help}",
        hint=f"the limit is {row.variable}; delete some, or wait until some are gone",
        rule=f"limits.{name}", retry_after=retry_after,
    )  # fmt: skip


def check_upload(limits: Limits, size: int) -> None:
    """Refuse a body that is too large."""
    if size > limits.max_upload_bytes:
        most = units.shown(units.SIZE, limits.max_upload_bytes)
        raise Problem(
            "TOO_LARGE", f"a body may have at most {most}", hint="the limit is MAX_UPLOAD_BYTES",
            rule="limits.max_upload_bytes",
        )  # fmt: skip


def check_network(limits: Limits, network: Network) -> None:
    """Whether a sandbox may have this network."""
    if network.mode not in limits.allowed_networks:
        raise Problem(
            "NETWORK_NOT_ALLOWED", f"network '{network.mode[:40]}' is not allowed here",
            hint="allowed: " + ", ".join(limits.allowed_networks),
            rule="limits.allowed_networks", field="network",
        )  # fmt: skip


def check_image(limits: Limits, agent: Agent, image: str) -> None:
    """Whether an agent may use an image: by the list of the service and by that of its token."""
    try:
        name = images.parse(image)
    except Refused as error:
        raise Problem(
            "INVALID", f"{image[:80]!r} is not the name of an image", field="image", rule="request"
        ) from error
    lists = [("limits.allowed_images", limits.allowed_images)]
    if agent.images is not None:
        lists.append(("token.images", agent.images))
    for rule, patterns in lists:
        if not images.matches(name, patterns):
            raise Problem(
                "IMAGE_NOT_ALLOWED", f"image '{name}' is not allowed",
                hint=f"allowed: {', '.join(patterns) or 'none; see ALLOWED_IMAGES'}",
                rule=rule, field="image",
            )  # fmt: skip


def check_runtime(limits: Limits, runtime: str) -> str:
    """The runtime to use; "" is the backend's own."""
    needed = limits.required_runtime
    if runtime and needed and runtime != needed:
        raise Problem(
            "RUNTIME_NOT_ALLOWED", f"runtime '{runtime[:40]}' is not allowed here",
            hint=f"leave it out: all sandboxes use {needed}",
            rule="limits.required_runtime", field="runtime",
        )  # fmt: skip
    return needed or runtime


def check_template(agent: Agent, template: str) -> None:
    """Whether an agent may use a template."""
    if agent.templates is not None and template not in agent.templates:
        raise Problem(
            "TEMPLATE_NOT_ALLOWED", f"template '{template[:80]}' is not allowed",
            hint=f"allowed: {', '.join(agent.templates) or 'none'}",
            rule="token.templates", field="template",
        )  # fmt: skip


def check_scope(agent: Agent, scope: str) -> None:
    """Whether an agent's token has a scope; `admin` has all."""
    if scope not in agent.scopes and not agent.is_admin:
        raise Problem(
            "SCOPE_MISSING", f"this token has no scope '{scope}'",
            hint="ask for a token made with --scope " + scope, rule=f"scope.{scope}",
        )  # fmt: skip
