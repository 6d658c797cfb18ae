"""A profile's state becomes claims on paths, directories to be made and files to be kept in step.

Pure. Only for a command that has a profile.
"""

from __future__ import annotations

from ...record import Record
from .. import control, paths
from ..assemble import Entry, view_of
from ..model import BUILT_IN, DIR, FILE, STATE, WORK_STATE, Match, Source
from ..model import RO as READ_ONLY
from ..model import RW as WRITABLE
from . import COPY, MERGE, PRIVATE, RO, RW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model import HostFacts, Link, Policy
    from ..resolve import Claims
    from .places import Part


class Found(Record):
    """A part of the state, as it is on the host."""

    part: Part
    match: Match | None
    # Where it would be if it is missing and could be made; otherwise empty.
    at: str = ""
    # Whether the directory that it would be in is there.
    parent: bool = False
    # The nearest directory above that is there, and what is missing below that.
    above: Match | None = None
    rest: str = ""


class Step(Record):
    """A file that is copied in, or kept in step with the host's."""

    mode: str
    # Source of the private directory's mount, and the file's name in it.
    token: str
    name: str
    # The file on the host.
    outside: str
    keys: str = ""


class Outcome(Record):
    """What the claims need around them."""

    made: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    # Mount points of earlier runs in private directories that nothing covers now: (token, name).
    bare: tuple[tuple[str, str], ...] = ()


def claim(
    claims: Claims, links: list[Link], policy: Policy, facts: HostFacts, notices: list[str]
) -> Outcome:
    """Add the claims of a profile's state. After all others: whoever named a path has it."""
    source = Source(layer=BUILT_IN, where=f"profile {policy.profile.value}")
    base = WORK_STATE if policy.home.value == "ephemeral" else STATE
    roots: dict[str, tuple[str, str]] = {}
    reals: dict[str, str] = {}
    made: list[str] = []
    steps: list[Step] = []
    bare: list[tuple[str, str]] = []
    for found in facts.state:
        part = found.part
        if part.mode == PRIVATE:
            dest = _destination(claims, links, found, made)
            held = claims.get(dest)
            if not dest or (held is not None and held.source.layer > BUILT_IN):
                continue
            token = f"{base}/{part.name}"
            roots[part.path] = dest, token
            reals[part.path] = found.match.real if found.match is not None else part.path
            claims.add(
                Entry(
                    path=dest, level=WRITABLE, kind=DIR, exact=True, source=source,
                    special="private", token=token,
                )
            )  # fmt: skip
        elif part.root in roots:
            if part.whole:
                continue
            dest, token = roots[part.root]
            inside = dest + part.path[len(part.root) :]
            if part.mode in (COPY, MERGE):
                steps += _step(found, token, inside, dest)
                if found.at and not found.parent and part.mode == MERGE:
                    # Something may come out.
                    made.append(paths.parent(found.at))
            else:
                shown = _shown(found, reals[part.root], facts, notices)
                _show(claims, part, shown, inside, source)
                if shown is None:
                    bare.append((token, part.path[len(part.root) + 1 :]))
                elif found.match is None:
                    made.append(found.at)
        else:
            _protect(claims, links, found, source, made)
    return Outcome(made=tuple(dict.fromkeys(made)), steps=tuple(steps), bare=tuple(bare))


def _destination(claims: Claims, links: list[Link], found: Found, made: list[str]) -> str:
    """Where a private directory is mounted; empty when it cannot be.

    Below a private home or an empty root the path as it is written, since no link of the host is
    there. In a tree of the host it must be the real one, and must exist.
    """
    part = found.part
    for path in paths.parents(part.path):
        entry = claims.get(path)
        if entry is not None:
            if not view_of(entry):
                break
            if found.match is None and found.at:
                made.append(found.at)
            return found.match.real if found.match is not None else found.at
    if part.moved and found.above is not None:
        # The variable may name a way through links, such as that to the home.
        links += found.above.links
        return f"{found.above.real}/{found.rest}"
    return part.path


def _step(found: Found, token: str, inside: str, root: str) -> list[Step]:
    part = found.part
    outside = found.match.real if found.match is not None else found.at
    if found.match is not None and found.match.kind != FILE:
        return []
    if not outside or (part.mode == COPY and found.match is None):
        return []
    name = inside[len(root) + 1 :]
    return [Step(mode=part.mode, token=token, name=name, outside=outside, keys=part.keys)]


def _shown(found: Found, root: str, facts: HostFacts, notices: list[str]) -> Match | None:
    """What of the host is shown in a private directory; None for nothing.

    A link in there may have been planted when a sandbox could still write to it: never through one
    to a place that can be written then, and never to secrets.
    """
    match, part = found.match, found.part
    if match is None:
        if part.mode != RW or not found.at:
            return None
        return Match(path=part.outside, real=found.at, kind=DIR)
    if match.kind not in (DIR, FILE):
        return None
    inner = any(paths.below(link.at, root) for link in match.links)
    if inner and (part.mode == RW or _is_secret(match, facts.home.real)):
        notices.append(f"'{part.outside}' (profile) is not shown: it is a link to '{match.real}'")
        return None
    return match


def _is_secret(match: Match, home: str) -> bool:
    """Whether a link leads to credentials. Instructions for a model are none."""
    if match.kind == FILE and match.real.endswith(".md"):
        return False
    from ..secrets import HOME

    hidden = [home + path[1:] for path in HOME]
    return paths.within(home, match.real) or any(
        paths.within(match.real, path) or paths.within(path, match.real) for path in hidden
    )


def _show(claims: Claims, part: Part, match: Match | None, inside: str, source: Source) -> None:
    if match is None:
        return
    claims.add(
        Entry(
            path=inside, level=WRITABLE if part.mode == RW else READ_ONLY, kind=match.kind,
            exact=True, source=source, token="" if match.real == inside else match.real,
        )
    )  # fmt: skip


def _protect(
    claims: Claims, links: list[Link], found: Found, source: Source, made: list[str]
) -> None:
    """Parts that lie in no private directory, or in one that the user has opened as a whole.

    What is there and lies in none has rules like any other path (`merge`).
    """
    part, match = found.part, found.match
    if part.mode == RW and match is None and found.at:
        made.append(found.at)
        _show(claims, part, Match(path=part.path, real=found.at, kind=DIR), found.at, source)
    if not part.root or part.mode not in (RO, COPY):
        return
    if match is not None:
        links += match.links
        _show(claims, part.replace(mode=RO), match, match.real, source)
    elif found.parent:
        claims.add(
            Entry(
                path=found.at, level=READ_ONLY, kind=control.kind_by_name(part.outside),
                exact=True, special="hold",
                source=source.replace(where=f"{source.where}: not there, not to be created"),
            )
        )  # fmt: skip
