"""Requests as bytes: what two parsers could read differently does not reach the engine."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from .fake import API, OWNER, FakeEngine, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Filtered

pytestmark = pytest.mark.docker
EXEC = "e" * 64
MINE = "c" * 64
HOST = b"Host: docker\r\n"


def talk(path: object, data: bytes, *, end: bool = True) -> bytes:
    """Send bytes, read all that comes."""
    with connect(str(path)) as sock:
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        while chunk := sock.recv(65536):
            found += chunk
        return found


def statuses(answer: bytes) -> list[int]:
    """The status of each answer."""
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def own(fake: FakeEngine, filtered: Filtered) -> None:
    """A container and an exec in it that belong to the run."""
    labels = {OWNER: filtered.owner}
    about = {"Id": MINE, "Config": {"Labels": labels}, "HostConfig": {}}
    fake.answers["GET", f"/containers/{MINE}/json"] = 200, about
    fake.answers["GET", f"/exec/{EXEC}/json"] = 200, {"ID": EXEC, "ContainerID": MINE}


@pytest.fixture(autouse=True)
def container(fake: FakeEngine, filtered: Filtered) -> None:
    """The run has a container of its own."""
    own(fake, filtered)


PRIVILEGED = json.dumps({"Image": "alpine", "HostConfig": {"Privileged": True}}).encode()
INNER = b"POST /v1.41/containers/create HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
    HOST + b"Content-Type: application/json\r\n", len(PRIVILEGED), PRIVILEGED,
)  # fmt: skip

SMUGGLED = {
    "bare-lf": INNER.replace(b"\r\n", b"\n"),
    "lf-in-head": b"GET /_ping HTTP/1.1\nHost: x\r\n\r\n" + INNER,
    "cl-and-te": b"POST /containers/create HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PRIVILEGED), PRIVILEGED),
    "two-lengths": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n"
    b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER,
    "length-with-sign": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Content-Length: +5\r\n\r\n" + INNER,
    "length-list": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Content-Length: 0, 0\r\n\r\n" + INNER,
    "space-before-colon": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Content-Length : 9\r\n\r\n" + INNER,
    "folded": b"GET /_ping HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n" + INNER,
    "te-identity": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: identity\r\n\r\n"
    + INNER,
    "te-twice": b"GET /_ping HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
    "te-in-http-1.0": b"GET /_ping HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
    "chunk-extension": b"POST /volumes/create HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked"
    b"\r\n\r\n2;x=y\r\n{}\r\n0\r\n\r\n" + INNER,
    "chunk-too-long": b"POST /volumes/create HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked"
    b"\r\n\r\n2\r\n{}x\r\n0\r\n\r\n" + INNER,
    "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER,
    "two-hosts": b"GET /_ping HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + INNER,
    "nul-in-field": b"GET /_ping HTTP/1.1\r\nHost: a\0b\r\n\r\n" + INNER,
}  # fmt: skip


@pytest.mark.parametrize("trick", SMUGGLED)
def test_cannot_hide_a_request_behind_one_that_is_read_differently(
    trick: str, fake: FakeEngine, filtered: Filtered
) -> None:
    """The connection ends with what could not be read; nothing behind it is taken for a request."""
    answer = talk(filtered.path, SMUGGLED[trick])
    assert [s for s in statuses(answer) if s < 400] == [], answer
    assert [s for s in fake.seen if s.method == "POST"] == []
    assert filtered.audit()[-1]["rule"] == "http.malformed"


def test_can_send_one_request_after_the_other(fake: FakeEngine, filtered: Filtered) -> None:
    """A control of the tricks: what is well formed is served, in order, on one connection."""
    ping = b"GET /v1.41/_ping HTTP/1.1\r\n" + HOST + b"\r\n"
    assert statuses(talk(filtered.path, ping + ping + INNER + ping)) == [200, 200, 403, 200]
    assert [s for s in fake.seen if s.method == "POST"] == []


def test_the_engine_gets_a_connection_for_each_request(
    fake: FakeEngine, filtered: Filtered
) -> None:
    """And a head that is ours: nothing of the client's, and the end announced."""
    ping = b"GET /v1.41/_ping HTTP/1.1\r\n" + HOST + b"X-Evil: 1\r\nConnection: X-Evil\r\n\r\n"
    talk(filtered.path, ping)
    sent = next(s for s in fake.seen if s.path.endswith("/_ping"))
    assert sent.headers == {"Host": "docker", "User-Agent": "agent-sandbox", "Connection": "close"}


