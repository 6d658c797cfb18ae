"""WebSocket frames: both roles, and everything that an end may not send."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader
from websockets.utils import accept_key

from agent_sandbox.service.http import frames
from agent_sandbox.service.http.frames import FrameError, Message, Reader, encode

MASK = b"\x01\x80\xff\x37"
LIMIT = 1000


def client_frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    return encode(opcode, payload, mask=MASK, final=final)


def read(data: bytes, *, masked: bool = True, limit: int = LIMIT) -> list[Message]:
    return list(Reader(masked=masked, limit=limit).feed(data))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 127, 65535, 65536, 200_000])
@pytest.mark.parametrize("mask", [b"", MASK])
def test_what_is_written_is_read(size: int, mask: bytes) -> None:
    payload = random.Random(size).randbytes(size)
    data = encode(frames.BINARY, payload, mask=mask)
    assert read(data, masked=bool(mask), limit=size) == [(frames.BINARY, payload)]


@pytest.mark.parametrize("size", [0, 5, 126, 70_000])
def test_another_library_writes_and_reads_the_same(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert encode(frames.BINARY, payload) == Frame(Opcode.BINARY, payload).serialize(mask=False)
    reader = StreamReader()
    reader.feed_data(encode(frames.BINARY, payload, mask=MASK))
    parsing = Frame.parse(reader.read_exact, mask=True)
    with pytest.raises(StopIteration) as found:
        next(parsing)
    assert found.value.value.data == payload


def test_the_handshake_is_that_of_the_standard() -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    assert frames.accept_key(key) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" == accept_key(key)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_frames_may_come_in_pieces(step: int) -> None:
    data = b"".join((
        client_frame(frames.TEXT, "grüße".encode()), client_frame(frames.PING, b"p"),
        client_frame(frames.BINARY, bytes(300)), client_frame(frames.CLOSE, b"\x03\xe8bye"),
    ))  # fmt: skip
    reader = Reader(masked=True, limit=LIMIT)
    found = [m for at in range(0, len(data), step) for m in reader.feed(data[at : at + step])]
    assert found == [
        (frames.TEXT, "grüße"), (frames.PING, b"p"),
        (frames.BINARY, bytes(300)), (frames.CLOSE, b"\x03\xe8bye"),
    ]  # fmt: skip


def test_a_message_in_parts_with_pings_between() -> None:
    text = "€uro".encode()
    data = (
        client_frame(frames.TEXT, text[:1], final=False)
        + client_frame(frames.PING, b"1")
        + client_frame(frames.CONTINUATION, b"", final=False)
        + client_frame(frames.CONTINUATION, text[1:2], final=False)
        + client_frame(frames.PONG, b"2")
        + client_frame(frames.CONTINUATION, text[2:])
    )
    assert read(data) == [(frames.PING, b"1"), (frames.PONG, b"2"), (frames.TEXT, "€uro")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode(frames.TEXT, b"x"), 1002),  # not masked
        (b"\xc1\x80" + MASK, 1002), (b"\xa1\x80" + MASK, 1002), (b"\x91\x80" + MASK, 1002),
        (b"\x83\x80" + MASK, 1002), (b"\x87\x80" + MASK, 1002), (b"\x8b\x80" + MASK, 1002),
        (b"\x8f\x80" + MASK, 1002),
        (client_frame(frames.CONTINUATION, b"x"), 1002),
        (client_frame(frames.TEXT, b"x", final=False) + client_frame(frames.TEXT, b"y"), 1002),
        (b"\x09\x80" + MASK, 1002),  # a ping in parts
        (b"\x89\xfe\x00\x7e" + MASK + bytes(126), 1002),  # a long ping
        (b"\x82\xfe\x00\x05" + MASK + bytes(5), 1002),  # 5 in two bytes
        (b"\x82\xff" + (5).to_bytes(8, "big") + MASK + bytes(5), 1002),
        (b"\x82\xff" + (1 << 63).to_bytes(8, "big"), 1009),
        (client_frame(frames.TEXT, b"\xff"), 1007),
        (client_frame(frames.TEXT, b"\xc3"), 1007),  # cut off
        (client_frame(frames.TEXT, b"\xed\xa0\x80"), 1007),  # a surrogate
        (client_frame(frames.TEXT, b"\xc0\xaf"), 1007),  # overlong
        (client_frame(frames.TEXT, b"\xff", final=False), 1007),  # with the part that has it
        (b"\x82\xfe\x03\xe9", 1009),  # by its head alone
        (client_frame(frames.BINARY, bytes(900), final=False) + b"\x80\xe5", 1009),
    ],
)  # fmt: skip
def test_what_breaks_the_rules_ends_the_connection(data: bytes, code: int) -> None:
    with pytest.raises(FrameError) as found:
        read(data)
    assert found.value.code == code


def test_a_server_must_not_mask() -> None:
    with pytest.raises(FrameError):
        read(client_frame(frames.TEXT, b"x"), masked=False)
    assert read(encode(frames.TEXT, b"x"), masked=False) == [(frames.TEXT, "x")]


def test_what_came_before_the_fault_is_still_read() -> None:
    reader = Reader(masked=True, limit=LIMIT)
    messages = reader.feed(client_frame(frames.TEXT, b"good") + b"\xff\xff")
    assert next(messages) == (frames.TEXT, "good")
    with pytest.raises(FrameError):
        next(messages)


def test_empty_parts_leave_nothing_behind() -> None:
    reader = Reader(masked=True, limit=LIMIT)
    list(reader.feed(client_frame(frames.BINARY, b"", final=False)))
    for _ in range(1000):
        list(reader.feed(client_frame(frames.CONTINUATION, b"", final=False)))
    assert reader._parts == []


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1011, 1014, 3000, 4999])
def test_codes_that_may_be_sent(code: int) -> None:
    assert frames.read_close(frames.close_payload(code, "why")) == (code, "why")


@pytest.mark.parametrize("code", [0, 999, 1004, 1006, 1015, 1016, 2999, 5000])
def test_codes_that_may_not(code: int) -> None:
    with pytest.raises(ValueError, match=r".+"):
        frames.close_payload(code)
    with pytest.raises(FrameError):
        frames.read_close(code.to_bytes(2, "big"))


def test_closing_words() -> None:
    assert frames.read_close(b"") == (1005, "")
    assert frames.close_payload(1005) == b""
    long = frames.close_payload(1000, "ü" * 100)
    assert len(long) <= 125
    assert set(frames.read_close(long)[1]) == {"ü"}
    for bad in (b"\x03", b"\x03\xe8\xff"):
        with pytest.raises(FrameError):
            frames.read_close(bad)


def test_a_control_frame_is_short() -> None:
    with pytest.raises(ValueError, match="control"):
        encode(frames.PING, bytes(126))
    with pytest.raises(ValueError, match="control"):
        encode(frames.CLOSE, b"", final=False)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_nonsense_is_read_or_refused(data: bytes, step: int) -> None:
    reader = Reader(masked=True, limit=100)
    code = 1002
    try:
        for at in range(0, len(data), step):
            list(reader.feed(data[at : at + step]))
    except FrameError as error:
        code = error.code
    assert code in (1002, 1007, 1009)
