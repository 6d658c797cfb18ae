"""The client's side of a terminal's WebSocket."""

from __future__ import annotations

import json

import pytest

from agent_sandbox.client import BadAnswer
from agent_sandbox.client.shell import Talk
from agent_sandbox.client.wire import Head
from agent_sandbox.service.http import frames


def heard(data: bytes) -> list[frames.Message]:
    """What a server reads: it insists on masks."""
    return list(frames.Reader(masked=True, limit=1 << 20).feed(data))


def test_the_handshake_is_checked() -> None:
    talk = Talk("exc-1")
    sent = dict(talk.call().headers)
    good = frames.accept_key(sent["Sec-WebSocket-Key"])
    talk.check(Head(status=101, headers={"sec-websocket-accept": good}))
    for status, proof in ((101, "other"), (101, ""), (200, good)):
        with pytest.raises(BadAnswer):
            talk.check(Head(status=status, headers={"sec-websocket-accept": proof}))


def test_keys_and_orders_are_masked_frames() -> None:
    talk = Talk("exc-1")
    assert heard(talk.keys(b"\x03")) == [(frames.BINARY, b"\x03")]
    ((kind, text),) = heard(talk.order(type="resize", rows=3, cols=4))
    assert (kind, json.loads(text)) == (frames.TEXT, {"type": "resize", "rows": 3, "cols": 4})


def test_output_questions_and_the_end_are_understood() -> None:
    talk = Talk("exc-1")
    told = json.dumps({"type": "exit", "execId": "exc-1", "exitCode": 7, "state": "Exited"})
    data = b"".join(
        frames.encode(kind, payload)
        for kind, payload in [
            (frames.BINARY, b"he"),
            (frames.PING, b"there?"),
            (frames.BINARY, b"llo"),
            (frames.TEXT, told.encode()),
            (frames.CLOSE, frames.close_payload(frames.NORMAL)),
        ]
    )
    out = b"".join(talk.feed(data[at : at + 1]) for at in range(len(data)))
    assert (out, talk.ended) == (b"hello", True)
    assert talk.result is not None
    assert talk.result.code == 7
    assert heard(talk.answers()) == [
        (frames.PONG, b"there?"),
        (frames.CLOSE, frames.close_payload(frames.NORMAL)),
    ]
    assert talk.answers() == b""


def test_what_breaks_the_rules_is_an_error() -> None:
    with pytest.raises(BadAnswer):
        Talk("exc-1").feed(frames.encode(frames.BINARY, b"x", mask=b"abcd"))
