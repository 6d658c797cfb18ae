"""What the Docker filter costs: requests per second and per call, next to the engine itself.

    python bench/docker.py [ROUNDS]

A dockerd of its own is started, as root. Without root there is nothing to measure.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
CALLS = {
    "ping": ("GET", "/v1.41/_ping", None),
    "list containers": ("GET", "/v1.41/containers/json", None),
    "inspect": ("GET", "/v1.41/containers/{id}/json", None),
    "create and remove": (
        "POST",
        "/v1.41/containers/create",
        {"Image": "busybox:test", "Cmd": ["true"]},
    ),
}
MIB = 1 << 20
COPIED = 256 * MIB


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("docker")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def call(path: Path, method: str, target: str, body: object) -> bytes:
    """One request on a connection of its own, as the command line does it."""
    connection = Connection(path)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    data = json.dumps(body).encode() if body is not None else None
    connection.request(method, target, data, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status >= 300:
        raise SystemExit(f"{method} {target}: {answer.status} {content.decode()}")
    return content


def measure(path: Path, name: str, rounds: int) -> list[float]:
    """Milliseconds of each round."""
    method, target, body = CALLS[name]
    made = call(path, "POST", CALLS["create and remove"][1], CALLS["create and remove"][2])
    number = json.loads(made)["Id"]
    took = []
    for _ in range(rounds):
        begun = time.perf_counter()
        answer = call(path, method, target.format(id=number), body)
        if method == "POST":
            call(path, "DELETE", f"/v1.41/containers/{json.loads(answer)['Id']}", None)
        took.append((time.perf_counter() - begun) * 1000)
    call(path, "DELETE", f"/v1.41/containers/{number}", None)
    return took


def copy(path: Path, base: Path) -> tuple[float, float]:
    """MiB per second into a container and out of it."""
    env = {"DOCKER_HOST": f"unix://{path}", "PATH": os.environ["PATH"], "HOME": str(base)}

    def docker(*words: str) -> float:
        begun = time.perf_counter()
        subprocess.run(["docker", *words], env=env, check=True, capture_output=True)
        return time.perf_counter() - begun

    big = base / "big"
    if not big.exists():
        big.write_bytes(os.urandom(MIB) * (COPIED // MIB))
    docker("run", "-d", "--network=none", "--name", "copied", "busybox:test", "sleep", "1000")
    up, down = (
        docker("cp", str(big), "copied:/big"),
        docker("cp", "copied:/big", str(base / "back")),
    )
    docker("rm", "-f", "copied")
    return COPIED / MIB / up, COPIED / MIB / down


def main() -> None:
    """Print the table."""
    if os.geteuid() != 0:
        print("the Docker filter: not measured, dockerd needs root")
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    from docker.conftest import Filtered
    from engine import engine

    with engine("--storage-driver=overlay2") as made, tempfile.TemporaryDirectory(dir="/srv") as at:
        made.image("busybox:test")
        base = Path(at)
        begun = time.perf_counter()
        filtered = Filtered(base, made.socket)
        print(f"the Docker filter starts in {(time.perf_counter() - begun) * 1000:.0f} ms")
        print(f"{'call, median of ' + str(rounds):32} {'engine':>10} {'filtered':>10} {'more':>10}")
        for name in CALLS:
            plain = statistics.median(measure(made.socket, name, rounds))
            through = statistics.median(measure(filtered.path, name, rounds))
            print(f"{name:32} {plain:8.2f}ms {through:8.2f}ms {through - plain:8.2f}ms")
        for label, path in (("engine", made.socket), ("filtered", filtered.path)):
            up, down = copy(path, base)
            print(f"docker cp, {label:21} {up:6.0f} MiB/s in {down:6.0f} MiB/s out")
        filtered.stop()


if __name__ == "__main__":
    main()
