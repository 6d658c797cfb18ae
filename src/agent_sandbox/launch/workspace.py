"""The directories of a run: created and prepared. `sweeping` removes them.

Everything lies in the state directory, which no sandbox can see. What a sandbox wrote is never
followed: every step here works relative to directory descriptors with O_NOFOLLOW.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from ..errors import HostError, reason
from ..policy import paths
from ..record import Record
from . import placing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Mount, Plan

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HOME_LEAF = "+home"
# A workspace that is being made; and the file in it whose lock says that its owner lives.
NEW = ".new-"
LOCK = "lock"
# Which control groups the run has made.
GROUPS = "groups"
PROFILE = b"""\
# Made by agent-sandbox: a login shell keeps the PATH that the sandbox was started with.
[ -z "${AGENT_SANDBOX_PATH-}" ] || PATH=$AGENT_SANDBOX_PATH
"""


class Workspace(Record):
    """A run's private directory; the lock tells others that its owner lives."""

    path: str
    lock: int


def open_state(state_dir: str, uid: int) -> None:
    """Make the state directory and refuse one that others could write."""
    try:
        for part in ("", "/run", "/homes", "/mask", "/mask/dir"):
            if not os.path.isdir(state_dir + part):
                os.makedirs(state_dir + part, mode=0o700, exist_ok=True)
        info = os.lstat(state_dir)
        if not os.path.exists(f"{state_dir}/mask/file"):
            _make_mask(f"{state_dir}/mask/file")
    except OSError as error:
        raise HostError(
            f"cannot use the state directory '{state_dir}': {reason(error)}",
            hint="make it writable for you, or set XDG_STATE_HOME",
            code="bad-state-dir",
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or info.st_mode & 0o022:
        raise HostError(
            f"cannot trust the state directory '{state_dir}': others own it or can write it",
            hint=f"remove it, or run: chmod go-w '{state_dir}'",
            code="bad-state-dir",
        )


def _make_mask(path: str) -> None:
    """A file that nobody can open; another start may have made it a moment ago."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o000))
    except FileExistsError:
        return


def create(state_dir: str) -> Workspace:
    """A fresh workspace, locked before anybody can see it."""
    base = f"{state_dir}/run"
    name = os.urandom(8).hex()
    hidden = f"{base}/{NEW}{name}"
    gate = -1
    try:
        # Held while the directory is made: who can have it alone finds only leftovers.
        gate = os.open(base, DIRECTORY)
        fcntl.flock(gate, fcntl.LOCK_SH)
        os.mkdir(hidden, 0o700)
        lock = os.open(f"{hidden}/{LOCK}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # World-writable and sticky, as programs expect of a temporary directory.
        os.mkdir(f"{hidden}/tmp")
        os.chmod(f"{hidden}/tmp", 0o1777)  # noqa: S103 - below a closed directory
        os.mkdir(f"{hidden}/tmp/agent-work", 0o700)
        os.rename(hidden, f"{base}/{name}")
    except OSError as error:
        raise HostError(
            f"cannot make a workspace in '{base}': {reason(error)}",
            hint="check free space and permissions, or set XDG_STATE_HOME",
            code="no-workspace",
        ) from error
    finally:
        if gate >= 0:
            # In a program that lives on, it would keep every later run from sweeping.
            os.close(gate)
    return Workspace(path=f"{base}/{name}", lock=lock)


def private_home(state_dir: str, key: str) -> str:
    """The private home of a project and profile. The path is the project's own, so none collide."""
    project, _, profile = key.partition("\0")
    parts = ["+" + p if p.startswith("+") else p for p in project.split("/") if p]
    return "/".join((f"{state_dir}/homes/{profile}", *parts, HOME_LEAF))


def prepare(plan: Plan, space: Workspace, home: str, texts: dict[str, str]) -> None:
    """Fill the workspace: homes, cleaned git files, mount points, placeholders."""
    try:
        for mount in plan.mounts:
            if mount.source.startswith("@work/") and mount.level == "private":
                os.makedirs(space.path + mount.source[len("@work") :], mode=0o700, exist_ok=True)
        for name, text in texts.items():
            _write(f"{space.path}/{name}", text)
        roots = {"@home": home, "@work/home": f"{space.path}/home"}
        if plan.home_mode == "private":
            os.makedirs(home, mode=0o700, exist_ok=True)
            _furnish(home)
        elif plan.home_mode == "ephemeral":
            _furnish(f"{space.path}/home")
        if plan.profile != "none":
            # Only for an agent.
            from . import agentplaces

            agentplaces.make(plan, home)
            roots.update(agentplaces.roots(plan, home))
        for point in plan.home_points:
            root = roots.get(point.level) or space.path + point.level[len("@work") :]
            _prepare_point(root, point)
        placing.make(space.path, plan)
    except OSError as error:
        raise HostError(
            f"cannot prepare the sandbox's directories: {error.filename or ''} {reason(error)}",
            hint="run 'sandboxctl doctor'; the private home lies in "
            f"'{home}' and can be removed if it is damaged",
            code="no-workspace",
        ) from error


def remember(path: str, text: str) -> None:
    """Write down what this run hides, unless it is written already; nothing at all is no file."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            if file.read() == text:
                return
    except FileNotFoundError:
        if not text:
            return
    # Another start may do the same: the last one wins, and none is ever half written.
    _write(f"{path}.{os.getpid()}", text)
    os.replace(f"{path}.{os.getpid()}", path)


def _furnish(home: str) -> None:
    """Give a private home the profiles that keep PATH in login shells, unless it has its own."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    for name in (".profile", ".zprofile"):
        if not os.path.lexists(f"{home}/{name}"):
            try:
                fd = os.open(f"{home}/{name}", flags, 0o644)
            except FileExistsError:
                continue
            os.write(fd, PROFILE)
            os.close(fd)


def _write(path: str, text: str) -> None:
    os.makedirs(paths.parent(path), mode=0o700, exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def _prepare_point(root: str, point: Mount) -> None:
    """Make one mount point or link below a home that a sandbox has written.

    A component that is a link is removed: only the sandbox can have made it, and following it
    would leave the home.
    """
    *parents, leaf = point.dest.split("/")
    here = os.open(root, DIRECTORY)
    try:
        for part in parents:
            deeper = _enter(here, part)
            os.close(here)
            here = deeper
        _make_leaf(here, leaf, point)
    finally:
        os.close(here)


def _enter(here: int, name: str) -> int:
    try:
        return os.open(name, DIRECTORY, dir_fd=here)
    except FileNotFoundError:
        pass
    except OSError as error:
        # ELOOP: a link, refused by O_NOFOLLOW; ENOTDIR: a file, or a link again.
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        _clear(here, name)
    _make_directory(here, name)
    return os.open(name, DIRECTORY, dir_fd=here)


def _make_directory(here: int, name: str) -> None:
    """Make a directory; another sandbox that starts in the same project may be faster."""
    try:
        os.mkdir(name, 0o700, dir_fd=here)
    except FileExistsError:
        return


def _is_link(here: int, name: str) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _clear(here: int, name: str) -> None:
    """Move a file of the sandbox that stands where a mount point must be out of the way."""
    if _is_link(here, name):
        os.unlink(name, dir_fd=here)
    else:
        aside = f"{name}.moved-{os.urandom(4).hex()}"
        os.rename(name, aside, src_dir_fd=here, dst_dir_fd=here)


def _make_leaf(here: int, leaf: str, point: Mount) -> None:
    try:
        mode = os.stat(leaf, dir_fd=here, follow_symlinks=False).st_mode
    except FileNotFoundError:
        mode = 0
    if point.kind == "symlink":
        if mode and not (stat.S_ISLNK(mode) and os.readlink(leaf, dir_fd=here) == point.source):
            _clear(here, leaf)
            mode = 0
        if not mode:
            try:
                os.symlink(point.source, leaf, dir_fd=here)
            except FileExistsError:
                return
        return
    wanted = stat.S_ISDIR if point.kind == "dir" else stat.S_ISREG
    if mode and not wanted(mode):
        _clear(here, leaf)
        mode = 0
    if not mode and point.kind == "dir":
        _make_directory(here, leaf)
    elif not mode:
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(leaf, flags, 0o600, dir_fd=here))
