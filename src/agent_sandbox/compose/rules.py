"""The table of findings: what is looked for, how bad it is, why, and what to do instead."""

from __future__ import annotations

from ..policy import paths
from ..record import Record
from . import finders
from .finders import Hit
from .model import BIND, VOLUME, canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .model import Mount, Project, Service
    from .nodes import Place

    Finder = Callable[[Service, str], Iterator[Hit]]

SEVERITIES = ("low", "medium", "high", "critical")
ACCEPTED = "accepted"


class Rule(Record):
    """One kind of finding."""

    id: str
    severity: str
    title: str
    why: str
    fix: str


class Finding(Record):
    """One thing that was found."""

    rule: Rule
    severity: str
    # Empty for what belongs to the whole project.
    service: str
    profiles: tuple[str, ...]
    message: str
    place: Place
    # What would have to go; the place itself unless another entry brings it.
    element: Place
    # The author's own words, when a label answers for it.
    accepted: bool = False
    answer: str = ""


RULES: tuple[Rule, ...] = (
    Rule(
        id="docker-socket", severity="critical", title="the engine's socket is mounted",
        why="whoever can connect to it starts a container that mounts the host's disk, as root; "
        "a read-only mount does not change that",
        fix="take it out: sandboxctl compose secure --solution no-socket, dind, sysbox or service",
    ),
    Rule(
        id="engine-address", severity="critical", title="an engine is named by variable",
        why="an engine that answers without TLS makes everybody who reaches it root",
        fix="remove DOCKER_HOST, or give each agent its own engine with TLS (--solution dind)",
    ),
    Rule(
        id="open-engine", severity="critical", title="an engine listens to everybody",
        why="whoever connects to it is root over it, and over the host if it is privileged",
        fix="leave DOCKER_TLS_CERTDIR at its default, do not publish 2375 or 2376",
    ),
    Rule(
        id="docker-group", severity="high", title="the engine's group",
        why="members of the group may use the engine's socket, which is root",
        fix="take the group out",
    ),
    Rule(
        id="privileged", severity="critical", title="a privileged container",
        why="it has every capability and the host's devices: mounting the host's disk is one "
        "command",
        fix="remove it; add the one capability or device that is really needed",
    ),
    Rule(
        id="host-namespace", severity="critical", title="a namespace of the host",
        why="host processes can be traced, or services on the host's loopback and abstract "
        "sockets reached",
        fix="remove it; publish ports, or share a network of the project",
    ),
    Rule(
        id="capability", severity="critical", title="a dangerous capability",
        why="it is enough to leave the container or to read its neighbours",
        fix="remove it; start from cap_drop: [ALL] and add what a failure names",
    ),
    Rule(
        id="device", severity="critical", title="a device of the host",
        why="disks, memory and consoles of the host are devices",
        fix="remove it",
    ),
    Rule(
        id="unconfined", severity="high", title="a protection is switched off",
        why="seccomp, AppArmor and masked paths close what a container could attack the kernel by",
        fix="remove it, or write a profile that adds the one call",
    ),
    Rule(
        id="host-path", severity="critical", title="a directory of the host itself",
        why="what is written there, the host runs; what is read there are its secrets",
        fix="mount the one sub-directory that is needed, or use a volume",
    ),
    Rule(
        id="volume-driver", severity="critical", title="a volume that is no volume",
        why="driver_opts make the engine mount any device or file system as root",
        fix="remove driver_opts, or mount the directory by its path, where it can be seen",
    ),
    Rule(
        id="propagation", severity="high", title="mounts travel to the host",
        why="what the container mounts appears on the host",
        fix="remove the propagation option",
    ),
    Rule(
        id="other-container", severity="high", title="mounts of a container elsewhere",
        why="it inherits every mount of that container, and no file here says which",
        fix="name the volumes themselves",
    ),
    Rule(
        id="host-program", severity="high", title="something runs outside of containers",
        why="the file decides what the host runs, or leaves the container's limits",
        fix="remove it",
    ),
    Rule(
        id="shared-writable", severity="medium", title="agents can write each other's input",
        why="what one agent writes there the other takes for its task, its code or its answer: "
        "an agent that was taken over steers the others",
        fix="give each agent a sub-directory of its own, and the others :ro",
    ),
    Rule(
        id="secret", severity="high", title="a secret in the environment",
        why="every process inside, every crash report and docker inspect shows it; a file with it "
        "ends up in version control",
        fix="use secrets: with a file, and NAME_FILE=/run/secrets/…",
    ),
    Rule(
        id="root-user", severity="medium", title="root inside",
        why="root inside is root outside for every mount, and for every bug of the kernel",
        fix="user: '1000:1000', or a USER in the image",
    ),
    Rule(
        id="no-limits", severity="low", title="no limits",
        why="one agent in a loop takes the whole machine",
        fix="mem_limit, pids_limit and cpus",
    ),
    Rule(
        id="new-privileges", severity="low", title="set-user-id programs work",
        why="a program with the bit makes root of an ordinary user inside",
        fix="security_opt: ['no-new-privileges:true']",
    ),
    Rule(
        id="unresolved", severity="medium", title="it depends on a variable",
        why="the variable has no value here, so nobody can say what will run",
        fix="set it while checking (environment or --env-file), or give it a default",
    ),
    Rule(
        id="unread", severity="high", title="not looked at",
        why="what cannot be read cannot be judged",
        fix="fetch it, and name the local copy",
    ),
)  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}

