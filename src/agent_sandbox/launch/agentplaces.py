"""Directories of an agent's state: the sandbox's own, beside the private home, and the host's."""

from __future__ import annotations

import os
import stat

from ..policy import paths
from ..policy.model import STATE
from . import placing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Plan

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Beside the private home: private directories, and what their files were when last in step.
STATE_LEAF = "+state"
BASE_LEAF = "+base"


def place(home: str, token: str) -> str:
    """A private directory of an agent's state, by the source of its mount."""
    return f"{paths.parent(home)}/{STATE_LEAF}{token[len(STATE) :]}"


def roots(plan: Plan, home: str) -> dict[str, str]:
    """Every private directory that lies beside the private home: token → path."""
    tokens = [m.source for m in plan.mounts if m.source.startswith(STATE + "/")]
    return {token: place(home, token) for token in tokens}


def make(plan: Plan, home: str) -> None:
    """Make the directories, and clear what earlier runs have left in them."""
    for path in roots(plan, home).values():
        os.makedirs(path, mode=0o700, exist_ok=True)
    for path in plan.made:
        # The agent would make it as well. The path is real: no part of it may be a link by now.
        here = os.open("/", placing.DIRECTORY)
        try:
            for part in path.split("/")[1:]:
                here, above = _descend(here, part), here
                os.close(above)
        finally:
            os.close(here)
    _clear_bare(plan, home)


def _descend(here: int, name: str) -> int:
    """Enter a directory of the host that is made if it is missing."""
    try:
        return os.open(name, placing.DIRECTORY, dir_fd=here)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, 0o700, dir_fd=here)
    except FileExistsError:
        # Another sandbox was faster.
        pass
    return os.open(name, placing.DIRECTORY, dir_fd=here)


def _clear_bare(plan: Plan, home: str) -> None:
    """Remove empty mount points of earlier runs: an empty settings.json is no valid one."""
    for token, name in plan.bare:
        if not token.startswith(STATE + "/") or "/" in name:
            continue
        root = os.open(place(home, token), DIRECTORY)
        try:
            info = os.stat(name, dir_fd=root, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and not info.st_size:
                os.unlink(name, dir_fd=root)
        except FileNotFoundError:
            continue
        finally:
            os.close(root)
