"""What the proxy costs: throughput, latency and many connections, each next to plain loopback.

    make bench

The real proxy runs between two network namespaces of our own; no rights are needed. Rows are
measured in turns, and the best round counts. "direct" is the same client and the same server, on
the loopback of one namespace.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from proxy.lab import Lab  # noqa: E402 - the path comes first

SIZE = int(os.environ.get("BENCH_MIB", "1024")) << 20
ROUNDS = int(os.environ.get("BENCH_NETWORK_ROUNDS", "3"))
CONNECTIONS = 300
CONCURRENT = 500
PIECE = 1 << 20
ADDRESS, PORT = "127.0.0.2", 7000
ALLOW = [f"bench.test:{PORT}", f"{ADDRESS}:{PORT}", "bench.test", ADDRESS]

Connect = Callable[[], socket.socket]


def serve(listener: socket.socket) -> int:
    """A server in a process of its own: a download, or an echo of what it hears."""
    data = bytes(PIECE)

    def talk(client: socket.socket) -> None:
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while said := client.recv(16):
                if said == b"\0D":
                    for _ in range(SIZE // PIECE):
                        client.sendall(data)
                    return
                client.sendall(said)

    child = os.fork()
    if child:
        return child
    listener.settimeout(None)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=talk, args=(client,), daemon=True).start()


def download(connect: Connect) -> float:
    """Bytes per second of one download."""
    buffer = bytearray(PIECE)
    with connect() as sock:
        sock.settimeout(60)
        begun = time.perf_counter()
        sock.sendall(b"\0D")
        total = 0
        while count := sock.recv_into(buffer):
            total += count
        assert total == SIZE, total
        return total / (time.perf_counter() - begun)


def exchange(connect: Connect) -> float:
    """Seconds from an open connection to its first answer: the proxy has dialled by then."""
    with connect() as sock:
        begun = time.perf_counter()
        sock.sendall(b"\0")
        assert sock.recv(1) == b"\0"
        return time.perf_counter() - begun


def first_answers(connect: Connect) -> float:
    """The median of many connections."""
    return sorted(exchange(connect) for _ in range(CONNECTIONS))[CONNECTIONS // 2]


def round_trips(connect: Connect) -> float:
    """Seconds for an exchange on a connection that stands."""
    with connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        for _ in range(CONNECTIONS):
            sock.sendall(b"\0")
            sock.recv(1)
        return (time.perf_counter() - begun) / CONNECTIONS


def crowd(connect: Connect) -> float:
    """Seconds for an exchange on each of many connections that are open together."""
    held = [connect() for _ in range(CONCURRENT)]
    begun = time.perf_counter()
    for sock in held:
        sock.sendall(b"\0")
    for sock in held:
        assert sock.recv(1) == b"\0"
    taken = time.perf_counter() - begun
    for sock in held:
        sock.close()
    return taken


def main() -> None:
    """Measure and print."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Lab({"bench.test": [ADDRESS]}, ALLOW) as lab:
        server = serve(lab.outside.listen(ADDRESS, PORT))
        try:
            measure(lab)
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def measure(lab: Lab) -> None:
    """All rows."""
    stand_in = lab.resolve("bench.test")
    ways: dict[str, Connect] = {
        "direct": lambda: lab.outside.connect(ADDRESS, PORT),
        "proxy": lambda: lab.inside.connect(stand_in, PORT),
    }
    print(f"{'what':<24} {'direct':>10} {'proxy':>10} {'ratio':>8}")
    for what, row, scale, choose in ROWS:
        best: dict[str, float] = {}
        for _ in range(ROUNDS):
            for way, connect in ways.items():
                value = row(connect) * scale
                best[way] = choose(best.get(way, value), value)
        ratio = best["proxy"] / best["direct"]
        print(f"{what:<24} {best['direct']:10.3f} {best['proxy']:10.3f} {ratio:8.2f}")


# What is measured, how, in which unit, and which of two values is the better one.
ROWS: list[tuple[str, Callable[[Connect], float], float, Callable[[float, float], float]]] = [
    ("one download, MiB/s", download, 1 / (1 << 20), max),
    ("first answer, ms", first_answers, 1000, min),
    ("exchange, ms", round_trips, 1000, min),
    (f"{CONCURRENT} together, ms", crowd, 1000, min),
]


if __name__ == "__main__":
    main()