FINDERS: tuple[tuple[str, Finder], ...] = (
    ("docker-socket", finders.socket_mounts),
    ("open-engine", finders.open_engines),
    ("docker-group", finders.engine_group),
    ("privileged", finders.privileged),
    ("host-namespace", finders.host_namespaces),
    ("capability", finders.capabilities),
    ("device", finders.devices),
    ("unconfined", finders.unconfined),
    ("host-path", finders.host_mounts),
    ("propagation", finders.propagation),
    ("other-container", finders.other_containers),
    ("host-program", finders.host_programs),
    ("secret", finders.secrets),
    ("root-user", finders.root_user),
    ("no-limits", finders.limits),
    ("new-privileges", finders.new_privileges),
    ("unresolved", finders.unresolved),
)


def check(project: Project, home: str, *, accept: bool = True) -> tuple[Finding, ...]:
    """Everything that is wrong with a project, the worst first, then by file and line."""
    found: list[Finding] = []
    for service in project.services:
        hits = [(rule, hit) for rule, finder in FINDERS for hit in finder(service, home)]
        hits += [("engine-address", hit) for hit in finders.engine_variables(project, service)]
        hits += [("volume-driver", hit) for hit in _drivers(project, service)]
        hits += [("host-namespace", hit) for hit in _host_networks(project, service)]
        found += [_finding(service, rule, hit, accept=accept) for rule, hit in hits]
    found += _shared(project, accept=accept)
    found += [
        _bare("unread", u.place, u.what, "high" if u.grave else "low") for u in project.unread
    ]
    unique = dict.fromkeys(found)
    rank = {name: index for index, name in enumerate(SEVERITIES)}
    return tuple(
        sorted(unique, key=lambda f: (f.accepted, -rank[f.severity], f.place.file, f.place.line))
    )


def failing(findings: tuple[Finding, ...], threshold: str) -> tuple[Finding, ...]:
    """Those at or above a severity that nobody has answered for."""
    wanted = SEVERITIES[SEVERITIES.index(threshold) :]
    return tuple(f for f in findings if f.severity in wanted and not f.accepted)


def _finding(service: Service, rule: str, hit: Hit, *, accept: bool) -> Finding:
    known = BY_ID[rule]
    from .model import WHY_LABEL

    answered = accept and rule in service.accepted
    why = service.labels.get(WHY_LABEL)
    return Finding(
        rule=known, severity=hit.grade or known.severity, service=service.name,
        profiles=tuple(i.text or "" for i in service.node.listed("profiles")),
        message=hit.message, place=hit.place, element=hit.element or hit.place, accepted=answered,
        answer=(why.text or "") if answered and why is not None else "",
    )  # fmt: skip


def _bare(rule: str, place: Place, message: str, severity: str) -> Finding:
    return Finding(
        rule=BY_ID[rule],
        severity=severity,
        service="",
        profiles=(),
        message=message,
        place=place,
        element=place,
    )


def _drivers(project: Project, service: Service) -> Iterator[Hit]:
    """Volumes whose driver options mount something else than a directory that is judged by path."""
    for mount in service.mounts:
        if mount.kind != VOLUME:
            continue
        node = project.node.get("volumes", mount.source)
        if node is None:
            continue
        driver = node.string("driver")
        kind, device = node.string("driver_opts", "type"), node.string("driver_opts", "device")
        if driver not in ("", "local"):
            words, grade = f"volume {mount.source} is made by the plugin {driver}", "medium"
        elif not device or (kind == "tmpfs" and device == "tmpfs"):
            continue
        else:
            words = f"volume {mount.source} at {mount.target} is {kind or 'a device'} {device}"
            grade = "medium" if kind in ("nfs", "nfs4", "cifs") else ""
        yield Hit(place=node.place, message=words, grade=grade, element=mount.item)


def _host_networks(project: Project, service: Service) -> Iterator[Hit]:
    """A network of the project that is really the host's."""
    used = service.node.get("networks")
    chosen = {i.text or "" for i in service.node.listed("networks")}
    chosen |= set(service.node.mapped("networks"))
    for name in sorted(chosen) if used is not None else ["default"]:
        node = project.node.get("networks", name)
        if node is None:
            continue
        real = node.string("name") or node.string("external", "name")
        if "host" in (real, node.string("driver")):
            yield Hit(place=node.place, message=f"network {name} is the host's")


def _overlap(one: Mount, other: Mount) -> bool:
    if one.kind != other.kind:
        return False
    if one.kind == VOLUME:
        return one.source == other.source
    a, b = canonical(one.real or one.source), canonical(other.real or other.source)
    return one.kind == BIND and (paths.within(a, b) or paths.within(b, a))


def _shared(project: Project, *, accept: bool) -> list[Finding]:
    """Mounts that several services can write; one finding per service and mount."""
    writers = [
        (service, mount)
        for service in project.services
        for mount in service.mounts
        if not mount.read_only and mount.source and mount.kind in (BIND, VOLUME)
        and "docker-socket" not in _rules_of(service, mount)
    ]  # fmt: skip
    found = []
    for service, mount in writers:
        others = [s.name for s, m in writers if s.name != service.name and _overlap(mount, m)]
        if others:
            names = ", ".join(dict.fromkeys(others))
            hit = Hit(
                place=mount.place,
                element=mount.item,
                message=f"{mount.source} at {mount.target} is written by {names}, too",
            )
            found.append(_finding(service, "shared-writable", hit, accept=accept))
    return found


def _rules_of(service: Service, mount: Mount) -> tuple[str, ...]:
    """A socket is a finding of its own; that several have it adds nothing."""
    alone = service.replace(mounts=(mount,))
    return tuple("docker-socket" for _ in finders.socket_mounts(alone, "/"))
