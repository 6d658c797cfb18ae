"""SOCKS handshakes: only CONNECT, and only names that are names."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy import socks
from agent_sandbox.proxy.socks import BadSocks, Handshake, Step, Target

NAMED = b"\5\1\0\3\6a.test\1\xbb"


def target(*messages: bytes) -> Target:
    """Feed a handshake byte by byte."""
    handshake = Handshake()
    found: Step | Target | None = None
    for message in messages:
        for length in range(1, len(message)):
            assert handshake.read(message[:length]) is None
        found = handshake.read(message)
        assert found is not None
        assert found.used == len(message)
    assert isinstance(found, Target)
    return found


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((b"\5\1\0", NAMED), (5, "a.test", 443)),
        ((b"\5\2\0\2", b"\5\1\0\1\1\2\3\4\0\x50"), (5, b"\1\2\3\4", 80)),
        ((b"\5\1\2", b"\1\1u\1p", b"\5\1\0\4" + bytes(16) + b"\0\x16"), (5, bytes(16), 22)),
        ((b"\5\1\2", b"\1\0\0", NAMED), (5, "a.test", 443)),
        ((b"\4\1\0\x50\1\2\3\4user\0",), (4, b"\1\2\3\4", 80)),
        ((b"\4\1\0\x50\0\0\0\1user\0a.test\0",), (4, "a.test", 80)),
        ((b"\4\1\0\x50\0\0\0\0\0",), (4, bytes(4), 80)),
    ],
)  # fmt: skip
def test_targets(messages: tuple[bytes, ...], expected: tuple[int, object, int]) -> None:
    found = target(*messages)
    assert (found.version, found.host, found.port) == expected


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ((b"\5\1\1",), b"\5\xff"),
        ((b"\5\0",), b"\5\xff"),
        ((b"\5\1\0", b"\5\2" + NAMED[2:]), socks.reply(5, socks.BAD_COMMAND)),
        ((b"\5\1\0", b"\5\3" + NAMED[2:]), socks.reply(5, socks.BAD_COMMAND)),
        ((b"\5\1\0", b"\5\1\0\5abcdef"), socks.reply(5, socks.BAD_ADDRESS)),
        ((b"\5\1\0", b"\5\1\1" + NAMED[3:]), socks.reply(5, socks.FAILED)),
        ((b"\5\1\0", b"\4\1\0\3abcde"), socks.reply(5, socks.FAILED)),
        ((b"\5\1\0", b"\5\1\0\3\x0ca.test\0.evil\0\x50"), socks.reply(5, socks.FORBIDDEN)),
        ((b"\5\1\0", b"\5\1\0\3\0\0\x50"), socks.reply(5, socks.FORBIDDEN)),
        ((b"\5\1\0", b"\5\1\0\3\2a\n\0\x50"), socks.reply(5, socks.FORBIDDEN)),
        ((b"\5\1\0", b"\5\1\0\3\2\xc3\xa4\0\x50"), socks.reply(5, socks.FORBIDDEN)),
        ((b"\5\1\2", b"\5\1\1"), b""),
        ((b"\4\2\0\x50\1\2\3\4\0",), socks.reply(4, socks.BAD_COMMAND)),
        ((b"\4\1\0\x50\0\0\0\1\0\0",), socks.reply(4, socks.FORBIDDEN)),
        ((b"\4\1\0\x50\1\2\3\4" + b"u" * 300,), socks.reply(4, socks.FAILED)),
        ((b"\4\1\0\x50\0\0\0\1\0" + b"a" * 300,), socks.reply(4, socks.FAILED)),
        ((b"\6\1\0",), b""),
    ],
)
def test_cannot_have_anything_else(messages: tuple[bytes, ...], answer: bytes) -> None:
    handshake = Handshake()
    for message in messages[:-1]:
        handshake.read(message)
    with pytest.raises(BadSocks) as caught:
        handshake.read(messages[-1])
    assert caught.value.answer == answer
