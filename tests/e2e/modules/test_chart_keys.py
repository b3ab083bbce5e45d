"""Keyboard control of charts: the shared cursor and range, the announced values, and the pinned cursor."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import open_blank_page

SHEETS = ("vendor/uplot/uPlot.min.css", "css/tokens.css", "css/base.css", "css/pages.css", "css/job/charts.css")
TWO = """<main>
<section><h2>Loss</h2><div id="loss-chart" class="chart"></div></section>
<figure><figcaption>Gradient norm</figcaption><div id="norm-chart" class="chart"></div></figure>
</main>"""
# 100 steps, one a second, the first ending at 1,001 s; a checkpoint after step 50.
DRAWN = """async (at) => {
  const { createView } = await import('/js/charts/view.js');
  const { curveChart, curveColumns } = await import('/js/charts/training.js');
  history.replaceState(null, '', '/paper.html' + at);
  const view = createView(() => location.search, (search) => history.replaceState(null, '', '/paper.html' + search));
  const page = { view, curve: null, marks: [{ kind: 'checkpoint', time: 1050, step: 50, text: '' }] };
  const charts = ['loss-chart', 'norm-chart'].map((id) => curveChart(document.getElementById(id), page));
  window.view = view;
  window.told = (steps) => {
    const same = { step_s: 1, tokens: 8, learning_rate: 1 };
    const point = (step) => ({ ...same, time: 1000 + step, loss: 5 - step / 100, grad_norm: step });
    page.curve = curveColumns(Array.from({ length: steps }, (_, i) => [i + 1, point(i + 1)]));
    view.extend(1001, 1000 + steps);
    for (const draw of charts) draw(page.curve, new Map(), 0);
  };
  window.told(100);
}"""
# The step in the legend of each chart, the address, and the last message of a screen reader.
SEEN = """() => ({
  steps: [...document.querySelectorAll('.u-series:first-child .u-value')].map((one) => one.textContent.split(' ')[0]),
  address: location.search,
  said: document.getElementById('chart-status')?.textContent ?? '',
})"""


def drawn(page: Page, address: str = "") -> None:
    page.evaluate(DRAWN, address)
    expect(page.locator("canvas")).to_have_count(2)
    expect(page.locator(".chart[tabindex='0']")).to_have_count(2)


def press(page: Page, *keys: str) -> dict[str, Any]:
    for key in keys:
        page.keyboard.press(key)
    seen: dict[str, Any] = page.evaluate(SEEN)
    return seen


def test_keys_move_the_cursor_of_all_charts_and_announce_values(modules: Page) -> None:
    with open_blank_page(modules, TWO, *SHEETS) as page:
        drawn(page)
        chart = page.get_by_role("application", name="Loss")
        page.keyboard.press("Tab")
        expect(chart).to_be_focused()
        seen = press(page, "ArrowRight")
        assert seen["steps"] == ["1", "1"]
        assert seen["said"].startswith("step 1 · ")
        assert seen["said"].endswith(": train 4.9900 nats per token")
        assert press(page, "ArrowRight", "ArrowRight", "ArrowLeft")["steps"] == ["2", "2"]
        assert press(page, "Shift+ArrowRight")["steps"] == ["12", "12"]
        assert press(page, "End")["steps"] == ["100", "100"]
        assert press(page, "ArrowRight")["steps"] == ["100", "100"], "there is nothing beyond"
        assert press(page, "Home")["address"] == "", "a cursor that only moves is in no address"
        page.keyboard.press("Tab")
        expect(page.get_by_role("application", name="Gradient norm")).to_be_focused()
        seen = press(page, *["Shift+ArrowRight"] * 5, "ArrowLeft")
        assert seen["steps"] == ["50", "50"], "the cursor continues from its place in the other chart"
        assert "checkpoint after step 50: norm 50.0" in seen["said"]
        page.mouse.move(300, 60)
        page.mouse.move(301, 60)
        assert not page.evaluate("view.pointed"), "a mouse takes over"


@pytest.mark.extended
def test_keys_zoom_pin_and_reset(modules: Page) -> None:
    with open_blank_page(modules, TWO, *SHEETS) as page:
        drawn(page)
        page.keyboard.press("Tab")
        seen = press(page, *["ArrowRight"] * 25, "+", "=")
        first, last = page.evaluate("view.window()")
        assert (round(last - first, 2), first < 1025 < last) == (24.75, True)
        assert seen["steps"] == ["25", "25"]
        assert " to " in seen["said"]
        assert f"from={first:g}" in seen["address"]
        assert press(page, "End")["steps"] == ["100", "100"]
        assert page.evaluate("view.window()") == [1075.25, 1100], "the range goes along, as wide as it was"
        seen = press(page, "ArrowLeft", "Enter")
        assert "at=1099" in seen["address"]
        assert "at=" not in press(page, "Enter")["address"], "once more takes the pin off"
        assert press(page, "Enter", "-", "-")["address"] == "?at=1099", "the whole range is not in the address"
        seen = press(page, "Escape")
        assert (seen["address"], seen["steps"]) == ("", ["100", "100"]), "the legend shows the last step at rest"


@pytest.mark.extended
def test_the_x_axis_is_linear_in_steps_and_a_switch_shows_time(modules: Page) -> None:
    switch = """<fieldset><label><input type="radio" name="curve-axis" value="step" checked>Steps</label>
      <label><input type="radio" name="curve-axis" value="time">Time</label></fieldset>"""
    with open_blank_page(modules, TWO.replace("</main>", f"{switch}</main>"), *SHEETS) as page:
        drawn(page)
        labels = "[...document.querySelectorAll('.u-series:first-child th')].map((one) => one.textContent)"
        assert page.evaluate(labels) == ["step", "step"]
        page.get_by_label("Time", exact=True).check()
        assert page.evaluate(labels) == ["time", "time"]
        values = page.locator(".u-series:nth-child(2) .u-value")
        expect(values).to_have_text(["4.0000", "100"]), "the last value without a cursor"


@pytest.mark.extended
def test_pinned_cursor_shows_its_time_at_once_and_after_updates(modules: Page) -> None:
    with open_blank_page(modules, TWO, *SHEETS) as page:
        drawn(page, "?at=1030")
        values = "[...document.querySelectorAll('.u-series:first-child .u-value')]"
        steps = f"() => {values}.every((one) => one.textContent.startsWith('30 '))"
        page.wait_for_function(steps)
        page.evaluate("told(200)")
        page.wait_for_function("() => document.getElementById('loss-chart').dataset.points === '200'")
        assert page.evaluate(steps)
        page.evaluate("view.zoom(1020, 1060)")
        assert page.evaluate(steps)


@pytest.mark.extended
def test_charts_with_own_cursor_have_the_same_keys(modules: Page) -> None:
    body = """async () => {
      const { runsChart } = await import('/js/charts/runs.js');
      const xs = Array.from({ length: 100 }, (_, i) => i + 1);
      window.asked = [];
      const select = (from, to) => window.asked.push(from, to);
      const line = { letter: 'A', name: 'one', place: 0, xs, ys: xs.map((x) => x / 1000) };
      runsChart(document.getElementById('runs'), [line], { along: 'step', values: (y) => `${y} s`, select });
    }"""
    place = '<main><section><h2>Runs</h2><div id="runs" class="chart"></div></section></main>'
    with open_blank_page(modules, place, *SHEETS) as page:
        page.evaluate(body)
        page.keyboard.press("Tab")
        assert press(page, "ArrowRight", "ArrowRight")["said"] == "step 2: A one 0.002 s"
        assert press(page, "+", "Enter")["said"] == "2 to 51"
        assert page.evaluate("asked") == [1.5, 51]
        assert press(page, "Escape")["said"] == "1 to 100"
        assert press(page, "End")["said"] == "step 100: A one 0.1 s"
