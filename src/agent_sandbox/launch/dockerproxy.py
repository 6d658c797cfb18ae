"""The Docker filter of one run, as the supervisor sees it."""

from __future__ import annotations

from ..errors import HostError
from ..policy.engines import INSIDE
from ..policy.model import README
from .attendant import Attendant, Kind
from .egress import to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.dockerfilter import DockerFilter
    from .bwrap import Command

SOCKET = "docker.sock"
# Removing containers takes its time; the process gives up before this.
REPORT_SECONDS = 90.0
LOST = (
    "the Docker filter ended before the command did: what was asked is only in the audit log, and "
    "what the run has left in the engine is removed when the next one with --docker=filtered starts"
)
LATE = "the Docker filter is still removing what the run has made in the engine"


def told(wanted: DockerFilter, work: str) -> bytes:
    """What the process is told. Pure."""
    run, _, owner = work.rpartition("/")
    state = run.rpartition("/")[0]
    grants = {
        "owner": owner, "network": wanted.network, "read_only": wanted.read_only,
        "socket": f"{work}/{SOCKET}", "binds": wanted.binds, **wanted.granted,
    }  # fmt: skip
    orders = {
        "engine": wanted.engine, "keep": wanted.keep, "mode": wanted.mode, "work": work,
        "audit": f"{state}/audit/docker.jsonl", "records": f"{state}/docker", "grants": grants,
        "page": README,
    }  # fmt: skip
    return to_json(orders).encode("ascii")


def failed(why: str) -> HostError:
    """The error for an engine that cannot be filtered."""
    return HostError(
        f"cannot filter the container engine: {why}",
        hint="run 'sandboxctl doctor', or use --docker=off",
        code="docker-failed",
    )


KIND = Kind(
    program="docker/main.py", socket=SOCKET, failed=failed, lost=LOST, late=LATE,
    seconds=REPORT_SECONDS, backlog=256,
)  # fmt: skip


def filtered(command: Command) -> Attendant | None:
    """The filter for a command that needs one."""
    if not command.docker:
        return None
    place = dict(command.planned)[INSIDE]
    return Attendant(KIND, command.docker, place.rpartition("/")[0])
