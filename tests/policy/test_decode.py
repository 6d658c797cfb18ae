"""Strict decoding of policy files."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import settings
from agent_sandbox.policy.decode import decode, decode_value
from agent_sandbox.policy.model import GLOBAL

FILE = "/cfg/config.toml"


def nested(key: str, value: object) -> dict[str, object]:
    """`filesystem.ro` as the file writes it: a key in a table."""
    section, dot, inner = key.partition(".")
    return {section: {inner: value}} if dot else {key: value}


GOOD: list[tuple[str, object, object]] = [
    ("profile", "claude", "claude"),
    ("profile", "none", "none"),
    ("network", "on", "on"),
    ("network", "off", "off"),
    *[("network", mode, mode) for mode in ("allow", "public", "learn")],
    ("allow", ["example.com", "*.example.com:8443"], ("example.com", "*.example.com:8443")),
    ("allow", [], ()),
    ("deny", ["localhost", "10.0.0.0/8"], ("localhost", "10.0.0.0/8")),
    ("publish", ["8080", "127.0.0.1:8080:3000"], ("8080", "127.0.0.1:8080:3000")),
    ("network.ca", "~/ca.pem", "~/ca.pem"),
    ("secret", [], ()),
    ("budget", [], ()),
    ("commands", {"git": "@git", "rm": False}, {"git": "@git", "rm": False}),
    ("profiles", {}, ()),
    ("network", True, "on"),
    ("network", False, "off"),
    *[("network", word, "on") for word in ("1", "true", "yes", "on", "TRUE", "Yes")],
    *[("docker", word, "off") for word in ("0", "false", "no", "off", "False", "NO")],
    ("docker", "filtered", "filtered"),
    ("docker.images", ["busybox", "ghcr.io/me/*"], ("busybox", "ghcr.io/me/*")),
    ("docker.registries", ["docker.io"], ("docker.io",)),
    ("docker.keep", True, "on"),
    ("docker.mode", "warn", "warn"),
    ("docker.read-only", "yes", "on"),
    ("docker.containers", 4, 4),
    ("docker.memory", "1G", 1 << 30),
    ("docker.cpus", 1, 1),
    ("docker.pids", 64, 64),
    *[("git.auth", way, way) for way in ("none", "ssh-agent", "helper", "both")],
    ("git.keys", ["me@home", "~/.ssh/a.pub"], ("me@home", "~/.ssh/a.pub")),
    ("git.hosts", ["github.com", "a.example:2222"], ("github.com", "a.example:2222")),
    ("home", "private", "private"),
    ("home", "ephemeral", "ephemeral"),
    ("home", "host", "host"),
    *[("seccomp", level, level) for level in ("strict", "default", "off")],
    ("filesystem.presets", ["!@all", "@base"], ("!@all", "@base")),
    ("filesystem.presets", [], ()),
    ("filesystem.ro", ["a", "~/b"], ("a", "~/b")),
    ("filesystem.rw", [], ()),
    ("filesystem.exclude", [".env*"], (".env*",)),
    ("env.keep", ["EDITOR"], ("EDITOR",)),
    ("env.set", {"CI": "1", "E": ""}, {"CI": "1", "E": ""}),
    ("limits.timeout", 90, 90.0),
    ("limits.timeout", 0.5, 0.5),
    ("limits.timeout", "90", 90.0),
    ("limits.timeout", "1.5s", 1.5),
    ("limits.timeout", "250ms", 0.25),
    ("limits.timeout", "10m", 600.0),
    ("limits.timeout", "2 h", 7200.0),
    ("limits.timeout", "1d", 86400.0),
    ("limits.memory", 4096, 4096),
    ("limits.memory", "512M", 512 << 20),
    ("limits.memory", "4G", 4 << 30),
    ("limits.memory", "4g", 4 << 30),
    ("limits.memory", "4GB", 4 << 30),
    ("limits.memory", "4GiB", 4 << 30),
    ("limits.memory", "1.5K", 1536),
    ("limits.memory", "1T", 1 << 40),
    ("limits.memory", "100b", 100),
    ("limits.pids", 512, 512),
    ("limits.pids", "64", 64),
    ("limits.pids", "none", settings.NO_LIMIT),
    ("limits.tmp-size", "2G", 2 << 30),
    ("limits.tmp-size", "none", settings.NO_LIMIT),
    ("limits.cpu-time", "1m", 60.0),
]


@pytest.mark.parametrize(("key", "value", "expected"), GOOD, ids=[f"{k}={v!r}" for k, v, _ in GOOD])
def test_good_values_are_normalised(key: str, value: object, expected: object) -> None:
    """Each spelling of a value has one meaning, and the value knows its file and key."""
    layer = decode(nested(key, value), rank=GLOBAL, file=FILE)
    setting = layer.values[key]
    assert setting.value == expected
    assert type(setting.value) is type(expected)
    assert setting.source.layer == GLOBAL
    assert str(setting.source) == f"{FILE}: {key}"


def test_every_row_has_a_good_value_in_the_table() -> None:
    """A new setting comes with a test."""
    assert {key for key, _, _ in GOOD} == set(settings.BY_KEY)


def each(key: str, *values: object) -> list[tuple[str, object]]:
    """One key with several values."""
    return [(key, value) for value in values]


BAD: list[tuple[str, object]] = [
    *each("profile", "", 1, True, ["claude"], "a b", "../x", None, {}),
    *each("network", "Public", "allowed", "filtered", "", 1, 0, None, [], {}, "maybe", 1.0),
    *each("allow", "example.com", [""], [1], {}, True, None, ["https://x.example"], ["localhost"]),
    *each("allow", ["a.example", "*x.example"], ["a b"], ["a\0"], ["127.1"], ["a:0"]),
    *each("deny", "example.com", [""], [1], {}, True, None, ["https://x.example"], ["a:99999"]),
    *each("network.ca", "ca.pem", "", 1, ["/a"], None, "/a\0"),
    *each("secret", "x", 1, {}, ["x"], [{}], None),
    *each("commands", "x", 1, {"git": 1}, {"git": None}, {"a/b": False}, {"": False}, None),
    *each("budget", "x", 1, {}, ["x"], [{}], [{"host": "a.example"}], None),
    *each("profiles", "x", 1, [], {"x": 1}, {"..": {}}, {"a": {"rw": "x"}}, {"a": {"rw": ["x"]}}),
    *each("publish", "8080", 8080, [8080], [""], ["a"], ["0"], ["localhost:80"], {}, True, None),
    *each("docker.images", "x", [""], [1], {}, None, ["a b"], ["\u00e9"], ["a\n"]),
    *each("docker.registries", "x", [1], ["a b"]),
    *each("docker.keep", "maybe", 1, None),
    *each("docker.mode", "on", True, "", None),
    *each("docker.read-only", "x", 1),
    *each("docker.containers", 0, -1, "none", 1.5),
    *each("docker.memory", 0, "none", "x"),
    *each("docker.cpus", 0, "none", "x"),
    *each("docker.pids", 0, "none", "x"),
    *each("docker", "public", "allow", "Filtered", "", 1, 0, None, [], {}, "maybe", 1.0),
    *each("seccomp", "on", True, False, "", 1, "Strict", None, []),
    *each("git.auth", "on", True, False, "", 1, "agent", None, []),
    *each("git.keys", "x", [""], [1], {}, None, ["MD5:aa"], ["SHA256:x"], ["a\nb"]),
    *each("git.hosts", "x", [""], [1], {}, None, ["https://a"], ["u@a"], ["a:0"], ["*.a"]),
    *each("home", "on", True, "", 1, "Private", None, []),
    *each("filesystem.presets", "@all", ["@nope"], ["!@nope"], [""], [1], {}, True),
    *each("filesystem.presets", ["all"], ["!!@all"], None),
    *each("filesystem.ro", "x", [""], [1], [None], {}, True, None, [["x"]]),
    *each("filesystem.rw", "x", [""], [1], [None], {}, True, None, [["x"]]),
    *each("filesystem.exclude", "x", [""], [1], [None], {}, True, None, [["x"]]),
    *each("env.keep", "EDITOR", [""], ["A=B"], ["A\0"], [1], {}, None),
    *each("env.set", [], "A=1", {"": "x"}, {"A=B": "x"}, {"A": 1}, {"A": True}, {"A": "x\0"}, None),
    *each("limits.timeout", 0, -1, True, "", "x", "1x", "-1", "1.2.3", ".", "inf", None, [], "1 2"),
    *each("limits.timeout", float("inf"), float("nan"), "nan"),
    *each("limits.cpu-time", 0, -1, True, "", "x", "1x", "-1", "1.2.3", ".", "inf", None, []),
    *each("limits.memory", 0, -1, True, "", "G", "4X", "-4G", "0.1", 0.5, None, [], "4GG", "ib"),
    *each("limits.memory", "none", "None"),
    *each("limits.tmp-size", 0, -1, True, "", "G", "4X", "None", None, []),
    *each("limits.pids", 0, -1, True, 1.5, "", "x", "1.5", 1 << 22, None, "9" * 30),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{k}={v!r:.20}" for k, v in BAD])
def test_bad_values_are_errors_that_name_file_and_key(key: str, value: object) -> None:
    """Wrong types and malformed values are never guessed at."""
    with pytest.raises(PolicyError) as caught:
        decode(nested(key, value), rank=GLOBAL, file=FILE)
    assert FILE in caught.value.message
    assert key in caught.value.message
    assert len(caught.value.message) < 300


def test_every_row_has_a_bad_value_in_the_table() -> None:
    """A new setting comes with a refusal."""
    assert {key for key, _ in BAD} == set(settings.BY_KEY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("limits.memory", "²"),
        ("limits.timeout", "²s"),
        ("limits.memory", 10**400),
        ("limits.timeout", 10**400),
        ("limits.pids", 10**400),
    ],
    ids=["superscript-size", "superscript-time", "huge-size", "huge-time", "huge-count"],
)
def test_numbers_that_python_cannot_convert_are_plain_errors(key: str, value: object) -> None:
    """No value of a file makes the decoder fall over."""
    with pytest.raises(PolicyError):
        decode(nested(key, value), rank=GLOBAL, file=FILE)


@pytest.mark.parametrize("written", ["300000d", 1e17, "99999999999"])
def test_a_time_that_no_clock_can_wait_for_is_an_error(written: object) -> None:
    """The kernel's timers end at 2^63 nanoseconds, 292 years: more would fail after the start."""
    with pytest.raises(PolicyError):
        decode(nested("limits.timeout", written), rank=GLOBAL, file=FILE)


