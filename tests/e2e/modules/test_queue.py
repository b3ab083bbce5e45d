"""The queue page: selection, refused moves, and ages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import call_module, open_blank_page

ROWS = "".join(
    f'<tr data-job="{job}"><td><input type="checkbox" name="job" value="{job}">'
    f'<button class="handle">{job}</button></td></tr>'
    for job in ("a", "b", "c")
)
QUEUE = f"""<script src="/vendor/htmx/htmx.min.js"></script>
<form id="bulk" data-move-url="/move"><input name="csrfmiddlewaretoken" value="x"><span id="chosen"></span>
<div id="queue" hx-get="/rows" hx-trigger="refresh" hx-target="#queue"><table><tbody>{ROWS}</tbody></table></div>
</form>"""


def test_selection_stays_when_a_job_moves(modules: Page) -> None:
    with open_blank_page(modules, QUEUE) as page:
        page.route("**/move", lambda route: route.fulfill(body='{"moved": true}', content_type="application/json"))
        rest = ROWS.split("</tr>")[1] + "</tr>" + ROWS.split("</tr>")[0] + "</tr>"  # the third job has started
        page.route("**/rows", lambda route: route.fulfill(body=f"<table><tbody>{rest}</tbody></table>"))
        call_module(page, "pages/queue.js", "")
        for job in ("a", "c"):
            page.check(f"[value={job}]")
        expect(page.locator("#chosen")).to_have_text("2 selected")
        page.press("tr[data-job=b] .handle", "ArrowUp")
        expect(page.locator("#chosen")).to_have_text("1 selected")
        assert page.is_checked("[value=a]")
        expect(page.locator("tr[data-job=b] .handle")).to_be_focused()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": 400, "body": {"errors": [{"field": "job", "message": "is no job's id"}]}}, "job: is no job's id"),
        ({"status": 502, "body": "away"}, "the server answered 502"),
        (None, "Failed to fetch"),
        ({"status": 200, "body": {"moved": False}}, "A job can move only among jobs with the same priority"),
    ],
)
def test_refused_move_shows_the_reason(modules: Page, answer: dict[str, Any] | None, words: str) -> None:
    with open_blank_page(modules, QUEUE) as page:
        page.route(
            "**/move",
            lambda route: (
                route.abort()
                if answer is None
                else route.fulfill(status=answer["status"], body=json.dumps(answer["body"]))
            ),
        )
        call_module(page, "pages/queue.js", "")
        page.press("tr[data-job=b] .handle", "ArrowUp")
        expect(page.locator("#chosen")).to_contain_text(words)


STARTS = """<script src="/vendor/htmx/htmx.min.js"></script><form id="bulk"><span id="chosen"></span>
<div id="queue" hx-get="/rows" hx-trigger="refresh" hx-target="#queue"><table><tbody>
<tr data-job="a"><td><span data-in-s="90">09:30</span></td></tr>
<tr data-job="b"><td><span data-in-s="3600">10:30</span></td></tr></tbody></table></div></form>"""


@pytest.mark.extended
def test_past_estimated_start_reads_any_moment(modules: Page) -> None:
    """The clock of the reader may be wrong, so the time since the page load counts."""
    with open_blank_page(modules, STARTS) as page:
        page.clock.install()
        call_module(page, "pages/queue.js", "")
        starts = page.locator("[data-in-s]")
        page.clock.run_for(20_000)
        expect(starts).to_have_text(["09:30", "10:30"])
        page.clock.run_for(20_000)
        expect(starts).to_have_text(["any moment", "10:30"])
        rows = '<table><tr data-job="b"><td><span data-in-s="7200">11:30</span></td></tr></table>'
        page.route("**/rows", lambda route: route.fulfill(body=rows))
        page.evaluate("document.getElementById('queue').dispatchEvent(new CustomEvent('refresh'))")
        expect(starts).to_have_text(["11:30"])


@pytest.mark.extended
def test_queue_refresh_preserves_selection_focus_and_message(modules: Page) -> None:
    with open_blank_page(modules, QUEUE) as page:
        page.route("**/rows", lambda route: route.fulfill(body=f"<table><tbody>{ROWS}</tbody></table>"))
        call_module(page, "pages/queue.js", "")
        page.check("[value=c]")
        page.evaluate("document.getElementById('chosen').textContent = 'Not moved.'")
        page.focus("[value=b]")
        page.evaluate("for (const row of document.querySelectorAll('tr')) row.dataset.old = ''")
        ask = "document.getElementById('queue').dispatchEvent(new CustomEvent('refresh'))"
        old = page.locator("tr[data-old]")
        page.evaluate(
            """() => document.querySelector('tr[data-job=a]').dispatchEvent(
              new DragEvent('dragstart', { bubbles: true, dataTransfer: new DataTransfer() }))"""
        )
        page.evaluate(ask)
        page.wait_for_timeout(200)
        expect(old, "a drag is not interrupted").to_have_count(3)
        page.evaluate("document.getElementById('queue').dispatchEvent(new DragEvent('dragend'))")
        page.evaluate(ask)
        expect(old).to_have_count(0)
        expect(page.locator("[value=c]")).to_be_checked()
        expect(page.locator("[value=b]")).to_be_focused()
        expect(page.locator("#chosen")).to_have_text("Not moved.")


@pytest.mark.extended
def test_heartbeat_age_ignores_the_clock_of_the_reader(modules: Page) -> None:
    with open_blank_page(modules, '<span data-age="7200.5"></span>') as page:
        page.evaluate("() => { const late = Date.now() + 180e3; Date.now = () => late; }")
        call_module(page, "pages/hosts.js", "")
        expect(page.locator("[data-age]")).to_have_text("2 h 00 min ago")
