"""A compose file made safe: what is dangerous goes, and one of four solutions takes its place."""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import finders, solutions
from .edit import Document
from .model import FROM_ENV_FILE
from .nodes import Node, parse
from .solutions import DIND, NO_SOCKET, SERVICE, SYSBOX, tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .model import Project, Service
    from .rules import Finding
    from .solutions import Wish

ENGINE_RULES = frozenset({"docker-socket", "engine-address"})
# Which keys an entry may stand under for a finding of a rule to be removed there.
REMOVED: dict[str, tuple[str, ...]] = {
    "docker-socket": ("volumes", "secrets", "configs", "use_api_socket"),
    "host-path": ("volumes", "secrets", "configs"),
    "propagation": ("volumes",),
    "volume-driver": ("volumes",),
    "engine-address": ("environment",),
    "open-engine": ("environment", "ports", "command", "entrypoint"),
    "docker-group": ("group_add",),
    "privileged": ("privileged", "entitlements"),
    "host-namespace": ("network_mode", "pid", "ipc", "uts", "userns_mode", "cgroup", "net",
                       "network", "networks"),
    "capability": ("cap_add",),
    "device": ("devices", "device_cgroup_rules"),
    "unconfined": ("security_opt",),
    "other-container": ("volumes_from",),
    "host-program": ("provider", "cgroup_parent", "sysctls"),
}  # fmt: skip
# Useless, or misleading, once the engine's address is gone.
COMPANIONS = ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_TLS")


class Rewritten(Record):
    """The new text and what to say about it."""

    text: str
    removed: tuple[str, ...]
    stops: tuple[str, ...]
    todo: tuple[str, ...]


