"""Charts: time zones, axis labels, legends, and removed listeners."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import call_module, open_blank_page, open_context

pytestmark = pytest.mark.extended

KIB, DAY_S = 1024, 86_400.0
TRAFFIC = """<section id="traffic">
<select id="by"><option value="rank"></option><option value="axis"></option></select>
<select id="by-axis"><option value=""></option></select>
<select id="by-op"><option value=""></option></select>
<div id="traffic-chart"></div><p id="traffic-note"></p></section>"""
COMPARE = """<ol class="runs" data-reading></ol><section id="curves"><fieldset id="along">
<input type="radio" name="along" value="time" checked></fieldset>
<div id="charts"></div><p id="curves-note"></p></section>
<section id="parts"></section><script type="application/json" id="compared">DATA</script>"""
# What is left of listeners to the theme and of observers of sizes, after `body`.
COUNTED = """
let left = 0;
const { addEventListener, removeEventListener } = Document.prototype;
document.addEventListener = (name, ...more) => {
  left += name === "themechange";
  addEventListener.call(document, name, ...more);
};
document.removeEventListener = (name, ...more) => {
  left -= name === "themechange";
  removeEventListener.call(document, name, ...more);
};
globalThis.ResizeObserver = class { observe() { left += 1; } disconnect() { left -= 1; } };
"""
RUNS = """
const line = { letter: "A", name: x ?? "run", place: 0, xs: [1, 2, 3, 4], ys: [1, 2, 3, 4] };
const chart = m.runsChart(document.getElementById("chart"), [line], { along: "step", values: String });
"""


@pytest.mark.parametrize(
    ("hours", "shown"),
    [
        ((0, 1, 14), ["12:00 24 Oct 2026 CEST", "13:00", "02:00 25 Oct 2026"]),
        ((14, 15, 15.0125), ["02:00:00 25 Oct 2026 CEST", "02:00:00 25 Oct 2026 CET", "02:00:45"]),
        ((14, 15, 16), ["02:00 25 Oct 2026 CEST", "02:00 25 Oct 2026 CET", "03:00"]),
    ],
)
def test_time_axis_repeats_its_zone_only_after_a_change(
    modules: Page, hours: tuple[float, ...], shown: list[str]
) -> None:
    """Two ticks are equal without a zone when winter time begins."""
    assert modules.context.browser
    context = open_context(modules.context.browser, timezone_id="Europe/Berlin")
    page = context.new_page()
    page.goto(modules.url)
    noon = 1_792_836_000  # of 24 October 2026 in Berlin
    ticks = call_module(page, "charts/ticks.js", "return m.clockTicks(null, x)", [noon + 3600 * hour for hour in hours])
    context.close()
    assert [tick.replace("\n", " ") for tick in ticks] == shown


def test_legend_shows_day_and_zone_of_a_time(modules: Page) -> None:
    body = """
    const { createView } = await import('/js/charts/view.js');
    const view = createView(() => '', () => {});
    view.extend(x[0], x[2]);
    const options = { height: 100, values: String, value: String };
    const draw = m.plot(document.getElementById('chart'), { view, marks: [] }, options);
    draw({ columns: [x, [1, 2, 3]], lines: [{ label: 'one', token: '--ink' }] });
    view.pin(x[1]);
    """
    with open_blank_page(modules, '<main><section><h2>One</h2><div id="chart"></div></section></main>') as page:
        call_module(page, "charts/plot.js", body, [1000.0, 1000.0 + DAY_S, 1000.0 + 2 * DAY_S])
        shown = page.evaluate("import('/js/format.js').then((m) => m.exactTime(new Date(1e3 * 87400)))")
        assert shown.startswith("2 Jan 1970 ")
        expect(page.locator(".u-series .u-value").first).to_have_text(shown)


def test_chart_of_collectives_of_one_size_has_axis_labels(modules: Page) -> None:
    body = """
    const words = [];
    const { fillText } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
      words.push(text);
      fillText.call(this, text, ...more);
    };
    const draw = m.collectivesChart(document.getElementById('chart'));
    draw([{ op: 'all_reduce', payload_bytes: x, seconds: 0.001 }]);
    await new Promise((then) => requestAnimationFrame(then));
    return words;
    """
    with open_blank_page(modules, '<main><section><h2>One</h2><div id="chart"></div></section></main>') as page:
        assert "256 KiB" in call_module(page, "charts/collectives.js", body, 256 * KIB)


@pytest.mark.parametrize(
    ("module", "made"),
    [
        ("charts/runs.js", f"{RUNS} chart.destroy();"),
        ("charts/pareto.js", "m.paretoChart(document.getElementById('chart'), [{step_s: 1, memory_bytes: 2}], 3)();"),
        (
            "heat/map.js",
            "m.heatMap(document.getElementById('chart'), { label: '', describe: String, onDescribe() {} }).destroy();",
        ),
    ],
)
def test_replaced_chart_removes_its_listeners(modules: Page, module: str, made: str) -> None:
    with open_blank_page(modules, '<main><section><h2>One</h2><div id="chart"></div></section></main>') as page:
        call_module(page, module, "")
        assert call_module(page, module, f"{COUNTED} {made} return left;") == 0


def test_legend_shortens_the_long_name_of_a_run(modules: Page) -> None:
    name = "pretrain-llama-tiny-with-a-very-long-experiment-name-and-seed-42"
    with open_blank_page(modules, '<main><section><h2>One</h2><div id="chart"></div></section></main>') as page:
        call_module(page, "charts/runs.js", RUNS, name)
        label = page.locator(".u-legend .u-label").nth(1)
        expect(label).to_have_text("A pretrain-llama\u2026e-and-seed-42")
        expect(label).to_have_attribute("title", name)


def test_theme_change_preserves_the_zoom_of_a_compared_chart(modules: Page) -> None:
    with open_blank_page(modules, '<main><section><h2>One</h2><div id="chart"></div></section></main>') as page:
        call_module(page, "charts/runs.js", RUNS)
        page.keyboard.press("Tab")
        for key in ("ArrowRight", "+"):
            page.keyboard.press(key)
        seen = page.locator("#chart-status")
        expect(seen).to_have_text("1 to 2")
        page.evaluate("document.dispatchEvent(new Event('themechange'))")
        page.keyboard.press("+")
        expect(seen).to_have_text("1 to 1")


def test_run_without_history_states_the_origin_of_its_time_axis(modules: Page) -> None:
    curve = {"step": [10, 20], "loss": [3.0, 2.0], "elapsed_s": [0.0, 5.0]}
    run: dict[str, Any] = {"id": "j", "name": "one", "attempt": 1, "curve": curve, "estimate": {"time": None}}
    data = {"jobs": [{**run, "diagnosis": {}}], "url": "/compared"}
    with open_blank_page(modules, COMPARE.replace("DATA", json.dumps(data))) as page:
        page.route("**/compared", lambda route: route.fulfill(status=503))
        call_module(page, "pages/compare.js", "")
        note = (
            "No step history is stored for A. The loss comes from the exit report of the run, "
            "and the time axis starts at the first point."
        )
        expect(page.locator("#curves-note")).to_have_text(note)


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([*range(16)], ""),
        ([*range(20)], "The chart shows ranks 0\u201315, the first 16 of 20. The tables include all ranks."),
        ([*range(40, 60)], "The chart shows ranks 40\u201355, the first 16 of 20. The tables include all ranks."),
    ],
)
def test_traffic_chart_names_its_ranks(modules: Page, ranks: list[int], shown: str) -> None:
    body = """
    const { createState } = await import('/js/store.js');
    const { createView } = await import('/js/charts/view.js');
    const state = createState();
    for (const rank of x) for (const time of [100, 101]) state.whole.add(rank, 'dp/all_reduce', time, 5);
    const view = createView(() => '', () => {});
    const show = m.trafficView(document.getElementById('traffic'), { view, marks: [] }, () => {});
    show({ world_size: 8, finished: true }, state);
    return document.getElementById('traffic-note').textContent;
    """
    with open_blank_page(modules, TRAFFIC) as page:
        words = f"The chart shows the payload bytes of issued collectives, averaged over 500 ms. {shown}".strip()
        assert call_module(page, "job/traffic.js", body, ranks) == words


def test_long_legend_scrolls_without_shrinking_the_plot(modules: Page) -> None:
    body = """
    const { createView } = await import('/js/charts/view.js');
    const view = createView(() => '', () => {});
    view.extend(0, 9);
    const options = { height: 158, values: String, value: String };
    const draw = m.plot(document.getElementById('chart'), { view, marks: [] }, options);
    const lines = Array.from({ length: 16 }, (_, rank) => ({ label: `rank ${rank}`, token: '--ink' }));
    draw({ columns: [[0, 9], ...lines.map(() => [1, 2])], lines });
    """
    made = '<main><section class="charts"><figure><div class="chart" id="chart"></div></figure></section></main>'
    sheets = ("vendor/uplot/uPlot.min.css", "css/tokens.css", "css/base.css", "css/pages.css", "css/job/charts.css")
    with open_blank_page(modules, made, *sheets) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        call_module(page, "charts/plot.js", body)
        chart = page.locator("#chart")
        expect(chart.locator(".u-series")).to_have_count(17)
        chart.evaluate("(one) => one.scrollTo(0, 1000)")
        scrolled, chart_top, plot_top = page.evaluate(
            """() => [document.getElementById('chart').scrollTop,
              ...['#chart', '.u-wrap'].map((one) => document.querySelector(one).getBoundingClientRect().top)]"""
        )
        assert scrolled > 0
        assert plot_top == chart_top
