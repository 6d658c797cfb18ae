"""What is sent again: only what cannot act twice, and not for ever."""

from __future__ import annotations

import json
import ssl

import pytest

from agent_sandbox.client import ApiError, BadAnswer, ClientError, Unreachable
from agent_sandbox.client.address import settings
from agent_sandbox.client.attempts import MOST_DELAY, Attempts, Patience
from agent_sandbox.client.calls import Call
from agent_sandbox.client.wire import Head

HERE = settings("http://127.0.0.1:1", "", None, {})
SAFE, UNSAFE = Call(method="GET", path="/", again=True), Call(method="POST", path="/")
RESET = ConnectionResetError()


def tries(call: Call, most: int = 4) -> Attempts:
    return Attempts(call, HERE, most, lambda: 0.5)


def head(status: int, after: str = "") -> Head:
    return Head(status=status, headers={"retry-after": after} if after else {})


def body(code: str) -> bytes:
    return json.dumps({"code": code, "message": "m", "hint": "h", "requestId": "r"}).encode()


@pytest.mark.parametrize(
    ("call", "sent", "again"),
    [(SAFE, True, True), (SAFE, False, True), (UNSAFE, False, True), (UNSAFE, True, False)],
)
def test_a_broken_request_is_sent_again_where_it_cannot_act_twice(
    call: Call, sent: bool, again: bool
) -> None:
    if again:
        assert tries(call).failed(RESET, sent=sent) > 0
        return
    with pytest.raises(Unreachable) as caught:
        tries(call).failed(RESET, sent=sent)
    assert "may have done" in caught.value.hint


def test_nothing_is_tried_for_ever_and_each_wait_is_longer() -> None:
    attempts = tries(SAFE, 12)
    waits = [attempts.failed(RESET, sent=True) for _ in range(12)]
    with pytest.raises(Unreachable):
        attempts.failed(RESET, sent=True)
    assert waits == sorted(waits)
    assert waits[-1] == MOST_DELAY


@pytest.mark.parametrize("error", [ssl.SSLCertVerificationError(), PermissionError()])
def test_what_cannot_get_better_is_not_tried_again(error: OSError) -> None:
    with pytest.raises(Unreachable):
        tries(SAFE).failed(error, sent=False)


@pytest.mark.parametrize(
    ("call", "status", "code", "after", "again"),
    [
        (UNSAFE, 429, "RATE_LIMITED", "1", True),
        (UNSAFE, 429, "BUSY", "3", True),
        (UNSAFE, 503, "DRAINING", "", True),
        # Nobody said that it will be better soon.
        (UNSAFE, 429, "RATE_LIMITED", "", False),
        # Waiting does not make sandboxes fewer.
        (SAFE, 429, "QUOTA_EXCEEDED", "1", False),
        # The caller decides about an hour.
        (SAFE, 429, "RATE_LIMITED", "3600", False),
        (SAFE, 404, "NOT_FOUND", "", False),
        (SAFE, 500, "INTERNAL", "", False),
        (SAFE, 502, "", "", True),
        (UNSAFE, 502, "", "", False),
    ],
)
def test_a_refusal_is_asked_again_only_when_nothing_was_done(
    call: Call, status: int, code: str, after: str, again: bool
) -> None:
    raw = body(code) if code else b"<html>bad gateway</html>"
    if again:
        assert tries(call).refused(head(status, after), raw) >= float(after or 0)
        return
    with pytest.raises(ClientError) as caught:
        tries(call).refused(head(status, after), raw)
    assert isinstance(caught.value, ApiError if code else BadAnswer)


def test_a_refusal_keeps_its_words() -> None:
    said = {"code": "IMAGE_NOT_ALLOWED", "message": "no", "hint": "ask", "rule": "img",
            "field": "image", "requestId": "req_1"}  # fmt: skip
    with pytest.raises(ApiError) as caught:
        tries(SAFE).refused(head(403, "7"), json.dumps(said).encode())
    error = caught.value
    assert (error.status, error.code, error.message, error.hint, error.rule, error.field) == (
        403, "IMAGE_NOT_ALLOWED", "no", "ask", "img", "image",
    )  # fmt: skip
    assert (error.request_id, error.retry_after) == ("req_1", 7.0)


def test_a_stream_is_tried_anew_after_each_event() -> None:
    patience = Patience(HERE, 2, lambda: 0.5)
    for _ in range(5):
        patience.broken(RESET)
        patience.broken(RESET)
        patience.progress()
    patience.broken(RESET)
    patience.broken(RESET)
    with pytest.raises(Unreachable):
        patience.broken(RESET)
