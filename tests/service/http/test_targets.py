"""Paths, queries and fields have one reading, or none."""

from __future__ import annotations

import pytest

from agent_sandbox.proxy import http1
from agent_sandbox.service.http import targets
from agent_sandbox.service.problems import Problem


@pytest.mark.parametrize(
    ("raw", "path", "query"),
    [
        ("/", "/", {}),
        ("/a", "/a", {}),
        ("/a/b", "/a/b", {}),
        ("/a%20b/%c3%a9", "/a b/é", {}),
        ("/...", "/...", {}),
        ("/.git", "/.git", {}),
        ("/a%25%32%46b", "/a%2Fb", {}),  # decoded once: no slash comes out of it
        ("/a?", "/a", {}),
        ("/a?b=c&d=%2Fe+f", "/a", {"b": "c", "d": "/e f"}),
        ("/a?b", "/a", {"b": ""}),
        ("/a?b=c=d&", "/a", {"b": "c=d"}),
        ("/a?b=?/../x", "/a", {"b": "?/../x"}),
        ("/a?b=1;c=2", "/a", {"b": "1;c=2"}),
    ],
)
def test_a_target_is_a_path_and_parameters(raw: str, path: str, query: dict[str, str]) -> None:
    assert targets.split(raw) == (path, query)


@pytest.mark.parametrize(
    "raw",
    [
        "", "a", "*", "http://x/a", "x:80", "//a", "/a//b", "/a/", "/./a", "/a/.", "/..", "/a/../b",
        "/%2e%2e/a", "/%2E/a", "/a/%2e.", "/a%2fb", "/a%2Fb", "/%2f", "/a%00", "/a%", "/a%2",
        "/a%zz", "/a%+1", "/a% 41", "/%ff", "/%c0%ae", "/%ed%a0%80", "/a?b=%", "/a?b=%zz",
        "/a?b=%00", "/a?%ff=1",
        "/a?b=1&b=2", "/a?b=1&%62=2", "/a?" + "&".join(f"p{n}" for n in range(101)),
    ],
)  # fmt: skip
def test_what_can_be_read_in_two_ways_is_refused(raw: str) -> None:
    with pytest.raises(Problem) as found:
        targets.split(raw)
    assert found.value.status == 400


def test_fields_are_found_by_lower_case_names() -> None:
    assert targets.headers([("X-A", "1"), ("x-b", "2")]) == {"x-a": "1", "x-b": "2"}


def test_lists_and_cookies_may_come_twice() -> None:
    twice = [("Accept", "a"), ("accept", "b"), ("Cookie", "c=1"), ("cookie", "d=2")]
    assert targets.headers(twice) == {"accept": "a, b", "cookie": "c=1; d=2"}


@pytest.mark.parametrize(
    "name", ["Authorization", "X-API-Key", "Content-Type", "Idempotency-Key", "Origin", "Host"]
)
def test_no_other_field_may_come_twice(name: str) -> None:
    """Else one reader takes the first token and another one the last."""
    with pytest.raises(Problem):
        targets.headers([(name, "a"), (name.lower(), "a")])


def test_the_quick_checks_of_the_parser_say_what_the_slow_ones_said() -> None:
    """Every character that can come, in a target and in a value."""
    for code in range(256):
        char = chr(code)
        if char in "\r\n":
            continue
        in_target = "!" <= char <= "~" and char != "#"
        in_value = char == "\t" or not (code < 32 or code == 127)
        for head, allowed in (
            (f"GET /{char} HTTP/1.1\r\nHost: x\r\n\r\n", in_target),
            (f"GET / HTTP/1.1\r\nHost: x\r\nA: b{char}c\r\n\r\n", in_value),
        ):
            try:
                http1.parse(head.encode("latin-1"))
                taken = True
            except http1.BadRequest:
                taken = False
            assert taken == allowed, (code, head)
