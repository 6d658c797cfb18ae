"""The processes beside a sandbox, where a command needs some: started, awaited and ended together.

What each is for is in its own module, which is loaded only for a command that needs it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from . import gate
    from .attendant import Attendant
    from .bwrap import Command
    from .egress import Network
    from .instep import InStep


def _network(
    command: Command, make_gate: Callable[[gate.Orders], gate.Gate] | None
) -> Network | None:
    """Gate and proxy. Without `make_gate`, before any thread is started: it forks."""
    if not command.gate:
        return None
    from . import egress

    return egress.network(command, make_gate) if make_gate else egress.network(command)


def _docker(command: Command) -> Attendant | None:
    """The filter in front of the container engine."""
    if not command.docker:
        return None
    from . import dockerproxy

    return dockerproxy.filtered(command)


def _state(command: Command) -> InStep | None:
    """What keeps an agent's files in step with the host's."""
    if not command.state:
        return None
    from . import instep

    return instep.kept(command)


def _authority(command: Command) -> Attendant | None:
    """What answers for git's keys and credentials."""
    if not command.git_auth:
        return None
    from . import gitauth

    return gitauth.answering(command)


class Helpers:
    """All of them. `start_first`, `start`, `ready`; `ask` and `finish`, or `abandon`."""

    def __init__(
        self, command: Command, make_gate: Callable[[gate.Orders], gate.Gate] | None = None
    ) -> None:
        self.network: Network | None = None
        self._docker: Attendant | None = None
        self._state: InStep | None = None
        self._authority: Attendant | None = None
        try:
            self.network = _network(command, make_gate)
            self._docker = _docker(command)
            self._state = _state(command)
            self._authority = _authority(command)
        except BaseException:
            # One that cannot be had: the others must not stay behind.
            self.abandon()
            raise

    @property
    def _all(self) -> tuple[Network | Attendant | InStep, ...]:
        every = (self.network, self._docker, self._state, self._authority)
        return tuple(helper for helper in every if helper is not None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know. Complete after `finish`."""
        return tuple(said for helper in self._all for said in helper.warnings)

    def start_first(self) -> None:
        """Start those that take longer than bwrap."""
        for helper in (self.network, self._state):
            if helper is not None:
                helper.start()

    def start(self) -> None:
        """Start the others, while bwrap builds."""
        for helper in (self._docker, self._authority):
            if helper is not None:
                helper.start()

    def ready(self) -> None:
        """Wait until the command can be let go. The network is awaited with the mounts."""
        for helper in (self._docker, self._state, self._authority):
            if helper is not None:
                helper.ready()

    def ask(self) -> None:
        """The command has ended: let them sum up, while others tidy up."""
        for helper in self._all:
            helper.ask()

    def finish(self) -> dict[str, bytes]:
        """What each has to say, by the name of the outcome's field."""
        if self._state is not None:
            self._state.finish()
        named = (
            ("network", self.network),
            ("docker", self._docker),
            ("git_auth", self._authority),
        )
        return {name: helper.finish() for name, helper in named if helper is not None}

    def abandon(self) -> None:
        """End them without asking."""
        for helper in self._all:
            helper.abandon()
