"""Finishes a sandbox that bwrap has built and holds back: limits, mounts, and a last look at it.

Nothing is let go that could not be finished and checked.
"""

from __future__ import annotations

import os

from ..errors import HostError
from . import built, first, guards, verify
from .bwrap import MASK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .bwrap import Command
    from .egress import Network
    from .keeper import Keeper
    from .limits import Enforcer

# How long bwrap may take to build a root.
BUILD_SECONDS = 60.0


def complete(
    command: Command, init: int | None, enforcer: Enforcer | None, keeper: Keeper,
    meanwhile: Callable[[], None] | None = None, *, network: Network | None = None,
) -> bool:  # fmt: skip
    """Finish a sandbox. `meanwhile` is done while bwrap and the keeper are at work.

    False when there is nothing to let go: bwrap has failed, and says so itself.
    """
    if init is None:
        return False
    keeper.attend(init)
    if network is not None:
        network.attend(init)
    try:
        if command.lock:
            first.note(command.lock, init)
        guards.apply(init, command.processes)
    except (ProcessLookupError, FileNotFoundError):
        # A keeper that fails kills the sandbox first and then says why; else bwrap says it.
        keeper.ready()
        return False
    if enforcer is not None:
        enforcer.attach(init)
    if meanwhile is not None:
        meanwhile()
    # The host's own table does not wait for bwrap.
    host = _mount_table("self")
    keeper.ready()
    if not _built(init):
        return False
    if network is not None:
        network.ready()
    return _verify(command, init, host)


def _verify(command: Command, init: int, host: list[verify.Entry]) -> bool:
    """Refuse a root that is not the planned one."""
    planned: dict[str, list[str]] = {}
    for dest, source in command.planned:
        planned.setdefault(dest, []).append(source)
    try:
        inside = _mount_table(str(init))
    except OSError:
        if os.path.exists(f"/proc/{init}"):
            raise
        return False
    masked = {path for operation, path in command.duties if operation == MASK}
    problem = verify.stray(inside, host, planned, masked) or verify.attached(inside)
    if problem:
        raise HostError(
            f"cannot trust the sandbox that was built: {problem}",
            hint="something in the project was changed while it started; if another sandbox runs "
            "there, end it and look at what it does",
            code="root-changed",
        )
    return True


def _built(init: int) -> bool:
    try:
        return built.wait(init, BUILD_SECONDS)
    except TimeoutError as error:
        raise HostError(
            "cannot see the sandbox that was built, so it cannot be checked",
            hint="run 'sandboxctl doctor'; /proc must show your own processes",
            code="root-unseen",
        ) from error


def _mount_table(process: str) -> list[verify.Entry]:
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return verify.parse(file.read())
