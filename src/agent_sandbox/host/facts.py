"""Gathers HostFacts: everything the policy needs to know about this machine, in one pass."""

from __future__ import annotations

import os
import sys

from ..errors import HostError, UsageError, reason
from ..policy import control, engines, paths, secrets
from ..policy.model import (
    BUILT_IN,
    CONTROLLED,
    DIR,
    EXCLUDE,
    SOCKET,
    HostFacts,
    Match,
    Named,
    Policy,
)  # fmt: skip
from . import files, git, placeholders
from .locate import Locator, expand_globs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ..policy.commands import Programs
    from ..policy.gitauth import Outside
    from ..policy.model import ConfigFile, GitLayout, Rule
    from ..policy.profiles.claims import Found

SYSTEM_TREES = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu",
    # Package databases, certificates and alternatives that tools look up.
    "/var/lib/dpkg", "/var/lib/rpm", "/var/lib/pacman", "/var/lib/apk", "/var/lib/alternatives",
    "/var/lib/ca-certificates", "/var/lib/ghc",
    # What runtimes read to size their thread pools.
    "/sys/devices/system/cpu",
)  # fmt: skip
# Where the sandbox has directories of its own, so that nothing of the host is seen.
NEVER_SHOWN = ("/run/", "/var/run/", "/tmp/", "/dev/", "/proc/", "/sys/")
RESOLV_CONF = "/etc/resolv.conf"


class Place(Match):
    """Who runs and where: known before any policy file is read."""

    uid: int
    gid: int
    user: str
    home: Match
    state_dir: str


def place(env: Mapping[str, str], cwd: str | None, locator: Locator) -> Place:
    """The user, the home and the working directory."""
    uid = os.getuid()
    home = _home(env, uid, locator)
    here = _working_directory(env, cwd, locator)
    return Place(
        path=here.path, real=here.real, kind=here.kind, links=here.links,
        uid=uid, gid=os.getgid(), user=env.get("USER", "") or str(uid), home=home,
        state_dir=state_dir(env, home.real, uid),
    )  # fmt: skip


def _home(env: Mapping[str, str], uid: int, locator: Locator) -> Match:
    path = env.get("HOME", "")
    if not path:
        # Only when HOME is unset: the user database costs a file read.
        import pwd

        try:
            path = pwd.getpwuid(uid).pw_dir
        except KeyError:
            path = ""
    if not path.startswith("/") or paths.normalise(path) == "/":
        raise HostError(
            f"cannot use '{path}' as the home directory",
            hint="set HOME to an absolute path other than '/'",
            code="bad-home",
        )
    path = paths.normalise(path)
    found = locator.find(path)
    if found is None:
        return Match(path=path, real=os.path.realpath(path), kind="dir")
    if found.kind != "dir":
        raise HostError(
            f"cannot use '{path}' as the home directory: not a directory", code="bad-home"
        )
    return found


def _working_directory(env: Mapping[str, str], wanted: str | None, locator: Locator) -> Match:
    try:
        actual = os.getcwd()
    except OSError as error:
        raise HostError(
            f"cannot read the working directory: {reason(error)}",
            hint="change to a directory that exists",
            code="bad-cwd",
        ) from error
    # The shell's PWD keeps the name that the user typed, if it still leads here.
    logical = env.get("PWD", "")
    if not logical.startswith("/") or not _same(logical, actual):
        logical = actual
    path = paths.normalise(logical) if wanted is None else _joined(logical, wanted)
    found = locator.find(path)
    if wanted is not None and found is not None:
        _check_named(wanted, found, actual, env)
    if found is None or found.kind != "dir":
        raise UsageError(
            f"cannot run in '{wanted or path}': "
            + ("not a directory" if found else "no such directory"),
            code="bad-cwd",
        )
    return found


def _check_named(wanted: str, found: Match, here: str, env: Mapping[str, str]) -> None:
    """Refuse a directory that a link in the caller's own leads out to: a sandbox may have made it.

    Not from the home or above it: no sandbox ever had that as its project.
    """
    home = os.path.realpath(env.get("HOME") or "/")
    planted = any(paths.below(link.at, here) for link in found.links)
    if planted and not paths.within(found.real, here) and not paths.within(home, here):
        raise UsageError(
            f"cannot run in '{wanted}': a link in this directory leads out to '{found.real}'",
            hint=f"name it yourself if you mean it: -C '{found.real}'",
            code="planted-link",
        )


