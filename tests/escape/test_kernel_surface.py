"""The kernel: mounts cannot be undone, namespaces not nested, settings not changed."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

import pytest

from escape.attack import BOTH, ROOT, USER, Attack, Scene, Trial, guard, hide, prints, trials

pytestmark = pytest.mark.kernel

EXCLUDED = ("--exclude", ".env")
# With a capability in the namespace that owns the mounts, each of these uncovers a file. A user's
# sandbox is in a second namespace anyway, because bwrap needs root's id to mount its /dev/pts.
CAPABLE = {
    ROOT: "seccomp + dropped capabilities + no nested user namespaces",
    USER: "seccomp + dropped capabilities + no nested user namespaces + devices of its own",
}
LIBC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(result):
    print(os.strerror(ctypes.get_errno()) if result else "done")
    return result
def show(path):
    try: print(open(path).read())
    except OSError as error: print(error)
def mount(source, target, kind, flags):
    return tried(libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), None))
"""
# MNT_DETACH
UNMOUNT = """
tried(libc.umount2(f"{project}/.env".encode(), 2))
show(".env")
"""
# MS_BIND, without MS_REC
BIND = """
os.makedirs("/tmp/x", exist_ok=True)
mount(project, "/tmp/x", None, 4096)
show("/tmp/x/.env")
"""
# MS_REMOUNT | MS_BIND
REMOUNT = """
mount("none", f"{project}/fixed", None, 32 | 4096)
try: open("fixed/file", "w").write("evil")
except OSError as error: print(error)
"""
# Same number on every machine: open_tree is 428, OPEN_TREE_CLONE is 1.
CLONE_TREE = """
tree = libc.syscall(428, -100, project.encode(), 1)
show(f"/proc/self/fd/{tree}/.env")
"""
# CLONE_NEWUSER, with CLONE_NEWNS or CLONE_NEWNET
NEW_USER = """
if not tried(libc.unshare(0x10000000)):
    show("/proc/self/status")
"""
NEW_MOUNT = """
if not tried(libc.unshare(0x10000000 | 0x20000)) and not mount("none", "/tmp", b"tmpfs", 0):
    print("a file system of its own")
"""
NEW_NETWORK = """
import socket
if not tried(libc.unshare(0x10000000 | 0x40000000)):
    print("raw packets by", socket.socket(socket.AF_PACKET, socket.SOCK_RAW).family.name)
"""
# open_by_handle_at(2) looks no path up, so no mount is in its way.
BY_HANDLE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
handle = ctypes.create_string_buffer(bytes.fromhex(handle))
fd = libc.open_by_handle_at(os.open(project, os.O_RDONLY), handle, os.O_RDONLY)
print(os.read(fd, 200) if fd >= 0 else os.strerror(ctypes.get_errno()))
"""
SETTING = Path("/proc/sys/vm/stat_interval")


# Each answers with a descriptor or 0 where nobody forbids it.
FOREIGN_CALL = """
result = libc.syscall(%s)
print("came through" if result >= 0 else os.strerror(ctypes.get_errno()))
"""
# struct clone_args with flags CLONE_NEWUSER and exit_signal SIGCHLD.
CLONE3 = """
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
child = libc.syscall(435, ctypes.byref(arguments), 88)
if child == 0:
    os._exit(0)
print("came through" if child > 0 else os.strerror(ctypes.get_errno()))
"""
SET_USER_ID = """
import shutil
def tried_to(call, *arguments):
    try: call(*arguments)
    except OSError as error: print(error)
shutil.copy("/bin/sh", "one")
tried_to(os.chmod, "one", 0o4755)
tried_to(lambda: os.fchmod(os.open("one", os.O_RDONLY), 0o4755))
os.umask(0)
tried_to(os.open, "two", os.O_CREAT | os.O_WRONLY, 0o4755)
tried_to(os.mknod, "three", 0o104755)
tried_to(lambda: libc.syscall(452, -100, b"one", 0o4755, 0))
"""
# PTRACE_SEIZE, which does not stop it
TRACE_FIRST = """
print("came through" if libc.ptrace(0x4206, 1, 0, 0) == 0 else os.strerror(ctypes.get_errno()))
"""
# machine → numbers of userfaultfd, fanotify_init, add_key
NUMBERS = {"x86_64": (323, 300, 248), "aarch64": (282, 262, 217)}[os.uname().machine]


def leaves_set_user_id(scene: Scene) -> bool:
    """Whether another user of the machine finds a program that runs as this one."""
    return any(p.lstat().st_mode & stat.S_ISUID for p in scene.project.iterdir())


def setting(scene: Scene) -> None:
    """A harmless setting of the whole machine."""
    before = SETTING.read_text()
    scene.watch(SETTING)
    scene.facts["setting"] = str(SETTING)
    scene.facts["other"] = str(int(before) + 1)
    scene.cleanup.callback(SETTING.write_text, before)


def proc_file(scene: Scene) -> None:
    """Modes in /proc are the kernel's: every mount of it shows the same."""
    scene.cleanup.callback(Path("/proc/filesystems").chmod, 0o444)


def mode_has_changed(scene: Scene) -> bool:
    """A mount of /proc that is already there remembers; a new one tells."""
    look = ("bwrap", "--unshare-all", "--dev-bind", "/", "/", "--proc", "/proc")
    return scene.outside(*look, "stat", "-c", "%a", "/proc/filesystems").stdout != "444\n"