# --- upgrades


def start_exec(*fields: bytes, body: bytes = b'{"Detach":false,"Tty":false}') -> bytes:
    """The start of an exec, as clients send it."""
    return (
        f"POST /v1.41/exec/{EXEC}/start HTTP/1.1\r\n".encode()
        + HOST
        + b"Content-Type: application/json\r\n"
        + b"".join(field + b"\r\n" for field in fields)
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


UPGRADE = (b"Connection: Upgrade", b"Upgrade: tcp")


def refuse_and_listen(fake: FakeEngine, status: bytes, kind: bytes) -> list[bytes]:
    """An engine that does not switch and goes on reading requests, as dockerd does."""
    more: list[bytes] = []

    def answer(handler: object) -> None:
        handler.wfile.write(  # type: ignore[attr-defined]
            b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: 2\r\n\r\n{}" % (status, kind)
        )
        while data := handler.connection.recv(65536):  # type: ignore[attr-defined]
            more.append(data)

    fake.answers["POST", f"/exec/{EXEC}/start"] = 0, answer
    return more


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (b"404 Not Found", b"application/json"), (b"409 Conflict", b"application/json"),
        (b"200 OK", b"application/json"), (b"500 Oops", b"application/vnd.docker.raw-stream"),
    ],
)  # fmt: skip
def test_cannot_tunnel_when_the_engine_has_not_switched(
    status: bytes, kind: bytes, fake: FakeEngine, filtered: Filtered
) -> None:
    """A failed upgrade leaves the engine's connection open: the next bytes would be a request."""
    more = refuse_and_listen(fake, status, kind)
    answer = talk(filtered.path, start_exec(*UPGRADE) + INNER, end=False)
    assert statuses(answer) == [int(status[:3])]
    assert more == []
    assert [s for s in fake.seen if "create" in s.path] == []


def echo(fake: FakeEngine, head: bytes) -> None:
    """An engine that switches, and then sends back what it gets, until its half is ended."""

    def answer(handler: object) -> None:
        handler.wfile.write(head)  # type: ignore[attr-defined]
        handler.wfile.flush()  # type: ignore[attr-defined]
        found = b""
        while data := handler.connection.recv(65536):  # type: ignore[attr-defined]
            found += data
        handler.connection.sendall(b"<" + found + b">")  # type: ignore[attr-defined]

    fake.answers["POST", f"/exec/{EXEC}/start"] = 0, answer


RAW = b"Content-Type: application/vnd.docker.raw-stream\r\n"
SWITCHED = b"HTTP/1.1 101 UPGRADED\r\n" + RAW + b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
OLD = b"HTTP/1.1 200 OK\r\n" + RAW + b"\r\n"


@pytest.mark.parametrize(("head", "fields"), [(SWITCHED, UPGRADE), (OLD, ())], ids=["101", "200"])
def test_can_tunnel_after_a_switch_and_half_closes_go_through(
    head: bytes, fields: tuple[bytes, ...], fake: FakeEngine, filtered: Filtered
) -> None:
    """The engine answers only when it has seen the end of the client's half."""
    echo(fake, head)
    answer = talk(filtered.path, start_exec(*fields) + b"to the engine")
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert first.startswith(head[:12])
    assert rest == b"<to the engine>"


