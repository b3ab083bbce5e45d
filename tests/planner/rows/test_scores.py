"""Scores of published rows: hand-computed values, rejected files, and planner errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.published.__main__ import PLANNER_ERROR, answer_rows, print_rankings
from benchmarks.published.mapping import MappedRow
from benchmarks.published.rows import read_rows
from benchmarks.published.scores import FirstChoice, choose_first, compute_kendall_tau, count_fits, summarize_errors
from tests.planner.rows.test_benchmark_published import write_rows


def test_scores_match_hand_computed_values() -> None:
    off = summarize_errors([-0.1, 0.3])
    assert off is not None
    assert [off.mean, off.worst, off.too_fast] == pytest.approx([0.2, 0.3, 0.5])
    assert off.bias == pytest.approx(0.1)
    assert compute_kendall_tau([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)]) == pytest.approx(1 / 3), "two of three pairs agree"
    assert compute_kendall_tau([(1.0, 2.0)]) is None
    assert choose_first([(1.0, 2.0), (2.0, 1.0)], 1.0) == FirstChoice(1.0)
    assert choose_first([(1.0, 2.0), (1.0, 1.0)], 1.0) == FirstChoice(0.5), "any of those predicted alike"
    assert choose_first([(2.0, 2.0), (1.0, None)], 1.0) == FirstChoice(None), "it ran out of memory"
    assert choose_first([], 1.0) is None
    said = count_fits([(True, True), (False, True), (True, False), (False, False)])
    assert said is not None
    assert (said.right, said.false_fit_share, said.missed_share) == (0.5, 0.25, 0.5)


def test_first_choice_is_selected_from_layouts_predicted_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Include layouts that ran out of memory but were predicted to fit."""
    ran = [{"tp": str(tp), "pp": "2", "step_time_s": str(20 + tp)} for tp in (2, 4, 8)]
    quickest = {"tp": "1", "pp": "2", "measure_name": "out_of_memory", "measure_value": "1"}
    for rows, told in ((ran, "0"), ([*ran, quickest], "1"), ([*ran, {**quickest, "kv_heads": "8"}], "0")):
        answers, _ = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", *rows)))
        assert all(a.fits for a in answers)
        print_rankings(answers)
        (line,) = re.findall(r"^all .*$", capsys.readouterr().out, re.MULTILINE)
        assert line.split()[-1] == told


def test_file_without_a_required_column_is_rejected(tmp_path: Path) -> None:
    """A missing `zero` column would otherwise plan every row without ZeRO."""
    path = write_rows(tmp_path / "rows.csv", {})
    path.write_text(path.read_text().replace(",zero,", ",Zero,", 1))
    with pytest.raises(ValueError, match=r"rows\.csv has no column zero$"):
        read_rows(path)


def test_planner_error_is_reported_separately_from_invalid_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_planned: MappedRow) -> bool:
        raise KeyError("stack")

    rows = read_rows(write_rows(tmp_path / "rows.csv", {}, {"heads": "0"}))
    monkeypatch.setattr("benchmarks.published.predict._get_capacity_bytes", broken)
    _, skipped = answer_rows(rows)
    assert [reason.startswith(PLANNER_ERROR) for *_, reason in skipped] == [True, False]
