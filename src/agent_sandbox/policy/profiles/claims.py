"""A profile's state becomes claims on paths, directories to be made and files to be kept in step.

Pure. Only for a command that has a profile.
"""

from __future__ import annotations

from ...errors import PolicyError
from ...record import Record
from .. import control, paths
from ..assemble import Entry, view_of
from ..model import BUILT_IN, DIR, FILE, STATE, WORK_STATE, Match, Source
from ..model import RO as READ_ONLY
from ..model import RW as WRITABLE
from . import COPY, EMPTY, MERGE, PRIVATE, RO, RW, ways
from .places import Part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model import HostFacts, Link, Policy
    from ..resolve import Claims


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
    # Links on the way that lie in what is known to have been a project.
    doubted: tuple[str, ...] = ()
    # Another project whose transcripts lie in a directory that is shared, writable.
    other: str = ""
    # Links in such a directory: an agent outside would write through them.
    strays: tuple[str, ...] = ()


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
    claims: Claims, links: list[Link], policy: Policy, facts: HostFacts, notices: list[str],
    *, writable: Sequence[str],
) -> Outcome:  # fmt: skip
    """Add the claims of a profile's state. After all others: whoever named a path has it."""
    source = Source(layer=BUILT_IN, where=f"profile {policy.profile.value}")
    base = WORK_STATE if policy.home.value == "ephemeral" else STATE
    written = [state.path for state in (policy.agent or EMPTY).state]
    judge = ways.Judge(claims, facts, written, writable)
    _check_rules(judge, policy, facts)
    made: list[str] = []
    # Private directories: their path as it is written → where they are mounted.
    roots: dict[str, str] = {}
    for found in facts.state:
        part = found.part
        if part.mode == PRIVATE:
            _check_root(judge, found, facts, str(policy.profile.value))
            dest = _destination(claims, links, found, made)
            held = claims.get(dest)
            if dest and (held is None or held.source.layer == BUILT_IN):
                roots[part.path] = dest
                _claim_root(claims, dest, f"{base}/{part.name}", source)
                _close(claims, judge, found, dest, source)
    judge.learn(facts.state)
    steps: list[Step] = []
    bare: list[tuple[str, str]] = []
    for found in facts.state:
        part = found.part
        if part.mode == PRIVATE or (part.whole and part.root in roots):
            continue
        if part.root not in roots:
            _protect(claims, links, found, source, made=made, judge=judge, notices=notices)
            continue
        dest, token = roots[part.root], f"{base}/{part.name}"
        inside = dest + part.path[len(part.root) :]
        _guard(claims, judge, found, dest, source)
        is_shared = _may_share(claims, judge, found, notices)
        if part.mode in (COPY, MERGE):
            if is_shared:
                steps += _step(found, token, inside, dest)
            if is_shared and found.at and not found.parent and part.mode == MERGE:
                # Something may come out.
                made.append(paths.parent(found.at))
            continue
        shown = _shown(found) if is_shared else None
        _show(claims, part, shown, inside, source)
        if shown is None:
            bare.append((token, part.path[len(part.root) + 1 :]))
        elif found.match is None:
            made.append(found.at)
    return Outcome(made=tuple(dict.fromkeys(made)), steps=tuple(steps), bare=tuple(bare))


def _claim_root(claims: Claims, dest: str, token: str, source: Source) -> None:
    """A directory of the sandbox's own in the place of the agent's."""
    claims.add(
        Entry(
            path=dest, level=WRITABLE, kind=DIR, exact=True, source=source, special="private",
            token=token,
        )
    )  # fmt: skip


def _check_rules(judge: ways.Judge, policy: Policy, facts: HostFacts) -> None:
    """Refuse planted links to what lies in no private directory: rules have claimed it already."""
    lone = [found for found in facts.state if not found.part.root]
    for rule in policy.rules:
        lone += [
            Found(part=Part(mode=RO, path=match.path, outside=match.path), match=match)
            for match in (facts.matches.get(rule.pattern, ()) if rule.held else ())
        ]
    for found in lone:
        link = judge.obstacle(found)
        if link is not None:
            raise ways.refuse(found.part.outside, link)


