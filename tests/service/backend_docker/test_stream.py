"""The engine's frames and the wrapper's words, in any pieces."""

from __future__ import annotations

import pytest

from agent_sandbox.service.backend.docker_stream import (
    MAX_TAIL,
    BadStream,
    Begun,
    Finished,
    Frames,
    Words,
    signal_name,
)  # fmt: skip

TOKEN = "0123456789abcdef0123456789abcdef"
FIRST = f"{TOKEN} 17 2\n".encode()
LAST = f"{TOKEN} 3 4\n0m0.01s 0m0.02s\n0m1.250s 1m0.5s\n".encode()


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("step", [1, 3, 8, 9, 1000])
def test_frames_come_apart_however_they_are_cut(step: int) -> None:
    data = frame(1, b"out") + frame(2, b"") + frame(2, b"error") + frame(1, b"x" * 30)
    frames = Frames()
    found: dict[int, bytes] = {1: b"", 2: b""}
    for at in range(0, len(data), step):
        for stream, piece in frames.feed(data[at : at + step]):
            assert piece
            found[stream] += piece
    assert found == {1: b"out" + b"x" * 30, 2: b"error"}


@pytest.mark.parametrize("head", [b"\x03\0\0\0\0\0\0\1x", b"\x01\0\1\0\0\0\0\1x", b"OCI runtime"])
def test_what_is_no_frame_is_an_error(head: bytes) -> None:
    with pytest.raises(BadStream):
        Frames().feed(head)


def said(data: bytes, step: int) -> tuple[bytes, Words]:
    words = Words(TOKEN)
    found = b""
    for at in range(0, len(data), step):
        found += words.feed(data[at : at + step])
    return found + words.end(), words


@pytest.mark.parametrize("step", [1, 2, 7, 31, 32, 33, 1000])
@pytest.mark.parametrize(
    "output",
    [b"", b"hello\n", TOKEN[:20].encode(), f"x{TOKEN} 9 9\n".encode(), FIRST * 3, b"y" * 5000,
     f"{TOKEN} 0 0\n".encode() + b"z" * (MAX_TAIL + 5), TOKEN.encode() * 20],
)  # fmt: skip
def test_the_output_is_all_there_and_nothing_else_is(output: bytes, step: int) -> None:
    found, words = said(FIRST + output + LAST, step)
    assert found == output
    assert words.begun == Begun(pid=17, ooms=2)
    assert words.finished == Finished(code=3, ooms=4, cpu_ms=1250 + 60500)


@pytest.mark.parametrize("step", [1, 1000])
def test_without_last_words_all_is_output(step: int) -> None:
    found, words = said(FIRST + b"abc" + LAST[:30], step)
    assert (found, words.finished) == (b"abc" + LAST[:30], None)


@pytest.mark.parametrize("step", [1, 1000])
def test_before_the_first_words_the_engine_complains(step: int) -> None:
    found, words = said(b"OCI runtime exec failed\n", step)
    assert (found, words.begun) == (b"OCI runtime exec failed\n", None)


FAILED = [("!127", "127"), ("!cwd", "cwd"), ("", "?"), ("x y", "?"), ("1 2 3", "?"), ("-1 0", "?")]


@pytest.mark.parametrize(("text", "failed"), FAILED)
def test_first_words_that_are_no_process_are_a_failure(text: str, failed: str) -> None:
    _, words = said(f"{TOKEN} {text}\n".encode(), 5)
    assert words.begun is not None
    assert words.begun.failed == failed


def test_a_terminal_may_add_carriage_returns() -> None:
    found, words = said((FIRST + b"a\n" + LAST).replace(b"\n", b"\r\n"), 3)
    assert found == b"a\r\n"
    assert words.finished == Finished(code=3, ooms=4, cpu_ms=61750)


SIGNALS = [(0, ""), (1, ""), (128, ""), (137, "SIGKILL"), (143, "SIGTERM"), (255, "")]


@pytest.mark.parametrize(("code", "name"), SIGNALS)
def test_an_exit_code_names_its_signal(code: int, name: str) -> None:
    assert signal_name(code) == name
