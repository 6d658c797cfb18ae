"""Output, live: complete, in order, across broken connections, and bounded."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from . import stub as api

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Visits
    from .stub import Stub


def test_output_appears_while_it_runs_and_ends_with_the_result(visits: Visits, stub: Stub) -> None:
    run = stub.executions[0]
    stub.output[run["id"]] = [
        ("stdout", {"data": "one\n"}), ("stderr", {"data": "two\n"}), "wait",
        ("stdout", {"data": "three\n"}),
    ]  # fmt: skip
    page = visits.sign_in(f"executions/{run['id']}")
    output = page.locator("#output")
    expect(output).to_have_text("one\ntwo\n", use_inner_text=False)
    expect(page.locator("#stream-state")).to_have_text("live")
    expect(page.locator("#execution-state")).to_have_text("running")
    expect(page.locator("#execution-command")).to_have_text("make -j2 test")
    # stderr is named, not only coloured.
    expect(output.get_by_role("group", name="stderr")).to_have_text("two")
    run |= {"state": "Exited", "exitCode": 3, "durationMs": 5000}
    stub.go.set()
    expect(output).to_contain_text("three")
    expect(page.locator("#execution-state")).to_have_text("exit 3")
    expect(page.locator("#stream-state")).to_have_text("complete")
    expect(page.locator("#announce")).to_contain_text("ended: exit 3")
    expect(page.locator("#view-execution [aria-label^=Kill]")).to_be_hidden()


def test_a_broken_stream_goes_on_where_it_broke(visits: Visits, stub: Stub) -> None:
    run = stub.executions[0]
    stub.output[run["id"]] = [
        ("stdout", {"data": "one "}), ("stdout", {"data": "two "}), None,
        ("stdout", {"data": "three"}),
    ]  # fmt: skip
    page = visits.sign_in(f"executions/{run['id']}")
    expect(page.locator("#output")).to_have_text("one two three")
    asked = stub.asked("GET", f"/v1/execs/{run['id']}/events")
    assert [headers.get("Last-Event-ID") for _, headers, _ in asked[:2]] == [None, "2"]


def test_characters_that_are_cut_between_events_are_whole(visits: Visits, stub: Stub) -> None:
    run = stub.executions[1]
    lorry = "äö\U0001f69b".encode()
    first, last = b64encode(lorry[:-2]).decode(), b64encode(lorry[-2:]).decode()
    stub.output[run["id"]] = [
        ("stdout", {"dataBase64": first}), ("stderr", {"data": "é"}),
        ("stdout", {"dataBase64": last}),
    ]  # fmt: skip
    page = visits.sign_in(f"executions/{run['id']}")
    expect(page.locator("#output .stdout").first).to_have_text("äö")
    expect(page.locator("#output .stdout").last).to_have_text("\U0001f69b")


def test_much_output_stays_bounded_and_says_so(visits: Visits, stub: Stub, tmp_path: Path) -> None:
    run = stub.executions[1]
    line = "x" * 99 + "\n"
    stub.output[run["id"]] = [("stdout", {"data": f"piece {n}\n{line * 1000}"}) for n in range(40)]
    page = visits.sign_in(f"executions/{run['id']}")
    expect(page.locator("#stream-state")).to_have_text("complete")
    expect(page.locator("#output-cut")).to_be_visible()
    shown = page.evaluate("document.querySelector('#output').textContent.length")
    assert 900_000 < shown <= 1_100_000
    expect(page.locator("#output")).to_contain_text("piece 39")
    assert not page.evaluate("document.querySelector('#output').textContent.includes('piece 1\\n')")
    at_end = """() => { const pane = document.querySelector("#output");
        return pane.scrollHeight - pane.scrollTop - pane.clientHeight < 24; }"""
    assert page.evaluate(at_end)
    with page.expect_download() as waiting:
        page.click("#download")
    kept = tmp_path / "output.log"
    waiting.value.save_as(kept)
    assert kept.read_text() == "".join(f"piece {n}\n{line * 1000}" for n in range(40))


def test_scrolling_up_lets_go_of_the_end(visits: Visits, stub: Stub) -> None:
    run = stub.executions[0]
    stub.output[run["id"]] = [("stdout", {"data": "line\n" * 500}), "wait",
                              ("stdout", {"data": "more\n" * 500})]  # fmt: skip
    page = visits.sign_in(f"executions/{run['id']}")
    expect(page.locator("#output")).to_contain_text("line")
    page.evaluate("document.querySelector('#output').scrollTop = 100")
    expect(page.locator("#follow")).not_to_be_checked()
    stub.go.set()
    expect(page.locator("#output")).to_contain_text("more")
    assert page.evaluate("document.querySelector('#output').scrollTop") == 100
    page.check("#follow")
    assert page.evaluate("document.querySelector('#output').scrollTop") > 1000


def test_leaving_the_view_ends_its_stream(visits: Visits, stub: Stub) -> None:
    first, second = api.execution(1, **api.RUNNING), api.execution(2, **api.RUNNING)
    stub.executions = [first, second]
    stub.output = {
        first["id"]: [("stdout", {"data": "first"}), "wait", ("stdout", {"data": "late"})],
        second["id"]: [("stdout", {"data": "second"})],
    }  # fmt: skip
    page = visits.sign_in(f"executions/{first['id']}")
    expect(page.locator("#output")).to_have_text("first")
    page.evaluate(f"location.hash = '#/executions/{second['id']}'")
    expect(page.locator("#output")).to_have_text("second")
    stub.go.set()
    page.wait_for_timeout(300)
    expect(page.locator("#output")).to_have_text("second")


def test_a_command_without_output_says_so(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in(f"executions/{stub.executions[1]['id']}")
    expect(page.locator("#output-empty")).to_have_text("It wrote no output.")


def test_an_execution_that_is_gone_says_so(visits: Visits, stub: Stub) -> None:
    page = visits.sign_in("executions/exc-none")
    expect(page.locator("#view-missing .problem")).to_contain_text("there is no such execution")


def test_an_execution_that_never_started_tells_why(visits: Visits, stub: Stub) -> None:
    run = api.execution(3, state="Failed", exitCode=None, error="no such program: mkae")
    stub.executions.append(run)
    page = visits.sign_in(f"executions/{run['id']}")
    expect(page.locator("#execution-state")).to_have_text("did not start")
    expect(page.locator("#execution-facts")).to_contain_text("no such program: mkae")
