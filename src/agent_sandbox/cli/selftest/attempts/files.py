"""Attempts on files: what can be read and written, now, by the next run, and by the host later."""

from __future__ import annotations

import os
import shutil
import stat
import time

from .frame import ASK, Got, append, attempt, checked, each, facts, libc, read, say, write

# How long a file may stay open after the host has replaced it.
KEEPER_SECONDS = 1.0
# linux/mount.h, linux/fs.h, linux/fcntl.h
MS_REMOUNT_BIND, MNT_DETACH, RENAME_EXCHANGE, AT_FDCWD = 0x1020, 2, 2, -100
# What editors, shells, agents and agent-sandbox itself act on when they find it in a project.
CONTROL = (
    ".vscode/tasks.json", ".idea/workspace.xml", ".envrc", ".mcp.json", ".claude/settings.json",
    ".agent-sandbox.toml",
)  # fmt: skip


@attempt
def write_home() -> str:
    """Your shell would run it."""
    path = f"{facts['home']}/.bashrc"
    return each(
        ("append", lambda: append(path)), ("by /proc", lambda: append(f"/proc/self/root{path}"))
    )


@attempt
def write_beside() -> str:
    """Directories that nobody has named."""
    return each(
        ("write", lambda: append(f"{facts['base']}/elsewhere/file")),
        ("from the project", lambda: append("../../../elsewhere/file")),
        ("in /tmp", lambda: write(f"/tmp/{facts['tag']}")),
    )


@attempt
def write_read_only() -> str:
    """The file itself, by a second name, and in its place."""

    def link() -> None:
        os.link("fixed", "alias")
        append("alias")

    write("new")
    return each(
        ("write", lambda: append("fixed")),
        ("link", link),
        ("mode", lambda: os.chmod("fixed", 0o700)),
        ("rename over", lambda: os.rename("new", "fixed")),
        ("remove", lambda: os.unlink("fixed")),
    )


@attempt
def replace_above() -> str:
    """A mount protects a name, not the directories above it."""

    def rename() -> None:
        os.rename("deep", "moved")
        write("deep/er/file")

    write("other/er/file")
    swap = (AT_FDCWD, b"other", AT_FDCWD, b"deep", RENAME_EXCHANGE)
    return each(("rename", rename), ("exchange", lambda: checked(libc.renameat2(*swap))))


@attempt
def undo_mounts() -> str:
    """As the sandbox's own root would."""

    def remount() -> None:
        checked(libc.mount(None, b"kept", None, MS_REMOUNT_BIND, None))
        write("kept/remounted")

    def unmount() -> str:
        checked(libc.umount2(b".env", MNT_DETACH))
        return read(".env")

    return each(("remount", remount), ("unmount", unmount))


@attempt
def system_trees() -> str:
    """Asked, not written: these are the real ones."""
    trees = [path for path in ("/usr", "/etc", "/bin", "/lib") if os.path.isdir(path)]
    loose = [path for path in trees if not os.statvfs(path).f_flag & os.ST_RDONLY]
    return Got(f"writable: {' '.join(loose)}") if loose else f"read-only: {' '.join(trees)}"


@attempt
def kernel_settings() -> str:
    """Opened for writing, and closed: nothing is written."""
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    return Got("core_pattern was opened for writing")


@attempt
def device_nodes() -> str:
    """The mode that it has already; outside, the time of the change would show."""
    os.chmod("/dev/null", stat.S_IMODE(os.stat("/dev/null").st_mode))
    return Got("mode set")


@attempt
def root_secrets() -> str:
    """Opened, not read; a mask is an empty file."""
    fd = os.open("/etc/shadow", os.O_RDONLY)
    return Got("/etc/shadow was opened") if os.fstat(fd).st_size else "an empty file"


@attempt
def read_home() -> str:
    """By three names."""
    key = f"{facts['home']}/.ssh/id_ed25519"
    return each(
        ("read", lambda: read(key)),
        ("by /proc", lambda: read(f"/proc/self/root{key}")),
        ("from the project", lambda: read("../../.ssh/id_ed25519")),
    )


@attempt
def read_excluded() -> str:
    """The file, the directory, and what can be done to a name."""

    def link() -> str:
        os.link(".env", "env-alias")
        return read("env-alias")

    def rename() -> str:
        os.rename(".env", "env-moved")
        return read("env-moved")

    return each(
        ("read", lambda: read(".env")),
        ("by /proc", lambda: read("/proc/self/cwd/.env")),
        ("directory", lambda: read("keys/one")),
        ("link", link),
        ("rename", rename),
    )


