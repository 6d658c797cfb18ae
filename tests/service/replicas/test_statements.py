"""The database goes away at each statement of a life, one after the other: nothing stays for ever.

Before a statement, so that it was not done; and after it, so that it was and nobody knows.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store_postgres_link import Link

from .ground import Ground, Replica, ending, go

# More than a life has; those beyond it change nothing.
STATEMENTS = 70


class Fault:
    """Fails one statement of a replica, counted over its state and its audit."""

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
        self._after = after
        self._left = 0
        service = replica.app._service
        assert service is not None
        for link in (replica.shared.store._link, service.audit._link):  # type: ignore[attr-defined]
            monkeypatch.setattr(link, "run", self._wrapped(link))

    def arm(self, number: int) -> bool:
        """The next one to fail; whether the last one was not reached."""
        beyond, self._left = self._left > 0, number
        return beyond

    def _wrapped(self, link: Link) -> Any:
        real = link.run

        def run(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise Problem("STATE_UNAVAILABLE", "away", retry_after=1.0)
            found = real(*given, **named)
            if self._left == 0:
                raise Problem("STATE_UNAVAILABLE", "the answer was lost", retry_after=1.0)
            return found

        return run


async def _live(client: httpx.AsyncClient, key: str) -> None:
    """A life; whatever is refused is refused."""
    headers = {"Idempotency-Key": key}
    box = (await client.post("/v1/sandboxes", json={}, headers=headers)).json().get("id")
    if box is not None:
        await client.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "x"]})
        await client.post(f"/v1/sandboxes/{box}/renew", json={"timeout": 60})
    headers = {"Idempotency-Key": f"{key}r"}
    await client.post("/v1/run", json={"cmd": ["true"]}, headers=headers)
    if box is not None:
        await client.delete(f"/v1/sandboxes/{box}")


async def _tidied(replica: Replica) -> None:
    """What happens by itself, within seconds."""
    service = replica.app._service
    assert service is not None
    reaper = service._reaper
    for _ in range(2):
        replica.shared.beat()
        reaper._failed = {}
        await reaper.sweep()
        await reaper.tidy()
        await service._context.settle()


async def _check(ground: Ground, replica: Replica, client: httpx.AsyncClient) -> None:
    service, store = replica.app._service, replica.shared.store
    assert service is not None
    context = service._context
    for one in (await client.get("/v1/sandboxes")).json()["items"]:
        assert one["state"] == "Running", one
        assert (await client.delete(f"/v1/sandboxes/{one['id']}")).status_code == 204
    assert context.live == {}
    assert context.owned == {}
    assert ground.backend.boxes == {}
    assert store.rows("SELECT * FROM sandboxes") == []
    assert store.rows("SELECT id FROM executions WHERE ended = 0") == []
    assert store.rows("SELECT * FROM places") == []
    assert context.places.running() == context.places.queued() == 0
    assert len(service._executions.later) == 0


@pytest.mark.parametrize("after", [False, True])
def test_nothing_stays_of_a_life_that_was_cut_at_any_statement(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    async def work() -> None:
        async with ending(ground):
            replica = await ground.replica()
            service = replica.app._service
            assert service is not None
            # What they do is done by hand, between two lives.
            await service._reaper.stop()
            await replica.shared.lease.stop()
            replica.shared.lease._until = float("inf")
            client = replica.client()
            fault = Fault(replica, monkeypatch, after=after)
            for number in range(1, STATEMENTS):
                fault.arm(number)
                await _live(client, f"k{number}")
                beyond = fault.arm(0)
                await _tidied(replica)
                await _check(ground, replica, client)
            assert beyond, "a life has more statements by now"
            ground.verify()

    go(work())
