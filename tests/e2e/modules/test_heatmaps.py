"""The heatmap panels while a run continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page, expect

from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from tests.support.browser import open_blank_page

pytestmark = pytest.mark.extended

STYLES = ("css/tokens.css", "css/base.css", "css/job/heat.css")


@contextmanager
def panel(modules: Page, name: str, made: str, drawn: str, argument: object) -> Iterator[Page]:
    """Open a page with a panel and `draw(step)`. `made` is JavaScript that returns `show`."""
    with open_blank_page(modules, f"<main>{render_to_string(f'jobs/panels/{name}.html')}</main>", *STYLES) as page:
        body = f"""async (x) => {{
          const section = document.querySelector('section');
          {made}
          window.draw = (step) => show(...{drawn});
        }}"""
        page.evaluate(body, argument)
        yield page


@contextmanager
def pairs(modules: Page) -> Iterator[Page]:
    data = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}}
    spec = parse_spec(data)
    job = {"spec": spec.model_dump(mode="json"), "estimate": estimate(spec), "attempt": 1, "finished": False}
    made = """const { pairsPanel } = await import('/js/heat/pairs.js');
      const show = pairsPanel(section);
      const cell = { axis: 'tp', op: 'all_reduce', group_size: 2 };
      const cells = (step) => [{ ...cell, algorithmic_bytes: 700 * step * step }];
      const state = (step) => ({ ranks: new Map([[0, { exactStep: step, exactCells: cells(step) }]]) });"""
    with panel(modules, "heat-pairs", made, "[x, state(step), null]", job) as page:
        yield page


@contextmanager
def over_time(modules: Page) -> Iterator[Page]:
    made = """const { timePanel } = await import('/js/heat/time.js');
      const { Bins } = await import('/js/rates.js');
      const show = timePanel(section);
      const bins = (step) => {
        const made = new Bins(1, 100, 'whole');
        for (const rank of [0, 1]) for (let i = 0; i < 9; i += 1) made.add(rank, 'tp/a', 100 + i, 700 * step);
        return made;
      };"""
    drawn = "[{ finished: true }, { whole: bins(step), recent: bins(step) }]"
    with panel(modules, "heat-time", made, drawn, None) as page:
        yield page


PANELS = {
    "pairs": (pairs, "#pairs-measured .heat-cells", "#pairs-status", ["1,400 B measured", "2,100 B measured"]),
    "time": (over_time, "#heat-time .heat-cells", "#heat-time-status", ["1.40 kB/s", "2.10 kB/s"]),
}


@pytest.mark.parametrize("how", ["pointer", "keys"])
@pytest.mark.parametrize("name", PANELS)
def test_description_of_the_pointed_cell_updates(modules: Page, name: str, how: str) -> None:
    made, where, words, (first, second) = PANELS[name]
    with made(modules) as page:
        page.evaluate("draw(2)")
        cells, shown = page.locator(where), page.locator(words)
        note = shown.text_content() or ""
        assert "rank 0" not in note
        if how == "pointer":
            cells.hover(position={"x": 150, "y": 20})
        else:
            cells.focus()
            page.keyboard.press("ArrowRight")
        expect(shown).to_contain_text(first)
        page.evaluate("draw(3)")
        expect(shown).to_contain_text(second)
        page.mouse.move(0, 0)
        cells.blur()
        expect(shown).not_to_contain_text(second)


@pytest.mark.parametrize("name", PANELS)
def test_note_updates_while_the_pointer_is_outside_the_cells(modules: Page, name: str) -> None:
    made, _, words, _ = PANELS[name]
    with made(modules) as page:
        page.evaluate("draw(2)")
        page.locator("header h2").hover()
        shown = page.locator(words)
        shown.evaluate("(place) => (place.textContent = 'of before')")
        page.evaluate("draw(3)")
        expect(shown).not_to_have_text("of before")


@pytest.mark.parametrize(
    ("name", "titles", "rows", "scale"),
    [
        ("pairs", ["Sending rank", "Receiving rank"], ["0", "1", "2", "3"], "algorithmic bytes per step"),
        ("time", ["Rank", "Time since start"], ["0", "1"], "payload bytes per second"),
    ],
)
def test_heatmap_has_axis_labels_and_a_color_scale(
    modules: Page, name: str, titles: list[str], rows: list[str], scale: str
) -> None:
    made, where, _, _ = PANELS[name]
    with made(modules) as page:
        page.evaluate("draw(2)")
        frame = page.locator(where.replace(".heat-cells", ".heat-frame"))
        expect(frame.locator(".heat-row-title, .heat-column-title")).to_have_text(titles)
        expect(frame.locator(".heat-rows span")).to_have_text(rows)
        assert frame.locator(".heat-columns span").count() >= 3
        expect(page.locator(".heat-legend .note")).to_have_text(f"Color scale: {scale}, square-root scale")
        expect(page.locator(".heat-ends span")).to_have_count(3)


def test_small_matrix_shows_values_in_cells(modules: Page) -> None:
    with pairs(modules) as page:
        page.evaluate("draw(2)")
        expect(page.locator("#pairs-measured .heat-lines")).to_have_attribute("data-values", "1")
        page.locator("#pairs-measured").evaluate("(box) => (box.style.width = '9rem')")
        expect(page.locator("#pairs-measured .heat-lines")).to_have_attribute("data-values", "0")


OVERLAPS = """(labels) => labels.map((one) => one.getBoundingClientRect())
  .filter((box, at, all) => at > 0 && all[at - 1].right > box.left).length"""


@pytest.mark.parametrize("width", [310, 390, 1440])
def test_times_below_a_heatmap_do_not_overlap(modules: Page, width: int) -> None:
    made = """const { heatMap } = await import('/js/heat/map.js');
      const place = section.querySelector('#heat-time-map');
      place.hidden = false;
      const map = heatMap(place, { label: '', describe: String, onDescribe() {}, tall: true });
      const axes = { rows: { title: 'rank', words: String }, columns: { title: 'time', words: () => '01:27:54' } };
      const show = () => map.show(new Float64Array(64 * 50), { rows: 64, columns: 50, most: 1, axes });"""
    with panel(modules, "heat-time", made, "[]", None) as page:
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("draw()")
        labels = page.locator(".heat-columns span")
        assert 2 <= labels.count() <= 8
        assert labels.evaluate_all(OVERLAPS) == 0
        assert page.locator(".heat-rows span").all_text_contents() == [str(rank) for rank in range(0, 64, 8)]
