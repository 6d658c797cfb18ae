"""What the views show, and how they stay live without getting in the way."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from . import stub as api

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from .conftest import Visits
    from .stub import Stub


def rows(page: Page, table: str) -> int:
    """How many rows a table has."""
    return page.locator(f"#{table} tbody tr").count()


# --- signing in and out


def test_a_wrong_token_is_answered_in_words(visits: Visits, stub: Stub) -> None:
    page = visits.open()
    page.fill("#login-token", "sbx_wrong")
    page.press("#login-token", "Enter")
    problem = page.locator("#login .problem")
    expect(problem).to_contain_text("the token is not valid")
    expect(problem).to_contain_text("UNAUTHENTICATED")
    expect(problem).to_contain_text("ask for a new one")
    expect(page.locator("#login-token")).to_be_focused()


def test_a_stranger_asks_nothing_of_the_api(visits: Visits, stub: Stub) -> None:
    """Each visit would be a denial in the audit."""
    page = visits.open("sandboxes")
    expect(page.locator("#login-token")).to_be_focused()
    assert stub.asked("GET", "/v1/") == []


def test_a_reload_stays_signed_in_and_where_it_was(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("executions?state=Exited")
    expect(page.locator("#executions tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("#executions tbody tr")).to_have_count(1)
    assert page.input_value("#view-executions [name=state]") == "Exited"


def test_the_end_of_a_session_leads_to_the_login_and_back(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes?q=task")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    stub.sessions.clear()
    expect(page.locator("#login-note")).to_contain_text("session has ended")
    expect(page.locator("#login-token")).to_be_focused()
    assert page.locator("#top").is_hidden()
    # Nothing of the view is left to be read.
    assert page.locator("#view-sandboxes").is_hidden()
    asked = len(stub.seen)
    page.wait_for_timeout(2500)
    assert len(stub.seen) == asked
    page.fill("#login-token", api.TOKEN)
    page.press("#login-token", "Enter")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)


def test_signing_out_ends_the_session_on_the_server(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in()
    page.click("#sign-out")
    expect(page.locator("#login-note")).to_contain_text("signed out")
    assert stub.sessions == {}


def test_an_agent_sees_no_view_of_admins(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes", api.WORKER)
    expect(page.locator("#me")).to_have_text("worker-1")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(2)
    assert page.locator("header nav a:visible").all_inner_texts() == [
        "Overview", "Sandboxes", "Executions",
    ]  # fmt: skip
    assert page.locator("#sandboxes th:visible", has_text="Agent").count() == 0
    page.evaluate("location.hash = '#/overview'")
    expect(page.locator("#usage li")).to_have_count(3)
    assert stub.asked("GET", "/metrics") == stub.asked("GET", "/v1/audit") == []
    page.evaluate("location.hash = '#/tokens'")
    expect(page.locator("#view-missing .problem")).to_contain_text("SCOPE_MISSING")
    assert stub.asked("GET", "/v1/tokens") == []


# --- usage, facts


def test_usage_is_shown_against_the_quota_in_words_too(visits: Visits, stub: Stub) -> None:
    stub.limits["maxSandboxesPerAgent"] = 2
    page = visits.sign_in()
    first = page.locator("#usage li").first
    expect(first).to_contain_text("Sandboxes")
    expect(first).to_contain_text("2 of 2")
    bar = first.get_by_role("meter", name="Sandboxes")
    expect(bar).to_have_attribute("aria-valuetext", "2 of 2")
    expect(bar).to_have_attribute("data-kind", "bad")
    # Of all agents, for who may know.
    expect(page.locator("#usage li").nth(3)).to_contain_text("15 of 500")
    page.click("summary")
    expect(page.locator("#limits")).to_contain_text("MAX_OUTPUT_BYTES")
    expect(page.locator("#limits")).to_contain_text("10 MiB")
    expect(page.locator("#limits")).to_contain_text("python:3.12-slim")


def test_a_sandbox_tells_which_limits_nothing_keeps(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in(f"sandboxes/{stub.sandboxes[0]['id']}")
    usage = page.locator("#sandbox-usage")
    expect(usage).to_contain_text("130 MiB of 512 MiB")
    expect(usage).to_contain_text("kept by cgroup")
    expect(usage).to_contain_text("not kept by anything here")
    expect(page.locator("#sandbox-execs tbody tr")).to_have_count(2)


def test_what_is_gone_says_so(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes/sbx-none")
    problem = page.locator("#view-missing .problem")
    expect(problem).to_contain_text("there is no such sandbox")
    expect(problem).to_contain_text("NOT_FOUND")
    expect(problem).to_contain_text("it may have expired")


def test_empty_views_say_what_to_do(visits: Visits, stub: Stub) -> None:
    stub.sandboxes, stub.executions, stub.audit, stub.tokens = [], [], [], []
    page = visits.sign_in()
    expect(page.locator("#view-overview")).to_contain_text("sandboxctl remote run -- echo hello")
    expect(page.locator("#view-overview")).to_contain_text("Nothing was denied.")
    for place, words in (
        ("sandboxes", "sandboxctl remote create"),
        ("executions", "sandboxctl remote run"),
        ("audit", "No record matches."),
        ("tokens", "Make one for each agent"),
    ):
        page.evaluate(f"location.hash = '#/{place}'")
        expect(page.locator(f"#view-{place} .empty:visible").last).to_contain_text(words)


# --- filters and pages


def test_a_thousand_sandboxes_come_in_pages(visits: Visits, stub: Stub) -> None:
    stub.sandboxes = [api.sandbox(n, metadata={"task": str(n)}) for n in range(1, 1001)]
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(50)
    pages = page.locator("#view-sandboxes .pages")
    expect(pages).to_contain_text("50 rows, page 1")
    pages.get_by_role("button", name="Next").click()
    expect(pages).to_contain_text("page 2")
    expect(page.locator("#sandboxes tbody tr").first).to_contain_text("task=51")
    pages.get_by_role("button", name="Next").click()
    expect(pages).to_contain_text("page 3")
    pages.get_by_role("button", name="Previous").click()
    expect(page.locator("#sandboxes tbody tr").first).to_contain_text("task=51")
    page.go_back()
    expect(pages).to_contain_text("page 3")
    pages.get_by_role("button", name="First").click()
    expect(page.locator("#sandboxes tbody tr").first).to_contain_text("task=1")
    # A look for metadata is the server's: it finds what is on no page here.
    page.keyboard.press("/")
    page.keyboard.type("task=777")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    expect(page.locator("#sandboxes tbody tr")).to_contain_text("task=777")


def test_a_refresh_of_a_full_page_is_quick(visits: Visits, stub: Stub) -> None:
    stub.sandboxes = [api.sandbox(n, metadata={"task": str(n)}) for n in range(1, 1001)]
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(50)
    spent = page.evaluate("""async () => {
        const m = await import("/assets/sandboxes.js");
        const r = await import("/assets/route.js");
        const times = [];
        for (let n = 0; n < 5; n += 1) {
            const real = window.fetch;
            const text = await (await real("v1/sandboxes?order=desc&limit=50")).text();
            window.fetch = async () => new Response(text, {status: 200});
            const start = performance.now();
            await m.sandboxes.refresh(r.read(), {});
            times.push(performance.now() - start);
            window.fetch = real;
        }
        return Math.min(...times);
    }""")
    # A tenth of a frame's worth would be nice; a frame of a slow machine is what must hold.
    assert spent < 50


def test_text_narrows_the_page(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(2)
    page.fill("#view-sandboxes [name=q]", "paus")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    expect(page.locator("#view-sandboxes .pages")).to_contain_text("1 of 2 rows on this page")
    page.fill("#view-sandboxes [name=q]", "nothing like it")
    expect(page.locator("#view-sandboxes .empty")).to_contain_text("No sandbox matches")
    page.click("#view-sandboxes [type=reset]")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(2)
    assert page.evaluate("location.hash") == "#/sandboxes"


def test_denials_stand_first_in_the_audit(visits: Visits, stub: Stub) -> None:
    stub.audit = [api.line(n) for n in range(1, 200)]
    for seq in (5, 60, 150):
        stub.audit[seq - 1] |= {"decision": "deny", "rule": f"rule.{seq}", "reason": f"why {seq}"}
    page = visits.sign_in("audit")
    denials = page.locator("#denials tbody tr")
    expect(denials).to_have_count(3)
    assert [row.split("\t")[2] for row in denials.all_inner_texts()] == [
        "why 150",
        "why 60",
        "why 5",
    ]
    top = page.locator("#denials").bounding_box()
    below = page.locator("#records").bounding_box()
    assert top
    assert below
    assert top["y"] < below["y"]
    expect(page.locator("#records tbody tr")).to_have_count(50)
    page.locator("#view-audit .pages").get_by_role("button", name="Next").click()
    expect(page.locator("#audit-denied")).to_be_hidden()
    expect(page.locator("#records tbody tr.deny")).to_have_count(0)
    expect(page.locator("#records tbody tr").first).to_contain_text("#149")


def test_the_audit_is_filtered_by_the_server(visits: Visits, stub: Stub) -> None:
    stub.audit = [api.line(n) for n in range(1, 100)]
    stub.audit[9] |= {"decision": "deny", "action": "sandbox.create", "reason": "too much memory",
                      "actor": {"agent": "marie", "addr": "unix"}}  # fmt: skip
    page = visits.sign_in("audit")
    expect(page.locator("#records tbody tr")).to_have_count(50)
    page.fill("#view-audit [name=agent]", "marie")
    expect(page.locator("#records tbody tr")).to_have_count(1)
    page.fill("#view-audit [name=action]", "sandbox.create")
    page.select_option("#view-audit [name=decision]", "deny")
    page.select_option("#view-audit [name=since]", "1h")
    expect(page.locator("#audit-all-title")).to_have_text("Denied, newest first")
    expect(page.locator("#records tbody tr")).to_contain_text("too much memory")
    path = stub.asked("GET", "/v1/audit")[-1][0]
    for part in ("agent=marie", "action=sandbox.create", "decision=deny", "since=2"):
        assert part in path
    assert page.evaluate("location.hash") == (
        "#/audit?agent=marie&action=sandbox.create&decision=deny&since=1h"
    )
    page.select_option("#view-audit [name=decision]", "allow")
    expect(page.locator("#audit-all .empty")).to_be_visible()


# --- live


def test_changes_appear_by_themselves_and_in_place(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    first = page.locator("#sandboxes tbody tr").first
    expect(first).to_contain_text("Running")
    page.evaluate("window.kept = document.querySelector('#sandboxes tbody tr')")
    stub.sandboxes[0]["state"] = "Failed"
    stub.sandboxes.insert(0, api.sandbox(3))
    expect(page.locator("#sandboxes tbody tr")).to_have_count(3)
    expect(page.locator("#sandboxes tbody tr").nth(1)).to_contain_text("Failed")
    assert page.evaluate("kept === document.querySelectorAll('#sandboxes tbody tr')[1]")


def test_a_refresh_leaves_focus_and_rows_under_the_user_alone(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(2)
    page.evaluate("window.picked = document.querySelectorAll('#sandboxes [aria-label^=Delete]')[1]")
    page.evaluate("picked.focus()")
    before = page.evaluate("picked.getBoundingClientRect().top")
    stub.sandboxes.insert(0, api.sandbox(3))
    stub.sandboxes[1]["state"] = "Failed"
    held = page.locator("#view-sandboxes .held button")
    expect(held).to_have_text("Show 1 new row")
    # Cells are fresh, rows stay where they are.
    expect(page.locator("#sandboxes tbody tr").first).to_contain_text("Failed")
    assert rows(page, "sandboxes") == 2
    assert page.evaluate("document.activeElement === picked")
    assert page.evaluate("picked.isConnected")
    assert abs(page.evaluate("picked.getBoundingClientRect().top") - before) < 40
    held.click()
    expect(page.locator("#sandboxes tbody tr")).to_have_count(3)
    expect(held).to_be_hidden()
    assert page.evaluate("picked.isConnected")


def test_rows_wait_while_the_pointer_is_over_the_table(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.locator("#sandboxes [aria-label^=Delete]").first.hover()
    stub.sandboxes.insert(0, api.sandbox(3))
    expect(page.locator("#view-sandboxes .held button")).to_be_visible()
    assert rows(page, "sandboxes") == 2
    page.mouse.move(5, 5)
    expect(page.locator("#sandboxes tbody tr")).to_have_count(3)


def test_a_row_that_goes_hands_the_focus_on(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.locator("#sandboxes [aria-label^=Delete]").first.click()
    page.click("#confirm-go")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    assert page.evaluate("document.activeElement.closest('#view-sandboxes') !== null")


def test_failures_are_shown_with_their_remedy_and_tried_again_later(
    visits: Visits, stub: Stub
) -> None:
    page = visits.sign_in("sandboxes")
    expect(page.locator("#pulse")).to_have_text("Live")
    stub.broken["/v1/sandboxes"] = (503, {"code": "BACKEND_UNAVAILABLE", "message": "no bwrap",
                                          "hint": "install it", "requestId": "req_7"})  # fmt: skip
    trouble = page.locator("#trouble")
    expect(trouble).to_contain_text("no bwrap")
    for words in ("BACKEND_UNAVAILABLE", "install it", "req_7"):
        expect(trouble).to_contain_text(words)
    # What was there stays to be read.
    assert rows(page, "sandboxes") == 2
    expect(page.locator("#pulse")).to_contain_text("Retry in 8 s")
    stub.broken.clear()
    page.click("#retry")
    expect(trouble).to_be_hidden()
    expect(page.locator("#pulse")).to_have_text("Live")


def test_retries_come_at_growing_distances(visits: Visits, stub: Stub) -> None:
    page = visits.open()
    page.clock.install()
    # Time stands still but for what the test lets pass.
    page.clock.pause_at(datetime.fromtimestamp(page.evaluate("Date.now()") / 1000 + 60, UTC))
    page.fill("#login-token", api.TOKEN)
    page.press("#login-token", "Enter")
    page.wait_for_selector("#usage li")
    expect(page.locator("#pulse")).to_have_text("Live")
    stub.broken["/v1/whoami"] = (500, {"code": "INTERNAL", "message": "sorry"})
    page.clock.fast_forward(2000)
    waits = (4, 8, 16, 30, 30)
    for wait in waits:
        expect(page.locator("#pulse")).to_have_text(f"Retry in {wait} s")
        before = len(stub.asked("GET", "/v1/whoami"))
        page.clock.fast_forward(wait * 1000 - 100)
        assert len(stub.asked("GET", "/v1/whoami")) == before
        page.evaluate("document.querySelector('#pulse').textContent = 'old'")
        page.clock.fast_forward(200)
        expect(page.locator("#pulse")).not_to_have_text("old")


def test_a_hidden_page_asks_for_nothing(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", {get: () => window.away, configurable: true});
        window.away = true;
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    page.wait_for_timeout(300)
    before = len(stub.seen)
    page.wait_for_timeout(4500)
    assert len(stub.seen) == before
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    assert len(stub.seen) > before


def test_cannot_act_on_the_sandbox_before(visits: Visits, stub: Stub) -> None:
    """While the next one is loading, its page must not have the buttons of the last."""
    first, second = (box["id"] for box in stub.sandboxes)
    page = visits.sign_in(f"sandboxes/{first}")
    deeds = page.locator("#view-sandbox .line .actions button:visible")
    expect(deeds).to_have_count(2)
    stub.held.clear()
    page.evaluate(f"location.hash = '#/sandboxes/{second}'")
    expect(page.locator("#sandbox-title")).to_have_text(second)
    expect(deeds).to_have_count(0)
    expect(page.locator("#sandbox-facts")).to_have_text("")
    stub.held.set()
    expect(deeds).to_have_count(2)


def test_the_next_agent_finds_nothing_of_the_last(visits: Visits, stub: Stub) -> None:
    stub.sandboxes[0]["metadata"] = {"secret": "of-boss"}
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes")).to_contain_text("of-boss")
    page.click("#sign-out")
    expect(page.locator("#login-note")).to_contain_text("signed out")
    assert "of-boss" not in page.content()
    page.reload()
    expect(page.locator("#login-note")).to_be_hidden()


def test_an_answer_for_another_view_is_dropped(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(2)
    stub.held.clear()
    page.evaluate("location.hash = '#/sandboxes?state=Paused'")
    page.evaluate("location.hash = '#/sandboxes?state=Running'")
    time.sleep(0.3)
    stub.held.set()
    expect(page.locator("#sandboxes tbody tr")).to_have_count(1)
    expect(page.locator("#sandboxes tbody tr")).to_contain_text("Running")