def test_an_empty_host_is_a_host(fake: FakeEngine, filtered: Filtered) -> None:
    """Debian's client 20.10 sends it with requests that become tunnels; the engine gets ours."""
    answer = talk(filtered.path, b"GET /_ping HTTP/1.1\r\nHost:\r\n\r\n")
    assert statuses(answer) == [200]
    two = b"GET /_ping HTTP/1.1\r\nHost:\r\nHost:\r\n\r\n"
    assert statuses(talk(filtered.path, two)) == [400]
    assert statuses(talk(filtered.path, b"GET /_ping HTTP/1.1\r\n\r\n")) == [400]


def test_cannot_be_switched_without_having_asked(fake: FakeEngine, filtered: Filtered) -> None:
    """101 for a client that wants none is an error of the engine, not a tunnel."""
    echo(fake, SWITCHED)
    assert statuses(talk(filtered.path, start_exec())) == [502]


@pytest.mark.parametrize("wanted", [b"h2c", b"websocket", b"TLS/1.0", b"tcp, h2c", b"tcp"])
@pytest.mark.parametrize("target", [b"GET /_ping", b"POST /session", b"POST /grpc", b"GET /events"])
def test_cannot_upgrade_elsewhere(
    target: bytes, wanted: bytes, fake: FakeEngine, filtered: Filtered
) -> None:
    """No other endpoint and no other protocol; what follows is not passed on unread."""
    head = target + b" HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: " + wanted
    answer = talk(filtered.path, head + b"\r\n\r\n" + INNER)
    assert 101 not in statuses(answer)
    assert 200 not in statuses(answer)
    assert [s for s in fake.seen if s.method == "POST"] == []


# --- bodies and ends


def test_a_body_that_is_too_large_is_refused(fake: FakeEngine, filtered: Filtered) -> None:
    """With 413, and not judged by its beginning."""
    size = (4 << 20) + 1
    head = b"POST /containers/create HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % size + PRIVILEGED.ljust(size)
    assert statuses(talk(filtered.path, sent)) == [413]
    assert [s for s in fake.seen if s.method == "POST"] == []


def test_a_form_in_a_body_does_not_reach_the_engine(
    fake: FakeEngine, start: Callable[..., Filtered]
) -> None:
    """Go reads it as parameters, before those of the query."""
    filtered = start(fake.path, registries=["docker.io"])
    body = b"fromImage=evil.example/b&tag=latest"
    head = b"POST /v1.41/images/create?fromImage=alpine&tag=latest HTTP/1.1\r\n" + HOST
    kind = b"Content-Type: application/x-www-form-urlencoded\r\n"
    sent = head + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert statuses(talk(filtered.path, sent)) == [400]
    plain = head + b"Content-Length: 0\r\n\r\n"
    assert statuses(talk(filtered.path, plain)) == [200]
    (arrived,) = [s for s in fake.seen if s.method == "POST"]
    assert "fromImage=docker.io%2Flibrary%2Falpine" in arrived.path
    assert arrived.body == b""
    assert "Content-Type" not in arrived.headers


