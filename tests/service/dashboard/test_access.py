"""Keyboards, screen readers, colours, narrow screens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from . import stub as api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from .conftest import Visits
    from .stub import Stub

PLACES = {
    "overview": "#overview-denials tbody tr", "sandboxes": "#sandboxes tbody tr",
    f"sandboxes/sbx-{1:026d}": "#sandbox-usage li", "executions": "#executions tbody tr",
    f"executions/exc-{1:026d}": "#output .part.stderr", "audit": "#records tbody tr",
    "tokens": "#tokens tbody tr", "nowhere": "#view-missing .code",
}  # fmt: skip
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


@pytest.fixture
def full(stub: Stub) -> Stub:
    """Something of every kind."""
    stub.sandboxes += [
        api.sandbox(n, state=state, metadata={"task": "7"})
        for n, state in enumerate(("Pending", "Stopping", "Failed", "Terminated"), 3)
    ]
    ends: list[dict[str, Any]] = [
        {"exitCode": 2}, {"timedOut": True}, {"oomKilled": True}, {"state": "Lost"},
        {"state": "Pending", "exitCode": None}, {"signal": "SIGTERM"},
    ]  # fmt: skip
    stub.executions += [api.execution(n, **end) for n, end in enumerate(ends, 3)]
    stub.output[stub.executions[0]["id"]] = [
        ("stdout", {"data": "out\n"}), ("stderr", {"data": "err\n"}), "wait",
    ]  # fmt: skip
    stub.audit += [api.line(2, decision="deny", rule="limit.max_memory", reason="too much")]
    stub.tokens += [
        api.token("old", state="revoked", revokedAt=api.iso()),
        api.token("late", state="expired", quotas={"MAX_SANDBOXES_PER_AGENT": 1}),
    ]
    stub.limits["maxSandboxesPerAgent"] = 6
    return stub


def tour(page: Page) -> Iterator[str]:
    """Go everywhere; what is found there is there."""
    for place, wanted in PLACES.items():
        page.evaluate("(place) => { location.hash = `#/${place}`; }", place)
        page.wait_for_selector(wanted)
        yield place


# --- axe


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing(visits: Visits, full: Stub, axe: str, look: str) -> None:
    # Its own helpers use what our policy forbids.
    page = visits.open(bypass_csp=True, **LOOKS[look])
    page.evaluate(axe)
    check = """async () => (await axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a",
        "wcag21aa", "wcag22aa", "best-practice"]})).violations.map((v) =>
        `${v.id}: ${v.nodes.map((n) => n.target.join(" ")).slice(0, 4).join(" | ")}`)"""
    found = {"login": page.evaluate(check)}
    page.fill("#login-token", api.TOKEN)
    page.press("#login-token", "Enter")
    for place in tour(page):
        found[place] = page.evaluate(check)
    page.evaluate("location.hash = '#/tokens'")
    page.click("#token-new")
    found["new token"] = page.evaluate(check)
    page.keyboard.press("Escape")
    page.locator("#tokens [aria-label='Rotate worker-1']").click()
    found["confirm"] = page.evaluate(check)
    page.click("#confirm-go")
    page.wait_for_selector("#token-shown[open]")
    found["token"] = page.evaluate(check)
    assert {place: wrong for place, wrong in found.items() if wrong} == {}


def test_axe_would_find_something(visits: Visits, axe: str) -> None:
    """Its control."""
    page = visits.open(bypass_csp=True)
    page.evaluate(axe)
    page.evaluate("document.querySelector('label[for=login-token]').remove()")
    page.evaluate("document.querySelector('#login-token').removeAttribute('placeholder')")
    ids = page.evaluate("async () => (await axe.run()).violations.map((v) => v.id)")
    assert "label" in ids


# --- contrast, computed by ourselves

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const over = (top, below) => top.slice(0, 3).map(
    (c, i) => c * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const light = (rgb) => { const [r, g, b] = rgb.map((c) => { c /= 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      layers.push(rgba(getComputedStyle(each).backgroundColor));
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const words = walk.currentNode.data.trim();
    if (!words || !element.checkVisibility({visibilityProperty: true, opacityProperty: true})) {
      continue;
    }
    if (element.closest(".sr, .skip, :disabled, option")) continue;
    const below = ground(element);
    const value = ratio(over(rgba(getComputedStyle(element).color), below), below);
    found.push([value, `${element.tagName} ${element.className} ${words.slice(0, 20)}`]);
  }
  for (const field of document.querySelectorAll("input, select, .bar, button:not(.quiet)")) {
    if (!field.checkVisibility() || field.type === "checkbox" || field.disabled) continue;
    const edge = over(rgba(getComputedStyle(field).borderTopColor), ground(field.parentElement));
    // What shows that there is a control: 3:1.
    found.push([ratio(edge, ground(field.parentElement)) * 1.5,
      `edge of ${field.tagName} ${field.id} ${field.className}`]);
  }
  return found;
}"""


