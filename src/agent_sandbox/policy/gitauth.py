"""Keys and credentials for git: what a run may have signed and handed in, and by whom. Pure.

Private keys stay in the agent outside. A process of ours stands between (`proxy/gitauth`): it
shows the named keys alone, signs logins to the named hosts and git's own signatures, and asks the
user's credential helper for the named hosts. One socket for both: an agent's messages begin with a
NUL, git's questions with a letter.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import paths
from .hostnames import canonical
from .model import CONTROLLED, FLAGS, WORK_GIT_AUTH, Mount
from .publickeys import FORMS, key_name
from .trails import BREAKS, mentioned, sound, weak_spot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .model import HostFacts, Policy, Setting
    from .network import Egress
    from .trails import Way

NONE, AGENT, HELPER, BOTH = "none", "ssh-agent", "helper", "both"
# Any host, for an agent that cannot tell which host a login is for.
ANY = "*"
SSH_PORT, HTTPS_PORT = 22, 443
MAX_PORT = 65535

SOCKET = "git-auth.sock"
INSIDE = f"/run/agent-sandbox/{SOCKET}"
SSH_CONFIG = "/run/agent-sandbox/ssh_config"
KNOWN_HOSTS = "/run/agent-sandbox/known_hosts"
HOST_FORMS = "write github.com or git.example.com:2222"
# What may be seen and decided by whoever runs `git credential` outside. A list: a variable such as
# PYTHONPATH may lead into the project, and a helper would run what lies there.
HELPER_ENV: frozenset[str] = frozenset(
    """
    HOME USER LOGNAME LANG TZ
    XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME XDG_STATE_HOME XDG_RUNTIME_DIR
    DBUS_SESSION_BUS_ADDRESS DISPLAY WAYLAND_DISPLAY XAUTHORITY SSH_AUTH_SOCK
    GNUPGHOME PASSWORD_STORE_DIR BW_SESSION OP_SERVICE_ACCOUNT_TOKEN
    GH_TOKEN GITHUB_TOKEN GH_ENTERPRISE_TOKEN GH_HOST GH_CONFIG_DIR GITLAB_TOKEN GLAB_CONFIG_DIR
    GCM_CREDENTIAL_STORE GCM_CREDENTIAL_CACHE_OPTIONS GCM_PLAINTEXT_STORE_PATH
    GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_CONFIG_NOSYSTEM
    SSL_CERT_FILE SSL_CERT_DIR http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY
    ALL_PROXY NO_PROXY
    """.split()
)


class Outside(Record):
    """What the machine has for it."""

    # The user's agent; empty where there is none.
    agent: str = ""
    # (kind, text) of keys, with files replaced by the fingerprints of what is in them.
    names: tuple[tuple[str, str], ...] = ()
    # Files with keys of hosts, behind every link.
    known_hosts: tuple[str, ...] = ()
    # What of it may be read inside.
    known_text: str = ""
    # Where programs are looked for.
    path: tuple[Way, ...] = ()
    # Every file that decides something, and what it is: none of them may be a sandbox's.
    deciding: tuple[tuple[str, Way], ...] = ()
    # Where git is: the directory of PATH, behind every link, and the way to the program in it.
    programs: tuple[tuple[str, Way], ...] = ()
    # Paths in variables that a helper would see.
    variables: tuple[tuple[str, Way], ...] = ()
    notices: tuple[str, ...] = ()


class GitAuth(Record):
    """What the process outside is told."""

    ssh: bool
    https: bool
    # Host, and a port or 0 for the usual ones.
    hosts: tuple[tuple[str, int], ...]
    any_host: bool
    names: tuple[tuple[str, str], ...]
    agent: str
    known_hosts: tuple[str, ...]
    known_text: str
    # For `git credential`, outside.
    env: Mapping[str, str]
    # Where the command can write: what git says at the start must not lead there.
    writable: tuple[str, ...] = ()


# --- from a policy file or a flag


def split_host(text: str) -> tuple[str, int]:
    """A canonical host, and its port or 0. ValueError for what is not exactly that."""
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or ":" not in host:
            raise ValueError("the brackets are not those of an IPv6 address")
        port, explicit = rest[1:], bool(rest)
    else:
        host, colon, port = text.partition(":")
        explicit = bool(colon)
    if not explicit:
        return canonical(host), 0
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or not 0 < int(port) <= MAX_PORT:
        raise ValueError("the port is not a number")
    return canonical(host), int(port)


def check_hosts(texts: Iterable[str], where: str) -> None:
    """Refuse what is not a host."""
    for text in texts:
        if text == ANY:
            continue
        try:
            split_host(text)
        except ValueError as error:
            raise _bad("git.hosts", where, f"'{text}': {error}", HOST_FORMS) from None


def check_keys(texts: Iterable[str], where: str) -> None:
    """Refuse what cannot be the name of a key."""
    for text in texts:
        try:
            key_name(text)
        except ValueError as error:
            raise _bad("git.keys", where, str(error), FORMS) from None


def _bad(key: str, where: str, problem: str, hint: str) -> PolicyError:
    return PolicyError(f"cannot use {key} in {where}: {problem}", hint=hint, code="bad-value")


def wants(auth: Setting | None, kind: str) -> bool:
    """Whether the agent (AGENT) or the helper (HELPER) is asked for."""
    return auth is not None and auth.value in (kind, BOTH)


# --- in a plan


def build(
    policy: Policy, facts: HostFacts, writable: Sequence[str], egress: Egress | None,
    notices: list[str],
) -> GitAuth | None:  # fmt: skip
    """What the process outside may do; None where nobody asked."""
    auth, found = policy.git_auth, facts.git_auth
    if auth is None or found is None:
        flags = [s.source for s in (*policy.git_keys, *policy.git_hosts) if s.source.layer == FLAGS]
        if flags:
            notices.append(f"{flags[0]} has no effect: git.auth is none")
        return None
    ssh, https = wants(auth, AGENT), wants(auth, HELPER)
    texts = [str(one.value) for one in policy.git_hosts]
    hosts = tuple(dict.fromkeys(split_host(text) for text in texts if text != ANY))
    _check(policy, found, ssh=ssh, https=https, any_host=ANY in texts, hosts=hosts)
    _check_deciding(found, writable, https=https)
    notices += found.notices
    if ANY in texts:
        notices.append(
            f'git.hosts = "{ANY}": whatever runs inside can log in with the named keys wherever '
            "it can connect to"
        )
    _say_unreachable(hosts, egress, str(policy.network.value), notices, ssh=ssh, https=https)
    return GitAuth(
        ssh=ssh, https=https, hosts=hosts, any_host=ANY in texts, names=found.names,
        agent=found.agent, known_hosts=found.known_hosts, known_text=found.known_text,
        env=_helper_env(facts.env, found, writable, notices) if https else {},
        writable=tuple(writable),
    )  # fmt: skip


def _check(
    policy: Policy, found: Outside, *, ssh: bool, https: bool, any_host: bool,
    hosts: Sequence[tuple[str, int]],
) -> None:  # fmt: skip
    source = policy.git_auth.source if policy.git_auth is not None else ""
    problems = (
        (ssh and not policy.git_keys, "no key is named", f"name one with git.keys: {FORMS}"),
        (not hosts and not any_host, "no host is named", f"name one with git.hosts: {HOST_FORMS}"),
        (https and not hosts, "a helper needs hosts by name", HOST_FORMS),
        (
            ssh and not found.agent, "there is no ssh-agent at SSH_AUTH_SOCK",
            "start one and add the key: eval $(ssh-agent); ssh-add",
        ),
    )  # fmt: skip
    for applies, problem, hint in problems:
        if applies:
            raise PolicyError(
                f"cannot use git.auth ({source}): {problem}", hint=hint, code="git-auth"
            )


def _check_deciding(found: Outside, writable: Sequence[str], *, https: bool) -> None:
    """What a sandbox can write must not say which host, key or helper is meant."""
    for what, way in found.deciding:
        check_way(what, way, writable)
    # A directory that is taken off PATH has no say.
    kept = sound(found.path, lambda path: _is_in(path, writable))
    for directory, way in found.programs:
        if https and directory in kept:
            check_way("git", way, writable)


def check_way(what: str, way: Way, writable: Sequence[str]) -> None:
    """Refuse what the command can write, or lead elsewhere."""
    weak = weak_spot(way, lambda path: _is_in(path, writable))
    if weak:
        through = "lies" if _is_in(way.real, writable) else f"leads through '{weak}',"
        raise PolicyError(
            f"cannot use git.auth: '{way.path}', which decides about it ({what}), {through} where "
            "the command can write",
            hint="run in another directory, or move the file out of it",
            code="git-auth-writable",
        )


def _is_in(path: str, roots: Iterable[str]) -> bool:
    return any(paths.within(path, root) for root in roots)


def helper_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a helper may see, as the caller has them."""
    return {k: v for k, v in env.items() if k in HELPER_ENV or k.startswith("LC_")}


