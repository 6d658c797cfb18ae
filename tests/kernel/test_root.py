"""Root gets the same guarantees: no capabilities, no way to undo a mount, no system secrets."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from kernel.conftest import World, must_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import As

pytestmark = pytest.mark.kernel

BARE = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")


@pytest.fixture
def world(superuser: As, places: Path) -> Iterator[World]:
    """A world of root alone."""
    must_start(superuser)
    base = superuser.directory(places / f"only-root-{os.urandom(4).hex()}")
    yield World(superuser, base)
    shutil.rmtree(base, ignore_errors=True)


def test_cannot_keep_capabilities(world: World) -> None:
    """All five sets are empty and no_new_privs is set; plain bwrap as root, the control, has them all."""
    ask = ("grep", "-E", "^(Cap...|NoNewPrivs|Seccomp):", "/proc/self/status")
    control = world.outside(*BARE, *ask).stdout
    assert "CapEff:\t0000000000000000" not in control
    got = dict(line.split(":\t") for line in world.sandbox(*ask).stdout.splitlines())
    assert {int(got[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert got["NoNewPrivs"] == "1"
    assert got["Seccomp"] == "2"


def test_cannot_remount_or_unmount(world: World) -> None:
    """`remount,rw` of a read-only tree and `umount` of a mask fail; in plain bwrap they succeed."""
    world.write("hidden/f", "secret")
    world.write("fixed/f", "old")
    hidden, fixed = world.path("hidden"), world.path("fixed")
    attack = (
        f"umount {hidden} && cat {hidden}/f; mount -o remount,rw,bind {fixed} && echo x > {fixed}/f; "
        f"mount -t tmpfs none {fixed} && echo mounted"
    )
    control = world.outside(
        *BARE, "--tmpfs", str(hidden), "--bind", str(world.project), str(world.project),
        "--tmpfs", str(hidden), "--ro-bind", str(fixed), str(fixed), "sh", "-c", attack,
    )  # fmt: skip
    assert control.stdout == "secretmounted\n", control.stderr
    assert (fixed / "f").read_text() == "x\n"
    world.write("fixed/f", "old")
    done = world.sh(attack, "--exclude", "hidden", "--ro", "fixed")
    assert done.stdout == ""
    assert (fixed / "f").read_text() == "old"


@pytest.mark.parametrize(
    "attack",
    ["unshare -Ur true", "unshare -m true", "chroot / true", "mount -t tmpfs none /tmp",
     "mount -t proc proc /proc", "hostname x", "mknod /tmp/d b 8 0", "chown 1 f", "nice -n -5 true | cat; exit 1",
     "ip link set lo down"],
)  # fmt: skip
def test_cannot_use_roots_powers(world: World, attack: str) -> None:
    """What needs a capability fails inside, new user namespaces included."""
    world.write("f", "")
    done = world.sh(attack)
    assert done.returncode != 0, done.stdout
    assert world.path("f").stat().st_uid == 0


def test_cannot_write_kernel_settings(world: World) -> None:
    """Root's uid alone would do for /proc/sys (core_pattern runs a program on the host as root)."""
    # The kernel itself asks for a capability before it changes /proc/mtrr or watches pressure.
    look = (
        "find /proc -path '/proc/[0-9]*' -prune -o -path '/proc/pressure' -prune "
        "-o -type f -writable ! -name mtrr -print; "
        "find /sys -type f -writable; [ -w /proc/sysrq-trigger ] && echo sysrq"
    )
    assert world.sh(look).stdout == ""
    # The control: uid 0 without a single capability, as the sandbox has it, but with its own /proc.
    control = world.outside(
        *BARE, "--cap-drop", "ALL", "test", "-w", "/proc/sys/kernel/core_pattern"
    )
    assert control.returncode == 0


def test_cannot_read_root_only_secrets(world: World) -> None:
    """/etc/shadow and the like are hidden although root owns them; the rest of /etc is readable."""
    closed = [
        f"/etc/{name}" for name in ("shadow", "shadow-", "gshadow", "gshadow-", "sudoers")
        if os.path.exists(f"/etc/{name}")
    ]  # fmt: skip
    assert closed
    done = world.sh(
        f"for f in {' '.join(closed)}; do cat $f; chmod 600 $f; cat $f; done; cat /etc/hostname >&2"
    )
    assert done.stdout == ""
    assert world.outside("cat", closed[0]).stdout != ""
    assert world.sh("cat /etc/passwd").stdout.startswith("root:")


