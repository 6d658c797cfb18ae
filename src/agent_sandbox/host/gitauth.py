"""Looks up what `git.auth` needs: the agent, the named keys, known hosts, helpers, signing.

Reads public keys alone. A private key's file is never opened.
"""

from __future__ import annotations

import os
import stat

from ..errors import PolicyError
from ..policy import gitauth, gitconfig, knownhosts, paths
from ..policy.model import FILE, ConfigFile
from ..policy.publickeys import FILE as KEY_FILE
from ..policy.publickeys import FINGERPRINT, PublicKey, is_named, key_name, parse_line
from ..policy.trails import mentioned
from .trails import follow, search_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..policy.model import Match, Policy
    from ..policy.trails import Way
    from .locate import Locator

SYSTEM_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
SYSTEM_CONFIG = "/etc/gitconfig"
USER_HOSTS = ("known_hosts", "known_hosts2")
MAX_BYTES = 4 << 20


def gather(
    policy: Policy, home: Match, env: Mapping[str, str], locator: Locator,
    configs: tuple[ConfigFile, ...],
) -> tuple[gitauth.Outside, tuple[ConfigFile, ...]]:  # fmt: skip
    """What there is, and git's configuration with what works because of it."""
    texts = {c.real: _text(c.real) for c in configs if c.cleaned is not None}
    everything = {**texts, SYSTEM_CONFIG: _text(SYSTEM_CONFIG)}
    deciding = [("git's configuration", w) for w in _read_by_git(everything, home.real, env)]
    path = search_path(env)
    found = gitauth.Outside(
        path=path, deciding=tuple(deciding), programs=tuple(_programs(path)),
        variables=tuple(_variables(env, home.real)),
    )  # fmt: skip
    if not gitauth.wants(policy.git_auth, gitauth.AGENT):
        return found, configs
    names, files = _names(policy, home.real)
    known = [f"{home.real}/.ssh/{name}" for name in USER_HOSTS]
    hosts = [follow(name) for name in (*known, *SYSTEM_HOSTS)]
    agent = _agent(env)
    deciding += [("a public key", way) for way in files]
    deciding += [("known_hosts", way) for way in hosts]
    deciding += [("the agent", agent)] if agent is not None else []
    located = [match for match in (locator.find(name) for name in known) if match is not None]
    shown = tuple(_known_hosts(policy, [match for match in located if match.kind == FILE]))
    notices: list[str] = []
    kept, public = _signing(
        configs, texts, frozenset(names), lambda w: _signing_key(w, home, locator), notices
    )
    more = (*public, *shown)
    if policy.home.value == "host":
        # ~/.ssh is covered there, and what lies in it cannot be shown again.
        if public:
            notices.append("commits are not signed: with home = host no file of a key is shown")
            kept = configs
        more = ()
    outside = found.replace(
        agent=agent.real if agent is not None else "", names=names, deciding=tuple(deciding),
        notices=tuple(notices), known_hosts=tuple(way.real for way in hosts),
        known_text="".join(one.cleaned or "" for one in shown),
    )  # fmt: skip
    return outside, (*kept, *more)


def _text(path: str) -> str:
    """The text of a file, by its real path: a link at its end is new, and not followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _agent(env: Mapping[str, str]) -> Way | None:
    path = env.get("SSH_AUTH_SOCK", "")
    if not path.startswith("/"):
        return None
    way = follow(path)
    try:
        return way if stat.S_ISSOCK(os.lstat(way.real).st_mode) else None
    except OSError:
        return None


def _names(policy: Policy, home: str) -> tuple[tuple[tuple[str, str], ...], list[Way]]:
    """The keys' names, with files replaced by what is in them; and the files."""
    found: list[tuple[str, str]] = []
    files: list[Way] = []
    for setting in policy.git_keys:
        name = key_name(str(setting.value))
        if name.kind != KEY_FILE:
            found.append((name.kind, name.text))
            continue
        path = home + name.text[1:] if name.text.startswith("~") else name.text
        way = follow(path)
        key = _public(path, way.real)
        if key is None:
            raise PolicyError(
                f"cannot use git.keys ({setting.source}): '{name.text}' holds no public key",
                hint="name the file of the public half, which ends with .pub",
                code="git-auth",
            )
        files.append(way)
        found.append((FINGERPRINT, key.fingerprint))
    return tuple(found), files


