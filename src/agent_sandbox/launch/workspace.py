"""The directories of a run: created, prepared, removed, and swept after a crash.

Everything lies in the state directory, which no sandbox can see. What a sandbox wrote is never
followed: every step here works relative to directory descriptors with O_NOFOLLOW.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from ..errors import HostError, reason
from ..host import placeholders
from ..policy import paths
from ..policy.control import neutral
from ..policy.model import DIR, SOCKET
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from ..policy.model import Mount, Placeholder, Plan

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# From the kernel's Documentation/admin-guide/devices.txt.
DEVICE_NUMBERS = {
    "null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9),
    "tty": (5, 0),
}  # fmt: skip
HOME_LEAF = "+home"
PROFILE = b"""\
# Made by agent-sandbox: a login shell keeps the PATH that the sandbox was started with.
[ -z "${AGENT_SANDBOX_PATH-}" ] || PATH=$AGENT_SANDBOX_PATH
"""


class Workspace(Record):
    """A run's private directory; the lock tells others that its owner lives."""

    path: str
    lock: int
    placeholders: tuple[str, ...] = ()


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


def devices(state_dir: str) -> str:
    """The directory of root's private device nodes, made or put right.

    Where nodes cannot be made (a container without CAP_MKNOD, a file system without devices) it
    is the host's: root inside could then change the modes of the container's own nodes.
    """
    place = f"{state_dir}/dev"
    try:
        if os.statvfs(state_dir).f_flag & os.ST_NODEV:
            return "/dev"
        os.makedirs(place, mode=0o700, exist_ok=True)
        for name, (major, minor) in DEVICE_NUMBERS.items():
            path = f"{place}/{name}"
            if not os.path.lexists(path):
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(path, 0o666)  # noqa: S103 - as on every host
    except PermissionError:
        return "/dev"
    except FileExistsError:
        return devices(state_dir)
    return place


