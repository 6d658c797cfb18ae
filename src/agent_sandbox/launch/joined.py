"""What is done to a sandbox's mounts from outside, by a process that has joined its namespaces.

A process of the same user may join the user and mount namespaces of a sandbox (setns(2)); it has
every capability there and stays out of sight, since it does not join the pid namespace. `keeper`
runs this in a process of its own.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time

from ..policy import paths
from ..policy.model import MARKER
from . import built, verify
from .bwrap import COPY, HOLD_DIRECTORY, HOLD_SOCKET, MASK, PIN, READ_ONLY, SEAL
from .syscalls import syscall

# linux/mount.h, linux/fcntl.h, linux/nsfs.h, linux/sched.h
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REC, MS_PRIVATE = 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SEALED = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_SYMLINKS = 1, 4, 0x10
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x100, 0x1000, 0x8000
NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
# machine → (SYS_setns, SYS_mount)
NUMBERS = {"x86_64": (308, 165), "aarch64": (268, 40)}
# Calls added since 5.1 share one table. The last of these came with Linux 5.12.
SYS_open_tree, SYS_move_mount, SYS_mount_setattr = 428, 429, 442
READY_SECONDS = 30.0
ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Held names that nobody needs but us: made again when somebody outside has removed them.
REMADE = (HOLD_DIRECTORY, HOLD_SOCKET)


def join(init: int) -> int:
    """Wait until bwrap has built the root, then enter it. Returns its mount table, open."""
    if not built.wait(init, READY_SECONDS):
        raise ProcessLookupError("the sandbox has ended")
    setns, mount = NUMBERS[os.uname().machine]
    try:
        # Not earlier: the table shows paths as seen from the root that the process has now.
        table = os.open(f"/proc/{init}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        space = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        # EINVAL and ENOENT: a process that is ending has no namespaces any more.
        if error.errno in (2, 22):
            raise ProcessLookupError("the sandbox has ended") from error
        raise
    # bwrap's mounts belong to its first user namespace; the command runs in a second one.
    owner = fcntl.ioctl(space, NS_GET_USERNS)
    syscall(setns, owner, CLONE_NEWUSER)
    _leave_instances()
    deadline = time.monotonic() + READY_SECONDS
    while True:
        syscall(setns, space, CLONE_NEWNS)
        if os.path.exists(MARKER):
            break
        # Between bwrap's last pivot_root(2) and the umount(2) after it, the old root still lies on
        # top of the new one, and that is where setns(2) has put us.
        if time.monotonic() > deadline:
            raise TimeoutError("bwrap did not finish building the root")
        time.sleep(0.0002)
    os.close(owner)
    os.close(space)
    # bwrap leaves its mounts slaves of the host's: a disk mounted there later would show inside,
    # writable even below a read-only mount.
    syscall(mount, 0, b"/\0", 0, MS_REC | MS_PRIVATE, 0)
    return table


def _leave_instances() -> None:
    """Let a sandbox have half of the user's inotify instances; the rest of the system needs some.

    Below /proc/sys/user are the limits of the user namespace that the reader is in: ours by now.
    """
    try:
        with open("/proc/sys/fs/inotify/max_user_instances", "rb") as file:
            most = int(file.read())
        with open("/proc/sys/user/max_inotify_instances", "wb") as file:
            file.write(b"%d" % (most // 2))
    except (OSError, ValueError):
        # /proc/sys is read-only in most containers. The keeper can do without instances.
        return


def put(
    source: str, dest: str, *, sealed: bool, recursive: bool = False, follow: bool = False
) -> None:
    """Show a path of the sandbox at another place of it, or at its own; sealed: read-only.

    The mount is finished before it is anywhere to be seen. A bind that is made read-only
    afterwards can be kept writable by whoever opens the file in between (EBUSY).
    """
    flags = OPEN_TREE_CLONE | (AT_RECURSIVE if recursive else 0)
    tree = syscall(SYS_open_tree, AT_FDCWD, _raw(source), flags | AT_SYMLINK_NOFOLLOW)
    try:
        if sealed:
            # struct mount_attr: attr_set, attr_clr, propagation, userns_fd.
            wanted = SEALED.to_bytes(8, "little") + bytes(24)
            how = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
            syscall(SYS_mount_setattr, tree, b"\0", how, wanted, len(wanted))
        onto = MOVE_MOUNT_F_EMPTY_PATH | (MOVE_MOUNT_T_SYMLINKS if follow else 0)
        syscall(SYS_move_mount, tree, b"\0", AT_FDCWD, _raw(dest), onto)
    finally:
        os.close(tree)


def _raw(path: str) -> bytes:
    return os.fsencode(path) + b"\0"


def cover(operation: str, path: str) -> bool:
    """Protect what is at a path now. False: nothing is there, so there is nothing to protect."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            # mount(2) would follow it. Only what is hidden must be hidden wherever it went.
            if operation == MASK:
                # The kernel follows it, no further than forty links; not Python, which would.
                _mask(path, is_directory=os.path.isdir(path), follow=True)
            return False
    except OSError:
        return False
    if operation == MASK:
        _mask(path, is_directory=stat.S_ISDIR(mode))
        return True
    put(path, path, sealed=operation != PIN, recursive=True)
    return True


