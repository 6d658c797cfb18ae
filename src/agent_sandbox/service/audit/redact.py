"""What the audit trail must not learn: secrets in commands, values of variables, contents. Pure.

Rules err on the side of hiding. Each works in linear time, since agents choose the text.
"""

from __future__ import annotations

import math
import re

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HIDDEN = "<redacted>"
# Beyond this a text is cut. A little more is looked at, so that no half of a secret stays.
MOST_TEXT, MARGIN = 2048, 512
# Shorter ones fit no rule.
MIN_TEXT = 6
MOST_COMMAND, MOST_WORDS, MOST_ITEMS, MOST_DEPTH = 4096, 256, 64, 4
# Members of a request that are contents: only their names are noted.
CONTENTS = frozenset({
    "stdin", "content", "contentBase64", "body", "data", "headers", "files", "archive", "code",
    "input",
})  # fmt: skip
# Members whose values are names in the trail: {"A": "1"} becomes ["A"].
NAMES_ONLY = frozenset({"env", "environment", "secrets"})

# --- names

# Part of a name that says that its value is a secret.
STRONG = (
    r"passw(?:or)?d|passphrase|secret|token(?!iz|s\b|_?(?:count|limit))|credential|"
    r"api[-_]?key|access[-_]?key|private[-_]?key|account[-_]?key|signing[-_]?key|auth[-_]?key|"
    r"encryption[-_]?key|mysql_pwd|_pwd\b"
)
# Part of a name that says so if the value looks like one.
WEAK = r"key|auth|pass|pwd|sig|session|cookie"
NAME = r"[A-Za-z0-9_.-]"
# A value: quoted, or up to what ends a word in shells, URLs and JSON.
VALUE = r"\"[^\"]*\"?|'[^']*'?|[^\s\"'&;|<>,)}\]]+"
SECRET_NAME = re.compile(rf"(?i){STRONG}")
# Atomic groups: a run of characters is taken once and never given back piece by piece.
SECRET_FLAG = re.compile(rf"(?i)(?>--?{NAME}*?(?:{STRONG}){NAME}*)")
MIN_RANDOM, MIN_ENTROPY = 16, 3.0


class Rule(Record):
    """A pattern and what stays of a match."""

    name: str
    pattern: re.Pattern[str]
    stays: str = HIDDEN


def _rule(name: str, pattern: str, stays: str = HIDDEN) -> Rule:
    return Rule(name=name, pattern=re.compile(pattern), stays=stays)


