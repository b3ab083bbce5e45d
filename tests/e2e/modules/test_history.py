"""The state of a page that is restored from the stored history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from jobs.runs.history.queries import snapshot as snapshots
from jobs.runs.history.queries.snapshot import get_snapshot
from tests.jobs.history import sample_telemetry
from tests.support.browser import call_module, open_blank_page

pytestmark = pytest.mark.extended


def test_loss_is_from_the_newest_step_and_shows_nan_as_a_word(
    modules: Page, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HISTORY_DIR = tmp_path
    monkeypatch.setattr(snapshots, "MAX_POINTS", 4)
    wrong = sample_telemetry.step(
        0, 12, 6.0, loss=None, grad_norm=None, not_finite="loss is nan and gradient norm is nan"
    )
    steep = sample_telemetry.step(0, 13, 6.5, loss=3.5, grad_norm=None, not_finite="gradient norm is inf")
    batches = [
        *sample_telemetry.generate_run(2, 11),
        sample_telemetry.batch(6.0, wrong, sample_telemetry.step(1, 12, 6.0)),
        sample_telemetry.batch(6.5, steep),
    ]
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
    argument = []
    for length in (11, 12, 13):
        sample_telemetry.record_batches(tmp_path, batches[:length], f"job{length}")
        argument.append([get_snapshot(f"job{length}", 1), batches[:length]])
    names = ("loss", "eval", "phase", "step", "rate", "rate-note", "step-time", "spread", "left", "left-name")
    figures = "".join(f'<b id="figure-{name}"></b>' for name in names)
    with open_blank_page(modules, f'{figures}<progress id="progress"></progress>') as page:
        assert call_module(page, "store.js", body, argument) == [["4.8900"] * 2, ["nan"] * 2, ["3.5000"] * 2]