def handle(scene: Scene) -> None:
    """A file outside of the project, named as NFS servers do it. An attacker would guess."""
    path = scene.hide("~/.ssh/id")
    libc = ctypes.CDLL(None, use_errno=True)
    found, mount = ctypes.create_string_buffer(136), ctypes.c_int()
    ctypes.memmove(found, (128).to_bytes(4, "little"), 4)
    failed = libc.name_to_handle_at(-100, os.fsencode(path), found, ctypes.byref(mount), 0)
    assert not failed, os.strerror(ctypes.get_errno())
    scene.facts["handle"] = found.raw.hex()


def uncovering(
    name: str, what: str, script: str, *, who: str, invariant: int = 3, more: str = ""
) -> Attack:
    """An attack on the mounts by somebody who is allowed to mount."""
    writes = invariant == 2
    return Attack(
        name=f"{name}-by-{who}", invariant=invariant, what=what, who=(who,), python=True,
        setup=guard("fixed/file") if writes else hide(".env"),
        flags=("--ro", "fixed") if writes else EXCLUDED, script=LIBC + script,
        without=CAPABLE[who] + more,
    )  # fmt: skip


# The keeper soon covers again what was uncovered, be it from inside.
COVERED_AGAIN = " + watched names"

MOUNTS = tuple(
    attack
    for who in BOTH
    for attack in (
        uncovering("unmount-a-mask", "umount, then read", UNMOUNT, who=who, more=COVERED_AGAIN),
        uncovering("look-under-a-mask", "bind the directory alone elsewhere", BIND, who=who),
        uncovering("clone-the-tree", "open_tree(2), without its mounts", CLONE_TREE, who=who),
        uncovering("remount-writable", "mount -o remount,rw", REMOUNT, who=who, invariant=2),
    )
)

OTHERS = (
    Attack(
        name="nested-user-namespace", invariant=7, what="every capability, in a new namespace",
        python=True, script=LIBC + NEW_USER, escaped=prints(r"CapEff:\t0*[1-9a-f]"),
        without="no nested user namespaces + seccomp",
    ),
    Attack(
        name="nested-mount-namespace", invariant=7, what="mount file systems", python=True,
        script=LIBC + NEW_MOUNT, escaped=prints("a file system of its own"),
        without="no nested user namespaces + seccomp",
    ),
    Attack(
        name="nested-network-namespace", invariant=7, what="be the owner of a network",
        python=True, script=LIBC + NEW_NETWORK, escaped=prints("raw packets by AF_PACKET"),
        without="no nested user namespaces + seccomp",
    ),
    Attack(
        name="kernel-setting", invariant=2, what="/proc/sys, writable for root's uid alone",
        who=(ROOT,), setup=setting, script="echo $other > $setting",
        without="read-only kernel settings",
    ),
    Attack(
        name="mode-of-a-kernel-file", invariant=2, what="chmod in /proc", who=(ROOT,),
        setup=proc_file, script="chmod 440 /proc/filesystems", escaped=mode_has_changed,
        without="sealed /proc",
    ),
    Attack(
        name="open-by-handle", invariant=3, what="no path, so no mount in the way", who=(ROOT,),
        setup=handle, python=True, script=BY_HANDLE, without="user namespace + seccomp",
    ),
)  # fmt: skip


def call(name: str, what: str, arguments: str) -> Attack:
    """A system call that no sandbox needs: a part of the kernel that took part in escapes."""
    return Attack(
        name=name, invariant=7, what=what, python=True, script=LIBC + FOREIGN_CALL % arguments,
        escaped=prints("came through"), without="seccomp",
    )  # fmt: skip


CALLS = (
    call("io-uring", "its requests pass no filter", "425, 4, (ctypes.c_uint32 * 30)()"),
    # UFFD_USER_MODE_ONLY
    call("userfaultfd", "holds the kernel still amid an operation", f"{NUMBERS[0]}, 1"),
    # FAN_REPORT_FID
    call("fanotify", "watches whole file systems", f"{NUMBERS[1]}, 0x200, 0"),
    call("new-key", "keyrings are in no namespace", f'{NUMBERS[2]}, b"user", b"x", b"y", 1, -2'),
    Attack(
        name="netlink-of-sockets", invariant=7, what="the host's own table of sockets",
        python=True, escaped=prints("came through"), without="seccomp",
        script="""
import socket
try: print("came through", socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4).proto)
except OSError as error: print(error)
""",
    ),
    Attack(
        name="namespace-by-clone3", invariant=7, what="flags behind a pointer", python=True,
        script=LIBC + CLONE3, escaped=prints("came through"),
        without="no nested user namespaces + seccomp",
    ),
    Attack(
        name="set-user-id-program", invariant=7, what="for other users of the machine",
        python=True, script=LIBC + SET_USER_ID, escaped=leaves_set_user_id, without="seccomp",
    ),
    Attack(
        name="trace-the-first-process", invariant=7, what="bwrap itself", python=True,
        script=LIBC + TRACE_FIRST, escaped=prints("came through"), without="seccomp",
    ),
)  # fmt: skip

ATTACKS = MOUNTS + OTHERS + CALLS


@trials(MOUNTS)
def test_cannot_undo_a_mount(trial: Trial) -> None:
    trial.run()


@trials(OTHERS)
def test_cannot_use_the_kernel_against_the_sandbox(trial: Trial) -> None:
    trial.run()


@trials(CALLS)
def test_cannot_make_calls_that_nobody_needs(trial: Trial) -> None:
    trial.run()
