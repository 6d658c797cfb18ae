"""The steps of `tree`: what is done to a sandbox's files, on a thread or in a process apart."""

from __future__ import annotations

import errno
import os
import stat

from ...launch import sweeping
from ...policy.owned import PARTS
from .interface import Entry
from .tree_open import DIRECTORY, Root, open_file
from .tree_walk import DEEPEST, each

BLOCK = 512
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
# What a tree weighs that is nested deeper than anybody looks.
TOO_DEEP = 1 << 62
# What a file without a block weighs, and a further name of one that was counted. A file system has
# only so many of them, and whoever counts or removes them needs time and memory for each.
FILE_BYTES, NAME_BYTES = 4096, 1024


def create(path: str) -> int:
    """A new file, to be written."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_all(fd: int, data: bytes) -> None:
    """Write everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def unlink(path: str) -> None:
    """Remove a file; it may be gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def describe(path: str, info: os.stat_result, target: str = "") -> Entry:
    """An entry from what the kernel knows of it."""
    kind = KINDS.get(stat.S_IFMT(info.st_mode), "other")
    return Entry(
        path=path, kind=kind, size=info.st_size, mode=stat.S_IMODE(info.st_mode),
        modified=info.st_mtime, target=target,
    )  # fmt: skip


def look(root: Root, path: str) -> Entry:
    """One entry."""
    fd = root.find(path, follow=False)
    try:
        info = os.fstat(fd)
        return describe(
            path, info, os.readlink("", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else ""
        )
    finally:
        os.close(fd)


def open_at(root: Root, path: str, *, offset: int) -> tuple[Entry, int]:
    """A regular file, open where it is to be read from."""
    found = root.find(path)
    try:
        fd = open_file(found)
        try:
            os.lseek(fd, offset, os.SEEK_SET)
        except OSError:
            # Further than any file of this file system can reach.
            os.close(fd)
            raise
        return describe(path, os.fstat(found)), fd
    finally:
        os.close(found)


def put(fresh: str, root: Root, path: str) -> Entry:
    """Move a finished file to its place."""
    above = path.rpartition("/")[0]
    if above:
        os.close(make_open(root, above))
    here, name = root.parent(path)
    try:
        os.rename(fresh, name, dst_dir_fd=here)
        return describe(path, os.stat(name, dir_fd=here, follow_symlinks=False))
    finally:
        os.close(here)


def make(root: Root, path: str) -> Entry:
    """A directory, made with its parents."""
    fd = make_open(root, path)
    try:
        return describe(path, os.fstat(fd))
    finally:
        os.close(fd)


def make_open(root: Root, path: str) -> int:
    """A directory, made with its parents where they are missing."""
    try:
        return root.directory(path)
    except FileNotFoundError:
        if path in PARTS:
            raise
    if path.count("/") > DEEPEST:
        raise OSError(errno.ENAMETOOLONG, "it is nested too deep")
    above, _, name = path.rpartition("/")
    here = make_open(root, above)
    try:
        os.mkdir(name, 0o755, dir_fd=here)
    except FileExistsError:
        # Made meanwhile; or a link that leads nowhere, which then is an error here.
        pass
    finally:
        os.close(here)
    return root.directory(path)


def delete(root: Root, path: str, *, recursive: bool) -> None:
    """Remove a file, a link or a directory."""
    here, name = root.parent(path)
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=here)
            return
        if not recursive:
            os.rmdir(name, dir_fd=here)
            return
        aside = f"{root.place}/.gone-{os.urandom(8).hex()}"
        sweeping.move_up(here, name, root.fd, os.path.basename(aside))
    finally:
        os.close(here)
    sweeping.remove_tree(aside)


def list_below(root: Root, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
    """What is below, sorted; and whether there was more."""
    found: list[Entry] = []
    for one in each(root.directory(path), depth=depth):
        if len(found) >= most:
            return _sorted(found), True
        target = ""
        if stat.S_ISLNK(one.info.st_mode):
            try:
                target = os.readlink(one.name, dir_fd=one.here)
            except OSError:
                # Swapped meanwhile.
                continue
        found.append(describe(f"{path}/{one.path}", one.info, target))
    return _sorted(found), False


def _sorted(found: list[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.path)


def disk_usage(place: str, most: int = TOO_DEEP) -> int:
    """Bytes that a sandbox has on the disk. No link is followed, a file with two names is one.

    Beyond `most` it goes no further: a command that moves directories from behind the walk to where
    it has not been yet could keep it going for ever.
    """
    total = 0
    seen: set[int] = set()
    try:
        top = os.open(place, DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    for found in each(top, closed=True):
        if found.is_deep:
            # Where nobody counts there is no limit: it is taken for full.
            return TOO_DEEP
        info = found.info
        weight = max(info.st_blocks * BLOCK, FILE_BYTES)
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            weight = NAME_BYTES if info.st_ino in seen else weight
            seen.add(info.st_ino)
        total += weight
        if total > most:
            break
    return total
