"""Links on the way to an agent's state: which are the user's own, and which may have been planted.

An earlier run, in another project or with `--rw`, may have written where this one cannot, so what
is writable now proves nothing. Followed is a link right in the home, which is never a project, or
one on the way to the agent's directory that lies in no place known to have been a project. Behind
those, only what would be shown anyway. Pure.
"""

from __future__ import annotations

from ...errors import PolicyError
from .. import paths
from ..model import EXCLUDE, FILE
from . import COPY, PRIVATE, RO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..model import HostFacts, Link, Match
    from ..resolve import Claims
    from .claims import Found

# Nobody but root writes there, every sandbox sees it, and no socket is in it.
STORES = ("/nix/store", "/gnu/store")


class Judge:
    """Judges links for the parts of one profile."""

    def __init__(
        self, claims: Claims, facts: HostFacts, state: Iterable[str], writable: Sequence[str]
    ) -> None:
        self._claims, self._facts, self._writable = claims, facts, writable
        # The profile's own paths, written with `~`.
        self._state = tuple(state)
        # Places of the host that the profile shows or copies anyway.
        self._listed: list[str] = []

    def learn(self, state: Sequence[Found]) -> None:
        """Remember what is shown at its own place."""
        reals = {f.part.path: f.match.real for f in state if f.match and f.part.mode == PRIVATE}
        for found in state:
            part = found.part
            if part.mode in (RO, COPY):
                base = part.root or part.path
                self._listed.append(reals.get(base, base) + part.path[len(base) :])

    def writes(self, path: str) -> bool:
        """Whether the sandbox can write a path of the host, as far as rules say."""
        return any(paths.within(path, root) for root in self._writable)

    def obstacle(self, found: Found) -> Link | None:
        """A link on the way to a part, or to where it would be made, that is not followed."""
        part, way = found.part, found.match or found.above
        if way is None or not way.links:
            return None
        real = way.real if found.match is not None else (found.at or way.real)
        top = part.root if part.root and paths.within(part.outside, part.root) else part.outside
        inner = [link for link in way.links if not paths.within(top, link.at)]
        for link in way.links:
            if link not in inner and not self._is_own(link, real, found):
                return link
        if inner:
            return None if found.match and self._is_shown_anyway(found, real) else inner[0]
        return way.links[-1] if self._is_hidden(real) else None

    def _is_own(self, link: Link, real: str, found: Found) -> bool:
        """Whether the user has made a link on the way to the agent's directory."""
        if link.at in found.doubted or any(paths.below(link.at, r) for r in self._writable):
            return False
        home = self._facts.home.real
        return paths.parent(link.at) == home or found.part.moved or paths.below(real, home)

    def _is_shown_anyway(self, found: Found, real: str) -> bool:
        if found.part.mode not in (RO, COPY):
            return False
        if any(paths.within(real, place) for place in (*self._listed, *STORES)):
            return True
        return found.match is not None and found.match.kind == FILE and real in self._instructions()

    def _instructions(self) -> list[str]:
        """Files of instructions: people let one agent's be a link to another's."""
        from .builtin import PROFILES

        written = [s.path for p in PROFILES for s in p.state if s.mode == RO]
        return [self._facts.home.real + path[1:] for path in written if path.endswith(".md")]

    def _is_hidden(self, real: str) -> bool:
        """Whether a path is, holds or lies in what no sandbox sees."""
        from ..secrets import HOME

        home = self._facts.home.real
        hidden = [self._facts.state_dir, self._facts.config_dir or self._facts.state_dir]
        hidden += [
            home + path[1:]
            for path in HOME
            if not any(paths.within(path, own) for own in self._state)
        ]
        if paths.within(home, real) or any(
            paths.within(real, path) or paths.within(path, real) for path in hidden
        ):
            return True
        above = (self._claims.get(path) for path in (real, *paths.parents(real)))
        nearest = next((entry for entry in above if entry is not None), None)
        return nearest is not None and nearest.level == EXCLUDE


def said(found: Found, link: Link, real: str) -> str:
    """What people are told of a link that is not followed."""
    path = found.part.outside
    remedy = f"name it with --ro '{path}'" if found.part.mode == RO else "put the file itself there"
    return (
        f"'{path}' (profile) is not shown: on the way to '{real}' is the link '{link.at}', "
        f"which a sandbox may have made; if it is yours, {remedy}"
    )


def refuse(path: str, link: Link) -> PolicyError:
    """The error for a link without which there is no state."""
    return PolicyError(
        f"cannot follow '{link.at}' to '{path}' for the profile: a sandbox may have made that "
        "link, or it leads to secrets",
        hint="put the directory itself there, or link to it right from your home; "
        "--profile none runs without",
        code="planted-link",
    )


def check_real(match: Match, facts: HostFacts, *, moved: bool, name: str) -> None:
    """Refuse state that really is around the project or the home; or in it, by a variable."""
    project, real = facts.cwd.real, match.real
    around = paths.within(facts.home.real, real) or paths.within(project, real)
    if around or (moved and paths.within(real, project)):
        raise PolicyError(
            f"cannot use '{match.path}' for the state of profile '{name}': really it is '{real}', "
            "which is in the project, or holds it or your home",
            hint="keep an agent's state in a directory of its own; see 'sandboxctl profile show'",
            code="bad-state-path",
        )


def reaches(match: Match, writable: Iterable[str]) -> bool:
    """Whether a path, what it really is or a link on its way lies in a writable tree."""
    places = (paths.normalise(match.path), match.real, *(link.at for link in match.links))
    return any(paths.within(place, root) for place in places for root in writable)