def test_expect_continue_is_answered(fake: FakeEngine, filtered: Filtered) -> None:
    """curl waits for it before it sends a body."""
    with connect(filtered.path) as sock:
        head = b"POST /volumes/create HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n"
        sock.sendall(head + b"Content-Length: 13\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b'{"Name": "v"}')
        assert statuses(sock.recv(65536))[0] in (200, 201)


def test_an_engine_that_is_not_there_is_an_error(
    base: object, start: Callable[..., Filtered]
) -> None:
    """Not a wait, and nothing is allowed."""
    filtered = start(f"{base}/nobody.sock")
    answer = talk(filtered.path, b"GET /_ping HTTP/1.1\r\n" + HOST + b"\r\n")
    assert statuses(answer) == [502]
    assert b"does not answer" in answer


def test_the_first_answers_say_the_version(
    fake: FakeEngine, start: Callable[..., Filtered]
) -> None:
    """Also to clients that come before the engine has said its own: they would speak 1.24."""
    asked, may_say = threading.Event(), threading.Event()

    def late(handler: object) -> None:
        asked.set()
        assert may_say.wait(20)
        body = json.dumps({"ApiVersion": API}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        handler.wfile.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)  # type: ignore[attr-defined]

    fake.answers["GET", "/version"] = 0, late
    filtered = start(fake.path)
    # A request that is told to go on has been read, and waits for the engine.
    ping = b"HEAD /_ping HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with connect(filtered.path) as one, connect(filtered.path) as other:
        for client in (one, other):
            client.sendall(ping)
            assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"{}")
        assert asked.wait(20)
        may_say.set()
        answers = [client.recv(65536) for client in (one, other)]
    assert [statuses(answer) for answer in answers] == [[200], [200]]
    assert all(f"\r\nApi-Version: {API}\r\n".encode() in answer for answer in answers), answers


def test_an_answer_that_breaks_off_is_seen_as_such(fake: FakeEngine, filtered: Filtered) -> None:
    """The client must not take half a document for a whole one."""

    def half(handler: object) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[")  # type: ignore[attr-defined]

    fake.answers["GET", "/containers/json"] = 0, half
    answer = talk(filtered.path, b"GET /containers/json HTTP/1.1\r\n" + HOST + b"\r\n")
    assert statuses(answer) == [502]


def test_a_hundred_clients_at_once(fake: FakeEngine, filtered: Filtered) -> None:
    """Each gets its own answer."""
    got: list[list[int]] = []

    def one() -> None:
        ping = b"GET /_ping HTTP/1.1\r\n" + HOST + b"\r\n"
        got.extend(statuses(talk(filtered.path, ping)) for _ in range(3))

    threads = [threading.Thread(target=one) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[200]] * 300


# --- the log


def test_every_decision_is_a_line_without_secrets(
    fake: FakeEngine, start: Callable[..., Filtered]
) -> None:
    """Rule, raw and normalised path, verdict, mutations, status; no values of a query, no body."""
    filtered = start(fake.path)
    body = json.dumps({"Image": "alpine", "Env": ["TOKEN=s3cret"]}).encode()
    head = b"POST /v1.30/containers/create?name=n4me HTTP/1.1\r\n" + HOST
    sent = head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert statuses(talk(filtered.path, sent)) == [201]
    talk(filtered.path, INNER)
    allowed, refused = filtered.audit()
    assert allowed["verdict"] == "allow"
    assert allowed["raw"] == "/v1.30/containers/create?name"
    assert allowed["path"] == "/v1.41/containers/create"
    assert allowed["status"] == 201
    assert "limit.memory" in allowed["mutations"]
    assert refused["verdict"] == "refuse"
    assert refused["rule"] == "create.privileged"
    assert "s3cret" not in filtered.audit_path.read_text()
    assert filtered.audit_path.stat().st_mode & 0o777 == 0o600
    report = filtered.stop()
    assert report["requests"] == 2
    assert {"rule": "create.privileged", "allowed": False, "count": 1} in report["rules"]


def test_warn_lets_through_and_says_so(fake: FakeEngine, start: Callable[..., Filtered]) -> None:
    """But not what cannot be read: there is nothing to build anew."""
    filtered = start(fake.path, mode="warn")
    assert statuses(talk(filtered.path, INNER)) == [201]
    (entry,) = filtered.audit()
    assert (entry["verdict"], entry["rule"]) == ("would-refuse", "create.privileged")
    twice = INNER.replace(b'"Image"', b'"Image": 1, "Image"')
    twice = twice.replace(
        b"Content-Length: %d" % len(PRIVILEGED), b"Content-Length: %d" % (len(PRIVILEGED) + 12)
    )
    assert statuses(talk(filtered.path, twice)) == [400]
