"""Agents as they are in pods, as root with a uid of their own and as an ordinary user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.service.backend import pod_identity
from conftest import As, must_work

from . import ground

Pods = Callable[..., ground.Pod]


@pytest.fixture(scope="session")
def pem() -> bytes:
    """The service's identity."""
    return pod_identity.make()


@pytest.fixture(scope="session")
def built(shared: Path) -> Path:
    """The bundle."""
    return ground.build(shared)


def factory(identity: As, built: Path, pem: bytes) -> Iterator[Pods]:
    must_work(not identity.obstacle, f"no sandbox for {identity.name}: {identity.obstacle}")
    made: list[ground.Pod] = []
    places: list[Path] = []

    def make(**options: Any) -> ground.Pod:
        places.append(identity.own(ground.directory(identity)))
        made.append(ground.Pod(identity, places[-1], built, pem, **options))
        return made[-1]

    yield make
    for pod in made:
        pod.end()
    for place in places:
        ground.remove(place)


@pytest.fixture
def pods(runner: As, built: Path, pem: bytes) -> Iterator[Pods]:
    """Makes agents."""
    yield from factory(runner, built, pem)


@pytest.fixture
def rooted(superuser: As, built: Path, pem: bytes) -> Iterator[ground.Pod]:
    """An agent in whose pod we can start something as the engine does: only root can enter it."""
    for make in factory(superuser, built, pem):
        yield make()


@pytest.fixture(params=["inner", "plain"])
def form(request: pytest.FixtureRequest) -> str:
    """With bwrap around every command, and without."""
    return "required" if request.param == "inner" else "off"


@pytest.fixture
def pod(pods: Pods) -> ground.Pod:
    return pods()
