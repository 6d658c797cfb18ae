"""Secrets in policy files, what a plan makes of them, and what stands in for a value."""

from __future__ import annotations

import itertools

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import credentials
from agent_sandbox.policy.credentials import Secret, exposed, placeholder, problem_of
from agent_sandbox.policy.decode import decode
from agent_sandbox.policy.model import FLAGS, GLOBAL, PROJECT, Policy, Setting, Source
from agent_sandbox.policy.network import Egress, parse

ENTRY: dict[str, object] = {
    "name": "anthropic", "host": "api.anthropic.com", "header": "x-api-key",
    "env": "ANTHROPIC_API_KEY", "variable": "ANTHROPIC_API_KEY",
}  # fmt: skip


def entry(**changes: object) -> dict[str, object]:
    """An entry with other values; None takes a key out."""
    made = {**ENTRY, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return {name: value for name, value in made.items() if value is not None}


def secrets(*entries: dict[str, object]) -> tuple[Secret, ...]:
    return credentials.decode(list(entries), "config.toml: secret")


def test_an_entry_is_read() -> None:
    assert secrets(entry(host="API.anthropic.com:8443", header="X-Api-Key", format="k {}")) == (
        Secret(
            name="anthropic", host="api.anthropic.com", port=8443, header="x-api-key",
            format="k {}", kind="env", origin=("ANTHROPIC_API_KEY",),
            variable="ANTHROPIC_API_KEY", where="config.toml: secret",
        ),
    )  # fmt: skip


def test_the_port_is_that_of_https() -> None:
    assert secrets(ENTRY)[0].port == 443


def test_every_source_is_read() -> None:
    found = secrets(
        entry(name="f", env=None, file="~/key", variable="F"),
        entry(name="c", env=None, command=["pass", "show", "x"], variable="C"),
        entry(name="b", base_url="URL", base_path="/v1"),
    )
    assert [(one.kind, one.origin) for one in found] == [
        ("file", ("~/key",)), ("command", ("pass", "show", "x")), ("env", ("ANTHROPIC_API_KEY",)),
    ]  # fmt: skip
    assert found[0].files == ("~/key",)
    assert found[1].files == ()
    assert (found[2].base_url, found[2].base_path) == ("URL", "/v1")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": None}, {"name": ""}, {"name": "a b"}, {"host": None}, {"host": "*.anthropic.com"},
        {"host": "*"}, {"host": "10.0.0.1"}, {"host": "localhost:80"}, {"host": "a.example:*"},
        {"host": "https://a.example"}, {"header": None}, {"header": "a b"}, {"header": "a:b"},
        {"header": "Host"}, {"header": "Content-Length"}, {"header": "Transfer-Encoding"},
        {"header": "Connection"}, {"header": "Proxy-Authorization"}, {"header": "a\r\nb"},
        {"format": "Bearer"}, {"format": "{} {}"}, {"format": "{}\r\nX: y"}, {"format": ""},
        {"env": None}, {"file": "~/x"}, {"env": None, "file": "x"}, {"env": None, "file": 1},
        {"env": None, "command": []}, {"env": None, "command": "pass"},
        {"env": None, "command": ["a\0"]}, {"env": None, "command": [1]}, {"env": "A=B"},
        {"variable": None}, {"variable": "1A"}, {"variable": "A B"}, {"variable": "HOME"},
        {"base_url": ""}, {"base_url": "A-B"}, {"base_path": "/v1"},
        {"base_url": "U", "base_path": "v1"}, {"value": "sk-secret"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_exactly_an_entry_is_an_error(changes: dict[str, object]) -> None:
    """And no message shows a value: people put a secret where its name belongs."""
    with pytest.raises(PolicyError) as caught:
        secrets(entry(**changes))
    assert "sk-secret" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("field", ["name", "variable", "base_url"])
def test_a_name_stands_for_one_secret(field: str) -> None:
    one = entry(base_url="U")
    other = {**entry(name="o", variable="V", base_url="W"), field.replace("_", "-"): "U"}
    one[field.replace("_", "-")] = "U"
    with pytest.raises(PolicyError, match="twice"):
        secrets(one, other)


@pytest.mark.parametrize("rank", [PROJECT, FLAGS])
@pytest.mark.parametrize("data", [{"secret": [ENTRY]}, {"secret": []}, {"network": {"ca": "/x"}}])
def test_cannot_name_secrets_or_certificates_in_a_projects_file(
    rank: int, data: dict[str, object]
) -> None:
    """Trust does not help: it is refused where the file is read."""
    with pytest.raises(PolicyError) as caught:
        decode(data, rank=rank, file="p.toml")
    assert caught.value.code == "user-only-key"
    assert decode(data, rank=GLOBAL, file="g.toml").values


# --- in a plan


def policy_of(*found: Secret, mode: str = "allow") -> Policy:
    source = Source(layer=GLOBAL, where="g.toml")
    plain = Setting(value="off", source=source)
    return Policy(
        network=Setting(value=mode, source=source), docker=plain, home=plain, seccomp=plain,
        profile=plain, presets=(), rules=(), env_keep=(), env_set={}, limits={},
        secrets=tuple(Setting(value=one, source=source) for one in found),
    )  # fmt: skip


def egress(*allow: str, mode: str = "allow") -> Egress:
    return Egress(mode=mode, allow=tuple(parse(text, "test") for text in allow))


CALLER = {"ANTHROPIC_API_KEY": "value-value"}


@pytest.mark.parametrize(
    ("rules", "caller", "used"),
    [
        (("api.anthropic.com",), CALLER, True),
        (("*.anthropic.com:443",), CALLER, True),
        (("api.anthropic.com:80",), CALLER, False),
        (("other.example",), CALLER, False),
        (("api.anthropic.com",), {}, False),
        (("api.anthropic.com",), {"ANTHROPIC_API_KEY": " "}, False),
    ],
)
def test_a_secret_is_used_where_its_host_may_be_reached(
    rules: tuple[str, ...], caller: dict[str, str], used: bool
) -> None:
    """What cannot be used is not read."""
    found = credentials.active(policy_of(*secrets(ENTRY)), egress(*rules), caller, [])
    assert bool(found) is used


def test_without_a_proxy_there_is_no_secret_and_a_notice() -> None:
    notices: list[str] = []
    assert credentials.active(policy_of(*secrets(ENTRY), mode="on"), None, CALLER, notices) == ()
    assert "the command gets no ANTHROPIC_API_KEY" in notices[0]


def test_listeners_for_base_urls_do_not_meet_others() -> None:
    two = secrets(
        entry(base_url="A"), entry(name="o", variable="O", base_url="B", host="o.example")
    )
    rules = egress("localhost:3130", "api.anthropic.com", "o.example")
    found = credentials.active(policy_of(*two), rules, CALLER, [])
    assert [one.base_port for one in found] == [3129, 3131]


@pytest.mark.parametrize("mode", ["on", "off", "allow"])
def test_the_callers_own_values_are_taken_out(mode: str) -> None:
    """The source and the variable, whatever the mode and whoever keeps them."""
    policy = policy_of(*secrets(entry(env="REAL")), mode=mode)
    env = {"REAL": "r", "ANTHROPIC_API_KEY": "r", "OTHER": "x"}
    why = dict.fromkeys(env, "env.keep")
    credentials.put_in(env, why, policy, ())
    assert env == {"OTHER": "x"}
    assert why == {"OTHER": "env.keep"}


def test_certificates_are_named_only_where_tls_is_opened() -> None:
    plain = secrets(entry(base_url="U", base_path="/v1"))[0].replace(base_port=3129)
    env: dict[str, str] = {}
    credentials.put_in(env, {}, policy_of(plain), (plain,))
    assert env["U"] == "http://127.0.0.1:3129/v1"
    assert "SSL_CERT_FILE" not in env
    opened = secrets(ENTRY)[0]
    credentials.put_in(env, {}, policy_of(opened), (opened,))
    assert {env[name] for name in credentials.CA_VARIABLES} == {credentials.BUNDLE}


# --- values


@pytest.mark.parametrize("value", ["", "short", "x" * 8193, "a\nb" * 9, "ü" * 20, "\x7f" * 20])
def test_a_value_that_no_header_can_hold_is_refused_unseen(value: str) -> None:
    why = problem_of(value)
    assert why
    assert not value or value not in why


@pytest.mark.parametrize("value", ["sk-ant-api03-aB3_dE-fG7hI", "12345678", "a b c d e"])
def test_a_good_value_has_no_problem(value: str) -> None:
    assert problem_of(value) == ""


@pytest.mark.parametrize(
    ("value", "prefix", "alphabet"),
    [
        ("sk-ant-api03-" + "aB3" * 30, "sk-ant-api03-", credentials.LETTERS),
        ("ghp_" + "aB3" * 12, "ghp_", credentials.LETTERS),
        ("deadbeef" * 8, "", credentials.HEX),
        ("hunter2hunter2", "", credentials.LETTERS),
        ("aB-3_" * 10, "", credentials.LETTERS + "-_"),
    ],
)
def test_a_placeholder_has_the_shape_of_the_value(value: str, prefix: str, alphabet: str) -> None:
    """And nothing else of it: every character behind a public prefix is chosen anew."""
    asked: list[str] = []

    def choose(letters: str) -> str:
        asked.append(letters)
        return letters[0]

    found = placeholder(value, choose)
    assert found == prefix + alphabet[0] * len(asked)
    assert set(asked) == {alphabet}
    assert len(asked) == max(len(value) - len(prefix), credentials.RANDOM_CHARACTERS)


def test_a_placeholder_of_a_short_value_cannot_be_guessed() -> None:
    letters = itertools.cycle("abc")
    assert len(placeholder("hunter22", lambda _: next(letters))) >= credentials.RANDOM_CHARACTERS


def test_a_value_that_the_command_would_see_is_found() -> None:
    assert exposed("value-1234", {"A": "x", "B": "Bearer value-1234"}, ()).startswith(
        "the variable B"
    )
    assert "arguments" in exposed("value-1234", {}, ("curl", "-Hx: value-1234"))
    assert exposed("value-1234", {"A": "value-123"}, ("curl",)) == ""
