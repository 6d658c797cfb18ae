"""A replica ends its own lease in time, whatever its loop and its database do meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.service import store_postgres_link, store_postgres_schema
from agent_sandbox.service.audit.postgres import PgAudit
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.replicas import lease as leases
from agent_sandbox.service.replicas.lease import Lease
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.store_postgres import PgStore
from agent_sandbox.service.store_postgres_link import Link

from ..proxy import Proxy, proxied
from .ground import Ground, ending, go, made

__all__ = ("proxied",)

# A statement that the server answers when somebody has renewed the lease; its own bound is 3 s.
UNTIL_RENEWED = """DO $$ DECLARE first DOUBLE PRECISION := (SELECT beat FROM replicas); BEGIN
    WHILE (SELECT beat FROM replicas) = first LOOP PERFORM pg_sleep(0.01); END LOOP; END $$"""


@pytest.fixture
def store(proxied: tuple[Proxy, Database], tmp_path: Path) -> Iterator[PgStore]:
    made = PgStore(proxied[1], data=str(tmp_path / "pg"), home="me")
    yield made
    made.close()


def _nothing() -> None:
    return


def test_a_lease_is_renewed_while_the_loop_waits_for_the_database(
    store: PgStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT", 0.05)

    async def work() -> None:
        lease = Lease(store, "me")
        lease.join()
        lease.start(_nothing, _nothing)
        # The loop stands still from here on to the next sign of life.
        store.change(UNTIL_RENEWED)
        await lease.stop()
        lease.close()

    go(work())


def test_cannot_wait_for_a_silent_database_beyond_the_lease(
    store: PgStore, proxied: tuple[Proxy, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that the loop is in is cut at the end, and no other is sent."""
    monkeypatch.setattr(leases, "LEASE", 3.2)
    monkeypatch.setattr(leases, "MARGIN", 2.2)
    monkeypatch.setattr(leases, "BEAT", 0.2)
    proxy, database = proxied

    async def work() -> None:
        audit = PgAudit(database)
        lease, lost = Lease(store, "me"), asyncio.Event()
        lease.join()
        lease.fence(store.link, audit.link)
        lease.start(_nothing, lost.set)
        proxy.silence()
        began = time.monotonic()
        with pytest.raises(Problem):
            store.change("UPDATE replicas SET address = ''")
        # Before anybody else could take over, by the database's clock; a statement has 4 s.
        assert time.monotonic() - began < leases.LEASE
        assert not lease.held()
        await lost.wait()
        await lease.stop()
        asked = proxy.asked
        for act in (
            lambda: store.rows("SELECT 1"), lambda: audit.write(None, "x.y"),
            lambda: store.transaction("x").__enter__(),
        ):  # fmt: skip
            with pytest.raises(Problem) as caught:
                act()
            assert caught.value.rule == "replica.lease"
        assert proxy.asked == asked
        proxy.speak()
        lease.close()
        audit.close()

    go(work())


def test_a_transaction_that_outlives_its_lease_is_not_committed(store: PgStore) -> None:
    lease = Lease(store, "me")
    lease.join()
    lease.fence(store.link)

    def act() -> None:
        with store.transaction("x"):
            store.change("UPDATE replicas SET address = 'x'")
            lease._until = -1.0

    with pytest.raises(Problem, match="lease"):
        act()
    lease._until = float("inf")
    assert store.one("SELECT address FROM replicas") == ("",)


def test_a_replica_whose_loop_hangs_is_left_to_others(
    store: PgStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LEASE", 1.0), ("MARGIN", 0.4), ("BEAT", 0.05), ("HANGS", 0.1)):
        monkeypatch.setattr(leases, name, value)

    async def work() -> None:
        lease = Lease(store, "me")
        lease.join()
        lease.start(_nothing, _nothing)
        # Not one turn of the loop from here on.
        assert lease.lost.wait(8)
        await lease.stop()
        lease.close()

    go(work())


def test_without_a_lease_not_even_a_token_is_looked_up(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            await first.shared.lease.stop()
            assert first.app._service is not None
            await first.app._service._reaper.stop()
            first.shared.lease._until = -1.0
            asked: list[object] = []
            monkeypatch.setattr(
                first.shared.store.link, "run", lambda *given, **_: asked.append(given)
            )
            answer = await first.client().get("/v1/sandboxes")
            assert (answer.status_code, answer.json()["rule"]) == (503, "replica.lease")
            assert asked == []
            monkeypatch.undo()

    go(work())


def test_cannot_remove_what_another_replica_has_by_now(ground: Ground) -> None:
    """A loss that is told to a replica without a lease, or with one that is wrong about it."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            boxes = [await made(first.client()) for _ in range(2)]
            service = first.app._service
            assert service is not None
            await first.die()
            for box in boxes:
                answer = await second.client().get(f"/v1/sandboxes/{box}")
                assert answer.json()["state"] == "Running"
            service._losses.lost(boxes[0], "its machine is gone")
            # Its clock is wrong, but the database knows whose it is.
            first.shared.lease._until = float("inf")
            service._losses.lost(boxes[1], "its machine is gone")
            first.shared.lease._until = -1.0
            assert service._losses._removals == set()
            assert set(boxes) <= ground.backend.boxes.keys()

    go(work())


def test_a_database_that_freezes_at_the_start_is_given_up(
    proxied: tuple[Proxy, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_postgres_link, "ANSWER_SECONDS", 0.5)
    proxy, database = proxied
    link = Link(database)
    proxy.silence()
    began = time.monotonic()
    with pytest.raises(HostError) as caught:
        link.prepare(store_postgres_schema.migrate)
    assert caught.value.code == "data-broken"
    assert time.monotonic() - began < 10
    proxy.speak()
    link.close()


def test_a_database_that_freezes_after_the_greeting_is_given_up(
    proxied: tuple[Proxy, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on connecting does not hold for what is asked next."""
    monkeypatch.setattr(store_postgres_link, "CONNECT_SECONDS", 0.5)
    proxy, database = proxied
    real = psycopg.connect

    def connect(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        proxy.silence()
        return found

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(HostError) as caught:
        Link(database)
    assert caught.value.code == "database-away"
    proxy.speak()
