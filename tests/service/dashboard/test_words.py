"""The pure parts, in the browser that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Module = Callable[[str, str], Any]

ESC = "\\x1b"


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("m.bytes(0)", "0 B"), ("m.bytes(1536)", "1.5 KiB"), ("m.bytes(512 * 2**20)", "512 MiB"),
        ("m.bytes(null)", "–"), ("m.duration(12)", "12 ms"), ("m.duration(1500)", "1.5 s"),
        ("m.duration(65000)", "1 min 05 s"), ("m.duration(7260000)", "2 h 01 min"),
        ("m.duration(null)", "–"), ("m.ago('2030-01-01T00:00:00Z', Date.UTC(2030,0,1,0,5))",
                                    "5 min ago"),
        ("m.until(null, 0)", "never"), ("m.until('2000-01-01T00:00:00Z', Date.now())", "due"),
        ("m.ago('nonsense', 0)", "–"), ("m.command(['a', 'b c', \"d'e\"])", "a 'b c' 'd'\\''e'"),
        ("m.command(['a', ''])", "a ''"), ("m.count(1, 'row', 'rows')", "1 row"),
        ("m.count(1200, 'row', 'rows')", "1,200 rows"),
        ("m.executionState({state: 'Exited', exitCode: 0}).text", "exit 0"),
        ("m.executionState({state: 'Exited', exitCode: 137, timedOut: true}).text", "timed out"),
        ("m.executionState({state: 'Exited', exitCode: 3}).kind", "bad"),
    ],
)  # fmt: skip
def test_values_are_words(module: Module, expression: str, wanted: str) -> None:
    assert module("words.js", expression) == wanted


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("a\\u202eb", "a<U+202E>b"), ("a\\u200bb", "a<U+200B>b"), ("a\\x00\\x07", "a␀␇"),
        ("a\\nb\\tc", "a\nb\tc"), ("\\x1b[31m", "␛[31m"), ("\\u2028", "<U+2028>"),
        ("\\x9b31m", "<U+009B>31m"), ("👩\\u200d💻 é שלום", "👩\u200d💻 é שלום"),
    ],
)  # fmt: skip
def test_cannot_hide_characters(module: Module, raw: str, wanted: str) -> None:
    """Control characters and marks of direction are shown, not obeyed."""
    assert module("words.js", f'm.visible("{raw}")') == wanted


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([f"{ESC}[31mred{ESC}[0m"], "red"),
        ([f"{ESC}[3", f"1mred{ESC}", "[0m!"], "red!"),
        ([f"{ESC}]0;title\\x07after"], "after"),
        ([f"{ESC}]8;;http://x{ESC}\\\\link{ESC}]8;;{ESC}\\\\."], "link."),
        # What a terminal would overwrite, erase or paint over stays.
        (["secret\\rharmless"], "secret\nharmless"),
        (["secret\\r", "\\nnext"], "secret\nnext"),
        ([f"secret{ESC}[2K{ESC}[1A{ESC}[8mhidden{ESC}[0m"], "secrethidden"),
        (["a\\bb"], "a␈b"),
        # One that never ends swallows nothing for long.
        ([f"{ESC}]0;" + "x" * 3000, "visible"], "␛]0;" + "x" * 3000 + "visible"),
        ([f"{ESC}"], "␛"),
        (["a\\r\\nb"], "a\nb"),
    ],
)  # fmt: skip
def test_cannot_hide_output_by_terminal_sequences(
    module: Module, pieces: list[str], wanted: str
) -> None:
    feeds = " + ".join(f'p.feed("{piece}")' for piece in pieces)
    assert module("terminal.js", f"((p) => {feeds} + p.end())(new m.Plain())") == wanted


def test_events_are_read_in_any_pieces(module: Module) -> None:
    text = ': hi\\n\\nid: 7\\nevent: stdout\\ndata: {\\"a\\":\\ndata: 1}\\r\\n\\r\\ndata:x\\n\\n'
    wanted = [
        {"event": "stdout", "data": '{"a":\n1}', "id": "7"},
        {"event": "message", "data": "x", "id": "7"},
    ]
    one = f'((r) => r.feed("{text}"))(new m.EventReader())'
    many = f'((r) => [..."{text}"].flatMap((c) => r.feed(c)))(new m.EventReader())'
    assert module("api.js", one) == wanted
    assert module("api.js", many) == wanted