def _check_root(judge: ways.Judge, found: Found, facts: HostFacts, name: str) -> None:
    """Refuse a private directory whose counterpart on the host is not the user's choice."""
    link = judge.obstacle(found)
    if link is not None:
        raise ways.refuse(found.part.path, link)
    place = found.match
    if place is None and found.at:
        place = Match(path=found.part.path, real=found.at, kind=DIR)
    if place is not None:
        ways.check_real(place, facts, moved=found.part.moved, name=name)


def _close(claims: Claims, judge: ways.Judge, found: Found, dest: str, source: Source) -> None:
    """Make the host's directory read-only where a link has put it in a writable tree.

    What the host runs of it could be changed there, around what is mounted in its place.
    """
    real = found.match.real if found.match is not None else found.at
    if real in ("", dest) or not judge.writes(real):
        return
    if found.match is None:
        raise PolicyError(
            f"cannot keep the state of the profile: '{real}' is missing, and could be made inside",
            hint=f"make the directory first: mkdir -p '{real}'",
            code="bad-state-path",
        )
    claims.add(Entry(path=real, level=READ_ONLY, kind=DIR, exact=True, source=source))


def _guard(claims: Claims, judge: ways.Judge, found: Found, dest: str, source: Source) -> None:
    """The same for the parts that the host acts on, if the user has opened their directory."""
    match, part = found.match, found.part
    if part.mode not in (RO, COPY, MERGE):
        return
    real = match.real if match is not None else found.at
    if not real or paths.within(real, dest) or not judge.writes(real):
        return
    if match is not None:
        _show(claims, part.replace(mode=RO), match, match.real, source)
    elif found.parent and part.mode != MERGE:
        _hold(claims, found, source)


def _may_share(claims: Claims, judge: ways.Judge, found: Found, notices: list[str]) -> bool:
    """Whether a part of the host's may be shown, copied or kept in step; else people are told."""
    part = found.part
    link = judge.obstacle(found)
    if link is not None:
        real = found.match.real if found.match is not None else part.outside
        held = claims.get(real)
        if held is None or held.source.layer == BUILT_IN:
            notices.append(ways.said(found, link, real))
        return False
    if found.other:
        notices.append(
            f"'{part.outside}' (profile) is not shared: it holds sessions of '{found.other}', "
            "whose name there is the same"
        )
    notices += [
        f"'{stray}' is a link in what the sandbox can write: an agent outside would write through "
        "it; remove it if it is not yours"
        for stray in found.strays
    ]
    return not found.other


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


def _shown(found: Found) -> Match | None:
    """What of the host is shown in a private directory; None for nothing."""
    match, part = found.match, found.part
    if match is None:
        if part.mode != RW or not found.at:
            return None
        return Match(path=part.outside, real=found.at, kind=DIR)
    return match if match.kind in (DIR, FILE) else None


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
    claims: Claims, links: list[Link], found: Found, source: Source, *, made: list[str],
    judge: ways.Judge, notices: list[str],
) -> None:  # fmt: skip
    """Parts that lie in no private directory, or in one that the user has opened as a whole.

    What is there and lies in none has rules like any other path (`merge`).
    """
    part, match = found.part, found.match
    if part.mode == RW and match is None and found.at and judge.obstacle(found) is None:
        made.append(found.at)
        _show(claims, part, Match(path=part.path, real=found.at, kind=DIR), found.at, source)
    if not part.root or part.mode not in (RO, COPY):
        return
    if match is not None:
        for link in match.links:
            # A mount cannot hold a link: inside it could be replaced by what the host would run.
            if judge.writes(link.at) and not _is_held(claims, link.at):
                raise ways.refuse(part.outside, link)
        if judge.obstacle(found) is not None:
            _may_share(claims, judge, found, notices)
            return
        links += match.links
        _show(claims, part.replace(mode=RO), match, match.real, source)
    elif found.parent:
        _hold(claims, found, source)


def _is_held(claims: Claims, path: str) -> bool:
    """Whether a path lies in what is read-only."""
    above = (claims.get(one) for one in paths.parents(path))
    nearest = next((entry for entry in above if entry is not None), None)
    return nearest is not None and view_of(nearest) == READ_ONLY


def _hold(claims: Claims, found: Found, source: Source) -> None:
    claims.add(
        Entry(
            path=found.at, level=READ_ONLY, kind=control.kind_by_name(found.part.outside),
            exact=True, special="hold",
            source=source.replace(where=f"{source.where}: not there, not to be created"),
        )
    )  # fmt: skip
