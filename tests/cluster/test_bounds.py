"""Memory and disk of a sandbox on a real node: what ends, what is told, and what goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import As

from .ground import Cluster
from .lab import House, Stage, refused
from .serving import Site

# Bytes of a sandbox's files (DEFAULT_DISK), and a file that the kernel lets a command write.
DISK, FILE = 16 << 20, 8 << 20
# The kubelet looks every ten seconds, and ends a pod at a bound that lies above ours.
EVICTED = 90.0


@pytest.fixture(scope="module")
def site(
    superuser: As, two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    base: Path = tmp_path_factory.mktemp("bounds")
    made = Site(superuser, two_nodes, base)
    yield made
    made.close()


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with site.client() as made:
        yield made


@pytest.fixture
def box(client: httpx.Client) -> Iterator[str]:
    answer = client.post("/v1/sandboxes", json={"image": "base"})
    assert answer.status_code == 201, answer.text
    made = str(answer.json()["id"])
    yield made
    client.delete(f"/v1/sandboxes/{made}")


def run(client: httpx.Client, box: str, command: str, **more: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sandboxes/{box}/exec", json={"command": command, **more})
    assert answer.status_code in {200, 202}, answer.text
    found: dict[str, Any] = answer.json()
    return found


def agent_of(site: Site, box: str) -> tuple[str, int, bool]:
    """The pod, how often its container was started again, and whether it runs."""
    pod = site.pods()[box]
    (status,) = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], status["restartCount"], "running" in status["state"]


def test_a_command_that_takes_too_much_memory_is_killed_and_the_sandbox_goes_on(
    site: Site, client: httpx.Client, box: str
) -> None:
    before = agent_of(site, box)
    run(client, box, "echo kept >f")
    other = run(client, box, "echo up; exec sleep 1000", background=True, timeout=600)["execId"]
    hog = "x=$(head -c {} /dev/zero | tr '\\0' a); echo ${{#x}}"
    for _ in range(2):
        found = run(client, box, hog.format(250_000_000))
        assert (found["exceeded"], found["oomKilled"], found["exitCode"]) == ("memory", True, 137)
        assert found["state"] == "Exited"
    # Control: as much as there is can be had.
    found = run(client, box, hog.format(10_000_000))
    assert (found["exceeded"], found["stdout"]) == (None, "10000000\n"), found
    # The agent lives, in the same pod; and so does a command that has taken next to nothing.
    assert agent_of(site, box) == before
    assert before[1:] == (0, True)
    assert run(client, box, "cat f")["stdout"] == "kept\n"
    assert client.get(f"/v1/execs/{other}").json()["state"] == "Running"


def write(count: int) -> str:
    """A command that writes so many files, each of a size that is allowed, and then stays."""
    return f"for i in $(seq {count}); do head -c {FILE} /dev/zero >big$i; done; exec sleep 1000"


def test_a_command_that_fills_the_disk_is_ended_and_the_sandbox_goes_on_when_there_is_room(
    site: Site, client: httpx.Client, box: str
) -> None:
    before = agent_of(site, box)
    found = run(client, box, write(3), timeout=600)
    assert (found["exceeded"], found["signal"]) == ("disk", "SIGKILL"), found
    refused = client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"})
    assert refused.json()["code"] == "DISK_FULL", refused.text
    for number in (1, 2, 3):
        gone = client.delete(f"/v1/sandboxes/{box}/files", params={"path": f"big{number}"})
        assert gone.status_code in {200, 204, 404}, gone.text
    assert run(client, box, "ls | wc -l")["stdout"] == "0\n"
    # Control: one of them is no more than there may be.
    found = run(client, box, f"head -c {FILE} /dev/zero >big; wc -c <big")
    assert (found["exceeded"], found["stdout"]) == (None, f"{FILE}\n"), found
    assert agent_of(site, box) == before


def test_a_pod_far_beyond_its_disk_is_evicted_by_its_node_and_lost_with_its_words(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    """Where nobody else looks: the backend alone, as when the service does not come to it."""
    house = House(two_nodes, tmp_path)

    async def story(stage: Stage) -> None:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stage.backend.attend(lambda _, why: lost.set_result(why))
        volumes = stage.pod()["spec"]["volumes"]
        (bound,) = {one["emptyDir"]["sizeLimit"] for one in volumes if one["name"] == "files"}
        assert int(bound) > DISK
        count = int(bound) // FILE + 4
        running, _ = await stage.start("sh", "-c", write(count))
        begun = time.monotonic()
        async with asyncio.timeout(EVICTED):
            why = await lost
        print(f"\n{count * FILE >> 20} MiB: evicted after {time.monotonic() - begun:.1f} s: {why}")
        assert "Evicted" in why
        assert "exceeds" in why
        ended = await running.wait()
        assert (ended.lost, ended.error) == (True, why)
        assert await refused(stage.files.make("/workspace/x")) == "WRONG_STATE"

    try:
        house.play(story)
    finally:
        house.close()
