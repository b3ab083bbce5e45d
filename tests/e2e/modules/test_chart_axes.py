"""Range, ticks, smoothing, stacks, and marks of charts."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.modules import call


@pytest.mark.parametrize(
    ("search", "view"),
    [
        ("", [None, None, None, None]),
        ("?from=10.5&to=20&at=12", [10.5, 20, None, 12]),
        ("?from=20&to=10", [None, None, None, None]),
        ("?from=10", [None, None, None, None]),
        ("?from=&to=1e999&last=60", [None, None, 60, None]),
        ("?last=-5&at=<b>", [None, None, None, None]),
        ("?from=10&to=20&last=60", [10, 20, None, None]),
    ],
)
def test_an_address_says_the_range_and_the_cursor_and_nonsense_says_nothing(
    modules: Page, search: str, view: list[float | None]
) -> None:
    found = call(modules, "charts/view.js", "return m.readView(x)", search)
    assert [found[name] for name in ("from", "to", "last", "at")] == view


def test_a_range_goes_into_the_address_and_out_of_it_and_leaves_the_rest(modules: Page) -> None:
    body = """
    let address = x;
    const view = m.createView(() => address, (search) => (address = search));
    let told = 0;
    view.subscribe(() => (told += 1));
    view.extend(100, 200);
    const seen = [[address, view.window()]];
    view.zoom(120.12345, 130); seen.push([address, view.window()]);
    view.zoom(130, 130); seen.push([address, view.window()]);
    view.pin(125); seen.push([address, view.window()]);
    view.follow(60); seen.push([address, view.window()]);
    view.pin(null); view.follow(null); seen.push([address, view.window()]);
    return [seen, told];
    """
    seen, told = call(modules, "charts/view.js", body, "?tab=2")
    assert seen == [
        ["?tab=2", [100, 200]],
        ["?tab=2&from=120.123&to=130", [120.12345, 130]],
        ["?tab=2&from=120.123&to=130", [120.12345, 130]],
        ["?tab=2&from=120.123&to=130&at=125", [120.12345, 130]],
        ["?tab=2&at=125&last=60", [140, 200]],
        ["?tab=2", [100, 200]],
    ]
    assert told == 5


def test_smoothing_keeps_a_level_line_and_holes_and_does_nothing_at_0(modules: Page) -> None:
    level, noisy, off = call(
        modules, "charts/smooth.js", "return x.map(([values, weight]) => m.smooth(values, weight))",
        [([5, None, 5, 5], 0.9), ([0, 10, 0, 10], 0.5), ([1, 2], 0)],
    )  # fmt: skip
    assert level == pytest.approx([5, None, 5, 5])
    assert noisy == pytest.approx([0, 20 / 3, 20 / 7, 20 / 3])
    assert off == [1, 2]


def test_a_step_axis_is_linear_in_steps_and_maps_to_times_and_back(modules: Page) -> None:
    body = """
    const curve = { step: x.map((_, i) => i + 1), time: x, step_s: x.map(() => 0.5) };
    const times = [0, 1, 20, 20.5, 40, 99].map((step) => m.timeOf(curve, step));
    const steps = [0, 100, 110, 125, 150, 999].map((time) => m.stepOf(curve, time));
    return [m.stepSplits(1, 40, 5), m.stepAt(curve, x[9] + 0.1), m.stepAt(curve, x[0] - 1), times, steps];
    """
    times = [100 + step * 0.5 + (30 if step > 20 else 0) for step in range(1, 41)]  # a checkpoint after step 20
    ticks, tenth, before, times, steps = call(modules, "charts/ticks.js", body, times)
    assert ticks == [10, 20, 30, 40]
    assert (tenth, before) == (10, None)
    assert times == [100, 100.5, 110, 125.25, 150, 150]
    assert steps == [0, 0, 20, pytest.approx(20.49, abs=0.01), 40, 40]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 9.9), (1.98, 2.11), (0, 3e-4), (0, 1.1e9), (-4, -3.9)])
def test_a_value_axis_has_at_least_three_ticks(modules: Page, low: float, high: float) -> None:
    ticks = call(modules, "charts/ticks.js", "return m.valueSplits(...x)", [low, high, 2])
    assert len(ticks) >= 3
    assert low <= ticks[0] < ticks[-1] <= high + 1e-9


@pytest.mark.parametrize(("span", "count"), [(0.5, 3), (5, 3), (3600, 3), (864_000, 3)])
def test_a_time_axis_has_at_least_three_ticks(modules: Page, span: float, count: int) -> None:
    assert len(call(modules, "charts/ticks.js", "return m.clockSplits(1e9, 1e9 + x, 2)", span)) >= count


START_S = 1.8e9 + 13  # the first round time is far from the edge


@pytest.mark.parametrize("most", [2, 3.6, 5])
@pytest.mark.parametrize("span", [22, 71, 708, 862, 4789, 39_999])
def test_a_narrow_time_axis_has_few_ticks(modules: Page, span: float, most: float) -> None:
    ticks = call(modules, "charts/ticks.js", "return m.clockSplits(...x)", [START_S, START_S + span, most])
    assert 3 <= len(ticks) <= max(4, most + 1)


def test_the_plot_and_not_the_whole_chart_limits_the_ticks(modules: Page) -> None:
    body = """
    const [narrow, wide] = x.map((width) => ({ bbox: { width: width * devicePixelRatio }, width: 1000 }));
    const splits = m.xSplits((min, max, most) => [min, max, most]);
    return [splits(narrow, 0, 0, 9), splits(wide, 0, 0, 9)];
    """
    narrow, wide = call(modules, "charts/theme.js", body, [144, 720])
    assert (narrow, wide) == ([0, 9, 2], [0, 9, 10])


@pytest.mark.parametrize("span", [0.5, 1.7, 9.4, 100])
def test_every_tick_of_a_time_axis_is_inside_its_range(modules: Page, span: float) -> None:
    start = 1.8e9 + 0.13  # seconds since 1970
    ticks = call(modules, "charts/ticks.js", "return m.clockSplits(...x)", [start, start + span, 8])
    assert [tick for tick in ticks if not start <= tick <= start + span] == []


def test_a_stack_of_axes_ends_at_their_sum_and_tells_each_axis_own(modules: Page) -> None:
    body = """
    const bins = new (await import('/js/rates.js')).Bins(1, 10, 'whole');
    for (const [rank, key, time, amount] of x) bins.add(rank, key, time, amount);
    const found = m.trafficLines(bins, 'axis', () => true, false);
    const part = m.trafficLines(bins, 'axis', () => true, true);
    const lines = found.lines.map((line) => [line.label, line.own]);
    return [lines, found.columns, part.columns[0].length, part.lines[0].own.length];
    """
    sent = [(0, "dp/all_reduce", 10, 5), (1, "dp/all_reduce", 10, 7), (0, "tp/all_reduce", 11, 3)]
    lines, columns, times, own = call(modules, "charts/traffic.js", body, sent)
    assert lines == [["tp", [0, 3]], ["dp", [12, 0]]]
    assert columns == [[10, 11], [12, 3], [12, 0]]
    assert (times, own) == (1, 1)


def test_of_very_many_marks_validations_go_first_and_faults_never(modules: Page) -> None:
    marks = [{"kind": "validation", "time": i, "step": i, "text": ""} for i in range(100)]
    marks += [{"kind": "fault", "time": 50.5, "step": 50, "text": "loss is nan"}]
    body = "return [m.marksIn(x, 0, 100), m.marksIn(x, 40, 60).length, m.markWords(x.at(-1)), m.markWords(x[7])]"
    few, near, fault, validation = call(modules, "charts/marks.js", body, marks)
    assert [mark["kind"] for mark in few] == ["fault"]
    assert near == 22
    assert (fault, validation) == ("fault at step 50: loss is nan", "validation after step 7")


@pytest.mark.parametrize(
    ("marks", "letters"),
    [
        ("C100 V101", "C100 V110"),  # both told, side by side
        ("V100 V104 V108 V112", "V100 V112"),
        ("C100 V104 C107 !108 V140", "C100 V110 !120 V140"),
        ("C290 V292 !294", "C275 V285 !295"),  # as far left as their room asks
    ],
)
def test_letters_of_marks_that_are_close_stand_side_by_side(modules: Page, marks: str, letters: str) -> None:
    def places(text: str) -> list[dict[str, Any]]:
        return [{"kind": word[0], "x": int(word[1:])} for word in text.split()]

    assert call(modules, "charts/marks.js", "return m.letterPlaces(x, 10, 295)", places(marks)) == places(letters)


@pytest.mark.parametrize(
    ("ticks", "words"),
    [
        ([1.0, 1.5, 2.0], ["1.00", "1.50", "2.00"]),
        ([2.001, 2.002, 2.003], ["2.001", "2.002", "2.003"]),
        ([1.0200, 1.0205, 1.0210], ["1.0200", "1.0205", "1.0210"]),
        ([5_001_000, 5_002_000], ["5.001e+6", "5.002e+6"]),
        ([1.02000001, 1.02000002, 1.02000004], ["1.02", "+1e-8", "+3e-8"]),  # there is no room for as many digits
        ([1e9, 1e9 + 1, 1e9 + 2], ["1.00e+9", "+1", "+2"]),
        ([1.015, None, 1.016, 1.017], ["1.015", "", "1.016", "1.017"]),  # what uPlot leaves out
    ],
)
def test_ticks_of_an_axis_differ(modules: Page, ticks: list[float | None], words: list[str]) -> None:
    body = "return m.tickWords((value) => value.toPrecision(3))(null, x)"
    assert call(modules, "charts/ticks.js", body, ticks) == words


def test_a_pixel_has_one_line_however_much_happened_there(modules: Page) -> None:
    body = """
    const lines = [];
    const ctx = { canvas: { width: 100 }, save() {}, restore() {}, setLineDash() {}, beginPath() {}, stroke() {},
      lineTo() {}, moveTo: (at) => lines.push([at, ctx.strokeStyle]), fillRect() {}, fillText() {} };
    const chart = { ctx, bbox: { top: 0, height: 9 }, scales: { x: { min: 0, max: 100 } }, valToPos: (at) => at };
    const marks = [10, 10.2, 10.3, 40].map((time, step) => ({ kind: "fault", time, step, text: "" }));
    m.drawMarks(chart, marks, { fault: "red" });
    return lines;
    """
    assert call(modules, "charts/marks.js", body) == [[10, "red"], [40, "red"]]
