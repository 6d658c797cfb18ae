"""What agents write must stay text, and the page's policy must hold if it once did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Error, expect

from agent_sandbox.service import dashboard

from . import stub as api
from .conftest import WATCH

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from .conftest import Visits
    from .stub import Stub

IMAGE = "<img src=x onerror=\"window.pwned='img'\">"
PAYLOAD = (
    f"{IMAGE}<script>window.pwned='script'</script><svg onload=\"window.pwned='svg'\"></svg>"
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>"
    '"><a href="javascript:window.pwned=\'a\'">x</a>\x1b[31m\u202e'
)
FOREIGN = "main img, main iframe, main svg, main script, dialog img, dialog iframe, header img"


def hostile(state: Stub) -> str:
    """Fill every field that somebody else may have written; the id of an execution with output."""
    words = {"task": PAYLOAD, PAYLOAD: "x"}
    network = {"mode": PAYLOAD, "allowOut": [PAYLOAD], "denyOut": [PAYLOAD]}
    box = api.sandbox(
        1, owner=PAYLOAD, metadata=words, template=PAYLOAD, image=PAYLOAD, reason=PAYLOAD,
        network=network, envNames=[PAYLOAD], digest=PAYLOAD, runtime=PAYLOAD, backend=PAYLOAD,
    )  # fmt: skip
    odd = api.sandbox(2, id=f"javascript:{PAYLOAD}", state=PAYLOAD)
    state.sandboxes = [box, odd]
    run = api.execution(
        1, command=["sh", "-c", PAYLOAD], owner=PAYLOAD, cwd=PAYLOAD, error=PAYLOAD,
        exceeded=PAYLOAD, signal=PAYLOAD,
    )  # fmt: skip
    running = api.execution(2, command=[PAYLOAD], **api.RUNNING)
    state.executions = [run, running]
    state.output[run["id"]] = [
        ("stdout", {"data": PAYLOAD}), ("stderr", {"data": PAYLOAD}), ("stdout", {"data": IMAGE}),
    ]  # fmt: skip
    actor = {"agent": PAYLOAD, "key": PAYLOAD, "addr": PAYLOAD}
    state.audit = [
        api.line(1, decision="deny", action=PAYLOAD, reason=PAYLOAD, rule=PAYLOAD, actor=actor,
                 requestId=PAYLOAD, hash=PAYLOAD, target={"type": PAYLOAD, "id": PAYLOAD}),
        api.line(2, actor=actor, request={"cmd": [PAYLOAD], "path": PAYLOAD, "image": PAYLOAD},
                 result={"status": PAYLOAD, "exitCode": PAYLOAD, "durationMs": 1}),
    ]  # fmt: skip
    state.tokens = [
        api.token(PAYLOAD, id=PAYLOAD, scopes=[PAYLOAD], images=[PAYLOAD],
                  templates=[PAYLOAD], quotas={PAYLOAD: PAYLOAD})
    ]  # fmt: skip
    state.names = dict.fromkeys(state.names, PAYLOAD)
    state.limits = {PAYLOAD: PAYLOAD, "allowedImages": [PAYLOAD]}
    return str(run["id"])


def untouched(page: Page) -> None:
    """No script ran, and no element of the payload is there."""
    assert page.evaluate("window.pwned") is None
    assert page.locator(FOREIGN).count() == 0
    assert page.locator("[onerror], [onload], a[href^='javascript:']").count() == 0


# With and without the policy: text must stay text by itself, too.
@pytest.mark.parametrize("bypass", [True, False], ids=["without-policy", "with-policy"])
def test_cannot_run_script_by_any_text(visits: Visits, stub: Stub, bypass: bool) -> None:
    run = hostile(stub)
    page = visits.sign_in("overview", bypass_csp=bypass)
    places = {
        "overview": "#overview-denials tbody tr",
        "sandboxes": "#sandboxes tbody tr",
        f"sandboxes/{stub.sandboxes[0]['id']}": "#sandbox-facts dd",
        "executions": "#executions tbody tr",
        f"executions/{run}": "#output .part.stderr",
        "audit": "#records tbody tr",
        "tokens": "#tokens tbody tr",
        f"nowhere/{PAYLOAD}": "#view-missing .code",
    }
    for place, wanted in places.items():
        page.evaluate("(place) => { location.hash = `#/${place}`; }", place)
        page.wait_for_selector(wanted)
        untouched(page)
        shown = page.inner_text("main")
        if "nowhere" not in place:
            assert "<img src=x onerror=" in shown, place
            assert "\u202e" not in shown
    page.evaluate("location.hash = '#/sandboxes'")
    page.locator("#sandboxes [aria-label^=Delete]").first.click()
    expect(page.locator("#confirm-target")).to_contain_text("<img src=x")
    untouched(page)
    page.keyboard.press("Escape")
    wrong = {"code": PAYLOAD, "message": PAYLOAD, "hint": PAYLOAD, "rule": PAYLOAD}
    stub.broken["/v1/sandboxes"] = (500, wrong)
    expect(page.locator("#trouble .problem")).to_contain_text("<img src=x")
    untouched(page)


def test_the_payload_runs_where_text_is_taken_for_markup(visits: Visits, stub: Stub) -> None:
    """The control of the test above: the same words, by innerHTML, without the policy."""
    page = visits.sign_in("sandboxes", bypass_csp=True)
    page.wait_for_selector("#sandboxes tbody tr")
    page.evaluate(
        "(html) => { document.querySelector('#sandboxes-title').innerHTML = html; }", IMAGE
    )
    page.wait_for_function("window.pwned === 'img'")


# --- the policy


class Policed:
    """Pages that may break the policy."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.context = browser.new_context()
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.goto(url)
        self.page.wait_for_selector("#login-token")