@pytest.mark.parametrize("look", ["light", "dark"])
def test_contrast_is_enough_everywhere(visits: Visits, full: Stub, look: str) -> None:
    page = visits.sign_in(**LOOKS[look], reduced_motion="reduce")
    low: dict[str, float] = {}
    count = 0
    for _ in tour(page):
        pairs = page.evaluate(CONTRAST)
        count += len(pairs)
        low |= {words: value for value, words in pairs if value < 4.5}
    page.evaluate("location.hash = '#/tokens'")
    page.click("#token-new")
    low |= {words: value for value, words in page.evaluate(CONTRAST) if value < 4.5}
    assert count > 300
    assert low == {}


def test_the_computation_finds_faint_text(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.wait_for_selector("#sandboxes tbody tr")
    page.evaluate("document.querySelector('#sandboxes-title').style.color = '#999'")
    assert any(v < 4.5 and "Sandboxes" in words for v, words in page.evaluate(CONTRAST))


# --- colours


def test_the_colours_follow_the_system_until_they_are_chosen(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.select_option("#theme", "light")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_selector("#usage li")
    assert page.evaluate(ground) == light
    assert page.input_value("#theme") == "light"
    page.select_option("#theme", "")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light


def test_the_chosen_colours_are_there_at_the_first_paint(visits: Visits, stub: Stub) -> None:
    page = visits.open(color_scheme="light")
    page.select_option("#theme", "dark")
    page.route("**/assets/app.js", lambda route: route.abort())
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_nothing_moves_for_who_wants_no_motion(visits: Visits, stub: Stub) -> None:
    moves = """() => [...document.querySelectorAll("*")].filter((e) => {
        const s = getComputedStyle(e);
        return parseFloat(s.transitionDuration) > 0 || s.animationName !== "none"; }).length"""
    page = visits.sign_in(reduced_motion="reduce")
    page.wait_for_selector("#usage li")
    assert page.evaluate(moves) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moves) > 0


# --- structure


def test_landmarks_headings_and_tables_are_named(visits: Visits, full: Stub) -> None:
    page = visits.sign_in()
    for place in tour(page):
        assert page.get_by_role("main").count() == 1
        assert page.get_by_role("banner").count() == 1
        assert page.get_by_role("contentinfo").count() == 1
        assert page.get_by_role("navigation", name="Views").count() == 1
        assert page.locator("h1:visible").count() == 1, place
        assert page.title().endswith("agent-sandbox")
    unnamed = """() => [...document.querySelectorAll("table")].filter((t) =>
        !t.caption?.textContent.trim()
        || [...t.querySelectorAll("thead th")].some((th) => th.scope !== "col")
        || [...t.querySelectorAll("tbody tr")].some((tr) => !tr.querySelector("th[scope=row]"))
        ).map((t) => t.id)"""
    assert page.evaluate(unnamed) == []


def test_states_are_words(visits: Visits, full: Stub) -> None:
    """No meaning by colour alone."""
    page = visits.sign_in("executions")
    expect(page.locator("#executions .state")).to_have_count(len(full.executions))
    assert page.locator("#executions .state").all_inner_texts() == [
        "running", "exit 0", "exit 2", "timed out", "out of memory", "lost", "queued", "SIGTERM",
    ]  # fmt: skip


def test_a_screen_reader_hears_little_and_politely(visits: Visits, full: Stub) -> None:
    page = visits.sign_in(f"executions/{full.executions[0]['id']}")
    expect(page.locator("#output")).to_contain_text("out")
    live = page.evaluate("""() =>
        [...document.querySelectorAll("[aria-live], [role=status], [role=alert]")]
        .map((e) => e.getAttribute("aria-live") ?? e.role)""")
    assert "assertive" not in live
    expect(page.locator("#output")).to_have_attribute("aria-live", "off")
    page.evaluate("""() => { window.said = []; new MutationObserver(() =>
        said.push(announce.textContent)).observe(announce,
        {childList: true, characterData: true, subtree: true}); }""")
    page.wait_for_timeout(4500)
    assert page.evaluate("said") == []


# --- the keyboard


def test_everything_is_reached_by_the_keyboard(visits: Visits, full: Stub) -> None:
    page = visits.open("sandboxes")
    expect(page.locator("#login-token")).to_be_focused()
    page.keyboard.type(api.TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#sandboxes tbody tr")).to_have_count(6)
    wanted = set(
        page.evaluate("""() => [...document.querySelectorAll("a[href], button, input, select")]
        .filter((e) => e.checkVisibility({visibilityProperty: true}) && !e.disabled)
        .filter((e) => !e.closest("dialog"))
        .map((e, n) => { e.dataset.stop = n; return String(n); })""")
    )
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(len(wanted) + 20):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement?.dataset.stop"))
    assert wanted <= seen


def test_the_focus_is_always_visible(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.wait_for_selector("#sandboxes tbody tr")
    page.evaluate("document.activeElement.blur()")
    for _ in range(25):
        page.keyboard.press("Tab")
        outline = page.evaluate("""() => { const s = getComputedStyle(document.activeElement);
            return document.activeElement === document.body ? "2px solid"
                : `${s.outlineWidth} ${s.outlineStyle}`; }""")
        assert outline == "2px solid"


def test_the_first_stop_skips_to_the_content(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.reload()
    page.wait_for_selector("#sandboxes tbody tr")
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    assert page.evaluate("location.hash") == "#/sandboxes"


def test_a_slash_goes_to_the_filter_unless_it_is_text(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("sandboxes")
    page.keyboard.press("/")
    field = page.locator("#view-sandboxes [name=q]")
    expect(field).to_be_focused()
    page.keyboard.type("a/b")
    expect(field).to_have_value("a/b")
    for view, name in (("executions", "q"), ("audit", "agent"), ("tokens", "q")):
        page.evaluate(f"location.hash = '#/{view}'")
        expect(page.locator(f"#{view}-title")).to_be_focused()
        page.keyboard.press("/")
        expect(page.locator(f"#view-{view} [name={name}]")).to_be_focused()
    # A key of one character must be possible to turn off (WCAG 2.1.4).
    page.uncheck("#keys")
    page.locator("#tokens-title").focus()
    page.keyboard.press("/")
    expect(page.locator("#tokens-title")).to_be_focused()


def test_a_new_view_has_the_focus_on_its_heading(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in()
    page.get_by_role("link", name="Audit", exact=True).click()
    expect(page.locator("#audit-title")).to_be_focused()
    expect(page.get_by_role("link", name="Audit", exact=True)).to_have_attribute(
        "aria-current", "page"
    )


# --- narrow screens


def test_a_narrow_screen_scrolls_nothing_but_tables(visits: Visits, full: Stub) -> None:
    page = visits.sign_in(**LOOKS["narrow"])
    for place in tour(page):
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, place
    assert page.locator("header nav a:visible").count() == 5
    box = page.locator("header nav a").last.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
