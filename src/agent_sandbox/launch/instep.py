"""An agent's files that are kept in step with the host's, as the supervisor sees it: one process.

The process reads what the sandbox has written, so it does nothing else. The command waits for its
first step. When the supervisor asks, or dies, it makes a last one and ends.
"""

from __future__ import annotations

import os

from ..errors import HostError, reason
from ..policy import paths
from ..policy.model import STATE, WORK_STATE
from .agentplaces import BASE_LEAF
from .egress import Proxy, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Plan
    from .bwrap import Command, Places

PROGRAM = f"{os.path.dirname(os.path.abspath(__file__))}/instep_server.py"
LOCK = "instep.lock"
REPORT_SECONDS = 30.0
LOST = (
    "what keeps the agent's files in step with the host's was killed: what changed inside since "
    "then is taken over when this profile is next used in this project"
)


def told(plan: Plan, places: Places) -> bytes:
    """What the process is told. Pure."""
    from .bwrap import source_path

    files = []
    for step in plan.steps:
        root = source_path(step.token, places)
        files.append(
            {
                "mode": step.mode, "root": root, "name": step.name, "outside": step.outside,
                "keys": step.keys, "base": _base(root, step.token),
            }
        )  # fmt: skip
    state_dir = places.masks.rpartition("/")[0]
    orders = {"files": files, "project": plan.project, "lock": f"{state_dir}/{LOCK}"}
    return to_json(orders).encode("ascii")


def _base(root: str, token: str) -> str:
    """Where the last versions in step are: beside the private directories, seen by no sandbox."""
    name = token.removeprefix(WORK_STATE).removeprefix(STATE)
    return f"{paths.parent(root.removesuffix(name))}/{BASE_LEAF}{name}"


class InStep:
    """The process of one run. `start`, `ready`; `ask` and `finish`, or `abandon`."""

    def __init__(self, orders: bytes) -> None:
        self._told = orders
        self._process: Proxy | None = None
        self._over = False
        # What the user should know. Complete after `finish`.
        self.warnings: tuple[str, ...] = ()

    def start(self) -> None:
        """Start the process."""
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._process = Proxy(self._told, null, PROGRAM)
        except OSError as error:
            raise failed(reason(error)) from error
        finally:
            os.close(null)

    def ready(self) -> None:
        """Wait for the first step; raises when it was not made."""
        if self._process is None or not self._process.is_ready():
            said = self._process.last_words() if self._process is not None else ""
            self.abandon()
            raise failed(said or "its process ended")

    def ask(self) -> None:
        """The command has ended: let the process make its last step."""
        if self._process is not None:
            self._process.ask()

    def finish(self) -> None:
        """Wait for the last step."""
        if self._over or self._process is None:
            return
        said = self._process.report(REPORT_SECONDS).decode("utf-8", "replace")
        self.warnings += tuple(said.splitlines()[1:]) if said else (LOST,)
        self.abandon()

    def abandon(self) -> None:
        """End it without asking. Safe to call twice."""
        if self._over:
            return
        self._over = True
        if self._process is not None:
            self._process.end()


def failed(why: str) -> HostError:
    """The error for state that cannot be kept in step."""
    return HostError(
        f"cannot keep the agent's state in step with the host's: {why}",
        hint="use --profile none to run without the agent's state",
        code="state-failed",
    )


def kept(command: Command) -> InStep | None:
    """The process for a command that needs one."""
    return InStep(command.state) if command.state else None
