"""The parts of the API that need no server."""

from __future__ import annotations

import io
import json

import pytest

from agent_sandbox.service.api import documents, origins, reading, sessions, views
from agent_sandbox.service.api.denials import Denials
from agent_sandbox.service.app import Settings, is_loopback, names_of
from agent_sandbox.service.backend.interface import Entry
from agent_sandbox.service.core.about import Counts
from agent_sandbox.service.http.messages import Peer, Request
from agent_sandbox.service.logs import Log
from agent_sandbox.service.metrics import Metrics
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Resources


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- JSON


@pytest.mark.parametrize("text", ['{"a":1}', "[]", '"\\u00e9"', '"\\ud83d\\ude00"', "1e5", "null"])
def test_json_is_read(text: str) -> None:
    assert documents.read(text.encode()) == json.loads(text)


def test_what_is_written_can_be_read() -> None:
    value = {"a": ["é", 1.5, None, True], "b": {"": "\0\n"}}
    assert documents.read(documents.write(value)) == value
    with pytest.raises(ValueError, match="float"):
        documents.write(float("nan"))


# --- times and filters


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0), ("1970-01-01t01:00:00+01:00", 0.0),
        ("1970-01-01T00:00:00.123456789Z", 0.123456), ("1970-01-01T00:00:00.5z", 0.5),
    ],
)  # fmt: skip
def test_times_are_read(text: str, seconds: float) -> None:
    assert reading.moment(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["2030-02-30T00:00:00Z", "2030-01-01T25:00:00Z"])
def test_times_outside_the_calendar_are_refused(text: str) -> None:
    with pytest.raises(Problem) as error:
        reading.moment(text, "expiresAt")
    assert (error.value.code, error.value.field) == ("INVALID", "expiresAt")


def test_times_are_written_as_they_are_read() -> None:
    assert views.when(0) is None
    assert views.when(1.5) == "1970-01-01T00:00:01.500Z"
    assert reading.moment(views.when(1234567890.25) or "", "x") == 1234567890.25


def test_a_name_that_is_no_text_is_shown_replaced() -> None:
    entry = Entry(path="/workspace/\udcff", kind="file", size=1, mode=0o100644, modified=-5e20)
    shown = views.entry(entry)
    assert shown["name"] == "�"
    assert shown["mode"] == "0644"
    documents.write(shown)


def test_a_bound_that_nothing_keeps_does_not_look_like_one() -> None:
    shown = views.effective(Resources(memory=5, cpus=1.0), {"memory": "cgroup"})
    assert shown["memory"] == {"limit": 5, "enforced": True, "enforcedBy": "cgroup"}
    assert shown["cpu"] == {"limit": 1.0, "enforced": False, "enforcedBy": ""}


# --- names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", ("a", None)), ("A.B:80", ("a.b", 80)), ("[::1]", ("::1", None)),
        ("[::1]:5", ("::1", 5)), ("a.", ("a", None)), ("", None), (":80", None), ("a:", None),
        ("a:b", None), ("a:999999", None), ("[::1", None), ("[::1]x", None), ("[a]", None),
        ("::1", None), ("a b", None), ("a/b", None), ("u@a", None), ("a%2e", None), ("é", None),
        ("[::1]:", None), ("a,b", None),
    ],
)  # fmt: skip
def test_authorities_are_read(text: str, found: object) -> None:
    assert origins.authority(text) == found


def names(**more: object) -> origins.Names:
    return names_of(Settings(data="/d", **more))  # type: ignore[arg-type]


def test_a_listener_on_every_address_knows_addresses_but_no_names() -> None:
    wild = names(listen=(("0.0.0.0", 1),))
    assert origins.check_host(wild, "192.0.2.7:1") == ("192.0.2.7", 1)
    for host in ("evil.example", "192.0.2.7.evil.example"):
        with pytest.raises(Problem):
            origins.check_host(wild, host)
    with pytest.raises(Problem):
        origins.check_host(names(listen=(("127.0.0.1", 1),)), "192.0.2.7")


