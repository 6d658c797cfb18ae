"""A token that is revoked or has expired: what it has opened ends with it, at once."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websockets.exceptions
import websockets.sync.client as websocket

from conftest import As
from kernel.conftest import eventually
from service.conftest import Serve, Team

pytestmark = pytest.mark.kernel
TALK: dict[str, Any] = {"command": "while :; do echo x; sleep 0.05; done", "background": True}
# Events that may be on their way when a token dies: it is looked at ten times a second.
ON_THE_WAY = 20
# Bytes of one in the journal: a head and `x` with its end of line.
EVENT = 7


class Leaver:
    """An agent whose token is about to end, and one whose token is not."""

    def __init__(self, team: Team, how: str) -> None:
        self.team = team
        self.how = how
        self.name = f"leaver-{HOW.index(how)}"
        body: dict[str, Any] = {"name": self.name}
        if how == "expired":
            body["expiresIn"] = 4
        made = team.admin.post("/v1/tokens", json=body)
        assert made.status_code == 201, made.text
        self.token = made.json()["token"]
        self.client = team.served.client(self.token)
        self.box = self.client.post("/v1/sandboxes", json={}).json()["id"]

    def begin(self, **run: Any) -> str:
        begun = self.client.post(f"/v1/sandboxes/{self.box}/exec", json=run)
        assert begun.status_code == 202, begun.text
        return str(begun.json()["id"])

    def said(self, exec_id: str) -> str:
        return str(self.team.admin.get(f"/v1/execs/{exec_id}/logs").json()["stdout"])

    def leave(self) -> None:
        """Return when the token is dead."""
        if self.how == "revoked":
            assert self.team.admin.delete(f"/v1/tokens/{self.name}").status_code == 204
        elif self.how == "revoked by another process":
            identity, data = self.team.served.identity, self.team.served.data
            done = identity.run(
                identity.command("ctl", "token", "revoke", self.name, "--data", data)
            )
            assert done.returncode == 0, done.stderr
        assert eventually(lambda: self.client.get("/v1/whoami").status_code == 401)

    def close(self) -> None:
        self.client.close()
        self.team.admin.delete(f"/v1/sandboxes/{self.box}")
        self.team.admin.delete(f"/v1/tokens/{self.name}")


HOW = ("revoked", "revoked by another process", "expired")


@pytest.fixture(params=HOW)
def leaver(one: Team, request: pytest.FixtureRequest) -> Iterator[Leaver]:
    found = Leaver(one, request.param)
    yield found
    found.close()


def test_cannot_go_on_reading_events(leaver: Leaver) -> None:
    exec_id = leaver.begin(**TALK)
    path = f"/v1/execs/{exec_id}/events"
    with (
        leaver.client.stream("GET", path) as mine,
        leaver.team.admin.stream("GET", path) as other,
    ):
        lines, control = mine.iter_lines(), other.iter_lines()
        while not next(lines).startswith("event: stdout"):
            pass
        leaver.leave()
        said = leaver.team.admin.get(f"/v1/execs/{exec_id}/logs").json()["next"]
        rest = list(lines)
        heard = int(next(line for line in reversed(rest) if line.startswith("id: "))[4:])
        assert heard < said + ON_THE_WAY * EVENT
        last = json.loads(next(line for line in reversed(rest) if line.startswith("data: "))[6:])
        assert last["code"] == "UNAUTHENTICATED"
        # The control: the command talks on, to those who may hear it.
        assert sum(next(control).startswith("event: stdout") for _ in range(400)) > ON_THE_WAY


def test_cannot_go_on_typing(leaver: Leaver) -> None:
    exec_id = leaver.begin(cmd=["cat"], tty=True, background=True)
    url = leaver.team.served.url.replace("http://", "ws://") + f"/v1/execs/{exec_id}/ws"
    bearer = {"Authorization": f"Bearer {leaver.token}"}
    with websocket.connect(url, additional_headers=bearer) as terminal:
        terminal.send(b"before\n")
        said = b""
        while b"before" not in said:
            message = terminal.recv(20)
            assert isinstance(message, bytes)
            said += message
        leaver.leave()
        terminal.send(b"after\n")
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            deque(iter(lambda: terminal.recv(20), None))
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "UNAUTHENTICATED")
    assert "before" in leaver.said(exec_id)
    assert "after" not in leaver.said(exec_id)
    # The control: by a token that is alive it is typed.
    boss = {"Authorization": f"Bearer {leaver.team.tokens['admin']}"}
    with websocket.connect(url, additional_headers=boss) as terminal:
        terminal.send(b"after\n")
        assert eventually(lambda: "after" in leaver.said(exec_id))


def test_cannot_go_on_downloading(leaver: Leaver) -> None:
    size = 40 << 20
    wish = {"command": f"head -c {size} /dev/zero > big", "timeout": 60}
    made = leaver.team.admin.post(f"/v1/sandboxes/{leaver.box}/exec", json=wish)
    assert made.json()["exitCode"] == 0, made.text
    path, query = f"/v1/sandboxes/{leaver.box}/files", {"path": "big"}
    with leaver.client.stream("GET", path, params=query) as answer:
        assert answer.status_code == 200
        parts = answer.iter_raw(1 << 16)
        assert next(parts)
        leaver.leave()
        with pytest.raises(httpx.RemoteProtocolError):
            deque(parts)
    # The control.
    whole = leaver.team.admin.get(path, params=query)
    assert len(whole.content) == size


def test_an_answer_that_was_waited_for_does_not_come(leaver: Leaver) -> None:
    """The command ends, and its result is kept for those who may see it."""
    answers: list[httpx.Response] = []

    def wait() -> None:
        with leaver.team.served.client(leaver.token) as client:
            body = {"command": "until test -e go; do sleep 0.02; done; echo result"}
            answers.append(client.post(f"/v1/sandboxes/{leaver.box}/exec", json=body))

    waiting = threading.Thread(target=wait)
    waiting.start()
    query = {"sandbox": leaver.box, "state": "Running"}
    boss = leaver.team.admin
    assert eventually(lambda: boss.get("/v1/execs", params=query).json()["items"])
    exec_id = boss.get("/v1/execs", params=query).json()["items"][0]["id"]
    leaver.leave()
    put = boss.put(f"/v1/sandboxes/{leaver.box}/files", params={"path": "go"}, content=b"")
    assert put.status_code == 200
    waiting.join(30)
    assert [answer.status_code for answer in answers] == [401]
    assert "result" not in answers[0].text
    assert boss.get(f"/v1/execs/{exec_id}").json()["stdout"] == "result\n"


def test_a_rotated_token_keeps_its_things_and_the_old_one_does_not(user: As, serve: Serve) -> None:
    served = serve(user)
    old = served.token("agent")
    with served.client(old) as client:
        box = client.post("/v1/sandboxes", json={}).json()["id"]
        identity = served.identity
        rotated = identity.run(
            identity.command("ctl", "token", "rotate", "agent", "--data", served.data)
        )
        assert rotated.returncode == 0, rotated.stderr
        assert client.get(f"/v1/sandboxes/{box}").status_code == 401
    with served.client(rotated.stdout.strip()) as client:
        assert client.get(f"/v1/sandboxes/{box}").status_code == 200
