"""Which header of which host gets a value, and which does not."""

from __future__ import annotations

from base64 import b64encode

import pytest

from agent_sandbox.proxy import http1
from agent_sandbox.proxy.injecting import Value, Values

STAND_IN, REAL = "sk-placeholder-0123456789", "sk-the-real-value-987654"


def value(**changes: object) -> Value:
    given: dict[str, object] = {
        "host": "api.test", "port": 443, "header": "authorization", "format": "",
        "placeholder": STAND_IN, "value": REAL, **changes,
    }  # fmt: skip
    return Value(**given)  # type: ignore[arg-type]


def basic(text: str) -> str:
    return "Basic " + b64encode(text.encode()).decode()


def filled(values: Values, name: str, text: str, host: str = "api.test", port: int = 443) -> str:
    head = f"GET / HTTP/1.1\r\nHost: {host}\r\n{name}: {text}\r\n\r\n".encode()
    return values.fill(http1.parse(head), host, port).fields[1][1]


@pytest.mark.parametrize(
    ("name", "said", "sent"),
    [
        ("Authorization", f"Bearer {STAND_IN}", f"Bearer {REAL}"),
        ("AUTHORIZATION", f"token {STAND_IN}", f"token {REAL}"),
        ("Authorization", STAND_IN, REAL),
        ("Authorization", basic(f"x:{STAND_IN}"), basic(f"x:{REAL}")),
        ("Authorization", "Bearer other", "Bearer other"),
        ("Authorization", basic("x:y"), basic("x:y")),
        ("Authorization", "Basic %%%", "Basic %%%"),
        ("Authorization", f"Bearer {STAND_IN[:-1]}", f"Bearer {STAND_IN[:-1]}"),
        ("X-Other", STAND_IN, STAND_IN),
        ("Authorization-2", STAND_IN, STAND_IN),
        ("Cookie", f"a={STAND_IN}", f"a={STAND_IN}"),
    ],
)
def test_the_placeholder_is_replaced_in_its_header_alone(name: str, said: str, sent: str) -> None:
    assert filled(Values([value()]), name, said) == sent


@pytest.mark.parametrize(("host", "port"), [("api.test", 8443), ("evil.test", 443), ("test", 443)])
def test_cannot_get_a_value_sent_to_another_host(host: str, port: int) -> None:
    values = Values([value()])
    assert filled(values, "Authorization", STAND_IN, host, port) == STAND_IN
    assert filled(values, "Authorization", STAND_IN) == REAL


def test_a_format_makes_the_whole_field() -> None:
    values = Values([value(format="Bearer {}")])
    assert filled(values, "Authorization", f"token {STAND_IN} x") == f"Bearer {REAL}"
    assert filled(values, "Authorization", "token x") == "token x"


def test_two_values_of_one_host_do_not_meet() -> None:
    other = value(placeholder="other-placeholder-000000", value="other-value")
    values = Values([value(), other])
    assert filled(values, "Authorization", "other-placeholder-000000") == "other-value"
    assert filled(values, "Authorization", STAND_IN) == REAL


def test_a_value_is_in_no_text_that_is_made_of_it() -> None:
    assert REAL not in repr(value())
    assert REAL not in str(value())


def test_hosts_with_a_base_url_are_not_opened() -> None:
    values = Values([value(), value(host="b.test", base_port=3129)])
    assert values.opened == {("api.test", 443)}
    assert values.bases == {3129: ("b.test", 443)}
