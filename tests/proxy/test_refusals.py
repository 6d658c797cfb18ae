"""A refusal explains itself, in the client's protocol, and cannot be used to say something else."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy import refusals, socks
from agent_sandbox.proxy.refusals import FORBIDDEN, MALFORMED, UNREACHABLE, Problem, say

NO_RULE = Problem(FORBIDDEN, "no rule allows it", host="a.test", port=443)


def test_http_says_what_why_and_how() -> None:
    said = say(refusals.HTTP, Problem(FORBIDDEN, "why", host="a.test", port=8080, rule="x"))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"X-Agent-Sandbox-Rule: x" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"a.test:8080" in body
    assert b"--allow 'a.test:8080'" in body


@pytest.mark.parametrize(
    ("kind", "status", "alert", "code"),
    [
        (FORBIDDEN, b"403", 49, socks.FORBIDDEN),
        (MALFORMED, b"400", 50, socks.FAILED),
        (UNREACHABLE, b"502", 80, socks.UNREACHABLE),
    ],
)
def test_each_protocol_has_its_code(kind: str, status: bytes, alert: int, code: int) -> None:
    problem = Problem(kind, "why", host="a.test", port=1)
    assert say(refusals.CONNECT, problem).startswith(b"HTTP/1.1 " + status)
    assert say(refusals.TLS, problem) == bytes((21, 3, 3, 0, 2, 2, alert))
    assert say(refusals.SOCKS5, problem) == socks.reply(5, code)
    assert say(refusals.SOCKS4, problem) == socks.reply(4, code)
    assert say(refusals.OPAQUE, problem) == b""


def test_ssh_gets_a_well_formed_disconnect() -> None:
    for length in range(40):
        said = say(refusals.SSH, Problem(FORBIDDEN, "x" * length, host="a.test", port=22))
        banner, _, packet = said.partition(b"\r\n")
        assert banner == b"SSH-2.0-agent-sandbox"
        size, padding = int.from_bytes(packet[:4], "big"), packet[4]
        assert len(packet) == 4 + size
        assert len(packet) % 8 == 0
        assert padding >= 4
        payload = packet[5 : len(packet) - padding]
        assert payload[:5] == b"\1\0\0\0\1"
        assert int.from_bytes(payload[5:9], "big") == len(payload) - 9 - 4


def test_a_deny_rule_gets_no_hint_that_would_not_help() -> None:
    denied = Problem(FORBIDDEN, "denied", host="a.test", port=80, rule="a.test", denied=True)
    assert b"--allow" not in say(refusals.HTTP, denied)
    assert b"--allow 'a.test'" in say(refusals.HTTP, NO_RULE)


def test_cannot_write_a_header_through_a_name() -> None:
    problem = Problem(FORBIDDEN, "a\r\nX: y\x1b[31m", host="a.test", port=80, rule="r\r\nY: z")
    head, _, body = say(refusals.HTTP, problem).partition(b"\r\n\r\n")
    assert b"\nX:" not in head + body
    assert b"\nY:" not in head
    assert b"\x1b" not in body
