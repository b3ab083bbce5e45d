"""The pure modules of the job page: range, bars, rank placement, verdict, and step time."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from contracts.telemetry.words import FIRST_STEPS
from jobs.diagnosis.course.steps import LATELY
from tests.support.modules import call, paper

TOLD: dict[str, Any] = {
    "step_s": 0.2,
    "sure": 0.0,
    "steps": 10,
    "parts": [
        {"name": "compute", "kind": "compute", "seconds": 0.08, "waiting_s": 0.0},
        {"name": "tp", "kind": "exposed", "seconds": 0.05, "waiting_s": 0.02},
        {"name": "dp", "kind": "hidden", "seconds": 0.04, "waiting_s": 0.0},
        {"name": "bubble", "kind": "bubble", "seconds": 0.06, "waiting_s": 0.0},
        {"name": "data", "kind": "data", "seconds": 0.01, "waiting_s": 0.0},
    ],
}


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


@pytest.mark.parametrize("span", [0.5, 1.7, 9.4, 100])
def test_every_tick_of_a_time_axis_is_inside_its_range(modules: Page, span: float) -> None:
    start = 1.8e9 + 0.13  # seconds since 1970
    ticks = call(modules, "charts/ticks.js", "return m.clockSplits(...x)", [start, start + span, 8])
    assert [tick for tick in ticks if not start <= tick <= start + span] == []


def test_the_widths_of_a_bar_are_its_figures_on_the_scale_of_the_longer_step(modules: Page) -> None:
    planned = {**TOLD, "step_s": 0.1, "parts": [{**TOLD["parts"][0], "seconds": 0.1}]}
    above, below = call(modules, "job/parts.js", "return m.bars(x[0], x[1])", [planned, TOLD])
    assert [(part["name"], part["share"]) for part in above["shown"]] == [("compute", pytest.approx(50))]
    assert [(part["name"], pytest.approx(part["share"])) for part in below["shown"]] == [
        ("compute", 40), ("tp", 25), ("bubble", 30), ("data", 5),
    ]  # fmt: skip
    assert below["shown"][1]["waiting"] == pytest.approx(10)
    assert [(part["name"], part["share"]) for part in below["hidden"]] == [("dp", pytest.approx(20))]
    assert (above["rest"], below["rest"]) == (0, 0)
    short = {**TOLD, "parts": TOLD["parts"][:1]}
    (_, partly) = call(modules, "job/parts.js", "return m.bars(null, x)", short)
    assert partly["rest"] == pytest.approx(60), "the remainder is not broken down"


def test_what_ranks_tell_of_their_steps_adds_up_to_the_step(modules: Page) -> None:
    body = """
    const s = m.createState();
    m.foldBatch(s, '1-0', x);
    return (await import('/js/job/parts.js')).measuredParts(s.ranks);
    """
    step = {"kind": "step", "time": 1.0, "step": 4, "ran": 4, "steps": 9, "step_s": 0.2, "tokens": 64, "loss": 2.0}
    step |= {"grad_norm": 1.0, "learning_rate": 0.1, "cells": []}
    parts = [
        {"data": 0.01, "optimizer": 0.02, "exposed": {"tp": 0.06}, "hidden": {"dp": 0.03}},
        {"data": 0.03, "optimizer": 0.02, "exposed": {"dp": 0.02}, "hidden": {}},
    ]
    items = [{**step, "rank": rank, "parts": told} for rank, told in enumerate(parts)]
    found = call(modules, "store.js", body, {"v": 1, "job": "j", "attempt": 1, "time": 1.0, "items": items})
    seconds = {(part["name"], part["kind"]): part["seconds"] for part in found["parts"]}
    assert seconds == pytest.approx(
        {
            ("data", "data"): 0.02, ("optimizer", "optimizer"): 0.02, ("tp", "exposed"): 0.03, ("dp", "exposed"): 0.01,
            ("compute", "compute"): 0.12, ("dp", "hidden"): 0.015,
        }
    )  # fmt: skip
    assert sum(part["seconds"] for part in found["parts"] if part["kind"] != "hidden") == pytest.approx(0.2)


def test_the_page_tells_a_step_apart_over_the_steps_that_a_diagnosis_measures(modules: Page) -> None:
    body = """
    const s = m.createState();
    m.foldBatch(s, '1-0', x);
    return (await import('/js/job/parts.js')).measuredParts(s.ranks);
    """
    parts = {"data": 0.0, "optimizer": 0.0, "exposed": {}, "hidden": {}}
    step = {"kind": "step", "rank": 0, "time": 1.0, "steps": 999, "tokens": 64, "loss": 2.0, "grad_norm": 1.0}
    step |= {"learning_rate": 0.1, "cells": [], "parts": parts}

    def measured(last: int) -> Any:
        items = [{**step, "step": at, "ran": at, "step_s": 9 if at <= FIRST_STEPS else at} for at in range(1, last + 1)]
        return call(modules, "store.js", body, {"v": 1, "job": "j", "attempt": 1, "time": 1.0, "items": items})

    assert measured(FIRST_STEPS) is None
    assert measured(FIRST_STEPS + 2)["step_s"] == FIRST_STEPS + 1.5
    long = measured(LATELY + 100)
    assert (long["steps"], long["step_s"]) == (LATELY, 100 + (LATELY + 1) / 2)


def test_every_page_tells_a_job_s_step_as_its_diagnosis_does(modules: Page) -> None:
    body = "return [m.diagnosedSteps(x), m.diagnosedSteps({ ...x, diagnosis: {} })]"
    job = {"diagnosis": {"planned": TOLD, "measured": {**TOLD, "step_s": 0.3}}, "estimate": {}}
    told, untold = call(modules, "job/parts.js", body, job)
    assert (told["planned"]["step_s"], told["measured"]["step_s"]) == (0.2, 0.3)
    assert untold == {"planned": None, "measured": None}


def test_a_start_is_told_stage_by_stage_with_who_came_last(modules: Page) -> None:
    at = [f"2026-01-01T00:00:0{second}+00:00" for second in range(5)]
    history = [
        {"status": "queued", "attempt": 1, "at": "2025-01-01T00:00:00+00:00"},
        {"status": "queued", "attempt": 2, "at": at[0]},
        {"status": "starting", "attempt": 2, "at": at[2]},
    ]
    body = """
    const base = Date.parse(x[1]) / 1000;
    const [first, second] = [{imported: base + 3, met: base + 9}, {imported: base + 7, met: base + 8}];
    const starts = new Map([[0, first], [1, second], [-1, {spawned: base + 1}]]);
    return [m.startParts(x[0], 2, starts), m.startParts(x[0].slice(0, 2), 2, starts), m.startParts(x[0], 2, new Map())];
    """
    parts, queued, placed = call(modules, "job/start.js", body, [history, at[2]])
    assert [(part["name"], part["seconds"], part["rank"]) for part in parts] == [
        ("queue", 2, -1), ("spawn", 1, -1), ("import", 6, 1), ("rendezvous", 2, 0),
    ]  # fmt: skip
    assert queued == []
    assert [part["name"] for part in placed] == ["queue"]


def job(**other: Any) -> dict[str, Any]:
    members = [
        {"node": 0, "host": "anna", "first_rank": 0, "num_ranks": 2},
        {"node": 1, "host": "bert", "first_rank": 2, "num_ranks": 2},
    ]
    base = {"status": "running", "finished": False, "exit": None, "members": members, "world_size": 4}
    return {**base, "diagnosis": None, **other}


def test_every_rank_is_shown_on_its_host_with_what_it_does(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    s.ranks.set(0, {phase: 'step'}).set(1, {phase: 'step'}).set(2, {phase: 'checkpoint'});
    s.standing.set(1, {still: 12});
    s.processes.set(2, {state: 'stopped'});
    const blamed = (ranks) => ranks.filter((one) => one.blamed).map((one) => one.rank);
    const told = ({host, ranks}) => [host, ranks.map((one) => one.does), blamed(ranks)];
    return x.map((job) => m.placesOf(job, s).map(told));
    """
    hang = {"ranks": [2], "text": "it never entered all-reduce 17 of dp"}
    told = {"hang": hang, "stragglers": []}
    failed = {"status": "failed", "finished": True, "exit": {"rank": 3}}
    anna, bert = job()["members"]
    apart = job(status="unreachable", members=[{**anna, "silent": True}, {**bert, "ended": "x", "outcome": "lost"}])
    jobs = [job(), job(diagnosis=told), job(**failed), job(status="queued", members=[]), apart]
    running, blamed, ended, queued, parts = call(modules, "job/places.js", body, jobs)
    assert running == [["anna", ["training", "stalled"], []], ["bert", ["stopped", "starting"], []]]
    assert blamed[1] == ["bert", ["stopped", "starting"], [2]]
    assert ended == [["anna", ["ended", "ended"], []], ["bert", ["ended", "failed"], []]]
    assert parts == [["anna", ["no contact", "no contact"], []], ["bert", ["ended", "ended"], []]]
    assert [place[0] for place in queued] == [None]
    assert len(queued[0][1]) == 4


