"""What the kubernetes backend costs, next to `kubectl exec`, on a cluster of its own.

    python bench/cluster.py [ROUNDS] [SANDBOXES]

One run measures all of it, so ratios mean something. A real cluster of two nodes on this machine
(tests/cluster), a real service and real sockets. Needs root and `make test-cluster` once.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from cluster import ground  # noqa: E402 - after the path
from cluster.lab import PODS  # noqa: E402
from cluster.serving import Site, until  # noqa: E402
from conftest import As  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

WARM = 4
SETTLE = 3.0
# An agent thinks between two commands.
PAUSE = 0.05
PROFILE = "localhost/agent-sandbox.json"
BACK = "KUBERNETES_TRANSPORT"


def timed(rounds: int, act: Callable[[], object], pause: float = 0.0) -> list[float]:
    times = []
    for _ in range(rounds):
        time.sleep(pause)
        begun = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun)
    return sorted(times)


def shown(name: str, times: list[float], bare: float = 0.0, note: str = "") -> None:
    """One row: milliseconds, and how many times faster than `kubectl exec`."""
    p50, p95 = statistics.median(times), times[int(len(times) * 0.95)]
    ratio = f"{bare / p50:8.1f} x" if bare else " " * 10
    print(f"{name:<64} {p50 * 1e3:9.1f} {p95 * 1e3:9.1f} {ratio}   {note}", flush=True)


def main(rounds: int, count: int) -> None:
    reason = ground.missing()
    if reason:
        raise SystemExit(f"no cluster here: {reason}")
    begun = time.perf_counter()
    before = _used()
    with ground.running() as cluster, _folder() as base:
        print(f"cluster ready after {time.perf_counter() - begun:.1f} s, {_used() - before} MiB")
        print(f"{'':<64} {'p50 ms':>9} {'p95 ms':>9}  vs kubectl exec")
        bare = _kubectl(cluster, rounds)
        for name, env in (
            ("pod and seccomp", {}),
            ("bwrap inside", {"KUBERNETES_SECCOMP": PROFILE}),
            ("pod and seccomp, through the API server", {BACK: "exec"}),
        ):
            with _site(cluster, base, env) as site:
                _service(site, name, rounds, bare)
        if count:
            with _site(cluster, base, {}) as site:
                _many(site, count)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agsbx-bench.", dir="/srv") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def _site(cluster: ground.Cluster, base: Path, env: dict[str, str]) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(dir=base))
    folder.chmod(0o755)
    identity = As("root", uid=0, gid=0, home=Path("/root"), shared=base)
    site = Site(identity, cluster, folder, warm=WARM, **env)
    try:
        yield site
    finally:
        site.close()


def _kubectl(cluster: ground.Cluster, rounds: int) -> float:
    """What everybody would do: a pod, and `kubectl exec`."""
    image = cluster.images["base"].name
    container = {"name": "main", "image": image, "command": ["sleep", "100000"]}
    pod = {"metadata": {"name": "bare"}, "spec": {"containers": [container]}}
    begun = time.perf_counter()
    cluster.api("POST", PODS, pod)
    until("a pod runs", lambda: _running(cluster, "bare"))
    shown("a bare pod, until it runs", [time.perf_counter() - begun])
    words = [cluster.bin / "kubectl", "--kubeconfig", cluster.kubeconfig, "exec", "bare", "--"]
    times = timed(rounds, lambda: subprocess.run([*words, "true"], check=True))
    bare = statistics.median(times)
    shown("kubectl exec", times, bare)
    cluster.api("DELETE", f"{PODS}/bare?gracePeriodSeconds=0")
    return bare


def _running(cluster: ground.Cluster, name: str) -> bool:
    return bool(cluster.api("GET", f"{PODS}/{name}")["status"]["phase"] == "Running")


def _gauge(client: httpx.Client, site: Site, name: str) -> float:
    text = client.get("/metrics").text
    found = [line for line in text.splitlines() if name in line and not line.startswith("#")]
    return sum(float(line.split()[-1]) for line in found)


def _service(site: Site, name: str, rounds: int, bare: float) -> None:
    """Create and exec through the service."""
    with site.client() as client:
        _full(site)
        made: list[str] = []

        def create(template: str) -> None:
            answer = client.post("/v1/sandboxes", json={"template": template})
            assert answer.status_code == 201, answer.text
            made.append(answer.json()["id"])

        warm: list[float] = []
        for _ in range(max(2, rounds // 10)):
            _full(site)
            warm += timed(1, lambda: create("base"))
        shown(f"{name}: create, warm", sorted(warm))
        path = f"/v1/sandboxes/{made[0]}/exec"

        def run() -> None:
            answer = client.post(path, json={"command": ["true"]})
            assert answer.json().get("exitCode") == 0, answer.text

        # Pods that come up would be measured with it; `kubectl exec` was alone as well.
        _full(site)
        time.sleep(SETTLE)
        run()
        shown(f"{name}: exec, back to back", timed(rounds, run), bare)
        shown(f"{name}: exec, {PAUSE * 1e3:.0f} ms apart", timed(rounds, run, PAUSE), bare)
        for box in made:
            client.delete(f"/v1/sandboxes/{box}")


def _full(site: Site) -> None:
    """Wait until the pool is as large as it should be."""
    until("the pool is full", lambda: _waiting(site) >= WARM)


def _waiting(site: Site) -> int:
    found = site.cluster.api("GET", f"{PODS}?labelSelector=agent-sandbox.dev/state%3Dwarm")
    return sum(
        item["status"].get("phase") == "Running"
        and all(one["ready"] for one in item["status"].get("containerStatuses", ()))
        and "deletionTimestamp" not in item["metadata"]
        for item in found["items"]
    )


def _many(site: Site, count: int) -> None:
    """Many sandboxes, one after another."""
    before = _used()
    with site.client() as client:
        begun = time.perf_counter()
        boxes = []
        for _ in range(count):
            answer = client.post("/v1/sandboxes", json={"image": "base"})
            assert answer.status_code == 201, answer.text
            boxes.append(answer.json()["id"])
        took = time.perf_counter() - begun
        each = (_used() - before) / count
        print(f"{count} sandboxes: {count / took:.2f} per second, {each:.1f} MiB each")
        for box in boxes:
            client.delete(f"/v1/sandboxes/{box}")


def _used() -> int:
    """MiB that are not available to others."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    facts = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (facts["MemTotal"] - facts["MemAvailable"]) // 1024


if __name__ == "__main__":
    main(*(int(word) for word in [*sys.argv[1:], *("100", "20")[len(sys.argv) - 1 :]][:2]))