def test_cannot_read_ssh_host_keys(world: World) -> None:
    """Host keys are hidden, in an /etc of our own making where they certainly exist."""
    must_work(shutil.which("unshare"), "needs unshare")
    fake = world.mkdir(world.base / "ssh")
    for name in ("ssh_host_ed25519_key", "ssh_host_rsa_key"):
        world.write(fake / name, "PRIVATE", 0o600)
        world.write(fake / f"{name}.pub", "PUBLIC")
    etc = world.mkdir(world.base / "etc")
    for name in ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache"):
        shutil.copy(f"/etc/{name}", etc)
    os.symlink("unused", etc / "dangling")
    world.write(etc / "custom.key", "PRIVATE", 0o600)
    fake.rename(etc / "ssh")
    script = f'mount --bind {etc} /etc && cd {world.project} && exec "$@"'
    show = "cat /etc/ssh/*key /etc/custom.key; cat /etc/ssh/*.pub"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "-", *world.argv("sh", "-c", show)],
        env=world.runner.environ(world.env()), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "PUBLICPUBLIC", done.stderr


def test_cannot_see_the_home_of_root(world: World) -> None:
    """The real /root is not shown when HOME is another directory, nor is any other home."""
    done = world.sh("ls -A /root /home")
    assert done.stdout == ""


def test_files_belong_to_root_inside_and_outside(world: World) -> None:
    """uid 0 is mapped to itself, so a project of root stays root's."""
    done = world.sh("id -u; touch f; stat -c %u f /etc/passwd")
    assert done.stdout.split() == ["0", "0", "0"]
    assert world.path("f").stat().st_uid == 0


def test_cannot_write_files_of_other_users(world: World) -> None:
    """Root without capabilities is bound by modes: another user's private file is closed."""
    path = world.write("theirs", "s", 0o600)
    os.chown(path, 12345, 12345)
    done = world.sh("cat theirs; echo x > theirs")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert path.read_text() == "s"


def test_cannot_reach_kernel_interfaces(world: World) -> None:
    """No writable /sys, no block device, no kernel log, no other namespace's process."""
    done = world.sh(
        "ls /dev | tr '\\n' ' '; for f in /dev/kmsg /dev/mem /dev/vda /dev/sda /dev/kvm /proc/kcore; "
        "do [ -r $f ] && head -c1 $f >/dev/null 2>&1 && echo OPEN $f; done; ls /sys"
    )
    assert "OPEN" not in done.stdout
    assert "vda" not in done.stdout


def test_cannot_change_the_host_s_device_nodes(world: World) -> None:
    """Root owns them, and a bind of the host's node would carry a new mode outside."""
    names = ("null", "zero", "full", "random", "urandom", "tty")
    before = [os.stat(f"/dev/{name}").st_mode for name in names]
    nodes = " ".join(f"/dev/{name}" for name in names)
    done = world.sh(
        f"for n in {nodes}; do chmod 600 $n 2>/dev/null; touch -d @1 $n 2>/dev/null; done; "
        # By descriptor: a device may be open for writing on a read-only mount.
        "python3 -c \"import os; os.fchmod(os.open('/dev/null', os.O_RDWR), 0o600)\" 2>&1 | tail -1; "
        "stat -c %a /dev/null; head -c 3 /dev/zero | wc -c; echo x >/dev/null && echo written"
    )
    error, *rest = done.stdout.split("\n", 1)
    assert "Read-only file system" in error
    assert rest == ["666\n3\nwritten\n"]
    assert [os.stat(f"/dev/{name}").st_mode for name in names] == before
    # The control, on a node of our own: bwrap's bind of a node lets its owner change it.
    node = world.path("node")
    os.mknod(node, 0o020666, os.makedev(1, 3))
    world.outside(
        *BARE, "--cap-drop", "ALL", "--dev-bind", str(node), str(node), "chmod", "600", str(node)
    )
    assert node.stat().st_mode & 0o777 == 0o600
