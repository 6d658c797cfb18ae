"""What a compose project comes to: services with mounts and variables, long and short alike."""

from __future__ import annotations

from ..policy import paths
from ..record import Record
from .merge import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .nodes import Node, Place

BIND, VOLUME, SECRET = "bind", "volume", "secret"
ACCEPT_LABEL = "agent-sandbox.accept"
WHY_LABEL = "agent-sandbox.why"
# Where a variable of a container comes from.
FROM_FILE, FROM_ENV_FILE, PASSED = "file", "env_file", "passed"
# Links of /proc that lead to the host's root when the engine resolves them.
PROC_ROOTS = ("root", "cwd")


class Host(Record):
    """The machine as far as reading goes: contents or None, links resolved, variables, home."""

    read: Callable[[str], str | None]
    real: Callable[[str], str]
    env: Mapping[str, str]
    home: str


class Mount(Record):
    """One thing of the host, or one volume, that a container sees."""

    kind: str
    # A normalised host path, or a volume's name. `real` has the links of this host resolved.
    source: str
    real: str
    target: str
    read_only: bool
    place: Place
    # The entry of the service that brings it.
    item: Place
    unset: tuple[str, ...] = ()
    # How it gets there when it is no plain mount: "volume cache", "secret key", "volumes_from x".
    via: str = ""
    options: tuple[str, ...] = ()


class Variable(Record):
    """One variable of a container."""

    name: str
    value: str
    origin: str
    place: Place
    # Whether the value is written in the file itself, not made of variables.
    literal: bool


class Service(Record):
    """One service with everything laid over it."""

    name: str
    node: Node
    mounts: tuple[Mount, ...]
    variables: tuple[Variable, ...]

    @property
    def place(self) -> Place:
        """Where it is defined last."""
        return self.node.place

    @property
    def labels(self) -> dict[str, Node]:
        """Its labels by name."""
        found = self.node.get("labels")
        return names(found).fields or {} if found is not None else {}

    @property
    def accepted(self) -> frozenset[str]:
        """The rules that its author has answered for, by label."""
        node = self.labels.get(ACCEPT_LABEL)
        text = node.text or "" if node is not None else ""
        return frozenset(text.replace(",", " ").split())

    def variable(self, name: str) -> str:
        """A variable's value, or nothing."""
        return next((v.value for v in self.variables if v.name == name), "")


class Unread(Record):
    """Something that belongs to the project and could not be looked at."""

    what: str
    place: Place
    grave: bool


class Project(Record):
    """Everything that the files say together."""

    name: str
    node: Node
    services: tuple[Service, ...]
    files: tuple[str, ...]
    unread: tuple[Unread, ...]


def canonical(path: str) -> str:
    """One spelling for the paths that lead to the same place on every Linux host."""
    path = paths.normalise(path)
    parts = path.split("/")
    # /proc/1/root is the host's root for the engine, which makes the mount.
    while len(parts) > 3 and parts[1] == "proc" and parts[3] in PROC_ROOTS:
        parts = ["", *parts[4:]]
    path = "/".join(parts) or "/"
    if paths.within(path, "/var/run"):
        path = path[len("/var") :]
    return path


def host_path(text: str, base: str, home: str) -> str:
    """A path of a compose file as a normalised absolute one."""
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    elif not text.startswith("/"):
        text = f"{base}/{text}"
    return paths.normalise(text)


def is_path(source: str) -> bool:
    """Whether a short-syntax source is a path of the host and not a volume's name."""
    return source.startswith(("/", ".", "~"))


def is_bound(options: Node | None) -> bool:
    """Whether a volume's options make it a directory of the host.

    mount(2) looks at no type and no other option once MS_BIND is there.
    """
    if options is None:
        return False
    bind = {"bind", "rbind"} & set(options.string("o").replace(" ", "").split(","))
    return bool(bind)


