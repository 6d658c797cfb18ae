"""The inner layer: bwrap around every command, where the pod's profile lets it be built.

The image is read-only, the sandbox's three directories can be written, the bundle and the way
behind the directories are hidden. A command has its own process numbers and, with network "off",
a network in which there is nothing.
"""

from __future__ import annotations

import os

from ..policy.owned import IDENTITY, PARTS
from ..record import Record
from . import terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRIED = (terms.FRESH, terms.BOUND)
# How long one attempt may take, in seconds.
PROBE_SECONDS = 10.0
# The starter's descriptors: loader, shell, libraries, what it reads. A shell closes only those
# that have one digit.
FIRST_GIVEN = 3
STARTER = tuple(f"/proc/self/fd/{FIRST_GIVEN + n}" for n in range(4))
# A pipe holds 64 KiB (pipe(7)).
MOST_LINE = 60_000


class Bundle(Record):
    """Where our own programs are, and the sandbox's files."""

    root: str = terms.ROOT
    place: str = terms.PLACE

    def program(self, name: str) -> tuple[str, ...]:
        """A program of the bundle, by our own loader: the image may have no libc, or another."""
        root = self.root
        return (f"{root}/bin/loader", "--library-path", f"{root}/lib", f"{root}/bin/{name}")


class Wish(Record):
    """What differs from command to command."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    network: bool = False
    terminal: bool = False


# What of the bundle a command with a terminal can see: that which gives it the terminal.
TERMINAL_FILES = ("bin/loader", "bin/setsid", "lib/libc.so.6")


def options(bundle: Bundle, form: str, wish: Wish) -> list[str]:
    """bwrap's options, but for descriptors. Pure.

    The filter refuses new namespaces, so --disable-userns, which needs a /proc/sys that can be
    written, would add nothing.
    """
    found = [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts",
        "--unshare-cgroup-try", "--uid", str(IDENTITY), "--gid", str(IDENTITY),
        "--cap-drop", "ALL", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev",
    ]  # fmt: skip
    if form == terms.FRESH:
        # bwrap's own first process is for a moment without a filter: nobody may steer it.
        found += ["--proc", "/proc", "--ro-bind", f"{bundle.root}/empty", "/proc/1"]
    if not wish.network:
        found.append("--unshare-net")
    for part in PARTS:
        found += ["--bind", f"{bundle.place}{part}", part]
    # After the binds: these are a second way to the same files.
    found += ["--ro-bind", f"{bundle.root}/empty", bundle.place]
    # It has the names of TERMINAL_FILES, to mount on.
    found += ["--ro-bind", f"{bundle.root}/hidden", bundle.root]
    if wish.terminal:
        for file in TERMINAL_FILES:
            found += ["--ro-bind", f"{bundle.root}/{file}", f"{bundle.root}/{file}"]
    else:
        # No signal to its own process group reaches bwrap's.
        found.append("--new-session")
    found += ["--chdir", wish.cwd, "--clearenv"]
    for name, value in wish.env.items():
        found += ["--setenv", name, value]
    return found


def command(bundle: Bundle, wish: Wish) -> tuple[str, ...]:
    """What bwrap is to execute. A terminal is the command's alone: Ctrl-C must not end bwrap."""
    if not wish.terminal:
        return wish.argv
    return (*bundle.program("setsid"), "--ctty", "--", *wish.argv)


def starter_files(bundle: Bundle) -> tuple[str, ...]:
    """What the starter is made of. It has them open: where it runs, the bundle is hidden."""
    return tuple(f"{bundle.root}/{name}" for name in ("bin/loader", "bin/dash", "lib"))


def starter() -> tuple[str, ...]:
    """A shell that reads what it is to become from the last of its descriptors."""
    loader, shell, library, script = STARTER
    return (loader, "--library-path", library, shell, script)


def line(argv: Sequence[str], env: Mapping[str, str], cwd: str, *, reads: bool) -> bytes | None:
    """What makes the starter a command; None for what a shell cannot say. Pure."""
    if argv[0].startswith("-") or not all(name.isascii() and name.isidentifier() for name in env):
        return None
    exports = [b" " + os.fsencode(name) + b"=" + _quoted(env[name]) for name in env]
    closed = b"".join(b" %d<&-" % (FIRST_GIVEN + n) for n in range(len(STARTER)))
    said = b"".join((
        b"cd -P -- ", _quoted(cwd), b" || exit 1\nunset OLDPWD\nexport", *exports, b"\nexec",
        *(b" " + _quoted(word) for word in argv), b"" if reads else b" </dev/null", closed, b"\n",
    ))  # fmt: skip
    return said if len(said) <= MOST_LINE else None


def _quoted(word: str) -> bytes:
    return b"'" + os.fsencode(word).replace(b"'", b"'\\''") + b"'"


def packed(words: Sequence[str]) -> bytes:
    """Options for --args: they do not show in /proc/*/cmdline, and no limit of execve applies."""
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def in_memory(name: str, data: bytes) -> int:
    """A file in memory, to be read from its start."""
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def vector(bundle: Bundle, arguments: int, filter_fd: int, status: int, block: int) -> list[str]:
    """The command line of bwrap, up to the command."""
    return [
        *bundle.program("bwrap"), "--args", str(arguments), "--seccomp", str(filter_fd),
        "--json-status-fd", str(status), "--block-fd", str(block), "--",
    ]  # fmt: skip


class Probe:
    """Finds out which form works here. Both attempts run at once, beside whatever else starts."""

    def __init__(self, bundle: Bundle, filter_bytes: bytes) -> None:
        self._attempts: list[tuple[str, int]] = []
        if not all(os.path.isdir(path) for path in (*PARTS, bundle.root, bundle.place)):
            # Nothing to mount on: the root is read-only.
            return
        for form in TRIED:
            wish = Wish(argv=(), env={}, cwd="/")
            words = packed(options(bundle, form, wish))
            self._attempts.append((form, _attempt(bundle, words, filter_bytes)))

    def result(self) -> str:
        """The better form that works; "" for none."""
        codes = {form: os.waitpid(pid, 0)[1] for form, pid in self._attempts}
        return next((form for form in TRIED if codes.get(form, 1) == 0), terms.NONE)


def _attempt(bundle: Bundle, words: bytes, filter_bytes: bytes) -> int:
    arguments, filter_fd = in_memory("probe", words), in_memory("filter", filter_bytes)
    null = os.open(os.devnull, os.O_RDWR)
    # Whatever the image has: the loader lists its own help and needs no other file. It must be
    # bound back, since the bundle is hidden.
    loader = f"{bundle.root}/bin/loader"
    argv = [
        *bundle.program("bwrap"), "--args", str(arguments), "--seccomp", str(filter_fd),
        "--ro-bind", loader, loader, "--", loader, "--help",
    ]  # fmt: skip
    actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in range(3)]
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (arguments, filter_fd)]
    try:
        return os.posix_spawn(argv[0], argv, {}, file_actions=actions)
    finally:
        for fd in (arguments, filter_fd, null):
            os.close(fd)
