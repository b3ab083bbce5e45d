"""Charts, bars and tables of the job page in their panels."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.e2e.modules.test_chart_keys import DRAWN, SHEETS
from tests.support.modules import paper

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
    with paper(modules, CHARTS, *FIRST) as page:
        page.set_viewport_size({"width": 1440, "height": 900})
        page.evaluate(DRAWN, "")
        expect(page.locator("canvas")).to_have_count(2)
        loss, norm = page.evaluate(heights)
        assert loss > norm + 80
        page.set_viewport_size({"width": 1440, "height": 700})
        page.wait_for_function(f"() => ({heights})()[0] === {norm}")


def test_curves_are_named_raw_and_smoothed(modules: Page) -> None:
    smoothed = DRAWN.replace("new Map(), 0)", "new Map(), 0.6)")
    with paper(modules, CHARTS, *FIRST) as page:
        page.evaluate(smoothed, "")
        expect(page.locator("#loss-chart .u-label")).to_have_text(["step", "raw", "smoothed"])


def test_overlapped_parts_have_a_labeled_bar(modules: Page) -> None:
    with paper(modules, BARS, *FIRST) as page:
        page.evaluate(STEP_BAR, [part("compute", "compute", 0.1), part("dp", "hidden", 0.02)])
        expect(page.locator("[data-side=measured] .side")).to_have_text(["measured", "overlapped"])
        page.evaluate(STEP_BAR, [part("compute", "compute", 0.1)])
        expect(page.locator("[data-side=measured] .side")).to_have_text(["measured"])


def test_the_name_of_a_part_covers_the_hatching(modules: Page) -> None:
    with paper(modules, BARS, *FIRST) as page:
        page.evaluate(STEP_BAR, [part("dp", "exposed", 0.1, 0.08)])
        name = page.locator("[data-side=measured] [data-part=dp] b")
        expect(name).to_have_text("dp")
        assert name.evaluate("(b) => getComputedStyle(b).backgroundColor") == "rgb(31, 111, 214)"


def test_rows_of_scrolling_tables_have_one_line_on_a_phone(modules: Page) -> None:
    with paper(modules, ROWS, *FIRST) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.locator("tr").evaluate("(row) => row.offsetHeight") < 40
