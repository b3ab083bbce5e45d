"""The verification panel of the job page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.browser import call_module

pytestmark = pytest.mark.extended


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
