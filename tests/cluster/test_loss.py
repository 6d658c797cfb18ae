"""Nodes that die, freeze or are cut off, and services that are killed: nobody waits for ever."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import As

from . import programs
from .ground import Cluster
from .lab import INSTALLATION, PODS, SANDBOX, leave, owned
from .machine import wait
from .serving import Site, until

# What the engine takes to notice, what it takes to say so, and what a busy machine adds.
NOTICED = programs.GRACE_SECONDS + 25.0


# A command that would outlast every test.
LONG = {"command": "echo up; exec sleep 1000", "timeout": 900}


@pytest.fixture(scope="module")
def site(
    superuser: As, two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    base: Path = tmp_path_factory.mktemp("loss")
    made = Site(superuser, two_nodes, base)
    yield made
    made.close()


def create(client: httpx.Client, **wanted: Any) -> dict[str, Any]:
    answer = client.post("/v1/sandboxes", json={"image": "base", **wanted})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def node_of(site: Site, sandbox: str) -> str:
    return str(site.pods()[sandbox]["spec"]["nodeName"])


class Asked(threading.Thread):
    """A caller that waits for the end of a command."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._work = (client, path, body)
        self.answer: httpx.Response | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        client, path, body = self._work
        self.answer = client.post(path, json=body)
        self.ended = time.monotonic()


def running(client: httpx.Client, sandbox: str) -> bool:
    """Whether its command has said something."""
    for item in client.get("/v1/execs").json()["items"]:
        if item["sandboxId"] == sandbox and item["state"] == "Running":
            return bool(client.get(f"/v1/execs/{item['execId']}").json()["stdout"])
    return False


