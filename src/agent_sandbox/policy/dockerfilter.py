"""What a run's Docker filter is told: the settings, and which host paths containers may see. Pure.

Containers see what the sandbox sees of the project and of what the user has named, at most as
writable. System trees are left out: a container's root reads there what the user cannot.
"""

from __future__ import annotations

from ..record import Record
from . import paths
from .model import EXCLUDE, RO, RW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .model import HostFacts, Mount, Policy

    # Host path, writable, swappable, hidden, directory.
    Bind = tuple[str, bool, bool, bool, bool]

# Settings of the filter that are numbers or lists, as Grants calls them.
GRANTED = ("images", "registries", "memory", "cpus", "pids", "containers")


class DockerFilter(Record):
    """Everything but what is known only when a run begins."""

    engine: str
    network: str
    keep: bool
    mode: str
    read_only: bool
    granted: Mapping[str, object]
    binds: tuple[Bind, ...]


def build(
    policy: Policy, facts: HostFacts, mounts: Iterable[Mount], named: frozenset[str]
) -> DockerFilter:
    """The filter of a plan. `named`: paths that a rule of the user or the project decided."""
    options = policy.docker_options
    return DockerFilter(
        engine=facts.docker_socket.real if facts.docker_socket is not None else "",
        # To look for what is needed is to reach what is public.
        network="public" if policy.network.value == "learn" else str(policy.network.value),
        keep=options["keep"] == "on",
        mode=str(options["mode"]),
        read_only=options["read-only"] == "on",
        granted={name: options[name] for name in GRANTED},
        binds=binds(mounts, facts.cwd.real, named),
    )


def binds(mounts: Iterable[Mount], project: str, named: frozenset[str]) -> tuple[Bind, ...]:
    """The project, what was named, and everything in them that is seen differently."""
    views = [m for m in mounts if m.level in (RO, RW, EXCLUDE) and m.kind != "seal"]
    roots = [m for m in views if _is_root(m, project, named)]
    writable = [m.dest for m in roots if m.level == RW]
    found: dict[str, Bind] = {}
    for mount in views:
        root = next((r for r in roots if paths.within(mount.dest, r.dest)), None)
        if root is None:
            continue
        # Mount points cannot be renamed from inside. A root that lies in a writable one can be
        # moved with the directories above it, from a container at least.
        swappable = mount in roots and any(paths.below(mount.dest, other) for other in writable)
        found[mount.dest] = (
            mount.dest, mount.level == RW, swappable, mount.level == EXCLUDE, not _is_file(mount),
        )  # fmt: skip
    return tuple(found[path] for path in sorted(found))


def _is_root(mount: Mount, project: str, named: frozenset[str]) -> bool:
    """Whether a mount shows the host's own tree because somebody asked for it."""
    shown = mount.kind in (RO, RW) and mount.source == mount.dest
    return shown and (mount.dest == project or mount.dest in named)


def _is_file(mount: Mount) -> bool:
    return mount.file or mount.kind == "mask-file"
