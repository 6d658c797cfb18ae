"""What A's commands can reach of B's, and of the service's, from inside a sandbox."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conftest import As
from service.conftest import Serve, Served, Team
from service.isolation.probes import HOLDER, SEEKER, TOGETHER

pytestmark = pytest.mark.kernel
SECRET = "secret-of-the-service-" + secrets.token_hex(8)
STAY = "\ntime.sleep(300)\n"


class Two:
    """A server with a secret in its environment, and B at work in it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.a = served.client(served.token("agent-a"))
        self.b = served.client(served.token("agent-b"))
        self.word = "of-b-" + secrets.token_hex(8)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def two(runner: As, serve: Serve) -> Iterator[Two]:
    found = Two(serve(runner, env={"SERVICE_SECRET": SECRET}))
    yield found
    found.close()


def made(client: httpx.Client, **wish: Any) -> str:
    answer = client.post("/v1/sandboxes", json=wish)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def run(client: httpx.Client, sandbox: str, *argv: str, **more: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sandboxes/{sandbox}/exec", json={"cmd": list(argv), **more})
    assert answer.status_code in (200, 202), answer.text
    found: dict[str, Any] = answer.json()
    return found


def first_line(client: httpx.Client, exec_id: str) -> str:
    """What a command has said first, as soon as it has."""
    with client.stream("GET", f"/v1/execs/{exec_id}/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data:") and '"data"' in line:
                return str(json.loads(line[5:])["data"])
    raise AssertionError(client.get(f"/v1/execs/{exec_id}").text)


def facts_of(two: Two, sandbox: str, held: dict[str, Any]) -> dict[str, Any]:
    """All that the host knows, for an attacker who knows everything."""
    data = os.path.realpath(two.served.data)
    place = f"{data}/sandboxes/{sandbox}"
    return {
        **held, "word": two.word, "secret": SECRET, "socket": two.served.socket,
        "service": int(two.served.url.rpartition(":")[2]),
        "paths": [data, place, f"{place}/workspace/{two.word}", f"{data}/state.db",
                  f"{data}/audit", two.served.socket],
    }  # fmt: skip


@pytest.mark.parametrize("network", ["off", "public"])
def test_cannot_reach_b_or_the_service_from_inside(two: Two, network: str) -> None:
    theirs = made(two.b)
    there = run(two.b, theirs, "python3", "-c", HOLDER + STAY, two.word, background=True)
    held = json.loads(first_line(two.b, there["id"]))
    facts = json.dumps(facts_of(two, theirs, held))
    mine = made(two.a, network=network)
    answer = run(two.a, mine, "python3", "-c", SEEKER, stdin=facts)
    assert answer["stdout"], answer
    assert json.loads(answer["stdout"]) == []
    # Nothing has happened to B's command, nor to the service.
    assert two.b.get(f"/v1/execs/{there['id']}").json()["state"] == "Running"
    # The control: where nothing stands between, the same steps find what there is.
    again = facts.replace(two.word, f"{two.word}-2")
    control = run(two.b, theirs, "python3", "-c", TOGETHER, f"{two.word}-2", SEEKER, stdin=again)
    # There the signals reach their goal, too.
    assert control["signal"] == "SIGKILL"
    reached = json.loads(control["stdout"].splitlines()[-1])
    assert set(reached) >= {
        "a file by its name", "abstract socket", "socket", "loopback", "shared memory",
        "/proc: cmdline", "/proc: net/unix",
    }  # fmt: skip


def test_what_stays_is_the_agent_s_own(team: Team) -> None:
    """Files and home are there for the next command; processes, memory and sockets are not."""
    mine = made(team.a)
    try:
        script = "for d in /workspace /home/agent /tmp /dev/shm; do echo kept > $d/f; done"
        run(team.a, mine, "sh", "-c", f"{script}; sleep 1234 &")
        # With a process of this very command, for comparison.
        look = (
            "cat /workspace/f /home/agent/f /tmp/f /dev/shm/f; sleep 5678 & "
            "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        )
        found = run(team.a, mine, "sh", "-c", look)["stdout"]
        assert found.split()[:3] == ["kept"] * 3
        assert found.count("kept") == 3
        assert ("sleep 1234" in found, "sleep 5678" in found) == (False, True)
        other = made(team.b)
        assert "kept" not in run(team.b, other, "sh", "-c", look)["stdout"]
        team.b.delete(f"/v1/sandboxes/{other}")
    finally:
        team.a.delete(f"/v1/sandboxes/{mine}")


def test_cannot_follow_a_link_into_b_s_files(team: Team) -> None:
    """By the file API, which works from outside, with the real path of B's file."""
    theirs = made(team.b, files=[{"path": "secret", "content": "of b"}])
    mine = made(team.a, files=[{"path": "own", "content": "of a"}])
    data = os.path.realpath(team.served.data)
    goal = f"{data}/sandboxes/{theirs}/workspace"
    try:
        script = (
            f"ln -s {goal}/secret one; ln -s {goal} two;"
            f"ln -s ../../{theirs}/workspace/secret three;"
            f"ln -s ../../../{theirs} four; mkdir d; ln -s ../../../{theirs}/workspace d/five;"
            "ln -s own good; ln -s /proc/self/root six; ln -s /proc/1/root/ seven"
        )
        run(team.a, mine, "sh", "-c", script)
        files = f"/v1/sandboxes/{mine}/files"
        for path in ("one", "two/secret", "three", "four/workspace/secret", "d/five/secret",
                     f"six{goal}/secret", f"seven{goal}/secret"):  # fmt: skip
            tried = [
                team.a.get(files, params={"path": path}),
                team.a.get(f"{files}/list", params={"path": path.rpartition("/")[0] or path}),
            ]
            if "/" in path:
                # Without a directory before it, it is the link itself that is replaced or removed.
                tried += [
                    team.a.put(files, params={"path": f"{path}x"}, content=b"planted"),
                    team.a.delete(files, params={"path": path}),
                ]
            for answer in tried:
                assert answer.status_code in (403, 404, 409, 422), answer.text
                assert "of b" not in answer.text
        packed = team.a.get(f"/v1/sandboxes/{mine}/archive").content
        assert b"of b" not in packed
        assert b"of a" in packed
        listed = team.b.get(f"/v1/sandboxes/{theirs}/files/list").json()
        assert [entry["path"] for entry in listed["items"]] == ["/workspace/secret"]
        # The control: a link that stays inside is followed.
        assert team.a.get(files, params={"path": "good"}).text == "of a"
    finally:
        team.a.delete(f"/v1/sandboxes/{mine}")
        team.b.delete(f"/v1/sandboxes/{theirs}")


BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
GREEDY = "x = []\nwhile True:\n    x.append(bytearray(1 << 22))\n"


@pytest.mark.parametrize(
    ("script", "bounds"),
    [
        (BOMB, {"pids": 40}),
        ("while True: print('x' * 10000)", {}),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", {"disk": "20M"}),
        ("import os\nn = 0\nwhile True:\n    open(str(n), 'w').close(); n += 1", {"disk": "20M"}),
    ],
    ids=["forks", "output", "disk", "files"],
)  # fmt: skip
def test_cannot_take_the_machine_from_b(team: Team, script: str, bounds: dict[str, object]) -> None:
    """While A's command takes whatever it gets, B's commands and uploads are done."""
    mine, theirs = made(team.a, resources=bounds), made(team.b)
    try:
        begun = run(team.a, mine, "python3", "-c", script, background=True, timeout=4)
        for number in range(5):
            assert run(team.b, theirs, "echo", str(number))["stdout"] == f"{number}\n"
            put = team.b.put(f"/v1/sandboxes/{theirs}/files", params={"path": "f"}, content=b"x")
            assert put.status_code == 200
        ended = team.a.post(f"/v1/execs/{begun['id']}/kill")
        assert ended.status_code == 200
        # The control: it was at work, and what it has taken is bounded.
        found = team.a.get(f"/v1/execs/{begun['id']}").json()
        assert found["state"] == "Exited"
        assert len(found["stdout"]) <= 1 << 20
    finally:
        team.a.delete(f"/v1/sandboxes/{mine}")
        team.b.delete(f"/v1/sandboxes/{theirs}")


def test_cannot_take_b_s_memory(team: Team) -> None:
    support = team.a.get("/v1/policy").json()
    mine = made(team.a, resources={"memory": "64M"} if _bounded(support) else {})
    theirs = made(team.b)
    try:
        if not _bounded(support):
            # The service says that it cannot keep this bound here, and refuses who asks for it.
            asked = team.a.post("/v1/sandboxes", json={"resources": {"memory": "64M"}})
            assert asked.json()["code"] == "LIMIT_NOT_ENFORCEABLE", asked.text
            return
        there = run(team.b, theirs, "sleep", "100", background=True)
        greedy = run(team.a, mine, "python3", "-c", GREEDY)
        assert (greedy["oomKilled"], greedy["exceeded"]) == (True, "memory")
        assert two_states(team, there["id"]) == "Running"
    finally:
        team.a.delete(f"/v1/sandboxes/{mine}")
        team.b.delete(f"/v1/sandboxes/{theirs}")


def two_states(team: Team, exec_id: str) -> str:
    return str(team.b.get(f"/v1/execs/{exec_id}").json()["state"])


def _bounded(policy: dict[str, Any]) -> bool:
    backends = policy["backends"]
    found = backends["bwrap"] if isinstance(backends, dict) else backends[0]
    return bool(found["enforced"]["memory"])