def test_cannot_use_inline_script_or_style(
    browser: Browser, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if somebody had brought markup into the page itself."""
    found = dashboard.asset("/")
    assert found is not None
    extra = (
        f"{IMAGE}<script>window.pwned='inline'</script><b id=b style='color: rgb(1, 2, 3)'>b</b>"
    )
    changed = found[0].replace(b"</body>", f"{extra}</body>".encode())
    files = {**dashboard._files(), "index.html": (changed, found[1], found[2])}
    monkeypatch.setattr(dashboard, "_files", lambda: files)

    page = Policed(browser, stub.url).page
    page.wait_for_function("window.violations.length >= 3")
    kinds = {words.split()[0] for words in page.evaluate("violations")}
    assert {"script-src-elem", "script-src-attr", "style-src-attr"} <= kinds
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("getComputedStyle(b).color") != "rgb(1, 2, 3)"
    page.context.close()

    # The control: without the header all of it works.
    stub.headers = []
    page = Policed(browser, stub.url).page
    page.wait_for_function("window.pwned")
    assert page.evaluate("getComputedStyle(b).color") == "rgb(1, 2, 3)"
    page.context.close()


SINKS = [
    "document.body.innerHTML = '<b>x</b>'",
    "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
    "document.createElement('script').text = 'window.pwned = 1'",
    "eval('window.pwned = 1')",
    "new Function('window.pwned = 1')()",
    "setTimeout('window.pwned = 1')",
    "trustedTypes.createPolicy('x', {createHTML: (text) => text})",
]


@pytest.mark.parametrize("sink", SINKS)
def test_cannot_make_markup_or_code_of_text_at_all(browser: Browser, stub: Stub, sink: str) -> None:
    """Trusted Types: a later slip in the page's own code would throw."""
    # From a timer of the page: an evaluation by the debugger has more rights.
    attempt = (
        "new Promise((done) => setTimeout(() => { try { "
        + sink
        + "; done('it went through'); } catch (error) { done(error.message); } }))"
    )
    page = Policed(browser, stub.url).page
    assert page.evaluate(attempt) != "it went through"
    assert page.evaluate("window.pwned") is None
    page.context.close()

    stub.headers = []
    page = Policed(browser, stub.url).page
    assert page.evaluate(attempt) == "it went through"
    page.context.close()


def test_cannot_send_anything_to_another_host(browser: Browser, stub: Stub) -> None:
    other = api.Stub()
    page = Policed(browser, stub.url).page
    with pytest.raises(Error, match="Failed to fetch"):
        page.evaluate("(url) => fetch(url, {mode: 'no-cors'})", f"{other.url}steal")
    page.evaluate("(url) => { new Image().src = url; }", f"{other.url}steal.png")
    page.wait_for_function("window.violations.length >= 2")
    assert other.seen == []
    page.context.close()

    stub.headers = []
    page = Policed(browser, stub.url).page
    page.evaluate("(url) => fetch(url, {mode: 'no-cors'})", f"{other.url}steal")
    assert [path for _, path, _, _ in other.seen] == ["/steal"]
    page.context.close()
    other.close()


def test_cannot_be_framed(browser: Browser, stub: Stub) -> None:
    """A page of another site that puts ours under its own buttons."""

    other = api.Stub()
    other.headers = []

    def framed() -> Any:
        context = browser.new_context()
        page = context.new_page()
        page.goto(other.url)
        page.evaluate(
            """(url) => new Promise((done) => {
                const frame = document.createElement("iframe");
                frame.onload = done; frame.src = url; document.body.append(frame);
            })""",
            stub.url,
        )
        shown = page.frames[1].evaluate("document.querySelectorAll('#login').length")
        context.close()
        return shown

    assert framed() == 0
    stub.headers = []
    assert framed() == 1
    other.close()


def test_a_token_is_nowhere_but_in_the_request_that_signs_in(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.wait_for_selector("#sandboxes tbody tr")
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert api.TOKEN not in kept
    assert page.evaluate("document.cookie") == ""
    assert api.TOKEN not in page.content()
    assert page.input_value("#login-token") == ""
    sent = [p for m, p, _, body in stub.seen if api.TOKEN in f"{p}{body}"]
    assert sent == ["/v1/session"]


def test_an_act_carries_the_second_secret(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.locator("#sandboxes [aria-label^=Pause]").first.click()
    page.wait_for_selector("#sandboxes [aria-label^=Resume] >> nth=1")
    [(_, headers, _)] = stub.asked("POST", "/v1/sandboxes/")
    assert headers["X-CSRF-Token"] == api.CSRF
