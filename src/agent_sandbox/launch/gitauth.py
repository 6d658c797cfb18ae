"""What answers for keys and credentials of one run, as the supervisor sees it."""

from __future__ import annotations

import os
import select
import time

from ..errors import HostError, PolicyError, reason
from ..host.trails import follow
from ..policy.gitauth import INSIDE, SOCKET, check_way, listed, named_by_git
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
    """What the process is told, if git outside says nothing against it."""
    if wanted.https:
        check(wanted)
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
    mine, theirs = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, theirs, 1),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]  # fmt: skip
    try:
        pid = os.posix_spawn(program, ASK, dict(env), file_actions=actions, setsigmask=())
    except OSError as error:
        os.close(mine)
        raise failed(f"{program}: {reason(error)}") from None
    finally:
        os.close(theirs)
    try:
        said = _until_end(mine)
    finally:
        os.close(mine)
    if said is None:
        os.kill(pid, 9)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        # A library's host program waits for any child of its own. What was said ends with a NUL.
        code = int(not said or not said.endswith(b"\0"))
    if code or said is None:
        raise failed(f"'git config --list' ended with {code}: look at your git configuration")
    return said.decode("utf-8", "surrogateescape")


def _until_end(fd: int) -> bytes | None:
    """All that comes. None if it takes too long: an include may be a pipe that nobody writes to."""
    said = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + ASK_SECONDS
    while poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return said
        said += chunk
        if len(said) > MAX_BYTES:
            return None
    return None


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
