"""What answers for keys and credentials of one run, as the supervisor sees it."""

from __future__ import annotations

import os

from ..errors import HostError, PolicyError, reason
from ..host.trails import follow
from ..policy.gitauth import INSIDE, SOCKET, check_way, listed, named_by_git
from . import asking
from .attendant import Attendant, Kind
from .egress import to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..policy.gitauth import GitAuth
    from .bwrap import Command

LOST = (
    "what answers for git's keys and credentials ended before the command did: what was signed is "
    "only in the log"
)
# Everything that `git credential` would read, and from where. In `/`: no repository is asked.
ASK = ("git", "-C", "/", "config", "--includes", "--show-origin", "--list", "-z")
ASK_SECONDS = 20.0
MAX_BYTES = 4 << 20


def told(wanted: GitAuth, work: str) -> bytes:
    """What the process is told. Pure."""
    runs, _, run = work.rpartition("/")
    state = runs.rpartition("/")[0]
    orders = {
        "ssh": wanted.ssh, "https": wanted.https, "hosts": wanted.hosts,
        "any_host": wanted.any_host, "names": wanted.names, "agent": wanted.agent,
        "known_hosts": wanted.known_hosts, "env": dict(wanted.env),
        "log": f"{state}/audit/git.jsonl", "run": run,
    }  # fmt: skip
    return to_json(orders).encode("ascii")


def check(wanted: GitAuth) -> None:
    """Refuse a configuration that leads, by any spelling, to where the command can write.

    Git is asked with the variables that it will have: what it reads then is what it reads now.
    """
    if not wanted.https:
        return
    seen: set[str] = set()
    for what, path in named_by_git(listed(_said(wanted.env)), wanted.env):
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("/"):
            raise PolicyError(
                f"cannot use git.auth: '{path}' ({what}) does not say where it is",
                hint="write ~/, or the whole path",
                code="git-auth-writable",
            )
        check_way(what, follow(path), wanted.writable)


def _said(env: Mapping[str, str]) -> str:
    """What git lists. Its own place on PATH was checked when the run was planned."""
    places = (f"{directory}/git" for directory in env["PATH"].split(":"))
    program = next((place for place in places if os.access(place, os.X_OK)), "")
    if not program:
        raise failed("there is no git outside of what the command can write")
    try:
        # An include may be a pipe that nobody writes to.
        code, said = asking.answer(
            program, ASK, env, seconds=ASK_SECONDS, most=MAX_BYTES, silent=True
        )  # fmt: skip
    except OSError as error:
        raise failed(f"{program}: {reason(error)}") from None
    if code is None:
        # Nobody knows. What git lists ends with a NUL.
        code = int(not said or not said.endswith(b"\0"))
    if code or said is None:
        raise failed(f"'git config --list' ended with {code}: look at your git configuration")
    return said.decode("utf-8", "surrogateescape")


def failed(why: str) -> HostError:
    """The error for keys and credentials that nobody would answer for."""
    return HostError(
        f"cannot answer for git's keys and credentials: {why}",
        hint="use --git-auth=none, or install agent-sandbox anew",
        code="git-auth-failed",
    )


KIND = Kind(program="gitauth/main.py", socket=SOCKET, failed=failed, lost=LOST)


def answering(command: Command) -> Attendant | None:
    """The process for a command that has one."""
    if not command.git_auth:
        return None
    place = dict(command.planned)[INSIDE]
    return Attendant(KIND, command.git_auth, place.rpartition("/")[0])