# In this order. A pattern that begins with a run of characters looks behind first: it is tried
# once per run, not once per character. Otherwise a long word would cost the square of its length.
RULES: tuple[Rule, ...] = (
    _rule("private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*-----)?"),
    _rule("our own token", r"\b(sbx_[a-z2-7]{8})_[A-Za-z0-9_-]+", rf"\1_{HIDDEN}"),
    _rule("header", r"(?i)(?<![a-z0-9-])((?:proxy-)?authorization|(?:set-)?cookie|"
                    r"x-[a-z-]*(?:key|token)|private-token)(\s*:\s*)[^\r\n\"']+", rf"\1\2{HIDDEN}"),
    _rule("scheme", r"(?i)\b(bearer|basic|digest|negotiate)(\s+)[A-Za-z0-9._~+/=-]{8,}",
          rf"\1\2{HIDDEN}"),
    _rule("user and password in a URL",
          r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)[^/\s:@\"']*:[^/\s@\"']*@",
          rf"\1{HIDDEN}@"),
    _rule("token in a URL", r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)[^/\s:@\"']{16,}@",
          rf"\1{HIDDEN}@"),
    _rule("named value",
          rf"(?i)(?<!{NAME})((?>{NAME}*?(?:{STRONG}){NAME}*)[\"']?\s*[=:]\s*)(?:{VALUE})",
          rf"\1{HIDDEN}"),
    _rule("flag and value", rf"(?i)(?<!\S)((?>--?{NAME}*?(?:{STRONG}){NAME}*)\s+)(?:{VALUE})",
          rf"\1{HIDDEN}"),
    _rule("AWS", r"\b(?:AKIA|ASIA|AGPA|AROA|AIDA)[A-Z0-9]{16}\b"),
    _rule("GitHub", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
    _rule("GitLab", r"\bgl(?:pat|ptt|dt|rt|cbt|ft|soat)-[A-Za-z0-9_-]{16,}"),
    _rule("Slack", r"\bxox[a-z]-[A-Za-z0-9-]{10,}"),
    _rule("model providers", r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),
    _rule("Stripe", r"\b(?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}"),
    _rule("Google", r"\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,})"),
    _rule("package registries", r"\b(?:npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{16,}|"
                                r"hf_[A-Za-z0-9]{20,}|dckr_pat_[A-Za-z0-9_-]{16,})"),
    _rule("clouds", r"\b(?:dop_v1_[a-f0-9]{32,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|"
                    r"hvs\.[A-Za-z0-9_-]{16,}|AGE-SECRET-KEY-1[A-Z0-9]{20,})"),
    _rule("JSON web token", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
                            r"(?:\.[A-Za-z0-9_-]*)?"),
)  # fmt: skip
# No rule can match a text that has none of these, in whatever case: most texts end here.
HINTS = tuple(
    "pass pwd secret token cred key auth sig session cookie private bearer basic digest negotiate "
    ":// sbx_ akia asia agpa aroa aida ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glptt- gldt- "
    "glrt- glcbt- glft- glsoat- xox sk- pk- rk- sk_ pk_ rk_ whsec_ aiza ya29. npm_ pypi- hf_ "
    "dckr_pat_ dop_v1_ sg. hvs. eyj".split()
)
RANDOM = re.compile(
    rf"(?i)(?<!{NAME})((?>{NAME}*?(?:{WEAK}){NAME}*)[\"']?\s*[=:]\s*[\"']?)"
    r"([A-Za-z0-9+/_=.~-]{16,})"
)

# Programs, their flags whose value is a secret, whether it is the next word or glued to the flag,
# and the word that must come before: `docker run -p 80:80` publishes a port.
NEXT, GLUED = "next", "glued"
_BOTH = (NEXT, GLUED)
_PROGRAMS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("mysql mysqldump mysqladmin mariadb mariadb-dump 7z 7za", "-p", (GLUED,), ""),
    ("sshpass mongo mongosh mongodump mongorestore", "-p", _BOTH, ""),
    ("docker podman nerdctl helm az", "-p", _BOTH, "login"),
    ("zip unzip", "-P", _BOTH, ""),
    ("ldapsearch ldapmodify ldapadd", "-w", _BOTH, ""),
    ("curl", "-u", _BOTH, ""),
    ("curl wget", "--user --proxy-user", (NEXT,), ""),
    ("smbclient", "-U", _BOTH, ""),
    ("redis-cli http https", "-a", (NEXT,), ""),
    ("openssl", "-pass -passin -passout -k -K", (NEXT,), ""),
)
# Program → flag → how; program → the word before.
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {}
ONLY_AFTER: dict[str, str] = {}
for _programs, _names_of_flags, _ways, _after in _PROGRAMS:
    for _program in _programs.split():
        PROGRAMS.setdefault(_program, {}).update(dict.fromkeys(_names_of_flags.split(), _ways))
        ONLY_AFTER[_program] = _after


def argv(words: Sequence[str]) -> list[str]:
    """A command without its secrets, cut where it is long."""
    kept: list[str] = []
    room = MOST_COMMAND
    for word in words[:MOST_WORDS]:
        if room <= 0:
            break
        kept.append(word[: MOST_TEXT + MARGIN])
        room -= len(kept[-1])
    left_out = len(words) - len(kept)
    clean = [cut(_clean(word), word) for word in _flags(kept)]
    return [*clean, f"[{left_out} more words]"] if left_out else clean


def text(value: str) -> str:
    """A text without its secrets: a command for a shell, a reason, a path."""
    return cut(_clean(value[: MOST_TEXT + MARGIN]), value)


def _clean(part: str) -> str:
    part = _patterns(part)
    if " -" not in part:
        return part
    # After the patterns: they know that what is between quotes is one word.
    pieces = re.split(r"(\s+)", part)
    spaces = [*pieces[1::2], ""]
    words = zip(_flags(pieces[::2]), spaces, strict=True)
    return "".join(one for pair in words for one in pair)


