"""Files: writes outside of what is writable, reads of what is hidden, renames and links."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from escape.attack import ROOT, Attack, Scene, Trial, guard, hide, trials

pytestmark = pytest.mark.kernel

EXCHANGE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("fake/b", exist_ok=True)
open("fake/b/f", "w").write("evil")
libc.renameat2(-100, b"fake", -100, b"a", 2)
"""


def file_of_another_user(scene: Scene) -> None:
    """A private file of another user, in a project of root."""
    os.chown(scene.hide("theirs", 0o600), 12345, 12345)
    scene.watch(scene.project / "theirs")


def sub_directory(scene: Scene) -> None:
    """The project is a part of a repository."""
    scene.outside("git", "init", "-q")
    scene.guard("file")
    scene.cwd = scene.mkdir("sub")


def has_device(scene: Scene) -> bool:
    """Whether there is a device node in the project."""
    modes = [entry.lstat().st_mode for entry in scene.project.iterdir()]
    return any(stat.S_ISCHR(mode) or stat.S_ISBLK(mode) for mode in modes)


def masks_poisoned(scene: Scene) -> bool:
    """Whether the files that cover what is hidden, in every sandbox, were changed."""
    file, directory = scene.state / "mask" / "file", scene.state / "mask" / "dir"
    info = file.stat()
    return bool(info.st_size or info.st_mode & 0o777 or os.listdir(directory))