def test_where_there_is_no_verdict_the_page_says_so_and_why(modules: Page) -> None:
    told = {"sentence": "As planned.", "state": "well", "reason": "", "next": "", "evidence": []}
    jobs = [job(), job(status="queued"), job(finished=True, status="succeeded"), job(diagnosis=told)]
    words = call(modules, "job/health.js", "return x.map((job) => m.verdictOf(job).sentence)", jobs)
    assert words == [
        "Not checked: no step has finished yet.",
        "Not checked: the job has not started.",
        "Not checked: the run ended before its first step.",
        "As planned.",
    ]
    stale = job(finished=True, status="failed", exit={"reason": "boom", "rank": 1}, diagnosis={**told, "over": False})
    ended = job(finished=True, status="cancelled", diagnosis={**told, "over": True})
    body = "return x.map((job) => { const told = m.verdictOf(job); return [told.state, told.sentence]; })"
    assert call(modules, "job/health.js", body, [stale, ended]) == [
        ["failed", "Failed: boom (rank 1)."],
        ["", "As planned."],
    ]


def test_a_run_that_ended_as_it_started_is_neither_starting_nor_healthy(modules: Page) -> None:
    told = {"sentence": "Nothing was measured", "state": "starting", "reason": "", "next": "", "evidence": []}
    jobs = [job(diagnosis={**told, "over": over}) for over in (False, True)]
    states = call(modules, "job/health.js", "return x.map((job) => m.verdictOf(job).state)", jobs)
    assert states == ["starting", ""]


