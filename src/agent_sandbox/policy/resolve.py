"""Policy and HostFacts become a Plan: the ordered mounts, the environment, the switches. Pure.

Every path in a Plan is real (symlinks resolved), so that a mount never passes through a link. One
entry wins per path; for different paths the deeper one wins because mounts are made from shallow
to deep. Sources that exist only during a run are written as tokens (`WORK_*`, `PRIVATE_HOME`) and
filled in by the strategy.
"""

from __future__ import annotations

from ..errors import PolicyError
from . import assemble, control, environment, paths, profiles
from .assemble import Entry
from .model import (
    BUILT_IN,
    CONTROLLED,
    DIR,
    EXCLUDE,
    FILE,
    MANDATORY,
    PAGE,
    PRIVATE_HOME,
    README,
    RO,
    RW,
    WORK_CACHES,
    WORK_GIT,
    WORK_HOME,
    WORK_NET,
    WORK_TMP,
    WORK_VAR_TMP,
    HostFacts,
    Limits,
    Link,
    Match,
    Mount,
    Named,
    Plan,
    Policy,
    Rule,
    Source,
)
from .settings import NO_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .credentials import Secret
    from .dockerfilter import DockerFilter
    from .gitauth import GitAuth
    from .network import Egress, Publish
    from .profiles.claims import Outcome

RESERVED = ("/", "/dev", "/proc", "/run", "/sys")
RESERVED_TREES = ("/run/agent-sandbox", "/proc", "/dev")
# Shared or system directories: never a project themselves, though one may lie below some of them.
NOT_A_PROJECT = (
    "/", "/bin", "/boot", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/nix", "/opt",
    "/root", "/run", "/sbin", "/srv", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/var",
    "/var/lib", "/var/tmp",
)  # fmt: skip
NOT_IN_A_PROJECT = ("/dev", "/proc", "/sys", "/boot", "/etc", "/run/agent-sandbox")

# Directories that the sandbox makes for itself.
OWN_DIRECTORIES = ("/tmp", "/var/tmp")

STRENGTH = {RW: 0, RO: 1, EXCLUDE: 2}


def resolve(policy: Policy, facts: HostFacts) -> Plan:
    """Decide what the command will see."""
    active = frozenset(str(p.value) for p in policy.presets)
    _check_project(facts)
    notices: list[str] = []
    claims = Claims()
    links: list[Link] = []
    writable = writable_roots(policy.rules, facts)
    _claim_structure(claims, policy, facts, active)
    claim_system(claims, links, facts, active)
    if "@toolchains" in active:
        _claim_path(claims, links, facts, writable)
    _claim_launchers(claims, links, facts, writable)
    if policy.network.value == "on" and facts.resolver is not None:
        _show(claims, links, facts.resolver, RO, "name resolution")
    claim_naming(claims, links, facts)
    _claim_project(claims, links, facts, active)
    _claim_control(claims, policy.rules, facts)
    _claim_git_config(claims, facts, writable, shows_home=policy.home.value == "host")
    _claim_rules(claims, links, policy.rules, facts, notices)
    kept = _claim_state(claims, links, policy, facts, notices, writable=writable)
    _claim_mandatory(claims, facts, notices)
    _check_working_directory(claims, facts)
    entries = claims.winners()
    mounts = assemble.mounts_for(entries, links)
    mounts += assemble.late_mounts(policy, facts, mounts, notices)
    profile = policy.agent or profiles.EMPTY
    cwd = facts.cwd.real
    env, why = environment.build(policy, facts, profile)
    if policy.seccomp.value == "off":
        notices.append(
            f"seccomp is off ({policy.seccomp.source}): the command can use every system call of "
            "the kernel, so a bug in any of them is a way out"
        )
    egress, publish = outward(policy, notices)
    secrets = _secrets(policy, facts, egress, notices, env=env, why=why)
    if _intercepts(secrets):
        # Before the marker, which is the last step, and the seal.
        mounts[-2:-2] = [_certificates()]
    mounts[-2:-2] = [Mount(kind="text", dest=README, source=PAGE, rule="always")]
    git_auth = _git_auth(policy, facts, mounts, egress, notices, env=env, why=why)
    moved = _stand_ins(policy, facts, mounts, writable, env)
    home_mode = str(policy.home.value)
    git = facts.git if "@git" in active else None
    return Plan(
        mounts=tuple(mounts),
        env=env,
        env_sources=why,
        cwd=cwd,
        network=policy.network.value == "on",
        docker=policy.docker.value == "on",
        docker_filter=_docker_filter(policy, facts, mounts, entries),
        made=kept.made if kept is not None else (),
        steps=kept.steps if kept is not None else (),
        bare=kept.bare if kept is not None else (),
        seccomp=str(policy.seccomp.value),
        limits=_limits(policy),
        profile=profile.name,
        project=cwd,
        home=facts.home.real,
        home_mode=home_mode,
        home_key=f"{cwd}\0{profile.name}",
        home_points=assemble.home_points(mounts, entries, facts),
        placeholders=assemble.placeholders(mounts),
        git_exclude=_git_exclude(mounts, facts) if git else "",
        awaited=_awaited(policy.rules, facts),
        decided={e.path: str(e.source) for e in entries if e.source.layer > BUILT_IN},
        egress=egress,
        publish=publish,
        secrets=secrets,
        budgets=tuple(s.value for s in policy.budgets if egress is not None),  # type: ignore[misc]
        network_ca=policy.network_ca if egress is not None else "",
        moved=moved,
        git_auth=git_auth,
        notices=(*policy.notices, *notices),
    )


