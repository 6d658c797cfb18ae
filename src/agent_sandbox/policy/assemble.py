"""Assembles the winning entries into ordered mounts: the redundant go, what must hold is pinned.

Pure, and the second half of `resolve`. Knows how a tree looks from below, not whose rule won.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import control, engines, paths
from .model import (
    DIR,
    EXCLUDE,
    FILE,
    MARKER,
    MASK_DIR,
    MASK_FILE,
    PRIVATE_HOME,
    RO,
    RW,
    SOCKET,
    STATE,
    WORK_CACHES,
    WORK_DOCKER,
    WORK_HOME,
    WORK_STATE,
    HostFacts,
    Link,
    Mount,
    Placeholder,
    Policy,
    Source,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The nodes that bwrap's --dev takes from the host.
DEVICE_NODES = ("null", "zero", "full", "random", "urandom", "tty")
# Marks links that are made in the private home before bwrap starts.
IN_HOME = "in the private home"

# Views that show the host's own tree; anything else is empty or private.
HOST_VIEW = (RO, RW)


class Entry(Record):
    """The winning claim on one real path."""

    path: str
    level: str
    kind: str
    exact: bool
    source: Source
    # Source of the mount when it is not the path itself.
    token: str = ""
    # How the mount is made when it is not a plain bind of the host's path.
    special: str = ""


def view_of(entry: Entry | None) -> str:
    """What an entry makes of the tree below it: the host's own, 'ro' or 'rw', or '' for none."""
    if entry is None or entry.level == EXCLUDE:
        return ""
    if entry.special in ("", RO):
        return RO if entry.special == RO else entry.level
    return ""


def _above(entries: Mapping[str, Entry], path: str) -> Entry | None:
    while path != "/":
        path = paths.parent(path)
        if path in entries:
            return entries[path]
    return None


def mounts_for(entries: list[Entry], links: list[Link]) -> list[Mount]:
    """Ordered mounts: redundant entries dropped, ancestors of protected paths pinned."""
    by_path = {entry.path: entry for entry in entries}
    kept: dict[str, Entry] = {}
    made: dict[str, Mount] = {}
    for entry in entries:
        above = _above(kept, entry.path)
        view = view_of(above)
        if entry.level == EXCLUDE:
            if view:
                made[entry.path] = _mask(entry, by_path)
                kept[entry.path] = entry
        elif entry.special == "hold" and view != RW:
            # Nobody inside can create it anyway.
            continue
        elif entry.special or view != entry.level:
            made[entry.path] = _bind(entry)
            kept[entry.path] = entry
        if entry.path in kept and view == RW and entry.level != RW:
            _pin(made, kept, above, entry)
    occupied: set[str] = set()
    for dest in made:
        _occupy(occupied, dest)
    for link in links:
        if link.at not in occupied:
            _place_link(made, kept, link)
        if link.at in made:
            _occupy(occupied, link.at)
    ordered = sorted(made.values(), key=lambda m: (paths.depth(m.dest), m.dest))
    return ordered + [
        Mount(kind="seal", dest=m.dest, rule=m.rule)
        for m in ordered
        if m.kind == "tmpfs" and m.level == EXCLUDE
    ]


def _bind(entry: Entry) -> Mount:
    rule = str(entry.source)
    if entry.special in ("dev", "proc", "tmpfs"):
        return Mount(kind=entry.special, dest=entry.path, rule=rule)
    if entry.special == "hold":
        return Mount(
            kind="hold", dest=entry.path, source=entry.token, rule=rule, level=RO,
            file=entry.kind != DIR,
        )  # fmt: skip
    if entry.special == "private":
        return Mount(kind="rw", dest=entry.path, source=entry.token, rule=rule, level="private")
    level = RO if entry.special == RO else entry.level
    source = entry.token or entry.path
    return Mount(
        kind=level, dest=entry.path, source=source, rule=rule, level=level,
        file=entry.kind != DIR,
    )  # fmt: skip


