"""Heads of answers: nobody can write a line of their own into one."""

from __future__ import annotations

import pytest

from agent_sandbox.service.http import answers
from agent_sandbox.service.http.answers import Plan


def plan(
    headers: tuple[tuple[str, str], ...] = (), length: int | None = 0, *,
    status: int = 200, method: str = "GET", version: str = "HTTP/1.1", keep: bool = True,
) -> Plan:  # fmt: skip
    return answers.plan(
        status, headers, length, method=method, version=version, request_id="req_1", keep=keep
    )


def fields(found: Plan) -> dict[str, str]:
    lines = found.head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")[1:]
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


@pytest.mark.parametrize(
    "bad",
    [
        "\r\nset-cookie: a=b", "\n", "\r", "\0", "\x0b", "\x7f", "\x85", "\u2028", "é\r",
        "\ud800", "日",
    ],
)  # fmt: skip
def test_cannot_inject_a_line_by_a_value(bad: str) -> None:
    with pytest.raises(ValueError, match="x-a"):
        plan((("x-a", f"v{bad}"),))


@pytest.mark.parametrize("bad", ["", "a b", "a:", "a\r\nb", "a\n", "é", "a\0", "a(", " a"])
def test_cannot_inject_a_line_by_a_name(bad: str) -> None:
    with pytest.raises(ValueError, match="name of a field"):
        plan(((bad, "v"),))


def test_ordinary_values_pass() -> None:
    """The control of the two before."""
    found = fields(plan((("X-A", "v é\t~"), ("etag", '"abc"'))))
    assert (found["x-a"], found["etag"]) == ("v é\t~", '"abc"')


@pytest.mark.parametrize(
    "header",
    [
        ("Transfer-Encoding", "chunked"), ("Connection", "keep-alive"), ("Keep-Alive", "1"),
        ("Content-Length", "1"), ("content-length", "x"), ("Date", "now"), ("Content-Length", "+0"),
    ],
)  # fmt: skip
def test_framing_is_not_a_handlers_business(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        plan((header,))


@pytest.mark.parametrize("status", [-1, 0, 99, 100, 101, 102, 103, 150, 199, 600, 999])
def test_only_a_final_status_is_an_answer(status: int) -> None:
    with pytest.raises(ValueError, match="status"):
        plan(status=status)


@pytest.mark.parametrize(
    ("arguments", "length", "chunked", "body", "keep"),
    [
        ({"length": 5}, "5", False, True, True),
        ({"length": 0}, "0", False, True, True),
        ({"length": None}, None, True, True, True),
        ({"length": None, "version": "HTTP/1.0"}, None, False, True, False),
        ({"length": 5, "version": "HTTP/1.0", "keep": False}, "5", False, True, False),
        ({"length": None, "headers": (("content-length", "7"),)}, "7", False, True, True),
        ({"length": 5, "headers": (("content-length", "5"),)}, "5", False, True, True),
        ({"length": 5, "method": "HEAD"}, "5", False, False, True),
        ({"length": None, "method": "HEAD"}, None, False, False, True),
        (
            {"length": 0, "method": "HEAD", "headers": (("content-length", "9"),)},
            "9", False, False, True,
        ),
        ({"length": 0, "status": 204}, None, False, False, True),
        ({"length": 0, "status": 304}, None, False, False, True),
        ({"length": 5, "headers": (("connection", "close"),)}, "5", False, True, False),
    ],
)  # fmt: skip
def test_how_a_body_is_framed(
    arguments: dict[str, object], length: str | None, chunked: bool, body: bool, keep: bool
) -> None:
    found = plan(**arguments)  # type: ignore[arg-type]
    told = fields(found)
    assert told.get("content-length") == length
    assert (told.get("transfer-encoding") == "chunked") == found.chunked == chunked
    assert (found.body, found.keep) == (body, keep)
    assert (told.get("connection") == "close") == (not keep)


def test_every_answer_has_a_date_and_the_id_of_its_request() -> None:
    found = fields(plan())
    assert found["date"].endswith("GMT")
    assert found["x-request-id"] == "req_1"
    assert fields(plan((("X-Request-Id", "mine"),)))["x-request-id"] == "mine"
