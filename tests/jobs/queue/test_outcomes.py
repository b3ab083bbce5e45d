"""One report of a gang, from what its members told."""

from __future__ import annotations

from typing import Any

from contracts.control import ExitReport
from jobs.queue.attempt_completion import merge_reports
from jobs.runs.baselines import compute_facts


def report(**summary: Any) -> ExitReport:
    """Of a member."""
    told: Any = {"outcome": "succeeded", "started": 1.0, "finished": 2.0}
    whole = {"steps": 1, "tokens_per_s": None, "losses": [], "eval_losses": [], "cells": {}, "verdict": {}, **summary}
    return {**told, "summary": whole if summary else None}


def cells(rank: int) -> dict[str, Any]:
    return {str(rank): [{"phase": "step", "axis": "dp", "op": "all_reduce", "payload_bytes": 8, "count": 1}]}


def test_ranks_that_a_member_left_out_are_left_out_of_the_gang() -> None:
    members = [
        report(cells=cells(0), cells_left_out=3),
        report(cells=cells(4)),
        report(cells=cells(8), cells_left_out=2),
    ]
    whole = merge_reports(members)
    assert whole is not None
    assert whole["summary"] is not None
    assert whole["summary"]["cells_left_out"] == 5
    told = compute_facts(whole, 12)
    assert (told["sent"], told["no_sent"]) == ([], "only 7 of 12 ranks have stored traffic")


def test_a_member_without_a_summary_is_left_out_with_all_its_ranks() -> None:
    whole = merge_reports([report(cells=cells(0)), report()], silent_ranks=4)
    assert compute_facts(whole, 8)["no_sent"] == "only 4 of 8 ranks have stored traffic"
    all_told = merge_reports([report(cells=cells(0)), report(cells=cells(4))])
    assert compute_facts(all_told, 8)["sent"] == [{"axis": "dp", "op": "all_reduce", "bytes": 16.0, "calls": 2.0}]