def create(state_dir: str) -> Workspace:
    """A fresh workspace, locked before anybody can see it."""
    base = f"{state_dir}/run"
    name = os.urandom(8).hex()
    hidden = f"{base}/.new-{name}"
    try:
        os.mkdir(hidden, 0o700)
        lock = os.open(f"{hidden}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
    return Workspace(path=f"{base}/{name}", lock=lock)


def private_home(state_dir: str, key: str) -> str:
    """The private home of a project and profile. The path is the project's own, so none collide."""
    project, _, profile = key.partition("\0")
    parts = ["+" + p if p.startswith("+") else p for p in project.split("/") if p]
    return "/".join((f"{state_dir}/homes/{profile}", *parts, HOME_LEAF))


def prepare(plan: Plan, space: Workspace, home: str, texts: dict[str, str]) -> Workspace:
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
        for point in plan.home_points:
            root = roots.get(point.level) or space.path + point.level[len("@work") :]
            _prepare_point(root, point)
        return _make_placeholders(space, plan)
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


def _make_placeholders(space: Workspace, plan: Plan) -> Workspace:
    """What must be there to be covered. Recorded first: a crash leaves no trace.

    A placeholder of another run in the same project becomes ours too: were it removed when that
    run ends, our mount on it would go with it and the name would be free.
    """
    if not plan.placeholders and not _others(space.path):
        return space
    with _placeholder_lock(space.path):
        missing = [held for held in plan.placeholders if not os.path.lexists(held.path)]
        covered = {mount.dest for mount in plan.mounts} & _others(space.path)
        ours = tuple(sorted({*(held.path for held in missing), *covered}))
        if not ours:
            return space
        _write(f"{space.path}/{placeholders.LIST}", "\0".join(ours))
        for held in missing:
            _place(held)
    return space.replace(placeholders=ours)


def _place(held: Placeholder) -> None:
    if held.node == DIR:
        os.mkdir(held.path, 0o755)
        return
    if held.node == SOCKET:
        try:
            os.mknod(held.path, stat.S_IFSOCK | 0o600)
        except FileExistsError:
            raise
        except OSError:
            # A file system without sockets: a plain file will do, though git shows it.
            pass
        else:
            return
    fd = os.open(held.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    os.write(fd, held.text.encode())
    os.close(fd)


class _placeholder_lock:  # noqa: N801 - reads like the function that it is used as
    """Makes "who still needs it?" and "remove it" one step among all runs of a user."""

    def __init__(self, space: str) -> None:
        self._path = f"{paths.parent(paths.parent(space))}/placeholders.lock"

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _others(space: str) -> frozenset[str]:
    """Placeholders that other runs have recorded."""
    base, _, own = space.rpartition("/")
    return placeholders.recorded(paths.parent(base), own)


def remove(space: Workspace, *, keep: bool) -> None:
    """End a run: placeholders and, unless it is to be kept, the workspace."""
    _remove_placeholders(space.path, space.placeholders)
    if not keep and not _remove_empty(space.path):
        remove_tree(space.path)
    os.close(space.lock)


def _remove_empty(path: str) -> bool:
    """Remove a workspace in which nothing was left, as after most commands; False if used."""
    try:
        for part in ("tmp/agent-work", "tmp"):
            os.rmdir(f"{path}/{part}")
        os.unlink(f"{path}/lock")
        os.rmdir(path)
    except OSError:
        return False
    return True


def _remove_placeholders(space: str, wanted: Collection[str]) -> None:
    """Remove what no other run needs. Only ever what is as we made it: anything else stays."""
    if not wanted:
        return
    with _placeholder_lock(space):
        for path in sorted(set(wanted) - _others(space), reverse=True):
            try:
                info = os.lstat(path)
                if stat.S_ISDIR(info.st_mode):
                    os.rmdir(path)
                elif stat.S_ISSOCK(info.st_mode) or _is_neutral(path, info):
                    os.unlink(path)
            except OSError:
                continue
        os.unlink(f"{space}/{placeholders.LIST}")


def _is_neutral(path: str, info: os.stat_result) -> bool:
    """Whether a plain file says what a placeholder says, and no more."""
    text = neutral(path).encode()
    if not stat.S_ISREG(info.st_mode) or info.st_size != len(text):
        return False
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, len(text) + 1) == text
    finally:
        os.close(fd)


def sweep(state_dir: str) -> int:
    """Remove the workspaces of runs that died. Returns how many."""
    base = f"{state_dir}/run"
    swept = 0
    for name in os.listdir(base):
        path = f"{base}/{name}"
        if name.startswith(".new-"):
            # Being made, and not locked yet: only a minute later is it a crash's leftover.
            if _is_old(path):
                remove_tree(path)
            continue
        try:
            lock = os.open(f"{path}/lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # A removal that was itself killed took the lock first.
            if _is_old(path):
                remove_tree(path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(f"{path}/keep"):
                _end_orphans(name)
                _remove_placeholders(path, placeholders.listed(path))
                remove_tree(path)
                swept += 1
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return swept


def _end_orphans(name: str) -> None:
    """Kill what still lives in the sandbox of a dead run.

    bwrap binds its child's life to its own only when the root is built: if the supervisor is
    killed in those first milliseconds, the child goes on alone. Its mounts name the workspace.
    """
    import time

    mark = f"/run/{name}/tmp "
    for _ in range(100):
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and _mounts(pid, mark)]
        for pid in found:
            try:
                # The kernel ends the whole pid namespace with its first process.
                os.kill(int(pid), 9)
            except ProcessLookupError:
                continue
        if not found:
            return
        time.sleep(0.01)


def _mounts(pid: str, mark: str) -> bool:
    """Whether a process has a mount of a certain directory. Those of other users do not tell."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
            return mark in file.read()
    except OSError:
        return False


def _is_old(path: str) -> bool:
    import time

    try:
        return time.time() - os.lstat(path).st_mtime > 60
    except OSError:
        return False


def remove_tree(top: str) -> None:
    """Remove a tree that a sandbox has filled: no link followed, any depth, any modes.

    Directories are moved up to the top before they are emptied, so that neither recursion nor
    descriptors run out however deep they were nested.
    """
    try:
        root = os.open(top, DIRECTORY)
    except FileNotFoundError:
        return
    pending = [""]
    moved = 0
    run = os.urandom(4).hex()
    try:
        while pending:
            name = pending.pop()
            here = root if not name else _open_for_removal(root, name)
            with os.scandir(here) as scanned:
                items = [(i.name, i.is_dir(follow_symlinks=False)) for i in scanned]
            for item, is_dir in items:
                if not is_dir:
                    os.unlink(item, dir_fd=here)
                    continue
                if not name and item.startswith("+gone-"):
                    pending.append(item)
                    continue
                moved += 1
                aside = f"+gone-{run}-{moved}"
                _move_up(here, item, root, aside)
                pending.append(aside)
            if name:
                os.close(here)
        for name in os.listdir(root):
            os.rmdir(name, dir_fd=root)
    finally:
        os.close(root)
    os.rmdir(top)


def _open_for_removal(root: int, name: str) -> int:
    """Open a directory for emptying, whatever mode the sandbox left on it."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        link = f"/proc/self/fd/{handle}"
        os.chmod(link, 0o700)
        return os.open(link, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _move_up(here: int, item: str, root: int, aside: str) -> None:
    try:
        os.rename(item, aside, src_dir_fd=here, dst_dir_fd=root)
    except PermissionError:
        # Moving a directory rewrites its `..`, so it must be writable itself.
        os.close(_open_for_removal(here, item))
        os.rename(item, aside, src_dir_fd=here, dst_dir_fd=root)