@pytest.mark.parametrize(
    "data",
    [
        {"filesystem": {"ro": ["\ud800"]}},
        {"env": {"set": {"A": "\ud800"}}},
        {"env": {"set": {"\ud800": "x"}}},
        {"env": {"keep": ["\ud800"]}},
    ],
    ids=["path", "value", "name", "kept"],
)
def test_text_that_no_system_call_takes_is_an_error(data: dict[str, object]) -> None:
    """JSON can spell a lone surrogate; it cannot be encoded and must not surface as a traceback."""
    with pytest.raises(PolicyError):
        decode(data, rank=GLOBAL, file=FILE)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"netwrok": "on"}, "netwrok"),
        ({"filesystem": {"readonly": []}}, "filesystem.readonly"),
        ({"env": {"drop": []}}, "env.drop"),
        ({"limits": {"cpu": 1}}, "limits.cpu"),
        ({"command": {"git": "@git"}}, "command"),
        ({"allowed": ["x"]}, "allowed"),
        ({"ro": ["x"]}, "ro"),
        ({"": 1}, "''"),
    ],
)
def test_unknown_keys_are_errors_at_both_levels(data: dict[str, object], key: str) -> None:
    """A misspelt protection is said, not skipped; the hint lists what there is."""
    with pytest.raises(PolicyError) as caught:
        decode(data, rank=GLOBAL, file=FILE)
    assert caught.value.code == "unknown-key"
    assert key in caught.value.message
    assert FILE in caught.value.message
    assert "filesystem.exclude" in caught.value.hint