def _joined(base: str, path: str) -> str:
    if not path:
        raise UsageError("cannot run in '': empty path", code="bad-cwd")
    # `..` after a link must mean what the kernel means, so only plain paths are cleaned lexically.
    joined = path if path.startswith("/") else f"{base}/{path}"
    return os.path.realpath(joined) if ".." in joined.split("/") else paths.normalise(joined)


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))
    except OSError:
        return False


def state_dir(env: Mapping[str, str], home: str, uid: int) -> str:
    """Where private homes, workspaces and trust live: never visible to a sandbox."""
    base = env.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = f"{home}/.local/state"
    if not _usable(base):
        # Service users often have no home; /var/tmp survives and is on disk. The directory's
        # owner and mode are checked when it is opened.
        return f"/var/tmp/agent-sandbox-{uid}"
    return os.path.realpath(f"{base}/agent-sandbox")


def _usable(base: str) -> bool:
    """Whether the nearest existing ancestor of `base` can be written."""
    while not os.path.lexists(base):
        base = paths.parent(base)
    return os.access(base, os.W_OK | os.X_OK)


def gather(policy: Policy, at: Place, env: Mapping[str, str], locator: Locator) -> HostFacts:
    """Look up everything that the policy mentions."""
    for directory in (at.home.real, at.real, "/etc", "/run"):
        locator.learn(directory)
    sockets = _engine_sockets(at, env, locator)
    wanted, docker = "", None
    if policy.docker.value != "off":
        wanted, docker = _docker_socket(at, env, locator)
    active = {str(p.value) for p in policy.presets}
    held = placeholders.recorded(at.state_dir)
    git_config = git.user_config(at.home, env, locator, at.real)
    hooks = git.user_hooks_path(git_config)
    git_auth, git_config = _git_auth(policy, at, env, locator, git_config)
    matches = _with_memories(policy.rules, _matches(policy.rules, locator), at)
    layout = _git_layout(at, active, hooks, held)
    roots = [at.real, *([layout.common_dir] if layout else ())]
    named = [r.pattern for r in policy.rules if r.source.layer > BUILT_IN]
    roots += [match.real for pattern in named for match in matches.get(pattern, ())]
    state = _state(policy, locator, at)
    config_dir = os.path.realpath(paths.parent(files.global_stem(env, at.home.real)))
    if not os.path.isdir(config_dir):
        config_dir = first_missing(config_dir)
    return HostFacts(
        uid=at.uid, gid=at.gid, user=at.user, home=at.home,
        cwd=Match(path=at.path, real=at.real, kind=at.kind, links=at.links),
        env=env, state_dir=at.state_dir,
        system=_found(SYSTEM_TREES, locator),
        path_dirs=_path_dirs(env, at.home.real, locator),
        matches=matches,
        resolver=_resolver(locator),
        naming=_naming(policy, locator),
        engine_sockets=sockets, docker_socket=docker, docker_wanted=wanted,
        git=layout,
        git_config=git_config, git_auth=git_auth,
        root_secrets=_root_secrets(at.uid, locator),
        services=_services(locator, roots),
        config_dir=config_dir, config_missing=not os.path.isdir(config_dir),
        former=_former(layout, at),
        control=_control(policy, at, active, locator, held=held, made=[f.at for f in state]),
        state=state,
        own_code=_own_code(at.real, locator),
        **_launchers(env, at.home.real, locator),
        commands=_commands(policy, at, env, locator),
    )  # fmt: skip


def _launchers(env: Mapping[str, str], home: str, locator: Locator) -> dict[str, Any]:
    """Our shims and the like: other programs' settings name them by path, also inside."""
    named = env.get("XDG_DATA_HOME", "")
    base = named if named.startswith("/") else f"{home}/.local/share"
    place = f"{base}/agent-sandbox"
    if not os.path.isdir(place):
        free = os.path.isdir(base) and not os.path.lexists(place)
        return {"launchers_missing": f"{os.path.realpath(base)}/agent-sandbox"} if free else {}
    found = locator.find(place)
    return {"launchers": (found,) if found is not None and found.kind == "dir" else ()}


def _state(policy: Policy, locator: Locator, at: Place) -> tuple[Found, ...]:
    """The state of the chosen profile, where there is one."""
    if not policy.parts:
        return ()
    from . import agentstate

    return agentstate.find(policy.parts, locator, at.state_dir, at.real)


