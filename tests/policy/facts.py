"""A machine on paper: HostFacts from a table of paths, so that plans are tested without a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_sandbox.policy import paths
from agent_sandbox.policy.decode import decode
from agent_sandbox.policy.merge import merge
from agent_sandbox.policy.model import (
    DIR,
    FILE,
    FLAGS,
    GLOBAL,
    PROJECT,
    HostFacts,
    Layer,
    Link,
    Match,
    Plan,
    Policy,
)
from agent_sandbox.policy.profiles.claims import Found
from agent_sandbox.policy.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_sandbox.policy.profiles.places import Part

HOME = "/home/u"
CWD = "/home/u/p"
STATE = "/home/u/.local/state/agent-sandbox"

# Path → "dir", "file", "socket", or "-> text" for a link. Parents are directories by themselves.
Tree = dict[str, str]


def a_match(path: str, kind: str = DIR, *, real: str = "", links: Sequence[Link] = ()) -> Match:
    """A path as found on the host."""
    return Match(path=path, real=real or path, kind=kind, links=tuple(links))


def find(tree: Tree, path: str) -> Match | None:
    """Look a path up in the table, following its links."""
    links: list[Link] = []
    here, todo = "/", [p for p in path.split("/") if p]
    while todo:
        part = todo.pop(0)
        if part == "..":
            here = paths.parent(here)
            continue
        here = paths.normalise(f"{here}/{part}")
        kind = tree.get(here, "")
        if kind.startswith("-> "):
            text = kind[3:]
            links.append(Link(at=here, text=text))
            here = "/" if text.startswith("/") else paths.parent(here)
            todo = [p for p in text.split("/") if p] + todo
    kind = tree.get(here, DIR if any(paths.below(p, here) for p in tree) else "")
    return Match(path=path, real=here, kind=kind, links=tuple(links)) if kind else None


def expand(tree: Tree, pattern: str) -> list[str]:
    """Paths of the table that a glob without `**` matches."""
    wanted = pattern.split("/")[1:]
    tests = [paths.compile_component(part, "test") for part in wanted]
    found = []
    for path in tree:
        parts = path.split("/")[1:]
        if len(parts) == len(tests) and all(t(p) for t, p in zip(tests, parts, strict=True)):
            found.append(path)
    return sorted(found)


def facts(policy: Policy | None = None, tree: Tree | None = None, **changes: Any) -> HostFacts:
    """A usual machine: a user with a home, /usr and /etc, no repository, no engine."""
    table = tree or {}
    matches: dict[str, tuple[Match, ...]] = {}
    for rule in policy.rules if policy is not None else ():
        wanted = expand(table, rule.pattern) if rule.glob else [rule.pattern]
        found = [m for m in (find(table, path) for path in wanted) if m is not None]
        if found:
            matches[rule.pattern] = tuple(found)
    values: dict[str, Any] = {
        "uid": 1000, "gid": 1000, "user": "u", "home": a_match(HOME), "cwd": a_match(CWD),
        "env": {"PATH": "/usr/bin", "LANG": "C.UTF-8"}, "state_dir": STATE,
        "system": (a_match("/usr"), a_match("/etc")), "path_dirs": (), "matches": matches,
        "resolver": None, "engine_sockets": (), "docker_socket": None, "docker_wanted": "",
        "git": None, "git_config": (), "root_secrets": (),
        "state": tuple(found_state(part, table) for part in policy.parts) if policy else (),
    }  # fmt: skip
    return HostFacts(**{**values, **changes})


def found_state(part: Part, table: Tree) -> Found:
    """A part of an agent's state on this machine. What is missing could be made."""
    above = next(p for p in paths.parents(part.outside) if p == "/" or find(table, p) or p == HOME)
    rest = part.outside[len(above) :].lstrip("/")
    match = find(table, part.outside)
    return Found(
        part=part, match=match, at="" if match else f"{above}/{rest}", parent="/" not in rest,
        above=a_match(above), rest=rest,
    )  # fmt: skip


def layer(rank: int, data: Mapping[str, object]) -> Layer:
    """A decoded layer, named after its rank."""
    name = {GLOBAL: "global.toml", PROJECT: "project.toml", FLAGS: "flags"}[rank]
    return decode(dict(data), rank=rank, file=name).replace(file="")


def layers(
    *,
    user: Mapping[str, object] | None = None,
    project: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
) -> list[Layer]:
    """The layers that are given, in their order."""
    ranked = ((GLOBAL, user), (PROJECT, project), (FLAGS, flags))
    return [layer(rank, data) for rank, data in ranked if data is not None]


def policy_of(
    *,
    user: Mapping[str, object] | None = None,
    project: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    command: str = "sh",
    env: dict[str, str] | None = None,
    base: str = CWD,
) -> Policy:
    """The merged policy of some layers."""
    return merge(
        layers(user=user, project=project, flags=flags),
        project=base, home=HOME, command=command, env=env or {},
    )  # fmt: skip


def plan_of(
    tree: Tree | None = None,
    *,
    user: Mapping[str, object] | None = None,
    project: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    command: str = "sh",
    **changes: Any,
) -> Plan:
    """Layers and a machine on paper become a plan."""
    policy = policy_of(user=user, project=project, flags=flags, command=command)
    return resolve(policy, facts(policy, tree, **changes))


def rules(**levels: Sequence[str]) -> dict[str, object]:
    """`rules(ro=[…], exclude=[…])` as a policy file would have it."""
    return {"filesystem": {level: list(written) for level, written in levels.items()}}


def steps(plan: Plan, below: str = "/") -> list[str]:
    """The mounts at or below a path as `kind dest`, in their order."""
    return [f"{m.kind} {m.dest}" for m in plan.mounts if paths.within(m.dest, below)]


def files(*names: str) -> Tree:
    """Plain files in the project."""
    return {f"{CWD}/{name}": FILE for name in names}
