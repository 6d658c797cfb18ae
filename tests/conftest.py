"""Identities to run things as: root and a throw-away user, or just ourselves.

Kernel tests take the `runner` fixture and so run once per identity. Everything that an identity
touches lives in a world-traversable temporary directory of this session (`shared`), since neither
the checkout nor pytest's own tmp_path need be readable to another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IS_ROOT = os.geteuid() == 0
SIGKILL_WAIT = 10.0
# Of projects; two identities may have the same place.
_numbers = itertools.count(1)


def must_work(condition: object, reason: str) -> None:
    """Skip the test unless `condition` holds; fail it where nothing may skip (CI)."""
    if condition:
        return
    if os.environ.get("AGENT_SANDBOX_MUST_WORK") == "1":
        pytest.fail(f"must work here: {reason}")
    pytest.skip(reason)


class As:
    """One identity: runs programs under its uid with a clean environment."""

    def __init__(self, name: str, *, uid: int, gid: int, home: Path, shared: Path) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home
        self.shared = shared

    def __repr__(self) -> str:
        return f"As({self.name!r})"

    def directory(self, path: Path) -> Path:
        """Make a directory (and missing parents) that belongs to this identity."""
        if not path.parent.exists():
            self.directory(path.parent)
        path.mkdir(mode=0o755)
        path.chmod(0o755)
        self.own(path)
        return path

    def own(self, path: Path) -> Path:
        """Give a path, and what is below it, to this identity."""
        if IS_ROOT:
            for entry in (path, *path.rglob("*")):
                os.chown(entry, self.uid, self.gid, follow_symlinks=False)
        return path

    def project(self, under: Path | None = None) -> Path:
        """A fresh, empty project directory."""
        parent = under or self.shared / f"projects-{self.name}"
        return self.directory(parent / f"project-{next(_numbers)}")

    def environ(self, env: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The clean environment with changes; None takes a variable out."""
        clean = {
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "PATH": PATH,
            "LANG": "C.UTF-8",
        }
        return {k: v for k, v in {**clean, **(env or {})}.items() if v is not None}

    def popen(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a program in a session of its own; streams are text unless told otherwise."""
        if IS_ROOT:
            options = {"user": self.uid, "group": self.gid, "extra_groups": [], **options}
        if not options.keys() & {"text", "encoding"}:
            options = {"encoding": "utf-8", "errors": "surrogateescape", **options}
        options = {"start_new_session": True, "umask": 0o022, **options}
        return subprocess.Popen(args, cwd=cwd or self.home, env=self.environ(env), **options)

    def run(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        input: str | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; its whole process group dies with a timeout."""
        process = self.popen(
            args,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @cached_property
    def obstacle(self) -> str:
        """Why bwrap cannot build any sandbox for this identity; empty when it can."""
        basics = ["--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc"]
        try:
            done = self.run(["bwrap", *basics, "--dev", "/dev", "true"])
        except FileNotFoundError:
            return "bwrap is not installed"
        return done.stderr.strip() if done.returncode else ""

    @cached_property
    def python(self) -> str:
        """An interpreter of at least 3.11 that this identity can read: pytest's own if possible."""
        wanted = "import sys; sys.exit(sys.version_info < (3, 11))"
        for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
            try:
                if self.run([path, "-I", "-c", wanted]).returncode == 0:
                    return path
            except OSError:
                continue
        must_work(condition=False, reason=f"no Python 3.11 or newer that {self.name} can read")
        raise AssertionError

    @cached_property
    def source(self) -> Path:
        """The package's source, where every identity can read it, with bytecode."""
        copy = self.shared / "src"
        if not copy.exists():
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
            make_readable(copy)
        subprocess.run([self.python, "-I", "-m", "compileall", "-q", copy], check=False)
        return copy

    def command(self, tool: str, *args: str | os.PathLike[str]) -> list[str]:
        """The argv of `agent-sandbox` (tool "run") or `sandboxctl` ("ctl") for this identity."""
        entry = self.source / "agent_sandbox" / "cli" / "entry.py"
        start = [self.python, "-I", "-S", "-X", "frozen_modules=on", str(entry), tool]
        return [*start, *(os.fspath(arg) for arg in args)]

    def sandbox(
        self, *args: str | os.PathLike[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `agent-sandbox ARGS…`, in a fresh project unless `cwd` names one."""
        options.setdefault("cwd", None)
        options["cwd"] = options["cwd"] or self.project()
        return self.run(self.command("run", *args), **options)

    def sandboxctl(
        self, *args: str | os.PathLike[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `sandboxctl ARGS…`, in a fresh project unless `cwd` names one."""
        options.setdefault("cwd", None)
        options["cwd"] = options["cwd"] or self.project()
        return self.run(self.command("ctl", *args), **options)


def make_readable(tree: Path) -> None:
    """`chmod -R a+rX`."""
    for entry in (tree, *tree.rglob("*")):
        if not entry.is_symlink():
            mode = entry.stat().st_mode
            entry.chmod(mode | (0o555 if entry.is_dir() or mode & 0o100 else 0o444))


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """A temporary directory that every user can pass through."""
    path = Path(tempfile.mkdtemp(prefix="agsbx-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def superuser(shared: Path) -> As:
    """Root, with a home of its own: tests leave the real one alone."""
    must_work(IS_ROOT, "needs root")
    home = shared / "home-root"
    home.mkdir(mode=0o700)
    return As("root", uid=0, gid=0, home=home, shared=shared)


def add_user() -> str:
    """Make a throw-away user."""
    name = f"agsbx-test-{secrets.token_hex(4)}"
    account("useradd", "--system", "--user-group", "--create-home", "--shell", "/bin/sh", name)
    return name


def remove_user(name: str) -> None:
    """Kill what the user left running, and remove it with its home."""
    end_processes(pwd.getpwnam(name).pw_uid)
    account("userdel", "--remove", name)


class Accounts:
    """Makes each worker's user before any test runs, and removes it after the last.

    useradd replaces /etc/shadow, and a sandbox that root starts at that moment fails.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Called by xdist in the controlling process, for each worker."""
        if IS_ROOT and shutil.which("useradd"):
            self.names.append(add_user())
            node.workerinput["user"] = self.names[-1]

    def pytest_unconfigure(self) -> None:
        """The workers are gone."""
        while self.names:
            remove_user(self.names.pop())


def pytest_configure(config: pytest.Config) -> None:
    """Register the accounts in the controlling process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Accounts(), "accounts")


@pytest.fixture(scope="session")
def user(shared: Path, request: pytest.FixtureRequest) -> Iterator[As]:
    """An unprivileged user: one that exists for this session, or we ourselves."""
    if not IS_ROOT:
        home = shared / "home"
        home.mkdir(mode=0o700)
        name = pwd.getpwuid(os.getuid()).pw_name
        yield As(name, uid=os.getuid(), gid=os.getgid(), home=home, shared=shared)
        return
    must_work(shutil.which("useradd"), "needs useradd to make an unprivileged user")
    given = getattr(request.config, "workerinput", {}).get("user")
    name = given or add_user()
    entry = pwd.getpwnam(name)
    try:
        yield As(name, uid=entry.pw_uid, gid=entry.pw_gid, home=Path(entry.pw_dir), shared=shared)
    finally:
        if given is None:
            remove_user(name)


@pytest.fixture(params=["root", "user"] if IS_ROOT else ["self"])
def runner(request: pytest.FixtureRequest) -> As:
    """Each identity in turn: root and a user, or ourselves where we are not root."""
    identity: As = request.getfixturevalue("superuser" if request.param == "root" else "user")
    return identity


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Tests marked `kernel` need a machine on which bwrap works for their identities."""
    if request.node.get_closest_marker("kernel"):
        named = {"runner", "user", "superuser"} & set(request.fixturenames)
        for name in named or {"superuser" if IS_ROOT else "user"}:
            identity: As = request.getfixturevalue(name)
            must_work(not identity.obstacle, f"no sandbox for {identity.name}: {identity.obstacle}")


def account(*command: str) -> None:
    """Run useradd or userdel; other workers may hold the lock on /etc/passwd for a moment."""
    for _ in range(50):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "lock" not in done.stderr:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        time.sleep(0.2)
    raise RuntimeError(f"{' '.join(command)}: /etc/passwd stays locked")


def processes_of(uid: int) -> list[int]:
    """Every live process of a user, by the kernel's own account of its credentials."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text(errors="replace")
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if str(uid) in fields["Uid"].split() and not fields["State"].startswith("Z"):
            found.append(int(entry.name))
    return found


def end_processes(uid: int) -> None:
    """Kill what a test user left running, until nothing is left."""
    deadline = time.monotonic() + SIGKILL_WAIT
    while (left := processes_of(uid)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note how it ended, for `.ci/again`: make tells no more than that it failed."""
    config = session.config
    if not hasattr(config, "workerinput") and hasattr(config, "cache") and config.cache is not None:
        config.cache.set("agent-sandbox/ended", int(exitstatus))


@contextlib.contextmanager
def closed_sockets(*, absent: bool) -> Iterator[None]:
    """Held by those who make sockets in closed directories, or alone by those who show all of /.

    Root's sandbox cannot cover such a socket, and then it does not start.
    """
    with Path(tempfile.gettempdir(), f"agsbx-test-sockets-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if absent else fcntl.LOCK_SH)
        yield
