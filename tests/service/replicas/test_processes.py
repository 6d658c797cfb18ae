"""Real servers over one real database: races, kills, and a replica that was stopped for a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_sandbox.service.replicas.lease import LEASE
from conftest import As

from ..conftest import Served
from ..postgres import Cluster, Sited

TESTS = Path(__file__).resolve().parents[2]
# A lease, a beat and a turn of the reaper, with room for a machine that has other things to do.
TAKEN_OVER = LEASE + 15.0


BOOT = """import sys, runpy
sys.path[:0] = sys.argv.pop(1).split(":")
runpy.run_module("service.replicas.server", run_name="__main__", alter_sys=True)"""


class Boot(Sited):
    """An identity whose server has the backend of these tests."""

    def command(self, tool: str, *args: str | os.PathLike[str]) -> list[str]:
        import psycopg

        assert tool == "ctl"
        places = [str(self.source), str(TESTS), str(Path(psycopg.__file__).parent.parent)]
        start = [
            os.path.realpath(sys.executable), "-I", "-c",
            BOOT, ":".join(places),
        ]  # fmt: skip
        return [*start, *(os.fspath(arg) for arg in args)]


class Team:
    """Servers over one database, with agents."""

    def __init__(self, identity: As, url: str, directory: Path) -> None:
        self.identity = identity
        self.url = url
        self.directory = directory
        self.boxes = directory / "boxes"
        identity.directory(self.boxes)
        self.servers: list[Served] = []
        self.token = ""
        self._clients: list[httpx.Client] = []

    def serve(self, name: str = "", backend: str = "directories", **env: str) -> Served:
        name = name or f"replica{len(self.servers)}"
        served = Served(
            self.identity, self.directory / name, "--backend", backend, "--database", self.url,
            env={"DIRECTORIES": str(self.boxes), **env},
        )  # fmt: skip
        self.servers.append(served)
        if not self.token:
            self.token = served.token("alice", "--database", self.url)
            self.chief = served.token("chief", "--scope", "admin", "--database", self.url)
        return served

    def client(self, served: Served, **options: Any) -> httpx.Client:
        limits = httpx.Limits(max_connections=100)
        made = served.client(self.token, limits=limits, **options)
        self._clients.append(made)
        return made

    def verify(self) -> None:
        """The audit is one chain, as the tool says."""
        done = self.identity.run(
            self.identity.command("ctl", "audit", "verify", "--database", self.url)
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for served in self.servers:
            if served.process.poll() is None:
                os.kill(served.process.pid, signal.SIGCONT)
                served.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def team(sited: Sited, postgres: Cluster) -> Iterator[Team]:
    identity = Boot(sited.name, uid=sited.uid, gid=sited.gid, home=sited.home, shared=sited.shared)
    url = postgres.new()
    made = Team(identity, url, identity.directory(identity.project() / "team"))
    yield made
    made.close()
    postgres.give_back(url.partition("@/")[2].partition("?")[0])


def _at_once(works: list[Callable[[], httpx.Response]]) -> list[httpx.Response]:
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], httpx.Response]) -> httpx.Response:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@contextlib.contextmanager
def _meeting(number: int) -> Iterator[str]:
    """The name of a socket that says a word to each as soon as so many are there."""
    name = f"agent-sandbox-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def attend() -> None:
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                here = [stack.enter_context(listener.accept()[0]) for _ in range(number)]
                for one in here:
                    # Who could not wait has gone.
                    with contextlib.suppress(BrokenPipeError):
                        one.send(b".")

        thread = threading.Thread(target=attend)
        thread.start()
        yield name
        # Ends an accept that nobody comes to.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _race_for_sandboxes(team: Team, limit: int, **env: str) -> Counter[int]:
    pair = [team.serve(MAX_SANDBOXES_PER_AGENT=str(limit), **env) for _ in range(2)]
    clients = [team.client(served) for served in pair]
    return Counter(
        answer.status_code
        for answer in _at_once(
            [lambda n=n: clients[n % 2].post("/v1/sandboxes", json={}) for n in range(50)]
        )
    )


def test_fifty_creates_at_two_servers_make_exactly_ten_sandboxes(team: Team) -> None:
    assert _race_for_sandboxes(team, 10, PAUSE="0.04") == {201: 10, 429: 40}
    assert len(list(team.boxes.iterdir())) == 10
    team.verify()


def test_cannot_have_the_last_place_at_two_servers_at_once(team: Team) -> None:
    """The first that has counted waits for the second to have counted: in vain."""
    with _meeting(2) as name:
        found = _race_for_sandboxes(team, 1, MEET=name, MEET_SECONDS="1")
    assert found == {201: 1, 429: 49}
    assert len(list(team.boxes.iterdir())) == 1


def test_control_without_the_lock_both_have_the_last_place(team: Team) -> None:
    with _meeting(2) as name:
        found = _race_for_sandboxes(team, 1, MEET=name, MEET_SECONDS="60", WITHOUT="lock")
    assert found == {201: 2, 429: 48}
    assert len(list(team.boxes.iterdir())) == 2


def test_one_key_at_three_servers_is_one_sandbox_and_one_execution(team: Team) -> None:
    clients = [team.client(team.serve()) for _ in range(3)]
    head = {"Idempotency-Key": "box"}
    answers = _at_once(
        [lambda n=n: clients[n % 3].post("/v1/sandboxes", json={}, headers=head) for n in range(24)]
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(list(team.boxes.iterdir())) == 1
    mark = team.directory / "runs"
    body = {"cmd": ["sh", "-c", f"echo run >> {mark}; sleep 0.3"]}
    head = {"Idempotency-Key": "run"}
    answers = _at_once(
        [lambda n=n: clients[n % 3].post("/v1/run", json=body, headers=head) for n in range(24)]
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["execId"] for answer in answers}) == 1
    assert mark.read_text() == "run\n"
    team.verify()


def test_three_servers_never_run_more_commands_at_once_than_one_may(team: Team) -> None:
    clients = [team.client(team.serve(MAX_CONCURRENT_EXECS_PER_AGENT="3")) for _ in range(3)]
    boxes = [client.post("/v1/sandboxes", json={}).json()["id"] for client in clients]
    mark = team.directory / "times"
    code = "import sys, time; print(time.time()); time.sleep(0.15); print(time.time())"
    body = {"cmd": [os.path.realpath(sys.executable), "-I", "-S", "-c", code]}
    answers = _at_once([
        lambda n=n: clients[n % 3].post(f"/v1/sandboxes/{boxes[n // 3 % 3]}/exec", json=body)
        for n in range(30)
    ])  # fmt: skip
    assert {answer.status_code for answer in answers} == {200}
    assert not mark.exists()
    steps: list[tuple[float, int]] = []
    for answer in answers:
        begin, end = map(float, answer.json()["stdout"].split())
        steps += [(begin, 1), (end, -1)]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    assert most == 3
    team.verify()


def test_a_rate_is_counted_once_for_all_servers(team: Team) -> None:
    clients = [team.client(team.serve(RATE_CREATE_PER_MIN="6")) for _ in range(3)]
    answers = _at_once(
        [lambda n=n: clients[n % 3].post("/v1/sandboxes", json={}) for n in range(30)]
    )
    # One more may have come back within the seconds that this took.
    made = Counter(answer.status_code for answer in answers)[201]
    assert 6 <= made <= 7


def _until(condition: Callable[[], bool], seconds: float = TAKEN_OVER) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_killed_server_leaves_its_command_lost_and_its_sandbox_usable(team: Team) -> None:
    first, second = team.serve(), team.serve()
    here, there = team.client(first), team.client(second)
    box = here.post("/v1/sandboxes", json={}).json()["id"]
    here.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["sh", "-c", "echo data > kept"]})
    ended = here.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["echo", "old"]}).json()["execId"]
    started = here.post(
        f"/v1/sandboxes/{box}/exec", json={"cmd": ["sleep", "1000"], "background": True}
    )
    exec_id = started.json()["execId"]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        # Through the other: one who waits for its end, and one who comes after the kill.
        waiting = pool.submit(
            there.post, f"/v1/sandboxes/{box}/exec", json={"cmd": ["sleep", "1000"]}
        )
        _until(lambda: len(there.get("/v1/execs?state=Running").json()["items"]) == 2)
        first.kill()
        lost = there.get(f"/v1/execs/{exec_id}").json()
        assert (lost["state"], lost["exitCode"]) == ("Lost", None)
        answer = waiting.result()
    assert time.monotonic() - began < TAKEN_OVER
    assert (answer.status_code, answer.json()["code"]) == (503, "REPLICA_UNAVAILABLE")
    done = there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["cat", "kept"]}).json()
    assert done["stdout"] == "data\n"
    assert there.get(f"/v1/execs/{ended}").json()["stdout"] == "old\n"
    assert there.get("/v1/execs?state=Running").json()["items"] == []
    team.verify()


def _stopped_and_woken(team: Team, **env: str) -> tuple[Served, str, httpx.Response | None]:
    """A server is stopped while another takes over; what it says to a request of that time."""
    first, second = team.serve(**env), team.serve()
    here, there = team.client(first), team.client(second)
    box = here.post("/v1/sandboxes", json={}).json()["id"]
    here.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["sleep", "1000"], "background": True})
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        _until(lambda: there.get(f"/v1/sandboxes/{box}").status_code == 200)
        body = {"cmd": ["sh", "-c", "echo by $PPID"]}
        done = there.post(f"/v1/sandboxes/{box}/exec", json=body).json()
        assert done["stdout"] == f"by {second.process.pid}\n"
        with ThreadPoolExecutor(1) as pool:
            # It waits in the kernel until the server goes on.
            asked = pool.submit(here.post, f"/v1/sandboxes/{box}/exec", json=body)
            time.sleep(0.3)
            os.kill(first.process.pid, signal.SIGCONT)
            try:
                answer = asked.result()
            except httpx.HTTPError:
                answer = None
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    return first, box, answer


def test_cannot_act_twice_a_server_that_was_stopped_fences_itself(team: Team) -> None:
    first, box, answer = _stopped_and_woken(team)
    if answer is not None:
        assert (answer.status_code, answer.json()["rule"]) == (503, "replica.lease")
    # It begins anew by itself, in the same process and at the same port; and knows where it is.
    _until(
        lambda: any(line.get("event") == "fenced" or "fenced" in str(line) for line in first.log)
    )

    def serves() -> bool:
        try:
            return team.client(first).get(f"/v1/sandboxes/{box}").status_code == 200
        except httpx.HTTPError:
            return False

    _until(serves)
    assert first.process.poll() is None
    done = team.client(first).post(
        f"/v1/sandboxes/{box}/exec", json={"cmd": ["sh", "-c", "echo by $PPID"]}
    )
    assert done.json()["stdout"] == f"by {team.servers[1].process.pid}\n"
    # Its command of before is lost, and ended.
    states = Counter(one["state"] for one in team.client(first).get("/v1/execs").json()["items"])
    assert states["Running"] == 0
    assert states["Lost"] == 1
    team.verify()


def test_control_without_a_look_at_the_lease_it_acts_in_anothers_sandbox(team: Team) -> None:
    """The same, but nobody looks at the clock: it runs a command where another is at work."""
    first, _, answer = _stopped_and_woken(team, WITHOUT="lease")
    assert answer is not None
    assert answer.json()["stdout"] == f"by {first.process.pid}\n"


def test_a_server_whose_database_is_away_for_long_begins_anew(
    own_postgres: Cluster, sited: Sited
) -> None:
    identity = Boot(sited.name, uid=sited.uid, gid=sited.gid, home=sited.home, shared=sited.shared)
    team = Team(identity, own_postgres.new(), identity.directory(identity.project() / "team"))
    try:
        served = team.serve()
        client = team.client(served)
        box = client.post("/v1/sandboxes", json={}).json()["id"]
        client.post(
            f"/v1/sandboxes/{box}/exec", json={"cmd": ["sleep", "1000"], "background": True}
        )
        own_postgres.stop()
        _until(lambda: any("fenced" in str(line) for line in served.log))
        own_postgres.start()

        def serves() -> bool:
            try:
                return team.client(served).get(f"/v1/sandboxes/{box}").status_code == 200
            except httpx.HTTPError:
                return False

        _until(serves)
        again = team.client(served)
        assert again.get(f"/v1/sandboxes/{box}").json()["state"] == "Running"
        (one,) = again.get("/v1/execs").json()["items"]
        assert one["state"] == "Lost"
        team.verify()
    finally:
        team.close()


def test_a_sandbox_of_bwrap_fails_with_its_server_and_comes_back_with_its_directory(
    team: Team,
) -> None:
    first, second = team.serve("one", "bwrap"), team.serve("two", "bwrap")
    here, there = team.client(first), team.client(second)
    made = here.post("/v1/sandboxes", json={})
    assert made.status_code == 201, made.text
    box = made.json()["id"]
    # Through the wrong one, with a real sandbox.
    put = there.put(f"/v1/sandboxes/{box}/files", params={"path": "a"}, content=b"kept")
    assert put.status_code == 200, put.text
    assert (
        there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["cat", "a"]}).json()["stdout"]
        == "kept"
    )
    first.kill()
    _until(lambda: there.get(f"/v1/sandboxes/{box}").json().get("state") == "Failed")
    assert "away" in there.get(f"/v1/sandboxes/{box}").json()["reason"]
    refused = there.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
    assert refused.json()["code"] == "WRONG_STATE"
    back = team.serve("one", "bwrap")
    for client in (team.client(back), there):
        assert client.get(f"/v1/sandboxes/{box}").json()["state"] == "Running"
        done = client.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["cat", "a"]})
        assert done.json()["stdout"] == "kept"
    team.verify()