@attempt
def read_saved() -> str:
    """A new file under a hidden name: the kernel drops a mount together with the old file.

    What counts is whether it is hidden again soon. The moment until then is not closed.
    """
    before = each(("before", lambda: read("saved")))
    say("read_saved", ASK, "save")
    os.read(0, 1)
    deadline = time.monotonic() + KEEPER_SECONDS
    while (after := each(("after", lambda: read("saved")))) and facts["tag"] in after:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return f"{before}; {after}"


# --- what a later run would trust -----------------------------------------------------------------


@attempt
def own_state() -> str:
    """Whoever writes there decides what the next run trusts."""
    names = ("trust/x", "tools", "mask/file")
    return each(*((name, lambda n=name: write(f"{facts['state']}/{n}")) for name in names))


@attempt
def plant_link() -> str:
    """The first half of `planted_link`."""
    os.symlink(f"{facts['home']}/.ssh", "cache")
    return "planted"


@attempt
def planted_link() -> str:
    """The next run is told to show it."""
    return read("cache/id_ed25519")


@attempt
def cloned_policy() -> str:
    """The project's own policy file asks for it."""
    return read(f"{facts['home']}/.ssh/id_ed25519")


@attempt
def own_bwrap() -> str:
    """It stands first on PATH, and would have run before us."""
    return "the sandbox was started"


@attempt
def weaker_start() -> str:
    """To get here is enough."""
    write("started")
    return "the command ran"


# --- what is left, and what the host would run ----------------------------------------------------


@attempt
def set_user_id() -> str:
    """A program that gives others your rights."""
    mode = stat.S_ISUID | 0o755

    def create() -> None:
        os.close(os.open("suid-2", os.O_CREAT | os.O_WRONLY, mode))

    write("suid-1")
    return each(("chmod", lambda: os.chmod("suid-1", mode)), ("create", create))


@attempt
def clean_up() -> str:
    """Links that a clean-up might follow, and directories in which it might get stuck."""
    # In the host's /tmp, should it be that, these must be known for ours.
    top = f"/tmp/{facts['tag']}-a"
    os.makedirs(f"{top}/b/c")
    for path in (f"/tmp/{facts['tag']}-link", f"{top}/b/c/link"):
        os.symlink(f"{facts['home']}/precious", path)
    write(f"{top}/b/c/file")
    for path in (f"{top}/b/c", f"{top}/b", top):
        os.chmod(path, 0)
    return "laid"


def _payload(name: str) -> str:
    """A program that leaves a mark where only the host can write."""
    path = os.path.abspath(f"payload-{name}")
    write(path, f"#!/bin/sh\n: > '{facts['base']}/ran-{name}'\n", 0o755)
    return path


@attempt
def git_control() -> str:
    """The next commit, or the next `git status`, outside would run it."""
    payload = _payload("git_control")
    with open(".git/config", encoding="utf-8") as file:
        config = f"{file.read()}\n[core]\n\tfsmonitor = {payload}\n"

    def plant() -> None:
        write(".git/hooks/pre-commit", f"#!/bin/sh\n'{payload}'\n", 0o755)

    def replace() -> None:
        os.rename(".git/hooks", ".git/hooks-moved")
        plant()

    def over() -> None:
        write(".git/config-new", config)
        os.rename(".git/config-new", ".git/config")

    return each(
        ("hook", plant),
        ("link", lambda: os.symlink(payload, ".git/hooks/pre-commit")),
        ("rename hooks", replace),
        ("config", lambda: write(".git/config", config)),
        ("rename over", over),
    )


@attempt
def git_nested() -> str:
    """Nothing is mounted in a repository that merely lies below the project."""
    payload = _payload("git_nested")
    write("vendor/.git/hooks/pre-commit", f"#!/bin/sh\n'{payload}'\n", 0o755)
    return "planted"


@attempt
def git_replaced() -> str:
    """A copy would have hooks that nothing covers."""
    payload = _payload("git_replaced")

    def replace() -> None:
        os.rename(".git", "moved-git")
        shutil.copytree("moved-git", ".git")
        write(".git/hooks/post-commit", f"#!/bin/sh\n'{payload}'\n", 0o755)

    return each(("rename", replace))


@attempt
def control_files() -> str:
    """None of them is there yet."""
    return each(*((name, lambda n=name: write(n)) for name in CONTROL))
