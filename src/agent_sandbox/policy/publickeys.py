"""Public keys of ssh: lines of text, fingerprints, and how people name a key. Pure.

A key is named by its fingerprint, by the file of its public half, or by its comment, as
`ssh-add -l` shows them.
"""

from __future__ import annotations

import binascii
import hashlib

from ..record import Record

FINGERPRINT, FILE, COMMENT = "fingerprint", "file", "comment"
PREFIX = "SHA256:"
FINGERPRINT_LENGTH = len(PREFIX) + 43
MAX_NAME = 256
MAX_LINE = 16 << 10
FORMS = "write a fingerprint (SHA256:…), a comment as 'ssh-add -l' shows it, or ~/.ssh/NAME.pub"


class PublicKey(Record):
    """The public half of a key."""

    blob: bytes
    comment: str = ""

    @property
    def kind(self) -> str:
        """The name of its kind, as the blob itself says."""
        size = int.from_bytes(self.blob[:4])
        return self.blob[4 : 4 + size].decode("ascii", "replace")

    @property
    def fingerprint(self) -> str:
        """As `ssh-add -l` shows it."""
        return fingerprint(self.blob)

    def line(self) -> str:
        """As a file with a public key has it."""
        return f"{self.kind} {encoded(self.blob)} {self.comment}".rstrip() + "\n"


class KeyName(Record):
    """What somebody called a key; for a file, the blob in it takes the text's place."""

    kind: str
    text: str


def key_name(text: str) -> KeyName:
    """A name as it was written. ValueError says what is wrong with it."""
    if not text.isprintable() or len(text) > MAX_NAME or text.strip() != text:
        raise ValueError("must be one line of printable text")
    if text.startswith(("/", "~/")):
        return KeyName(kind=FILE, text=text)
    if text.upper().startswith(PREFIX):
        if len(text) != FINGERPRINT_LENGTH or not text.startswith(PREFIX):
            raise ValueError("must be a whole fingerprint, SHA256: and 43 characters")
        return KeyName(kind=FINGERPRINT, text=text)
    if text.upper().startswith("MD5:"):
        raise ValueError("must be a SHA256 fingerprint")
    return KeyName(kind=COMMENT, text=text)


def is_named(key: PublicKey, names: frozenset[tuple[str, str]]) -> bool:
    """Whether one of these (kind, text) is this key's; files count by the fingerprint in them."""
    return (FINGERPRINT, key.fingerprint) in names or (
        bool(key.comment) and (COMMENT, key.comment) in names
    )


def fingerprint(blob: bytes) -> str:
    """The SHA256 fingerprint of a key."""
    return PREFIX + encoded(hashlib.sha256(blob).digest()).rstrip("=")


def encoded(blob: bytes) -> str:
    """Base64 in one line."""
    return binascii.b2a_base64(blob, newline=False).decode("ascii")


def decoded(text: str) -> bytes | None:
    """Bytes from base64, or None."""
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError):
        return None


def parse_line(text: str) -> PublicKey | None:
    """The key in the first line of a public key's file. Never one of a private key's."""
    parts = text[:MAX_LINE].partition("\n")[0].strip().split(None, 2)
    if len(parts) < 2:
        return None
    blob = decoded(parts[1])
    if blob is None:
        return None
    key = PublicKey(blob=blob, comment=parts[2].strip() if len(parts) > 2 else "")
    return key if key.kind == parts[0] else None
