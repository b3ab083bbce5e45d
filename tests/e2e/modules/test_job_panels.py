"""Charts, bars and tables of the job page in their panels."""

from __future__ import annotations

import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page, expect

from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from tests.e2e.modules.test_chart_keys import DRAWN, SHEETS
from tests.support.browser import call_module, open_blank_page
from tests.support.telemetry import build_timeline

pytestmark = pytest.mark.extended

FIRST = (*SHEETS, "css/components.css", "css/tables.css", "css/job/first.css", "css/job/parts.css")
CHARTS = """<main><div class="first"><section id="loss"><div id="loss-chart" class="chart"></div></section></div>
<div class="charts"><figure><div id="norm-chart" class="chart"></div></figure></div></main>"""
BARS = """<section><div data-bars></div><dl class="part-figures" data-figures></dl><p data-note></p></section>"""
STEP_BAR = """async (parts) => {
  const { stepBar } = await import('/js/job/stepbar.js');
  const measured = { step_s: 0.1, sure: 0, steps: 3, parts };
  const job = { diagnosis: { planned: null, measured }, estimate: {} };
  stepBar(document.querySelector('section'))(job, { ranks: new Map(), stepTimes: [] });
}"""
ROWS = """<main><div class="scroll-x"><table class="compact"><tbody><tr><th>dp</th><td>1.00 ms</td>
<td>reduce-scatter of rank 0, 78.8 ms in step 40</td><td>rank 1, in 50% of the calls of the group</td></tr></tbody>
</table></div></main>"""


def part(name: str, kind: str, seconds: float, waiting_s: float = 0.0) -> dict[str, object]:
    return {"name": name, "kind": kind, "seconds": seconds, "waiting_s": waiting_s}


def test_plots_of_the_overview_use_the_height_of_the_screen(modules: Page) -> None:
    heights = "() => ['loss', 'norm'].map((name) => document.querySelector(`#${name}-chart .u-wrap`).offsetHeight)"
    with open_blank_page(modules, CHARTS, *FIRST) as page:
        page.set_viewport_size({"width": 1440, "height": 900})
        page.evaluate(DRAWN, "")
        expect(page.locator("canvas")).to_have_count(2)
        loss, norm = page.evaluate(heights)
        assert loss > norm + 80
        page.set_viewport_size({"width": 1440, "height": 700})
        page.wait_for_function(f"() => ({heights})()[0] === {norm}")


def test_curves_are_named_raw_and_smoothed(modules: Page) -> None:
    smoothed = DRAWN.replace("new Map(), 0)", "new Map(), 0.6)")
    with open_blank_page(modules, CHARTS, *FIRST) as page:
        page.evaluate(smoothed, "")
        expect(page.locator("#loss-chart .u-label")).to_have_text(["step", "raw", "smoothed"])


def test_overlapped_parts_have_a_labeled_bar(modules: Page) -> None:
    with open_blank_page(modules, BARS, *FIRST) as page:
        page.evaluate(STEP_BAR, [part("compute", "compute", 0.1), part("dp", "hidden", 0.02)])
        expect(page.locator("[data-side=measured] .side")).to_have_text(["measured", "overlapped"])
        page.evaluate(STEP_BAR, [part("compute", "compute", 0.1)])
        expect(page.locator("[data-side=measured] .side")).to_have_text(["measured"])


def test_the_name_of_a_part_covers_the_hatching(modules: Page) -> None:
    with open_blank_page(modules, BARS, *FIRST) as page:
        page.evaluate(STEP_BAR, [part("dp", "exposed", 0.1, 0.08)])
        name = page.locator("[data-side=measured] [data-part=dp] b")
        expect(name).to_have_text("dp")
        assert name.evaluate("(b) => getComputedStyle(b).backgroundColor") == "rgb(31, 111, 214)"


def test_rows_of_scrolling_tables_have_one_line_on_a_phone(modules: Page) -> None:
    with open_blank_page(modules, ROWS, *FIRST) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.locator("tr").evaluate("(row) => row.offsetHeight") < 40


def test_groups_that_send_in_one_direction_show_the_direction(modules: Page) -> None:
    groups = [{"axis": "pp", "ranks": [0, 1], "nth": nth} for nth in (0, 1)]
    sends = [[(0, "send", 1, 0, 0, 10, 4000, 1), (1, "recv", 1, 0, 0, 12, 4000, 1)]]
    sends += [[(0, "recv", 1, 0, 0, 12, 4000, 0), (1, "send", 1, 0, 0, 10, 4000, 0)]]
    items = [build_timeline(rank, groups=groups, calls=calls) for rank, calls in enumerate(sends)]
    body = """
    const { stepOfItems } = await import('/js/timeline/step.js');
    const step = stepOfItems(1, new Map(x.map((item) => [item.rank, { item, node: 0 }])), () => 0);
    const rows = document.createElement('tbody');
    m.showGroups(rows, step, [], []);
    return [...rows.rows].map((row) => row.cells[1].textContent);
    """
    assert sorted(call_module(modules, "timeline/tables.js", body, items)) == ["0 → 1", "1 → 0"]


def test_numbers_of_the_verification_do_not_break_and_have_one_form(modules: Page) -> None:
    html = render_to_string("jobs/panels/proof.html")
    body = """
    const one = { state: 'equal', steps: 3, tensors: 68, gradient: 4e-7, update: 6e-5, norm: 1e-8, loss: 5e-8,
      seconds: 1, limit: 1e-5, why: 'rounding allows relative differences of 1e-05 in gradients' };
    const replicas = { steps: [1, 3], copied: 5, parts: 9, apart: 0 };
    const state = { verdicts: new Map([[0, []]]), proof: { replicas, wrong: [], one_process: one, end: null } };
    m.showProof(document.querySelector('section'), state, null, true, true, 'fp32', 1);
    return [...document.querySelectorAll('#proof [data-verdict], #proof .unbroken')].map((node) => node.textContent);
    """
    with open_blank_page(modules, html, *FIRST) as page:
        badge, *numbers = call_module(page, "job/proof.js", body)
        assert page.locator(".unbroken").first.evaluate("(node) => getComputedStyle(node).whiteSpace") == "nowrap"
    assert badge == "all checks passed"
    assert numbers == ["4e-7", "6e-5", "1e-8", "5e-8", "1e-5"]


def test_a_queued_job_has_its_plan_in_words(modules: Page) -> None:
    made = estimate(parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}}))
    words = call_module(modules, "job/waiting.js", "return m.planWords(x)", made)
    assert sorted(words) == ["memory", "time", "traffic"]
    assert "within a factor of" in words["time"]
    assert " per rank (" in words["memory"]
    assert " per rank and step (tp " in words["traffic"] or " per rank and step (dp " in words["traffic"]
    assert call_module(modules, "job/waiting.js", "return m.planWords(x)", None) is None
