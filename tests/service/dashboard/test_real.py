"""The dashboard on `sandboxctl serve`: what it shows is what the service does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Error, expect

from agent_sandbox.service import dashboard

from . import stub as api
from .conftest import Visits, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from playwright.sync_api import Browser, Page

    from conftest import As
    from service.conftest import Serve, Served

pytestmark = pytest.mark.kernel


class Real:
    """A server, an admin's visits to it, and a worker that uses it."""

    def __init__(self, served: Served, visits: Visits) -> None:
        self.served = served
        self.visits = visits
        self.admin = served.token("boss", "--scope", "admin")
        self.token = served.token("worker-1")
        self.worker: httpx.Client = served.client(self.token)

    def sign_in(self, place: str = "overview", **options: Any) -> Page:
        """A page of the admin."""
        return self.visits.sign_in(place, self.admin, **options)

    def sandbox(self, **more: Any) -> dict[str, Any]:
        """A new sandbox of the worker."""
        answer = self.worker.post("/v1/sandboxes", json=more)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def start(self, command: str | list[str], box: str | None = None) -> dict[str, Any]:
        """A command in the background."""
        path = f"/v1/sandboxes/{box}/exec" if box else "/v1/run"
        answer = self.worker.post(path, json={"command": command, "background": True})
        assert answer.status_code == 202, answer.text
        made: dict[str, Any] = answer.json()
        return made


@pytest.fixture
def real(browser: Browser, serve: Serve, user: As) -> Iterator[Real]:
    """A server of the test's own."""
    served = serve(user)
    for visits in visiting(browser, f"{served.url}/"):
        found = Real(served, visits)
        yield found
        found.worker.close()
    assert [line for line in served.log if line["level"] == "error"] == []


def test_every_view_works_and_nothing_is_refused(real: Real) -> None:
    box = real.sandbox(metadata={"task": "42"}, env={"SECRET": "value"})
    run = real.start("echo out; echo err >&2", box["id"])
    real.worker.post("/v1/sandboxes", json={"resources": {"memory": "64G"}})
    page = real.sign_in()
    wrong: list[str] = []
    page.on("response", lambda a: wrong.append(f"{a.status} {a.url}") if a.status >= 400 else None)
    places = {
        "overview": "#overview-denials tbody tr", "sandboxes": "#sandboxes tbody tr",
        f"sandboxes/{box['id']}": "#sandbox-execs tbody tr",
        "executions": "#executions tbody tr", f"executions/{run['id']}": "#output .part.stderr",
        "audit": "#denials tbody tr", "tokens": "#tokens tbody tr",
    }  # fmt: skip
    for place, wanted in places.items():
        page.evaluate("(place) => { location.hash = `#/${place}`; }", place)
        page.wait_for_selector(wanted)
        # Through a refresh as well.
        with page.expect_response("**/v1/**"):
            pass
        expect(page.locator("#trouble")).to_be_hidden()
    assert wrong == []


def test_usage_is_the_services_own_count(real: Real) -> None:
    real.sandbox()
    boss = real.sign_in()
    expect(boss.locator("#usage li").first).to_contain_text("0 of 50")
    expect(boss.locator("#usage")).to_contain_text("Sandboxes, all agents1 of 500")
    page = real.visits.sign_in("overview", real.token)
    first = page.locator("#usage li").first
    expect(first).to_contain_text("1 of 50")
    real.sandbox()
    expect(first).to_contain_text("2 of 50")


def test_output_is_live_and_a_kill_ends_it(real: Real) -> None:
    box = real.sandbox()
    run = real.start("for n in 1 2 3; do echo line $n; done; echo oops >&2; sleep 300", box["id"])
    page = real.sign_in(f"executions/{run['id']}")
    expect(page.locator("#output .stdout")).to_have_text("line 1\nline 2\nline 3\n")
    expect(page.locator("#output .stderr")).to_have_text("oops")
    expect(page.locator("#execution-state")).to_have_text("running")
    expect(page.locator("#stream-state")).to_have_text("live")
    page.locator("#view-execution [aria-label^=Kill]").click()
    page.click("#confirm-go")
    expect(page.locator("#stream-state")).to_have_text("complete")
    expect(page.locator("#execution-state")).to_have_text("SIGKILL")
    assert real.worker.get(f"/v1/execs/{run['id']}").json()["state"] == "Exited"


