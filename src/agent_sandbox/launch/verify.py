"""Compares the root that bwrap built with the planned one, before the command starts. Pure.

Between the plan and bwrap's mounts another sandbox in the same project can swap a directory for a
link: bwrap would follow it and bind something else, somewhere else. The kernel's own table of the
new mount namespace tells (proc_pid_mountinfo(5)): every mount must be one that was planned, with
the planned directory behind it, or a mount of the host below such a one.
"""

from __future__ import annotations

from ..policy import paths
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# Mounts that bwrap makes by itself for --dev and --proc, in trees that nobody else can write.
OWN = frozenset(
    {
        "/", "/dev", "/dev/pts", "/dev/console", "/dev/null", "/dev/zero", "/dev/full",
        "/dev/random", "/dev/urandom", "/dev/tty", "/proc", "/proc/sys", "/proc/sysrq-trigger",
        "/proc/irq", "/proc/bus",
    }
)  # fmt: skip


# What the keeper hides a file and a directory with: the null device, an empty file system.
STAND_INS = ("/null", "/")


class Entry(Record):
    """One line of a mount table: the device, the directory on it, and where it is mounted."""

    device: str
    root: str
    point: str
    # Whether mounts that are made elsewhere appear below it (mount_namespaces(7), "shared:" and
    # "master:").
    attached: bool = False


def parse(table: str) -> list[Entry]:
    """The mounts of a namespace, in the order in which they were made."""
    found = []
    for fields in _lines(table):
        optional = " ".join(("", *fields[6:8]))
        found.append(
            Entry(
                device=fields[2], root=_plain(fields[3]), point=_plain(fields[4]),
                attached=" shared:" in optional or " master:" in optional,
            )
        )  # fmt: skip
    return found


def points(table: str) -> set[str]:
    """Where something is mounted."""
    return {_plain(fields[4]) for fields in _lines(table)}


def _lines(table: str) -> Iterable[list[str]]:
    # Not splitlines: a name may hold what Python takes for an end of line, the kernel does not.
    for line in table.split("\n"):
        fields = line.split(" ")
        if len(fields) > 5:
            yield fields


def _plain(field: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    if "\\" not in field:
        return field
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def place_of(path: str, host: Mapping[str, list[Entry]]) -> tuple[str, str]:
    """The device and the directory on it that a path of the host stands for."""
    for point in (path, *paths.parents(path)):
        if point in host:
            # Mounts may lie on top of each other; the last one is seen.
            best = host[point][-1]
            return best.device, _below(best.root, point, path)
    return "", ""


def _below(root: str, point: str, path: str) -> str:
    """What `path` is, when `point`, at or above it, is `root`."""
    rest = path[len(point) :] if point != "/" else path
    return (root if root != "/" else "") + rest.rstrip("/") or "/"


def by_point(mounts: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Mounts by the place where they are, in their order."""
    found: dict[str, list[Entry]] = {}
    for entry in mounts:
        found.setdefault(entry.point, []).append(entry)
    return found


def stray(
    inside: Iterable[Entry], host: list[Entry], planned: Mapping[str, list[str]],
    masked: Collection[str] = (),
) -> str:  # fmt: skip
    """What is wrong with a built root, or nothing.

    `planned`: destination → its sources. `masked`: places that the keeper may have hidden anew.
    """
    seen: dict[str, int] = {}
    outside = by_point(host)
    for entry in inside:
        seen[entry.point] = seen.get(entry.point, 0) + 1
        if entry.point in OWN or (entry.point in masked and entry.root.endswith(STAND_INS)):
            continue
        if not any(_fits(entry, dest, source, outside) for dest, source in _over(entry, planned)):
            return f"'{entry.point}' shows '{entry.root}'"
    for dest, sources in planned.items():
        # A mask on a bind at the same place is a second mount there.
        if seen.get(dest, 0) < len(sources):
            return f"'{dest}' is not covered"
    return ""


def attached(inside: Iterable[Entry]) -> str:
    """A mount through which a mount that the host makes later would appear, or nothing."""
    found = next((entry.point for entry in inside if entry.attached), "")
    return f"mounts of the host would appear in '{found}'" if found else ""


def _over(entry: Entry, planned: Mapping[str, list[str]]) -> Iterable[tuple[str, str]]:
    """The planned mounts at or above a mount, nearest first."""
    for dest in (entry.point, *paths.parents(entry.point)):
        for source in planned.get(dest, ()):
            yield dest, source


def _fits(entry: Entry, dest: str, source: str, host: Mapping[str, list[Entry]]) -> bool:
    """Whether a mount is the planned one, or one of the host that came along below it."""
    if not source:
        return entry.point == dest
    shown = (entry.device, entry.root)
    behind = _below(source, dest, entry.point)
    # Mounts may lie on top of each other on the host; all of them come along.
    carried = any((h.device, h.root) == shown for h in host.get(behind, ()))
    return carried or (entry.point == dest and shown == place_of(behind, host))
