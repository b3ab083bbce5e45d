"""Scores of published rows: hand-computed values, and rejected files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.rows import read_rows
from benchmarks.published.scores import (
    FirstChoice,
    choose_first,
    compute_kendall_tau,
    compute_quantile,
    count_fits,
    summarize_errors,
)
from tests.planner.rows.test_benchmark_published import write_rows


def test_each_source_has_the_same_weight() -> None:
    errors = {"small": [-0.4], "large": [0.1] * 9 + [0.3]}
    found = summarize_errors(errors)
    assert found is not None
    assert [found.mean, found.bias] == pytest.approx([(0.4 + 0.12) / 2, (-0.4 + 0.12) / 2])
    assert (found.sources, found.rows, found.median) == (2, 11, 0.3)
    assert summarize_errors({}) is None
    assert compute_quantile({"small": [0.4], "large": [0.1, 0.2]}, 0.5) == 0.2
    assert compute_quantile({"small": [0.4], "large": [0.1, 0.2]}, 0.9) == 0.4


def test_scores_match_hand_computed_values() -> None:
    assert compute_kendall_tau([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)]) == pytest.approx(1 / 3), "two of three pairs agree"
    assert compute_kendall_tau([(1.0, 2.0)]) is None
    assert choose_first([(1.0, 2.0), (2.0, 1.0)], 1.0) == FirstChoice(1.0)
    assert choose_first([(1.0, 2.0), (1.0, 1.0)], 1.0) == FirstChoice(0.5), "any of those predicted alike"
    assert choose_first([(2.0, 2.0), (1.0, None)], 1.0) == FirstChoice(None), "it ran out of memory"
    assert choose_first([], 1.0) is None
    said = count_fits([(True, True), (False, True), (True, False), (False, False)])
    assert said is not None
    assert (said.right, said.false_fit_share, said.missed_share) == (0.5, 0.25, 0.5)


def test_file_without_a_required_column_is_rejected(tmp_path: Path) -> None:
    """A missing `zero` column would otherwise plan every row without ZeRO."""
    path = write_rows(tmp_path / "rows.csv", {})
    path.write_text(path.read_text().replace(",zero,", ",Zero,", 1))
    with pytest.raises(ValueError, match=r"rows\.csv has no column zero$"):
        read_rows(path)