def agents_of(project: Project, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The services that have an engine today, in their order in the file."""
    having = {f.service for f in findings if f.rule.id in ENGINE_RULES and not f.accepted}
    return tuple(s.name for s in project.services if s.name in having)


def elsewhere(findings: tuple[Finding, ...], file: str) -> tuple[Finding, ...]:
    """What must go, but stands in a file that is not being rewritten."""
    return tuple(
        f for f in findings
        if f.element.file != file and not f.accepted and f.severity in ("high", "critical")
        and not (f.rule.id == "engine-address" and f.place.line and _overridable(f))
    )  # fmt: skip


def _overridable(finding: Finding) -> bool:
    """An env file's variable is overruled by an empty one in the service."""
    return not finding.place.file.endswith((".yml", ".yaml"))


def secure(
    text: str, file: str, project: Project, findings: tuple[Finding, ...], wish: Wish
) -> Rewritten:
    """Rewrite the text of `file`, which is part of `project`."""
    known = {service.name for service in project.services}
    unknown = sorted({*wish.agents, *wish.readers} - known)
    if unknown:
        raise PolicyError(f"no service is called {unknown[0]}", code="compose-service")
    _refuse_extended(project, {DIND: wish.agents, SERVICE: wish.agents}.get(wish.solution, ()))
    _refuse_extended(project, wish.readers)
    mine = tuple(f for f in findings if f.element.file == file and not f.accepted)
    work = _Work(Document(text), project, file, wish)
    work.remove(mine)
    work.silence(findings)
    if wish.solution == DIND:
        work.dind()
    elif wish.solution == SYSBOX:
        work.sysbox()
    elif wish.solution == SERVICE:
        work.service()
    if wish.readers:
        work.readers()
    for name in sorted({*wish.agents, *wish.readers}, key=list(known).index):
        work.harden(name)
    return Rewritten(
        text=work.document.text, removed=tuple(work.removed),
        stops=solutions.STOPS[wish.solution], todo=tuple(work.todo),
    )  # fmt: skip


def _refuse_extended(project: Project, holders: tuple[str, ...]) -> None:
    """Who extends an agent or a reader would inherit its engine, token or socket."""
    for service in project.services:
        extends = service.node.get("extends")
        base = extends.string("service") if extends is not None else ""
        base = base or (extends.text or "" if extends is not None else "")
        if base in holders:
            raise PolicyError(
                f"{service.name} extends {base}, and would share its access",
                hint=f"name the agents with --agent, without {base}, or move what they share to "
                "an anchor",
                code="compose-extends",
            )


def _under(keys: tuple[str, ...]) -> Callable[[tuple[str, ...]], bool]:
    """Whether a path names one of these keys below a service, an anchor or `build`."""
    return lambda path: path[0].startswith("x-") or any(key in keys for key in path[1:])


class _Work:
    def __init__(self, document: Document, project: Project, file: str, wish: Wish) -> None:
        self.document = document
        self.project = project
        self.file = file
        self.wish = wish
        self.removed: list[str] = []
        self.todo: list[str] = []

    def services(self) -> dict[str, Service]:
        return {service.name: service for service in self.project.services}

    # --- taking out

    def remove(self, findings: tuple[Finding, ...]) -> None:
        """From the end of the file, so that the places of the others stay true."""
        order = sorted(findings, key=lambda f: (f.element.line, f.element.column), reverse=True)
        gone: set[tuple[int, int]] = set()
        for finding in order:
            at = (finding.element.line, finding.element.column)
            if at in gone or not self._due(finding):
                continue
            if finding.rule.id == "secret":
                done = self._unname(at, finding.message.partition(",")[0])
            else:
                keys = REMOVED.get(finding.rule.id, ())
                done = self.document.remove(*at, _under(keys)) if keys else False
                if done:
                    self.removed.append(f"line {at[0]}: {finding.message}")
            if done:
                gone.add(at)
        self.removed.reverse()
        for name, service in self.services().items():
            user, _, group = service.node.string("user").partition(":")
            if group in finders.ENGINE_GROUPS and user:
                # Without the key the image would decide, and say root.
                self.document.set(("services", name, "user"), tree(user))

    def _due(self, finding: Finding) -> bool:
        # Harmless or wanted by many: named, not taken.
        return finding.severity in ("high", "critical") or finding.rule.id in ENGINE_RULES

    def silence(self, findings: tuple[Finding, ...]) -> None:
        """Engine variables from env files, and what went with those that were removed."""
        for name, service in self.services().items():
            hit = [f for f in findings if f.service == name and f.rule.id == "engine-address"]
            if not hit or any(f.accepted for f in hit):
                continue
            for variable in service.variables:
                if variable.origin == FROM_ENV_FILE and any(f.place == variable.place for f in hit):
                    self.variable(name, variable.name, "")
                elif variable.name in COMPANIONS and variable.place.file == self.file:
                    self._drop_variable(variable.name)

    def _drop_variable(self, name: str) -> None:
        """Take a variable out wherever it still stands; an earlier edit may have moved it."""
        node = parse(self.document.text, self.file, "/")
        places = [place for table in _tables(node) for place in _named(table, name)]
        for at in sorted(set(places), key=lambda p: (p[0], p[1]), reverse=True):
            self.document.remove(*at, _under(("environment",)))

    def _unname(self, at: tuple[int, int], name: str) -> bool:
        """A secret's value leaves the file; its name stays, and must be set from outside."""
        wanted = f"${{{name}:?set it in the environment or in .env}}"

        def new(old: str) -> str:
            return f"{name}={wanted}" if old.startswith(f"{name}=") else wanted

        self.todo.append(
            f"{name} is no longer in the file: set it in the environment or in .env, and change "
            "the secret if the file was ever shared"
        )
        return self.document.replace(*at, new)

    # --- putting in

    def variable(self, name: str, key: str, value: str) -> None:
        """Set one variable of a service, whichever way its variables are written."""
        path = ("services", name, "environment")
        self.explicit(path)
        part = self.document.find(path)
        if part is None or part.items is None:
            self.document.set((*path, key), tree(value))
            return
        self._drop_item(path, f"{key}=", key)
        self.document.append(path, tree(f"{key}={value}"))

    def _drop_item(self, path: tuple[str, ...], beginning: str, whole: str) -> None:
        node = parse(self.document.text, self.file, "/").get(*path)
        for item in reversed(node.items or () if node is not None else ()):
            if (item.text or "").startswith(beginning) or item.text == whole:
                self.document.remove(
                    item.place.line, item.place.column, lambda found: found == path
                )

    def explicit(self, path: tuple[str, ...]) -> None:
        """Make a value the service's own where it is an alias or comes by a merge key.

        Changing it in place would change it for every service that shares it.
        """
        part = self.document.find(path)
        if part is not None and part.anchor and not part.alias:
            self.document.expand(part.anchor)
        elif part is None or part.alias:
            node = parse(self.document.text, self.file, "/").get(*path)
            if node is not None:
                self.document.set(path, node)

    def item(self, name: str, key: str, value: str) -> None:
        """Add to a list of a service; to a mapping, an empty entry."""
        path = ("services", name, key)
        self.explicit(path)
        part = self.document.find(path)
        if part is not None and part.pairs is not None:
            self.document.set((*path, value), tree({}) if key == "networks" else tree(None))
        else:
            self.document.append(path, tree(value))

    def networks(self, name: str, network: str) -> None:
        """Join a network besides those of today."""
        node = parse(self.document.text, self.file, "/").get("services", name)
        mode = node.string("network_mode") if node is not None else ""
        if mode and mode != "bridge":
            raise PolicyError(
                f"{name} has network_mode: {mode}, and can join no network",
                hint="remove network_mode first", code="compose-network",
            )  # fmt: skip
        service = self.services()[name].node
        if service.get("networks") is None:
            self.item(name, "networks", "default")
        self.item(name, "networks", network)

    def depends(self, name: str, other: str) -> None:
        """Start after another service."""
        part = self.document.find(("services", name, "depends_on"))
        if part is not None and part.target.pairs is not None:
            path = ("services", name, "depends_on")
            self.explicit(path)
            self.document.set((*path, other), tree({"condition": "service_started"}))
        else:
            self.item(name, "depends_on", other)

    def fresh(self, wanted: str) -> None:
        """Refuse to write over a service of the same name."""
        if wanted in self.services():
            raise PolicyError(
                f"there is already a service called {wanted}",
                hint="rename it, and run this again", code="compose-service",
            )  # fmt: skip

    def top(self, kind: str, name: str, value: object) -> None:
        """An entry of a top-level table."""
        self.document.set((kind, name), tree(value))

    def add_service(self, name: str, value: dict[str, object]) -> None:
        """A whole service, behind the others."""
        self.fresh(name)
        self.document.set(("services", name), tree(value))

    # --- solutions

    def dind(self) -> None:
        """A private engine for each agent."""
        for name in self.wish.agents:
            self.add_service(f"{name}-docker", solutions.engine(name))
            self.variable(name, "DOCKER_HOST", "tcp://docker:2376")
            self.variable(name, "DOCKER_TLS_VERIFY", "1")
            self.variable(name, "DOCKER_CERT_PATH", "/certs/client")
            self.item(name, "volumes", f"{name}-docker-certs:/certs/client:ro")
            self.networks(name, f"{name}-docker")
            self.depends(name, f"{name}-docker")
            self.top("networks", f"{name}-docker", {})
            self.top("volumes", f"{name}-docker-certs", {})
            self.top("volumes", f"{name}-docker-data", {})

    def sysbox(self) -> None:
        """A runtime in which an engine may run without privileges."""
        for name in self.wish.agents:
            self.document.set(("services", name, "runtime"), tree(solutions.SYSBOX_RUNTIME))

    def service(self) -> None:
        """One service with the socket; agents have a token each."""
        self.add_service(solutions.SERVICE_NAME, solutions.service(self.wish))
        url = f"http://{solutions.SERVICE_NAME}:{solutions.SERVICE_PORT}"
        for name in self.wish.agents:
            secret = solutions.token(name)
            self.variable(name, "SANDBOX_API", url)
            self.variable(name, "SANDBOX_TOKEN_FILE", f"/run/secrets/{secret}")
            self.item(name, "secrets", secret)
            self.networks(name, solutions.SERVICE_NAME)
            self.depends(name, solutions.SERVICE_NAME)
            self.top("secrets", secret, {"file": solutions.token_file(name)})
        self.top("networks", solutions.SERVICE_NAME, {"internal": True})
        self.top("volumes", solutions.SERVICE_NAME, {})
        self.todo.append(solutions.make_tokens(self.wish.agents))
        self.todo.append(solutions.BUILD_IMAGE)
        self.todo.append(
            "pull the images that agents may run: the service pulls none"
            if self.wish.allowed_images
            else "ALLOWED_IMAGES is empty: no image may be run until you name it"
        )

    def readers(self) -> None:
        """Services that need to look get a filter that only answers questions."""
        self.add_service(solutions.FILTER_NAME, solutions.read_filter())
        used = {mount.source for service in self.project.services for mount in service.mounts}
        if (
            solutions.FILTER_NAME in used
            or self.document.find(("volumes", solutions.FILTER_NAME)) is not None
        ):
            # Whoever has it today could put a socket of its own there, or reach the filter's.
            raise PolicyError(
                f"there is already a volume called {solutions.FILTER_NAME}",
                hint="rename it, and run this again", code="compose-service",
            )  # fmt: skip
        self.top("volumes", solutions.FILTER_NAME, {})
        for name in self.wish.readers:
            self.variable(name, "DOCKER_HOST", f"unix://{solutions.FILTER_SOCKET}")
            self.item(name, "volumes", f"{solutions.FILTER_NAME}:{solutions.FILTER_DIRECTORY}:ro")
            self.depends(name, solutions.FILTER_NAME)
            self.document.set(("services", name, "labels"), self._labels(name, "engine-address"))
        self.todo.append(solutions.BUILD_IMAGE)

    def _labels(self, name: str, accepted: str) -> Node:
        from .model import ACCEPT_LABEL, WHY_LABEL

        old = {k: v.text for k, v in self.services()[name].labels.items()}
        return tree({
            **old, ACCEPT_LABEL: accepted,
            WHY_LABEL: "looks through a filter that changes nothing and shows no content",
        })  # fmt: skip

    def harden(self, name: str) -> None:
        """Limits, and no set-user-id programs, where nothing was said."""
        service = self.services()[name]
        limits = service.node.get("deploy", "resources", "limits")
        for key, value in solutions.LIMITS:
            short = {"mem_limit": "memory", "pids_limit": "pids", "cpus": "cpus"}[key]
            if service.node.get(key) is None and (limits is None or limits.get(short) is None):
                self.document.set(("services", name, key), tree(value))
        said = {i.text for i in service.node.listed("security_opt")}
        # Inside Sysbox there is a whole system, with sudo and its like.
        if self.wish.solution != SYSBOX and not any("no-new" in (s or "") for s in said):
            self.item(name, "security_opt", "no-new-privileges:true")


def _tables(node: Node) -> list[Node]:
    """Every `environment` of services and of anchors."""
    tops = [v for k, v in (node.fields or {}).items() if k.startswith("x-")]
    tops += node.mapped("services").values()
    found = [t.get("environment") for t in tops]
    return [t for t in (*found, *tops) if t is not None]


def _named(table: Node, name: str) -> list[tuple[int, int]]:
    found = [v.place for k, v in (table.fields or {}).items() if k == name]
    found += [i.place for i in table.items or () if (i.text or "").partition("=")[0] == name]
    return [(place.line, place.column) for place in found]


def needs_agents(solution: str) -> bool:
    """Whether a solution makes no sense without a service to apply it to."""
    return solution != NO_SOCKET
