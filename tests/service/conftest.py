"""A real server process with a data directory of its own, and clients that are not ours."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import IS_ROOT, As

from .postgres import (  # noqa: F401 - fixtures
    database,
    either,
    own_postgres,
    postgres,
    sited,
    state_store,
)

READY = re.compile(r"serving on (.*)")
START_SECONDS, STOP_SECONDS = 30, 30
# Enough for tests that send much at once.
ROOMY = {"RATE_REQUESTS_PER_SEC": "100000", "RATE_CREATE_PER_MIN": "100000"}


class Served:
    """`sandboxctl serve` as one identity."""

    def __init__(
        self, identity: As, data: Path, *flags: str, env: dict[str, str] | None = None,
        listen: str = "127.0.0.1:0",
    ) -> None:  # fmt: skip
        self.identity = identity
        self.data = data
        self.env = {**ROOMY, **(env or {})}
        # A later flag wins; what a test leaves running need not end by itself.
        flags = ("--drain-seconds", "1", *flags)
        self.process = identity.popen(
            identity.command("ctl", "serve", "--data", data, "--listen", listen, *flags),
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.addresses: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS) or not self.addresses:
            self.kill()
            raise AssertionError("it did not start:\n" + "".join(self.lines))
        self.url = next((a for a in self.addresses if a.startswith("http")), "")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.addresses = self.addresses or found[1].split()
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> list[dict[str, Any]]:
        """The structured lines so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    @property
    def socket(self) -> str:
        return next(a for a in self.addresses if a.startswith("unix://")).removeprefix("unix://")

    def token(self, name: str, *flags: str) -> str:
        """A new token, made while the server runs."""
        done = self.identity.run(
            self.identity.command("ctl", "token", "new", name, "--data", self.data, *flags)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        options.setdefault("timeout", 60)
        return httpx.Client(base_url=self.url, headers=headers, **options)

    def owner(self) -> httpx.Client:
        """Over the unix socket, as root or as the owner."""
        transport = httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(base_url="http://localhost", transport=transport, timeout=60)

    def stop(self) -> int:
        """SIGTERM, and how it ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("it did not stop:\n" + "".join(self.lines[-50:])) from None
        self._reader.join(STOP_SECONDS)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        if self.process.stderr is not None:
            self.process.stderr.close()


Serve = Callable[..., Served]


def _data(identity: As) -> Path:
    return identity.directory(identity.project() / "data")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers; each has a data directory of its own unless one is given."""
    started: list[Served] = []

    def start(
        identity: As, *flags: str, data: Path | None = None, env: dict[str, str] | None = None,
        listen: str = "127.0.0.1:0",
    ) -> Served:  # fmt: skip
        served = Served(identity, data or _data(identity), *flags, env=env, listen=listen)
        started.append(served)
        return served

    yield start
    for served in started:
        served.stop()
        shutil.rmtree(served.data, ignore_errors=True)


class Team:
    """A server with three agents: A, B and an admin."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.tokens = {
            "a": served.token("agent-a"),
            "b": served.token("agent-b"),
            "admin": served.token("boss", "--scope", "admin"),
        }
        self.a = served.client(self.tokens["a"])
        self.b = served.client(self.tokens["b"])
        self.admin = served.client(self.tokens["admin"])
        self.nobody = served.client()

    def close(self) -> None:
        for client in (self.a, self.b, self.admin, self.nobody):
            client.close()

    def audit(self, **wanted: str) -> list[dict[str, Any]]:
        answer = self.admin.get("/v1/audit", params={"limit": "1000", **wanted})
        assert answer.status_code == 200, answer.text
        items: list[dict[str, Any]] = answer.json()["items"]
        return items


def _team(identity: As) -> Iterator[Team]:
    served = Served(identity, _data(identity))
    team = Team(served)
    yield team
    team.close()
    code = served.stop()
    shutil.rmtree(served.data, ignore_errors=True)
    assert code == 0, "".join(served.lines[-50:])
    # Nothing unexpected happened, whatever the tests sent.
    faults = [line for line in served.log if line["level"] == "error"]
    assert not faults, "\n".join(str(fault.get("traceback", fault)) for fault in faults)


@pytest.fixture(scope="session")
def _root_team(superuser: As) -> Iterator[Team]:
    yield from _team(superuser)


@pytest.fixture(scope="session")
def _user_team(user: As) -> Iterator[Team]:
    yield from _team(user)


@pytest.fixture(params=["root", "user"] if IS_ROOT else ["self"])
def team(request: pytest.FixtureRequest) -> Team:
    """A running server, as root and as a plain user; shared by tests, so leave it as it was."""
    name = "_root_team" if request.param == "root" else "_user_team"
    found: Team = request.getfixturevalue(name)
    return found


@pytest.fixture
def one(user: As, request: pytest.FixtureRequest) -> Team:
    """A running server of a plain user, for what does not depend on who runs it."""
    found: Team = request.getfixturevalue("_user_team")
    return found