def remake(operation: str, path: str) -> bool:
    """Make the placeholder of a held name again; False when that cannot be, or something is there.

    The workspace still lists it for removal. Nothing is followed, and only an empty directory or a
    socket comes to be, in a directory that the sandbox can write: that is no more than the command
    itself could make.
    """
    here = -1
    try:
        here = _enter(paths.parent(path))
        name = path.rpartition("/")[2]
        if operation == HOLD_DIRECTORY:
            os.mkdir(name, 0o755, dir_fd=here)
        else:
            os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=here)
    except OSError:
        # Somebody was faster, the directory around it is gone, too, or the disk is full: what is
        # made there is named at the end of the run.
        return False
    finally:
        if here >= 0:
            os.close(here)
    return True


def _enter(directory: str) -> int:
    """Open a directory step by step: a link on the way was not there when the name was held."""
    here = os.open("/", ENTER)
    for part in directory.split("/")[1:]:
        try:
            deeper = os.open(part, ENTER, dir_fd=here) if part else os.dup(here)
        finally:
            os.close(here)
        here = deeper
    return here


def _mask(path: str, *, is_directory: bool, follow: bool = False) -> None:
    if follow and _is_masked(path):
        # Whoever makes the same link again and again must not pile up mounts.
        return
    if is_directory:
        mount = NUMBERS[os.uname().machine][1]
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV
        syscall(mount, b"tmpfs\0", _raw(path), b"tmpfs\0", flags, b"mode=0555,size=4k\0")
        return
    # A device on a mount without devices cannot be opened; nothing else in the namespace is sure
    # to be there as a source.
    put("/dev/null", path, sealed=True, follow=follow)


def _is_masked(path: str) -> bool:
    """Whether what is at a path is one of our masks: the null device, or an empty sealed tree."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        return stat.S_ISCHR(info.st_mode)
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) and not os.listdir(path)


def make(operations: list[tuple[str, str, str]]) -> None:
    """The mounts that bwrap could not take, in their order: (operation, source, destination)."""
    for operation, source, dest in operations:
        try:
            if operation == SEAL:
                seal(dest)
            else:
                put(source, dest, sealed=operation == READ_ONLY, recursive=operation != COPY)
        except OSError as error:
            raise OSError(error.errno, error.strerror, dest) from error


def seal(path: str) -> None:
    """Make a mount read-only that is there. A device on it can still be written, not changed."""
    wanted = MOUNT_ATTR_RDONLY.to_bytes(8, "little") + bytes(24)
    syscall(
        SYS_mount_setattr, AT_FDCWD, _raw(path), AT_SYMLINK_NOFOLLOW, wanted, len(wanted)
    )  # fmt: skip


def points(table: str) -> frozenset[str]:
    """The mount points in a mount table. Pure."""
    return frozenset(verify.points(table))


def uncovered(
    mounted: frozenset[str], duties: list[tuple[str, str]]
) -> list[tuple[str, str]]:  # fmt: skip
    """The duties whose path is no mount point; from shallow to deep. Pure."""
    found = [duty for duty in duties if duty[1] not in mounted]
    found.sort(key=lambda duty: paths.depth(duty[1]))
    return found


def ways(mounted: frozenset[str], lost: list[tuple[str, str]]) -> list[str]:
    """The directories between mount points and what is not covered, from shallow to deep. Pure.

    Nothing holds them: they may be missing, and the command may put others in their place.
    """
    found = set()
    for _, path in lost:
        for above in paths.parents(path):
            if above in mounted:
                break
            found.add(above)
    return sorted(found, key=paths.depth)
