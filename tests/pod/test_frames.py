"""The messages between service and agent, without either."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.pod import frames

KINDS = sorted(frames.TO_SERVICE)
MESSAGES = st.lists(
    st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(
            st.just(kind), st.binary(max_size=min(frames.TO_SERVICE[kind], 2000))
        )
    ),
    max_size=20,
)


def read(reader: frames.Reader, data: bytes) -> list[tuple[bytes, bytes]]:
    reader.feed(data)
    found = []
    while (one := reader.next()) is not None:
        found.append(one)
    return found


@given(MESSAGES, st.lists(st.integers(0, 60_000), max_size=20))
def test_what_was_written_is_read_however_it_is_cut(
    messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    data = b"".join(frames.frame(kind, body) for kind, body in messages)
    reader = frames.Reader(frames.TO_SERVICE)
    found, at = [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += read(reader, data[at:cut])
        at = cut
    assert found == messages
    assert reader.is_empty


@given(st.binary(max_size=5000))
def test_any_bytes_are_read_or_refused_and_never_held_beyond_a_frame(data: bytes) -> None:
    reader = frames.Reader(frames.TO_AGENT)
    try:
        found = read(reader, data)
    except frames.BadFrame:
        return
    assert all(len(body) <= frames.TO_AGENT[kind] for kind, body in found)
    assert len(reader._held) <= frames.HEAD + frames.MOST_REQUEST


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come(kind: bytes) -> None:
    most = frames.TO_SERVICE[kind]
    reader = frames.Reader(frames.TO_SERVICE)
    assert read(reader, kind + most.to_bytes(4, "big"))[:1] in ([], [(kind, b"")])
    reader = frames.Reader(frames.TO_SERVICE)
    with pytest.raises(frames.BadFrame, match="bytes"):
        read(reader, kind + (most + 1).to_bytes(4, "big"))


def test_a_kind_of_the_other_side_is_refused_by_its_first_byte() -> None:
    for kind in set(frames.TO_AGENT) - set(frames.TO_SERVICE):
        with pytest.raises(frames.BadFrame, match="unknown"):
            read(frames.Reader(frames.TO_SERVICE), kind)


TEXTS = st.text(st.characters(exclude_categories=()), max_size=50)


@given(st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans() | st.none(), max_size=10))
def test_documents_come_back_as_they_went(document: dict[str, object]) -> None:
    (message,) = read(frames.Reader(frames.TO_SERVICE), frames.text(frames.ANSWER, document))
    assert frames.document(message[1]) == document


def test_bytes_that_are_no_text_come_back(tmp_path: object) -> None:
    word = b"\xff\xfe".decode("utf-8", "surrogateescape")
    data = frames.text(frames.REQUEST, {"argv": [word]})[frames.HEAD :]
    assert frames.Fields(frames.document(data)).words("argv", 1) == (word,)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"1", b'"x"', b"null", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":Infinity}',
        b"\xff\xfe", b'{"a":' + b"[" * 30_000, b'{"a":{"b":1,"b":1}}',
    ],
)  # fmt: skip
def test_a_document_has_one_reading_or_none(text: bytes) -> None:
    with pytest.raises(frames.BadFrame):
        frames.document(text)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_document_or_refused(data: bytes) -> None:
    try:
        found = frames.document(data)
    except frames.BadFrame:
        return
    assert isinstance(found, dict)


VALUES: list[object] = [
    None, True, 1, -1, 1.5, "x", ["x"], [1], {"a": "b"}, {"a": 1}, 1 << 63, 1e13, "x" * 70_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "fits"),
    [
        (lambda f: f.word("v"), ["x"]),
        (lambda f: f.whole("v"), [1]),
        (lambda f: f.seconds("v"), [1, 1.5]),
        (lambda f: f.switch("v"), [True]),
        (lambda f: f.words("v", 1), [["x"]]),
        (lambda f: f.table("v", 1), [{"a": "b"}]),
    ],
)
def test_a_member_has_its_type_or_is_refused(ask: object, fits: list[object]) -> None:
    for value in VALUES:
        fields = frames.Fields({"v": value})
        if any(type(value) is type(fit) and value == fit for fit in fits):
            ask(fields)  # type: ignore[operator]
            fields.end()
        else:
            with pytest.raises(frames.BadFrame):
                ask(fields)  # type: ignore[operator]


def test_members_that_nobody_asked_for_are_refused() -> None:
    fields = frames.Fields(json.loads('{"a": "x", "b": "y"}'))
    fields.word("a")
    with pytest.raises(frames.BadFrame, match="b"):
        fields.end()
