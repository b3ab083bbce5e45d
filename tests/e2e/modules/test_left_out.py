"""Summaries that omit counters."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module
from tests.support.telemetry import build_batch, build_cell, build_traffic

pytestmark = pytest.mark.extended


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
