"""Git configuration as text: its includes, its control values, and a copy without credentials.

Pure. Reads as git does (config.c), character by character, so that no spelling is one thing to us
and another to git. What the sandbox gets to read is written anew from what was understood here;
comments and everything else stay outside.
"""

from __future__ import annotations

from ..record import Record

# Keys whose value is a secret or fetches one. Compared in lower case, without the subsection.
SECRET_KEYS: frozenset[str] = frozenset(
    {
        "http.extraheader", "http.cookiefile", "http.sslkey", "http.sslcertpasswordprotected",
        "http.proxyauthmethod", "sendemail.smtppass", "imap.pass", "svn-remote.password",
        "user.password", "user.token", "github.token", "gitlab.token", "github.oauth-token",
    }
)  # fmt: skip
# Sections that name programs or stores which hold credentials; nothing of them works inside.
SECRET_SECTIONS: frozenset[str] = frozenset({"credential", "hub", "sendemail", "imap"})
SECRET_WORDS = ("token", "password", "passwd", "secret", "apikey", "api-key")
# Signing needs keys that are not inside: with these left on, every commit would fail.
SIGNING_KEYS: frozenset[str] = frozenset(
    {"commit.gpgsign", "tag.gpgsign", "tag.forcesignannotated", "push.gpgsign"}
)
KEY_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"


class Entry(Record):
    """One `key = value`; a key that stands alone has no value and means true."""

    section: str
    subsection: str
    key: str
    value: str
    bare: bool = False

    def name(self) -> str:
        """The key without subsection, as git prints it."""
        return f"{self.section}.{self.key}"


def entries(text: str) -> list[Entry]:
    """Every assignment of a configuration file, in order. What git would refuse is skipped."""
    reader = _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    found: list[Entry] = []
    section = subsection = ""
    while not reader.done():
        char = reader.next()
        if char in "#;":
            reader.rest_of_line()
        elif char == "[":
            section, subsection = reader.header()
        elif char.isascii() and char.isalpha():
            key = char + reader.while_in(KEY_CHARACTERS)
            reader.while_in(" \t")
            bare = reader.peek() != "="
            if not bare:
                reader.next()
            value = "" if bare else reader.value()
            if bare:
                reader.rest_of_line()
            found.append(
                Entry(
                    section=section, subsection=subsection, key=key.lower(), value=value, bare=bare
                )
            )
        elif char not in " \t\n":
            reader.rest_of_line()
    return found


class _Reader:
    """A cursor over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def done(self) -> bool:
        return self._at >= len(self._text)

    def peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def next(self) -> str:
        char = self.peek()
        self._at += 1
        return char

    def while_in(self, allowed: str) -> str:
        start = self._at
        while self.peek() and self.peek() in allowed:
            self._at += 1
        return self._text[start : self._at]

    def rest_of_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end + 1

    def header(self) -> tuple[str, str]:
        """`[section]`, `[section.sub]` or `[section "sub"]`, after the bracket."""
        name = self.while_in(KEY_CHARACTERS + ".")
        section, _, subsection = name.lower().partition(".")
        self.while_in(" \t")
        if self.peek() == '"':
            self.next()
            subsection = self._quoted()
        if self.next() != "]":
            self._at -= 1
            self.rest_of_line()
        return section, subsection

    def _quoted(self) -> str:
        out = []
        while (char := self.next()) not in ("", '"', "\n"):
            out.append(self.next() if char == "\\" else char)
        return "".join(out)

    def value(self) -> str:
        """A value up to the end of its last line: quotes, escapes, comments, continuations."""
        out: list[str] = []
        # Blanks count only between characters, unless they are quoted.
        pending, quoted = "", False
        self.while_in(" \t")
        while (char := self.next()) not in ("", "\n"):
            if char in " \t\r" and not quoted:
                pending += char
                continue
            if char in "#;" and not quoted:
                self.rest_of_line()
                break
            if char == '"':
                quoted = not quoted
                continue
            if char == "\\":
                char = self.next()
                if char == "\n":
                    continue
                char = {"n": "\n", "t": "\t", "b": "\b"}.get(char, char)
            out += (pending, char)
            pending = ""
        return "".join(out)


def includes(parsed: list[Entry]) -> list[str]:
    """The values of `include.path` and `includeIf.….path`."""
    return [e.value for e in parsed if e.section in ("include", "includeif") and e.key == "path"]


def value_of(parsed: list[Entry], section: str, key: str) -> str | None:
    """The last value of a key without subsection."""
    found = None
    for entry in parsed:
        if entry.section == section and entry.key == key and not entry.subsection:
            found = entry.value
    return found


def _is_secret(entry: Entry) -> bool:
    return (
        entry.section in SECRET_SECTIONS
        or entry.name() in SECRET_KEYS
        or entry.name() in SIGNING_KEYS
        or any(word in entry.key for word in SECRET_WORDS)
        or has_userinfo(entry.subsection)
        or has_userinfo(entry.value)
    )


def has_userinfo(text: str) -> bool:
    """Whether a password, or a token in its place, stands before an `@` in any word of the text."""
    for word in text.split():
        scheme, has_scheme, rest = word.rpartition("://")
        userinfo, at, _ = (rest if has_scheme else word).split("/", 1)[0].rpartition("@")
        if at and (":" in userinfo or scheme.lower().endswith(("http", "https"))):
            return True
    return False


def cleaned(text: str) -> str:
    """A configuration with the same meaning, without credentials and signing."""
    lines: list[str] = []
    current: tuple[str, str] | None = None
    for entry in entries(text):
        if _is_secret(entry) or not entry.section:
            continue
        if (entry.section, entry.subsection) != current:
            current = (entry.section, entry.subsection)
            name = f' "{_escaped(entry.subsection)}"' if entry.subsection else ""
            lines.append(f"[{entry.section}{name}]")
        lines.append(f"\t{entry.key}" if entry.bare else f'\t{entry.key} = "{_value(entry)}"')
    return "\n".join(lines) + "\n" if lines else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _value(entry: Entry) -> str:
    text = _escaped(entry.value)
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\b", "\\b")
