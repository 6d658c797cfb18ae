"""The files of the dashboard as the server gets them."""

from __future__ import annotations

import hashlib
import re

import pytest

from agent_sandbox.service import dashboard


def test_the_root_is_the_page() -> None:
    found = dashboard.asset("/")
    assert found is not None
    assert found == dashboard.asset("/index.html") == dashboard.asset("")
    assert found[0].startswith(b"<!doctype html>")
    assert found[1] == "text/html; charset=utf-8"


def test_a_tag_is_of_the_content() -> None:
    for path in ("/", "/assets/style.css", "/assets/app.js"):
        found = dashboard.asset(path)
        assert found is not None
        assert found[2] == f'"{hashlib.sha256(found[0]).hexdigest()[:32]}"'


@pytest.mark.parametrize(
    "path",
    [
        "/assets", "/assets/", "/__init__.py", "/assets/../__init__.py", "/../problems.py", "//",
        "/assets/%2e%2e/index.html", "/etc/passwd", "/assets//etc/passwd", "/assets/none.js",
        "/assets/app.js/", "/assets/app.js\0", "/ASSETS/APP.JS", "/./index.html",
    ],
)  # fmt: skip
def test_cannot_get_what_is_no_file_of_the_page(path: str) -> None:
    assert dashboard.asset(path) is None


def test_everything_that_the_page_asks_for_is_there() -> None:
    page = dashboard.asset("/")
    assert page is not None
    wanted = set(re.findall(r'(?:src|href)="([^"#]+)"', page[0].decode())) - {"openapi.json"}
    assert len(wanted) == 4
    left, seen = list(wanted), set[str]()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        found = dashboard.asset(path)
        assert found is not None, path
        left += [f"assets/{name}" for name in re.findall(r'from "\./([^"]+)"', found[0].decode())]
    assert {path.removeprefix("assets/") for path in seen} == {
        name.removeprefix("assets/") for name in dashboard._files() if name != "index.html"
    }


def test_nothing_of_the_page_names_another_host_or_parses_markup() -> None:
    for name, (content, _, _) in dashboard._files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
            r"|DOMParser|createContextualFragment|setHTML|\son[a-z]+=|\sstyle=|javascript:",
            text,
        ), name


def test_it_stays_small() -> None:
    assert sum(len(content) for content, _, _ in dashboard._files().values()) < 120_000
