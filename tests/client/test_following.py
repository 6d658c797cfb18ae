"""A stream across connections that break anywhere: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.client import ApiError, BadAnswer
from agent_sandbox.client.following import Following, Output
from agent_sandbox.client.wire import Head
from agent_sandbox.service.http.events import comment, encode

PIECES = [(kind, os.urandom(3).hex() + "é\n") for kind in ("stdout", "stderr", "stdout") * 5]


def served(after: str) -> bytes:
    """What the service sends behind an event: the number of a piece is its id."""
    seen = int(after or 0)
    out = encode("start", json.dumps({"execId": "exc-1", "state": "Running"}), after or "0")
    for number, (kind, text) in enumerate(PIECES, 1):
        if number > seen:
            out += encode(kind, json.dumps({"data": text}), str(number)) + comment("beat")
    return out + encode("exit", json.dumps({"execId": "exc-1", "exitCode": 3, "state": "Exited"}))


@given(cuts=st.lists(st.integers(0, 900), max_size=30))
def test_cannot_lose_or_double_an_event_by_cutting_the_stream(cuts: list[int]) -> None:
    following, output, kinds = Following(), Output(), []
    data = served("")
    for cut in cuts:
        for event in following.feed(data[:cut]):
            output.take(event)
            kinds.append(event.kind)
        if following.ended:
            break
        if following.exec_id:
            call = following.resume()
            assert call.path == "/v1/execs/exc-1/events"
            data = served(dict(call.headers).get("Last-Event-ID", ""))
        else:
            following, data = Following(), served("")
    if not following.ended:
        for event in following.feed(data):
            output.take(event)
            kinds.append(event.kind)
    assert following.result is not None
    result = output.complete(following.result)
    assert result.code == 3
    assert result.stdout == "".join(text for kind, text in PIECES if kind == "stdout")
    assert result.stderr == "".join(text for kind, text in PIECES if kind == "stderr")
    assert kinds == ["start", *(kind for kind, _ in PIECES), "exit"]


def test_the_answers_head_names_the_command_before_any_event() -> None:
    following = Following()
    following.opened(Head(status=200, headers={"location": "/v1/execs/exc-abc"}))
    assert following.resume().path == "/v1/execs/exc-abc/events"


def test_cannot_be_given_another_commands_stream() -> None:
    following = Following("exc-2")
    with pytest.raises(BadAnswer, match="another command"):
        following.feed(served(""))


def test_bytes_that_are_no_text_come_as_they_were() -> None:
    following = Following("exc-1")
    (event,) = following.feed(encode("stdout", json.dumps({"dataBase64": "/wD+"}), "1"))
    assert event.data == b"\xff\x00\xfe"


def test_an_error_in_a_stream_is_raised() -> None:
    told = {"code": "INTERNAL", "message": "oh", "requestId": "r"}
    with pytest.raises(ApiError, match="oh"):
        Following("exc-1").feed(encode("error", json.dumps(told)))


def test_a_kind_of_event_that_is_not_known_is_passed_over() -> None:
    assert Following("exc-1").feed(encode("later", "{}", "9")) == []


def test_output_of_a_start_that_was_lost_is_forgotten() -> None:
    following, output = Following("exc-1"), Output()
    sent = (
        ("stdout", {"data": "first"}, "10"),
        ("retry", {"execId": "exc-1", "attempts": 2, "state": "Running"}, "10"),
        ("stdout", {"data": "second"}, "21"),
        ("exit", {"execId": "exc-1", "exitCode": 0, "state": "Exited", "attempts": 2}, "21"),
    )
    kinds = []
    for kind, data, name in sent:
        for event in following.feed(encode(kind, json.dumps(data), name)):
            kinds.append(event.kind)
            output.take(event)
    assert kinds == [kind for kind, _, _ in sent]
    assert following.result is not None
    result = output.complete(following.result)
    assert (result.stdout, result.attempts) == ("second", 2)
