"""The end of a run: its directories are removed, by itself or, after a crash, by a later run.

What a sandbox wrote is never followed: every step works relative to directory descriptors with
O_NOFOLLOW. A workspace's lock goes last, so that whoever holds it removes alone.
"""

from __future__ import annotations

import fcntl
import os

from . import first, placing
from .workspace import DIRECTORY, GROUPS, LOCK, NEW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .workspace import Workspace


def remove(space: Workspace, *, keep: bool) -> None:
    """End a run: placeholders and, unless it is to be kept, the workspace.

    Both stay when the sandbox does not end, for a later run to find.
    """
    if not first.end(space.lock):
        os.close(space.lock)
        return
    placing.remove(space.path)
    if not keep and not _remove_unused(space.path):
        remove_tree(space.path)
    os.close(space.lock)


def _remove_unused(path: str) -> bool:
    """Remove a workspace in which nothing was left, as after most commands; False if used."""
    try:
        for part in ("tmp/agent-work", "tmp"):
            os.rmdir(f"{path}/{part}")
        if os.listdir(path) != [LOCK]:
            return False
        os.unlink(f"{path}/{LOCK}")
    except OSError:
        return False
    _remove_empty(path)
    return True


def _remove_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return


def sweep(state_dir: str) -> int:
    """Remove the workspaces of runs that died. Returns how many."""
    base = f"{state_dir}/run"
    swept = 0
    for name in os.listdir(base):
        path = f"{base}/{name}"
        if name.startswith(NEW):
            _remove_unfinished(base, path)
            continue
        try:
            lock = os.open(f"{path}/{LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # A removal was killed right after its last but one step, or is about to end.
            _remove_empty(path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(f"{path}/keep"):
                swept += _clear_dead(name, path, lock)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return swept


def _clear_dead(name: str, path: str, lock: int) -> bool:
    """Remove everything that a dead run has left; False when its sandbox does not end."""
    end_orphans(name)
    if not first.end(lock):
        return False
    placing.remove(path)
    if os.path.exists(f"{path}/{GROUPS}"):
        from . import cgroups

        cgroups.remove_recorded(f"{path}/{GROUPS}")
    remove_tree(path)
    return True


def _remove_unfinished(base: str, path: str) -> None:
    """Remove a workspace that nobody is making any more: makers hold the directory's lock."""
    gate = os.open(base, DIRECTORY)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(path)
    except BlockingIOError:
        return
    finally:
        os.close(gate)


def end_orphans(name: str, *, looks: int = 1) -> None:
    """Kill what still lives in the sandbox of a dead run.

    `looks`: how often in a row nobody must be there. A process has no arguments for a moment while
    it becomes another program, so one look may miss what was forked just before.

    bwrap binds its child's life to its own only when the root is built: if one of the two is
    killed in those first milliseconds, the child waits for ever. Its arguments name the run, and
    later its mounts do.
    """
    mark, mounted = f"{called(name)}\0".encode(), b"/run/%s/tmp " % name.encode()
    _end_all(lambda pid: _has(pid, "cmdline", mark) or _has(pid, "mountinfo", mounted), looks)


def called(name: str) -> str:
    """What the processes of a run are called, in their arguments."""
    return f"bwrap-{name}"


def end_called(prefix: str) -> None:
    """Kill every sandbox whose run's name begins like this."""
    mark = called(prefix).encode()
    _end_all(lambda pid: _has(pid, "cmdline", mark, first=True))


def _end_all(is_meant: Callable[[str], bool], looks: int = 1) -> None:
    """Kill processes until there are no more of them."""
    import time

    quiet = 0
    for _ in range(200):
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_meant(pid)]
        for pid in found:
            try:
                # The kernel ends the whole pid namespace with its first process.
                os.kill(int(pid), 9)
            except (ProcessLookupError, PermissionError):
                continue
        quiet = 0 if found else quiet + 1
        if quiet >= looks:
            return
        time.sleep(0.01)


def _has(pid: str, name: str, mark: bytes, *, first: bool = False) -> bool:
    """Whether a process's arguments or mounts name a run.

    The mounts of one that has given up capabilities cannot be read (proc(5)), its arguments can.
    """
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
            return text.startswith(mark) if first else mark in text
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
                    if name or item != LOCK:
                        os.unlink(item, dir_fd=here)
                    continue
                if not name and item.startswith("+gone-"):
                    pending.append(item)
                    continue
                moved += 1
                aside = f"+gone-{run}-{moved}"
                move_up(here, item, root, aside)
                pending.append(aside)
            if name:
                os.close(here)
        names = os.listdir(root)
        for name in sorted(names, key=LOCK.__eq__):
            (os.unlink if name == LOCK else os.rmdir)(name, dir_fd=root)
    finally:
        os.close(root)
    _remove_empty(top)


def _open_for_removal(root: int, name: str) -> int:
    """Open a directory for emptying, whatever mode the sandbox left on it."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        link = f"/proc/self/fd/{handle}"
        os.chmod(link, 0o700)
        return os.open(link, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def move_up(here: int, item: str, root: int, aside: str) -> None:
    """Move a directory out of the way, whatever mode it has."""
    try:
        os.rename(item, aside, src_dir_fd=here, dst_dir_fd=root)
    except PermissionError:
        # Moving a directory rewrites its `..`, so it must be writable itself.
        os.close(_open_for_removal(here, item))
        os.rename(item, aside, src_dir_fd=here, dst_dir_fd=root)