def _public(path: str, real: str) -> PublicKey | None:
    """The public key in a file whose name says that it is one."""
    return parse_line(_text(real)) if path.endswith(".pub") else None


def _known_hosts(policy: Policy, found: Sequence[Match]) -> Iterator[ConfigFile]:
    """The lines about hosts that are named: which others the user knows is nobody's business."""
    texts = [str(one.value) for one in policy.git_hosts]
    named = [gitauth.split_host(text) for text in texts if text != gitauth.ANY]
    names = [knownhosts.spelled(host, port or gitauth.SSH_PORT) for host, port in named]
    for match in found:
        text = _text(match.real)
        # Also of all hosts whole lines alone: whatever else is in the file is no host's key.
        shown = knownhosts.only(text, None if gitauth.ANY in texts else names)
        yield ConfigFile(path=match.path, real=match.real, cleaned=shown, links=match.links)


# --- signing


def _signing(
    configs: tuple[ConfigFile, ...], texts: Mapping[str, str], names: frozenset[tuple[str, str]],
    find: Callable[[str], tuple[PublicKey | None, ConfigFile | None]], notices: list[str],
) -> tuple[tuple[ConfigFile, ...], list[ConfigFile]]:  # fmt: skip
    """Git's configuration with signing left on where it works, and the public keys it names."""
    entries = [entry for text in texts.values() for entry in gitconfig.entries(text)]
    if gitconfig.value_of(entries, "gpg", "format") != "ssh":
        return configs, []
    public: list[ConfigFile] = []
    for written in dict.fromkeys(e.value for e in entries if e.name() == "user.signingkey"):
        key, file = find(written)
        if key is None or not is_named(key, names):
            notices.append(
                f"commits are not signed: user.signingKey '{written}' is none of git.keys"
            )
            return configs, []
        if file is not None:
            public.append(file)
    kept = tuple(
        c.replace(cleaned=gitconfig.cleaned(texts[c.real], signing=True)) if c.real in texts else c
        for c in configs
    )
    return kept, public


def _signing_key(
    written: str, home: Match, locator: Locator
) -> tuple[PublicKey | None, ConfigFile | None]:
    """A key as git's configuration names it: itself, or by a file of it."""
    if written.startswith(("key::", "ssh-", "ecdsa-", "sk-")):
        return parse_line(written.removeprefix("key::")), None
    path = home.real + written[1:] if written.startswith("~/") else written
    if not path.startswith("/"):
        return None, None
    # Of a private key the public half is beside it.
    path = paths.normalise(path if path.endswith(".pub") else f"{path}.pub")
    match = locator.find(path)
    key = _public(path, match.real) if match is not None else None
    if match is None or key is None:
        return None, None
    return key, ConfigFile(path=path, real=match.real, cleaned=key.line(), links=match.links)


# --- the helper outside


def _read_by_git(texts: Mapping[str, str], home: str, env: Mapping[str, str]) -> Iterator[Way]:
    """Every file of the user's that git reads, also where there is none yet.

    Git itself is asked right before the start (`launch/gitauth`), but for what is there then.
    """
    base = env.get("XDG_CONFIG_HOME", "") or f"{home}/.config"
    named = [env.get(name, "") for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM")]
    wanted = [f"{home}/.gitconfig", f"{base}/git/config", *named, *texts]
    for real, text in texts.items():
        for path in gitconfig.includes(gitconfig.entries(text)):
            inner = home + path[1:] if path.startswith("~/") else path
            wanted.append(inner if inner.startswith("/") else f"{paths.parent(real)}/{inner}")
    yield from (follow(path) for path in dict.fromkeys(wanted) if path.startswith("/"))


def _programs(path: Iterable[Way]) -> Iterator[tuple[str, Way]]:
    """Git, in each directory of PATH that has one."""
    for directory in dict.fromkeys(way.real for way in path):
        if os.path.lexists(f"{directory}/git"):
            yield directory, follow(f"{directory}/git")


def _variables(env: Mapping[str, str], home: str) -> Iterator[tuple[str, Way]]:
    """The paths in variables that a helper would see."""
    for name, value in gitauth.helper_env(env).items():
        for path in mentioned(value, home, {}):
            if path.startswith("/"):
                yield name, follow(path)