def _claim_state(
    claims: Claims, links: list[Link], policy: Policy, facts: HostFacts, notices: list[str],
    *, writable: list[str],
) -> Outcome | None:  # fmt: skip
    """The state of the chosen profile."""
    if not facts.state:
        return None
    from .profiles.claims import claim

    return claim(claims, links, policy, facts, notices, writable=writable)


def _stand_ins(
    policy: Policy, facts: HostFacts, mounts: list[Mount], writable: list[str], env: dict[str, str]
) -> Mapping[str, str]:
    """Programs in the place of commands; returns where the real ones are."""
    if facts.commands is None:
        return {}
    from . import commands

    shown = commands.seen(facts.commands, mounts)
    made = commands.standing(policy, facts, shown, writable)
    mounts[-2:-2] = made.mounts
    commands.put_first(env)
    return made.moved


def _git_auth(
    policy: Policy, facts: HostFacts, mounts: list[Mount], egress: Egress | None,
    notices: list[str], *, env: dict[str, str], why: dict[str, str],
) -> GitAuth | None:  # fmt: skip
    """Who answers for git's keys and credentials; its socket and variables are put in."""
    if policy.git_auth is None and not policy.git_keys and not policy.git_hosts:
        return None
    from . import gitauth

    found = gitauth.build(policy, facts, writable_roots(policy.rules, facts), egress, notices)
    if found is not None:
        gitauth.put_in(env, why, found)
        mounts[-2:-2] = gitauth.mounts(found, gitauth.rule(policy))
    return found


def _docker_filter(
    policy: Policy, facts: HostFacts, mounts: Iterable[Mount], entries: Iterable[Entry]
) -> DockerFilter | None:
    if policy.docker.value != "filtered":
        return None
    from .dockerfilter import build

    named = {e.path for e in entries if e.source.layer > BUILT_IN}
    return build(policy, facts, mounts, frozenset(named))


