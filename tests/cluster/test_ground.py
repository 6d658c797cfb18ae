"""The cluster itself: what it can be trusted with, and that it goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from . import build, ground, images, programs
from .ground import Cluster
from .machine import Groups, names, wait


def traces(number: int) -> set[str]:
    """All that a cluster may leave on this machine."""
    net = programs.Network(number=number)
    found = {f"cgroup {name}" for name in names(f"{ground.PREFIX}{number}-")}
    found |= {f"file {path}" for path in ground.HOME.glob(f"{ground.PREFIX}{number}-*")}
    if os.path.exists(f"/sys/class/net/{net.link}"):
        found.add(f"device {net.link}")
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    found |= {f"route {line}" for line in routes.splitlines() if line.startswith(f"{net.prefix}.")}
    mounts = Path("/proc/self/mounts").read_text()
    found |= {f"mount {word}" for word in mounts.split() if f"{ground.PREFIX}{number}-" in word}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if f"{ground.PREFIX}{number}-".encode() in words:
            found.add(f"process {words!r}")
    return found


def pod(name: str, image: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A plain pod, with nothing of ours."""
    container = {"name": "main", "image": image, "command": list(command)}
    return {
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            **spec,
        },
    }


PODS = "/api/v1/namespaces/default/pods"
# A file of every image that no runtime mounts another over.
GROUP = images.FILES["etc/group"]


def test_addresses_of_clusters_and_nodes_are_apart() -> None:
    nets = [programs.Network(number=number) for number in range(programs.CLUSTERS)]
    assert len({net.prefix for net in nets}) == programs.CLUSTERS
    assert nets[-1].prefix == "100.127"  # the last of 100.64.0.0/10
    of_one = {nets[0].host, nets[0].control, nets[0].service, *map(nets[0].node, (1, 2))}
    assert len(of_one) == 5
    assert nets[0].pods(1) == "100.64.4.0/22"
    assert nets[0].pods(2) == "100.64.8.0/22"


def test_a_build_has_a_place_of_its_source_and_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {build.place()}
    for name in ("SHA256", "STEPS", "VERSION"):
        with monkeypatch.context() as changed:
            changed.setattr(build, name, "other")
            places.add(build.place())
    assert len(places) == 4


def test_an_api_server_keeps_objects_and_gives_them_by_right(apiserver: Cluster) -> None:
    made = apiserver.api("POST", PODS, pod("kept", "registry.test/plain@sha256:" + "0" * 64))
    assert made["status"]["phase"] == "Pending"
    assert apiserver.api("GET", f"{PODS}/kept")["metadata"]["uid"] == made["metadata"]["uid"]
    stranger = ground.Api(apiserver.net.control, apiserver.keys, "scheduler")
    assert stranger.ask("GET", "/api/v1/namespaces/default/secrets")[0] == 403
    apiserver.api("DELETE", f"{PODS}/kept?gracePeriodSeconds=0")


def test_an_api_server_outlives_custom_resources_with_maps(apiserver: Cluster) -> None:
    """What the build has to patch (build.PATCHES): without it, this ends the server."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    spec = {
        "group": "test.example",
        "scope": "Namespaced",
        "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
    }
    apiserver.api("POST", crds, {"metadata": {"name": "things.test.example"}, "spec": spec})
    path = "/apis/test.example/v1/namespaces/default/things"
    try:
        wait("it is served", lambda: apiserver.api_status("GET", path) == 200)
        for number in range(50):
            many = {f"name{n}": f"value{n}" for n in range(number)}
            thing = {"apiVersion": "test.example/v1", "kind": "Thing", "spec": many}
            named = {"name": f"thing-{number}", "labels": many, "annotations": many}
            apiserver.api("POST", path, {**thing, "metadata": named})
        assert len(apiserver.api("GET", path)["items"]) == 50
    finally:
        apiserver.api("DELETE", f"{crds}/things.test.example")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_harness_leaves_nothing_that_the_next_does_not_remove(frozen: bool) -> None:
    """A frozen process cannot even be killed before it thaws."""
    source = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.ground", "--alone"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd=source,
        env={**os.environ, "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}"},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        said = ""
        while "}\n}" not in said and not said.endswith("\n}\n"):
            said += process.stdout.readline()
        number = int(Path(json.loads(said)["base"]).name.split("-")[2])
        assert {trace.split()[0] for trace in traces(number)} >= {"cgroup", "file", "device"}
        (group,) = names(f"{ground.PREFIX}{number}-")
        if frozen:
            Groups(group).freeze(frozen=True)
        process.kill()
    if not frozen:
        wait("processes end with the harness", lambda: not Groups(group).processes())
    kept, lock = ground._free()
    lock.close()
    assert kept <= number
    wait("nothing is left", lambda: not traces(number))


def test_pods_of_both_nodes_are_reached_from_here_and_from_each_other(cluster: Cluster) -> None:
    image = cluster.images["plain"].name
    serve = ("/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/etc")
    began = time.monotonic()
    for name in cluster.nodes:
        cluster.api("POST", PODS, pod(f"on-{name}", image, *serve, nodeName=name))
    try:
        wait("pods run", lambda: len(addresses(cluster)) == 2)
        print(f"two pods run after {time.monotonic() - began:.1f} s")
        for node, address in addresses(cluster).items():
            other = next(name for name in cluster.nodes if name != node)
            url = f"http://{address}:8080/group"
            wait("it serves", lambda url=url: _fetched(url) == GROUP)
            said = cluster.kubectl("exec", f"on-{other}", "--", "wget", "-q", "-O-", url)
            assert said == GROUP
    finally:
        for name in cluster.nodes:
            cluster.api("DELETE", f"{PODS}/on-{name}?gracePeriodSeconds=0")


def addresses(cluster: Cluster) -> dict[str, str]:
    """Of pods that run, by node."""
    pods = cluster.api("GET", PODS)["items"]
    return {
        item["spec"]["nodeName"]: item["status"]["podIP"]
        for item in pods
        if item["status"]["phase"] == "Running" and item["metadata"]["name"].startswith("on-")
    }


def _fetched(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_the_machine_keeps_its_own_kernel_settings(two_nodes: Cluster) -> None:
    """kubelet has set them, in files that only its node sees."""
    node = two_nodes.nodes["n1"]
    inside = subprocess.run(
        node.inside("cat", "/proc/sys/kernel/panic_on_oops"), capture_output=True, check=True
    )
    assert inside.stdout.strip() == b"1"
    assert f"{two_nodes.base}" not in Path("/proc/self/mounts").read_text()


def test_killing_a_node_kills_all_of_it_and_healing_brings_it_back(cluster: Cluster) -> None:
    image = cluster.images["plain"].name
    sleep = ("/bin/busybox", "sleep", "987654")
    cluster.api("POST", PODS, pod("on-n1", image, *sleep, nodeName="n1"))
    wait("the pod runs", lambda: "n1" in addresses(cluster))
    node = cluster.nodes["n1"]
    before = node.groups.processes()
    assert len(before) > 4  # init, containerd, kubelet, shim, pause, and the command
    cluster.kill_node("n1")
    assert not [pid for pid in before if _alive(pid)]
    cluster.api("DELETE", f"{PODS}/on-n1?gracePeriodSeconds=0")
    cluster.heal("n1")
    assert cluster.nodes["n1"].pid != node.pid


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True
