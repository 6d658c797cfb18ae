"""The nouns of the service, as frozen values. Nothing here acts."""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# --- states

PENDING, RUNNING, PAUSED, STOPPING = "Pending", "Running", "Paused", "Stopping"
TERMINATED, FAILED = "Terminated", "Failed"
# An execution: it runs, it has ended by itself or by us, it never started, or nobody has seen its
# end: the service was killed, or what it ran on is gone.
EXITED, LOST = "Exited", "Lost"

# --- a second layer, in backends whose sandboxes are containers

PREFERRED, REQUIRED, OFF = "preferred", "required", "off"
INNER = (PREFERRED, REQUIRED, OFF)

# --- scopes of a token

CREATE, EXEC, FILES, AUDIT, ADMIN = "sandbox:create", "exec", "files", "audit:read", "admin"
SCOPES = (CREATE, EXEC, FILES, AUDIT, ADMIN)
DEFAULT_SCOPES = (CREATE, EXEC, FILES)


class Agent(Record):
    """Who asks. What it makes belongs to its name, so a renewed token finds it again."""

    name: str
    # The public part of the token ("sbx_ab12cd34"), or "uid:1000" for the unix socket.
    key: str
    scopes: frozenset[str]
    # Globs of images and names of templates that it may use; None: whatever the server allows.
    images: tuple[str, ...] | None = None
    templates: tuple[str, ...] | None = None
    # Overrides of limits by their names in the table of limits.
    quotas: Mapping[str, object] = {}
    uid: int | None = None
    address: str = ""

    @property
    def is_admin(self) -> bool:
        """Whether it may see and do everything."""
        return ADMIN in self.scopes


class Resources(Record):
    """Bounds of a sandbox; None: not bounded."""

    memory: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk: int | None = None


class Network(Record):
    """What a sandbox may reach: "off", "public" or "allow" (with `allow`; `deny` beats both)."""

    mode: str = "off"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class Sandbox(Record):
    """A sandbox, as the store has it."""

    id: str
    owner: str
    backend: str
    state: str
    template: str = ""
    image: str = ""
    # The image by content, where the backend has images.
    digest: str = ""
    runtime: str = ""
    env: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}
    resources: Resources = Resources()
    # Which bound is kept by what: {"memory": "cgroup", "disk": "server", "cpus": ""}; "": not kept.
    enforced: Mapping[str, str] = {}
    network: Network = Network()
    # Whether commands have to be behind bwrap inside of what the backend makes: one of INNER.
    inner: str = "preferred"
    # Seconds since the epoch.
    created: float = 0.0
    expires: float = 0.0
    last_used: float = 0.0
    reason: str = ""
    # A sandbox of `POST /v1/run`, gone with its one execution.
    one_shot: bool = False


class Execution(Record):
    """A command in a sandbox, as the store has it."""

    id: str
    sandbox: str
    owner: str
    command: tuple[str, ...]
    cwd: str = ""
    tty: bool = False
    background: bool = False
    timeout: float = 0.0
    state: str = RUNNING
    exit_code: int | None = None
    signal: str = ""
    timed_out: bool = False
    oom_killed: bool = False
    # The limit that ended it ("memory", "disk", …), or "".
    exceeded: str = ""
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    started: float = 0.0
    ended: float = 0.0
    cpu_ms: int = 0
    max_rss_kb: int = 0
    # Why it did not start, or was lost.
    error: str = ""
    # How often it was started: once more than it was lost, where the request asked for that; and
    # the offset in its output at which the last time begins.
    attempts: int = 1
    begins: int = 0
