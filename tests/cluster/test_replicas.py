"""Two replicas over one database and one cluster: under load, and when one of them is killed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from agent_sandbox.service.backend import kubernetes
from agent_sandbox.service.backend.kube_objects import WARM
from agent_sandbox.service.backend.kube_pods import owner_hash
from agent_sandbox.service.replicas.lease import LEASE
from conftest import As
from service import postgres as databases

from . import history
from .ground import Cluster
from .history import History
from .lab import PODS
from .serving import PATIENCE, until
from .team import AGENTS, Team

# Sandboxes of one agent; and callers of each, who want more than that together.
MOST, CALLERS = 4, 5
LOAD_SECONDS = 30.0
# A lease, a beat and a turn of the reaper, with room for a machine that has other things to do.
TAKEN_OVER = LEASE + 15.0
# A pod that a replica was just making when it was killed is a stranger's only after a while.
SWEPT = kubernetes.YOUNG_SECONDS + kubernetes.KubernetesBackend.reconcile_seconds + 30.0
BASE = {"template": "base", "timeout": 600}
# What a caller is told while a replica is gone, and nobody knows yet what it has done.
GONE = {502, 503, 504}
REPLAY = "idempotency.replay"


@pytest.fixture(scope="module")
def server() -> Iterator[databases.Cluster]:
    made = databases.cluster()
    yield made
    made.remove()


@pytest.fixture
def make_team(
    superuser: As, cluster: Cluster, server: databases.Cluster, tmp_path: Path
) -> Iterator[Callable[..., Team]]:
    made: list[Team] = []

    def make(**env: str) -> Team:
        made.append(Team(superuser, cluster, server, tmp_path, **env))
        return made[-1]

    yield make
    for team in made:
        team.close()


@pytest.fixture
def told(cluster: Cluster) -> Iterator[History]:
    made = History(cluster)
    yield made
    made.end()


# --- under load


class Ledger(threading.Thread):
    """Looks at the database all the time: how many sandboxes there are, and whose they are."""

    def __init__(self, team: Team) -> None:
        super().__init__(daemon=True)
        self._url = team.url
        self._over = threading.Event()
        self.most: Counter[str] = Counter()
        self.homes: set[str] = set()
        self.looks = 0

    def run(self) -> None:
        import psycopg

        sql = b"SELECT owner, home FROM agent_sandbox.sandboxes WHERE state <> 'Failed'"
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._over.wait(0.01):
                rows = connection.execute(sql).fetchall()
                self.most |= Counter(str(row[0]) for row in rows)
                self.homes |= {str(row[1]) for row in rows}
                self.looks += 1

    def close(self) -> None:
        self._over.set()
        self.join()


class Caller:
    """Makes, uses and removes sandboxes through both replicas, one after another."""

    def __init__(self, team: Team, agent: str, number: int) -> None:
        self._pair = team.clients(agent)
        self._name = f"{agent}-{number}"
        self._chance = random.Random(self._name)
        self._both = ThreadPoolExecutor(2)
        self.made: list[str] = []
        self.refused = 0

    def work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        try:
            for number in itertools.count():
                if time.monotonic() >= end:
                    return
                box = self._create(f"{self._name}-{number}")
                if box:
                    self.made.append(box)
                    self._use(box, f"{self._name}-{number}")
        finally:
            self._both.shutdown()

    def _create(self, key: str) -> str:
        """One key, at both replicas at the same moment: one sandbox, or none."""
        gate = threading.Barrier(2)

        def ask(client: httpx.Client) -> httpx.Response:
            gate.wait()
            return client.post("/v1/sandboxes", json=BASE, headers={"Idempotency-Key": key})

        answers = list(self._both.map(ask, self._pair))
        for answer in answers:
            code = answer.json().get("code", "")
            assert answer.status_code == 201 or code == "QUOTA_EXCEEDED", answer.text
        found = {answer.json()["id"] for answer in answers if answer.status_code == 201}
        assert len(found) <= 1, f"{key}: {found}"
        if found:
            return str(found.pop())
        self.refused += 1
        # As it is told: there may be room later.
        time.sleep(self._chance.uniform(0.05, 0.2))
        return ""

    def _use(self, box: str, word: str) -> None:
        here, there = self._chance.sample(self._pair, 2)
        path = f"/v1/sandboxes/{box}"
        put = here.put(f"{path}/files", params={"path": "f"}, content=word.encode())
        assert put.status_code == 200, put.text
        got = there.get(f"{path}/files", params={"path": "f"})
        assert got.text == word, got.text
        # Whose pod this was before, nobody can tell: there is nothing but ours.
        run = there.post(f"{path}/exec", json={"command": "echo x >>runs; cat f; ls | wc -l"})
        assert run.json().get("stdout") == f"{word}2\n", run.text
        run = here.post(f"{path}/exec", json={"command": "wc -l <runs"})
        assert run.json().get("stdout") == "1\n", run.text
        assert there.get(path).json()["state"] == "Running"
        gone = here.delete(path)
        assert gone.status_code == 204, gone.text
        assert there.get(path).status_code == 404


@pytest.mark.slow
def test_two_replicas_under_load_never_give_more_than_there_is_nor_anything_twice(
    make_team: Callable[..., Team], told: History
) -> None:
    team = make_team(MAX_SANDBOXES_PER_AGENT=str(MOST))
    ledger = Ledger(team)
    ledger.start()
    callers = [Caller(team, agent, number) for agent in AGENTS for number in range(CALLERS)]
    try:
        with ThreadPoolExecutor(len(callers)) as pool:
            for job in [pool.submit(caller.work, LOAD_SECONDS) for caller in callers]:
                job.result()
    finally:
        ledger.close()
    until("all sandboxes go", lambda: not team.pods())
    told.close()
    made = [box for caller in callers for box in caller.made]
    refused = sum(caller.refused for caller in callers)
    hits = len({uid for uid in history.were_warm(told.events) if history.given(told.events)[uid]})
    print(
        f"\n{len(made)} sandboxes in {LOAD_SECONDS:g} s, {hits} of them from the pool;"
        f" {refused} refusals, {ledger.looks} looks at the database"
    )
    _check_counts(ledger, told, refused)
    _check_once(team, told, made)
    assert hits > 0, f"no {WARM} pod was taken"
    assert len(ledger.homes) == 2, "one of them did all of the work"
    team.verify()


def _check_counts(ledger: Ledger, told: History, refused: int) -> None:
    """Full, and never more than that: by the database and by the cluster."""
    assert refused > 0, "nobody has asked for too much"
    assert ledger.most == dict.fromkeys(AGENTS, MOST)
    found = history.most(told.events)
    for agent in AGENTS:
        assert 2 <= found[owner_hash(agent)] <= MOST, found


def _check_once(team: Team, told: History, made: list[str]) -> None:
    """A key is a sandbox, a sandbox is a pod, a pod is a sandbox, and there is nothing else."""
    assert len(set(made)) == len(made)
    pods = history.pods_of(told.events)
    assert set(pods) == set(made)
    assert {len(uids) for uids in pods.values()} == {1}
    assert all(len(sandboxes) <= 1 for sandboxes in history.given(told.events).values())
    # The second of two that have the same key is told what the first one has made.
    lines = team.lines("sandbox.create")
    new = [line["target"]["id"] for line in lines if line.get("rule") != REPLAY]
    assert sorted(new) == sorted(made)
    assert {line["target"]["id"] for line in lines} == set(made)


# --- one of them is killed


class Writer:
    """Writes a word at a time into a sandbox by commands, whatever becomes of the replicas."""

    def __init__(self, client: httpx.Client, box: str, name: str) -> None:
        self._client = client
        self.box = box
        self._name = name
        # Words by what is known of them.
        self.done: list[str] = []
        self.unknown: list[str] = []

    def work(self, over: threading.Event) -> None:
        for number in itertools.count():
            if over.is_set():
                return
            word = f"{self._name}-{number}"
            try:
                answer = self._client.post(
                    f"/v1/sandboxes/{self.box}/exec", json={"command": f"echo {word} >>words"}
                )
            except httpx.HTTPError:
                self.unknown.append(word)
                # Nobody listens at this address any more.
                over.wait(0.2)
                continue
            if answer.status_code == 200 and answer.json()["state"] == "Exited":
                self.done.append(word)
            else:
                assert answer.status_code in {200, *GONE}, answer.text
                self.unknown.append(word)


class Maker:
    """Wants one sandbox, and asks with one key until it has it."""

    def __init__(self, first: httpx.Client, then: httpx.Client, key: str) -> None:
        self._clients = itertools.chain((first,), itertools.repeat(then))
        self.key = key
        self.box = ""

    def work(self) -> None:
        body = {**BASE, "metadata": {"key": self.key}}
        end = time.monotonic() + PATIENCE
        for client in self._clients:
            assert time.monotonic() < end, f"{self.key}: no answer"
            try:
                answer = client.post(
                    "/v1/sandboxes", json=body, headers={"Idempotency-Key": self.key}
                )
            except httpx.HTTPError:
                continue
            if answer.status_code == 201:
                self.box = answer.json()["id"]
                return
            assert answer.status_code in GONE, answer.text
            time.sleep(0.1)


def _create(client: httpx.Client) -> str:
    answer = client.post("/v1/sandboxes", json=BASE)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _said(client: httpx.Client, box: str, command: str) -> str:
    answer = client.post(f"/v1/sandboxes/{box}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["stdout"])


# Once for each time that it runs.
LONG = {"command": "echo run >>runs; echo up; exec sleep 1000", "timeout": 500}
SLEEPS = "grep -alx 'sleep.1000.' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"


def test_a_loss_that_both_replicas_see_is_one_loss(
    make_team: Callable[..., Team], cluster: Cluster
) -> None:
    """Each of them watches all pods, and the one at home hears of it by its line, too."""
    team = make_team()
    here, there = team.clients("alice")
    boxes = [_create(client) for client in (here, there) for _ in range(3)]
    running = _start(here, there, boxes)
    pods = {box: pod["metadata"]["name"] for box, pod in team.sites[0].pods().items()}
    for box in boxes[1:]:
        cluster.api("DELETE", f"{PODS}/{pods[box]}?gracePeriodSeconds=0")
    for name in running[1:]:
        until("it is lost", partial(_is_lost, here, name))
    for client, box in itertools.product((here, there), boxes[1:]):
        found = client.get(f"/v1/sandboxes/{box}").json()
        assert (found["state"], "removed" in found["reason"]) == ("Failed", True), found
    lines = Counter(line["target"]["id"] for line in team.lines("sandbox.lost"))
    assert lines == dict.fromkeys(boxes[1:], 1)
    # Control: nobody has lost what is there.
    assert not _is_lost(there, running[0])
    assert _said(there, boxes[0], "cat runs") == "run\n"
    team.verify()


@pytest.mark.slow
def test_what_a_killed_replica_had_goes_on_by_the_other_and_nothing_runs_twice(
    make_team: Callable[..., Team], told: History
) -> None:
    team = make_team()
    (here, there), over = team.clients("alice"), threading.Event()
    theirs, ours = [_create(here) for _ in range(3)], [_create(there) for _ in range(2)]
    running = _start(here, there, theirs)
    # Two write to each, one by each replica; some want a sandbox just when it is killed.
    writers = [
        Writer(team.clients("alice")[n], box, f"{box}-{n}") for box in theirs + ours for n in (0, 1)
    ]
    makers = [Maker(*team.clients("alice"), f"key-{n}") for n in range(4)]
    with ThreadPoolExecutor(len(writers) + len(makers)) as pool:
        writing = [pool.submit(writer.work, over) for writer in writers]
        wait_for = partial(until, seconds=TAKEN_OVER)
        wait_for("all write", lambda: all(len(writer.done) > 2 for writer in writers))
        known = team.records()
        making = [pool.submit(maker.work) for maker in makers]
        wait_for("one is being made", lambda: len(team.records() - known) >= 1)
        team.sites[0].served.kill()
        began = time.monotonic()
        _check_lost(there, running, wait_for)
        print(f"\nLost and adopted {time.monotonic() - began:.1f} s after the kill")
        for job in making:
            job.result()
        count = [len(writer.done) for writer in writers if writer.box in theirs]
        wait_for("the other goes on with all of them", lambda: _grown(writers, theirs, count))
        over.set()
        for job in writing:
            job.result()
    _check_words(there, writers)
    _check_boxes(team, there, theirs, makers)
    _check_return(team, theirs + ours)
    _check_end(team, there, told)


def _start(here: httpx.Client, there: httpx.Client, boxes: list[str]) -> list[str]:
    """A long command in each, through either replica; their ids."""
    found = []
    for client, box in zip(itertools.cycle((here, there)), boxes, strict=False):
        answer = client.post(f"/v1/sandboxes/{box}/exec", json={**LONG, "background": True})
        assert answer.status_code == 202, answer.text
        found.append(answer.json()["execId"])
    for name in found:
        until("it runs", partial(_output, there, name))
    return found


def _output(client: httpx.Client, name: str) -> str:
    return str(client.get(f"/v1/execs/{name}").json()["stdout"])


def _is_lost(client: httpx.Client, name: str) -> bool:
    return bool(client.get(f"/v1/execs/{name}").json().get("state") == "Lost")


def _idle(client: httpx.Client, box: str) -> bool:
    return _said(client, box, SLEEPS) == "0\n"


def _check_lost(there: httpx.Client, running: list[str], wait_for: Callable[..., float]) -> None:
    for name in running:
        wait_for("it is lost", partial(_is_lost, there, name))
        assert there.get(f"/v1/execs/{name}").json()["exitCode"] is None


def _grown(writers: list[Writer], boxes: list[str], count: list[int]) -> bool:
    """Whether those who ask the replica that is left have written more."""
    own = [writer for writer in writers if writer.box in boxes]
    pairs = list(zip(own, count, strict=True))
    return all(len(writer.done) > before + 2 for writer, before in pairs[1::2])


def _check_words(there: httpx.Client, writers: list[Writer]) -> None:
    """What was answered for is there once, what was not at most once, and nothing else is."""
    for box in {writer.box for writer in writers}:
        found = Counter(_said(there, box, "cat words").split())
        own = [writer for writer in writers if writer.box == box]
        done = {word for writer in own for word in writer.done}
        unknown = {word for writer in own for word in writer.unknown}
        assert set(found.values()) == {1}, [word for word, times in found.items() if times > 1]
        assert done <= set(found) <= done | unknown
    assert any(writer.unknown for writer in writers), "nobody has seen the kill"


def _check_boxes(team: Team, there: httpx.Client, theirs: list[str], makers: list[Maker]) -> None:
    for box in theirs:
        # What ran is over; it ran once; and the pod is the one that it was.
        assert _said(there, box, "cat runs") == "run\n"
        until("its processes end", partial(_idle, there, box))
    adopted = Counter(line["target"]["id"] for line in team.lines("sandbox.adopt"))
    assert {adopted[box] for box in theirs} == {1}
    assert set(adopted.values()) == {1}
    assert len(team.lines("replica.bury")) == 1
    for maker in makers:
        items = there.get("/v1/sandboxes", params={"metadata": f"key={maker.key}"}).json()["items"]
        assert [item["id"] for item in items] == [maker.box]
        assert _said(there, maker.box, "echo well") == "well\n"


def _check_return(team: Team, boxes: list[str]) -> None:
    """Started again, the killed one serves all of them as well."""
    team.sites[0].start()
    with team.sites[0].client(team.tokens["alice"]) as back:
        for box in boxes:
            assert _said(back, box, "echo well") == "well\n"


def _check_end(team: Team, there: httpx.Client, told: History) -> None:
    """Every pod has a record; and when the records go, all of them go."""
    took = until("each pod has a record", lambda: team.pods() == team.records(), SWEPT)
    print(f"pods and records agree after {took:.1f} s more")
    for box in sorted(team.records()):
        assert there.delete(f"/v1/sandboxes/{box}").status_code == 204
    until("all pods go", lambda: not team.pods())
    assert team.records() == set()
    told.close()
    assert all(len(sandboxes) <= 1 for sandboxes in history.given(told.events).values())
    pods = history.pods_of(told.events)
    assert not [box for box, uids in pods.items() if len(uids) > 1]
    team.verify()
