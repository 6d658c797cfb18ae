"""Finishes a sandbox that bwrap has built and holds back: limits, mounts, and a last look at it.

Nothing is let go that could not be finished and checked.
"""

from __future__ import annotations

import os
import time

from ..errors import HostError
from ..policy.model import MARKER
from . import guards, verify
from .bwrap import MASK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .bwrap import Command
    from .keeper import Keeper
    from .limits import Enforcer

# How long bwrap may take to build a root.
BUILD_SECONDS = 60.0


def complete(
    command: Command, init: int | None, enforcer: Enforcer | None, keeper: Keeper,
    meanwhile: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Finish a sandbox. `meanwhile` is done while bwrap and the keeper are at work."""
    if init is None:
        return
    keeper.attend(init)
    try:
        guards.apply(init, command.processes)
    except ProcessLookupError:
        # bwrap failed and says so itself.
        return
    if enforcer is not None:
        enforcer.attach(init)
    if meanwhile is not None:
        meanwhile()
    keeper.ready()
    _verify(command, init)


def _verify(command: Command, init: int) -> None:
    """Refuse a root that is not the planned one."""
    if not _built(init):
        # bwrap failed and says so itself; there is nothing to let go.
        return
    planned: dict[str, list[str]] = {}
    for dest, source in command.planned:
        planned.setdefault(dest, []).append(source)
    try:
        inside, host = _mount_table(str(init)), _mount_table("self")
    except OSError:
        if os.path.exists(f"/proc/{init}"):
            raise
        return
    masked = {path for operation, path in command.duties if operation == MASK}
    problem = verify.stray(inside, host, planned, masked) or verify.attached(inside)
    if problem:
        raise HostError(
            f"cannot trust the sandbox that was built: {problem}",
            hint="something in the project was changed while it started; if another sandbox runs "
            "there, end it and look at what it does",
            code="root-changed",
        )


def _built(init: int) -> bool:
    """Wait for bwrap's last step; it shows at the process's root only after pivot_root(2)."""
    marker = f"/proc/{init}/root{MARKER}"
    deadline = time.monotonic() + BUILD_SECONDS
    while not os.path.exists(marker):
        if not os.path.exists(f"/proc/{init}"):
            return False
        if time.monotonic() > deadline:
            raise HostError(
                "cannot see the sandbox that was built, so it cannot be checked",
                hint="run 'sandboxctl doctor'; /proc must show your own processes",
                code="root-unseen",
            )
        time.sleep(0.0002)
    return True


def _mount_table(process: str) -> list[verify.Entry]:
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return verify.parse(file.read())
