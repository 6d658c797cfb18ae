"""Dockerfiles: every instruction is read, checked and written anew, one to a line.

The engine gets what was checked, not what was sent, so that two readings of one file cannot differ.
Images are named by id: the builder never pulls, and no tag can move in between.
"""

from __future__ import annotations

import re

from ...record import Record
from . import networking, slots
from .create import DEVICE_VARIABLES
from .labels import check
from .schema import Site
from .values import Reference, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .slots import Lookup, Slot
    from .values import Grants

MAX_DOCKERFILE = 1 << 20
MAX_LINE = 60_000
INSTRUCTIONS = frozenset((
    "FROM", "RUN", "CMD", "LABEL", "MAINTAINER", "EXPOSE", "ENV", "ADD", "COPY", "ENTRYPOINT",
    "VOLUME", "USER", "WORKDIR", "ARG", "ONBUILD", "STOPSIGNAL", "HEALTHCHECK", "SHELL",
))  # fmt: skip
NOT_ON_BUILD = frozenset(("FROM", "ONBUILD", "MAINTAINER"))
CONTINUED = re.compile(r"^(.*?)(\\+)[ \t]*$", re.DOTALL)
ESCAPE = re.compile(r"#\s*escape\s*=", re.IGNORECASE)
VARIABLE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^}$]*))?\})"
)
STAGE = re.compile(r"[a-z][a-z0-9_.-]{0,127}")
FLAG = re.compile(r"--([a-z]+)=(\S*)")
KEY = re.compile(r"[A-Za-z0-9_./-]+")


class Line(Record):
    """One instruction: text around images that are looked up."""

    keyword: str
    before: str
    image: Slot | None = None
    after: str = ""


