"""Server-Sent Events and WebSockets, by clients that are not ours."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websockets.exceptions
import websockets.sync.client as websocket

from service.conftest import Team

pytestmark = pytest.mark.kernel
EVENTS = {"Accept": "text/event-stream"}


class Event:
    def __init__(self, name: str, data: dict[str, Any], id: str) -> None:
        self.name, self.data, self.id = name, data, id

    @property
    def bytes(self) -> bytes:
        if "dataBase64" in self.data:
            return base64.b64decode(self.data["dataBase64"])
        return str(self.data["data"]).encode()


def events(answer: httpx.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields["id"])
            fields = {}


def box(client: httpx.Client) -> str:
    answer = client.post("/v1/sandboxes", json={})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def background(client: httpx.Client, sandbox: str, command: str | list[str], **more: Any) -> str:
    body = {"command": command, "background": True, **more}
    answer = client.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


# --- events


def test_a_command_is_followed_on_the_request_that_starts_it(team: Team) -> None:
    body = {"command": "echo out; echo err >&2; printf '\\377\\n'; exit 4"}
    with team.a.stream("POST", "/v1/run", json=body, headers=EVENTS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["location"].startswith("/v1/execs/exc-")
        found = list(events(answer))
    assert [found[0].name, found[-1].name] == ["start", "exit"]
    # A quick one may have ended when its first event is made.
    assert found[0].data["state"] in ("Running", "Exited")
    assert found[-1].data["exitCode"] == 4
    out = b"".join(e.bytes for e in found if e.name == "stdout")
    assert out == b"out\n\xff\n"
    assert b"".join(e.bytes for e in found if e.name == "stderr") == b"err\n"
    assert found[0].data["execId"] == found[-1].data["execId"]


def test_a_broken_stream_goes_on_behind_the_last_event(team: Team) -> None:
    command = "for i in 1 2 3 4 5 6 7 8; do echo line $i; echo bad $i >&2; done"
    exec_id = team.a.post("/v1/run", json={"command": command}).json()["id"]
    path = f"/v1/execs/{exec_id}/events"
    with team.a.stream("GET", path) as answer:
        whole = list(events(answer))
    pieces = [e for e in whole if e.name in ("stdout", "stderr")]
    text = b"".join(e.bytes for e in pieces)
    seen = b""
    for event in pieces:
        seen += event.bytes
        with team.a.stream("GET", path, headers={"Last-Event-ID": event.id}) as answer:
            rest = list(events(answer))
        assert [rest[0].name, rest[-1].name] == ["start", "exit"]
        assert seen + b"".join(e.bytes for e in rest[1:-1]) == text
    assert len(pieces) > 1


@pytest.mark.parametrize("last", ["-1", "1", "x", "1e3", "9" * 16, "0x10"])
def test_an_id_that_is_no_event_s_is_refused(one: Team, last: str) -> None:
    exec_id = one.a.post("/v1/run", json={"command": "echo something"}).json()["id"]
    answer = one.a.get(f"/v1/execs/{exec_id}/events", headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID")
    assert answer.json()["field"] == "Last-Event-ID"


def test_the_answer_follows_what_the_client_accepts(one: Team) -> None:
    wanted = {
        "*/*": "application/json",
        "application/json, text/event-stream": "application/json",
        "text/event-stream, application/json;q=0.5": "text/event-stream",
        "text/event-stream;q=0.1, */*": "application/json",
    }
    for accept, media in wanted.items():
        answer = one.a.post("/v1/run", json={"command": "true"}, headers={"Accept": accept})
        assert answer.headers["content-type"] == media, accept
    for accept in ("text/html", "application/json;q=0", "image/*;q=1"):
        answer = one.a.post("/v1/run", json={"command": "true"}, headers={"Accept": accept})
        assert (answer.status_code, answer.json()["code"]) == (406, "NOT_ACCEPTABLE")


def test_one_who_does_not_read_holds_up_nobody(one: Team) -> None:
    sandbox = box(one.a)
    command = "head -c 8000000 /dev/zero; echo end"
    with one.served.client(one.tokens["a"]) as lazy:
        exec_id = background(one.a, sandbox, command)
        path = f"/v1/execs/{exec_id}/events"
        # The first reads nothing; another sees the end.
        with lazy.stream("GET", path), one.a.stream("GET", path) as answer:
            found = list(events(answer))
    assert found[-1].name == "exit"
    assert sum(len(e.bytes) for e in found if e.name == "stdout") == 8000004
    one.a.delete(f"/v1/sandboxes/{sandbox}")


# --- terminals


def connect(team: Team, exec_id: str, token: str, **options: Any) -> websocket.ClientConnection:
    url = team.served.url.replace("http://", "ws://")
    headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
    found: websocket.ClientConnection = websocket.connect(
        f"{url}/v1/execs/{exec_id}/ws", additional_headers=headers, open_timeout=10, **options
    )
    return found


def until(ws: websocket.ClientConnection, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        message = ws.recv(timeout=20)
        assert isinstance(message, bytes), message
        seen += message
    return seen


def rest(ws: websocket.ClientConnection) -> tuple[bytes, list[dict[str, Any]]]:
    """All that comes until the end."""
    out, notes = b"", []
    try:
        while True:
            message = ws.recv(timeout=20)
            if isinstance(message, bytes):
                out += message
            else:
                notes.append(json.loads(message))
    except websockets.exceptions.ConnectionClosed:
        return out, notes


def test_a_terminal_takes_keys_sizes_and_signals(team: Team) -> None:
    sandbox = box(team.a)
    exec_id = background(team.a, sandbox, ["sh", "-i"], tty=True, rows=30, cols=90)
    with connect(team, exec_id, team.tokens["a"]) as ws:
        ws.send(b"tty >/dev/null && stty size\n")
        until(ws, b"30 90")
        ws.send(json.dumps({"type": "resize", "rows": 41, "cols": 123}))
        ws.send(b"stty size\n")
        until(ws, b"41 123")
        ws.send(b"trap 'echo hang''up' HUP; echo tra''pped\n")
        until(ws, b"trapped")
        ws.send(json.dumps({"type": "signal", "signal": "SIGHUP"}))
        ws.send(b"\n")
        until(ws, b"hangup")
        ws.send(json.dumps({"type": "input", "data": "exit 7\n"}))
        _, notes = rest(ws)
    assert notes[-1]["type"] == "exit"
    assert notes[-1]["exitCode"] == 7
    team.a.delete(f"/v1/sandboxes/{sandbox}")


def test_a_pipe_is_fed_and_ended_over_a_websocket(team: Team) -> None:
    sandbox = box(team.a)
    data = bytes(range(256)) * 100
    exec_id = background(team.a, sandbox, "cat | wc -c; cat /dev/null", keepStdin=True)
    with connect(team, exec_id, team.tokens["a"]) as ws:
        ws.send(data)
        ws.send(json.dumps({"type": "eof"}))
        out, notes = rest(ws)
    assert out.strip() == str(len(data)).encode()
    assert notes[-1]["exitCode"] == 0
    team.a.delete(f"/v1/sandboxes/{sandbox}")


def test_output_that_came_before_is_replayed(team: Team) -> None:
    done = team.a.post("/v1/run", json={"command": "echo before"}).json()
    with connect(team, done["id"], team.tokens["a"]) as ws:
        out, notes = rest(ws)
    assert out == b"before\n"
    assert notes[-1]["type"] == "exit"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("nonsense", None), ("[]", None), ("{}", "type"), ('{"type":"dance"}', "type"),
        ('{"type":"resize","rows":0,"cols":1}', "rows"), ('{"type":"resize"}', "rows"),
        ('{"type":"signal","signal":"SIGSEGV"}', "signal"), ('{"type":"signal"}', "signal"),
        ('{"type":"eof","type":"eof"}', None), ('{"type":"input","data":"\\ud800"}', None),
        ('{"type":"eof","more":1}', "more"), ("[" * 5000, None),
    ],
)  # fmt: skip
def test_nonsense_in_a_terminal_is_answered_and_does_nothing(
    one: Team, message: str, field: str | None
) -> None:
    sandbox = box(one.a)
    exec_id = background(one.a, sandbox, "cat", tty=True)
    with connect(one, exec_id, one.tokens["a"]) as ws:
        ws.send(message)
        answer = json.loads(ws.recv(timeout=20))
        assert answer["type"] == "error"
        assert answer["code"] in ("BAD_REQUEST", "INVALID")
        assert answer.get("field") == field
        # It still works.
        ws.send(b"still\n")
        until(ws, b"still")
    one.a.delete(f"/v1/sandboxes/{sandbox}")


def test_a_message_that_is_too_large_ends_the_connection(one: Team) -> None:
    sandbox = box(one.a)
    exec_id = background(one.a, sandbox, "cat >/dev/null", keepStdin=True)
    with connect(one, exec_id, one.tokens["a"]) as ws:
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):
            # A little too much: what comes behind a close is not read, and would reset it.
            ws.send(bytes((1 << 20) + 1))
        with pytest.raises(websockets.exceptions.ConnectionClosedError) as error:
            ws.recv(timeout=20)
        assert error.value.rcvd is not None
        assert error.value.rcvd.code == 1009
    assert one.a.get("/healthz").status_code == 200
    one.a.delete(f"/v1/sandboxes/{sandbox}")


def test_a_terminal_without_a_websocket_is_told_what_is_missing(one: Team) -> None:
    exec_id = one.a.post("/v1/run", json={"command": "true"}).json()["id"]
    answer = one.a.get(f"/v1/execs/{exec_id}/ws")
    assert (answer.status_code, answer.json()["code"]) == (426, "UPGRADE_REQUIRED")
    assert answer.headers["upgrade"] == "websocket"


def test_a_revoked_token_loses_what_it_has_opened(one: Team) -> None:
    token = one.served.token("short-lived")
    with one.served.client(token) as client:
        sandbox = box(client)
        exec_id = background(client, sandbox, "while :; do echo tick; sleep 0.2; done")
        with (
            connect(one, exec_id, token) as ws,
            client.stream("GET", f"/v1/execs/{exec_id}/events") as answer,
        ):
            assert one.admin.delete("/v1/tokens/short-lived").status_code == 204
            last = list(events(answer))[-1]
            assert (last.name, last.data["code"]) == ("error", "UNAUTHENTICATED")
            rest(ws)
            assert (ws.close_code, ws.close_reason) == (1008, "UNAUTHENTICATED")
    one.admin.delete(f"/v1/sandboxes/{sandbox}")
