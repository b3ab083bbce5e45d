"""Heatmaps and tables of a traced step."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended

MADE = """
const { stepOfItems } = await import('/js/timeline/step.js');
const told = (items) => new Map(items.map((item) => [item.rank, { item, node: 0 }]));
const made = (items) => stepOfItems(items[0].step, told(items), () => 0);
"""


def test_host_borders_do_not_hide_cells_of_large_heatmaps(modules: Page) -> None:
    body = """async (num_hosts) => {
      const { heatMap } = await import('/js/heat/map.js');
      const map = heatMap(document.getElementById('map'), { label: 'map', describe: String, onDescribe() {} });
      const borders = Array.from({ length: num_hosts - 1 }, (_, i) => 8 * (i + 1));
      const rows = 8 * num_hosts;
      const cells = new Float32Array(rows * rows);
      map.show(cells, { rows, columns: rows, most: 1, borders: { rows: borders, columns: borders } });
      const lines = document.querySelector('.heat-lines');
      const { data } = lines.getContext('2d').getImageData(0, 0, lines.width, lines.height);
      return data.reduce((drawn, value, i) => drawn + (i % 4 === 3 && value > 0), 0);
    }"""
    with open_blank_page(
        modules, '<main><div id="map"></div></main>', "css/tokens.css", "css/base.css", "css/job/heat.css"
    ) as page:
        few, many = page.evaluate(body, 4), page.evaluate(body, 128)
    assert few > 0
    assert many == 0, "128 hosts on 400 px: lines would be all that one sees"


def test_nonzero_cell_is_visible_in_a_large_heatmap(modules: Page) -> None:
    body = """async ([rows, at]) => {
      const { heatMap } = await import('/js/heat/map.js');
      const map = heatMap(document.getElementById('map'), { label: 'map', describe: String, onDescribe() {} });
      const cells = new Float32Array(rows * rows);
      for (const [row, column] of at) cells[row * rows + column] = 1;
      map.show(cells, { rows, columns: rows, most: 1 });
      const canvas = document.querySelector('.heat-cells');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      const pixels = new Uint32Array(data.buffer), nothing = pixels[1];
      return [canvas.width, pixels.reduce((seen, pixel) => seen + (pixel !== nothing), 0)];
    }"""
    at = [[7 * n, (13 * n + 5) % 1024] for n in range(1, 146)]
    with open_blank_page(
        modules, '<main><div id="map"></div></main>', "css/tokens.css", "css/base.css", "css/job/heat.css"
    ) as page:
        assert page.evaluate(body, [16, [[3, 4], [15, 15]]]) == [16, 2]
        width, seen = page.evaluate(body, [1024, at])
    assert width < 1024, "the box is narrower than there are cells"
    assert seen == len({(row * width // 1024, column * width // 1024) for row, column in at})


def test_uses_the_singular_for_one(modules: Page) -> None:
    shown = call_module(modules, "format.js", "return x.map((n) => m.counted(n, 'rank'));", [0, 1, 2, 1200])
    assert shown == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    timeline = {"cells": [], "stages": 1, "micro_batches": 1, "step_s": 1, "bubble": 0, "whole": False, "in_flight": []}
    body = """const parts = m.drawSchedule(x);
    return [parts[0].querySelector("svg").getAttribute("aria-label"), parts[2].textContent];"""
    label, words = call_module(modules, "pictures/schedule.js", body, timeline)
    assert label == "Pipeline schedule of 1 stage and 1 micro-batch, 0.0% idle"
    assert words.startswith("The picture shows the first 1 stage and 1 micro-batch. ")


def test_link_above_its_known_bandwidth_has_no_percentage(modules: Page) -> None:
    body = """const cell = m.ofLink(x, x === null ? null : { speed: 8e6, words: "inside a host, from 1 run of h" });
    return [cell.textContent, cell.title];"""
    shown = [call_module(modules, "timeline/tables.js", body, busbw) for busbw in (4e6, 8e6, 14.8e6)]
    assert shown[:2] == [["50%", ""], ["100%", ""]]
    assert shown[2] == [
        "above 100%",
        "The measured bandwidth is above the known bandwidth of the link: 8.00 MB/s (inside a host, from 1 run of h)",
    ]
