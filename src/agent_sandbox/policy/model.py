"""The values of the pipeline: what was configured, what the machine has, what will be mounted.

Pure data. Policy and HostFacts go into `resolve`, a Plan comes out.
"""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .budgets import Budget
    from .commands import Programs
    from .credentials import Secret
    from .dockerfilter import DockerFilter
    from .gitauth import GitAuth, Outside
    from .network import Egress, Publish
    from .profiles import Profile
    from .profiles.claims import Found, Step
    from .profiles.places import Part

# Access levels of a path rule.
RO = "ro"
RW = "rw"
EXCLUDE = "exclude"
LEVELS = (RO, RW, EXCLUDE)

# Layers, in the order in which later wins.
BUILT_IN = 0
GLOBAL = 1
PROJECT = 2
FLAGS = 3
# Protections that no layer may lift: our own files and state.
MANDATORY = 9

# Network modes with a namespace of their own and a proxy that decides.
CONTROLLED = ("allow", "public", "learn")

# Sources of mounts that exist only during a run, filled in by the strategy.
WORK_TMP = "@work/tmp"
WORK_VAR_TMP = "@work/var-tmp"
WORK_HOME = "@work/home"
WORK_CACHES = "@work/caches"
WORK_GIT = "@work/git"
WORK_NET = "@work/net"
WORK_DOCKER = "@work/docker.sock"
WORK_GIT_AUTH = "@work/git-auth.sock"
# Directories of a workspace that belongs to a service (`owned`).
OWNED = "@owned"
PRIVATE_HOME = "@home"
# Private directories of an agent's state: beside the private home, or forgotten with the run.
STATE = "@state"
WORK_STATE = "@work/state"
MASK_DIR = "@mask/dir"
MASK_FILE = "@mask/file"

# Tells whoever is inside where they are; policy cannot cover it.
MARKER = "/run/agent-sandbox/marker"
# The same for a model, in words (`whereabouts`). Refusals point to it.
README = "/run/agent-sandbox/README.md"
# The text of it, which only a run needs.
PAGE = "@page"

# What a path is on the host.
FILE = "file"
DIR = "dir"
SOCKET = "socket"
OTHER = "other"


class Source(Record):
    """Where a value came from: its layer and a place a person can open."""

    layer: int
    where: str

    def __str__(self) -> str:
        return self.where


class Setting(Record):
    """One effective value with its source."""

    value: object
    source: Source


class Layer(Record):
    """One source of settings, decoded: key of the settings table → value and source."""

    rank: int
    values: Mapping[str, Setting]
    file: str = ""
    # What was decoded; trust is in this text, not in what the file says a moment later.
    text: str = ""
    # What the text says, where it had to be parsed for that.
    parsed: Mapping[str, object] | None = None


class Rule(Record):
    """One path rule after `~` and relative paths are expanded, before the file system is asked."""

    level: str
    pattern: str
    glob: bool
    source: Source
    # Rules of presets and profiles say nothing when they match nothing.
    quiet: bool = False
    written: str = ""
    # Missing, it must not be created either.
    held: bool = False


class Limits(Record):
    """Resource limits; None means unlimited."""

    timeout: float | None = None
    memory: int | None = None
    pids: int | None = None
    cpu_time: float | None = None
    # Bytes in the private /tmp.
    tmp_size: int | None = None
    # How many processors' time, together.
    cpus: float | None = None
    # The number of processes when nobody has said one: enforced as well as the machine can.
    default_pids: int | None = None


class Policy(Record):
    """The merged configuration: each value knows its source."""

    network: Setting
    docker: Setting
    home: Setting
    seccomp: Setting
    profile: Setting
    presets: tuple[Setting, ...]
    rules: tuple[Rule, ...]
    env_keep: tuple[Setting, ...]
    env_set: Mapping[str, Setting]
    limits: Mapping[str, Setting]
    # Texts of rules for hosts, and of ports that lead inside; each was checked by `decode`.
    allow: tuple[Setting, ...] = ()
    deny: tuple[Setting, ...] = ()
    publish: tuple[Setting, ...] = ()
    # Values that stay outside, caps, and a file with more certificates.
    secrets: tuple[Setting, ...] = ()
    budgets: tuple[Setting, ...] = ()
    network_ca: str = ""
    # With docker = "filtered": settings of the filter by their names below `docker.`.
    docker_options: Mapping[str, object] = {}
    # How git inside logs in (None: not at all), with which keys, to which hosts.
    git_auth: Setting | None = None
    git_keys: tuple[Setting, ...] = ()
    git_hosts: tuple[Setting, ...] = ()
    # The chosen profile, and its state as paths; None and nothing where there is none.
    agent: Profile | None = None
    parts: tuple[Part, ...] = ()
    # Rules for commands, by name: False, a preset, or the path of a script.
    commands: Mapping[str, Setting] = {}
    # Files that were read to make this policy; they stay read-only inside.
    files: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


class Link(Record):
    """A symbolic link met on the way to a path: where it is (real parent) and what it says."""

    at: str
    text: str


class Match(Record):
    """A rule's path as found on the host."""

    path: str
    real: str
    kind: str
    links: tuple[Link, ...] = ()


class Named(Record):
    """A control name: where, what it is or is meant to be, and whether it has to be held free."""

    path: str
    kind: str
    missing: bool
    # In a tree that git shows on the host, where a plain file would be seen.
    tracked: bool = True