def host_devices(scene: Scene) -> None:
    """Device nodes like the host's, and the host's own, with the modes that they have."""
    nodes = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
    place = scene.mkdir(scene.base / "dev")
    for name, minor in nodes.items():
        os.mknod(place / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        scene.watch(place / name)
        scene.watch(Path("/dev") / name)
    os.mknod(place / "tty", stat.S_IFCHR | 0o666, os.makedev(5, 0))
    scene.caller["AGSBX_HOST_DEVICES"] = str(place)


WRITES = (
    Attack(
        name="shell-start-file", invariant=2, what="add a line to ~/.bashrc",
        setup=guard("~/.bashrc"), script="echo evil >> $home/.bashrc", without="private home",
    ),
    Attack(
        name="authorized-keys", invariant=2, what="let the attacker's key log in",
        setup=guard("~/.ssh/authorized_keys"),
        script="mkdir -p $home/.ssh; echo evil >> $home/.ssh/authorized_keys",
        without="private home",
    ),
    Attack(
        name="write-through-a-link", invariant=2, what="a link in the project leads to ~/.bashrc",
        setup=guard("~/.bashrc"), script="ln -sf $home/.bashrc l; echo evil > l",
        without="private home",
    ),
    Attack(
        name="write-through-proc", invariant=2, what="name the file by way of /proc/self/root",
        setup=guard("~/.bashrc"),
        script="echo evil > /proc/self/root$home/.bashrc; echo evil > /proc/1/root$home/.bashrc",
        without="private home",
    ),
    Attack(
        name="write-beside-the-home", invariant=2, what="a directory that nobody named",
        setup=guard("{base}/elsewhere/file"), script="echo evil > $base/elsewhere/file",
        without="--rw {base}/elsewhere",
    ),
    Attack(
        name="write-a-read-only-file", invariant=2, what="write, truncate, change mode and owner",
        setup=guard("fixed/file"), flags=("--ro", "fixed"),
        script="cd fixed; echo evil > file; : > file; chmod 777 file; rm -f file; mv file x",
        without="read-only mounts",
    ),
    Attack(
        name="hard-link-to-a-read-only-file", invariant=2, what="write under a second name",
        setup=guard("fixed"), flags=("--ro", "fixed"),
        script="ln fixed alias; echo evil > alias", without="mounts on files",
    ),
    Attack(
        name="rename-over-a-read-only-file", invariant=2, what="put another file in its place",
        setup=guard("fixed"), flags=("--ro", "fixed"), script="echo evil > x; mv -f x fixed",
        without="mounts on files",
    ),
    Attack(
        name="rename-above-a-read-only-file", invariant=2, what="replace the directory above",
        setup=guard("a/b/file"), flags=("--ro", "a/b/file"),
        script="mv a x; mkdir -p a/b; echo evil > a/b/file", without="pins",
    ),
    Attack(
        name="exchange-above-a-read-only-file", invariant=2, what="renameat2(RENAME_EXCHANGE)",
        setup=guard("a/b/file"), flags=("--ro", "a/b/file"), script=EXCHANGE, python=True,
        without="pins",
    ),
    Attack(
        name="program-on-path", invariant=2, what="replace a program in ~/.local/bin",
        setup=guard("~/.local/bin/tool"),
        script="echo evil > $home/.local/bin/tool; echo evil > $home/.local/bin/ls",
        without="read-only mounts",
    ),
    Attack(
        name="directory-on-path", invariant=2, what="replace a program elsewhere on PATH",
        setup=lambda s: [
            s.guard("~/odd/bin/tool"),
            s.caller.update(PATH=f"{s.home}/odd/bin:/usr/bin:/bin"),
        ],
        script="echo evil > $home/odd/bin/tool", without="read-only mounts",
    ),
    Attack(
        name="linter-settings", invariant=9, what="switch the checks off",
        setup=guard("pyproject.toml", ".editorconfig"),
        script="echo evil > pyproject.toml; rm -f .editorconfig", without="read-only mounts",
    ),
    Attack(
        name="rest-of-the-repository", invariant=2, what="write above the project",
        setup=sub_directory, script="echo evil > ../file; mv ../file ../x",
        without="read-only mounts",
    ),
    Attack(
        name="system-tree", invariant=2, what="put a program into /usr/local/bin", who=(ROOT,),
        setup=lambda s: s.unwanted(Path(f"/usr/local/bin/agsbx-{s.token}")),
        script="echo evil > /usr/local/bin/agsbx-$token", without="read-only mounts",
    ),
    Attack(
        name="host-tmp-write", invariant=2, what="leave a file in the host's /tmp",
        setup=lambda s: s.unwanted(Path(f"/tmp/agsbx-{s.token}")),
        script="echo evil > /tmp/agsbx-$token", without="private /tmp",
    ),
    Attack(
        name="modes-of-device-nodes", invariant=2, what="close /dev/null for everybody",
        who=(ROOT,), setup=host_devices, script="chmod 600 /dev/null /dev/zero /dev/urandom",
        without="sealed device nodes",
    ),
    Attack(
        name="make-a-device-node", invariant=2, what="a node of a disk in the project",
        who=(ROOT,), script="mknod disk b 8 0; mknod mem c 1 1", escaped=has_device,
        without="user namespace",
    ),
)  # fmt: skip

READS = (
    Attack(
        name="read-a-key", invariant=3, what="~/.ssh", setup=hide("~/.ssh/id_ed25519"),
        script="cat $home/.ssh/id_ed25519", without="private home",
    ),
    Attack(
        name="read-another-project", invariant=3, what="the settings of a neighbour",
        setup=hide("~/work/other/.env"), script="cat ../other/.env; cat $home/work/*/.env",
        without="private home",
    ),
    Attack(
        name="read-the-hosts-tmp", invariant=3, what="somebody's file in /tmp",
        setup=lambda s: s.unwanted(s.hide(f"/tmp/agsbx-{s.token}/file").parent),
        script="cat /tmp/agsbx-$token/file", without="private /tmp",
    ),
    Attack(
        name="read-shared-memory", invariant=3, what="a segment in the host's /dev/shm",
        setup=lambda s: s.unwanted(s.hide(f"/dev/shm/agsbx-{s.token}")),
        script="cat /dev/shm/agsbx-$token", without="devices of its own",
    ),
    Attack(
        name="read-an-excluded-file", invariant=3, what="read, copy, link, compress",
        setup=hide(".env"), flags=("--exclude", ".env"),
        script="cat .env; cp .env copy; ln .env l; cat l; tar c .env; chmod 644 .env; cat .env",
        without="masks",
    ),
    Attack(
        name="read-an-excluded-directory", invariant=3, what="list it, read below it",
        setup=hide("secrets/deep/key"), flags=("--exclude", "secrets"),
        script="cat secrets/deep/key; cd secrets/deep; cat key; grep -r . $project/secrets",
        without="masks",
    ),
    Attack(
        name="read-by-way-of-proc", invariant=3, what="/proc/*/root, /proc/*/cwd, /proc/self/fd",
        setup=hide("config/.env"), flags=("--exclude", "config/.env"),
        script="""
            for p in 1 self $$; do
                cat /proc/$p/root$project/config/.env /proc/$p/cwd/config/.env
            done
            exec 5<config; cat /proc/self/fd/5/.env
        """, without="masks",
    ),
    Attack(
        name="read-the-target-of-an-excluded-link", invariant=3, what="the other name",
        setup=lambda s: [s.hide("kept/real"), s.link("alias", "second"), s.link("second", "kept")],
        flags=("--exclude", "alias"), script="cat kept/real alias/real second/real",
        without="masks",
    ),
    Attack(
        name="read-what-a-glob-hides", invariant=3, what="any depth, leading dots, odd names",
        setup=hide(".env", "a/b/.env.local", "a/ b\\040c/.env", "-x/[y]/.env"),
        flags=("--exclude", "**/.env*"),
        script="find . -name '.env*' -exec cat {} +; cat -- -x/*/.env", without="masks",
    ),
    Attack(
        name="delete-an-excluded-file", invariant=3, what="destroy what cannot be read",
        setup=hide("config/.env"), flags=("--exclude", "config/.env"),
        script="rm -rf config; : > config/.env; echo x > y; mv -f y config/.env",
        without="masks",
    ),
    Attack(
        name="poison-the-mask", invariant=2, what="write into the file that hides others",
        setup=hide(".env", "secrets/key"),
        flags=("--exclude", ".env", "--exclude", "secrets"),
        script="chmod 666 .env; echo evil > .env; echo evil > secrets/key", escaped=masks_poisoned,
        without="read-only masks",
    ),
    Attack(
        name="file-of-another-user", invariant=7, what="root reads what root may not", who=(ROOT,),
        setup=file_of_another_user, script="cat theirs; chmod 644 theirs; cat theirs",
        without="user namespace",
    ),
)  # fmt: skip

ATTACKS = WRITES + READS


@trials(WRITES)
def test_cannot_write_outside(trial: Trial) -> None:
    trial.run()


@trials(READS)
def test_cannot_read_what_is_hidden(trial: Trial) -> None:
    trial.run()