FAULTS: dict[str, Callable[[Cluster, str], None]] = {
    "kill": Cluster.kill_node,
    "freeze": Cluster.freeze_node,
    "cut": Cluster.cut_node,
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_lost_node_is_told_within_the_engines_time_and_another_goes_on(
    site: Site, cluster: Cluster, fault: str
) -> None:
    with site.client() as client:
        # One on each node: the other one is the control.
        boxes: dict[str, str] = {}
        until("one sandbox on each node", lambda: _spread(site, client, boxes))
        victim, bystander = boxes["n1"], boxes["n2"]
        for box in (victim, bystander):
            client.put(f"/v1/sandboxes/{box}/files", params={"path": "f"}, content=b"x")
        asked = Asked(client, f"/v1/sandboxes/{victim}/exec", LONG)
        wait("the command runs", lambda: running(client, victim))
        begun = time.monotonic()
        FAULTS[fault](cluster, "n1")
        asked.join(NOTICED)
        assert not asked.is_alive(), "the caller still waits"
        print(f"{fault}: Lost after {asked.ended - begun:.1f} s")
        assert asked.answer is not None
        found = asked.answer.json()
        assert (found["state"], found["exitCode"]) == ("Lost", None), found
        assert found["error"]
        # The sandbox is over, with the reason; nothing was started again.
        wait("the sandbox is over", lambda: _state(client, victim) in {"Failed", "gone"})
        refusal = client.post(f"/v1/sandboxes/{victim}/exec", json={"command": "true"})
        assert refusal.status_code in {404, 409}, refusal.text
        answer = client.post(f"/v1/sandboxes/{bystander}/exec", json={"command": "cat f"})
        assert (answer.json().get("stdout"), answer.status_code) == ("x", 200), answer.text
        # A new one is made where there is room, and not on the lost node.
        fresh = create(client)["id"]
        assert node_of(site, fresh) == "n2"
        for box in (bystander, fresh, victim):
            client.delete(f"/v1/sandboxes/{box}")


def _spread(site: Site, client: httpx.Client, boxes: dict[str, str]) -> bool:
    made = create(client)["id"]
    node = node_of(site, made)
    if node in boxes:
        client.delete(f"/v1/sandboxes/{made}")
    else:
        boxes[node] = made
    return len(boxes) == 2


def _state(client: httpx.Client, sandbox: str) -> str:
    answer = client.get(f"/v1/sandboxes/{sandbox}")
    return "gone" if answer.status_code == 404 else str(answer.json()["state"])


def test_a_node_that_comes_back_gives_nothing_back_to_who_lost_it(
    site: Site, cluster: Cluster
) -> None:
    """A cut node runs on. When it is back, its pod has no owner any more, and goes."""
    with site.client() as client:
        box = create(client)["id"]
        pod = site.pods()[box]["metadata"]["name"]
        node = node_of(site, box)
        asked = Asked(client, f"/v1/sandboxes/{box}/exec", LONG)
        wait("the command runs", lambda: running(client, box))
        cluster.cut_node(node)
        asked.join(NOTICED)
        assert asked.answer is not None
        assert asked.answer.json()["state"] == "Lost"
        cluster.heal(node)
        wait("its pod goes", lambda: cluster.api_status("GET", f"{PODS}/{pod}") == 404)
        assert _state(client, box) in {"Failed", "gone"}


def test_only_who_asked_for_it_is_run_again(site: Site, cluster: Cluster) -> None:
    with site.client() as client:
        for retry in (True, False):
            word = f"12.{secrets.randbelow(10**6):06}"
            command = f"echo up; sleep {word}; echo done"
            body = {"image": "base", "command": command, "timeout": 300, "retry": retry}
            asked = Asked(client, "/v1/run", body)
            until("it runs", partial(_place, cluster, word))
            node = _place(cluster, word)
            cluster.kill_node(node)
            asked.join(NOTICED + 60)
            assert asked.answer is not None
            found = asked.answer.json()
            if retry:
                assert (found["state"], found["attempts"]) == ("Exited", 2), found
                assert found["stdout"] == "up\ndone\n"
            else:
                assert found["state"] == "Lost", found
            cluster.heal(node)


def _place(cluster: Cluster, word: str) -> str:
    """The node that has `sleep WORD`, or nothing."""
    for name, node in cluster.nodes.items():
        for pid in node.groups.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[:2] == [b"sleep", word.encode()]:
                    return name
    return ""


def test_a_pod_that_is_removed_by_hand_is_told_at_once(site: Site, cluster: Cluster) -> None:
    with site.client() as client:
        box = create(client)["id"]
        asked = Asked(client, f"/v1/sandboxes/{box}/exec", LONG)
        wait("the command runs", lambda: running(client, box))
        name = site.pods()[box]["metadata"]["name"]
        begun = time.monotonic()
        cluster.api("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
        asked.join(30)
        assert asked.answer is not None
        assert asked.answer.json()["state"] == "Lost"
        print(f"pod removed: Lost after {asked.ended - begun:.1f} s")
        assert _state(client, box) in {"Failed", "gone"}


# --- the service


def test_a_killed_service_comes_back_to_its_sandboxes(site: Site, cluster: Cluster) -> None:
    with site.client() as client:
        box = create(client)["id"]
        client.put(f"/v1/sandboxes/{box}/files", params={"path": "f"}, content=b"kept")
        asked = client.post(f"/v1/sandboxes/{box}/exec", json={**LONG, "background": True})
        execution = asked.json()["execId"]
        wait("the command runs", lambda: running(client, box))
        pod = site.pods()[box]["metadata"]["uid"]
    site.served.kill()
    site.start()
    with site.client() as client:
        found = client.get(f"/v1/execs/{execution}").json()
        assert (found["state"], found["exitCode"]) == ("Lost", None)
        assert _state(client, box) == "Running"
        assert site.pods()[box]["metadata"]["uid"] == pod
        # What it ran is over, too: nobody could have told how it ended.
        look = "cat f; for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; done 2>/dev/null"
        said = client.post(f"/v1/sandboxes/{box}/exec", json={"command": look}).json()["stdout"]
        assert said.startswith("kept")
        assert "sleep 1000" not in said.replace("sleep 1000' ", "")
        client.delete(f"/v1/sandboxes/{box}")
        wait("its pod goes", lambda: box not in site.pods())


def test_records_and_pods_are_made_to_agree(site: Site, cluster: Cluster) -> None:
    """A pod without a record is removed, a record without a pod is closed; strangers stay."""
    with site.client() as client:
        kept, closed, stray = (create(client)["id"] for _ in range(3))
        names = {box: pod["metadata"]["name"] for box, pod in site.pods().items()}
        labels = site.pods()[kept]["metadata"]["labels"]
    site.served.kill()
    cluster.api("DELETE", f"{PODS}/{names[closed]}?gracePeriodSeconds=0")
    forged = f'{{"metadata":{{"labels":{{"{SANDBOX}":"sbx-nobody"}}}}}}'
    cluster.kubectl("patch", "pod", names[stray], "--type=merge", "-p", forged)
    stranger = {
        "metadata": {"name": "stranger", "labels": {**labels, INSTALLATION: "0" * 16}},
        "spec": {
            "containers": [
                {
                    "name": "agent",
                    "image": cluster.images["plain"].name,
                    "command": ["sleep", "1000"],
                }
            ],
            "terminationGracePeriodSeconds": 0,
        },
    }
    cluster.api("POST", PODS, stranger)
    try:
        site.start()
        with site.client() as client:
            wait("the stray goes", lambda: "sbx-nobody" not in site.pods())
            wait("the record is closed", lambda: _state(client, closed) in {"Failed", "gone"})
            assert _state(client, kept) == "Running"
            answer = client.post(f"/v1/sandboxes/{kept}/exec", json={"command": "echo well"})
            assert answer.json()["stdout"] == "well\n"
            # Control: who belongs to another installation is left alone.
            assert cluster.api("GET", f"{PODS}/stranger")["status"]["phase"] == "Running"
            client.delete(f"/v1/sandboxes/{kept}")
    finally:
        cluster.api("DELETE", f"{PODS}/stranger?gracePeriodSeconds=0")


def test_nothing_outlives_its_lease_when_the_service_is_gone(
    superuser: As, cluster: Cluster, tmp_path: Path
) -> None:
    site = Site(superuser, cluster, tmp_path)
    with site.client() as client:
        short = create(client, timeout=8)["id"]
        long = create(client, timeout=600)["id"]
        for box in (short, long):
            client.post(f"/v1/sandboxes/{box}/exec", json={**LONG, "background": True})
    installation = site.pods()[long]["metadata"]["labels"][INSTALLATION]
    site.served.kill()
    try:
        over = {"Succeeded", "Failed"}
        took = until("the agent ends", lambda: site.pods()[short]["status"]["phase"] in over)
        print(f"a lease of 8 s ended {took:.1f} s after the service was killed")
        # Control: one whose lease is longer goes on.
        assert site.pods()[long]["status"]["phase"] == "Running"
    finally:
        leave(cluster, installation)


def test_all_pods_go_with_the_installations_own_object(
    superuser: As, cluster: Cluster, tmp_path: Path
) -> None:
    site = Site(superuser, cluster, tmp_path, warm=2)
    with site.client() as client:
        box = create(client)["id"]
    installation = site.pods()[box]["metadata"]["labels"][INSTALLATION]
    until("the pool is full", lambda: len(owned(cluster, "pods", installation)) >= 3)
    site.served.kill()
    (config,) = owned(cluster, "configmaps", installation)
    cluster.api("DELETE", f"/api/v1/namespaces/default/configmaps/{config['metadata']['name']}")
    took = until("pods go with it", lambda: not owned(cluster, "pods", installation))
    print(f"all pods gone {took:.1f} s after the object of the installation")
