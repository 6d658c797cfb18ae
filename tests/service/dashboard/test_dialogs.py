"""Deeds: asked for first, done once, and answered in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from . import stub as api

if TYPE_CHECKING:
    from .conftest import Visits
    from .stub import Stub


def test_a_sandbox_is_deleted_after_a_question(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    box = stub.sandboxes[1]
    button = page.locator("#sandboxes [aria-label^=Delete]").nth(1)
    button.click()
    dialog = page.locator("#confirm")
    expect(dialog).to_contain_text(box["id"])
    # The harmless answer has the focus.
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(button).to_be_focused()
    assert stub.asked("DELETE", "/v1/") == []
    button.click()
    dialog.get_by_role("button", name="Delete").click()
    expect(dialog).to_be_hidden()
    assert [path for path, _, _ in stub.asked("DELETE", "/v1/")] == [f"/v1/sandboxes/{box['id']}"]
    expect(page.locator("#announce")).to_contain_text("deleted")


def test_a_refused_deed_says_why_and_stays_open(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.locator("#sandboxes [aria-label^=Delete]").first.click()
    stub.broken[f"/v1/sandboxes/{stub.sandboxes[0]['id']}"] = (
        409, {"code": "WRONG_STATE", "message": "it is stopping", "hint": "wait a moment"},
    )  # fmt: skip
    page.click("#confirm-go")
    problem = page.locator("#confirm .problem")
    expect(problem).to_contain_text("it is stopping")
    expect(problem).to_contain_text("WRONG_STATE")
    expect(problem).to_contain_text("wait a moment")
    page.keyboard.press("Escape")
    stub.broken.clear()
    page.locator("#sandboxes [aria-label^=Delete]").first.click()
    expect(problem).to_be_hidden()


def test_a_second_click_does_nothing_more(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("executions")
    page.locator("#executions [aria-label^=Kill]").first.click()
    stub.held.clear()
    page.click("#confirm-go")
    expect(page.locator("#confirm-go")).to_be_disabled()
    page.evaluate("document.querySelector('#confirm form').requestSubmit()")
    page.keyboard.press("Enter")
    stub.held.set()
    expect(page.locator("#confirm")).to_be_hidden()
    assert len(stub.asked("POST", "/v1/execs/")) == 1
    expect(page.locator("#executions tbody tr").first).to_contain_text("SIGKILL")


def test_pause_and_resume_change_places(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in(f"sandboxes/{stub.sandboxes[0]['id']}")
    pause = page.locator("#view-sandbox .actions button").first
    expect(pause).to_have_text("Pause")
    pause.click()
    expect(pause).to_have_text("Resume")
    expect(page.locator("#sandbox-state")).to_have_text("Paused")
    pause.click()
    expect(pause).to_have_text("Pause")
    verbs = [path.rpartition("/")[2] for path, _, _ in stub.asked("POST", "/v1/sandboxes/")]
    assert verbs == ["pause", "resume"]


def test_a_failed_pause_is_told(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in(f"sandboxes/{stub.sandboxes[0]['id']}")
    pause = page.locator("#view-sandbox .actions button").first
    expect(pause).to_have_text("Pause")
    stub.broken[f"/v1/sandboxes/{stub.sandboxes[0]['id']}/pause"] = (
        422, {"code": "UNSUPPORTED", "message": "this backend cannot pause"},
    )  # fmt: skip
    pause.click()
    expect(page.locator("#toast")).to_contain_text("this backend cannot pause")
    expect(page.locator("#toast")).to_contain_text("UNSUPPORTED")
    page.locator("#toast button").click()
    expect(page.locator("#toast")).to_be_hidden()


# --- tokens


def test_a_new_token_is_shown_once(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("tokens", permissions=["clipboard-read", "clipboard-write"])
    page.click("#token-new")
    expect(page.locator("#token-name")).to_be_focused()
    page.fill("#token-name", "worker-9")
    page.uncheck("#token-scopes [value=files]")
    page.check("#token-scopes [value='audit:read']")
    page.select_option("#token-expires", "7d")
    page.fill("#token-images", "python:* alpine")
    page.fill("#token-quotas", "MAX_SANDBOXES_PER_AGENT=5 MAX_MEMORY=1G")
    page.get_by_role("button", name="Make the token").click()
    value = page.locator("#token-value")
    expect(value).to_have_value("sbx_newtoken_secret")
    [(_, _, body)] = stub.asked("POST", "/v1/tokens")
    assert body == {
        "name": "worker-9", "scopes": ["sandbox:create", "exec", "audit:read"],
        "images": ["python:*", "alpine"], "expiresIn": 604800,
        "quotas": {"MAX_SANDBOXES_PER_AGENT": 5, "MAX_MEMORY": "1G"},
    }  # fmt: skip
    page.click("#token-copy")
    expect(page.locator("#token-copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "sbx_newtoken_secret"
    page.keyboard.press("Escape")
    expect(page.locator("#token-shown")).to_be_hidden()
    assert page.input_value("#token-value") == ""
    expect(page.locator("#tokens")).to_contain_text("worker-9")
    assert "sbx_newtoken_secret" not in page.content()


def test_a_token_can_be_copied_without_a_clipboard(visits: Visits, stub: Stub) -> None:
    """Browsers give it to secure pages only."""
    page = visits.sign_in("tokens")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.locator("#tokens [aria-label='Rotate worker-1']").click()
    page.click("#confirm-go")
    expect(page.locator("#token-value")).to_have_value("sbx_rotated0_secret")
    page.click("#token-copy")
    expect(page.locator("#token-copy")).to_have_text("Selected")
    assert page.evaluate("getSelection().toString()") == "sbx_rotated0_secret"


def test_a_taken_name_keeps_the_form(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("tokens")
    page.click("#token-new")
    page.fill("#token-name", "boss")
    page.keyboard.press("Enter")
    expect(page.locator("#token-form .problem")).to_contain_text("the name boss is taken")
    expect(page.locator("#token-name")).to_have_value("boss")


def test_a_token_is_revoked_after_a_question(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("tokens")
    page.locator("#tokens [aria-label='Revoke worker-1']").click()
    expect(page.locator("#confirm")).to_contain_text("worker-1")
    expect(page.locator("#confirm")).not_to_contain_text("signed in with")
    page.click("#confirm-go")
    row = page.locator("#tokens tbody tr", has_text="worker-1")
    expect(row).to_contain_text("revoked")
    expect(row.get_by_role("button")).to_have_count(0)
    page.locator("#tokens [aria-label='Revoke boss']").click()
    expect(page.locator("#confirm")).to_contain_text("you will be signed out")


def test_dialogs_close_with_the_session(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("tokens")
    page.click("#token-new")
    stub.sessions.clear()
    expect(page.locator("#login-note")).to_be_visible()
    expect(page.locator("#token-form")).to_be_hidden()
    expect(page.locator("#login-note")).to_have_text(re.compile("session has ended"))


def test_the_token_of_the_api_has_the_scopes_of_the_service() -> None:
    from agent_sandbox.service import dashboard
    from agent_sandbox.service.values import SCOPES

    found = dashboard.asset("/assets/dialogs.js")
    assert found is not None
    assert set(re.findall(r'^  \["([a-z:]+)", "', found[0].decode(), re.MULTILINE)) == set(SCOPES)
    assert set(api.SCOPES[api.TOKEN]) == set(SCOPES)
