"""What the server kept of a run, folded in Chromium into what its page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from jobs.runs.history.queries import snapshot as snapshots
from jobs.runs.history.queries.snapshot import get_snapshot
from tests.jobs.history import told
from tests.support.browser import call_module, open_blank_page


def test_a_state_made_of_history_goes_on_as_one_that_was_there_all_along(
    modules: Page, tmp_path: Path, settings: Any
) -> None:
    settings.HISTORY_DIR = tmp_path
    gauge = {"kind": "gauge", "rank": -1, "time": told.BEGAN + 3, "cpu": 2.5}
    lines = {"kind": "log", "rank": 1, "time": told.BEGAN + 3, "first": 0, "lines": ["one", "two"]}
    saved = {"kind": "checkpoint", "rank": 0, "time": told.BEGAN + 3, "step": 6, "name": "job/1/step-00000006"}
    saved |= {"num_bytes": 5, "stall_s": 0.1, "save_s": 0.2, "problem": ""}
    held_out = {"kind": "eval", "rank": 0, "time": told.BEGAN + 3, "step": 6, "loss": 4.5}
    still = {
        "kind": "standing",
        "rank": 1,
        "time": told.BEGAN + 3,
        "step": 6,
        "phase": "step",
        "still": 2.0,
        "stack": [],
    }
    group = {"group": {"axis": "dp", "ranks": [0, 1], "nth": 0}, "issued": 5, "ended": 4, "op": "all_reduce"}
    still |= {"stack": [], "groups": [{**group, "since": told.BEGAN, "payload_bytes": 8}]}
    batches = list(told.run(2, 12))
    batches.insert(6, told.batch(3.1, gauge, lines, saved, held_out, still))
    told.keep(tmp_path, batches[:8])
    body = """
    const history = await import('/js/fold/history.js');
    const feed = (s, from) => x.batches.slice(from).forEach((b, i) => m.foldBatch(s, `${from + i + 1}-0`, b));
    const live = m.createState(), resumed = m.createState();
    feed(live, 0);
    history.foldHistory(resumed, x.answer);
    const begins = m.resumeFrom(resumed);
    feed(resumed, 8);
    const seen = (s) => ({
      cells: [...s.ranks].map(([rank, r]) => [rank, [...r.cells].sort(), r.exactStep, r.exactCells, r.phase]),
      bytes: [...s.whole.rows].map(([rank, keys]) => [rank, [...keys].map(([key, row]) =>
        [key, row.reduce((sum, v) => sum + (v ?? 0), 0)]).sort()]),
      progress: s.progress.step, follows: m.resumeFrom(s), checkpoints: [...s.checkpoints.keys()],
      marks: [...s.marks.keys()].sort(), steps: [...s.steps].map(([step, point]) => [step, point.loss, point.time]),
      standing: [...s.standing.keys()], places: [...s.places], steps_s: s.stepTimes,
      logs: [...s.logs].map(([key, log]) => [key, log.lines, log.next]), host: s.members.get(0).host,
    });
    return [begins, seen(live), seen(resumed), resumed.evals.get(6).loss, resumed.gauges.get(-1).cpu,
      resumed.ranks.get(0).parts[0].exposed];
    """
    given = {"batches": batches, "answer": get_snapshot("job", 1)}
    begins, live, resumed, *told_of = call_module(modules, "store.js", body, given)
    assert begins == "0:8-0"
    assert resumed == live
    assert told_of == [4.5, [2.5], {"dp": 0.1}]


def test_the_loss_is_that_of_the_newest_step_and_in_words_where_it_is_no_number(
    modules: Page, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed that of the last step that had one, and of a long run that ended of the last step that was kept."""
    settings.HISTORY_DIR = tmp_path
    monkeypatch.setattr(snapshots, "MAX_POINTS", 4)
    wrong = told.step(0, 12, 6.0, loss=None, grad_norm=None, not_finite="loss is nan and gradient norm is nan")
    steep = told.step(0, 13, 6.5, loss=3.5, grad_norm=None, not_finite="gradient norm is inf")
    batches = [*told.run(2, 11), told.batch(6.0, wrong, told.step(1, 12, 6.0)), told.batch(6.5, steep)]
    body = """
    const { foldHistory } = await import("/js/fold/history.js");
    const { showProgress } = await import("/js/job/figures.js");
    const words = (state) => {
      showProgress({ members: [], finished: false, spec: { train: { steps: 100 } } }, state);
      return document.getElementById("figure-loss").textContent;
    };
    return x.map(([answer, batches]) => {
      const [live, ended] = [m.createState(), m.createState()];
      batches.forEach((batch, at) => m.foldBatch(live, `${at + 1}-0`, batch));
      foldHistory(ended, answer);
      return [words(live), words(ended)];
    });
    """
    given = []
    for length in (11, 12, 13):
        told.keep(tmp_path, batches[:length], f"job{length}")
        given.append([get_snapshot(f"job{length}", 1), batches[:length]])
    names = ("loss", "eval", "phase", "step", "rate", "rate-note", "step-time", "spread", "left", "left-name")
    figures = "".join(f'<b id="figure-{name}"></b>' for name in names)
    with open_blank_page(modules, f'{figures}<progress id="progress"></progress>') as page:
        assert call_module(page, "store.js", body, given) == [["4.8900"] * 2, ["nan"] * 2, ["3.5000"] * 2]
