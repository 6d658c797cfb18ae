"""What the pod's control group says: kills for memory, and what is used. Both versions.

A container sees its own group at the root of the mount; where it sees the whole tree, its own path
is in /proc/self/cgroup. Nothing here can be written.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNT = "/sys/fs/cgroup"
# File of a group → the figure, for version 2 and 1.
KILLS = (("memory", "memory.events"), ("memory", "memory.oom_control"))
MEMORY = (("memory", "memory.current"), ("memory", "memory.usage_in_bytes"))


def kills() -> int:
    """How many processes of this pod the kernel has killed for memory; 0 where nobody says."""
    for text in _texts(KILLS):
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def memory() -> int | None:
    """Bytes that the pod has."""
    for text in _texts(MEMORY):
        if text.strip().isdigit():
            return int(text)
    return None


def _texts(names: tuple[tuple[str, str], tuple[str, str]]) -> Iterator[str]:
    paths = _paths(_read("/proc/self/cgroup"))
    second, first = names
    for path in (paths.get("", ""), ""):
        yield _read(f"{MOUNT}{path}/{second[1]}")
    controller, file = first
    for path in (paths.get(controller, ""), ""):
        yield _read(f"{MOUNT}/{controller}{path}/{file}")


def _paths(text: str) -> dict[str, str]:
    """Controller → path; "" is the unified hierarchy."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        found.update(dict.fromkeys(controllers.split(","), path.rstrip("/")))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
