"""The current hit of a log search while lines arrive and leave."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.modules.test_log_panel import PANEL, SHEETS, START, log, say
from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended


def test_current_hit_stays_when_earlier_hits_arrive(modules: Page) -> None:
    with open_blank_page(modules, "") as page:
        call_module(page, "logs/panel.js", START, {"panel": PANEL, "sheets": SHEETS, "job": {}})
        say(page, log(0, 10.0, 0, *(f"hit {n}" for n in range(12))))
        say(page, log(1, 11.0, 0, "of another rank"))
        page.select_option("[name=log-rank]", "all")
        page.fill("[name=log-search]", "hit")
        found, current = page.locator("[data-log=found]"), page.locator("#log [data-current] .log-text")
        expect(found).to_have_text("12 found")
        for _ in range(3):
            page.keyboard.press("Enter")
        expect(found).to_have_text("3 of 12")
        expect(current).to_have_text("hit 2")
        say(page, log(1, 5.0, 1, "hit from before", "and more"))
        expect(found).to_have_text("4 of 13")
        expect(current).to_have_text("hit 2")
        page.keyboard.press("Enter")
        expect(current).to_have_text("hit 3")