def _commands(
    policy: Policy, at: Place, env: Mapping[str, str], locator: Locator
) -> Programs | None:
    """The programs that command rules name, where there are any."""
    if not policy.commands:
        return None
    from . import commands

    put = policy.env_set.get("PATH")
    path = str(put.value) if put is not None else env.get("PATH", "")
    return commands.find(policy.commands, path, cwd=at.real, home=at.home.real, locator=locator)


def _git_auth(
    policy: Policy, at: Place, env: Mapping[str, str], locator: Locator,
    configs: tuple[ConfigFile, ...],
) -> tuple[Outside | None, tuple[ConfigFile, ...]]:  # fmt: skip
    """What there is for keys and credentials, and git's configuration with signing in it."""
    if policy.git_auth is None:
        return None, configs
    from . import gitauth

    return gitauth.gather(policy, at.home, env, locator, configs)


def _git_layout(
    at: Place, active: set[str], hooks: str | None, held: frozenset[str]
) -> GitLayout | None:
    if "@git" not in active:
        return None
    found = git.layout(at, strict="@git-strict" in active, hooks_path=hooks)
    if found is None or not held:
        return found
    # What another run has put there is not there: it goes when that run ends.
    there = [path for path in found.control if path.rstrip("/") not in held]
    taken = [path for path in found.control if path.rstrip("/") in held]
    return found.replace(
        control=tuple(there),
        absent=(*found.absent, *(path[:-1] for path in taken if path.endswith("/"))),
        absent_files=(*found.absent_files, *(path for path in taken if not path.endswith("/"))),
    )


def _found(wanted: Iterable[str], locator: Locator) -> tuple[Match, ...]:
    located = (locator.find(path) for path in wanted)
    return tuple(match for match in located if match is not None)


def _path_dirs(env: Mapping[str, str], home: str, locator: Locator) -> tuple[Match, ...]:
    wanted = dict.fromkeys(
        _tool_root(paths.normalise(part), home)
        for part in env.get("PATH", "").split(":")
        if part.startswith("/")
    )
    return tuple(m for m in _found(wanted, locator) if m.kind == "dir")


def _tool_root(directory: str, home: str) -> str:
    """A Python environment's `bin` is of no use without the rest of it.

    Never an agent's state: a sandbox that writes there could turn it into an environment.
    """
    root, _, name = directory.rpartition("/")
    if name != "bin" or not os.path.isfile(f"{root}/pyvenv.cfg"):
        return directory
    from ..policy.profiles.builtin import PROFILES

    states = [home + state.path[1:] for profile in PROFILES for state in profile.state]
    shared = any(paths.within(root, s) or paths.within(s, root) for s in states)
    return directory if shared else root


def _matches(rules: Iterable[Rule], locator: Locator) -> dict[str, tuple[Match, ...]]:
    found: dict[str, tuple[Match, ...]] = {}
    globs = []
    for rule in rules:
        if rule.glob:
            globs.append(rule.pattern)
        elif rule.pattern not in found:
            match = locator.find(rule.pattern)
            if match is not None:
                found[rule.pattern] = (match,)
    if globs:
        for pattern, hits in expand_globs(globs).items():
            found[pattern] = _found(hits, locator)
    return found


def _with_memories(
    rules: Iterable[Rule], matches: dict[str, tuple[Match, ...]], at: Place
) -> dict[str, tuple[Match, ...]]:
    """The matches, and what excludes have hidden in earlier runs under other names."""
    if not any(r.level == EXCLUDE and r.source.layer > BUILT_IN for r in rules):
        return matches
    # Only here: most runs exclude nothing by name.
    from . import memory

    for pattern, more in memory.recall(rules, matches, at.state_dir, at.real).items():
        matches[pattern] = (*matches.get(pattern, ()), *more)
    return matches


def _naming(policy: Policy, locator: Locator) -> tuple[Match, ...]:
    """Files about names that are to be replaced."""
    if policy.network.value not in CONTROLLED:
        return ()
    from . import names

    return names.files(locator)


def _resolver(locator: Locator) -> Match | None:
    """What /etc/resolv.conf leads to, when it is a link: often into /run, which is not shown."""
    found = locator.find(RESOLV_CONF)
    return found if found is not None and found.links else None


