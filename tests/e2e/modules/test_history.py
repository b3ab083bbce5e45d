"""What the server kept of a run, folded in Chromium into what its page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from jobs.history.told.snapshot import snapshot
from tests.jobs.history import told
from tests.support.modules import call


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
    given = {"batches": batches, "answer": snapshot("job", 1)}
    begins, live, resumed, *told_of = call(modules, "store.js", body, given)
    assert begins == "0:8-0"
    assert resumed == live
    assert told_of == [4.5, [2.5], {"dp": 0.1}]