def _helper_env(
    env: Mapping[str, str], found: Outside, writable: Sequence[str], notices: list[str]
) -> dict[str, str]:
    """The variables of `git credential`, with nothing on PATH that a sandbox can write."""
    kept = helper_env(env)
    for name, way in found.variables:
        if name in kept and weak_spot(way, lambda path: _is_in(path, writable)):
            if name == "HOME":
                check_way("HOME", way, writable)
            del kept[name]
            notices.append(f"git.auth: the helper gets no {name}: the command can write there")
    # An empty one would be the working directory.
    kept["PATH"] = ":".join(sound(found.path, lambda p: _is_in(p, writable))) or "/usr/bin:/bin"
    # Nobody is there to be asked, and an empty program to ask with is none (prompt.c).
    return {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "GIT_DIR": "/dev/null"}


# --- what git itself says outside, right before the start


def listed(said: str) -> list[tuple[str, str, str]]:
    """Origin, name and value of each line of `git config --list --show-origin -z`."""
    parts = said.split("\0")
    pairs = zip(parts[::2], parts[1::2], strict=False)
    return [(origin, *_halves(entry)) for origin, entry in pairs]


def _halves(entry: str) -> tuple[str, str]:
    name, _, value = entry.partition("\n")
    return name, value


def named_by_git(
    rows: Iterable[tuple[str, str, str]], env: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """What decides about a credential, and its path: files, and what helpers are made of.

    Git's own reading: no spelling of an include and no second level of them is missed.
    """
    home = env.get("HOME", "")
    directories = env["PATH"].split(":")
    for origin, name, value in rows:
        kind, _, file = origin.partition(":")
        if kind == "file":
            # It is asked in `/`.
            file = file if file.startswith("/") else f"/{file}"
            yield "git's configuration", file
        if name.startswith(("include.", "includeif.")) and name.endswith(".path"):
            yield "git's configuration", _included(value, file, home)
        # Without a program of that name, git would take an alias.
        if name.startswith(("credential.", "alias.credential-")):
            for path in mentioned(value, home, env):
                yield "a helper", path
            for word in _words(value):
                for directory in directories:
                    yield "a helper", f"{directory}/{word}"
                    yield "a helper", f"{directory}/git-credential-{word}"


def _included(written: str, file: str, home: str) -> str:
    if written.startswith("~/"):
        return home + written[1:]
    return written if written.startswith(("/", "~")) else f"{paths.parent(file)}/{written}"


def _words(line: str) -> list[str]:
    """What may be the name of a program."""
    for char in BREAKS:
        line = line.replace(char, " ")
    return list(dict.fromkeys(word for word in line.split() if "/" not in word))


def _say_unreachable(
    hosts: Iterable[tuple[str, int]], egress: Egress | None, mode: str, notices: list[str], *,
    ssh: bool, https: bool,
) -> None:  # fmt: skip
    if mode == "off":
        notices.append(
            "git.auth: network = off, so no host can be reached"
            + ("; commits can be signed" if ssh else "")
        )
    if mode not in CONTROLLED or egress is None:
        return
    from .network import decide

    for host, port in hosts:
        wanted = [(port or SSH_PORT, "ssh")] if ssh else []
        wanted += [(port or HTTPS_PORT, "https")] if https else []
        for number, scheme in wanted:
            if not decide(egress, host, number).allowed:
                name = f"{host}:{number}"
                notices.append(
                    f"git.auth: {scheme} to '{host}' is not let through by network = {mode}; "
                    f"allow it with --allow {name}"
                )


def rule(policy: Policy) -> str:
    """What asked for it, for people."""
    auth = policy.git_auth
    return f"git.auth = {auth.value} ({auth.source})" if auth is not None else ""


def mounts(auth: GitAuth, why: str) -> list[Mount]:
    """The socket, and ssh's settings."""
    found = [Mount(kind="rw", dest=INSIDE, source=WORK_GIT_AUTH, level="rw", rule=why)]
    if auth.ssh:
        for dest, text in ((SSH_CONFIG, ssh_config()), (KNOWN_HOSTS, auth.known_text)):
            found.append(Mount(kind="text", dest=dest, source=text, rule=why))
    return found


def ssh_config() -> str:
    """ssh's settings inside: nothing to ask, nothing to add, and the host's key must be known.

    In place of the system's: ssh refuses to read files that belong to neither root nor the user,
    and in a user namespace root's belong to nobody.
    """
    settings = (
        f"UserKnownHostsFile {KNOWN_HOSTS}", "StrictHostKeyChecking yes", "UpdateHostKeys no",
        f"IdentityAgent {INSIDE}", "AddKeysToAgent no", "ForwardAgent no", "BatchMode yes",
    )  # fmt: skip
    return "Host *\n" + "\n".join(f"    {line}" for line in settings)


def put_in(env: dict[str, str], why: dict[str, str], auth: GitAuth) -> None:
    """Tell ssh and git inside where to ask."""
    told: dict[str, str] = {}
    if auth.ssh:
        env["SSH_AUTH_SOCK"], why["SSH_AUTH_SOCK"] = INSIDE, "git.auth"
        told["GIT_SSH_COMMAND"] = f"ssh -F {SSH_CONFIG}"
    if auth.https:
        count = env.get("GIT_CONFIG_COUNT", "0")
        first = int(count) if count.isascii() and count.isdecimal() else 0
        # An empty one takes those away that other configuration names.
        for index, value in enumerate(("", f"cache --socket {INSIDE}"), first):
            env[f"GIT_CONFIG_KEY_{index}"] = "credential.helper"
            env[f"GIT_CONFIG_VALUE_{index}"] = value
            why[f"GIT_CONFIG_KEY_{index}"] = why[f"GIT_CONFIG_VALUE_{index}"] = "git.auth"
        env["GIT_CONFIG_COUNT"], why["GIT_CONFIG_COUNT"] = str(first + 2), "git.auth"
        told["GIT_TERMINAL_PROMPT"] = "0"
    for name, value in told.items():
        if name not in env:
            env[name], why[name] = value, "git.auth"