def _mask(entry: Entry, by_path: Mapping[str, Entry]) -> Mount:
    rule = str(entry.source)
    if entry.kind != DIR:
        return Mount(kind="mask-file", dest=entry.path, source=MASK_FILE, rule=rule, level=EXCLUDE)
    # Something deeper may be shown again; its mount point needs a place that can be written
    # while the root is built, and is sealed afterwards.
    if any(paths.below(path, entry.path) for path in by_path):
        return Mount(kind="tmpfs", dest=entry.path, rule=rule, level=EXCLUDE)
    return Mount(kind="mask-dir", dest=entry.path, source=MASK_DIR, rule=rule, level=EXCLUDE)


def _pin(
    made: dict[str, Mount], kept: Mapping[str, Entry], above: Entry | None, entry: Entry
) -> None:
    """Bind every directory between a writable root and a protected path onto itself.

    A mount protects a name, not its parents: `mv .git x; cp -r x .git` would leave a fresh,
    unprotected `.git/hooks`. Renaming a mount point fails with EBUSY.
    """
    stop = above.path if above else "/"
    for ancestor in paths.parents(entry.path):
        if ancestor == stop or ancestor in kept:
            break
        made.setdefault(
            ancestor,
            Mount(
                kind="pin",
                dest=ancestor,
                source=ancestor,
                level=RW,
                rule=f"holds '{entry.path}' in place",
            ),
        )


def _is_home(entry: Entry) -> bool:
    """Whether an entry is a home that outlives or is prepared for the run, caches included."""
    return _is_own(entry.token)


def _is_own(token: str) -> bool:
    return token in (PRIVATE_HOME, WORK_HOME) or any(
        paths.below(token, base) for base in (WORK_CACHES, STATE, WORK_STATE)
    )


def _occupy(occupied: set[str], path: str) -> None:
    """Note a path and those above it: something is mounted there or below."""
    while path not in occupied:
        occupied.add(path)
        path = paths.parent(path)


def _place_link(made: dict[str, Mount], kept: Mapping[str, Entry], link: Link) -> None:
    """Recreate a link of the host where the host's own tree is not shown."""
    holder = _above(kept, link.at)
    if view_of(holder) or (holder is not None and holder.level == EXCLUDE):
        return
    if holder is not None and holder.special == "proc":
        return
    made[link.at] = Mount(
        kind="symlink", dest=link.at, source=link.text,
        rule=IN_HOME if holder is not None and _is_home(holder) else "",
    )  # fmt: skip


def late_mounts(
    policy: Policy, facts: HostFacts, mounts: list[Mount], notices: list[str]
) -> list[Mount]:
    """What must win over every rule: engine sockets, name resolution, the marker, the seals."""
    late: list[Mount] = []
    known = {paths.normalise(m.real): m.kind for m in facts.engine_sockets}
    by_dest = {m.dest: m for m in mounts}
    for path, kind in sorted(known.items()):
        if not _shows_host(by_dest, path):
            continue
        late.append(_hidden_engine(path, kind))
        if path in by_dest and policy.docker.value != "on":
            notices.append(
                f"container-engine socket '{path}' stays hidden although "
                f"{by_dest[path].rule} names it; use --docker to expose the engine"
            )
    if policy.docker.value != "off":
        late.append(_docker_mount(facts, policy))
    # bwrap's first process holds the host's /proc open for a moment after the command has begun:
    # /proc/1/fd would lead there, /proc/1/mem would let it be steered.
    late.append(
        Mount(kind="mask-dir", dest="/proc/1", source=MASK_DIR, level=EXCLUDE, rule="always")
    )
    # Modes of files in /proc are the kernel's, shared by every mount of it, and root could change
    # them. Whoever may write there may also make the kernel spare them when memory is short.
    late.append(Mount(kind="seal", dest="/proc", rule="always"))
    if facts.uid == 0:
        # Root owns the host's device nodes and could change their modes through bwrap's binds. On
        # a read-only mount devices can be written all the same.
        late += [Mount(kind="seal", dest=f"/dev/{name}", rule="always") for name in DEVICE_NODES]
    used = {m.source for m in mounts if m.kind == "hold"}
    for view in (control.EMPTY, control.JSON, *control.SHOWN.values()):
        if view.source in used:
            late.append(Mount(kind="text", dest=view.file, source=view.text, rule="held names"))
    # A plain file on a root that is sealed below: nobody inside can write or cover it.
    late.append(Mount(kind="text", dest=MARKER, source="marker", rule="always"))
    late.append(Mount(kind="seal", dest="/run" if "/" in by_dest else "/", rule="always"))
    return late


