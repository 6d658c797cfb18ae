"""Random layers on random machines: a plan whose mounts hold, or our own error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy import paths
from agent_sandbox.policy.explain import look_up
from agent_sandbox.policy.merge import merge, widenings
from agent_sandbox.policy.model import (
    DIR,
    EXCLUDE,
    FILE,
    FLAGS,
    GLOBAL,
    PROJECT,
    RO,
    RW,
    GitLayout,
    HostFacts,
    Match,
    Plan,
    Policy,
)
from agent_sandbox.policy.resolve import resolve, widened_paths
from policy.facts import CWD, HOME, STATE, Tree, a_match, facts, find, layer

from .bound import attempt, fuzz

if TYPE_CHECKING:
    from collections.abc import Callable

# A tree, the settings of each layer, and the rest of the machine.
Case = tuple[Tree, dict[int, dict[str, Any]], dict[str, Any]]

NAMES = st.sampled_from(("a", "b", ".c", "d.txt", ".git", "hooks", ".ssh", ".env"))
INSIDE = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PLACES = st.sampled_from((CWD, CWD, HOME, "/srv/x", "/opt", "/etc", "/run/user/1000"))
WHERE = st.builds("{}/{}".format, PLACES, INSIDE)
KINDS = st.one_of(
    st.sampled_from((FILE, DIR, FILE, DIR, "socket", "other")),
    WHERE.map("-> {}".format),
    INSIDE.map("-> {}".format),
    INSIDE.map("-> ../{}".format),
)
TREES = st.dictionaries(WHERE, KINDS, min_size=1, max_size=8)
GLOBS = ("*", "a*", "*.txt", "*/b", ".*", "[ab]", "?", "~/*", "/srv/*", "/opt/*/*", "*/*")
ODD = (".", "..", "~", "/", "/usr", "/proc/x", "/dev", STATE, f"{STATE}/run", HOME, "missing")
PRESETS = ("@host", "!@base", "!@git", "!@caches", "!@all", "@git-strict", "!@agents")


def layers_for(tree: Tree) -> st.SearchStrategy[dict[str, Any]]:
    """Settings whose path rules mostly speak about the tree."""
    there = sorted({up for path in tree for up in (path, *paths.parents(path)[:2])})
    names = [path[len(CWD) + 1 :] for path in there if paths.below(path, CWD)]
    names += [f"~/{path[len(HOME) + 1 :]}" for path in there if paths.below(path, HOME)]
    usual = st.sampled_from([*there, *names])
    rules = st.lists(st.one_of(usual, usual, st.sampled_from(GLOBS + ODD)), max_size=3)
    filesystem = st.fixed_dictionaries(
        {"ro": rules, "rw": rules, "exclude": rules},
        optional={"presets": st.lists(st.sampled_from(PRESETS), max_size=2)},
    )
    return st.fixed_dictionaries(
        {"filesystem": filesystem},
        optional={
            "network": st.sampled_from(("on", "off", "allow", "public", "learn")),
            "home": st.sampled_from(("private", "ephemeral", "host")),
            "profile": st.sampled_from(("claude", "codex", "none", "nobody")),
        },
    )


GITS = st.sampled_from(
    (
        None,
        GitLayout(
            top=CWD, git_dir=f"{CWD}/.git", common_dir=f"{CWD}/.git", linked=False,
            control=(f"{CWD}/.git/config",), absent=(f"{CWD}/.git/hooks",),
        ),
        GitLayout(
            top=HOME + "/w", git_dir="/srv/x/.git/worktrees/w", common_dir="/srv/x/.git",
            linked=True, control=("/srv/x/.git/config", "/srv/x/.git/hooks/"),
        ),
    )
)  # fmt: skip
MACHINES = st.fixed_dictionaries(
    {
        "uid": st.sampled_from((0, 1000)),
        "git": GITS,
        "path": st.lists(WHERE, max_size=2),
        "engines": st.booleans(),
        "secrets": st.booleans(),
    }
)


@st.composite
def cases(draw: Callable[..., Any], *ranks: int) -> Case:
    """A tree, a layer of settings for each rank, and the rest of a machine."""
    tree = consistent(draw(TREES)) or {f"{CWD}/a": FILE}
    return tree, {rank: draw(layers_for(tree)) for rank in ranks}, draw(MACHINES)


class Made:
    """One random case: a policy, a machine and the plan for it."""

    def __init__(
        self, tree: Tree, given: dict[int, dict[str, Any]], machine: dict[str, Any]
    ) -> None:
        self.tree = tree
        self.layers = [layer(rank, data) for rank, data in given.items()]
        self.policy: Policy = merge(self.layers, project=CWD, home=HOME, command="sh", env={})
        looked_up = (find(self.tree, path) for path in machine["path"])
        sockets = [path for path, kind in self.tree.items() if kind == "socket"]
        self.facts: HostFacts = facts(
            self.policy,
            self.tree,
            uid=machine["uid"],
            git=machine["git"],
            path_dirs=tuple(m for m in looked_up if m is not None and m.kind == DIR),
            engine_sockets=tuple(a_match(p, "socket") for p in sockets if machine["engines"]),
            root_secrets=(a_match("/etc/shadow", FILE),) if machine["secrets"] else (),
        )
        self.plan: Plan = resolve(self.policy, self.facts)

    def real_paths(self) -> list[str]:
        """Every path of the machine that is not a link, with the directories above."""
        found = {p for p, kind in self.tree.items() if not kind.startswith("->")}
        found |= {up for path in found for up in paths.parents(path)}
        return sorted(found | {CWD, HOME})


def consistent(tree: Tree) -> Tree:
    """A tree that can be: nothing below a file or a link, and links only to what is older."""
    known: Tree = {}
    for path, kind in tree.items():
        if any(known.get(up, DIR) != DIR for up in paths.parents(path)):
            continue
        if kind != DIR and any(paths.below(other, path) for other in known):
            continue
        if kind.startswith("-> "):
            target = kind[3:] if kind[3] == "/" else f"{paths.parent(path)}/{kind[3:]}"
            # So that no circle of links closes.
            if find(known, target) is None or paths.within(paths.normalise(target), path):
                continue
        known[path] = kind
    return known


def made(case: Case, *, without: int | None = None) -> Made | None:
    """The plan of a case, or None when the policy is refused."""
    tree, given, machine = case
    chosen = {rank: data for rank, data in given.items() if rank != without}
    result = attempt(lambda: Made(tree, chosen, machine), PolicyError)
    return None if isinstance(result, SandboxError) else result


@fuzz(120, case=cases(GLOBAL, FLAGS))
def test_any_plan_can_be_built_in_its_order(case: Case) -> None:
    """Normal paths, holders first, nothing buried, nothing through a link, one view per path."""
    it = made(case)
    if it is None:
        return
    mounts = [m for m in it.plan.mounts if m.kind != "seal"]
    for at, mount in enumerate(mounts):
        assert mount.dest == paths.normalise(mount.dest)
        for later in mounts[at + 1 :]:
            assert not paths.below(mount.dest, later.dest), f"{later} buries {mount}"
            if later.dest == mount.dest:
                assert later.kind in ("mask-file", "mask-dir"), f"{later} fights {mount}"
    links = [m.dest for m in mounts if m.kind == "symlink"]
    for mount in mounts:
        assert not any(paths.below(mount.dest, link) for link in links), f"{mount} through a link"


@fuzz(120, case=cases(GLOBAL, FLAGS))
def test_only_what_a_rule_opens_is_writable(case: Case) -> None:
    """The project, its repository, and what a rule of the user or the profile names."""
    it = made(case)
    if it is None:
        return
    opened = [CWD]
    if it.facts.git is not None:
        opened += [it.facts.git.common_dir, it.facts.git.git_dir]
    opened += [
        match.real
        for rule in it.policy.rules
        if rule.level == RW
        for match in it.facts.matches.get(rule.pattern, ())
    ]
    opened += [part.outside for part in it.policy.parts if part.mode == RW]
    for mount in it.plan.mounts:
        if mount.kind in ("rw", "pin") and mount.source.startswith("/"):
            assert any(paths.within(mount.source, root) for root in opened), mount


@fuzz(150, case=cases(GLOBAL, FLAGS))
def test_the_rules_decide_as_documented(case: Case) -> None:
    """What the deepest winning rule of the user says about a path is what the plan does.

    Exact beats glob, then the later layer, then exclude > ro > rw.
    """
    it = made(case)
    if it is None:
        return
    claims = user_claims(it)
    for path in it.real_paths():
        said = next((claims[p] for p in (path, *paths.parents(path)) if p in claims), None)
        if said is None or decided_deeper(it, path, claims):
            continue
        level = look_up(it.plan, path).level
        if said == EXCLUDE:
            assert level not in (RO, RW), f"{path} is shown: {it.plan.mounts}"
        elif not hidden_anyway(it, path):
            assert level == said, f"{path} is {level}, not {said}: {it.plan.mounts}"


def user_claims(case: Made) -> dict[str, str]:
    """Real path → level, by the documented rules, for rules that the user wrote."""
    strength = (RW, RO, EXCLUDE)
    best: dict[str, tuple[bool, int, int]] = {}
    for rule in case.policy.rules:
        if rule.quiet:
            continue
        weight = (not rule.glob, rule.source.layer, strength.index(rule.level))
        for match in case.facts.matches.get(rule.pattern, ()):
            best[match.real] = max(best.get(match.real, weight), weight)
    return {path: strength[weight[2]] for path, weight in best.items()}


def decided_deeper(case: Made, path: str, claims: dict[str, str]) -> bool:
    """Whether a built-in rule speaks about something between the user's rule and the path."""
    holder = next(p for p in (path, *paths.parents(path)) if p in claims)
    written = {str(rule.source) for rule in case.policy.rules if not rule.quiet}
    over = [
        mount
        for mount in case.plan.mounts
        if mount.kind not in ("pin", "seal", "symlink") and paths.within(path, mount.dest)
    ]
    nearest = max(over, key=lambda mount: paths.depth(mount.dest), default=None)
    return nearest is not None and paths.below(nearest.dest, holder) and nearest.rule not in written


