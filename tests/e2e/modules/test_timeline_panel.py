"""The timeline panel while the chosen step does not load."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

PANEL = """<section id="panel" data-trace="/trace">
<select id="timeline-step"><option value="">latest step</option></select>
<div id="step-timeline"></div><p data-empty></p><p id="timeline-note">Step 7, 4 of 4 ranks.</p>
<form id="timeline-ask"></form><div class="timeline-tables">of step 7</div>
<a data-format="perfetto">Perfetto</a></section>"""
SHOW = """
const state = (await import('/js/store.js')).createState();
const job = { attempt: 1, finished: true, members: [] };
const show = m.timelinePanel(document.getElementById("panel"), null, () => show(job, state));
show(job, state);
"""


def test_failed_step_is_fetched_again_and_shows_no_other_step(modules: Page) -> None:
    with open_blank_page(modules, PANEL) as page:
        page.clock.install()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url.partition("/trace")[2]))
        page.route("**/trace/steps**", lambda route: route.fulfill(json={"steps": [120]}))
        page.route("**/trace?step**", lambda route: route.fulfill(status=503))
        call_module(page, "timeline/panel.js", SHOW)
        note = page.locator("#timeline-note")
        expect(note).to_have_text("Step 120 did not load.")
        for gone in ("#step-timeline", ".timeline-tables", "[data-format]"):
            expect(page.locator(gone)).to_be_hidden()
        before = len([one for one in requests if one.startswith("?step=120")])
        held: list[Route] = []
        page.route("**/trace?step**", lambda route: held.append(route))
        with page.expect_request("**/trace?step=120**"):
            page.clock.fast_forward(11_000)
        expect(note).to_have_text("Loading…")
        assert before == 1, "not at each batch"
