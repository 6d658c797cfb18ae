"""Both clients against a stub: what they send, what they repeat, and what they never do."""

from __future__ import annotations

import json
import os
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.client import ApiError, BadAnswer, ClientError, Unreachable

from .conftest import SECRET, Connect, Got, Stub, answer

pytestmark = pytest.mark.network
Start = Callable[..., Stub]
BOX = {
    "id": "sbx-1",
    "state": "Running",
    "metadata": {"a": "b"},
    "expiresAt": "2030-01-02T03:04:05Z",
}


def refusal(status: int, code: str, **headers: str) -> bytes:
    said = {"code": code, "message": "the words", "hint": "the hint", "requestId": "req_1"}
    return answer(status, said, **headers)


def test_a_request_says_who_asks_and_connections_are_kept(stub: Start, connect: Connect) -> None:
    server = stub(lambda _: answer(200, {"agent": "a"}))
    client = connect(server.url, SECRET)
    assert client.whoami() == {"agent": "a"}
    assert client.policy() == {"agent": "a"}
    assert [got.target for got in server.got] == ["/v1/whoami", "/v1/policy"]
    assert server.got[0].headers["authorization"] == f"Bearer {SECRET}"
    assert server.got[0].headers["host"] == f"127.0.0.1:{server.port}"
    assert server.connections == 1


def test_a_prefix_of_the_address_is_kept(stub: Start, connect: Connect) -> None:
    server = stub()
    connect(f"{server.url}/box").whoami()
    assert server.got[0].target == "/box/v1/whoami"


def test_a_socket_is_an_address(stub: Start, connect: Connect, tmp_path: Path) -> None:
    server = stub(lambda _: answer(200, {"agent": "owner"}), str(tmp_path / "s"))
    assert connect(f"unix://{tmp_path}/s").whoami() == {"agent": "owner"}
    assert "authorization" not in server.got[0].headers


def test_a_sandbox_is_asked_for_by_the_names_of_the_api(stub: Start, connect: Connect) -> None:
    server = stub(lambda _: answer(201, BOX))
    made = connect(server.url).sandboxes.create(
        image="python:3", memory="512M", cpus=1.5, lifetime=60, network=["pypi.org"],
        metadata={"a": "b"}, files={"a.txt": "text", "b.bin": b"\xff"},
    )  # fmt: skip
    assert (made.id, made.info.state, made.info.metadata) == ("sbx-1", "Running", {"a": "b"})
    assert made.info.expires_at.year == 2030
    assert server.got[0].json == {
        "image": "python:3", "metadata": {"a": "b"}, "timeout": 60,
        "resources": {"memory": "512M", "cpu": 1.5},
        "network": {"mode": "allow", "allowOut": ["pypi.org"]},
        "files": [{"path": "a.txt", "content": "text"},
                  {"path": "b.bin", "contentBase64": "/w=="}],
    }  # fmt: skip


def test_a_list_is_read_to_its_end(stub: Start, connect: Connect) -> None:
    def act(got: Got) -> bytes:
        last = "after=p2" in got.target
        items = [{"id": f"sbx-{n}", "state": "Running"} for n in ((3,) if last else (1, 2))]
        return answer(200, {"items": items, "next": None if last else "p2"})

    client = connect(stub(act).url)
    assert [one.id for one in client.sandboxes.list()] == ["sbx-1", "sbx-2", "sbx-3"]


@pytest.mark.parametrize("sandbox", ["../tokens", "a/b", "a?b", "a#b", "a b", "é"])
def test_an_id_stays_one_part_of_the_path(stub: Start, connect: Connect, sandbox: str) -> None:
    server = stub(lambda _: refusal(404, "NOT_FOUND"))
    with pytest.raises(ApiError):
        connect(server.url).sandboxes.get(sandbox)
    assert server.got[0].target.count("/") == 3
    assert "?" not in server.got[0].target


@pytest.mark.parametrize("sandbox", ["", ".", ".."])
def test_an_id_that_would_change_the_path_is_not_sent(
    stub: Start, connect: Connect, sandbox: str
) -> None:
    server = stub()
    with pytest.raises(ClientError):
        connect(server.url).sandboxes.get(sandbox)
    assert server.got == []


# --- again, and not again


