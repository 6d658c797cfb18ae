"""Hundreds of sandboxes at once, by one service on two small nodes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import As

from .ground import Cluster
from .lab import INSTALLATION, owned
from .serving import Site, until

WANTED = int(os.environ.get("AGENT_SANDBOX_SCALE") or 500)
# More at once would only wait for the two processors of the tests' machine.
CALLERS = 12
# Shim, pause, agent, and what the kernel and kubelet keep for a pod; with room to spare.
MIB_EACH = 32
# How many fit is the question, not how soon a pod runs on a machine that has other things to do.
START_SECONDS = 300
# For everything else on the machine.
MIB_KEPT = 2048


def memory() -> tuple[int, int]:
    """MiB in all, and those that could be had."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    facts = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
    return facts["MemTotal"], facts["MemAvailable"]


def resident(pid: int) -> float:
    """MiB of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) / 1024


@pytest.mark.slow
def test_hundreds_of_sandboxes_live_at_once_and_all_of_them_answer(
    superuser: As, cluster: Cluster, tmp_path: Path
) -> None:
    _, free = memory()
    count = min(WANTED, (free - MIB_KEPT) // MIB_EACH)
    if count < WANTED:
        print(f"\n{count} instead of {WANTED}: {free} MiB are free")
    assert count >= 50, f"{free} MiB are not enough to say anything"
    site = Site(
        superuser, cluster, tmp_path, MAX_LIFETIME="7200", IDLE_TIMEOUT="7200",
        KUBERNETES_START_SECONDS=str(START_SECONDS),
    )  # fmt: skip
    try:
        boxes = _made(site, count)
        _answered(site, boxes)
        _ended(site, boxes)
    finally:
        site.close()


def _each(site: Site, work: list[Any], act: Any) -> list[Any]:
    with ThreadPoolExecutor(CALLERS) as pool:
        clients = [site.client(timeout=START_SECONDS + 60) for _ in range(CALLERS)]
        try:
            jobs = [pool.submit(act, clients[n % CALLERS], item) for n, item in enumerate(work)]
            return [job.result() for job in jobs]
        finally:
            for client in clients:
                client.close()


def _made(site: Site, count: int) -> list[str]:
    _, before = memory()
    begun = time.monotonic()

    def create(client: httpx.Client, number: int) -> str:
        answer = client.post("/v1/sandboxes", json={"image": "base", "timeout": 7000})
        assert answer.status_code == 201, f"{number}: {answer.text}"
        return str(answer.json()["id"])

    boxes = [str(box) for box in _each(site, list(range(count)), create)]
    took = time.monotonic() - begun
    assert len(set(boxes)) == count
    each = (before - memory()[1]) / count
    service = resident(site.served.process.pid)
    print(
        f"\n{count} sandboxes in {took:.0f} s ({count / took:.2f} per second), {each:.1f} MiB each;"
        f" the service has {service:.0f} MiB"
    )
    nodes = Counter(pod["spec"]["nodeName"] for pod in site.pods().values())
    assert sorted(nodes) == ["n1", "n2"]
    assert sum(nodes.values()) == count
    return boxes


def _answered(site: Site, boxes: list[str]) -> None:
    times: list[float] = []

    def run(client: httpx.Client, box: str) -> str:
        begun = time.monotonic()
        answer = client.post(
            f"/v1/sandboxes/{box}/exec", json={"command": f"echo {box} | tee f; cat f"}
        )
        times.append(time.monotonic() - begun)
        return str(answer.json().get("stdout", answer.text))

    begun = time.monotonic()
    said = _each(site, boxes, run)
    took = time.monotonic() - begun
    assert said == [f"{box}\n{box}\n" for box in boxes]
    times.sort()
    print(
        f"a command in each: {len(boxes) / took:.0f} per second, with {CALLERS} callers p50"
        f" {times[len(times) // 2] * 1e3:.0f} ms, p99 {times[int(len(times) * 0.99)] * 1e3:.0f} ms"
    )


def _ended(site: Site, boxes: list[str]) -> None:
    installation = next(iter(site.pods().values()))["metadata"]["labels"][INSTALLATION]
    begun = time.monotonic()

    def delete(client: httpx.Client, box: str) -> int:
        return client.delete(f"/v1/sandboxes/{box}").status_code

    assert set(_each(site, boxes, delete)) == {204}
    until("all pods go", lambda: not owned(site.cluster, "pods", installation), 600)
    print(f"all gone after {time.monotonic() - begun:.0f} s")
