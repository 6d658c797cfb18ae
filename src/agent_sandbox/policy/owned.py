"""A workspace that belongs to a service: nobody on the host acts on what lies in it. Pure.

So nothing in it has to be protected from the command: no control files, no held names, no git, and
nothing is looked at when the command has ended. Nothing of the user who runs the service is shown
either: no home, no toolchains, no variables. What is left of a plan does not depend on the
workspace, so one plan does for all of them: its directories are tokens, filled in at each start.
"""

from __future__ import annotations

from . import assemble, naming
from .assemble import Entry
from .model import (
    BUILT_IN,
    CONTROLLED,
    DIR,
    FILE,
    OWNED,
    RO,
    RW,
    Limits,
    Match,
    Plan,
    Source,
)
from .resolve import Claims, claim_naming, claim_system, outward

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import HostFacts, Link, Policy

# Where a command finds itself.
WORK, HOME = "/workspace", "/home/agent"
# Trees of the system that a command can do without: each costs bwrap a sixth of a millisecond.
LEFT_OUT = ("/opt", "/var/lib/dpkg", "/var/lib/rpm", "/var/lib/pacman", "/var/lib/apk",
            "/var/lib/alternatives", "/var/lib/ghc")  # fmt: skip
# Who it is. Programs that think they are root try what they may not: chown, setgroups.
USER, IDENTITY = "agent", 1000
# What the workspace consists of. Outside these lie below one directory by the same names, so that
# an absolute link leads to the same file on both sides.
PARTS = (WORK, HOME, "/tmp")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a command is told when nobody says otherwise.
VARIABLES: Mapping[str, str] = {
    "PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "USER": USER, "LOGNAME": USER,
    "SHELL": "/bin/sh", "TMPDIR": "/tmp", "XDG_RUNTIME_DIR": f"/run/user/{IDENTITY}",
    "IN_AGENT_SANDBOX": "1",
}  # fmt: skip
# Our own user database: the host's would not know who the command is, and names its accounts.
_ACCOUNTS = "@work/names"
PASSWD, GROUP = "/etc/passwd", "/etc/group"
TEXTS: Mapping[str, str] = {
    PASSWD: f"root:x:0:0:root:/:/usr/sbin/nologin\n"
    f"{USER}:x:{IDENTITY}:{IDENTITY}::{HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    GROUP: f"root:x:0:\n{USER}:x:{IDENTITY}:\nnogroup:x:65534:\n",
}


def home() -> Match:
    """The home inside, as facts name a home."""
    return Match(path=HOME, real=HOME, kind=DIR)


def account_token(path: str) -> str:
    """The source of the mount that shows one of our own texts at a path of the host."""
    return f"{_ACCOUNTS}/{path.rpartition('/')[2]}"


def plan(policy: Policy, facts: HostFacts) -> Plan:
    """What every command in a workspace of this policy sees; variables come at its start."""
    notices: list[str] = []
    claims = Claims()
    links: list[Link] = []
    _claim_structure(claims, facts)
    system = tuple(match for match in facts.system if match.path not in LEFT_OUT)
    claim_system(claims, links, facts.replace(system=system), frozenset(("@base",)))
    claim_naming(claims, links, facts)
    for path in TEXTS:
        _claim(claims, path, kind=FILE, level=RO, special="copy", token=account_token(path))
    entries = claims.winners()
    mounts = assemble.mounts_for(entries, links)
    mounts += assemble.late_mounts(policy, facts, mounts, notices)
    egress, publish = outward(policy, notices)
    return Plan(
        mounts=tuple(mounts), env={}, env_sources={}, cwd="", network=False, docker=False,
        seccomp=str(policy.seccomp.value), limits=Limits(), profile="", project=WORK, home=HOME,
        home_mode="owned", home_key="", home_points=(), egress=egress, publish=publish,
        identity=IDENTITY, notices=tuple(notices),
    )  # fmt: skip


def variables(mode: str) -> dict[str, str]:
    """The environment of a command before its own variables, by the network's mode."""
    return {**VARIABLES, **naming.VARIABLES} if mode in CONTROLLED else dict(VARIABLES)


def _claim(
    claims: Claims, path: str, *, special: str, token: str = "", kind: str = DIR, level: str = RW
) -> None:
    source = Source(layer=BUILT_IN, where="owned workspace")
    claims.add(
        Entry(
            path=path, level=level, kind=kind, exact=True, source=source, special=special,
            token=token,
        )
    )  # fmt: skip


def _claim_structure(claims: Claims, facts: HostFacts) -> None:
    _claim(claims, "/dev", special="dev")
    _claim(claims, "/proc", special="proc")
    if facts.uid == 0:
        # Outside it is root, whatever its number inside, and root's files are its own: kernel
        # settings could be written without any capability (core_pattern runs a program outside).
        _claim(claims, "/proc/sys", special="", level=RO)
    _claim(claims, f"/run/user/{IDENTITY}", special="tmpfs")
    for path in PARTS:
        _claim(claims, path, special="private", token=OWNED + path)
