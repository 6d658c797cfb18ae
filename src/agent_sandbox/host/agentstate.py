"""Looks up the state of the chosen agent profile. Only for a command that has one."""

from __future__ import annotations

import os
import stat

from ..policy import control, paths
from ..policy.model import BUILT_IN, DIR, Named
from ..policy.profiles import RW, ways
from ..policy.profiles.claims import Found
from ..policy.profiles.places import NAMES
from ..policy.resolve import writable_roots
from .command import candidates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..policy.model import HostFacts, Match, Policy
    from ..policy.profiles.places import Part
    from .locate import Locator


# Each is a mount.
MOST = 200
# How much of a shared directory is looked at: entries, sessions, and bytes of each.
MOST_ENTRIES = 2000
MOST_SESSIONS = 50
HEAD_BYTES = 16384
MOST_STRAYS = 3
# In a directory of the state that stands for a project.
LEAVES = ("+home", "+state")
USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"


def find(
    parts: Iterable[Part], locator: Locator, state_dir: str, project: str
) -> tuple[Found, ...]:
    """Every part of the profile's state as it is on this machine."""
    found = []
    doubts: dict[str, bool] = {}

    def is_doubted(link: str) -> bool:
        if link not in doubts:
            doubts[link] = was_project(paths.parent(link), state_dir)
        return doubts[link]

    for part in _each(parts):
        match = locator.find(part.outside)
        above, rest = _above(part.outside, locator)
        at, parent = "", False
        # A dangling link leads to something that nobody has looked at.
        if match is None and above is not None and not os.path.islink(part.outside):
            parent = "/" not in rest
            at = f"{above.real}/{rest}" if os.access(above.real, os.W_OK | os.X_OK) else ""
        way = match or above
        shared = match.real if match is not None and part.mode == RW else ""
        found.append(
            Found(
                part=part, match=match, at=at, parent=parent, above=above, rest=rest,
                doubted=tuple(n.at for n in way.links if is_doubted(n.at)) if way else (),
                other=_other_project(shared, project) if shared else "",
                strays=tuple(_strays(shared)) if shared else (),
            )
        )  # fmt: skip
    return tuple(found)


def was_project(path: str, state_dir: str) -> bool:
    """Whether a directory, or one around it, has a private home: a sandbox has written there."""
    base = f"{state_dir}/homes"
    try:
        profiles = os.listdir(base)
    except FileNotFoundError:
        # No sandbox has ever had one. Any other error is the caller's.
        return False
    for profile in profiles:
        here = f"{base}/{profile}"
        for part in path.split("/")[1:]:
            here += f"/+{part}" if part.startswith("+") else f"/{part}"
            if not os.path.isdir(here):
                break
            if any(os.path.isdir(f"{here}/{leaf}") for leaf in LEAVES):
                return True
    return False


def chose_itself(name: str, policy: Policy, facts: HostFacts, locator: Locator) -> str:
    """A program that has a profile by its name alone, if a sandbox may have made it.

    Every one on PATH counts: those before it may not be shown inside.
    """
    if policy.profile.source.layer != BUILT_IN:
        return ""
    put = policy.env_set.get("PATH")
    path = str(put.value) if put is not None else facts.env.get("PATH") or USUAL_PATH
    writable = (*writable_roots(policy.rules, facts), facts.cwd.path)
    for found in candidates(name, path, facts.cwd.real, locator):
        if not found.executable:
            continue
        match = found.match
        places = (match.real, *(link.at for link in match.links))
        doubted = any(was_project(paths.parent(place), facts.state_dir) for place in places)
        if doubted or ways.reaches(match, writable):
            return match.path
    return ""


def not_chosen(name: str, program: str) -> str:
    """What people are told then."""
    profile = paths.normalise(f"/{name}").rpartition("/")[2]
    return (
        f"no profile for '{name}': '{program}' lies where a sandbox can write, so its name proves "
        f"nothing; use --profile {profile} if it is to have your login"
    )


def _strays(root: str) -> Iterator[str]:
    """Links in a directory that sandboxes can write. Nothing of it is followed."""
    todo, seen, told = [root], 0, 0
    while todo:
        try:
            scanned = os.scandir(todo.pop())
        except OSError:
            continue
        with scanned:
            for item in scanned:
                seen += 1
                if seen > MOST_ENTRIES or told == MOST_STRAYS:
                    return
                if item.is_symlink():
                    told += 1
                    yield item.path
                elif item.is_dir(follow_symlinks=False):
                    todo.append(item.path)


def _other_project(root: str, project: str) -> str:
    """Another project whose sessions lie in a directory: `/a-b` and `/a/b` have the same name."""
    name = paths.normalise(root).rpartition("/")[2]
    makers = [make for make in NAMES.values() if make(project) == name]
    if not makers:
        return ""
    try:
        names = [n for n in sorted(os.listdir(root)) if n.endswith(".jsonl")]
    except OSError:
        return ""
    for session in names[-MOST_SESSIONS:]:
        place = _session_place(f"{root}/{session}")
        if place and place != project and any(make(place) == name for make in makers):
            return place
    return ""


def _session_place(path: str) -> str:
    """The directory that a session says it was begun in; empty if it does not say."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
        head = os.read(fd, HEAD_BYTES).decode("utf-8", "replace") if plain else ""
    except OSError:
        return ""
    finally:
        os.close(fd)
    _, mark, rest = head.partition('"cwd":')
    text, end, _ = rest.lstrip(" ").removeprefix('"').partition('"')
    # A name with escapes is left unread.
    return text if mark and end and text.startswith("/") and "\\" not in text else ""


def _each(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts; `/*` is every plain name in a directory. Those with a dot are the agent's."""
    for part in parts:
        if not part.outside.endswith("/*"):
            yield part
            continue
        directory = paths.parent(part.outside)
        # As a whole, where the user has opened the directory around it.
        yield part.replace(path=paths.parent(part.path), outside=directory, whole=True)
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names[:MOST]:
            if not name.startswith("."):
                path = f"{paths.parent(part.path)}/{name}"
                yield part.replace(path=path, outside=f"{directory}/{name}")


def held_state(path: str, made: Iterable[str]) -> list[Named]:
    """A protected path of a profile that is missing: it is held, or what is missing above it."""
    if os.path.islink(path):
        return []
    first = path
    while not os.path.lexists(paths.parent(first)):
        first = paths.parent(first)
    for root in made:
        # A directory of the state that will be there, and be writable, when the command starts.
        if root and paths.below(path, root):
            first = f"{root}/{path[len(root) + 1 :].partition('/')[0]}"
    kind = control.kind_by_name(path) if first == path else DIR
    return [Named(path=first, kind=kind, missing=True, tracked=False)]


def _above(path: str, locator: Locator) -> tuple[Match | None, str]:
    """The nearest directory above a path that is there, and the rest of the path."""
    for directory in paths.parents(path):
        match = locator.find(directory)
        if match is not None:
            rest = path[len(directory) :].lstrip("/")
            return (match, rest) if match.kind == DIR else (None, "")
        if os.path.islink(directory):
            return None, ""
    return None, ""
