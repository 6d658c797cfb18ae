"""What the plan says about one path, and why. Pure."""

from __future__ import annotations

from ..record import Record
from . import paths
from .model import EXCLUDE, RO, RW, Mount, Plan

ABSENT = "absent"
PRIVATE = "private"
LEVEL_WORDS = {
    RW: "visible, writable",
    RO: "visible, read-only",
    EXCLUDE: "hidden",
    PRIVATE: "private to the sandbox, writable; not the host's",
    ABSENT: "not there",
}


class View(Record):
    """How one path appears inside."""

    level: str
    mount: Mount | None
    path: str


def look_up(plan: Plan, path: str) -> View:
    """The view of a real path. The deepest mount decides; at equal depth the later one."""
    best: Mount | None = None
    for mount in plan.mounts:
        if mount.kind in ("seal", "symlink") or not paths.within(path, mount.dest):
            continue
        if best is None or paths.depth(mount.dest) >= paths.depth(best.dest):
            best = mount
    return View(level=_level(plan, best), mount=best, path=path)


def _level(plan: Plan, mount: Mount | None) -> str:
    if mount is None:
        return ABSENT
    if mount.kind == "tmpfs":
        sealed = any(m.kind == "seal" and m.dest == mount.dest for m in plan.mounts)
        if mount.level == EXCLUDE:
            return EXCLUDE
        return ABSENT if sealed else PRIVATE
    if mount.kind in ("dev", "proc", "text", "program"):
        return PRIVATE
    return mount.level or ABSENT


def rule_of(plan: Plan, view: View) -> str:
    """The rule that decided a view: the user's own, or the one behind the mount."""
    if view.mount is None:
        return "nothing shows it"
    for path in (view.path, *paths.parents(view.path)):
        if path in plan.decided:
            return plan.decided[path]
        if path == view.mount.dest:
            break
    return view.mount.rule or "always"


def link_target(plan: Plan, path: str) -> str | None:
    """The text of a link that the plan itself makes on the way to `path`, joined with the rest."""
    for mount in plan.mounts:
        if mount.kind == "symlink" and paths.within(path, mount.dest):
            rest = path[len(mount.dest) :]
            base = (
                mount.source
                if mount.source.startswith("/")
                else (paths.parent(mount.dest) + "/" + mount.source)
            )
            return paths.normalise(base + rest)
    return None
