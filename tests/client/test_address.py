"""Where the service is and who we are: what is accepted, what is refused, what is never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.client import NotConfigured
from agent_sandbox.client.address import Address, parse, proxy_of, settings

from .conftest import SECRET


@pytest.mark.parametrize(
    ("url", "shown", "host"),
    [
        ("http://127.0.0.1:8650", "http://127.0.0.1:8650", "127.0.0.1:8650"),
        ("http://box", "http://box", "box"),
        ("https://box:443/", "https://box", "box"),
        ("https://box:8650/sandboxes/", "https://box:8650/sandboxes", "box:8650"),
        ("https://box/v1", "https://box", "box"),
        ("http://[::1]:8650", "http://[::1]:8650", "[::1]:8650"),
        ("unix:///run/s.sock", "unix:///run/s.sock", "localhost"),
    ],
)
def test_an_address_is_understood(url: str, shown: str, host: str) -> None:
    found = parse(url)
    assert (str(found), found.authority) == (shown, host)


@pytest.mark.parametrize(
    "url",
    [
        "box:8650", "ftp://box", "http://", "http://box:99999", "http://box:x", "unix://run/s.sock",
        "http://box/?a=b", "http://box/#a", "http://bo x", "http://box\r\nX: y", "https://ü",
    ],
)  # fmt: skip
def test_another_address_is_refused_with_a_remedy(url: str) -> None:
    with pytest.raises(NotConfigured) as caught:
        parse(url)
    assert caught.value.hint


def test_a_token_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(NotConfigured) as caught:
        parse(f"https://agent:{SECRET}@box")
    assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value!r}"


def test_arguments_come_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" from-file\n")
    env = {"SANDBOX_API": "http://one", "SANDBOX_URL": "http://two", "SANDBOX_TOKEN": "from-env"}
    env["SANDBOX_TOKEN_FILE"] = str(file)
    assert str(settings("http://zero", "arg", None, env).address) == "http://zero"
    assert settings("http://zero", "arg", None, env).token == "arg"
    assert str(settings(None, None, None, env).address) == "http://one"
    assert settings(None, None, None, env).token == "from-env"
    del env["SANDBOX_API"], env["SANDBOX_TOKEN"]
    assert str(settings(None, None, None, env).address) == "http://two"
    assert settings(None, None, None, env).token == "from-file"
    # "" is a way to say: none at all.
    assert settings(None, "", None, env).token == ""


def test_without_an_address_the_service_of_this_machine_is_meant(tmp_path: Path) -> None:
    env = {"SANDBOX_DATA": str(tmp_path)}
    assert str(settings(None, None, None, env).address) == "http://127.0.0.1:8650"
    (tmp_path / "service.sock").touch()
    assert str(settings(None, None, None, env).address) == f"unix://{tmp_path}/service.sock"


@pytest.mark.parametrize(
    "token", [f"{SECRET}\r\nX-Other: 1", f"{SECRET} x", f"{SECRET}é", "x" * 5000]
)
def test_what_is_no_token_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(NotConfigured) as caught:
        settings("http://box", token, None, {})
    assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value!r}"


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match="no/such"):
        settings(None, None, None, {"SANDBOX_TOKEN_FILE": "no/such"})
    (tmp_path / "binary").write_bytes(os.urandom(64) + b"\xff")
    with pytest.raises(NotConfigured, match="binary"):
        settings(None, None, None, {"SANDBOX_TOKEN_FILE": str(tmp_path / "binary")})


def test_settings_do_not_show_their_token() -> None:
    found = settings("http://box", SECRET, None, {})
    assert SECRET not in f"{found!r} {found}"
    # A control: it is there.
    assert SECRET in dict(found.authorization())["Authorization"]


PROXIED = {"https_proxy": "http://proxy:3128", "http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("url", "no_proxy", "used"),
    [
        ("https://box.example", "", True),
        ("https://box.example", "other.example", True),
        ("https://box.example", ".example", False),
        ("https://box.example", "example", False),
        ("https://box.example", "a, box.example", False),
        ("https://box.example:8650", "box.example:8650", False),
        ("https://notbox.example", "box.example", True),
        ("https://box.example", "*", False),
        # The token would pass the proxy in the clear.
        ("http://box.example", "", False),
        ("https://127.0.0.1:8650", "", False),
        ("https://localhost:8650", "", False),
        ("https://[::1]:8650", "", False),
        ("unix:///run/s.sock", "", False),
    ],
)
def test_a_proxy_is_for_https_of_other_machines_alone(url: str, no_proxy: str, used: bool) -> None:
    found = proxy_of(parse(url), {**PROXIED, "no_proxy": no_proxy})
    assert found == (("proxy", 3128) if used else None)


@pytest.mark.parametrize("value", ["socks5://p:1", f"http://me:{SECRET}@p:1", "http://p:x"])
def test_a_proxy_that_cannot_be_used_is_refused_not_ignored(value: str) -> None:
    with pytest.raises(NotConfigured) as caught:
        proxy_of(Address(scheme="https", host="box", port=443), {"https_proxy": value})
    assert SECRET not in str(caught.value)