@pytest.mark.parametrize("key", [k for k in settings.BY_KEY if "." in k])
def test_a_dotted_name_at_the_top_level_is_an_unknown_key(key: str) -> None:
    """`"filesystem.exclude"` in quotes is another key than the table's: it could undo the table."""
    value = {k: v for k, v, _ in GOOD}[key]
    with pytest.raises(PolicyError) as caught:
        decode({key: value}, rank=GLOBAL, file=FILE)
    assert caught.value.code == "unknown-key"


@pytest.mark.parametrize("section", settings.SECTIONS)
@pytest.mark.parametrize("value", [1, "x", [], None, True])
def test_a_section_must_be_a_table(section: str, value: object) -> None:
    """The error names the section and the file."""
    with pytest.raises(PolicyError) as caught:
        decode({section: value}, rank=GLOBAL, file=FILE)
    assert section in caught.value.message
    assert FILE in caught.value.message


@pytest.mark.parametrize("data", [None, [], "x", 1, True])
def test_the_top_level_must_be_a_table(data: object) -> None:
    """A file that holds a list or a word is refused by name."""
    with pytest.raises(PolicyError) as caught:
        decode(data, rank=GLOBAL, file=FILE)
    assert FILE in caught.value.message


def test_an_empty_file_sets_nothing() -> None:
    """Nothing written, nothing decided."""
    assert decode({}, rank=GLOBAL, file=FILE).values == {}


def test_an_unknown_preset_is_named() -> None:
    """Also when it is switched off."""
    with pytest.raises(PolicyError) as caught:
        decode({"filesystem": {"presets": ["!@lint/rust"]}}, rank=GLOBAL, file=FILE)
    assert "!@lint/rust" in caught.value.message
    assert caught.value.code == "unknown-preset"


def test_a_huge_value_is_not_printed_whole() -> None:
    """Error lines stay readable."""
    with pytest.raises(PolicyError) as caught:
        decode_value(settings.BY_KEY["network"], "x" * 10_000, "w")
    assert len(caught.value.message) < 200