def test_a_cancelled_job_has_no_root_cause_of_a_failure(modules: Page) -> None:
    exit = {"outcome": "failed", "reason": "rank 0 was killed", "rank": None, "log_tail": ["boom"]}
    jobs = [job(finished=True, status=status, exit=exit, members=[]) for status in ("failed", "cancelled")]
    body = "return x.map((job) => m.causeOf(job, { ranks: new Map(), logs: new Map(), places: new Map() }) !== null)"
    assert call(modules, "logs/rootcause.js", body, jobs) == [True, False]


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


def test_a_long_run_keeps_steps_evenly_and_its_newest_loss(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    for (let step = 1; step <= x; step += 1) m.keepStep(s, step, { time: step, loss: step === x ? null : -step });
    const kept = [...s.steps.keys()];
    const even = kept.every((step) => step % s.stride === 0);
    return [s.stride, kept.length <= m.MOST_STEPS, even, kept.at(-1), s.lastLoss];
    """
    stride, bounded, even, last, newest = call(modules, "fold/steps.js", body, 50_001)
    assert (stride, bounded, even, last) == (4, True, True, 50_000)
    assert newest == {"step": 50_000, "loss": -50_000}


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


def test_a_job_whose_run_was_disproved_is_not_offered_another_try(modules: Page) -> None:
    body = "".join(f'<div id="{name}"></div>' for name in ("states", "status", "cancel-form", "requeue-form", "notice"))
    shown = "return x.map((job) => { m.showHeader(job); return !document.getElementById('requeue-form').hidden; })"
    exit = {"outcome": "failed", "reason": "boom", "rank": 1, "exit_code": 1, "log_tail": []}
    told = {"history": [{"status": "failed", "attempt": 1, "reason": "", "at": "2026-01-01T00:00:00Z"}]}
    ends = [{**exit, "summary": {"proof": {"wrong": wrong}}} for wrong in ([], [{"name": "w"}])]
    jobs = [job(finished=True, status="failed", exit=end, **told) for end in (exit, *ends)]
    with paper(modules, body) as page:
        assert call(page, "job/header.js", shown, jobs) == [True, True, False]


def test_a_failure_is_stated_once(modules: Page) -> None:
    """In the verdict, or in the notice of a page or of an attempt without a verdict. A long reason is cut."""
    ids = ("states", "status", "cancel-form", "requeue-form", "notice")
    body = "".join(f'<div id="{name}"></div>' for name in ids)
    words = """
    const { verdictOf } = await import('/js/job/health.js');
    return x.map((job) => {
      m.showHeader(job);
      return [document.getElementById('notice').innerText, verdictOf(job).sentence];
    });
    """
    exit = {"outcome": "failed", "reason": "boom " * 100, "rank": 1, "exit_code": 1, "log_tail": []}
    ended = {"status": "failed", "attempt": 1, "reason": "", "at": "2026-01-01T00:00:00Z"}
    placed = {**ended, "status": "starting"}
    failed = job(finished=True, status="failed", exit=exit, attempt=1, history=[placed, ended])
    unplaced = {**failed, "history": [ended], "exit": {**exit, "reason": "no host"}}
    cancelled = {**failed, "status": "cancelled", "exit": {**exit, "reason": "cancelled by anna"}}
    with paper(modules, body) as page:
        without, _, _ = call(page, "job/header.js", words, [failed, unplaced, cancelled])
    with paper(modules, f'{body}<section id="health"></section>') as page:
        having, never, stopped = call(page, "job/header.js", words, [failed, unplaced, cancelled])
    assert len(without[0]) < 220
    assert without[0].endswith("… (rank 1, exit code 1)")
    assert having == ["", f"{without[0]}."]
    assert never[0] == "Failed: no host (rank 1, exit code 1)"
    assert stopped[0] == "Cancelled by anna"


def test_a_verdict_offers_the_action_of_its_payload(modules: Page) -> None:
    body = """
    <div id="advice"></div><div id="smaller"></div><form id="requeue-form"></form><section id="health">
    <p data-sentence></p>
    <dl><div><dd data-reason></dd></div><div><dd><i data-next></i><i data-action></i></dd></div></dl>
    <details data-evidence><summary></summary><ul></ul></details></section>"""
    show = """
    const asked = [];
    const section = document.getElementById('health');
    const openLog = (rank) => asked.push(rank);
    const shown = x.map(([action, rank, mayRetry]) => {
      const view = m.healthView(section, { showSteps() {}, mayRetry: () => mayRetry, openLog });
      const told = { sentence: 's', reason: '', next: 'n', evidence: [], state: 'slow', over: true };
      const given = action === null ? told : { ...told, action, action_rank: rank };
      view({ finished: true, status: 'failed', diagnosis: given, members: [{ host: 'anna b' }] }, '');
      const button = section.querySelector('[data-action]').firstElementChild;
      if (action === 'open_log') button.click();
      return button && [button.textContent, button.getAttribute('href')];
    });
    return [shown, asked];
    """
    actions = [
        ["", -1],
        [None, -1],
        ["calibrate", -1],
        ["retry", -1, True],
        ["retry", -1, False],
        ["resume_smaller", -1],
    ]
    actions += [["open_log", 3], ["open_log", -1], ["find_faster", -1]]
    with paper(modules, body) as page:
        shown, asked = call(page, "job/health.js", show, actions)
    assert shown == [
        None,
        None,
        ["Calibrate host", "/hosts/anna%20b/#calibrate"],
        ["Retry", None],
        None,
        ["Find smaller layout", "#smaller"],
        ["Open log of rank 3", None],
        ["Open log", None],
        ["Find faster layouts", "#advice"],
    ]
    assert asked == [3, -1]


def test_a_verdict_that_checked_nothing_has_a_neutral_color(modules: Page) -> None:
    body = """
    <section id="health"><p data-sentence></p>
    <dl><div><dd data-reason></dd></div><div><dd><i data-next></i><i data-action></i></dd></div></dl>
    <details data-evidence><summary></summary><ul></ul></details></section>"""
    show = """
    const section = document.getElementById('health');
    const view = m.healthView(section, {});
    return x.map(([state, sentence]) => {
      const diagnosis = { sentence, state, reason: '', next: '', evidence: [], over: true };
      view({ finished: true, status: 'succeeded', diagnosis, members: [] }, '');
      return section.dataset.tone;
    });
    """
    told = [["well", "On plan: 4 ms per step."], ["well", "Not checked: 4 ms per step."], ["notice", "Not checked: x."]]
    with paper(modules, body) as page:
        assert call(page, "job/health.js", show, told) == ["good", "", "warn"]


def test_the_phase_of_a_start_is_shown_with_its_seconds(modules: Page) -> None:
    body = """
    const at = (seconds) => new Date(1e12 + 1000 * seconds).toISOString();
    const history = [{ status: 'queued', attempt: 1, at: at(0) }, { status: 'starting', attempt: 1, at: at(10) }];
    const job = { status: 'starting', attempt: 1, history, members: [{}], world_size: 2, spec: {} };
    const phase = (starts, more = {}, known = {}) => {
      const state = { starts: new Map(starts), progress: null, ranks: new Map(), ...known };
      return m.startPhase({ ...job, ...more }, state, 1e9 + 60);
    };
    const host = [-1, { claimed: 1e9 + 11, spawned: 1e9 + 12 }];
    const imported = [0, { imported: 1e9 + 30 }];
    const script = { spec: { kind: 'script' } };
    const both = [host, imported, [1, { imported: 1e9 + 40 }]];
    return [
      phase([]), phase([host]), phase([host, imported]), phase(both), phase(both.slice(1)), phase(both, script),
      phase([], { history: [] }), phase(both, {}, { progress: { step: 1 } }), phase(both, { status: 'failed' }),
    ];
    """
    assert call(modules, "job/start.js", body) == [
        "Waiting for the host, 50 s",
        "Importing PyTorch, 48 s",
        "Importing PyTorch, 48 s",
        "Connecting ranks (rendezvous), 20 s",
        "Connecting ranks (rendezvous), 20 s",
        "",
        "",
        "",
        "",
    ]


def test_the_step_time_is_the_median_of_the_last_steps_with_its_spread(modules: Page) -> None:
    body = """
    const state = { stepTimes: x.times, ranks: new Map([[0, { exactStep: x.ran }]]), steps: new Map(x.curve) };
    const step = m.stepTimeOf({ finished: x.summary !== null, exit: { summary: { measured: x.summary } } }, state);
    return [step, step && m.stepTimeWords(step)];
    """

    def found(times: list[float], ran: int, summary: dict[str, Any] | None = None, curve: Any = ()) -> Any:
        given = {"times": times, "ran": ran, "summary": summary, "curve": list(curve)}
        return call(modules, "job/steptime.js", body, given)

    step, words = found([9, 9, 9, 0.12, 0.125, 0.13, 0.135, 0.14], 8)
    assert (step["step_s"], step["steps"]) == (0.13, 5), "the first three steps are warm-up"
    assert words == "median of the last 5 steps, 122 to 138 ms"
    assert found([0.1] * 50, 60)[1] == "median of the last 50 steps, 100 to 100 ms"
    assert found([0.5], 1)[1] == "one step"
    assert found([], 0) == [None, None]
    curve = [[step, {"step_s": 0.2 if step > 100 else 9}] for step in range(1, 201)]
    step, words = found([0.1] * 50, 200, {"step_s": 0.21, "steps": 100}, curve)
    assert (step["step_s"], words) == (0.21, "median of the last 100 steps, 200 to 200 ms"), "as REST returns it"


def test_a_run_that_goes_on_without_a_number_is_marked_where_it_begins(modules: Page) -> None:
    """Each of its steps was a line on every chart, without bound."""
    body = """
    const s = (await import('/js/store.js')).createState();
    const fault = (step) => m.mark(s, { kind: "fault", time: step, step, text: "loss is nan" });
    for (const step of [5, 5, 6, 7, 6, 8, 20, 21]) fault(step);
    const faults = [...s.marks.values()].map((one) => one.step);
    for (let step = 1; step <= x; step += 1) m.mark(s, { kind: "checkpoint", time: step, step, text: "" });
    return [faults, s.marks.size, [...s.marks.values()].at(-1).step];
    """
    assert call(modules, "fold/steps.js", body, 2100) == [[5, 20], 2000, 2100]


def test_a_pixel_has_one_line_however_much_happened_there(modules: Page) -> None:
    body = """
    const lines = [];
    const ctx = { canvas: { width: 100 }, save() {}, restore() {}, setLineDash() {}, beginPath() {}, stroke() {},
      lineTo() {}, moveTo: (at) => lines.push([at, ctx.strokeStyle]), fillText() {} };
    const chart = { ctx, bbox: { top: 0, height: 9 }, scales: { x: { min: 0, max: 100 } }, valToPos: (at) => at };
    const marks = [10, 10.2, 10.3, 40].map((time, step) => ({ kind: "fault", time, step, text: "" }));
    m.drawMarks(chart, marks, { fault: "red" });
    return lines;
    """
    assert call(modules, "charts/marks.js", body) == [[10, "red"], [40, "red"]]
