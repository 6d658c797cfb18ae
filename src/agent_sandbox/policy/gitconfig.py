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


# What git takes for blanks (GIT_SPACE in its ctype.c).
BLANKS = " \t\r\n"
# How many texts are kept in mind.
REMEMBERED = 32


class Entry(Record):
    """One `key = value`; a key that stands alone has no value and means true."""

    section: str
    # None: none was written. `[core ""]` has an empty one, and is not `[core]` to git.
    subsection: str | None
    key: str
    value: str
    bare: bool = False

    def name(self) -> str:
        """The key without subsection, as git prints it."""
        return f"{self.section}.{self.key}"


_known: dict[str, list[Entry]] = {}


def entries(text: str) -> list[Entry]:
    """Every assignment of a configuration file, in order. What git would refuse is skipped.

    Remembered for a while: one start asks several questions about the same file.
    """
    found = _known.get(text)
    if found is None:
        if len(_known) >= REMEMBERED:
            _known.clear()
        found = _known[text] = _parsed(text)
    return found.copy()


def _parsed(text: str) -> list[Entry]:
    reader = _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    found: list[Entry] = []
    base = ""
    while not reader.done():
        char = reader.next()
        if char in "#;":
            reader.rest_of_line()
        elif char == "[":
            base = reader.header() + "."
        elif char.isascii() and char.isalpha():
            key = char + reader.while_in(KEY_CHARACTERS)
            reader.while_in(" \t")
            bare = reader.peek() != "="
            if bare:
                reader.rest_of_line()
                value = ""
            else:
                reader.next()
                value = reader.value()
            found.append(_entry(base + key.lower(), value, bare=bare))
        elif char not in BLANKS:
            reader.rest_of_line()
    return found


def _entry(name: str, value: str, *, bare: bool) -> Entry:
    """Split a full name as git does: at its first dot and its last.

    To git both texts end at a NUL: with one after `[core "hookspath`, any key sets core.hookspath.
    """
    section, dot, rest = name.partition("\0")[0].partition(".")
    if not dot:
        section, rest = "", section
    subsection, inner, key = rest.rpartition(".")
    return Entry(
        section=section, subsection=subsection if inner else None, key=key,
        value=value.partition("\0")[0], bare=bare,
    )  # fmt: skip


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

    def header(self) -> str:
        """`[section]`, `[section.sub]` or `[section "sub"]`, after the bracket, as one name."""
        name = self.while_in(KEY_CHARACTERS + ".").lower()
        self.while_in(" \t\r")
        if self.peek() == '"':
            self.next()
            name += "." + self._quoted()
        if self.next() != "]":
            self._at -= 1
            self.rest_of_line()
        return name

    def _quoted(self) -> str:
        out = []
        while (char := self.next()) not in ("", '"', "\n"):
            out.append(self.next() if char == "\\" else char)
        return "".join(out)

    def value(self) -> str:
        """A value up to the end of its last line: quotes, escapes, comments, continuations."""
        out: list[str] = []
        # Blanks outside of quotes count only after the value's first character, and only if
        # something follows: a quote or a continuation will do.
        kept, quoted = 0, False
        while (char := self.next()) not in ("", "\n"):
            if char in BLANKS and not quoted:
                if out:
                    out.append(char)
                continue
            if char in "#;" and not quoted:
                self.rest_of_line()
                break
            if char == '"':
                quoted = not quoted
            elif char == "\\":
                char = self.next()
                if char != "\n":
                    out.append({"n": "\n", "t": "\t", "b": "\b"}.get(char, char))
            else:
                out.append(char)
            kept = len(out)
        return "".join(out[:kept])


def includes(parsed: list[Entry]) -> list[str]:
    """The values of `include.path` and `includeIf.….path`."""
    return [e.value for e in parsed if e.section in ("include", "includeif") and e.key == "path"]


def value_of(parsed: list[Entry], section: str, key: str) -> str | None:
    """The last value of a key without subsection."""
    found = None
    for entry in parsed:
        if entry.section == section and entry.key == key and entry.subsection is None:
            found = entry.value
    return found


def _is_secret(entry: Entry, *, signing: bool) -> bool:
    # Who signs is ssh's own program then: another one would have to be there, and have the key.
    unwanted = entry.name() == "gpg.program" if signing else entry.name() in SIGNING_KEYS
    return (
        unwanted
        or entry.section in SECRET_SECTIONS
        or entry.name() in SECRET_KEYS
        or any(word in entry.key for word in SECRET_WORDS)
        or has_userinfo(entry.subsection or "")
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


def cleaned(text: str, *, signing: bool = False) -> str:
    """A configuration with the same meaning, without credentials; signing only where it works."""
    lines: list[str] = []
    current: tuple[str, str | None] | None = None
    for entry in entries(text):
        if _is_secret(entry, signing=signing) or not entry.section or not _is_key(entry.key):
            continue
        if (entry.section, entry.subsection) != current:
            current = (entry.section, entry.subsection)
            name = "" if entry.subsection is None else f' "{_escaped(entry.subsection)}"'
            lines.append(f"[{entry.section}{name}]")
        lines.append(f"\t{entry.key}" if entry.bare else f'\t{entry.key} = "{_value(entry)}"')
    return "\n".join(lines) + "\n" if lines else ""


def _is_key(text: str) -> bool:
    """Whether a key can be written; one that a NUL has cut out of a subsection need not be."""
    return text[:1].isalpha() and all(c in KEY_CHARACTERS and c == c.lower() for c in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _value(entry: Entry) -> str:
    text = _escaped(entry.value)
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\b", "\\b")
