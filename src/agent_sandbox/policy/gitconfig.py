"""Git configuration as text: its includes, its control values, and a copy without credentials.

Pure. Knows git's file syntax (`git help config`, "Syntax") as far as needed: sections, subsections
in quotes, `key = value`, comments, continuation lines.
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


class Entry(Record):
    """One `key = value` with the lines that it occupies."""

    section: str
    subsection: str
    key: str
    value: str
    first: int
    last: int

    def name(self) -> str:
        """The key without subsection, as git prints it."""
        return f"{self.section}.{self.key}"


def entries(text: str) -> list[Entry]:
    """Every assignment of a configuration file, in order; other lines are skipped."""
    found = []
    section = subsection = ""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index].strip()
        first = index
        if line.startswith("["):
            section, subsection, line = _header(line)
        if line and line[0] not in "#;":
            value = line
            while value.endswith("\\") and index + 1 < len(lines):
                index += 1
                value = value[:-1] + lines[index].strip()
            key, _, written = value.partition("=")
            found.append(
                Entry(
                    section=section,
                    subsection=subsection,
                    key=key.strip().lower(),
                    value=_unquote(written.strip()),
                    first=first,
                    last=index,
                )
            )
        index += 1
    return found


def _header(line: str) -> tuple[str, str, str]:
    """Parse `[section "sub"] rest`."""
    closing = -1
    quoted = escaped = False
    for i, char in enumerate(line):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif char == "]" and not quoted:
            closing = i
            break
    if closing < 0:
        return "", "", ""
    inner, rest = line[1:closing], line[closing + 1 :].strip()
    name, _, sub = inner.partition('"')
    section, _, dotted = name.strip().lower().partition(".")
    return section, sub.rstrip('"') if sub else dotted, rest


def _unquote(value: str) -> str:
    """A value without quotes, escapes and trailing comment."""
    out = []
    quoted = False
    i = 0
    while i < len(value):
        char = value[i]
        if char == "\\" and i + 1 < len(value):
            i += 1
            out.append({"n": "\n", "t": "\t", "b": "\b"}.get(value[i], value[i]))
        elif char == '"':
            quoted = not quoted
        elif char in "#;" and not quoted:
            break
        else:
            out.append(char)
        i += 1
    return "".join(out).strip() if not quoted else "".join(out)


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
    name = entry.name()
    return (
        entry.section in SECRET_SECTIONS
        or name in SECRET_KEYS
        or name in SIGNING_KEYS
        or any(word in entry.key for word in SECRET_WORDS)
        or _has_userinfo(entry.subsection)
        or _has_userinfo(entry.value)
    )


def _has_userinfo(url: str) -> bool:
    """Whether `scheme://user:password@host` or a bare token before `@` stands in a URL."""
    scheme, found, rest = url.partition("://")
    userinfo, at, _ = rest.split("/", 1)[0].rpartition("@")
    return bool(found and at and (":" in userinfo or scheme.lower().endswith(("http", "https"))))


def cleaned(text: str) -> str | None:
    """The text without credentials and signing; None when there was nothing to take out."""
    drop: set[int] = set()
    lines = text.splitlines()
    for entry in entries(text):
        if _is_secret(entry):
            for index in range(entry.first, entry.last + 1):
                # A header may share its line with an assignment; the header itself must stay,
                # or what follows would land in the section before it.
                if lines[index].lstrip().startswith("[") and not _has_userinfo(lines[index]):
                    lines[index] = lines[index].partition("]")[0] + "]"
                else:
                    drop.add(index)
    for index, line in enumerate(lines):
        if line.lstrip().startswith("[") and _has_userinfo(line):
            lines[index] = "[removed]"
            drop.discard(index)
    result = [line for index, line in enumerate(lines) if index not in drop]
    return None if result == text.splitlines() else "\n".join(result) + "\n"
