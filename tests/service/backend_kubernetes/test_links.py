"""How an agent is reached, and when exec into its pod is no way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent_sandbox.service.backend import kube_links
from agent_sandbox.service.backend.kube_links import Links
from agent_sandbox.service.backend.kube_objects import Pod
from agent_sandbox.service.backend.kube_settings import AUTO, EXEC
from agent_sandbox.service.problems import Problem

POD = Pod(name="p", uid="u", ip="10.0.0.9", node="n1", phase="Running", running=True)
# A filter keeps the network off, and nothing keeps commands from processes of the same user.
OPEN = {"network": "seccomp", "processes": "pod"}
APART = (
    {"network": "seccomp", "processes": "landlock"}, {"network": "netns", "processes": "pidns"},
    {"network": "pod", "processes": "pod"},
)  # fmt: skip


class Cluster:
    """A view with one pod, and execs into it that are counted."""

    def __init__(self) -> None:
        self.pods = {POD.uid: POD}
        self.execs = 0
        self._ends: list[socket.socket] = []

    def well(self, _node: str) -> bool:
        return True

    async def open(self, *_: object) -> socket.socket:
        self.execs += 1
        ours, theirs = socket.socketpair()
        self._ends += [ours, theirs]
        return ours

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    async def silent(*_: object) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(kube_links, "direct", silent)
    with contextlib.closing(Cluster()) as made:
        yield made


def links(cluster: Any, transport: str) -> Links:
    nothing: Any = None
    return Links(nothing, cluster, cluster, nothing, transport=transport, seconds=1.0)


def test_cannot_get_a_network_by_an_exec_of_the_service(cluster: Cluster) -> None:
    """A pod that was reached by exec is not used where commands could take that process over."""
    one = links(cluster, EXEC)
    asyncio.run(one.dial(POD))
    with pytest.raises(Problem, match="give its commands a network") as caught:
        one.guard(POD.uid, OPEN)
    assert caught.value.code == "UNSUPPORTED"
    # The control: something keeps them apart, or they have the pod's network anyway.
    for kept in APART:
        one.guard(POD.uid, kept)


def test_cannot_get_a_network_when_the_address_stops_answering(cluster: Cluster) -> None:
    one = links(cluster, AUTO)
    one.guard(POD.uid, OPEN)
    with pytest.raises(ConnectionError, match="exec would open it"):
        asyncio.run(one.dial(POD))
    assert cluster.execs == 0
    # The control: exec is what would be tried.
    asyncio.run(links(cluster, AUTO).dial(POD))
    assert cluster.execs == 1
