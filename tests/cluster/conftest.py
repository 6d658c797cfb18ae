"""An API server alone, and a cluster of two nodes: each started once, for all tests that ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import must_work

from . import ground
from .lab import House


def pytest_configure(config: pytest.Config) -> None:
    """What `make test-cluster CLUSTER=api` leaves out."""
    config.addinivalue_line("markers", "nodes: needs a cluster with nodes, not just an API server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what asks for nodes."""
    for item in items:
        if "two_nodes" in getattr(item, "fixturenames", ()):
            item.add_marker("nodes")


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ground.Cluster]:
    """etcd and kube-apiserver: objects can be made, and nothing happens to them."""
    must_work(not ground.missing(alone=True), ground.missing(alone=True))
    with ground.running(alone=True) as made:
        yield made


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[ground.Cluster]:
    """The cluster as it was started; a test that hurts a node has to heal it (`cluster`)."""
    must_work(not ground.missing(), ground.missing())
    with ground.running() as made:
        yield made


@pytest.fixture
def cluster(two_nodes: ground.Cluster) -> Iterator[ground.Cluster]:
    """A cluster with two nodes that serve; what a test did to them is undone."""
    yield two_nodes
    for name in two_nodes.nodes:
        two_nodes.heal(name)


# What keeps commands: the pod and a filter, or bwrap inside of it as well.
WAYS = {"pod": "RuntimeDefault", "bwrap": "localhost/agent-sandbox.json"}


@pytest.fixture(scope="session")
def houses(
    two_nodes: ground.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, House]]:
    """Backends, each made when it is first asked for (`house`)."""
    made: dict[str, House] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture(params=list(WAYS))
def house(
    request: pytest.FixtureRequest,
    two_nodes: ground.Cluster,
    houses: dict[str, House],
    tmp_path_factory: pytest.TempPathFactory,
) -> House:
    """A backend with and without an inner layer."""
    way = str(request.param)
    if way not in houses:
        base: Path = tmp_path_factory.mktemp(f"house-{way}")
        houses[way] = House(two_nodes, base, warm=1, KUBERNETES_SECCOMP=WAYS[way])
    return houses[way]
