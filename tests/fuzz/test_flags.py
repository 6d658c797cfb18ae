"""The command line: any words are flags and a command, or our own error."""

from __future__ import annotations

import os

from hypothesis import strategies as st

from agent_sandbox.cli import options
from agent_sandbox.errors import SandboxError

from .bound import attempt, fuzz

NAMES = sorted(options.BY_NAME)
# What the kernel can hand to a program: no NUL, and bytes that are no UTF-8 as lone surrogates.
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    ),
    max_size=8,
)  # fmt: skip
VALUES = st.one_of(
    TEXTS,
    st.sampled_from(
        ("on", "off", "TRUE", "private", "4G", "1e3", "10m", "-1", "0", "9" * 400, "nan", "inf",
         "1_0", "٣", "٣G", "²", "5.", ".5", ".", "1..2", "0x10", "A=1", "A", "=", "HOME=x",
         "claude", "1 G", "4gib", "gib", "b", "\n", "é")
    ),
)  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(NAMES),
    st.builds("{}={}".format, st.sampled_from(NAMES), VALUES),
    st.builds("{}{}".format, st.sampled_from(NAMES), VALUES),
    VALUES,
    st.sampled_from(("--", "-", "---", "--=", "-=", "--=x", "")),
)


def parsed_from(words: list[str]) -> options.Parsed | None:
    """What the words say, or None for an error of ours."""
    parsed = attempt(lambda: options.parse(list(words)))
    if isinstance(parsed, SandboxError):
        return None
    for setting in parsed.values.values():
        values = setting.value if isinstance(setting.value, (tuple, dict)) else (setting.value,)
        for value in values:
            os.fsencode(str(value))
    return parsed


@fuzz(500, words=st.lists(WORDS, max_size=6))
def test_any_words_are_flags_or_our_error(words: list[str]) -> None:
    """And what the command gets is the end of what was given, untouched."""
    parsed = parsed_from(words)
    if parsed is not None and parsed.command:
        assert list(parsed.command) == words[len(words) - len(parsed.command) :]


@fuzz(300, words=st.lists(WORDS, max_size=4), command=st.lists(WORDS, min_size=1, max_size=4))
def test_nothing_after_the_command_is_a_flag(words: list[str], command: list[str]) -> None:
    """What stands after `--` changes no setting."""
    alone, followed = parsed_from(words), parsed_from([*words, "--", *command])
    if alone is None or alone.command or words[-1:] == ["--"]:
        # An error, or the flags ended before our own `--`.
        return
    assert followed is not None
    assert followed == alone.replace(command=tuple(command))
