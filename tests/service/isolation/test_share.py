"""What A can use up of the service. B is served, and A is told which limit it has met."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import As
from kernel.conftest import eventually
from service.conftest import Serve, Served

pytestmark = pytest.mark.kernel
MIB = 1 << 20
# What the service may grow by, at most, whatever one agent sends or does not read.
GROWTH = 160 * MIB


class Pair:
    """A server with few places, and two agents."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.tokens = {name: served.token(f"agent-{name}") for name in "ab"}
        self.a, self.b = (served.client(self.tokens[name]) for name in "ab")

    def close(self) -> None:
        self.a.close()
        self.b.close()

    def b_is_served(self) -> None:
        """Everything that B needs."""
        made = self.b.post("/v1/sandboxes", json={})
        assert made.status_code == 201, made.text
        box = f"/v1/sandboxes/{made.json()['id']}"
        done = self.b.post(f"{box}/exec", json={"command": "echo served"})
        assert done.json()["stdout"] == "served\n"
        assert self.b.put(f"{box}/files", params={"path": "f"}, content=b"x").status_code == 200
        assert self.b.delete(box).status_code == 204

    def raw(self, head: str, body: bytes = b"") -> socket.socket:
        """A connection of A's with the beginning of a request on it."""
        host, port = self.served.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=30)
        common = f"Host: localhost\r\nX-API-Key: {self.tokens['a']}\r\n"
        sock.sendall(head.replace("\n", "\r\n").encode() + common.encode() + b"\r\n" + body)
        return sock

    def waiting(self) -> int:
        return int(self.a.get("/v1/whoami").json()["usage"]["queuedExecs"])

    def memory(self) -> int:
        status = Path(f"/proc/{self.served.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture
def pair(user: As, serve: Serve) -> Iterator[Callable[..., Pair]]:
    """Start a server with these limits."""
    made: list[Pair] = []

    def start(**limits: str) -> Pair:
        made.append(Pair(serve(user, env=limits)))
        return made[-1]

    yield start
    for one in made:
        one.close()


def refusal(answer: httpx.Response, rule: str) -> None:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert rule in answer.json()["rule"]


def test_cannot_use_up_the_sandboxes(pair: Callable[..., Pair]) -> None:
    two = pair(MAX_SANDBOXES_PER_AGENT="3", MAX_SANDBOXES="8")
    for _ in range(3):
        assert two.a.post("/v1/sandboxes", json={}).status_code == 201
    refusal(two.a.post("/v1/sandboxes", json={}), "max_sandboxes_per_agent")
    refusal(two.a.post("/v1/run", json={"command": "true"}), "max_sandboxes_per_agent")
    two.b_is_served()
    # The control: B has as many of its own, and no more.
    for _ in range(3):
        assert two.b.post("/v1/sandboxes", json={}).status_code == 201
    refusal(two.b.post("/v1/sandboxes", json={}), "max_sandboxes_per_agent")


def test_cannot_use_up_the_places(pair: Callable[..., Pair]) -> None:
    two = pair(
        MAX_CONCURRENT_EXECS="4", MAX_CONCURRENT_EXECS_PER_AGENT="3",
        MAX_QUEUED_EXECS_PER_AGENT="2", MAX_QUEUE_SECONDS="1",
    )  # fmt: skip
    box = two.a.post("/v1/sandboxes", json={}).json()["id"]
    stay = {"command": "sleep 100", "background": True}

    def ask(_: int) -> httpx.Response:
        return two.a.post(f"/v1/sandboxes/{box}/exec", json=stay)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [202] * 3 + [429] * 5
    two.b_is_served()


def test_cannot_go_before_b_in_the_queue(pair: Callable[..., Pair]) -> None:
    """All places are A's, and thirty more wait: B's one command does not wait for those."""
    two = pair(MAX_CONCURRENT_EXECS="2", MAX_CONCURRENT_EXECS_PER_AGENT="2")
    done: list[int] = []

    def ask(number: int) -> None:
        with two.served.client(two.tokens["a"]) as client:
            answer = client.post("/v1/run", json={"command": "sleep 0.3"})
            assert answer.status_code == 200, answer.text
            done.append(number)

    with ThreadPoolExecutor(30) as pool:
        work = [pool.submit(ask, number) for number in range(30)]
        assert eventually(lambda: two.waiting() > 15, 30)
        before = len(done)
        assert two.b.post("/v1/run", json={"command": "true"}).status_code == 200
        passed = len(done) - before
        # The control: A's own commands still wait, and are done in the end.
        assert two.waiting() > 0
        for one in work:
            one.result()
    assert passed < 15
    assert len(done) == 30


def test_cannot_hold_all_connections(pair: Callable[..., Pair]) -> None:
    """Streams, uploads that do not come, and answers that are waited for: all are counted."""
    two = pair(MAX_OPEN_REQUESTS_PER_AGENT="12")
    box = two.a.post("/v1/sandboxes", json={}).json()["id"]
    run = {"command": "sleep 100", "background": True}
    stay = two.a.post(f"/v1/sandboxes/{box}/exec", json=run).json()["id"]
    with contextlib.ExitStack() as held:
        for _ in range(4):
            sock = held.enter_context(two.raw(f"GET /v1/execs/{stay}/events HTTP/1.1\n"))
            assert sock.recv(16).startswith(b"HTTP/1.1 200")
        for number in range(4):
            held.enter_context(
                two.raw(f"PUT /v1/sandboxes/{box}/files?path=f{number} HTTP/1.1\n"
                        "Content-Length: 1000000\n", b"x")
            )  # fmt: skip
        body = b'{"command": "sleep 50"}'
        head = f"POST /v1/sandboxes/{box}/exec HTTP/1.1\nContent-Type: application/json\n"
        for _ in range(4):
            held.enter_context(two.raw(f"{head}Content-Length: {len(body)}\n", body))
        assert eventually(lambda: two.a.get("/v1/whoami").status_code == 429)
        refusal(two.a.get("/v1/whoami"), "max_open_requests_per_agent")
        two.b_is_served()
    # The control: whoever lets go may ask again. Commands go on, and their requests are over.
    assert eventually(lambda: two.a.get("/v1/whoami").status_code == 200)


def test_cannot_keep_b_out_with_connections_that_say_nothing(pair: Callable[..., Pair]) -> None:
    two = pair()
    host, port = two.served.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as held:
        for number in range(600):
            sock = held.enter_context(socket.create_connection((host, int(port)), timeout=30))
            if number % 2:
                sock.sendall(b"POST /v1/run HTTP/1.1\r\nHost: local")
        two.b_is_served()


def test_cannot_fill_the_memory_with_bodies(pair: Callable[..., Pair]) -> None:
    """Forty bodies of 8 MiB, each without its last byte."""
    two = pair()
    two.b_is_served()
    before = two.memory()
    size = 8 * MIB
    padding = b'{"command": "true"}' + b" " * (size - 19)
    head = f"POST /v1/run HTTP/1.1\nContent-Type: application/json\nContent-Length: {size}\n"
    refused, held = 0, []
    for _ in range(40):
        sock = two.raw(head)
        # A refusal comes before the body is sent.
        sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            if sock.recv(1 << 12).startswith(b"HTTP/1.1 429"):
                refused += 1
                sock.close()
                continue
        sock.settimeout(30)
        sock.sendall(padding[:-1])
        held.append(sock)
    assert refused >= 30
    two.b_is_served()
    assert two.memory() - before < GROWTH
    # The control: those that were let in are done as soon as they are whole.
    for sock in held:
        sock.sendall(b" ")
        assert sock.recv(64).startswith(b"HTTP/1.1 200")
        sock.close()


def test_cannot_fill_the_memory_with_answers(pair: Callable[..., Pair]) -> None:
    """Output whose JSON is six times as long, asked for forty times and not read."""
    two = pair()
    two.b_is_served()
    script = "import sys; sys.stdout.write('\\x01' * (3 << 20))"
    done = two.a.post("/v1/run", json={"cmd": ["python3", "-c", script]}).json()
    assert done["stdoutBytes"] == 3 * MIB
    path = f"/v1/execs/{done['id']}/logs?limit={4 * MIB}"
    before = two.memory()
    with contextlib.ExitStack() as held:
        for _ in range(40):
            held.enter_context(two.raw(f"GET {path} HTTP/1.1\n"))
        two.b_is_served()
        two.b_is_served()
        assert two.memory() - before < GROWTH
    # The control: who reads gets all of it.
    assert eventually(lambda: two.a.get("/v1/whoami").status_code == 200)
    assert len(two.a.get(path).json()["stdout"]) == 3 * MIB


def test_cannot_use_b_s_rate(pair: Callable[..., Pair]) -> None:
    two = pair(RATE_REQUESTS_PER_SEC="30")
    codes = [two.a.get("/v1/whoami").status_code for _ in range(60)]
    assert 429 in codes
    two.b_is_served()
    refusal(next(a for a in iter(lambda: two.a.get("/v1/whoami"), None) if a.status_code != 200),
            "rate_requests_per_sec")  # fmt: skip


def test_cannot_hold_up_b_with_signals_and_pauses(pair: Callable[..., Pair]) -> None:
    """Signals that are ignored, and pauses of what forks all the time, take A's time alone."""
    two = pair()
    box = two.a.post("/v1/sandboxes", json={}).json()["id"]
    fork = "trap '' TERM; while :; do true & wait; done"
    run = {"command": fork, "background": True, "timeout": 60}
    begun = two.a.post(f"/v1/sandboxes/{box}/exec", json=run).json()["id"]
    over = threading.Event()

    def signals(_: int) -> None:
        with two.served.client(two.tokens["a"]) as client:
            while not over.is_set():
                client.post(f"/v1/execs/{begun}/signal", json={"signal": "TERM"})

    def pauses(_: int) -> None:
        with two.served.client(two.tokens["a"]) as client:
            while not over.is_set():
                client.post(f"/v1/sandboxes/{box}/pause")
                client.post(f"/v1/sandboxes/{box}/resume")

    with ThreadPoolExecutor(12) as pool:
        work = [*(pool.submit(signals, n) for n in range(8)), pool.submit(pauses, 0)]
        try:
            for _ in range(3):
                two.b_is_served()
            assert not any(one.done() for one in work)
        finally:
            over.set()


def test_cannot_make_the_service_remember_much(pair: Callable[..., Pair]) -> None:
    """Commands and variables are bounded, and of a long command only the beginning is kept."""
    two = pair()
    words = ["true", *["x" * 100_000] * 8]
    done = two.a.post("/v1/run", json={"cmd": words})
    assert (done.status_code, done.json()["exitCode"]) == (200, 0)
    assert len(json.dumps(done.json()["command"])) < 20_000
    for body in (
        {"cmd": ["true", *["x" * 100_000] * 12]},
        {"cmd": ["true"], "env": {f"V{n}": "x" * 100_000 for n in range(12)}},
    ):
        refused = two.a.post("/v1/run", json=body)
        assert (refused.status_code, refused.json()["rule"]) == (422, "request.arguments")
    kept = {"env": {f"V{n}": "x" * 100_000 for n in range(12)}}
    assert two.a.post("/v1/sandboxes", json=kept).status_code == 422


def told(served: Served) -> list[dict[str, Any]]:
    return [line for line in served.log if line["level"] == "error"]


def test_nothing_of_this_is_a_fault(pair: Callable[..., Pair]) -> None:
    """Clients that go away in the middle of anything leave no error behind."""
    two = pair()
    box = two.a.post("/v1/sandboxes", json={}).json()["id"]
    body = b'{"command": "echo x; sleep 0.2"}'
    head = f"POST /v1/sandboxes/{box}/exec HTTP/1.1\nContent-Type: application/json\n"
    for cut in (0, 1, len(body) - 1, len(body)):
        for accept in ("application/json", "text/event-stream"):
            start = f"{head}Accept: {accept}\nContent-Length: {len(body)}\n"
            two.raw(start, body[:cut]).close()
    two.raw(f"GET /v1/sandboxes/{box}/archive HTTP/1.1\n").close()
    put = f"PUT /v1/sandboxes/{box}/files?path=f HTTP/1.1\nContent-Length: 100\n"
    two.raw(put, b"x" * 50).close()
    two.b_is_served()
    assert eventually(lambda: two.a.get("/v1/whoami").json()["usage"]["runningExecs"] == 0), (
        two.a.get("/v1/whoami").text
    )
    assert told(two.served) == []
