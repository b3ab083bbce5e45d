"""Steps event by event and heat maps: the pages' arithmetic, run in Chromium, beside the planner's and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from jobs.runs.traces.traced_steps import combine_items, find_arrivals, get_arrival, serialize_trace
from planner.cost.estimate import estimate
from planner.cost.traffic import traffic_matrix
from planner.facts.parse_spec import parse_spec
from tests.support.browser import call_module, open_blank_page
from tests.support.telemetry import build_late_rank_step, build_pipeline_step

MADE = """
const { stepOfItems } = await import('/js/timeline/step.js');
const told = (items) => new Map(items.map((item) => [item.rank, { item, node: 0 }]));
const made = (items) => stepOfItems(items[0].step, told(items), () => 0);
"""


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        ({"dp": 2, "tp": 2, "zero": 1}, {}),
        ({"dp": 4, "zero": 3, "dp_replicas": 2}, {}),
        ({"pp": 4, "dp": 2}, {"micro_batches": 4}),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"micro_batches": 4}),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, {"micro_batches": 4}),
        ({"cp": 2, "dp": 2}, {}),
    ],
)
def test_who_sends_to_whom_is_as_the_planner_has_it(
    modules: Page, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    data = {"model": {"preset": "gpt-tiny"}, "layout": layout, "train": {"global_batch": 16, **train}}
    spec = parse_spec(data)
    told = estimate(spec)
    wanted = traffic_matrix(spec)
    assert wanted is not None
    body = "const s = m.predicted(x[0], x[1], () => true); return [...s.bytes];"
    found = call_module(modules, "heat/spread.js", body, [told, spec.layout.model_dump()])
    world = spec.layout.world_size
    rows = [found[rank * world : (rank + 1) * world] for rank in range(world)]
    assert [[round(value) for value in row] for row in rows] == [pytest.approx(row, abs=64) for row in wanted]
    assert sum(map(sum, wanted)) > 0


def test_what_was_counted_spreads_over_the_axis_s_own_neighbours(modules: Page) -> None:
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}})
    cells = [
        {"axis": axis, "op": "all_reduce", "group_size": 2, "algorithmic_bytes": size}
        for axis, size in (("dp", 300), ("tp", 70))
    ]
    body = """
    const ranks = new Map([0, 1, 2, 3].map((rank) => [rank, { exactStep: 10, exactCells: x[2] }]));
    const s = m.measured(ranks, x[1], 4, m.strides(x[0], x[1]), (axis) => !x[3] || axis === x[3]);
    return [...s.bytes];
    """
    argument = [estimate(spec), spec.layout.model_dump(), cells]
    both = call_module(modules, "heat/spread.js", body, [*argument, ""])
    assert both == [0, 7, 30, 0, 7, 0, 0, 30, 30, 0, 0, 7, 0, 30, 7, 0]
    assert call_module(modules, "heat/spread.js", body, [*argument, "tp"])[:4] == [0, 7, 0, 0]


@pytest.mark.parametrize(
    "items", [build_late_rank_step(), build_pipeline_step(2, 2, 2)], ids=["two ranks", "a pipeline"]
)
def test_the_page_and_the_download_charge_waiting_alike(modules: Page, items: list[Any]) -> None:
    body = MADE + "return [...made(x).ranks].flatMap(([rank, own]) => own.calls.map((c) => [rank, c.last, c.whole]));"
    shown = call_module(modules, "timeline/step.js", body, items)
    found = combine_items((told, 0.0) for told in items)
    arrivals = find_arrivals(found.calls)
    wanted = []
    for one in found.calls:
        arrival = get_arrival(one, arrivals)
        assert arrival is not None
        wanted.append([one.rank, arrival.rank, round(arrival.time - found.began, 5)])
    assert sorted([rank, last, round(whole, 5)] for rank, last, whole in shown) == sorted(wanted)


def test_a_step_of_the_history_s_tables_is_that_of_live_items(modules: Page) -> None:
    items = build_pipeline_step(2, 1, 2)
    told = serialize_trace(combine_items((one, 0.0) for one in items))
    body = (
        MADE
        + """
    const plain = (step) => [...step.ranks].map(([rank, own]) => [rank, own.calls.length, own.spans.length,
      own.calls.map((c) => [step.groups[c.group].axis, c.op, c.sequence, +c.from.toFixed(6), +c.to.toFixed(6), c.last])
        .sort()]);
    return [plain(made(x[0])), plain(m.stepOfTables(8, x[1].calls.columns, x[1].spans.columns))];
    """
    )
    live, kept = call_module(modules, "timeline/step.js", body, [items, told])
    assert live == kept
    assert len(live) == 4


def test_lines_where_hosts_begin_leave_the_cells_of_very_many_to_be_seen(modules: Page) -> None:
    body = """async (num_hosts) => {
      const { heatMap } = await import('/js/heat/map.js');
      const map = heatMap(document.getElementById('map'), { label: 'map', told: String, onTell() {} });
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


def test_a_cell_that_is_something_is_seen_however_many_there_are(modules: Page) -> None:
    body = """async ([rows, at]) => {
      const { heatMap } = await import('/js/heat/map.js');
      const map = heatMap(document.getElementById('map'), { label: 'map', told: String, onTell() {} });
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


def test_one_is_told_as_one(modules: Page) -> None:
    told = call_module(modules, "format.js", "return x.map((n) => m.counted(n, 'rank'));", [0, 1, 2, 1200])
    assert told == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    timeline = {"cells": [], "stages": 1, "micro_batches": 1, "step_s": 1, "bubble": 0, "whole": False, "in_flight": []}
    body = """const parts = m.drawSchedule(x);
    return [parts[0].querySelector("svg").getAttribute("aria-label"), parts[2].textContent];"""
    label, words = call_module(modules, "pictures/schedule.js", body, timeline)
    assert label == "Pipeline schedule of 1 stage and 1 micro-batch, 0.0% idle"
    assert words.startswith("The picture shows the first 1 stage and 1 micro-batch. ")


def test_a_link_that_did_more_than_was_told_has_no_share(modules: Page) -> None:
    body = """const cell = m.ofLink(x, x === null ? null : { speed: 8e6, words: "inside a host, from 1 run of h" });
    return [cell.textContent, cell.title];"""
    told = [call_module(modules, "timeline/tables.js", body, busbw) for busbw in (4e6, 8e6, 14.8e6)]
    assert told[:2] == [["50%", ""], ["100%", ""]]
    assert told[2] == [
        "above 100%",
        "The measured bandwidth is above the known bandwidth of the link: 8.00 MB/s (inside a host, from 1 run of h)",
    ]
