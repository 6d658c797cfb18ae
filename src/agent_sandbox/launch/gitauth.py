"""What answers for keys and credentials of one run, as the supervisor sees it."""

from __future__ import annotations

from ..errors import HostError
from ..policy.gitauth import INSIDE, SOCKET
from .attendant import Attendant, Kind
from .egress import to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.gitauth import GitAuth
    from .bwrap import Command

LOST = (
    "what answers for git's keys and credentials ended before the command did: what was signed is "
    "only in the log"
)


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