class Claims:
    """Collects claims on real paths and keeps the strongest one for each."""

    def __init__(self) -> None:
        self._by_path: dict[str, tuple[tuple[bool, bool, int, int], Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Exact beats glob; then the later layer; within a layer exclude > ro > rw."""
        layer = entry.source.layer
        weight = (layer == MANDATORY, entry.exact, layer, STRENGTH.get(entry.level, 0))
        held = self._by_path.get(entry.path)
        if held is None or weight >= held[0]:
            self._by_path[entry.path] = (weight, entry)

    def winners(self) -> list[Entry]:
        """From shallow to deep, then by name."""
        found = [entry for _, entry in self._by_path.values()]
        found.sort(key=lambda e: (paths.depth(e.path), e.path))
        return found

    def get(self, path: str) -> Entry | None:
        """The claim that holds a path so far."""
        held = self._by_path.get(path)
        return held[1] if held else None


def _built_in(where: str) -> Source:
    return Source(layer=BUILT_IN, where=where)


def _check_project(facts: HostFacts) -> None:
    project, home = facts.cwd.real, facts.home.real
    if paths.within(home, project):
        raise PolicyError(
            f"cannot use '{facts.cwd.path}' as the project: your home directory is in it",
            hint="change to a project directory, or name one with -C DIR",
            code="project-too-wide",
        )
    if project in NOT_A_PROJECT or any(paths.within(project, d) for d in NOT_IN_A_PROJECT):
        raise PolicyError(
            f"cannot use '{facts.cwd.path}' as the project: it is a shared system directory",
            hint="make a directory of its own for the work, or name one with -C DIR",
            code="project-too-wide",
        )
    if paths.within(facts.state_dir, project) or paths.within(project, facts.state_dir):
        raise PolicyError(
            f"cannot use '{facts.cwd.path}' as the project: agent-sandbox keeps its state there",
            hint="change to another directory, or move the state with XDG_STATE_HOME",
            code="project-too-wide",
        )


def _claim_structure(
    claims: Claims, policy: Policy, facts: HostFacts, active: frozenset[str]
) -> None:
    """The parts of the root that are made, not shown."""

    def put(path: str, special: str, token: str = "", where: str = "always") -> None:
        claims.add(
            Entry(
                path=path,
                level=RW,
                kind=DIR,
                exact=True,
                source=_built_in(where),
                special=special,
                token=token,
            )
        )

    if "@host" in active:
        put("/", RO, "/", "preset @host")
        # The host's own /run and /var/tmp must be covered; an empty root has neither.
        put("/run", "tmpfs")
        put("/var/tmp", "private", WORK_VAR_TMP)
    put("/dev", "dev")
    put("/proc", "proc")
    if facts.uid == 0:
        # Root's uid alone may write kernel settings, without any capability; core_pattern would
        # run a program on the host. bwrap covers only directories that are writable themselves.
        _show(claims, [], _plain("/proc/sys"), RO, "kernel settings")
    put(f"/run/user/{facts.uid}", "tmpfs")
    put("/tmp", "private", WORK_TMP)
    home_mode = policy.home.value
    home_rule = f"home = {home_mode} ({policy.home.source})"
    if home_mode == "private":
        put(facts.home.real, "private", PRIVATE_HOME, home_rule)
    elif home_mode == "ephemeral":
        put(facts.home.real, "private", WORK_HOME, home_rule)
    else:
        put(facts.home.real, RO, "", home_rule)
    if "@caches" not in active and home_mode == "private":
        from .presets import CACHES

        for index, cache in enumerate(CACHES):
            put(facts.home.real + cache[1:], "private", f"{WORK_CACHES}/{index}", "no @caches")


def claim_system(
    claims: Claims, links: list[Link], facts: HostFacts, active: frozenset[str]
) -> None:
    """The system's trees, and what must not be seen in them."""
    if "@base" in active:
        for match in facts.system:
            _show(claims, links, match, RO, "preset @base")
    for match in facts.root_secrets:
        _show(claims, [], match, EXCLUDE, "root-only secrets")
    for match in facts.former:
        _show(claims, [], match, EXCLUDE, "excluded by a run in a directory above")
    for match in facts.services:
        # connect(2) works on read-only mounts too: only a mask keeps a service from being reached.
        _show(claims, [], match, EXCLUDE, "socket of a service outside")
    links += facts.home.links
    links += facts.cwd.links
    links.append(Link(at="/var/run", text="../run"))
    links.append(Link(at="/var/tmp", text="../tmp"))


def _show(claims: Claims, links: list[Link], match: Match, level: str, where: str) -> None:
    links += match.links
    claims.add(
        Entry(path=match.real, level=level, kind=match.kind, exact=True, source=_built_in(where))
    )


def _claim_project(
    claims: Claims, links: list[Link], facts: HostFacts, active: frozenset[str]
) -> None:
    git = facts.git if "@git" in active else None
    if git is not None:
        if git.top != facts.cwd.real:
            _show(claims, links, _plain(git.top), RO, "preset @git: rest of the repository")
        for path in (git.common_dir, git.git_dir):
            _show(claims, links, _plain(path), RW, "preset @git: repository metadata")
        for path in git.control:
            kind = DIR if path.endswith("/") else FILE
            _show(claims, links, _plain(path.rstrip("/"), kind), RO, "preset @git: control file")
        for path in git.absent:
            _hold(claims, Named(path=path, kind=DIR, missing=True), "preset @git")
        for path in git.absent_files:
            tracked = not paths.within(path, git.common_dir)
            named = Named(path=path, kind=FILE, missing=True, tracked=tracked)
            _hold(claims, named, "preset @git")
        if git.exclude is not None and any(n.missing and n.kind == FILE for n in facts.control):
            claims.add(
                Entry(
                    path=f"{git.common_dir}/info/exclude", level=RO, kind=FILE, exact=True,
                    source=_built_in("preset @control: held names"), special="copy",
                    token=f"{WORK_GIT}/exclude",
                )
            )  # fmt: skip
    if "@base" in active:
        _show(claims, links, facts.cwd, RW, "preset @base: the project")


def _hold(claims: Claims, named: Named, where: str) -> None:
    """Keep a name that does not exist from being created."""
    view = control.shown(named.path, named.kind) if named.tracked else None
    claims.add(
        Entry(
            path=named.path, level=RO, kind=named.kind, exact=True, special="hold",
            token=view.source if view else "",
            source=_built_in(f"{where}: not there, not to be created"),
        )
    )  # fmt: skip


def _claim_control(claims: Claims, rules: Iterable[Rule], facts: HostFacts) -> None:
    """Control names: read-only where they are, held where they are not."""
    opened = {r.pattern for r in rules if r.level == RW and r.source.layer > BUILT_IN}
    for named in facts.control:
        where = "preset @control" if named.tracked else "profile"
        if not named.missing:
            _show(claims, [], _plain(named.path, named.kind), RO, where)
        elif named.path not in opened:
            _hold(claims, named, where)


def _git_exclude(mounts: Iterable[Mount], facts: HostFacts) -> str:
    """The repository's list of ignored files, with the held names of the project added."""
    git = facts.git
    if git is None or git.exclude is None:
        return ""
    names = [m.dest for m in mounts if m.kind == "hold" and m.source]
    held = [path for path in names if paths.below(path, git.top)]
    if not held:
        return ""
    lines = "".join(f"{path[len(git.top) :]}\n" for path in held)
    return f"{git.exclude}\n# Names that agent-sandbox keeps from being created.\n{lines}"


def _claim_git_config(
    claims: Claims, facts: HostFacts, writable: list[str], *, shows_home: bool
) -> None:
    """The user's git configuration at the place where git looks, never through a planted link."""
    for index, config in enumerate(facts.git_config):
        if _leads_out(config.path, config.real, config.links, writable):
            continue
        # With the real home shown, a link of the user is there already; a mount needs its target.
        path = config.real if shows_home else config.path
        if claims.get(path) is None:
            claims.add(
                Entry(
                    path=path,
                    level=RO,
                    kind=FILE,
                    exact=True,
                    source=_built_in("git configuration"),
                    token=f"{WORK_GIT}/{index}" if config.cleaned is not None else config.real,
                    special="copy",
                )
            )


def claim_naming(claims: Claims, links: list[Link], facts: HostFacts) -> None:
    """Our own files about names, in place of the host's, where a stub of ours answers."""
    if not facts.naming:
        return
    from .naming import copy_name

    for match in facts.naming:
        links += match.links
        claims.add(
            Entry(
                path=match.real, level=RO, kind=FILE, exact=True, special="copy",
                token=f"{WORK_NET}/{copy_name(match.path)}", source=_built_in("name resolution"),
            )
        )  # fmt: skip


def _claim_path(claims: Claims, links: list[Link], facts: HostFacts, writable: list[str]) -> None:
    """Directories on PATH that nothing else shows.

    A directory that the sandbox can write must not choose what else is shown, and a careless PATH
    must not uncover what the sandbox makes for itself.
    """
    for match in facts.path_dirs:
        own = match.real in OWN_DIRECTORIES or any(
            paths.within(match.real, tree) for tree in ("/run", "/dev", "/proc", "/sys")
        )
        reached = any(
            paths.within(place, root)
            for place in (match.path, match.real, *(link.at for link in match.links))
            for root in (*writable, facts.cwd.path)
        )
        if not own and not reached and not paths.within(facts.home.real, match.real):
            _show(claims, links, match, RO, "preset @toolchains: PATH")


def _claim_launchers(
    claims: Claims, links: list[Link], facts: HostFacts, writable: list[str]
) -> None:
    """Our shims: the host runs them, so they are read-only also where what is around them is not.

    Through a link only if it is the user's own and leads to nothing secret.
    """
    for match in facts.launchers:
        if match.links and (planted(match, writable) or _reaches_secrets(match.real, facts)):
            continue
        _show(claims, links, match, RO, "launchers of agent-sandbox")
    if facts.launchers_missing:
        # What lies there when the first shim is made comes first on PATH with it.
        missing = Named(path=facts.launchers_missing, kind=DIR, missing=True, tracked=False)
        _hold(claims, missing, "launchers of agent-sandbox")


def _plain(path: str, kind: str = DIR) -> Match:
    return Match(path=path, real=path, kind=kind)


def _claim_rules(
    claims: Claims, links: list[Link], rules: Iterable[Rule], facts: HostFacts, notices: list[str]
) -> None:
    writable = writable_roots(rules, facts)
    # Opened by name before it exists: then it may be created.
    held = {named.path for named in facts.control if named.missing}
    for rule in rules:
        found = facts.matches.get(rule.pattern, ())
        if not found and not rule.quiet and not (rule.level == RW and rule.pattern in held):
            notices.append(_missing(rule))
        for match in found:
            if rule.quiet and match.links and _reaches_secrets(match.real, facts):
                notices.append(
                    f"'{rule.pattern}' ({rule.source}) is not shown: it is a link to secrets, "
                    f"'{match.real}'"
                )
                continue
            stray = planted(match, writable)
            if stray is not None and rule.level != EXCLUDE:
                _refuse_link(rule, match, stray, notices)
                continue
            _check_reserved(rule, match, facts)
            if rule.level == RW and paths.within(facts.home.real, match.real):
                notices.append(
                    f"{rule.source} makes your whole home writable: "
                    "what runs inside can change what you run later"
                )
            if rule.level != EXCLUDE:
                links += match.links
            claims.add(
                Entry(
                    path=match.real,
                    level=rule.level,
                    kind=match.kind,
                    exact=not rule.glob,
                    source=rule.source,
                )
            )


def _reaches_secrets(real: str, facts: HostFacts) -> bool:
    """Whether a path that a built-in rule was led to is, holds or lies in credentials."""
    # Only for links, which are rare: an earlier run may have planted one in place of a toolchain.
    from .secrets import HOME

    home = facts.home.real
    return paths.within(home, real) or any(
        paths.within(real, home + path[1:]) or paths.within(home + path[1:], real) for path in HOME
    )


def _awaited(rules: Iterable[Rule], facts: HostFacts) -> tuple[str, ...]:
    """Excluded names that do not exist: one that appears outside during the run is to be hidden."""
    wanted = [r.pattern for r in rules if r.level == EXCLUDE and not r.glob and not r.quiet]
    return tuple(p for p in wanted if p not in facts.matches and paths.below(p, facts.cwd.real))


def writable_roots(rules: Iterable[Rule], facts: HostFacts) -> list[str]:
    """Trees that a sandbox may have written before, so that their links prove nothing."""
    roots = [facts.cwd.real]
    if facts.git is not None:
        roots.append(facts.git.common_dir)
    found = [
        match for rule in rules if rule.level == RW for match in facts.matches.get(rule.pattern, ())
    ]
    roots += [match.real for match in found if not match.links]
    # A writable tree may lie behind a link of the user, but not behind one that is in a tree
    # that is writable already.
    roots += [match.real for match in found if match.links and planted(match, roots) is None]
    return roots


def planted(match: Match, writable: Iterable[str]) -> Link | None:
    """A link in a sandbox-writable tree that leads out of that tree, if the path has one."""
    for link in match.links:
        for root in writable:
            if paths.below(link.at, root) and not paths.within(match.real, root):
                return link
    return None


def _leads_out(path: str, real: str, links: tuple[Link, ...], writable: list[str]) -> bool:
    """Whether a sandbox decides where `path` leads."""
    match = Match(path=path, real=real, kind=FILE, links=links)
    return planted(match, writable) is not None or any(
        paths.within(path, root) and not paths.within(real, root) for root in writable
    )


def _refuse_link(rule: Rule, match: Match, link: Link, notices: list[str]) -> None:
    """A sandbox could have planted the link: an explicit rule is an error, a preset's skipped."""
    message = (
        f"cannot follow '{link.at}' for {rule.source}: a sandbox can write there, "
        f"and the link leads out to '{match.real}'"
    )
    if not rule.quiet:
        raise PolicyError(
            message,
            hint=f"name '{match.real}' itself if you mean it, or remove the link",
            code="planted-link",
        )
    notices.append(message)


def _missing(rule: Rule) -> str:
    written = rule.written or rule.pattern
    if rule.level == EXCLUDE:
        return f"exclude '{written}' ({rule.source}) matches nothing: nothing is hidden by it"
    return f"{rule.level} '{written}' ({rule.source}) skipped: no such path"


def _check_reserved(rule: Rule, match: Match, facts: HostFacts) -> None:
    reserved = match.real in RESERVED or any(
        paths.within(match.real, tree) for tree in RESERVED_TREES
    )
    own_state = rule.level != EXCLUDE and paths.within(match.real, facts.state_dir)
    if (reserved or own_state) and rule.source.layer != MANDATORY:
        raise PolicyError(
            f"cannot use '{rule.written or rule.pattern}' in {rule.source}: reserved path",
            hint="the sandbox makes this directory itself; for the whole host use preset @host",
            code="reserved-path",
        )


def _claim_mandatory(claims: Claims, facts: HostFacts, notices: list[str]) -> None:
    """Our own state and code: whoever can write them decides what the next sandbox trusts."""
    if facts.own_code:
        notices.append(
            "agent-sandbox is installed in the project and stays read-only there: "
            "install it elsewhere to work on it or on its environment"
        )
    for match in facts.own_code:
        own = Source(layer=MANDATORY, where="agent-sandbox's own code")
        claims.add(Entry(path=match.real, level=RO, kind=match.kind, exact=True, source=own))
    if facts.config_dir:
        # The user's own policy file needs no trust, so nobody inside may write one.
        own = Source(layer=MANDATORY, where="agent-sandbox's own settings")
        claims.add(
            Entry(
                path=facts.config_dir, level=RO, kind=DIR, exact=True, source=own,
                special="hold" if facts.config_missing else "",
            )
        )  # fmt: skip
    source = Source(layer=MANDATORY, where="agent-sandbox's own state")
    claims.add(Entry(path=facts.state_dir, level=EXCLUDE, kind=DIR, exact=True, source=source))


def _check_working_directory(claims: Claims, facts: HostFacts) -> None:
    cwd = facts.cwd.real
    for path in (cwd, *paths.parents(cwd)):
        entry = claims.get(path)
        if entry is not None and entry.level == EXCLUDE:
            raise PolicyError(
                f"cannot run in '{facts.cwd.path}': '{path}' is excluded by {entry.source}",
                hint="run from another directory, or take the exclude out",
                code="cwd-excluded",
            )


def outward(policy: Policy, notices: list[str]) -> tuple[Egress | None, tuple[Publish, ...]]:
    """What may leave through a proxy, and which ports lead inside."""
    held = policy.deny or policy.publish or policy.budgets
    if policy.network.value not in CONTROLLED and not held:
        return None, ()
    # Not for on and off.
    from . import network

    return network.outward(policy, notices)


def _secrets(
    policy: Policy, facts: HostFacts, egress: Egress | None, notices: list[str], *,
    env: dict[str, str], why: dict[str, str],
) -> tuple[Secret, ...]:  # fmt: skip
    """Which values the proxy puts into requests; their placeholders take the variables' place."""
    if not policy.secrets:
        return ()
    from . import credentials

    found = credentials.active(policy, egress, facts.env, notices)
    credentials.put_in(env, why, policy, found)
    return found


def _intercepts(secrets: Iterable[Secret]) -> bool:
    return any(not one.base_url for one in secrets)


def _certificates() -> Mount:
    """The proxy's own certificate and the host's, before the root is sealed."""
    from .credentials import BUNDLE, BUNDLE_FILE

    source = f"{WORK_NET}/{BUNDLE_FILE}"
    return Mount(kind="ro", dest=BUNDLE, source=source, level=RO, file=True, rule="secrets")


def _limits(policy: Policy) -> Limits:
    def number(key: str) -> float | None:
        value = policy.limits[f"limits.{key}"].value
        return value if isinstance(value, (int, float)) and value != NO_LIMIT else None

    def whole(key: str) -> int | None:
        value = number(key)
        return None if value is None else int(value)

    asked = policy.limits["limits.pids"].source.layer > BUILT_IN
    return Limits(
        timeout=number("timeout"), memory=whole("memory"), cpu_time=number("cpu-time"),
        pids=whole("pids") if asked else None, default_pids=None if asked else whole("pids"),
        tmp_size=whole("tmp-size"),
    )  # fmt: skip


def widened_paths(policy: Policy, facts: HostFacts, below: Plan, made: Plan) -> list[str]:
    """Project path rules through which the plan shows more than the plan without them."""
    from .explain import look_up
    from .merge import is_project

    found = []
    for rule in policy.rules:
        if not is_project(rule) or rule.level == EXCLUDE:
            continue
        for match in facts.matches.get(rule.pattern, ()):
            was, now = look_up(below, match.real).level, look_up(made, match.real).level
            if now in (RO, RW) and was not in (RW, now):
                found.append(f"{rule.level} '{rule.written}'")
                break
    return found