def _hidden_engine(path: str, kind: str) -> Mount:
    """A mask on an engine's socket, or on the directory that docker makes where one was missing."""
    what, source = ("mask-dir", MASK_DIR) if kind == DIR else ("mask-file", MASK_FILE)
    return Mount(kind=what, dest=path, source=source, level=EXCLUDE, rule="container-engine socket")


def _docker_mount(facts: HostFacts, policy: Policy) -> Mount:
    socket = facts.docker_socket
    if socket is None:
        raise PolicyError(
            f"cannot expose the container engine: no socket at '{facts.docker_wanted}'",
            hint="start the engine, or point DOCKER_HOST at its unix socket",
            code="docker-socket-missing",
        )
    filtered = policy.docker.value == "filtered"
    return Mount(
        kind="rw", dest=engines.INSIDE, source=WORK_DOCKER if filtered else socket.real, level=RW,
        rule=f"docker = {policy.docker.value} ({policy.docker.source})",
    )  # fmt: skip


def _shows_host(by_dest: Mapping[str, Mount], path: str) -> bool:
    """Whether the mounts so far show the host's own file at `path`."""
    for candidate in (path, *paths.parents(path)):
        mount = by_dest.get(candidate)
        if mount is not None and mount.kind != "symlink":
            return mount.level in HOST_VIEW
    return False


def placeholders(mounts: list[Mount]) -> tuple[Placeholder, ...]:
    """What must stand at held names on the host.

    Git lists plain files that it does not know, but neither sockets nor empty directories. A socket
    that nobody has bound cannot be connected to and cannot be opened.
    """
    found = []
    for mount in mounts:
        if mount.kind == "hold":
            node = (SOCKET if mount.source else FILE) if mount.file else DIR
            text = control.neutral(mount.dest) if node == FILE else ""
            found.append(Placeholder(path=mount.dest, node=node, text=text))
    return tuple(found)


def home_points(mounts: list[Mount], entries: list[Entry], facts: HostFacts) -> tuple[Mount, ...]:
    """Mount points and links that the private home must hold, since bwrap must not create them.

    The private home is written by the sandbox: a link planted there in an earlier run would make
    bwrap (before 0.12) create the mount point outside of it.
    """
    kinds = {entry.path: entry.kind for entry in entries}
    home = facts.home.real
    by_dest = {m.dest: m for m in mounts}
    # An agent's state may lie elsewhere.
    tops = {home, *(m.dest for m in mounts if m.source.startswith((STATE, WORK_STATE)))}
    tops = {top for top in tops if top in by_dest and by_dest[top].level == "private"}
    points = []
    for mount in mounts:
        if not any(paths.below(mount.dest, top) for top in tops):
            continue
        nearest = next(
            by_dest[p]
            for p in paths.parents(mount.dest)
            if p in by_dest and by_dest[p].kind != "symlink"
        )
        if nearest.level == "private" and _is_own(nearest.source):
            kind = "symlink" if mount.kind == "symlink" else kinds.get(mount.dest, DIR)
            root = nearest.source
            points.append(
                Mount(
                    kind=kind,
                    dest=mount.dest[len(nearest.dest) + 1 :],
                    source=mount.source,
                    level=root,
                )
            )
    return tuple(points)
