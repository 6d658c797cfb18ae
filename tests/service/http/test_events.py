"""Server-Sent Events, there and back."""

from __future__ import annotations

import pytest
from httpx_sse._decoders import SSEDecoder
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.service.http import events
from agent_sandbox.service.http.events import Decoder, Event, TooLarge, comment, encode


def decode(data: bytes, step: int = 10**6) -> list[Event]:
    decoder = Decoder()
    return [e for at in range(0, len(data), step) for e in decoder.feed(data[at : at + step])]


def event(name: str, data: str, id: str = "") -> Event:
    return Event(event=name, data=data, id=id)


def test_an_event_on_the_wire() -> None:
    assert encode("stdout", '{"a":1}', "7") == b'id: 7\nevent: stdout\ndata: {"a":1}\n\n'
    assert encode("x", "a\r\nb\rc\n", "") == b"event: x\ndata: a\ndata: b\ndata: c\ndata: \n\n"
    assert comment("still here") == b": still here\n\n"


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b", "\n\ndata: forged"])
def test_cannot_inject_a_field(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        encode(bad, "x")
    with pytest.raises(ValueError, match="line break"):
        encode("x", "x", bad)
    with pytest.raises(ValueError, match="line break"):
        comment(bad)


def test_cannot_inject_an_event_by_the_data() -> None:
    data = encode("stdout", "x\n\nevent: exit\r\rdata: forged\n\n", "1")
    assert [e.event for e in decode(data)] == ["stdout"]


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\r")),
    st.integers(1, 30),
)
def test_what_is_written_is_read(text: str, step: int) -> None:
    data = encode("out", text, "3") + comment() + encode("end", "", "4")
    assert decode(data, step) == [event("out", text, "3"), event("end", "", "4")]


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_line_end_in_any_pieces(end: str, step: int) -> None:
    lines = [
        "\ufeffdata: one", "data:two", "data", ": comment", "unknown: x", "event: e", "id: 5",
        "retry: 99", "", "", "data: ü\u2028\x85", "",
    ]  # fmt: skip
    decoder = Decoder()
    data = (end.join(lines) + end).encode()
    found = [e for at in range(0, len(data), step) for e in decoder.feed(data[at : at + step])]
    assert found == [event("e", "one\ntwo\n", "5"), event("message", "ü\u2028\x85", "5")]
    assert decoder.retry == 99
    assert decoder.last_id == "5"


def test_an_event_without_its_empty_line_is_not_one() -> None:
    assert decode(b"data: cut off\n") == []


def test_an_id_alone_is_remembered() -> None:
    decoder = Decoder()
    assert decoder.feed(b"id: 9\n\n") == []
    assert decoder.last_id == "9"


def test_another_library_reads_the_same() -> None:
    theirs = SSEDecoder()
    found = [
        e
        for line in encode("x", "a\nb", "7").decode().split("\n")[:-1]
        if (e := theirs.decode(line))
    ]
    assert [(e.event, e.data, e.id) for e in found] == [("x", "a\nb", "7")]


@pytest.mark.parametrize(
    "data", [b"data: " + b"x" * 200, b"data: x\n" * 40, b"x" * 200 + b"\n", b": x\n" * 60]
)
@pytest.mark.parametrize("step", [7, 1000])
def test_an_event_that_never_ends_is_refused(data: bytes, step: int) -> None:
    decoder = Decoder(limit=100)
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    with pytest.raises(TooLarge):
        list(map(decoder.feed, pieces))


@pytest.mark.parametrize("step", [1, 9, 1000])
def test_an_event_of_the_limit_is_read(step: int) -> None:
    """The control: in however many pieces it comes."""
    decoder = Decoder(limit=100)
    data = b"data: " + b"x" * 94 + b"\n\n"
    assert sum(len(decoder.feed(data[at : at + step])) for at in range(0, len(data), step)) == 1


def test_many_small_events_are_not_one_large_one() -> None:
    decoder = Decoder(limit=100)
    assert len(decoder.feed(encode("e", "x" * 20, "1") * 50)) == 50
    for _ in range(50):
        assert decoder.feed(comment("x" * 50)) == []
    assert events.CONTENT_TYPE == "text/event-stream"