@pytest.mark.parametrize(
    ("origin", "host", "tls", "proxied", "fine"),
    [
        ("http://a:1", "a:1", False, False, True), ("https://a", "a", True, False, True),
        ("https://a:443", "a", True, False, True), ("http://a", "a", True, False, False),
        ("https://a", "a", False, True, True), ("http://a", "a", False, True, False),
        ("https://a", "a", False, False, False), ("http://b:1", "a:1", False, False, False),
        ("http://a:2", "a:1", False, False, False), ("HTTP://a:1", "a:1", False, False, False),
    ],
)  # fmt: skip
def test_an_origin_is_ours_by_scheme_host_and_port(
    origin: str, host: str, tls: bool, proxied: bool, fine: bool
) -> None:
    known = origins.Names(hosts=frozenset({"a"}), proxied=proxied)
    named = origins.check_host(known, host)
    if fine:
        origins.check_origin(known, named, {"origin": origin}, tls=tls)
        return
    with pytest.raises(Problem):
        origins.check_origin(known, named, {"origin": origin}, tls=tls)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False),
     ("localhost.example.org", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_loopback_is_told_from_what_others_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


# --- sessions


def test_a_session_ends_by_time_and_by_silence() -> None:
    clock = Clock()
    held = sessions.Sessions(clock)
    cookie, session = held.open("token", "a")
    assert cookie not in repr(vars(held))
    assert "token" not in repr(session)
    for _ in range(7):
        clock.now += sessions.IDLE - 1
        if clock.now < session.expires:
            assert held.find(cookie) is session
    assert held.find(cookie) is None
    cookie, _ = held.open("token", "a")
    clock.now += sessions.IDLE
    assert held.find(cookie) is None
    assert held.find("nothing") is None


def test_sessions_do_not_grow_without_end() -> None:
    held = sessions.Sessions(Clock())
    first, _ = held.open("t", "a")
    other, _ = held.open("t", "b")
    for _ in range(sessions.MOST_PER_AGENT):
        held.open("t", "a")
    # One's own oldest goes, not another's.
    assert held.find(first) is None
    assert held.find(other) is not None
    for number in range(sessions.MOST):
        held.open("t", f"agent-{number}")
    assert len(held._held) <= sessions.MOST


# --- denials, logs, metrics


class Trail:
    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def write(self, actor: object, action: str, **members: object) -> int:
        self.lines.append({"actor": actor, "action": action, **members})
        return len(self.lines)


def test_a_flood_is_summed_up_when_it_slows_down() -> None:
    clock, trail = Clock(), Trail()
    denials = Denials(trail, clock)  # type: ignore[arg-type]
    peer = Peer(address="192.0.2.1")
    for _ in range(500):
        denials.malformed(peer, Problem("BAD_REQUEST", "no request"))
    assert len(trail.lines) == 20
    clock.now += 60
    denials.malformed(peer, Problem("BAD_REQUEST", "no request"))
    assert trail.lines[-1]["reason"] == "no request (and 480 more before)"
    # Another address has a bound of its own.
    denials.malformed(Peer(address="192.0.2.2"), Problem("BAD_REQUEST", "no request"))
    assert len(trail.lines) == 22


async def _request(path: str) -> Request:
    return Request("GET", path, {}, Peer(address="192.0.2.1"))


def test_a_log_cannot_be_forged() -> None:
    import asyncio

    request = asyncio.run(_request("/a%0a{%22level%22:%22error%22}%1b[31m"))
    for format_ in ("json", "text"):
        stream = io.StringIO()
        Log(format_, stream).request(
            request, agent="a", route="unmatched", status=404, seconds=0.001, code="NOT_FOUND"
        )
        text = stream.getvalue()
        assert text.count("\n") == 1
        assert "\x1b" not in text


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    stream = io.StringIO()
    stream.close()
    log = Log("json", stream)
    log.write("info", "x")
    log.write("error", "y")


def test_measurements_are_counted_by_route_and_never_by_path() -> None:
    metrics = Metrics()
    metrics.requested("GET", "/v1/execs/{execId}", 200, 0.004)
    metrics.requested("GET", "/v1/execs/{execId}", 200, 999)
    metrics.requested("BREW", "unmatched", 405, 0.1)
    metrics.denied("NOT_FOUND")
    metrics.observe("exec", 0.02)
    metrics.observe("unknown", 1)
    text = metrics.render(
        Counts(sandboxes={"Running": 2}, running=1, queued=0), {"sandbox_audit_seq": 7}
    )
    lines = text.splitlines()
    route = 'route="/v1/execs/{execId}"'
    assert f'sandbox_http_requests_total{{method="GET",{route},status="200"}} 2' in lines
    assert f'sandbox_http_request_seconds_bucket{{{route},le="0.005"}} 1' in lines
    assert f'sandbox_http_request_seconds_bucket{{{route},le="300"}} 1' in lines
    assert f'sandbox_http_request_seconds_bucket{{{route},le="+Inf"}} 2' in lines
    assert 'sandbox_http_requests_total{method="other",route="unmatched",status="405"} 1' in lines
    assert 'sandbox_sandboxes{state="Running"} 2' in lines
    assert "sandbox_audit_seq 7" in lines
    # Each name is described once, before its values.
    helped = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(helped) == len(set(helped))
