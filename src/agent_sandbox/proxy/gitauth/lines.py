"""What git asks a credential helper, as `git credential-cache` sends it to its daemon. Pure.

Git inside thinks that it talks to its own cache, so nothing of ours has to run there. A question is
read strictly, and what is asked outside is written anew from a checked host and a user's name.
"""

from __future__ import annotations

from ...policy.gitauth import HTTPS_PORT, split_host
from ...record import Record

MAX_QUESTION = 16 << 10
MAX_VALUE = 8 << 10
ACTIONS = ("get", "store", "erase")
# What must not stand there twice: the first reader might take one, the second the other.
SINGLE = ("protocol", "host", "username", "path", "password")
# What may be handed in.
ANSWERED = ("username", "password", "password_expiry_utc")


# A user's name may become an argument, or a part of a file's name, of a helper outside.
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+@-")


class Refused(ValueError):
    """A question that is not answered; the text says why."""


class Question(Record):
    """A question of git's."""

    action: str
    host: str = ""
    port: int = HTTPS_PORT
    username: str = ""

    @property
    def authority(self) -> str:
        """Host and port, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"


def question(data: bytes) -> Question:
    """A whole question, up to where git stops sending."""
    lines = _lines(data)
    if len(lines) < 2 or lines[0][0] != "action" or lines[1][0] != "timeout":
        raise Refused("it is no question of git's")
    action = lines[0][1]
    if action not in ACTIONS:
        raise Refused("it is none of get, store and erase")
    if action != "get":
        return Question(action=action)
    return _get(lines[2:])


def _get(lines: list[tuple[str, str]]) -> Question:
    found = dict(lines)
    again = [name for name in SINGLE if sum(key == name for key, _ in lines) > 1]
    if again:
        raise Refused(f"{again[0]} stands there twice")
    if "url" in found or "action" in found:
        raise Refused("it holds what git does not send")
    if found.get("protocol") != "https":
        raise Refused("only https is answered")
    try:
        host, port = split_host(found.get("host", ""))
    except ValueError as error:
        raise Refused(f"not a host: {error}") from None
    # The path is left out: what is kept outside is asked for by host alone.
    name = found.get("username", "")
    if not NAME_CHARACTERS.issuperset(name) or name.startswith(("-", ".")) or ".." in name:
        raise Refused("the user's name holds more than letters, digits and . _ + @ -")
    return Question(action="get", host=host, port=port or HTTPS_PORT, username=name)


def _lines(data: bytes) -> list[tuple[str, str]]:
    """Lines of `key=value`, without any character that could make two of one."""
    if len(data) > MAX_QUESTION or not data.endswith(b"\n"):
        raise Refused("it is not whole, or too long")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("it is not text") from None
    found = []
    for line in text.removesuffix("\n").removesuffix("\n").split("\n"):
        key, equals, value = line.partition("=")
        # Not isprintable(): names may have blanks of any kind. Controls and separators may not be.
        if not key or not equals or not key.isascii() or not _is_plain(line):
            raise Refused("a line is not key=value, or holds a control character")
        found.append((key, value))
    return found


def _is_plain(text: str) -> bool:
    """No controls, no separators of lines in any encoding, no surrogates."""
    return text.replace("\u00a0", " ").isprintable()


def outside(asked: Question) -> bytes:
    """What `git credential fill` is asked."""
    name = f"username={asked.username}\n" if asked.username else ""
    return f"protocol=https\nhost={asked.authority}\n{name}\n".encode()


def answer(data: bytes, asked: Question) -> bytes:
    """What git inside is told, from what git outside has found."""
    try:
        found = dict(_lines(data.removesuffix(b"\n") + b"\n")) if data else {}
    except Refused as error:
        raise Refused(f"what git outside said is of no use: {error}") from None
    if (found.get("protocol"), found.get("host")) != ("https", asked.authority):
        raise Refused("git outside answered for another host")
    if not found.get("password") or any(len(value) > MAX_VALUE for value in found.values()):
        raise Refused("git outside has no password for it")
    told = (f"{key}={found[key]}\n" for key in ANSWERED if key in found)
    return "".join(told).encode()
