"""Policy files: any bytes are a layer or our own error, in every format, and in bounded time."""

from __future__ import annotations

import json
import os
import time
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.host import files
from agent_sandbox.policy import settings
from agent_sandbox.policy.decode import decode
from agent_sandbox.policy.merge import merge
from agent_sandbox.policy.model import PROJECT, Layer

from .bound import attempt, fuzz
from .mutation import mutated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SUFFIXES = st.sampled_from(files.SUFFIXES)

DOCUMENTS = (
    'profile = "claude"\nnetwork = "off"\nhome = "ephemeral"\n',
    '[filesystem]\npresets = ["!@lint/all"]\nro = ["vendor", "~/x"]\nrw = ["build/*"]\n',
    'filesystem.exclude = [".env*", "**/secret"]\n[env]\nkeep = ["EDITOR"]\n',
    '[env]\nset = { CI = "1", "a-b" = \'x\' }\n[limits]\nmemory = "4G"\npids = 0x200\n',
    '[limits]\ntimeout = 1_0.5e1\n"cpu-time" = "2h"\n',
    'network.a.b."c d".e = 1\n[[filesystem]]\nro = """\nx\\u0041"""""\n# c\n',
    "[limits]\npids = 1979-05-27\n",
    '{"network": false, "filesystem": {"ro": ["a", "b"], "exclude": ["\\ud83d\\ude00"]}}',
    '{\n  // one\n  "docker": "off", /* two */\n  "limits": {"memory": 1e9, "pids": 64,},\n}\n',
    '{"env": {"set": {"A": "\\u0000", "B": "\\ud800"}, "keep": []}, "limits": {"timeout": NaN}}',
)
PIECES = (
    "\0", "\ufeff", "\r", "\x85", "\u2028", "\\ud800", "\\U0010FFFF", "NaN", "-Infinity", "1e999",
    "0x" + "f" * 4000, "9" * 400, "[" * 60, "{" * 60, "[[", "]]", "a." * 40, '"""', "'''", "//",
    "/*", "*/", ",,", "inf", "07:32:00", "1979-05-27T00:00:00+23:59", "\\", '"', "=", "true",
    "filesystem", "limits", "env", "network", "profile", "presets", "@all", "!@base", "~",
)  # fmt: skip

# More digits than int() takes; TOML's hexadecimal form has no such limit.
LONG = 1 << 20000
LONGS = st.just(20000).map(lambda bits: 1 << bits)
WORDS = st.one_of(
    st.sampled_from([row.key.rpartition(".")[2] for row in settings.ROWS]),
    st.sampled_from([*settings.SECTIONS, "HOME", "PATH", "", "a.b", "\0", "=", "é"]),
    st.text(max_size=6),
)
SCALARS = st.one_of(
    st.booleans(), st.integers(), LONGS, st.floats(), st.text(max_size=8), st.none(), st.dates(),
    st.sampled_from(("on", "off", "private", "4G", "1e3", "10m", ".", "1.", "@all", "!@host")),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)
TABLES = st.dictionaries(WORDS, st.one_of(VALUES, st.dictionaries(WORDS, VALUES)), max_size=5)


def outcome(call: Callable[[], Layer]) -> Layer | None:
    """A layer that the rest can use, or None for an error of ours."""
    layer = attempt(call, PolicyError)
    if isinstance(layer, SandboxError):
        return None
    usable(layer)
    return layer


def usable(layer: Layer) -> None:
    """Whatever was accepted can be handed to the kernel, and merges or is refused."""
    for setting in layer.values.values():
        for text in texts(setting.value):
            assert "\0" not in text
            os.fsencode(text)
    attempt(lambda: merge([layer], project="/p", home="/home/u", command="x", env={}), PolicyError)


def texts(value: object) -> list[str]:
    """Every string in a decoded value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in texts(item)]
    if isinstance(value, (tuple, list)):
        return [text for item in value for text in texts(item)]
    return []


@fuzz(300, raw=st.binary(max_size=64), suffix=SUFFIXES)
def test_any_bytes_are_a_layer_or_our_error(tmp_path: Path, raw: bytes, suffix: str) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_bytes(raw)
    outcome(lambda: files.read(str(file), PROJECT))


@fuzz(600, text=mutated(DOCUMENTS, PIECES), suffix=SUFFIXES)
def test_any_change_to_a_document_is_a_layer_or_our_error(
    tmp_path: Path, text: str, suffix: str
) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(lambda: files.read(str(file), PROJECT))


@fuzz(250, data=st.one_of(TABLES, VALUES))
def test_any_structure_is_a_layer_or_our_error(data: object) -> None:
    outcome(lambda: decode(data, rank=PROJECT, file="f"))


def as_toml(value: object) -> str:
    """A value as TOML, dates and long numbers included."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return hex(value) if value >= 0 else str(value)
    return str(value) if isinstance(value, (float, date)) else key(str(value))