class Dockerfile:
    """A Dockerfile that has been checked."""

    def __init__(self, content: bytes, grants: Grants, arguments: Mapping[str, object]) -> None:
        self.grants = grants
        self.given = {k: v for k, v in arguments.items() if isinstance(v, str)}
        self.known: dict[str, str] = {}
        self.stages: list[str] = []
        self.count = 0
        self.lines = [self._instruction(*one) for one in instructions(content)]
        if not self.count:
            raise Refused("build.from", "the Dockerfile has no FROM", 400)

    def references(self) -> tuple[Reference, ...]:
        """The images to look up."""
        found = [r for line in self.lines if line.image for r in line.image.references]
        return tuple(dict.fromkeys(found))

    def render(self, found: Lookup) -> bytes:
        """The new text."""
        texts = []
        for line in self.lines:
            name = str(slots.resolve(line.image, self.grants, found)) if line.image else ""
            texts.append(f"{line.keyword} {line.before}{name}{line.after}")
        return ("\n".join(texts) + "\n").encode("utf-8", "surrogateescape")

    def _instruction(self, keyword: str, rest: str) -> Line:
        if keyword == "FROM":
            return self._from(rest)
        if keyword == "ARG" and not self.count:
            self._argument(rest)
        if keyword == "ONBUILD":
            word, _, inner = rest.partition(" ")
            if word.upper() not in INSTRUCTIONS - NOT_ON_BUILD:
                raise Refused("build.onbuild", f"ONBUILD {word[:20]} is not offered")
            self._check(word.upper(), inner.strip())
            if word.upper() in ("COPY", "ADD") and "--from" in inner:
                raise Refused("build.onbuild", "ONBUILD COPY --from is not offered")
            return Line(keyword=keyword, before=f"{word.upper()} {inner.strip()}")
        self._check(keyword, rest)
        if keyword == "COPY":
            return self._copy(rest)
        return Line(keyword=keyword, before=rest)

    def _check(self, keyword: str, rest: str) -> None:
        if keyword == "RUN" and rest.startswith("--"):
            raise Refused("build.run-option", "options of RUN need BuildKit, which is not offered")
        if keyword == "ADD" and not networking.is_open(self.grants):
            _check_add(rest)
        if keyword in ("LABEL", "ENV"):
            for key in keys(keyword, rest):
                self._check_key(keyword, key)

    def _check_key(self, keyword: str, key: str) -> None:
        if keyword == "LABEL":
            check(Site(self.grants, "build", rule="build.label"), key, "")
        elif key.upper().startswith(DEVICE_VARIABLES):
            raise Refused("build.env", "variables that ask a runtime for devices are not set")

    def _argument(self, rest: str) -> None:
        """ARG before the first FROM: the only variables that FROM can use."""
        name, equals, default = rest.partition("=")
        value = self.given.get(name)
        if value is None:
            if not equals:
                return
            value = self._expand(default.strip().strip("\"'"))
        self.known[name] = value

    def _expand(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            return self.known.get(match[1] or match[2]) or match[3] or ""

        expanded = VARIABLE.sub(value, text)
        if "$" in expanded or "\\" in expanded:
            raise Refused("build.from", f"{text[:80]!r} is too involved to be checked", 400)
        return expanded

    def _from(self, rest: str) -> Line:
        words = rest.split()
        options = ""
        if words and (match := FLAG.fullmatch(words[0])):
            if match[1] != "platform" or not re.fullmatch(r"[a-z0-9/_]+", match[2]):
                raise Refused("build.from", f"{words[0][:40]!r} is not offered", 400)
            options = f"{words.pop(0)} "
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise Refused("build.from", "not FROM IMAGE [AS NAME]", 400)
        image = self._expand(words[0].strip("\"'"))
        after = ""
        if len(words) == 3:
            after = f" AS {self._stage(words[2])}"
        known = image.lower() in self.stages
        if len(words) == 3:
            self.stages.append(words[2].lower())
        self.count += 1
        if known or image == "scratch":
            return Line(keyword="FROM", before=f"{options}{image}", after=after)
        slot = slots.image(image, self.grants)
        return Line(keyword="FROM", before=options, image=slot, after=after)

    def _stage(self, name: str) -> str:
        if not STAGE.fullmatch(name.lower()):
            raise Refused("build.from", f"{name[:40]!r} is not the name of a stage", 400)
        return name

    def _copy(self, rest: str) -> Line:
        """COPY --from: an earlier stage by name or number, or an image."""
        words = rest.split(" ")
        for index, word in enumerate(words):
            match = FLAG.fullmatch(word)
            if match is None:
                break
            if match[1] != "from":
                continue
            name = match[2]
            stage = name.isdecimal() and name.isascii() and int(name) < self.count
            if stage or name.lower() in self.stages:
                return Line(keyword="COPY", before=rest)
            before = " ".join([*words[:index], "--from="])
            after = " " + " ".join(words[index + 1 :])
            if "--from" in after.partition(" /")[0]:
                raise Refused("build.copy", "--from is given twice", 400)
            slot = slots.image(name, self.grants)
            return Line(keyword="COPY", before=before, image=slot, after=after)
        if "--from" in rest:
            # Behind a blank that is no space, or not where an option stands.
            raise Refused("build.copy", "--from must be the first option of COPY", 400)
        return Line(keyword="COPY", before=rest)


def _check_add(rest: str) -> None:
    """The engine would fetch it from the host's network, whatever the build's network is."""
    lowered = rest.lower()
    if any(sign in lowered for sign in ("://", "$", "\\", "git@")):
        raise Refused("build.add", "ADD of an address is not offered without the host's network")


def instructions(content: bytes) -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, continuation lines joined, comments gone."""
    if len(content) > MAX_DOCKERFILE:
        raise Refused("build.size", f"the Dockerfile is larger than {MAX_DOCKERFILE} bytes", 413)
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    if any(char < " " and char not in "\n\r\t" for char in text):
        raise Refused("build.text", "the Dockerfile has control characters", 400)
    found: list[tuple[str, str]] = []
    held = ""
    for raw in text.split("\n"):
        line = raw.rstrip("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            if ESCAPE.match(line.strip()):
                raise Refused("build.escape", "another escape character is not offered")
            continue
        line = line if held else line.lstrip()
        match = CONTINUED.match(line)
        if match is None:
            found.append(_split(held + line))
            held = ""
        elif len(match[2]) > 1:
            raise Refused("build.escape", "two backslashes at the end of a line", 400)
        else:
            held += match[1]
    if held.strip():
        found.append(_split(held))
    return found


def _split(line: str) -> tuple[str, str]:
    words = line.strip(" \t\r").split(None, 1)
    keyword = words[0].upper() if words else ""
    rest = words[1].strip(" \t\r") if len(words) > 1 else ""
    if keyword not in INSTRUCTIONS or not rest:
        raise Refused("build.instruction", f"{keyword[:20]!r} is not an instruction", 400)
    if len(line) > MAX_LINE or "\r" in rest or rest.endswith("\\"):
        raise Refused("build.line", "a line that the builder would not take", 400)
    return keyword, rest


def keys(keyword: str, rest: str) -> list[str]:
    """The names that LABEL or ENV set: `a=b c="d e"`, or `a b` for one."""
    first = rest.split(None, 1)[0]
    if "=" not in first:
        return [_key(keyword, first)]
    return [_key(keyword, word.partition("=")[0]) for word in _words(keyword, rest)]


def _key(keyword: str, key: str) -> str:
    plain = key[1:-1] if len(key) > 1 and key[0] == key[-1] == '"' else key
    if not KEY.fullmatch(plain):
        raise Refused(f"build.{keyword.lower()}", f"{key[:40]!r} is not a plain name", 400)
    return plain


def _words(keyword: str, text: str) -> list[str]:
    """Words as the builder splits them: at blanks outside of quotes, a backslash keeps the next."""
    words: list[str] = []
    word, quote, kept = "", "", False
    for char in text:
        if kept:
            word, kept = word + char, False
        elif char == "\\" and quote != "'":
            word, kept = word + char, True
        elif quote:
            word += char
            quote = "" if char == quote else quote
        elif char in "\"'":
            word, quote = word + char, char
        elif char in " \t":
            words, word = ([*words, word] if word else words), ""
        else:
            word += char
    if quote or kept:
        raise Refused(f"build.{keyword.lower()}", "a quote is not closed", 400)
    return [*words, word] if word else words
