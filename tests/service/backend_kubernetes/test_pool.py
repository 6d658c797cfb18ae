"""The warm pool: pods that fail are not made for ever, and a silent watch does not stop it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from agent_sandbox.service.backend import kube_objects, kube_patience, kube_pool
from agent_sandbox.service.backend.kube_cache import Cache
from agent_sandbox.service.backend.kube_patience import Patience
from agent_sandbox.service.backend.kube_pods import manifest
from agent_sandbox.service.backend.kube_pool import Pool
from agent_sandbox.service.backend.kube_seal import KEY_BYTES, Seal
from agent_sandbox.service.backend.kube_source import Wanted
from agent_sandbox.service.problems import Problem

from .scene import INSTALLATION, around, shape

WAITS = (10, 20, 40, 80, 160, 300, 300)


def test_each_failure_is_waited_for_longer_and_one_success_forgives() -> None:
    patience, now = Patience(), 1000.0
    assert patience.is_over("a", now)
    for wait in WAITS:
        assert patience.failed("a", now)
        assert not patience.is_over("a", now + wait - 0.1)
        now += wait
        assert patience.is_over("a", now)
    patience.worked("a")
    assert patience.failed("a", now)
    assert patience.is_over("a", now + WAITS[0])


def test_pods_that_fail_together_are_one_failure_and_others_do_not_wait() -> None:
    patience = Patience()
    assert patience.failed("a", 0.0)
    assert not patience.failed("a", 0.1)
    assert patience.is_over("a", WAITS[0])
    assert patience.is_over("b", 0.0)


class Clock:
    """Both clocks of the pool's module."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


class Server:
    """An API server that takes every pod, and a node that ends each at once."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.made: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        # How old a pod is when it ends.
        self.age = 0.0

    def path(self, *parts: str) -> str:
        return "/".join(parts)

    async def create(self, _path: str, body: dict[str, Any]) -> dict[str, Any]:
        number = len(self.made)
        made = {**body, "metadata": {
            **body["metadata"], "uid": f"u{number}", "resourceVersion": f"{10 * number}",
            "creationTimestamp": datetime.fromtimestamp(self.clock.now - self.age, UTC).isoformat(),
        }, "status": {"phase": "Pending"}}  # fmt: skip
        self.made.append(made)
        return made

    async def patch(self, path: str, patch: Any, **_: object) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        found = next(one for one in self.made if one["metadata"]["name"] == name)
        if isinstance(patch, dict):
            found["metadata"]["annotations"] = patch["metadata"]["annotations"]
        return found

    async def list(self, _path: str, query: object) -> tuple[list[object], str]:
        (selector,) = cast("Any", query)
        name = selector[1].removeprefix("metadata.name=")
        return [one for one in self.running if one["metadata"]["name"] == name], "99"

    async def delete(self, _path: str, **_: object) -> bool:
        return False


def ended(document: dict[str, Any]) -> dict[str, Any]:
    metadata = document["metadata"]
    version = str(int(metadata["resourceVersion"]) + 5)
    return {**document, "metadata": {**metadata, "resourceVersion": version},
            "status": {"phase": "Failed", "reason": "StartError"}}  # fmt: skip


def rounds(server: Server, count: int, step: float) -> int:
    """How many pods are made, when all that are made end, in so many looks."""

    async def story() -> int:
        surroundings = around()
        wanted = shape(surroundings)
        cache = Cache(cast("Any", server), INSTALLATION)
        cache._pods.current.set()
        pool = Pool(
            cast("Any", server), cache, cast("Any", Links()), surroundings,
            lambda one: manifest(one, surroundings, uid=2_000_001), seal=Seal(bytes(KEY_BYTES)),
        )  # fmt: skip
        cache.on_pod(pool._seen)
        pool.want({wanted: Wanted(count=2, templates=("base",))})
        for _ in range(count):
            before = len(server.made)
            await pool.tend()
            for one in server.made[before:]:
                cache.put(kube_objects.pod(ended(one)))
            server.clock.now += step
        return len(server.made)

    return asyncio.run(story())


class Links:
    """No connections."""

    def drop(self, _uid: str) -> None:
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    clock = Clock()
    monkeypatch.setattr(kube_pool, "time", clock)
    return Server(clock)


def test_cannot_have_the_pool_make_pods_for_ever(server: Server) -> None:
    """Ten minutes, a look each second: 10 s, 20 s, … 300 s between two tries."""
    assert rounds(server, 600, 1.0) == 2 * 6


def test_without_patience_there_is_no_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control."""
    monkeypatch.setattr(Patience, "is_over", lambda *_: True)
    assert rounds(server, 20, 1.0) == 2 * 20


def test_a_pod_that_was_of_use_for_some_time_is_replaced_at_once(server: Server) -> None:
    server.age = kube_patience.YOUNG_SECONDS + 1
    assert rounds(server, 3, 0.0) == 2 * 3


# --- a watch that says nothing


def running(document: dict[str, Any]) -> dict[str, Any]:
    metadata = document["metadata"]
    agent = {"name": "agent", "state": {"running": {}}}
    return {
        **document,
        "metadata": {**metadata, "resourceVersion": metadata["resourceVersion"] + "5"},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [agent]},
    }


@pytest.mark.parametrize("there", [True, False])
def test_a_pod_is_asked_for_when_the_watch_is_silent(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    """Its connection may be dead, and a create would wait for what has long happened."""
    monkeypatch.setattr(kube_pool, "LOOK_SECONDS", 0.01)

    async def story() -> str:
        surroundings = around()
        cache = Cache(cast("Any", server), INSTALLATION)
        pool = Pool(
            cast("Any", server), cache, cast("Any", Links()), surroundings,
            lambda one: manifest(one, surroundings, uid=2_000_001), seal=Seal(bytes(KEY_BYTES)),
        )  # fmt: skip
        body = manifest(shape(surroundings), surroundings, uid=2_000_001)
        made = await server.create("", {**body, "metadata": {**body["metadata"], "name": "one"}})
        pod = kube_objects.pod(made)
        cache.put(pod)
        server.running = [running(made)] if there else []
        async with asyncio.timeout(10):
            return (await pool._up(pod)).ip

    if there:
        assert asyncio.run(story()) == "10.0.0.1"
    else:
        with pytest.raises(Problem, match="it was removed"):
            asyncio.run(story())