class Mounts:
    """Finds what each service mounts; needs the top-level tables for it."""

    def __init__(self, node: Node, host: Host) -> None:
        self.node = node
        self.host = host

    def of(self, name: str, seen: frozenset[str] = frozenset()) -> Iterator[Mount]:
        """The mounts of one service."""
        service = self.node.get("services", name)
        if service is None or name in seen:
            return
        for item in service.listed("volumes"):
            mount = self.long(item) if item.fields is not None else self.short(item)
            if mount is not None:
                yield mount
        for item in service.listed("volumes_from"):
            yield from self.inherited(item, seen | {name})
        for kind in ("secrets", "configs"):
            for item in service.listed(kind):
                yield from self.from_table(kind, item)

    def short(self, item: Node) -> Mount | None:
        """`source:target:options`, or a target alone."""
        parts = (item.text or "").split(":")
        if len(parts) < 2:
            return None
        source, target = parts[0], parts[1]
        options = tuple(parts[2].split(",")) if len(parts) > 2 else ()
        read_only = "ro" in options
        # A source that is only an unset variable may become any path.
        kind = BIND if is_path(source) or (item.unset and not source) else VOLUME
        return self.made(
            kind, source, target, item, item=item.place, read_only=read_only, options=options
        )

    def long(self, item: Node) -> Mount | None:
        """The mapping form."""
        kind = item.string("type") or (BIND if is_path(item.string("source")) else VOLUME)
        source, target = item.get("source"), item.string("target")
        if kind not in (BIND, VOLUME) or source is None:
            return None
        propagation = item.string("bind", "propagation")
        return self.made(
            kind, source.text or "", target, source, item=item.place,
            read_only=item.truth("read_only"),
            options=(propagation,) if propagation else (),
        )  # fmt: skip

    def made(
        self, kind: str, source: str, target: str, at: Node, *, item: Place, read_only: bool,
        options: tuple[str, ...] = (), via: str = "",
    ) -> Mount:  # fmt: skip
        """A mount, with a volume that is really a directory of the host seen through."""
        place, unset = at.place, at.unset
        if kind == VOLUME:
            device = self.node.get("volumes", source, "driver_opts", "device")
            if device is None or not is_bound(self.node.get("volumes", source, "driver_opts")):
                return Mount(
                    kind=VOLUME, source=source, real=source, target=target, read_only=read_only,
                    place=place, item=item, unset=unset, options=options, via=via,
                )  # fmt: skip
            via, place, unset = f"volume {source}", device.place, device.unset
            # The engine's own directory is the root: a path without a slash starts there.
            source = paths.normalise(device.text or "/")
        path = host_path(source, place.base, self.host.home) if source else ""
        return Mount(
            kind=BIND, source=path, real=self.host.real(path) if path else "", target=target,
            read_only=read_only, place=place, item=item, unset=unset, options=options, via=via,
        )  # fmt: skip

    def inherited(self, item: Node, seen: frozenset[str]) -> Iterator[Mount]:
        """`volumes_from: [service:ro]`."""
        parts = (item.text or "").split(":")
        if parts[0] == "container":
            return
        for mount in self.of(parts[0], seen):
            yield mount.replace(
                read_only=mount.read_only or "ro" in parts[1:],
                via=f"volumes_from {parts[0]}",
            )

    def from_table(self, kind: str, item: Node) -> Iterator[Mount]:
        """A secret or a config that is a file of the host."""
        name = item.string("source") if item.fields is not None else item.text or ""
        file = self.node.get(kind, name, "file")
        if file is None or not file.text:
            return
        target = (item.string("target") if item.fields is not None else "") or name
        where = target if target.startswith("/") else f"/run/secrets/{target}"
        path = host_path(file.text, file.place.base, self.host.home)
        yield Mount(
            kind=SECRET, source=path, real=self.host.real(path), target=where, read_only=True,
            place=file.place, item=item.place, unset=file.unset, via=f"{kind[:-1]} {name}",
        )  # fmt: skip