def hidden_anyway(case: Made, path: str) -> bool:
    """Engine sockets and our own state stay out of sight whatever a rule says."""
    engines = [match.real for match in case.facts.engine_sockets]
    return any(paths.within(path, hidden) for hidden in (*engines, STATE))


@fuzz(150, case=cases(GLOBAL, PROJECT, FLAGS))
def test_a_project_cannot_open_its_own_cage(case: Case) -> None:
    """Where no trust is asked for, the project's file shows and opens nothing more."""
    whole, below = made(case), made(case, without=PROJECT)
    if whole is None or below is None:
        return
    mine = next(lay for lay in whole.layers if lay.rank == PROJECT)
    if widenings(mine, [lay for lay in whole.layers if lay.rank < PROJECT]):
        return
    if widened_paths(whole.policy, whole.facts, below.plan, whole.plan):
        return
    openness = {RO: 1, RW: 2}
    for path in whole.real_paths():
        was, now = look_up(below.plan, path).level, look_up(whole.plan, path).level
        assert openness.get(now, 0) <= openness.get(was, 0), f"{path}: {was}, with the file {now}"
    assert whole.plan.network <= below.plan.network
    assert whole.plan.docker <= below.plan.docker


def test_the_machine_on_paper_finds_links() -> None:
    """A control: the generator's links lead somewhere."""
    tree = {f"{CWD}/l": "-> /srv/x", "/srv/x/f": FILE}
    assert find(tree, f"{CWD}/l/f") == Match(
        path=f"{CWD}/l/f", real="/srv/x/f", kind=FILE,
        links=find(tree, f"{CWD}/l/f").links,  # type: ignore[union-attr]
    )  # fmt: skip
