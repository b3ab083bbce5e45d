"""Steps event by event and heat maps: the pages' arithmetic, run in Chromium, beside the planner's and by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

from jobs.runs.traces.arrivals import arrival_of, meetings
from jobs.runs.traces.shapes import tables
from jobs.runs.traces.stream import trace
from planner.cost.estimate import estimate
from planner.cost.matrix import traffic_matrix
from planner.facts.reading.parse import parse_spec
from tests.support.batches import batch
from tests.support.modules import call, paper
from tests.support.timelines import item, late, pipelined

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
    found = call(modules, "heat/spread.js", body, [told, spec.layout.model_dump()])
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
    both = call(modules, "heat/spread.js", body, [*argument, ""])
    assert both == [0, 7, 30, 0, 7, 0, 0, 30, 30, 0, 0, 7, 0, 30, 7, 0]
    assert call(modules, "heat/spread.js", body, [*argument, "tp"])[:4] == [0, 7, 0, 0]


@pytest.mark.parametrize("items", [late(), pipelined(2, 2, 2)], ids=["two ranks", "a pipeline"])
def test_the_page_and_the_download_charge_waiting_alike(modules: Page, items: list[Any]) -> None:
    body = MADE + "return [...made(x).ranks].flatMap(([rank, own]) => own.calls.map((c) => [rank, c.last, c.whole]));"
    shown = call(modules, "timeline/step.js", body, items)
    found = trace((told, 0.0) for told in items)
    arrivals = meetings(found.calls)
    wanted = []
    for one in found.calls:
        arrival = arrival_of(one, arrivals)
        assert arrival is not None
        wanted.append([one.rank, arrival.rank, round(arrival.time - found.began, 5)])
    assert sorted([rank, last, round(whole, 5)] for rank, last, whole in shown) == sorted(wanted)


def test_a_step_of_the_history_s_tables_is_that_of_live_items(modules: Page) -> None:
    items = pipelined(2, 1, 2)
    told = tables(trace((one, 0.0) for one in items))
    body = (
        MADE
        + """
    const plain = (step) => [...step.ranks].map(([rank, own]) => [rank, own.calls.length, own.spans.length,
      own.calls.map((c) => [step.groups[c.group].axis, c.op, c.sequence, +c.from.toFixed(6), +c.to.toFixed(6), c.last])
        .sort()]);
    return [plain(made(x[0])), plain(m.stepOfTables(8, x[1].calls.columns, x[1].spans.columns))];
    """
    )
    live, kept = call(modules, "timeline/step.js", body, [items, told])
    assert live == kept
    assert len(live) == 4


def test_percentiles_bandwidth_and_overlap_are_as_by_hand(modules: Page) -> None:
    """One rank 30 ms late: 10 ms of transfer move 2 x 4,000 / 2 bytes; rank 0 stood still 40 ms, rank 1 10 ms."""
    body = (
        MADE + "const s = made(x); const groups = m.groupBandwidths([s]).map((g) => ({ ...g, ops: [...g.ops] }));"
        "return [m.collectiveTimes([s]), groups, m.overlap(s), m.bubble(s)];"
    )
    (times,), (group,), (dp,), bubble = call(modules, "timeline/stats.js", body, late())
    assert (times["calls"], times["slowest"], times["lastRank"], times["lastShare"]) == (2, 0, 1, 1)
    assert [times[name] for name in ("p50", "p90", "p99", "wait50")] == pytest.approx([0.01, 0.04, 0.04, 0.0])
    assert group["ops"] == ["all_reduce"]
    assert (group["ranks"], group["busbw"]) == ([0, 1], pytest.approx(4000 / 0.01))
    assert (dp["exposed"], dp["hidden"]) == (pytest.approx(0.025), pytest.approx(0.0))
    assert bubble is None, "no pipeline, no bubble"


def test_ranks_that_come_together_are_nobody_s_fault(modules: Page) -> None:
    calls = [(0, "all_reduce", 1, 10, 10, 20, 8, -1)]
    body = MADE + "return m.collectiveTimes([made(x)])[0].lastRank;"
    assert call(modules, "timeline/stats.js", body, [item(rank, calls=calls) for rank in (0, 1)]) is None


def test_the_bubble_is_what_was_neither_compute_nor_another_axis(modules: Page) -> None:
    """Two stages, forward 10 and backward 10 each: of 40 ms each works 20, and stage 1 stands still 4 of them for dp.
    A forward that waits in it for its receive is no compute."""
    groups = [{"axis": "pp", "ranks": [0, 1], "nth": 0}, {"axis": "dp", "ranks": [0, 1], "nth": 0}]
    first = item(
        0,
        groups=groups,
        spans=[("forward", 0, 0, 0, 10_000), ("backward", 0, 0, 20_000, 40_000)],
        calls=[(0, "recv", 1, 20_000, 10_000, 30_000, 8, 1)],
    )
    second = item(
        1,
        groups=groups,
        spans=[("forward", 1, 0, 10_000, 20_000), ("backward", 1, 0, 20_000, 30_000)],
        calls=[(1, "all_reduce", 1, 34_000, 4_000, 38_000, 8, -1)],
    )
    told = call(modules, "timeline/stats.js", MADE + "return m.bubble(made(x));", [first, second])
    shares = 20 / 40, 16 / 40
    measured = {"share": pytest.approx(sum(shares) / 2), "least": pytest.approx(0.4), "seconds": pytest.approx(0.04)}
    assert told == measured


def test_what_a_rank_validates_after_its_step_is_none_of_it(modules: Page) -> None:
    groups = [{"axis": "pp", "ranks": [0, 1], "nth": 0}]
    after = [("eval", -1, -1, 40_000, 90_000), ("forward", 0, 0, 50_000, 80_000)]
    ranks = [
        item(
            rank,
            groups=groups,
            spans=[("forward", 0, 0, 0, 10_000), ("backward", 0, 0, 20_000, 40_000), *(after if validates else [])],
            calls=[
                (0, "recv", 1, 10_000, 10_000, 20_000, 8, 1 - rank),
                *([(0, "recv", 2, 60_000, 9_000, 69_000, 8, 1 - rank)] if validates else []),
            ],
        )
        for validates in (False, True)
        for rank in (0, 1)
    ]
    body = MADE + "return [x.slice(0, 2), x.slice(2)].map((items) => [m.bubble(made(items)), m.overlap(made(items))]);"
    alone, followed = call(modules, "timeline/stats.js", body, ranks)
    assert alone == followed
    assert alone[0]["seconds"] == pytest.approx(0.04)


def test_only_the_newest_steps_are_kept(modules: Page) -> None:
    body = """
    const s = m.createState();
    const { stepsAtHand, MOST_STEPS } = await import('/js/timeline/fold.js');
    x.forEach((b, i) => m.foldBatch(s, `${i}-0`, b));
    return [stepsAtHand(s), MOST_STEPS];
    """
    steps, most = call(modules, "store.js", body, [batch(n, *late(step=n)) for n in range(1, 41)])
    assert steps == [{"step": step, "ranks": 2} for step in range(40, 40 - most, -1)]


def test_standing_still_is_spread_over_the_step_and_adds_up(modules: Page) -> None:
    step = {"kind": "step", "rank": 3, "time": 110.0, "step": 1, "ran": 1, "steps": 9, "step_s": 4.0, "tokens": 1}
    step |= {"loss": None, "grad_norm": None, "learning_rate": 0.1, "cells": []}
    step |= {"parts": {"data": 0, "optimizer": 0, "exposed": {"dp": 2.0}, "hidden": {}}}
    body = """
    const s = m.createState(); m.foldBatch(s, '1-0', x);
    const row = s.still.whole.rows.get(3).get('dp/');
    return [row.reduce((a, b) => a + (b ?? 0), 0), row.filter((v) => v > 0).length];
    """
    assert call(modules, "store.js", body, batch(110.0, step)) == [pytest.approx(2.0), 8]


def test_zooming_keeps_the_moment_under_the_pointer_and_stays_inside(modules: Page) -> None:
    body = """
    const near = m.zoomed({ from: 0, to: 10 }, 10, 2, 8);
    return [near, m.zoomed(near, 10, 0.01), m.moved(near, 10, 100), m.moved(near, 10, -100)];
    """
    near, out, right, left = call(modules, "timeline/window.js", body)
    assert near == {"from": 4, "to": 9}
    assert out == {"from": 0, "to": 10}
    assert (right, left) == ({"from": 5, "to": 10}, {"from": 0, "to": 5})


@pytest.mark.parametrize(("time", "gap", "text"), [(0.02, 0.005, "20 ms"), (2e-6, 5e-7, "2.0 µs"), (1.5, 1, "2 s")])
def test_ticks_have_the_digits_that_tell_them_apart(modules: Page, time: float, gap: float, text: str) -> None:
    assert call(modules, "timeline/paint.js", "return m.tickText(x[0], x[1]);", [time, gap]) == text


def test_a_closer_look_costs_pixels_and_not_events(modules: Page) -> None:
    """4,000 events on 60 pixels are at most two boxes a pixel, whatever their colours."""
    calls = [(0, "all_reduce", n, 10 * n, 1, 10 * n + 4, 8, -1) for n in range(1, 2_001)]
    spans = [("forward", 0, n % 8, 10 * n, 10 * n + 9) for n in range(2_000)]
    body = (
        MADE
        + """
    const { rowsOf } = await import('/js/timeline/lanes.js');
    const step = made(x);
    const context = new OffscreenCanvas(124, 200).getContext('2d');
    const frame = { width: 124, height: 200, left: 64, top: 0, rowHeight: 16, gap: 4 };
    const token = (event) => String(event.micro ?? 'c');
    const draw = (view) => m.paint(context, rowsOf(step), step, view, frame, () => '#123456', token);
    return [draw({ from: 0, to: step.seconds }), draw({ from: 0, to: step.seconds / 200 })];
    """
    )
    whole, close = call(modules, "timeline/paint.js", body, [item(0, calls=calls, spans=spans)])
    assert 60 < whole <= 2 * 2 * 61
    assert 15 <= close <= 40


def test_names_of_events_that_run_at_once_cover_no_other(modules: Page) -> None:
    """Collectives of one axis that were issued one after the other before the first of them had ended."""
    calls = [(0, "all_reduce", n, 40 * n, 1, 40 * n + 500, 8, -1) for n in range(1, 12)]
    body = (
        MADE
        + """
    const { rowsOf } = await import('/js/timeline/lanes.js');
    const step = made(x);
    const texts = [];
    const fillText = (text, at, y) => text === 'all_reduce' && texts.push([y, at, at + 60]);
    const pen = { fillText, measureText: () => ({ width: 60 }) };
    const context = new Proxy(pen, { get: (own, name) => own[name] ?? (() => {}) });
    const frame = { width: 1064, height: 200, left: 64, top: 0, rowHeight: 16, gap: 4 };
    m.paint(context, rowsOf(step), step, { from: 0, to: step.seconds }, frame, () => '#123456', () => 'c');
    return texts;
    """
    )
    texts = call(modules, "timeline/paint.js", body, [item(0, calls=calls)])
    assert len(texts) > 3
    assert all(free <= at for (_, _, free), (_, at, _) in pairwise(texts)), texts


def test_darker_is_more_and_nothing_is_nothing(modules: Page) -> None:
    body = "return [0, 1e-9, 0.25, 1, 5, NaN].map((v) => m.shadeOf(v, 1));"
    assert call(modules, "heat/scale.js", body) == [0, 1, 128, 255, 255, 0]


def test_the_time_map_keeps_the_window_and_the_holes(modules: Page) -> None:
    body = """
    const { Bins } = await import('/js/rates.js');
    const bins = new Bins(0.5, 100, 'whole');
    for (let i = 0; i < 10; i += 1) { bins.add(0, 'dp/a', 100 + i / 2, 5); bins.add(7, 'tp/a', 100 + i / 2, 1); }
    bins.hole(102, 102.4);
    const all = m.cellsOf(bins, [0, 7], () => true, { filling: true });
    const part = m.cellsOf(bins, [0, 7], (key) => key.startsWith('tp'), { from: 101, to: 102 });
    const plain = ({ cells, columns, most }) => [[...cells].map((v) => Number.isNaN(v) ? 'hole' : v), columns, most];
    return [plain(all), plain(part)];
    """
    whole, part = call(modules, "heat/cells.js", body)
    assert whole == [[*[10] * 4, "hole", *[10] * 4, *[2] * 4, "hole", *[2] * 4], 9, 10]
    assert part == [[0, 0, "hole", 2, 2, "hole"], 3, 2]


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
    with paper(
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
    with paper(
        modules, '<main><div id="map"></div></main>', "css/tokens.css", "css/base.css", "css/job/heat.css"
    ) as page:
        assert page.evaluate(body, [16, [[3, 4], [15, 15]]]) == [16, 2]
        width, seen = page.evaluate(body, [1024, at])
    assert width < 1024, "the box is narrower than there are cells"
    assert seen == len({(row * width // 1024, column * width // 1024) for row, column in at})


def test_one_is_told_as_one(modules: Page) -> None:
    told = call(modules, "format.js", "return x.map((n) => m.counted(n, 'rank'));", [0, 1, 2, 1200])
    assert told == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    timeline = {"cells": [], "stages": 1, "micro_batches": 1, "step_s": 1, "bubble": 0, "whole": False, "in_flight": []}
    body = """const parts = m.drawSchedule(x);
    return [parts[0].querySelector("svg").getAttribute("aria-label"), parts[2].textContent];"""
    label, words = call(modules, "pictures/schedule.js", body, timeline)
    assert label == "Pipeline schedule of 1 stage and 1 micro-batch, 0.0% idle"
    assert words.startswith("The picture shows the first 1 stage and 1 micro-batch. ")


def test_a_link_that_did_more_than_was_told_has_no_share(modules: Page) -> None:
    body = """const cell = m.ofLink(x, x === null ? null : { speed: 8e6, words: "inside a host, from 1 run of h" });
    return [cell.textContent, cell.title];"""
    told = [call(modules, "timeline/tables.js", body, busbw) for busbw in (4e6, 8e6, 14.8e6)]
    assert told[:2] == [["50%", ""], ["100%", ""]]
    assert told[2] == [
        "above 100%",
        "The measured bandwidth is above the known bandwidth of the link: 8.00 MB/s (inside a host, from 1 run of h)",
    ]


def test_a_link_s_speed_says_what_told_it(modules: Page) -> None:
    links = {"name": "h", "basis": "data sheet", "per_node": 2, "node_bytes_per_s": 8, "network_bytes_per_s": 1}
    body = "return x.map(([ranks, runs]) => m.linkOf(ranks, {...LINKS, link_runs: runs}, []))"
    body += ".map((one) => [one.words, one.measured]);"
    asked = [([0, 1], 0), ([0, 1], 1), ([0, 1], 2), ([0, 2], 2)]
    assert call(modules, "timeline/tables.js", body.replace("LINKS", json.dumps(links)), asked) == [
        ["inside a host, data sheet of h", False],
        ["inside a host, from 1 run of h", True],
        ["inside a host, from 2 runs of h", True],
        ["between hosts, data sheet of h", False],
    ]
