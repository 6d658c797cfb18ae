"""The throw-away world of `selftest`: a home, projects, secrets, services and processes to attack.

Nothing in it is the user's. All of it is below one directory that is removed at the end, and after
a crash by the next `selftest`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import sys
import termios
import time

from ...errors import HostError
from ...host.facts import SYSTEM_TREES
from ...host.tools import STANDARD_DIRS, find_bwrap
from ...launch import sweeping, syscalls
from ...policy import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

PREFIX = "agsbx-selftest-"
# What is left of the 108 bytes of a socket's path (unix(7)) for the names below.
LONGEST = 108 - len(f"/{PREFIX}12345678/home/work/main/socket") - 1
# Places that a sandbox makes itself or shows to everybody.
UNFIT = ("/tmp", "/dev", "/proc", "/run", "/sys", *SYSTEM_TREES)
# machine → SYS_add_key
SYS_ADD_KEY = {"x86_64": 248, "aarch64": 217}
KEY_SPEC_SESSION_KEYRING = -3
# Seconds in which a world belongs to whoever has just made it.
YOUNG = 60.0
# Told to the canary last: the kernel hands out lower numbers first.
REPORT = signal.SIGRTMIN + 5
SECRETS = ("home", "excluded", "saved", "variable", "password", "keyring", "command line")


class Listener:
    """A service of the host: whether anybody has reached it."""

    def __init__(self, family: int, kind: int, address: object) -> None:
        self._socket = socket.socket(family, kind)
        try:
            self._socket.bind(address)  # type: ignore[arg-type]
        except OSError:
            self._socket.close()
            raise
        self._stream = kind == socket.SOCK_STREAM
        if self._stream:
            self._socket.listen()
        self._socket.setblocking(False)  # noqa: FBT003 - positional only

    @property
    def port(self) -> str:
        """Where it listens."""
        return str(self._socket.getsockname()[1])

    def reached(self) -> bool:
        """Whether a connection or a message is waiting: the kernel has it queued."""
        try:
            if self._stream:
                self._socket.accept()[0].close()
            else:
                self._socket.recv(1)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class Canary:
    """A process of the host that notes the harmless signals it gets. It leads a process group."""

    NOTED = (signal.SIGURG, signal.SIGWINCH, REPORT)

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._told, tell = os.pipe()
        ready, up = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                syscalls.die_with_parent(os.uname().machine)
                signal.pthread_sigmask(signal.SIG_BLOCK, self.NOTED)
                os.write(up, b"x")
                while True:
                    number = signal.sigwait(self.NOTED)
                    os.write(tell, bytes((number,)))
            finally:
                os._exit(1)
        os.close(tell)
        os.close(up)
        os.read(ready, 1)
        os.close(ready)

    def noted(self) -> set[int]:
        """The signals that have arrived until now."""
        os.kill(self.pid, REPORT)
        told: set[int] = set()
        while REPORT not in told:
            told |= set(os.read(self._told, 64) or (REPORT,))
        self._noted |= told - {REPORT}
        return self._noted

    def close(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._told)


class World:
    """Everything that the attempts aim at, and what has become of it."""

    def __init__(self) -> None:
        random = os.urandom(4).hex()
        self.base = f"{_place()}/{PREFIX}{random}"
        # An attacker knows how secrets begin; whoever tells the rest has read one.
        self.tag = f"agsbx{random}"
        self.secrets = {name: f"{self.tag}-{os.urandom(12).hex()}" for name in SECRETS}
        self.home = f"{self.base}/home"
        self.main = f"{self.home}/work/main"
        self.state = f"{self.home}/.local/state/agent-sandbox"
        self.bwrap = find_bwrap(os.environ, self.base) or ""
        self.git = shutil.which("git") or ""
        # What this machine does not have, by the name of the attack that needs it.
        self.lacking: dict[str, str] = {}
        # The same, where the fault is not the machine's: then the attack is missed.
        self.faults: dict[str, str] = {}
        self.listeners: dict[str, Listener] = {}
        self.descriptor = self.terminal = self._screen = self._lock = -1
        self._bystander: subprocess.Popen[bytes] | None = None
        self._device = 0
        os.mkdir(self.base, 0o700)
        self._lock = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # First: a fork of ours has nothing open yet.
        self.canary = Canary()
        try:
            self._furnish()
        except BaseException:
            self.close()
            raise

    # --- preparing --------------------------------------------------------------------------------

    def _furnish(self) -> None:
        key = self.secrets["home"]
        self.write(f"{self.home}/.ssh/id_ed25519", key)
        self.write(f"{self.home}/.bashrc", "# yours\n")
        self.write(f"{self.home}/precious/file", "# yours\n")
        self.write(f"{self.base}/elsewhere/file", "# yours\n")
        for name in ("fixed", "deep/er/file", "kept/file", "file"):
            self.write(f"{self.main}/{name}", "# yours\n")
        for name in (".env", "keys/one"):
            self.write(f"{self.main}/{name}", self.secrets["excluded"])
        self.write(f"{self.main}/saved", "old\n")
        for name in ("offline", "limited", "weaker"):
            os.makedirs(self.project(name))
        self.write(
            f"{self.project('cloned')}/.agent-sandbox.toml", '[filesystem]\nro = ["~/.ssh"]\n'
        )
        self._bring_bwrap()
        self.descriptor = os.open(f"{self.home}/.ssh", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.stat("/dev/null").st_ctime_ns
        if os.uname().machine != "x86_64":
            self.lacking["foreign_calls"] = "the attempt is written for x86_64 alone"
        for name, path in (
            ("root_secrets", "/etc/shadow"),
            ("kernel_settings", "/proc/sys/kernel/core_pattern"),
        ):
            if not os.path.exists(path):
                self.lacking[name] = f"there is no {path}"
        self._open_terminal()
        self._listen()
        self._add_key()
        self._start_bystander()
        self._make_repository()

    def project(self, name: str) -> str:
        """A project's directory."""
        return f"{self.home}/work/{name}"

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """Make a file with the directories above it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, mode)

    def _bring_bwrap(self) -> None:
        """A bwrap that the project brings: it says that it ran, and does the work."""
        text = f"#!/bin/sh\n: > '{self.base}/ran-own_bwrap'\nexec '{self.bwrap}' \"$@\"\n"
        self.write(f"{self.main}/bin/bwrap", text, 0o755)

    def _open_terminal(self) -> None:
        """A terminal of our own, on which input is there as soon as it is typed."""
        try:
            self._screen, self.terminal = os.openpty()
        except OSError as error:
            self.lacking["terminal"] = f"no pseudo-terminal: {error.strerror}"
            return
        import tty

        tty.setraw(self.terminal)

    def _listen(self) -> None:
        os.mkdir(f"{self.base}/engine")
        unix, stream = socket.AF_UNIX, socket.SOCK_STREAM
        for name, family, kind, address in (
            ("project_socket", unix, stream, f"{self.main}/socket"),
            ("engine_socket", unix, stream, f"{self.base}/engine/socket"),
            ("abstract_socket", unix, stream, f"\0{self.tag}"),
            ("tcp", socket.AF_INET, stream, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ):
            try:
                self.listeners[name] = Listener(family, kind, address)
            except OSError as error:
                attack = "network" if family == socket.AF_INET else name
                self.faults[attack] = f"cannot listen: {error.strerror or error}"

    def _add_key(self) -> None:
        """A key in a session keyring of our own: the user's is left alone."""
        machine = os.uname().machine
        secret = self.secrets["keyring"].encode()
        try:
            syscalls.syscall(
                syscalls.SYS_KEYCTL[machine], syscalls.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0
            )
            syscalls.syscall(
                SYS_ADD_KEY[machine], b"user\0", self.tag.encode() + b"\0", secret, len(secret),
                KEY_SPEC_SESSION_KEYRING,
            )  # fmt: skip
        except OSError as error:
            self.lacking["keyring"] = f"no keyrings here: {error.strerror}"

    def _start_bystander(self) -> None:
        """A process with a secret in its arguments and its environment. It ends with its input."""
        import subprocess

        secret = self.secrets["command line"]
        self._bystander = subprocess.Popen(  # noqa: S603 - a shell that waits
            ["/bin/sh", "-c", "read line", secret], stdin=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "SECRET": secret}, process_group=0,
        )  # fmt: skip

    def _make_repository(self) -> None:
        if not self.git:
            for name in ("git_control", "git_replaced", "git_nested"):
                self.lacking[name] = "git is not installed"
            return
        for top in (self.main, f"{self.main}/vendor"):
            os.makedirs(top, exist_ok=True)
            self.run_git(top, "init", "-q", "--template=")
            os.mkdir(f"{top}/.git/hooks")
        # With a file, so that `git status` has something to compare.
        self.run_git(self.main, "add", "file")
        self.run_git(self.main, "commit", "-q", "-m", "first")

    # --- what the host does meanwhile and afterwards ----------------------------------------------

    def run_git(self, top: str, *arguments: str) -> None:
        """Git as the user would run it outside, without anybody's settings."""
        import subprocess

        env = {
            "HOME": self.home, "PATH": f"{os.path.dirname(self.git)}:/usr/bin:/bin",
            "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
            **{
                f"GIT_{who}_{what}": "selftest"
                for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
        }  # fmt: skip
        subprocess.run(  # noqa: S603 - a fixed program
            [self.git, *arguments], cwd=top, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=20,
        )  # fmt: skip

    def use_git(self) -> None:
        """What a user does after a run; hooks and settings that were planted act now."""
        if self.git:
            self.run_git(self.main, "status")
            for top in (self.main, f"{self.main}/vendor"):
                self.run_git(top, "commit", "-q", "--allow-empty", "-m", "second")

    def save(self) -> None:
        """Save a hidden file as editors do: a new one, renamed over the old one."""
        self.write(f"{self.main}/saved-new", self.secrets["saved"])
        os.rename(f"{self.main}/saved-new", f"{self.main}/saved")

    # --- what has become of it --------------------------------------------------------------------

    def text(self, path: str) -> str:
        """The content of a file of this world, or '' when it is gone. No link is followed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16) if stat.S_ISREG(os.fstat(fd).st_mode) else ""

    def touched_in(self, top: str, skip: tuple[str, ...] = ()) -> str:
        """The first file below a directory in which the tag was written."""
        for directory, names, files in os.walk(top):
            names[:] = [name for name in names if name not in skip]
            for name in files:
                if self.text(f"{directory}/{name}").startswith(self.tag):
                    return f"{directory}/{name}"
        return ""

    def orphan_lives(self) -> bool:
        """Whether somebody still holds the lock that a process inside has taken."""
        try:
            fd = os.open(f"{self.main}/orphan", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def typed(self) -> int:
        """How many bytes wait on the terminal as if somebody had typed them."""
        answer = fcntl.ioctl(self.terminal, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def device_changed(self) -> bool:
        """Whether somebody has set the mode of the host's /dev/null, be it to the same."""
        return os.stat("/dev/null").st_ctime_ns != self._device

    def close(self) -> None:
        """End its processes and remove it."""
        self.canary.close()
        if self._bystander is not None and self._bystander.stdin is not None:
            self._bystander.stdin.close()
            self._bystander.wait()
        for listener in self.listeners.values():
            listener.close()
        for fd in (self.descriptor, self.terminal, self._screen):
            if fd >= 0:
                os.close(fd)
        for name in os.listdir("/tmp"):
            # Here only when a sandbox has got out of its own /tmp.
            if name.startswith(self.tag):
                _remove(f"/tmp/{name}")
        try:
            sweeping.remove_tree(self.base)
        except OSError:
            # Somebody who got out still writes there. The next selftest removes it.
            pass
        os.close(self._lock)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        sweeping.remove_tree(path)
    else:
        os.unlink(path)


def _place() -> str:
    """Where a world can be: ours to write, and nothing that every sandbox shows or covers."""
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    for wanted in (cache, f"{home}/.cache", home, "/var/tmp", "/tmp"):
        place = os.path.realpath(wanted) if wanted.startswith("/") else ""
        fits = place == "/tmp" or not any(paths.within(place, tree) for tree in UNFIT)
        fits = fits and len(place) <= LONGEST
        if place not in ("", "/") and fits and os.access(place, os.W_OK | os.X_OK):
            _sweep(place)
            return place
    raise HostError(
        "cannot find a directory for the attempts",
        hint="set HOME to a directory that you can write",
        code="bad-home",
    )


def _sweep(place: str) -> None:
    """Remove what an earlier selftest left when it was killed: nobody holds its lock."""
    with os.scandir(place) as scanned:
        found = [item.path for item in scanned if item.name.startswith(PREFIX)]
    for path in found:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(fd)
            # A young one may be about to be locked.
            if info.st_uid == os.getuid() and time.time() - info.st_mtime > YOUNG:
                sweeping.remove_tree(path)
        except OSError:
            continue
        finally:
            os.close(fd)


def search_path(world: World, project: str) -> str:
    """PATH for the attempts: the project's own programs first, as a careless user has it."""
    found = [os.path.dirname(program) for program in (world.bwrap, world.git) if program]
    return ":".join(dict.fromkeys((f"{project}/bin", *STANDARD_DIRS, *found)))