def cut(clean: str, whole: str) -> str:
    """A text that fits, with a note of what does not."""
    if len(whole) <= MOST_TEXT and len(clean) <= MOST_TEXT:
        return clean
    return f"{clean[:MOST_TEXT]}[{len(whole)} characters]"


def request(values: Mapping[str, object], depth: int = MOST_DEPTH) -> dict[str, object]:
    """A request for the trail: no contents, no values of variables, no secrets."""
    found: dict[str, object] = {}
    hidden: list[str] = []
    for name, value in list(values.items())[:MOST_ITEMS]:
        if name in CONTENTS:
            hidden.append(name)
        elif name in NAMES_ONLY:
            hidden.append(name)
            found[name] = _names(value)
        elif isinstance(value, str) and SECRET_NAME.search(name):
            hidden.append(name)
        else:
            found[name] = _value(value, depth)
    if hidden:
        found["redacted"] = sorted(hidden)
    return found


def _names(value: object) -> object:
    if isinstance(value, dict):
        return sorted(str(name)[:MARGIN] for name in value)[:MOST_ITEMS]
    if isinstance(value, (list, tuple)):
        return [str(item).partition("=")[0][:MARGIN] for item in value[:MOST_ITEMS]]
    return HIDDEN


def _value(value: object, depth: int) -> object:
    # Infinity and its like are not JSON.
    if value is None or isinstance(value, int) or (isinstance(value, float) and value - value == 0):
        return value
    if isinstance(value, (list, tuple)) and depth:
        if all(isinstance(item, str) for item in value):
            return argv([str(item) for item in value])
        return [_value(item, depth - 1) for item in value[:MOST_ITEMS]]
    if isinstance(value, dict) and depth:
        return request({str(name)[:MARGIN]: one for name, one in value.items()}, depth - 1)
    return text(str(value)) if isinstance(value, (str, float)) else HIDDEN


def _flags(words: Sequence[str]) -> list[str]:
    """Values of secret flags: of any program by the flag's name, of some by the program."""
    found: list[str] = []
    flags: dict[str, tuple[str, ...]] = {}
    after, hide_next = "", False
    for word in words:
        if hide_next and word:
            word, hide_next = HIDDEN, False  # noqa: PLW2901
        elif word.startswith("-"):
            word, hide_next = _flag(word, {} if after else flags)  # noqa: PLW2901
        elif (base := word.rpartition("/")[2]) in PROGRAMS:
            flags, after = PROGRAMS[base], ONLY_AFTER[base]
        elif word == after:
            after = ""
        found.append(word)
    return found


def _flag(word: str, flags: Mapping[str, tuple[str, ...]]) -> tuple[str, bool]:
    """A flag without a value that is glued to it, and whether the next word is its value."""
    for flag, ways in flags.items():
        if word == flag:
            return word, NEXT in ways
        if GLUED in ways and word.startswith(flag) and not word.startswith("--"):
            return flag + HIDDEN, False
    return word, bool(SECRET_FLAG.fullmatch(word))


def _may_hide(value: str) -> bool:
    if len(value) < MIN_TEXT:
        return False
    lower = value.lower()
    return any(hint in lower for hint in HINTS)


def _patterns(value: str) -> str:
    if not _may_hide(value):
        return value
    for rule in RULES:
        value = rule.pattern.sub(rule.stays, value)
    return RANDOM.sub(_random, value)


def _random(match: re.Match[str]) -> str:
    return match[1] + (HIDDEN if looks_random(match[2]) else match[2])


def looks_random(value: str) -> bool:
    """Whether a value is long and mixed: a key, not a word or a path."""
    if len(value) < MIN_RANDOM:
        return False
    kinds = sum(any(map(test, value)) for test in (str.isdigit, str.islower, str.isupper))
    total = len(value)
    entropy = -sum(n / total * math.log2(n / total) for n in map(value.count, set(value)))
    return kinds >= 2 and entropy >= MIN_ENTROPY
