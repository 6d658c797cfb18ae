"""Replicas in one process, over one database and one backend that all of them reach."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from agent_sandbox.service import app as apps
from agent_sandbox.service.app import App, Settings
from agent_sandbox.service.audit import verify
from agent_sandbox.service.audit.postgres import PgAudit
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.logs import JSON, Log
from agent_sandbox.service.replicas.shared import Shared
from agent_sandbox.service.state import State
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.tokens import Tokens
from agent_sandbox.service.values import ADMIN, AUDIT, DEFAULT_SCOPES, Sandbox

from ..fake_backend import FakeBackend
from ..postgres import Cluster

T = TypeVar("T")
PATIENCE = 40.0
ROOMY = {"RATE_REQUESTS_PER_SEC": "100000", "RATE_CREATE_PER_MIN": "100000"}


class Cloud(FakeBackend):
    """A machine that every replica reaches. It ends nothing when one of them comes or goes."""

    name = "cloud"
    shared = True

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        for gone in [box for box in self.boxes if box not in known]:
            del self.boxes[gone]
        return frozenset(self.boxes)

    async def close(self) -> None:
        return


class Replica:
    """One service with its client."""

    def __init__(self, app: App, tokens: Mapping[str, str]) -> None:
        self.app = app
        self.tokens = tokens
        self.url = next(one for one in app.addresses if one.startswith("http"))
        self._clients: list[httpx.AsyncClient] = []

    @property
    def shared(self) -> Shared:
        assert self.app._replicas is not None
        return self.app._replicas

    def client(self, name: str | None = "alice", **options: Any) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.tokens[name]}"} if name else {}
        made = httpx.AsyncClient(
            base_url=self.url, headers={**headers, **options.pop("headers", {})},
            timeout=PATIENCE, **options,
        )  # fmt: skip
        self._clients.append(made)
        return made

    async def die(self) -> None:
        """As by SIGKILL: it says nothing, and nobody hears it. Its lease is over."""
        app, shared = self.app, self.shared
        await shared.lease.stop()
        shared.lease._until = -1.0
        if app._service is not None:
            await app._service._reaper.stop()
        if app._server is not None:
            await app._server.close()
        # So that nobody has to wait for the clock. Its own connections refuse to: it has no lease.
        shared.lease._own().run("UPDATE replicas SET ends = 0 WHERE id = ?", (shared.id,))

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        await self.app.stop(0)


class Ground:
    """A database, agents, a backend, and replicas."""

    def __init__(self, cluster: Cluster, database: Database, directory: Path) -> None:
        self.cluster = cluster
        self.database = database
        self.directory = directory
        self.backend: FakeBackend = Cloud()
        self.env: dict[str, str] = dict(ROOMY)
        self.flags: dict[str, Any] = {}
        self.replicas: list[Replica] = []
        self.tokens: dict[str, str] = {}

    async def replica(self, name: str = "") -> Replica:
        """One more; the same name is the same data directory."""
        name = name or f"replica{len(self.replicas)}"
        settings = Settings(
            data=str(self.directory / name), listen=(("127.0.0.1", 0),),
            backends=(self.backend.name,), database=self.database, environ=self.env, **self.flags,
        )  # fmt: skip
        app = App(settings, Log(JSON, io.StringIO()))
        await app.start()
        self._make_tokens(app)
        made = Replica(app, self.tokens)
        self.replicas.append(made)
        return made

    async def pair(self) -> tuple[Replica, Replica]:
        return await self.replica(), await self.replica()

    def _make_tokens(self, app: App) -> None:
        if self.tokens:
            return
        assert app._service is not None
        tokens: Tokens = app._service.tokens
        for name in ("alice", "bob"):
            self.tokens[name] = tokens.new(name, scopes=DEFAULT_SCOPES)[0]
        self.tokens["chief"] = tokens.new("chief", scopes=(ADMIN, AUDIT))[0]

    def verify(self) -> int:
        """The audit, which must be one chain; how many lines it has."""
        audit = PgAudit(self.database)
        try:
            assert verify.verify(audit) == ()
            return audit.seq
        finally:
            audit.close()


def use(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> None:
    """Have the service find a backend by its name."""

    def make(_store: State, _environ: Mapping[str, str], _limits: Limits) -> FakeBackend:
        return backend

    monkeypatch.setitem(apps.BACKENDS, backend.name, make)


@asynccontextmanager
async def ending(ground: Ground) -> AsyncIterator[Ground]:
    """End all replicas, whatever happens."""
    try:
        yield ground
    finally:
        for replica in reversed(ground.replicas):
            await replica.close()


def go(work: Awaitable[T]) -> T:
    """Run a test's coroutine, with an end to it in any case."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(bounded())


async def made(client: httpx.AsyncClient, **body: Any) -> str:
    """A new sandbox."""
    answer = await client.post("/v1/sandboxes", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])
