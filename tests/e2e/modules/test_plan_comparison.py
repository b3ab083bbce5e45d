"""Figures of the job page: plan and measurement, omitted counters, verification, and the current phase."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module, open_blank_page
from tests.support.telemetry import build_batch, build_cell, build_traffic

pytestmark = pytest.mark.extended


def test_comparison_starts_with_memory_and_each_group_has_a_badge(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    s.ranks.set(0, {exactStep: 2});
    const stage = {memory: {parameters: 8}, memory_bytes: 8};
    const estimate = {stages: [stage], cluster: {}, time: {step_s: 1, parts: []}};
    const rows = [{axis: 'dp', ranks: [{rank: 0, predicted: 8, measured: 8}]}];
    const apart = {planned: null, measured: null};
    const body = document.createElement('tbody');
    m.showPlanned(body, estimate, s, rows, {device: 'cpu', least: 0, measured: null, apart, isExact: x});
    return [...body.querySelectorAll('.group')].map((row) => row.textContent);
    """
    memory, step = "memory of the rank with the most memoryestimate", "step timeestimate"
    traffic = "traffic per step (payload bytes, all ranks)"
    assert call_module(modules, "job/planned.js", body, True) == [memory, step, f"{traffic}exact"]
    assert call_module(modules, "job/planned.js", body, False) == [memory, step, f"{traffic}estimate"]


@pytest.mark.parametrize("assumed", [False, True])
def test_hfu_above_an_assumed_peak_is_not_explained_by_the_mask(modules: Page, assumed: bool) -> None:
    """Some processors are faster than the assumed 50 GFLOP/s."""
    time = {"step_s": 0.5, "model_flops": 1e10, "mfu": 1.8, "hfu": 1.8, "tokens_per_s": 2050, "parts": []}
    time |= {"interval": {"share": 0.03, "basis": "runs", "words": "from 3 runs here"}, "basis": "data sheet"}
    cluster = {"name": "vm", "accelerator": "CPU core", "assumed_peak": assumed}
    body = "return m.timePicture(x).map((part) => part.textContent).join(' ')"
    shown = call_module(modules, "pictures/time.js", body, {"time": time, "world_size": 2, "cluster": cluster})
    assert ("MFU counts the full attention matrix" in shown) != assumed


def test_badge_is_exact_only_for_all_ranks(modules: Page) -> None:
    shown = """
    const badge = document.createElement("b");
    const words = (off, missing) => (m.showBadge(badge, off, true, missing), [badge.textContent, badge.dataset.tone]);
    return x.map(([off, missing]) => words(off, missing));
    """
    none, some = {"bytesOff": 0, "callsOff": 0, "net": 0}, {"bytesOff": 4, "callsOff": 0, "net": 0}
    result = call_module(
        modules, "job/tables.js", shown, [[none, ""], [none, " on 1 of 8 ranks"], [some, " on 1 of 8 ranks"]]
    )
    assert result == [
        ["exact: difference 0 B, 0 calls", "good"],
        ["difference 0 B, 0 calls on 1 of 8 ranks", "warn"],
        ["difference 4 B, 0 calls", "bad"],
    ]


def test_summary_without_some_counters_states_the_omission(modules: Page) -> None:
    body = """
    const store = await import("/js/store.js");
    const s = store.createState(); store.foldSummary(s, x[0]);
    const body = document.createElement("tbody");
    m.showCollectives(body, s, null, true);
    const shown = body.lastElementChild.textContent;
    store.foldBatch(s, '1-0', x[1]);
    return [shown, s.cellsLeftOut];
    """
    summary = {"steps": 3, "tokens_per_s": 10.0, "losses": [], "eval_losses": [], "verdict": {}}
    summary |= {"cells": {"0": [build_cell(3, 3000)]}, "cells_left_out": 56}
    shown, left = call_module(
        modules, "job/tables.js", body, [summary, build_batch(1, build_traffic(0, 1, build_cell(1, 1000)))]
    )
    assert "omits some counters of 56 ranks" in shown
    assert left == 0, "what is replayed is whole"


def test_verdicts_of_some_ranks_give_no_overall_verdict(modules: Page) -> None:
    row = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_bytes": 8, "measured_bytes": 8}
    row |= {"predicted_count": 1, "measured_count": 1}
    script = """
    const told = m.trafficProof({verdicts: new Map(x.map((row, i) => [i, [row]]))}, null, true, true, 8);
    return [told.tone, told.words, told.more];
    """
    some = call_module(modules, "job/proof.js", script, [row, row])
    assert some == ["", "0 B, 0 calls", "Total traffic difference over all phases of 2 of 8 ranks."]
    assert call_module(modules, "job/proof.js", script, [row] * 8) == [
        "good",
        "0 B, 0 calls",
        "Total traffic difference over all phases of 8 ranks.",
    ]
    table = """
    const [body, summary] = [document.createElement("tbody"), document.createElement("p")];
    m.showVerdicts(body, summary, {verdicts: new Map(x.map((row, i) => [i, [row]]))}, 8);
    return [summary.textContent, summary.dataset.tone];
    """
    agree = "no difference in bytes or calls."
    assert call_module(modules, "job/tables.js", table, [row, row]) == [f"2 of 8 ranks: {agree}", ""]
    assert call_module(modules, "job/tables.js", table, [row] * 8) == [f"All 8 ranks: {agree}", "good"]


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


@pytest.mark.parametrize(
    ("share", "total", "note"),
    [(0, "200 ms", ""), (0.45, "200 ms ±45%", ""), (9, "200 ms", "Planned: within a factor of 10. ")],
)
def test_planned_step_time_has_a_margin_of_error(modules: Page, share: float, total: str, note: str) -> None:
    body = """
    const section = document.querySelector('section');
    m.stepBar(section)({ diagnosis: { planned: x }, estimate: {} }, { ranks: new Map(), stepTimes: [] });
    return [section.querySelector('.total').textContent, section.querySelector('[data-note]').textContent];
    """
    made = "<section><div data-bars></div><dl data-figures></dl><p data-note></p></section>"
    with open_blank_page(modules, made) as page:
        shown, result = call_module(page, "job/stepbar.js", body, {**TOLD, "sure": share})
    assert shown == total
    assert result == f"{note}Solid: exposed communication. {WAITING} Striped: communication overlapped with compute."


def test_figures_name_the_current_phase(modules: Page) -> None:
    ids = ("phase", "left-name", "left")
    body = """
    const ranks = new Map(x.map((phase, rank) => [rank, { phase }]));
    const state = { ranks, evals: new Map(), metrics: new Map(), progress: null };
    m.showProgress({ status: 'running', finished: false, members: [], history: [] }, state);
    return document.getElementById('figure-phase').textContent;
    """
    with open_blank_page(modules, "".join(f'<b id="figure-{name}"></b>' for name in ids)) as page:
        assert call_module(page, "job/figures.js", body, ["step", "step"]) == "now training"
        assert call_module(page, "job/figures.js", body, ["step", "eval"]) == "now training, validating"
