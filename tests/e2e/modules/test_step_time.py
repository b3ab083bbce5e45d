"""Step time: its parts, its bars, its median, and the start before the first step."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from contracts.telemetry.words import FIRST_STEPS
from jobs.runs.diagnosis.course.steps import LATELY
from tests.support.modules import call, paper

WAITING = "Hatched: waiting for the slowest rank."

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


@pytest.mark.parametrize(
    ("share", "total", "note"),
    [(0, "200 ms", ""), (0.45, "200 ms ±45%", ""), (9, "200 ms", "Planned: within a factor of 10. ")],
)
def test_a_planned_step_time_has_its_margin_of_error(modules: Page, share: float, total: str, note: str) -> None:
    body = """
    const section = document.querySelector('section');
    m.stepBar(section)({ diagnosis: { planned: x }, estimate: {} }, { ranks: new Map(), stepTimes: [] });
    return [section.querySelector('.total').textContent, section.querySelector('[data-note]').textContent];
    """
    made = "<section><div data-bars></div><dl data-figures></dl><p data-note></p></section>"
    with paper(modules, made) as page:
        shown, told = call(page, "job/stepbar.js", body, {**TOLD, "sure": share})
    assert shown == total
    assert told == f"{note}Solid: exposed communication. {WAITING} Striped: communication overlapped with compute."


def test_the_figures_name_the_current_work(modules: Page) -> None:
    """Phases have names of their own in streams, and "now: step" says nothing."""
    ids = ("phase", "left-name", "left")
    body = """
    const state = { ranks: new Map(x.map((phase, rank) => [rank, { phase }])), evals: new Map(), progress: null };
    m.showProgress({ status: 'running', finished: false, members: [], history: [] }, state);
    return document.getElementById('figure-phase').textContent;
    """
    with paper(modules, "".join(f'<b id="figure-{name}"></b>' for name in ids)) as page:
        assert call(page, "job/figures.js", body, ["step", "step"]) == "now training"
        assert call(page, "job/figures.js", body, ["step", "eval"]) == "now training, validating"
