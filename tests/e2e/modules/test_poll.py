"""Panels that refresh: the note of a stale panel, and the end of a session."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.browser import open_blank_page

PANEL = """<script src="/vendor/htmx/htmx.min.js"></script>
<div id="jobs" data-poll="3600" hx-get="/rows?part=rows" hx-trigger="refresh" hx-target="#jobs">first</div>"""


def test_panel_shows_the_time_of_its_last_refresh_after_failures(modules: Page) -> None:
    """The page reloads after the end of its session."""
    with open_blank_page(modules, PANEL) as page:
        rows = page.locator("#jobs")
        ask = "document.getElementById('jobs').dispatchEvent(new CustomEvent('refresh'))"
        note = page.get_by_text("No update since")
        page.evaluate("import('/js/shell/poll.js')")
        page.route("**/rows**", lambda route: route.fulfill(status=502, body="away"))
        page.evaluate(ask)
        expect(note).to_contain_text(":")
        expect(rows).to_have_text("first")
        page.route("**/rows**", lambda route: route.fulfill(body="second"))
        page.evaluate(ask)
        expect(rows).to_have_text("second")
        expect(note).to_have_count(0)
        page.route("**/rows**", lambda route: route.abort())
        page.evaluate(ask)
        expect(note).to_have_count(1)
        page.route("**/rows**", lambda route: route.fulfill(status=302, headers={"Location": "/icon.svg"}))
        with page.expect_event("load"):
            page.evaluate(ask)
        expect(rows).to_have_text("first")