def dropping(first: int, then: Callable[[Got], bytes]) -> Callable[[Got], bytes]:
    """Hang up on the first requests, after they have been read."""
    left = [first]

    def act(got: Got) -> bytes:
        left[0] -= 1
        return b"" if left[0] >= 0 else then(got)

    return act


def test_a_lost_answer_of_create_is_asked_for_with_the_same_key(
    stub: Start, connect: Connect
) -> None:
    server = stub(dropping(2, lambda _: answer(201, BOX)))
    connect(server.url).sandboxes.create()
    keys = [got.headers["idempotency-key"] for got in server.got]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    connect(server.url).sandboxes.create()
    assert server.got[-1].headers["idempotency-key"] not in keys


@pytest.mark.parametrize(
    "order",
    [
        lambda box: box.start("true"),
        lambda box: box.exec("true"),
        lambda box: box._client.execution("exc-1").write(b"rm\n"),
        lambda box: box._client.execution("exc-1").signal("SIGINT"),
    ],
)
def test_what_may_act_twice_is_sent_once(
    stub: Start, connect: Connect, order: Callable[[Any], Any]
) -> None:
    server = stub(lambda got: answer(200, BOX) if got.method == "GET" else b"")
    box = connect(server.url).sandboxes.get("sbx-1")
    with pytest.raises(Unreachable, match="broke"):
        order(box)
    assert [got.method for got in server.got] == ["GET", "POST"]


def test_a_refusal_that_asks_for_patience_gets_it(stub: Start, connect: Connect) -> None:
    waits = iter([refusal(429, "BUSY", Retry_After="0"), refusal(503, "DRAINING")])
    begun = answer(202, {"execId": "exc-1"})
    server = stub(lambda got: answer(200, BOX) if got.method == "GET" else next(waits, begun))
    assert connect(server.url).sandboxes.get("sbx-1").start("true").id == "exc-1"
    assert len(server.got) == 4


def test_a_connection_that_the_service_has_closed_is_not_used(
    stub: Start, connect: Connect
) -> None:
    server = stub(lambda _: answer(200, BOX, Connection="close"))
    client = connect(server.url)
    for _ in range(3):
        client.sandboxes.get("sbx-1")
    assert (len(server.got), server.connections) == (3, 3)


def test_a_kept_connection_that_broke_meanwhile_is_made_again(
    stub: Start, connect: Connect
) -> None:
    server = stub(lambda _: answer(200, BOX))
    client = connect(server.url, retries=0)
    client.sandboxes.get("sbx-1")
    for sock in server._open:
        sock.shutdown(socket.SHUT_RDWR)
    client.sandboxes.get("sbx-1")
    assert server.connections == 2


# --- what is never done


def test_cannot_be_redirected_with_the_token(stub: Start, connect: Connect) -> None:
    thief = stub()
    server = stub(lambda _: answer(307, None, Location=f"{thief.url}/v1/whoami"))
    with pytest.raises(BadAnswer, match="redirect"):
        connect(server.url, SECRET).whoami()
    assert (len(server.got), thief.connections) == (1, 0)


def test_a_proxy_of_the_environment_is_not_asked_for_what_is_here(
    stub: Start, connect: Connect, tmp_path: Path
) -> None:
    proxy = stub(lambda _: refusal(403, "FORBIDDEN"))
    names = ("http_proxy", "https_proxy", "all_proxy")
    env = {one: proxy.url for name in names for one in (name, name.upper())}
    for path in ("", str(tmp_path / "s")):
        server = stub(lambda _: answer(200, {"agent": "a"}), path)
        assert connect(server.url, SECRET, environ=env).whoami() == {"agent": "a"}
    assert proxy.connections == 0
    # A control, and the reason why http never goes there: a proxy sees the host, not the token.
    with pytest.raises(BadAnswer, match="proxy"):
        connect("https://box.invalid:8650", SECRET, environ=env).whoami()
    assert (proxy.got[0].method, proxy.got[0].target) == ("CONNECT", "box.invalid:8650")
    assert SECRET not in str(proxy.got[0].headers)


def test_cannot_fill_our_memory_with_a_head(stub: Start, connect: Connect) -> None:
    server = stub(lambda _: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000)
    with pytest.raises(BadAnswer):
        connect(server.url).whoami()


