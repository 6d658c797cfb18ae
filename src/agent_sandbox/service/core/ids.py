"""Names of sandboxes and executions: random, so that knowing one tells nothing of another."""

from __future__ import annotations

import secrets

SANDBOX, EXECUTION = "sbx-", "exc-"
# 26 characters of base32 carry 130 bits.
LENGTH = 26
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz234567"
# Five bits of each random byte: 256 is a multiple of 32, so all characters are equally likely.
_TABLE = _ALPHABET * 8
_CHARACTERS = frozenset(_ALPHABET.decode("ascii"))


def new(kind: str) -> str:
    """A fresh id."""
    return kind + secrets.token_bytes(LENGTH).translate(_TABLE).decode("ascii")


def is_id(kind: str, text: str) -> bool:
    """Whether it could be one of ours. Ids become file names, so nothing else may."""
    rest = text.removeprefix(kind)
    return len(text) == len(kind) + LENGTH == len(kind + rest) and _CHARACTERS.issuperset(rest)
