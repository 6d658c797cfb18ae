"""What a model inside is told: where it is, what it may do, and how it asks for more. Pure.

A refusal of the kernel says "Read-only file system" and nothing else. Without this page a model
takes that for a fault, and works around it. The reader acts on what it reads: names come from the
user alone, and none can begin a line of its own.
"""

from __future__ import annotations

from .model import BUILT_IN, EXCLUDE, PAGE, PROJECT, RO, RW
from .settings import NO_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .model import HostFacts, Plan, Policy, Rule, Source

# Names in one line; a policy may have thousands.
MOST_NAMES, MOST_TEXT = 12, 160

INTRODUCTION = """\
# You are in a sandbox

Your user started you with agent-sandbox. Commands and tools here see a part of the machine only.
The limits are meant: work within them, and do not look for a way around. When they stop you, say
what you need and why, and name the flag below. Only your user can widen the sandbox, outside, with
a new start.
"""
FILES = """\
## Files

- Writable: the project, {project}{writable}
- Read-only: the system and its programs{readable}
- Settings that tools outside would run are read-only and cannot be created: `.git/hooks`,
  `.git/config`, `.envrc`, `.vscode`, `.claude/settings.json`, linter settings, and their like.
- `.git` can be used: commit, branch, merge. The project's files are the real ones, not a copy.
- {home}
- `/tmp` is your own{tmp}, and gone when the command that your user started has ended.
- Keys, tokens, other projects and the rest of the machine are not there{hidden}.
  "No such file" can mean that.
- "Read-only file system", "Permission denied" on an empty file and "Device or resource busy" on a
  rename are the sandbox, not a fault. Do not repeat them.
"""
HOMES = {
    "private": "Your home is a private one; it is kept for this project, and is not your user's.",
    "ephemeral": "Your home is empty, and gone at the end.",
    "host": "Your home is your user's, read-only, without its secrets.",
}
NETWORKS = {
    "on": "The host's network is shared.",
    "off": "There is none: no names, no connections, not even to the host's localhost.",
    "allow": "Only hosts that the policy names can be reached{allowed}. Others get 403.",
    "public": "Public addresses can be reached; the host, its network and localhost cannot.",
    "learn": "Public addresses can be reached, and each is noted. The host cannot.",
}
DOCKERS = {
    "off": "There is no container engine.",
    "filtered": "`docker` works through a filter: your own containers, the project's files. A "
    "refusal names its rule in brackets.",
    "on": "The container engine's socket is there.",
}
GIT = {
    "ssh-agent": "git over ssh can log in with keys of your user, which stay outside.",
    "helper": "git over https can log in to hosts that your user named, with your user's helper.",
    "both": "git can log in with what your user named, over ssh and https; keys stay outside.",
}
REST = """\
- No sudo, no other users, no mounts, no namespaces. A sandbox inside this one cannot start: run
  commands as they are, with an agent's own sandbox off.
- Processes outside cannot be seen. What you start ends with the command of your user.
"""
ASKING = """\
## How to ask

Tell your user which of these you need, with the exact path or host:

| need | flag of agent-sandbox |
|---|---|
| read a path | `--ro PATH` |
| write a path | `--rw PATH` |
| a host | `--allow HOST[:PORT]` |
| the whole network | `--network=on` |
| a port of yours, outside | `--publish PORT` |
| containers | `--docker=filtered` |
| a variable | `--env NAME` |
| more memory, time, processes | `--memory 8G`, `--timeout 2h`, `--pids 8192` |

`sandboxctl why PATH|HOST`, run by your user outside, names the rule that decides.
"""


def filled(made: Plan, policy: Policy, facts: HostFacts) -> Plan:
    """A plan with the page in it."""
    said = text(policy, facts)
    mounts = [m.replace(source=said) if m.source == PAGE else m for m in made.mounts]
    return made.replace(mounts=tuple(mounts))


def text(policy: Policy, facts: HostFacts) -> str:
    """The page for one policy."""
    network, docker = str(policy.network.value), str(policy.docker.value)
    # Paths that somebody named; what comes with presets and profiles is not for a page.
    rules = [rule for rule in policy.rules if rule.source.layer > BUILT_IN]
    files = FILES.format(
        project=plain(facts.cwd.path),
        writable=_named(rules, RW, "; also "),
        readable=_named(rules, RO, "; also "),
        home=HOMES[str(policy.home.value)],
        tmp=_at_most(policy, "limits.tmp-size", " up to "),
        hidden=_named(rules, EXCLUDE, "; hidden by your user: "),
    )
    hosts = [(str(one.value), one.source) for one in policy.allow]
    denied = _list([(str(one.value), one.source) for one in policy.deny], " Refused: ")
    outside = [
        NETWORKS[network].format(allowed=_list(hosts, ": ")) + denied, DOCKERS[docker],
    ]  # fmt: skip
    limits = "".join(
        _at_most(policy, key, f" {word} ")
        for key, word in (
            ("limits.memory", "memory"), ("limits.timeout", "seconds"),
            ("limits.cpu-time", "processor seconds"), ("limits.pids", "processes"),
        )
    )  # fmt: skip
    if policy.git_auth is not None and str(policy.git_auth.value) in GIT:
        outside.append(GIT[str(policy.git_auth.value)])
    ruled = [(n, rule.source) for n, rule in policy.commands.items() if rule.value is not True]
    if ruled:
        outside.append(f"{_list(ruled, 'There are rules for commands: ')}. A refused one says so.")
    lines = "".join(f"- {line}\n" for line in outside)
    most = f"- Limits:{limits}.\n" if limits else ""
    return f"{INTRODUCTION}\n{files}\n## Network and the rest\n\n{lines}{REST}{most}\n{ASKING}"


def plain(name: str) -> str:
    """A name that stays in its line, and in its place."""
    name = name[:MOST_TEXT]
    if not name.isprintable() or "`" in name or "|" in name:
        name = "".join(c if c.isprintable() and c not in "`|" else "?" for c in name)
    return f"`{name}`"


def _named(rules: list[Rule], level: str, before: str) -> str:
    return _list([(rule.pattern, rule.source) for rule in rules if rule.level == level], before)


def _list(found: list[tuple[str, Source]], before: str) -> str:
    """Names, as far as the user has given them.

    A project's file is the work of strangers, and would speak to the model with the user's voice:
    what it names is counted.
    """
    if not found:
        return ""
    names = [plain(name) for name, source in found if source.layer != PROJECT]
    rest = len(found) - len(names[:MOST_NAMES])
    parts = [", ".join(names[:MOST_NAMES])] if names else []
    return before + " and ".join([*parts, f"{rest} more"] if rest else parts)


def _at_most(policy: Policy, key: str, before: str) -> str:
    """A limit, if there is one that a person would call so."""
    value = policy.limits[key].value
    if not isinstance(value, (int, float)) or value == NO_LIMIT:
        return ""
    sized = key in ("limits.memory", "limits.tmp-size")
    return f"{before}{value / (1 << 30):.3g} GiB" if sized else f"{before}{value:g}"