FAILURES: dict[str, Callable[[Got], bytes]] = {
    "refused": lambda _: refusal(401, "UNAUTHENTICATED"),
    "redirected": lambda _: answer(302, None, Location="/"),
    "no JSON": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n<p>",
    "no HTTP": lambda _: b"220 smtp\r\n\r\n",
    "hung up": lambda _: b"",
    "not ours": lambda _: b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n",
    "echo": lambda got: answer(418, dict(got.headers)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_cannot_get_the_token_into_an_error(stub: Start, connect: Connect, name: str) -> None:
    client = connect(stub(FAILURES[name]).url, SECRET, retries=1)
    with pytest.raises(ClientError) as caught:
        client.whoami()
    error = caught.value
    shown = "".join(traceback.format_exception(error))
    assert SECRET not in f"{shown} {error!r} {error.message} {error.hint} {client!r}"
    assert error.hint


# --- errors with a remedy


def test_no_service_at_a_port(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="nobody listens") as caught:
        connect(f"http://127.0.0.1:{port}", retries=0).whoami()
    assert "sandboxctl serve" in caught.value.hint
    assert "SANDBOX_API" in caught.value.hint


def test_no_service_at_a_socket(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="no such socket") as caught:
        connect(f"unix://{tmp_path}/none", retries=0).whoami()
    assert "sandboxctl serve" in caught.value.hint


def test_a_host_that_nobody_knows(connect: Connect) -> None:
    with pytest.raises(Unreachable, match="not known"):
        connect("http://box.invalid", retries=0).whoami()


def test_without_and_with_a_wrong_token(stub: Start, connect: Connect, tmp_path: Path) -> None:
    url = stub(lambda _: refusal(401, "UNAUTHENTICATED")).url
    with pytest.raises(ApiError) as caught:
        connect(url).whoami()
    assert "SANDBOX_TOKEN" in caught.value.hint
    assert "token new" in caught.value.hint
    (tmp_path / "token").write_text(SECRET)
    env = {"SANDBOX_TOKEN_FILE": str(tmp_path / "token")}
    with pytest.raises(ApiError) as caught:
        connect(url, environ=env).whoami()
    assert f"{tmp_path}/token" in caught.value.hint


def test_silence_ends_with_an_error(stub: Start, connect: Connect) -> None:
    heard = threading.Event()

    def act(_: Got) -> bytes:
        heard.wait(30)
        return b""

    client = connect(stub(act).url, timeout=0.2, retries=0)
    with pytest.raises(Unreachable, match="no answer in time"):
        client.whoami()
    heard.set()


def test_a_command_may_wait_longer_for_its_turn(stub: Start, connect: Connect) -> None:
    asked = threading.Event()

    def act(got: Got) -> bytes:
        if got.method == "GET":
            return answer(200, BOX)
        # Longer than the service may be silent otherwise.
        asked.wait(0.5)
        return answer(202, {"execId": "exc-1"})

    client = connect(stub(act).url, timeout=0.3, retries=0)
    assert client.sandboxes.get("sbx-1").start("true").id == "exc-1"


# --- streams that never end well


def streamed(*events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(events)


def event(name: str, value: object, number: str = "") -> bytes:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(value)}\n\n".encode()


def test_a_stream_that_breaks_before_it_has_a_name_is_not_started_again(
    stub: Start, connect: Connect
) -> None:
    server = stub(lambda got: answer(200, BOX) if got.method == "GET" else streamed(b": x\n"))
    box = connect(server.url).sandboxes.get("sbx-1")
    with pytest.raises(Unreachable, match="before the command's id"):
        box.exec("true")
    assert [got.method for got in server.got] == ["GET", "POST"]


def test_a_stream_that_only_breaks_is_given_up(stub: Start, connect: Connect) -> None:
    started = event("start", {"execId": "exc-1", "state": "Running"}, "0")

    def act(got: Got) -> bytes:
        if got.target == "/v1/sandboxes/sbx-1":
            return answer(200, BOX)
        return b"" if "/execs/" in got.target else streamed(started)

    server = stub(act)
    box = connect(server.url, retries=2).sandboxes.get("sbx-1")
    with pytest.raises(Unreachable):
        box.exec("true")
    assert 2 <= sum("/execs/exc-1/events" in got.target for got in server.got) <= 9


def test_a_client_does_not_show_up_in_logs_of_the_interpreter(
    stub: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(0):
        connect(stub(lambda _: answer(200, {})).url, SECRET).whoami()
    assert SECRET not in caplog.text
    assert os.environ.get("SANDBOX_TOKEN") is None