def key(text: str) -> str:
    """A quoted TOML string; JSON's escapes are TOML's, but for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


PLAIN = st.recursive(
    st.one_of(st.booleans(), st.integers(-(10**9), 10**20), LONGS, st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)


@fuzz(
    300,
    data=st.dictionaries(
        WORDS, st.one_of(PLAIN, st.dictionaries(WORDS, PLAIN, max_size=3)), max_size=4
    ),
)
def test_toml_and_json_mean_the_same(data: dict[str, Any]) -> None:
    """What one format accepts, the other accepts, with the same values."""

    def read(text: str, name: str) -> Layer | None:
        return outcome(lambda: decode(files.parse(text, name), rank=PROJECT, file="f"))

    toml = "".join(f"{key(name)} = {as_toml(value)}\n" for name, value in data.items())
    plain = json.dumps(data, default=str) if not has_long(data) else None
    one = read(toml, "x.toml")
    if plain is not None:
        other = read(plain, "x.json")
        assert (one and one.values) == (other and other.values)


def has_long(value: object) -> bool:
    """Whether a number is in it that has no decimal form in Python."""
    if isinstance(value, dict):
        return any(has_long(item) for item in value.values())
    if isinstance(value, list):
        return any(has_long(item) for item in value)
    return isinstance(value, int) and value >= LONG


BLANKS = st.sampled_from(("", " ", "\n", '/* " */', "// ]\n", "/**/", "/*\n*/"))


@fuzz(200, data=VALUES.filter(lambda v: not has_long(v)), blanks=st.lists(BLANKS, min_size=1))
def test_comments_change_nothing(data: object, blanks: list[str]) -> None:
    """Comments between any two tokens, and plain JSON, mean what JSON means."""
    plain = json.dumps(data, default=str)
    expected = repr(json.loads(plain))
    assert repr(json.loads(files.strip_comments(plain))) == expected
    noisy = "".join(blanks[turn % len(blanks)] + token for turn, token in enumerate(tokens(plain)))
    assert repr(json.loads(files.strip_comments(noisy))) == expected


def tokens(text: str) -> list[str]:
    """JSON as tokens."""
    found: list[str] = []
    i = 0
    while i < len(text):
        end = i + 1
        if text[i] == '"':
            while text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            end += 1
        elif text[i] not in "[]{},: ":
            while end < len(text) and text[end] not in "[]{},: ":
                end += 1
        found.append(text[i:end])
        i = end
    return found


@pytest.mark.parametrize(
    "text", ["[,]", "{,}", '{"a":,}', "[1,,]", "1/**/2", "tr/**/ue", "[1/**/2]", ",1", "[1],"]
)
def test_cannot_say_something_else_with_a_comma_or_a_comment(text: str) -> None:
    """Only one comma after a value is left out, and a comment separates."""
    with pytest.raises(PolicyError):
        files.parse(text, "x.jsonc")


def big(piece: str, head: str = "", tail: str = "") -> str:
    """A document of nearly a MiB."""
    count = (files.MAX_BYTES - len(head) - len(tail) - 1) // len(piece)
    return head + piece * count + tail


HUGE = {
    "dotted-key": ("toml", big(".a", "a", "=1")),
    "dotted-header": ("toml", big(".a", "[a", "]")),
    "dotted-in-braces": ("toml", big(".a", 'x = {b = """y"""", a', '=1, c=""}')),
    "dotted-quoted": ("toml", big(".'='", "a", "=1")),
    "dotted-lines": ("toml", big("a" + ".a" * 70 + "=1\n")),
    "shallow-keys": ("toml", big("a.b.c.d.e=1\n")),
    "brackets": ("toml", big("[", "a=")),
    "braces": ("toml", big("{a=", "a=")),
    "headers": ("toml", big("[a]\n")),
    "array-headers": ("toml", big("[[a]]\n")),
    "quotes": ("toml", big('"')),
    "multi-line": ("toml", big("\\\n", 'a="""', '"""')),
    "digits": ("toml", big("1", "a=")),
    "hexadecimal": ("toml", big("f", "[limits]\npids=0x")),
    "json-brackets": ("json", big("[")),
    "json-objects": ("json", big('{"a":')),
    "json-digits": ("json", big("1")),
    "comments": ("jsonc", big("/**/")),
    "comment-starts": ("jsonc", big("/*")),
    "slashes": ("jsonc", big("//\n")),
    "commas": ("jsonc", big(",\n", "[1", "]")),
    "json-quotes": ("jsonc", big('"')),
    "patterns": ("json", big('"*",', '{"filesystem":{"ro":[', '"x"]}}')),
    "one-pattern": ("json", big("*", '{"filesystem":{"ro":["', '"]}}')),
    "classes": ("json", big("[a]", '{"filesystem":{"ro":["', '"]}}')),
    "deep-pattern": ("json", big("a/", '{"filesystem":{"ro":["', '"]}}')),
}  # fmt: skip


@pytest.mark.parametrize(("suffix", "text"), HUGE.values(), ids=HUGE)
def test_the_largest_document_takes_bounded_time(suffix: str, text: str) -> None:
    """A cloned project's file is read before it is trusted: it must not stop the start for long."""
    assert len(text) <= files.MAX_BYTES
    begun = time.process_time()
    outcome(lambda: decode(files.parse(text, f"x.{suffix}"), rank=PROJECT, file="f"))
    assert time.process_time() - begun < 15