def test_bytes_that_are_no_text_are_shown_and_downloaded(real: Real, tmp_path: Any) -> None:
    run = real.start(r"printf 'a\377b \360\237'; printf '\232\233 \033[31mred\033[0m\r\nend'")
    page = real.sign_in(f"executions/{run['id']}")
    expect(page.locator("#stream-state")).to_have_text("complete")
    assert page.locator("#output").text_content() == "a\ufffdb \U0001f69b red\nend"
    with page.expect_download() as waiting:
        page.click("#download")
    waiting.value.save_as(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == (b"a\xffb \xf0\x9f\x9a\x9b \x1b[31mred\x1b[0m\r\nend")


def test_much_output_is_followed_to_its_end(real: Real) -> None:
    run = real.start("seq 1 300000; echo the end")
    page = real.sign_in(f"executions/{run['id']}")
    expect(page.locator("#stream-state")).to_have_text("complete", timeout=60_000)
    shown = page.locator("#output").text_content() or ""
    assert shown.endswith("299999\n300000\nthe end\n")
    numbers = [int(line) for line in shown.splitlines()[1:-1]]
    assert numbers == list(range(numbers[0], 300001))
    expect(page.locator("#output-cut")).to_be_visible()


def test_a_sandbox_is_paused_resumed_and_deleted(real: Real) -> None:
    box = real.sandbox()
    page = real.sign_in("sandboxes")
    row = page.locator("#sandboxes tbody tr")
    row.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("Paused")
    assert real.worker.get(f"/v1/sandboxes/{box['id']}").json()["state"] == "Paused"
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("Running")
    row.get_by_role("button", name="Delete").click()
    page.click("#confirm-go")
    expect(page.locator("#view-sandboxes .empty")).to_contain_text("There is no sandbox")
    assert real.worker.get(f"/v1/sandboxes/{box['id']}").status_code == 404


def test_many_sandboxes_are_paged_the_newest_first(real: Real, user: As, serve: Serve) -> None:
    served = serve(user, env={"MAX_SANDBOXES_PER_AGENT": "200"})
    admin, worker = served.token("boss", "--scope", "admin"), served.client(served.token("w"))
    ids = [worker.post("/v1/sandboxes", json={"metadata": {"n": str(n)}}).json()["id"]
           for n in range(120)]  # fmt: skip
    worker.close()
    visits = Visits(real.visits.browser, f"{served.url}/")
    page = visits.sign_in("sandboxes", admin)
    pages = page.locator("#view-sandboxes .pages")
    found: list[str] = []
    for number in (1, 2, 3):
        expect(pages).to_contain_text(f"page {number}")
        page.wait_for_function("(id) => !document.querySelector(`#sandboxes a[title='${id}']`)",
                               arg=found[-1] if found else "none")  # fmt: skip
        found += page.evaluate(
            "[...document.querySelectorAll('#sandboxes tbody a')].map((a) => a.title)"
        )
        if number < 3:
            pages.get_by_role("button", name="Next").click()
    assert found == ids[::-1]
    page.fill("#view-sandboxes [name=q]", "n=7")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    visits.close()


def test_a_denial_stands_first_with_its_rule(real: Real) -> None:
    refused = real.worker.post("/v1/sandboxes", json={"resources": {"memory": "64G"}}).json()
    for _ in range(3):
        real.sandbox()
    page = real.sign_in("audit")
    row = page.locator("#denials tbody tr").first
    expect(row).to_contain_text("worker-1")
    expect(row).to_contain_text(refused["rule"])
    expect(row).to_contain_text("sandbox.create")
    page.fill("#view-audit [name=agent]", "worker-1")
    page.fill("#view-audit [name=action]", "sandbox.create")
    page.select_option("#view-audit [name=decision]", "allow")
    page.select_option("#view-audit [name=since]", "15m")
    expect(page.locator("#records tbody tr")).to_have_count(3)
    page.select_option("#view-audit [name=decision]", "deny")
    expect(page.locator("#records tbody tr")).to_have_count(1)


def test_the_audit_is_paged(real: Real) -> None:
    for _ in range(30):
        real.worker.post("/v1/run", json={"command": "true"})
    page = real.sign_in("audit")
    expect(page.locator("#records tbody tr")).to_have_count(50)
    seen = page.locator("#records tbody td.mono:last-child").all_inner_texts()
    page.locator("#view-audit .pages").get_by_role("button", name="Next").click()
    expect(page.locator("#view-audit .pages")).to_contain_text("page 2")
    last = int(seen[-1][1:])
    expect(page.locator("#records tbody tr").first).to_contain_text(f"#{last - 1}")


def test_a_visit_to_the_login_is_no_denial(real: Real) -> None:
    real.visits.open("audit")
    page = real.sign_in("audit")
    expect(page.locator("#records tbody tr").first).to_be_visible()
    expect(page.locator("#audit-denied .empty")).to_be_visible()


# --- tokens and sessions


def test_a_token_from_the_dialog_works_until_it_is_revoked(real: Real) -> None:
    page = real.sign_in("tokens")
    page.click("#token-new")
    page.fill("#token-name", "worker-9")
    page.fill("#token-quotas", "MAX_SANDBOXES_PER_AGENT=1")
    page.get_by_role("button", name="Make the token").click()
    expect(page.locator("#token-shown")).to_be_visible()
    token = page.input_value("#token-value")
    page.get_by_role("button", name="Done").click()
    theirs = real.visits.sign_in("overview", token)
    expect(theirs.locator("#me")).to_have_text("worker-9")
    expect(theirs.locator("#usage li").first).to_contain_text("0 of 1")

    page.locator("#tokens [aria-label='Rotate worker-9']:visible").click()
    page.click("#confirm-go")
    expect(page.locator("#token-value")).to_have_value(value_of_another(token))
    second = page.input_value("#token-value")
    page.get_by_role("button", name="Done").click()
    # The session of the old one is over at once.
    expect(theirs.locator("#login-note")).to_contain_text("session has ended")
    theirs.fill("#login-token", token)
    theirs.press("#login-token", "Enter")
    expect(theirs.locator("#login .problem")).to_contain_text("UNAUTHENTICATED")
    theirs.fill("#login-token", second)
    theirs.press("#login-token", "Enter")
    expect(theirs.locator("#me")).to_have_text("worker-9")

    page.locator("#tokens [aria-label='Revoke worker-9']:visible").click()
    page.click("#confirm-go")
    expect(page.locator("#tokens [aria-label='Revoke worker-9']:visible")).to_have_count(0)
    expect(theirs.locator("#login-note")).to_contain_text("session has ended")


def value_of_another(token: str) -> Any:
    """A token that is not this one."""
    return re.compile(rf"^(?!{re.escape(token)}$)sbx_[a-z2-7]{{8}}_[A-Za-z0-9_-]{{43}}$")


def test_a_bad_quota_is_refused_in_the_form(real: Real) -> None:
    page = real.sign_in("tokens")
    page.click("#token-new")
    page.fill("#token-name", "worker-9")
    page.fill("#token-quotas", "MAX_NONSENSE=1")
    page.get_by_role("button", name="Make the token").click()
    expect(page.locator("#token-form .problem")).to_contain_text("MAX_NONSENSE")
    page.fill("#token-quotas", "")
    page.fill("#token-name", "<b>")
    page.get_by_role("button", name="Make the token").click()
    expect(page.locator("#token-form .problem")).to_contain_text("INVALID")


def test_signing_out_kills_the_cookie(real: Real) -> None:
    page = real.sign_in()
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    with real.served.client(cookies={cookie["name"]: cookie["value"]}) as copied:
        assert copied.get("/v1/whoami").status_code == 403
        copied.headers["X-CSRF-Token"] = page.evaluate("localStorage.session")
        assert copied.get("/v1/whoami").status_code == 200
        page.click("#sign-out")
        expect(page.locator("#login-note")).to_contain_text("signed out")
        assert copied.get("/v1/whoami").status_code == 401


def test_cannot_act_with_the_cookie_alone(real: Real) -> None:
    """As a page of another site would: the browser adds the cookie, nobody adds the second."""
    box = real.sandbox()
    page = real.sign_in()
    wanted = f"v1/sandboxes/{box['id']}"
    call = "(path) => fetch(path, {method: 'DELETE'}).then((answer) => answer.status)"
    assert page.evaluate(call, wanted) == 403
    with_it = """(path) =>
        fetch(path, {method: "DELETE", headers: {"X-CSRF-Token": localStorage.session}})
        .then((a) => a.status)"""
    assert page.evaluate(with_it, wanted) == 204


# --- attacks


@pytest.mark.parametrize("bypass", [True, False], ids=["without-policy", "with-policy"])
def test_cannot_run_script_through_the_service(real: Real, bypass: bool) -> None:
    payload = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\x1b[31m'
    box = real.sandbox(metadata={"note": payload})
    run = real.start(["sh", "-c", 'printf %s "$1"; printf %s "$1" >&2', "sh", payload], box["id"])
    real.worker.post("/v1/sandboxes", json={"template": "default", "image": "a<b"})
    real.worker.post("/v1/sandboxes", json={payload: 1})
    page = real.sign_in(f"executions/{run['id']}", bypass_csp=bypass)
    expect(page.locator("#stream-state")).to_have_text("complete")
    expect(page.locator("#output .stdout")).to_contain_text("<img src=x onerror=")
    for place in (f"sandboxes/{box['id']}", "sandboxes", "executions", "audit", "overview"):
        page.evaluate("(place) => { location.hash = `#/${place}`; }", place)
        page.wait_for_function("document.querySelector('main > section:not([hidden]) td, dd')")
        page.wait_for_timeout(200)
        assert page.evaluate("window.pwned") is None
        assert page.locator("main img, main script").count() == 0
    if bypass:
        page.evaluate("(html) => { document.body.innerHTML = html; }", payload)
        page.wait_for_function("window.pwned")
    else:
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("(html) => { document.body.innerHTML = html; }", payload)
        page.evaluate("violations.length = 0")


def test_every_file_carries_the_policy(real: Real) -> None:
    names = [f"/{name}" for name in dashboard._files() if name != "index.html"]
    with real.served.client() as client:
        for path in ("/", *names):
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == dashboard.POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304


# --- the stub of the other tests


def test_the_stub_answers_with_the_fields_of_the_service(real: Real) -> None:
    box = real.sandbox()
    real.worker.post(f"/v1/sandboxes/{box['id']}/exec", json={"command": "true"})
    real.worker.post("/v1/sandboxes", json={"resources": {"memory": "64G"}})
    fake = api.Stub()
    visits = Visits(real.visits.browser, fake.url)
    stub = visits.sign_in()
    true = real.sign_in()

    def both(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        ask = """(path) => fetch(path, {headers: {"X-CSRF-Token": localStorage.session}})
            .then((answer) => answer.json())"""
        return stub.evaluate(ask, path), true.evaluate(ask, path)

    for path in ("v1/sandboxes?order=desc", "v1/execs?order=desc", "v1/tokens"):
        mine, theirs = both(path)
        assert mine.keys() == theirs.keys(), path
        # The stub has everything the service has; more only where the page takes it or leaves it.
        assert mine["items"][0].keys() - theirs["items"][0].keys() <= {"owner"}, path
        assert theirs["items"][0].keys() <= mine["items"][0].keys(), path
    for path in ("v1/session", "v1/whoami", "v1/policy"):
        mine, theirs = both(path)
        assert mine.keys() <= theirs.keys(), path
    mine, theirs = both("v1/whoami")
    assert mine["limits"].keys() <= theirs["limits"].keys()
    assert mine["usage"].keys() == theirs["usage"].keys()
    mine, theirs = both("v1/policy")
    assert mine["backends"][0].keys() == theirs["backends"][0].keys()
    mine, theirs = both("v1/audit?decision=deny")
    assert set(theirs["items"][0]) - {"limits"} <= set(api.line(1))
    used = real.worker.get(f"/v1/sandboxes/{box['id']}/metrics").json()
    assert used.keys() == {"cpu", "memory", "pids", "disk"}
    visits.close()
    fake.close()
