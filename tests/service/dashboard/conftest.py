"""Debian's Chromium, driven by Playwright, on the stub of the API."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect, sync_playwright

from conftest import must_work

from .stub import TOKEN, Stub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Dialog, Page

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
# Milliseconds. A wait ends with what it waits for; only a failure takes so long.
PATIENCE = 30_000
AXE = "axe-core-4.14.0.tgz"
AXE_SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(
    `${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    must_work(shutil.which(CHROMIUM), "chromium is not installed")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server of the test's own."""
    found = Stub()
    yield found
    found.close()


class Visits:
    """Pages of one test. At its end none may have failed, or broken the page's own policy."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        self.contexts: list[Any] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []

    def open(self, place: str = "", **options: Any) -> Page:
        """A new page in a context of its own, not signed in."""
        options = {"viewport": {"width": 1360, "height": 860}, **options}
        context = self.browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        context.add_init_script(WATCH)
        self.contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dialog)
        page.goto(self.url + (f"#/{place}" if place else ""))
        return page

    def _dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def sign_in(self, place: str = "overview", token: str = TOKEN, **options: Any) -> Page:
        """A page behind the login."""
        page = self.open(place, **options)
        page.fill("#login-token", token)
        page.press("#login-token", "Enter")
        page.wait_for_selector("#top:not([hidden])")
        return page

    def close(self) -> None:
        """Close all pages."""
        for context in self.contexts:
            context.close()


def visiting(browser: Browser, url: str) -> Iterator[Visits]:
    """Visits that must end well."""
    found = Visits(browser, url)
    yield found
    violations = [v for c in found.contexts for p in c.pages for v in p.evaluate("violations")]
    found.close()
    assert found.errors == []
    assert found.dialogs == []
    assert violations == []


@pytest.fixture
def visits(browser: Browser, stub: Stub) -> Iterator[Visits]:
    """Visits to the stub."""
    yield from visiting(browser, stub.url)


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, which finds what screen readers and keyboards cannot use."""
    npm = shutil.which("npm")
    must_work(npm, "npm is not installed")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [str(npm), "pack", AXE.removesuffix(".tgz").replace("core-", "core@")],
        cwd=place, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    must_work(done.returncode == 0, f"the registry of npm does not answer: {done.stderr[-300:]}")
    return unpacked(place / AXE)


def unpacked(archive: Path) -> str:
    """The script in the package, which is the one that we know."""
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == AXE_SHA256
    with tarfile.open(archive) as found:
        member = found.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest.fixture
def module(visits: Visits) -> Callable[[str, str], Any]:
    """Evaluate an expression with one of the page's modules as `m`."""
    page = visits.open()

    def run(name: str, expression: str) -> Any:
        return page.evaluate(f"async () => {{ const m = await import('/assets/{name}'); "
                             f"return {expression}; }}")  # fmt: skip

    return run