def _runtime_dirs(at: Place, env: Mapping[str, str]) -> tuple[str, ...]:
    named = env.get("XDG_RUNTIME_DIR", "")
    standard = f"/run/user/{at.uid}"
    return (named, standard) if named.startswith("/") and named != standard else (standard,)


def _engine_sockets(at: Place, env: Mapping[str, str], locator: Locator) -> tuple[Match, ...]:
    wanted = engines.candidates(env, at.home.real, _runtime_dirs(at, env))
    return _found([*wanted, *_context_sockets(_docker_config(at.home.real, env))], locator)


def _context_sockets(config: str) -> list[str]:
    """Unix sockets named in the metadata of docker contexts, read as text: no JSON parser here."""
    found = []
    base = f"{config}/contexts/meta"
    try:
        names = os.listdir(base)
    except OSError:
        return []
    for name in names:
        try:
            with open(f"{base}/{name}/meta.json", "rb") as file:
                text = file.read(65536).decode("utf-8", "replace")
        except OSError:
            continue
        if "\\u" in text:
            text = _unescaped(text)
        for piece in text.replace("\\/", "/").split("unix://")[1:]:
            path = piece.split('"', 1)[0]
            if path.startswith("/") and "\0" not in path:
                found.append(path)
    return found


def _unescaped(text: str) -> str:
    """A JSON text without escapes; docker itself writes none, so the parser is loaded seldom."""
    import json

    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _docker_config(home: str, env: Mapping[str, str]) -> str:
    named = env.get("DOCKER_CONFIG", "")
    return named if named.startswith("/") else f"{home}/.docker"


def _docker_socket(at: Place, env: Mapping[str, str], locator: Locator) -> tuple[str, Match | None]:
    """The socket that the docker command line would use, by its own order of precedence."""
    address = env.get("DOCKER_HOST", "")
    if address:
        path = engines.unix_path(address)
        if path is None or not path.startswith("/"):
            raise HostError(
                f"cannot expose the container engine at '{address}': not a unix socket",
                hint="unset DOCKER_HOST, or pass it with --env DOCKER_HOST and no --docker",
                code="docker-not-unix",
            )
    else:
        path = _current_context(at.home.real, env) or engines.STANDARD
    match = locator.find(path)
    if match is not None and match.kind != "socket":
        match = None
    return path, match