class GitLayout(Record):
    """The repository around the project, as far as it was checked to be what it claims."""

    top: str
    git_dir: str
    common_dir: str
    # True when `top/.git` is a file (worktree or submodule).
    linked: bool
    # Existing files and directories that make git run something; read-only inside.
    control: tuple[str, ...] = ()
    # Control directories and files that do not exist yet and must not be created from inside.
    absent: tuple[str, ...] = ()
    absent_files: tuple[str, ...] = ()
    # The text of info/exclude; None when there is no such file.
    exclude: str | None = None


class ConfigFile(Record):
    """A file of the user's git configuration: where git looks, and what it may read there."""

    path: str
    real: str
    # None: not a configuration but a list of patterns, shown as it is.
    cleaned: str | None = None
    links: tuple[Link, ...] = ()


class HostFacts(Record):
    """What the machine looks like, as far as the policy needs to know."""

    uid: int
    gid: int
    user: str
    home: Match
    cwd: Match
    env: Mapping[str, str]
    state_dir: str
    system: tuple[Match, ...]
    path_dirs: tuple[Match, ...]
    matches: Mapping[str, tuple[Match, ...]]
    # /etc/resolv.conf, when it is a link: the file behind it and the links on the way.
    resolver: Match | None
    engine_sockets: tuple[Match, ...]
    docker_socket: Match | None
    docker_wanted: str
    git: GitLayout | None
    git_config: tuple[ConfigFile, ...]
    root_secrets: tuple[Match, ...]
    # The directory of the user's own policy file, and whether it exists.
    config_dir: str = ""
    config_missing: bool = False
    # What excludes of runs around the project have hidden.
    former: tuple[Match, ...] = ()
    # Sockets that somebody outside has bound in a place that a sandbox may show.
    services: tuple[Match, ...] = ()
    # Control names of the project and of the profile's state.
    control: tuple[Named, ...] = ()
    # The code of agent-sandbox itself, where it lies in the project.
    own_code: tuple[Match, ...] = ()
    # The directory of our shims and other launchers; or where it would be made.
    launchers: tuple[Match, ...] = ()
    launchers_missing: str = ""
    # Files about names that a proxy's stub replaces, where there is one.
    naming: tuple[Match, ...] = ()
    # What there is for `git.auth`; None where nobody asked.
    git_auth: Outside | None = None
    # The programs that command rules name; None where there is no rule.
    commands: Programs | None = None
    # The state of the chosen profile.
    state: tuple[Found, ...] = ()


class Mount(Record):
    """One step of building the root. `describe` is what --debug and `why` print."""

    kind: str
    dest: str
    source: str = ""
    rule: str = ""
    level: str = ""
    # Whether a bind covers a single file.
    file: bool = False

    def describe(self) -> str:
        """One line for people."""
        shown = MOUNT_WORDS[self.kind]
        via = f" from {self.source}" if self.source not in ("", self.dest) else ""
        why = f"  [{self.rule}]" if self.rule else ""
        return f"{shown} {self.dest}{via}{why}"


# Kinds of Mount and the word for each.
MOUNT_WORDS = {
    "ro": "read-only ",
    "hold": "held free ",
    "rw": "read-write",
    "pin": "pinned    ",
    "mask-dir": "hidden    ",
    "mask-file": "hidden    ",
    "tmpfs": "empty     ",
    "seal": "sealed    ",
    "dir": "directory ",
    "symlink": "link      ",
    "dev": "devices   ",
    "proc": "processes ",
    "text": "generated ",
    "program": "generated ",
    "cover": "covered   ",
}


class Placeholder(Record):
    """A name that is kept from being created: what stands there on the host during the run."""

    path: str
    # DIR and SOCKET do not show in `git status`; FILE is for places where git does not look.
    node: str
    text: str = ""


class Plan(Record):
    """Everything the strategy needs: ordered mounts, environment, switches."""

    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    env_sources: Mapping[str, str]
    cwd: str
    # Whether the host's network is shared.
    network: bool
    docker: bool
    # How narrow the filter of system calls is: "strict", "default" or "off".
    seccomp: str = "default"
    limits: Limits
    profile: str
    project: str
    home: str
    # "private", "ephemeral" or "host", and the name of the private directory.
    home_mode: str
    home_key: str
    # Mount points and links that must exist in the private home before the mounts are made.
    home_points: tuple[Mount, ...]
    # What must be on the host for the time of the run, because a mount must cover it.
    placeholders: tuple[Placeholder, ...] = ()
    # What git inside reads as the repository's info/exclude, so that it does not see held names.
    git_exclude: str = ""
    # Excluded paths that do not exist yet: hidden as soon as somebody outside makes them.
    awaited: tuple[str, ...] = ()
    # Paths that a rule of the user or the project decided, also where that changed nothing.
    decided: Mapping[str, str] = {}
    # What may leave through the proxy, where there is one; ports of the host that lead inside.
    egress: Egress | None = None
    publish: tuple[Publish, ...] = ()
    # What the proxy puts into requests, how much it lets through, and whom it believes.
    secrets: tuple[Secret, ...] = ()
    budgets: tuple[Budget, ...] = ()
    network_ca: str = ""
    # What the engine's filter is told; None where there is none.
    docker_filter: DockerFilter | None = None
    # What answers for git's keys and credentials is told; None where there is none.
    git_auth: GitAuth | None = None
    # Directories of an agent's state that are made on the host, and files that are kept in step.
    made: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    # Names in private directories of the state at which an earlier run's mount point may be left.
    bare: tuple[tuple[str, str], ...] = ()
    # Programs that a command rule covers → where the real one is inside.
    moved: Mapping[str, str] = {}
    # The user's number inside; None: the same as outside.
    identity: int | None = None
    notices: tuple[str, ...]
