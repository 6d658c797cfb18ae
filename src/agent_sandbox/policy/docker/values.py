"""The values that travel between the Docker filter and the socket loop around it."""

from __future__ import annotations

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The engine keeps this label with every object, so ownership outlives the proxy process.
OWNER_LABEL = "org.agent-sandbox.owner"
# The image as the client named it: the engine is given an id.
IMAGE_LABEL = "org.agent-sandbox.image"


class Request(Record):
    """A request as the strict parser read it. Streamed bodies (`decision.streamed`) stay empty."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Bind(Record):
    """A host directory that the sandbox sees, at the same path inside."""

    host_path: str
    writable: bool
    # The sandbox can rename or replace it, or a directory above it.
    swappable: bool = False
    # Excluded: nothing at or below it may be seen.
    hidden: bool = False
    directory: bool = True


class Engine(Record):
    """What is known about the engine behind the proxy."""

    api: str = "1.41"
    name: str = "docker"
    # Volume mounts take `VolumeOptions.Subpath` (API 1.45).
    subpath: bool = False
    # The proxy can hold a directory open and make a volume of it.
    pins: bool = False


class Grants(Record):
    """What one run may do."""

    owner: str
    images: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    network: str = "off"
    memory: int = 2 << 30
    cpus: float = 2.0
    pids: int = 512
    containers: int = 16
    read_only: bool = False
    # An onlooker (`watching`): owns nothing, and sees what carries all of these labels, NAME=VALUE.
    watches: bool = False
    labels: tuple[str, ...] = ()
    engine: Engine = Engine()
    # A seccomp profile as JSON, for containers that can write to the host's files: without it
    # their root could leave a setuid program there. "": none.
    seccomp: str = ""
    # The proxy's own socket on the host. A bind of the engine's socket is rewritten to it.
    socket: str = ""


class Reference(Record):
    """A name that the shell resolves by inspect, fresh each time.

    kind: "container", "network", "volume", "image", "exec"; "count" (name "containers": how many
    the run has); "path" (only with `Engine.pins`: a path to open below its root without following
    a link).
    """

    kind: str
    name: str


class Found(Record):
    """What inspect said.

    id: the full id; of a volume its name, of a path the volume that stands for it,
    of a count "".
    owner: the value of the owner label; of an exec that of its container.
    extra: image → {"tags": RepoTags, "digests": RepoDigests, "ports": keys of ExposedPorts,
    "volumes": keys of Config.Volumes}; count → {"count": int}; container, network and volume →
    {"labels": their labels}.
    """

    id: str
    owner: str
    extra: Mapping[str, object] = {}


class Refused(Exception):
    """A request that is not passed on, with the rule that says so."""

    def __init__(self, rule: str, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.status = status


class Decision(Record):
    """A verdict. `allowed` only says that nothing is wrong before references are resolved."""

    allowed: bool
    rule: str
    message: str = ""
    status: int = 200
    route: str = ""
    normalised: str = ""
    references: tuple[Reference, ...] = ()
    mutations: tuple[str, ...] = ()
    draft: object = None


class Upstream(Record):
    """The new request for the engine. Nothing in it is a byte of the client's."""

    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    # "plain", "hijack", "follow", "upload" or "download".
    stream: str = "plain"
    # The answer filter to apply, "" for none.
    answer: str = ""