def _current_context(home: str, env: Mapping[str, str]) -> str | None:
    """The unix socket of docker's current context. Only with --docker: imports are paid there."""
    import hashlib
    import json

    name = env.get("DOCKER_CONTEXT", "")
    config = _docker_config(home, env)
    try:
        if not name:
            with open(f"{config}/config.json", "rb") as file:
                name = str(json.load(file).get("currentContext", ""))
        if name in ("", "default"):
            return None
        key = hashlib.sha256(name.encode()).hexdigest()
        with open(f"{config}/contexts/meta/{key}/meta.json", "rb") as file:
            address = json.load(file)["Endpoints"]["docker"]["Host"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return engines.unix_path(str(address))


def _former(layout: GitLayout | None, at: Place) -> tuple[Match, ...]:
    """What runs in a directory above have hidden.

    The rest of the repository is shown, and a sandbox may have made that repository.
    """
    if layout is None or layout.top == at.real:
        return ()
    from . import memory

    above = [at.real, *paths.parents(at.real)]
    above = above[: above.index(layout.top) + 1]
    return tuple(
        match for place in above for match in memory.still_there(memory.read(at.state_dir, place))
    )


def _services(locator: Locator, roots: Iterable[str]) -> tuple[Match, ...]:
    """Sockets that are bound to a path now, by proc_net(5), where a sandbox may show them.

    One that was bound by a relative path is looked for in the directories that are shown.
    """
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return ()
    wanted = []
    for line in lines:
        # The path is last, after a space; an abstract name begins with '@'.
        start = line.find(" /")
        if start > 0 and not line.startswith(NEVER_SHOWN, start + 1):
            wanted.append(line[start + 1 :])
        elif start < 0 or line.startswith("/proc/", start + 1):
            # Seven columns, and then the name if it has one. One below /proc/self/fd is relative
            # as well, to an open directory.
            name = line.split(maxsplit=7)[7:]
            if name and not name[0].startswith("@") and name[0] != "Path":
                short = name[0].rpartition("/")[2] if start > 0 else name[0]
                wanted += [paths.normalise(f"{root}/{short}") for root in roots]
    return tuple(m for m in _found(dict.fromkeys(wanted), locator) if m.kind == SOCKET)


def _control(
    policy: Policy, at: Place, active: set[str], locator: Locator, *, held: frozenset[str],
    made: Iterable[str],
) -> tuple[Named, ...]:  # fmt: skip
    """The names that the host would act on: those of the project, and of a profile's state.

    What another run holds counts as missing: it goes with that run.
    """
    found = []
    if "@control" in active:
        names = {n for n in locator.names(at.real) if f"{at.real}/{n}" not in held}
        writable = os.access(at.real, os.W_OK)
        for name, kind in control.names(names):
            path = f"{at.real}/{name}"
            there = path not in held and ("/" in name or name in names)
            named = _named(path, kind, locator.find(path) if there else None, at.real)
            if named is not None and (writable or not named.missing):
                found.append(named)
    for rule in policy.rules:
        # A profile's protected paths; those that are there are rules like any other.
        if rule.held and (rule.pattern in held or locator.find(rule.pattern) is None):
            from .agentstate import held_state

            found += held_state(rule.pattern, made)
    return tuple(found)


def _named(path: str, kind: str, match: Match | None, project: str) -> Named | None:
    """A control name of the project as it is; None for what cannot be held."""
    if match is None:
        return _missing(path, kind, project)
    if match.kind == SOCKET:
        # The placeholder of another run; nobody has a socket of that name.
        return Named(path=path, kind=kind, missing=True)
    if match.links and not paths.below(match.real, project):
        return None
    # A link cannot be covered, but what it leads to can.
    return Named(path=match.real, kind=match.kind, missing=False)


def _missing(path: str, kind: str, project: str) -> Named | None:
    """A control name that is not there, or the missing end of a link that is."""
    if not os.path.islink(path):
        return Named(path=path, kind=kind, missing=True)
    target = os.path.realpath(path)
    first = first_missing(target)
    if not paths.below(first, project):
        return None
    return Named(path=first, kind=kind if first == target else DIR, missing=True)


def first_missing(path: str) -> str:
    """Of a path and those above it, the uppermost that does not exist."""
    while not os.path.lexists(paths.parent(path)):
        path = paths.parent(path)
    return path


def _own_code(project: str, locator: Locator) -> tuple[Match, ...]:
    """Our package, its environment and the checkout's launchers, as far as the project has them.

    The host runs them at the next start: a sandbox that could change them would be out.
    """
    package = paths.parent(paths.parent(os.path.realpath(__file__)))
    wanted = [package]
    if sys.prefix != sys.base_prefix:
        wanted.append(sys.prefix)
    checkout = paths.parent(paths.parent(package))
    if os.path.isfile(f"{checkout}/agent-sandbox"):
        names = ("agent-sandbox", "sandboxctl", ".venv", "src", "pyproject.toml")
        wanted += [f"{checkout}/{name}" for name in names]
    return tuple(m for m in _found(wanted, locator) if paths.below(m.real, project))


def _root_secrets(uid: int, locator: Locator) -> tuple[Match, ...]:
    wanted = list(secrets.SYSTEM)
    for directory, head, tail in secrets.SYSTEM_PATTERNS:
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        wanted += [f"{directory}/{n}" for n in names if n.startswith(head) and n.endswith(tail)]
    if uid == 0:
        wanted += _closed_entries("/etc")
    # What this user cannot read, the sandbox cannot either: the kernel checks the same identity.
    # Being allowed to pass through a directory is enough to read a file whose name is known.
    return tuple(
        m
        for m in _found(wanted, locator)
        if os.access(m.real, os.R_OK) or (m.kind == "dir" and os.access(m.real, os.X_OK))
    )


def _closed_entries(directory: str) -> list[str]:
    """Entries of a directory that are closed to others; root owns them, capabilities or not."""
    found = []
    with os.scandir(directory) as scanned:
        for item in scanned:
            # Locks and half-written copies of the user database come and go; a mask on one that
            # has gone would stop the start.
            ending = item.name.rpartition(".")[2]
            if item.is_symlink() or ending == "lock" or ending.endswith("+") or ending.isdigit():
                continue
            try:
                info = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not info.st_mode & 0o005 and info.st_size:
                found.append(item.path)
    return found
