"""What stays open over a database that all replicas share: how often it asks, and what ends it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from agent_sandbox.service import tokens as tokens_module
from agent_sandbox.service.api import streams
from agent_sandbox.service.store_postgres_link import away

from .ground import Ground, Replica, ending, go, made

READERS, PIECES = 12, 40


async def _held(client: httpx.AsyncClient) -> str:
    box = await made(client)
    body = {"cmd": ["hold"], "background": True}
    answer = await client.post(f"/v1/sandboxes/{box}/exec", json=body)
    return str(answer.json()["execId"])


class Readers:
    """Streams of events of one command."""

    def __init__(self, client: httpx.AsyncClient, exec_id: str, count: int) -> None:
        self.seen = [""] * count
        self._path = f"/v1/execs/{exec_id}/events"
        self.tasks = [asyncio.ensure_future(self._read(client, at)) for at in range(count)]

    async def _read(self, client: httpx.AsyncClient, at: int) -> None:
        async with client.stream("GET", self._path) as stream:
            async for text in stream.aiter_text():
                self.seen[at] += text

    async def all_have(self, text: str) -> None:
        while not all(text in seen for seen in self.seen):
            assert not any(task.done() for task in self.tasks), self.seen[0][-300:]
            await asyncio.sleep(0.005)


def _counted(replica: Replica) -> list[str]:
    """Reads of tokens from now on."""
    found: list[str] = []
    one = replica.shared.store.one

    def asked(sql: str, *values: object) -> Any:
        if sql.startswith(tokens_module.READ):
            found.append(sql)
        return one(sql, *values)

    replica.shared.store.one = asked  # type: ignore[method-assign]
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is a question, so that none is left to chance."""
    monkeypatch.setattr(streams, "RECHECK", 0.0)


@pytest.mark.usefixtures("eager")
def test_streams_of_one_token_ask_the_database_about_once_a_second(ground: Ground) -> None:
    """Else one agent with many readers holds up the loop, and with it everybody."""

    async def work() -> None:
        async with ending(ground):
            replica = await ground.replica()
            client = replica.client(limits=httpx.Limits(max_connections=READERS + 4))
            exec_id = await _held(client)
            running = ground.backend.running(exec_id)
            readers = Readers(client, exec_id, READERS)
            await readers.all_have("event: start")
            asked, began = _counted(replica), time.monotonic()
            for number in range(PIECES):
                running.sink(1, f"piece-{number};".encode())
                await readers.all_have(f"piece-{number};")
            seconds = time.monotonic() - began
            running.released.set()
            await asyncio.gather(*readers.tasks)
            assert all("event: exit" in seen for seen in readers.seen)
            assert len(asked) <= seconds + 2

    go(work())


def _gone(*_: object) -> Any:
    raise away("test")


@pytest.mark.usefixtures("eager")
def test_a_database_that_is_away_does_not_end_what_is_open(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with ending(ground):
            replica = await ground.replica()
            client = replica.client()
            exec_id = await _held(client)
            running = ground.backend.running(exec_id)
            readers = Readers(client, exec_id, 3)
            await readers.all_have("event: start")
            with monkeypatch.context() as patch:
                patch.setattr(replica.shared.store, "one", _gone)
                began, number = time.monotonic(), 0
                # Longer than any answer is remembered.
                while time.monotonic() < began + 1.5:
                    running.sink(1, f"piece-{number};".encode())
                    await readers.all_have(f"piece-{number};")
                    number += 1
                assert (await client.get("/v1/execs")).status_code == 503
            running.released.set()
            await asyncio.gather(*readers.tasks)
            assert all("event: exit" in seen for seen in readers.seen)

    go(work())


@pytest.mark.usefixtures("eager")
def test_what_is_open_ends_with_its_token_soon(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            client = first.client()
            exec_id = await _held(client)
            running = ground.backend.running(exec_id)
            readers = Readers(client, exec_id, 3)
            await readers.all_have("event: start")
            answer = await second.client("chief").delete("/v1/tokens/alice")
            assert answer.status_code == 204
            began = time.monotonic()
            while not all(task.done() for task in readers.tasks):
                running.sink(1, b"more;")
                await asyncio.sleep(0.02)
                assert time.monotonic() < began + 10
            assert all("UNAUTHENTICATED" in seen for seen in readers.seen)
            # What came after that is about a second's, and no more: an upper bound of pieces, so
            # that a slow machine changes nothing.
            assert max(seen.count("more;") for seen in readers.seen) <= 2.0 / 0.02

    go(work())
