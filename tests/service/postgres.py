"""A real PostgreSQL server of Debian's package, of this session alone, on a unix socket."""

from __future__ import annotations

import glob
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.service import store_address
from agent_sandbox.service.state import State
from agent_sandbox.service.store_address import Database
from conftest import IS_ROOT, As, must_work

START_SECONDS = 60
# Small, and without syncs: a power cut is not what these tests are about.
SETTINGS = {
    "listen_addresses": "", "unix_socket_permissions": "0777", "fsync": "off",
    "shared_buffers": "16MB", "max_connections": "60", "autovacuum": "off",
    "log_min_messages": "fatal",
}  # fmt: skip


def programs() -> Path | None:
    """Where the server's programs are: Debian keeps them apart by version."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=_version)
    return Path(found[-1]).parent if found else None


def _version(path: str) -> int:
    name = path.split("/")[4]
    return int(name) if name.isdigit() else 0


class Cluster:
    """A server with its own data, stopped, killed and frozen at will."""

    def __init__(self, bin: Path, **settings: str) -> None:
        self.bin = bin
        self.settings = {**SETTINGS, **settings}
        # Short: the path of a unix socket has 107 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.home.chmod(0o711)
        self._as = _identity()
        if IS_ROOT:
            os.chown(self.home, self._as[0], self._as[1])
        self.data = self.home / "data"
        # Not the order of bytes, as most servers have it: ours must not depend on it.
        self._tool(
            "initdb", "-D", self.data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync",
            "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US",
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self._free: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def _command(self, *words: object) -> list[str]:
        prefix: list[str] = []
        if IS_ROOT:
            uid, gid = self._as
            prefix = ["--reuid", str(uid), "--regid", str(gid), "--clear-groups"]
        # It ends with us, also when we are killed.
        return ["setpriv", *prefix, "--pdeathsig", "QUIT", *map(str, words)]

    def _tool(self, name: str, *words: object) -> None:
        done = subprocess.run(
            self._command(self.bin / name, *words), capture_output=True, text=True, check=False,
            cwd="/", env={"LANG": "C.UTF-8"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Until it takes connections."""
        flags = [
            word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")
        ]
        with open(self.home / "log", "ab") as log:
            self.process = subprocess.Popen(
                self._command(self.bin / "postgres", "-D", self.data, "-k", self.home, *flags),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(
            [self.bin / "pg_isready", "-q", "-h", self.home], check=False
        ).returncode:
            assert self.process.poll() is None, (self.home / "log").read_text()
            assert time.monotonic() < deadline, "it did not start"
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are told and closed; SIGQUIT: as if it had crashed."""
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(how)
            self.process.wait(START_SECONDS)
            self.process = None

    def signal(self, what: signal.Signals) -> None:
        """To the server and each of its processes. They have sessions of their own."""
        assert self.process is not None
        listing = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        for pid in (self.process.pid, *map(int, listing.stdout.split())):
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue

    def url(self, name: str, user: str = "postgres") -> str:
        """The address of a database."""
        return f"postgresql://{user}@/{name}?host={self.home}"

    def admin(self, sql: str, name: str = "postgres") -> list[tuple[object, ...]]:
        """As the one who owns the server."""
        import psycopg

        with psycopg.connect(self.url(name), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def new(self) -> str:
        """The address of an empty database."""
        if self._free:
            return self.url(self._free.pop())
        name = f"test{next(self._numbers)}"
        self.admin(f"CREATE DATABASE {name}")
        return self.url(name)

    def give_back(self, name: str) -> None:
        """Empty a database for the next test: to make one costs more, in time and disk."""
        self.admin("DROP SCHEMA IF EXISTS agent_sandbox CASCADE", name)
        self._free.append(name)

    def remove(self) -> None:
        """All of it."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.home, ignore_errors=True)


def _identity() -> tuple[int, int]:
    """PostgreSQL does not run as root."""
    if not IS_ROOT:
        return os.geteuid(), os.getegid()
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return found.pw_uid, found.pw_gid
    return 65534, 65534


def cluster() -> Cluster:
    """A server that was just started; the caller removes it."""
    found = programs()
    must_work(found, "needs PostgreSQL's server (Debian: postgresql)")
    assert found is not None
    return Cluster(found)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The server of this session: tests have databases of their own."""
    made = cluster()
    yield made
    made.remove()


@pytest.fixture
def own_postgres() -> Iterator[Cluster]:
    """A server that the test may stop, freeze and kill."""
    made = cluster()
    yield made
    made.remove()


@pytest.fixture
def database(postgres: Cluster) -> Iterator[Database]:
    """An empty database."""
    made = store_address.read(postgres.new(), "test")
    yield made
    postgres.give_back(made.parameters["dbname"])


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest) -> Database | None:
    """A place for state of either kind: None is SQLite, in a data directory."""
    if request.param == "sqlite":
        return None
    found: Database = request.getfixturevalue("database")
    return found


@pytest.fixture
def state_store(either: Database | None, tmp_path: Path) -> Iterator[State]:
    """A store of either kind."""
    made = store_address.open_state(str(tmp_path / "data"), either)
    yield made
    made.close()


# --- programs

# Before the system's places, which may have parts of it in other versions.
BOOT = """import sys
sys.path[:0] = sys.argv.pop(1).split(":")
from agent_sandbox.cli.ctl import main
sys.exit(main())"""


class Sited(As):
    """An identity whose programs find the driver, which no system need have."""

    def command(self, tool: str, *args: str | os.PathLike[str]) -> list[str]:
        import psycopg

        assert tool == "ctl"
        site = Path(psycopg.__file__).parent.parent
        start = [os.path.realpath(sys.executable), "-I", "-c", BOOT, f"{self.source}:{site}"]
        return [*start, *(os.fspath(arg) for arg in args)]


@pytest.fixture(scope="session")
def sited(request: pytest.FixtureRequest) -> Sited:
    """Whoever runs the tests: others need not be able to read where the driver is."""
    base: As = request.getfixturevalue("superuser" if IS_ROOT else "user")
    return Sited(base.name, uid=base.uid, gid=base.gid, home=base.home, shared=base.shared)
