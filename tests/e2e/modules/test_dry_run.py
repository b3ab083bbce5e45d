"""The page of a dry run: whether the layout fits, the progress per rank, and errors without "-0.0%"."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.modules import call

GIB = 2**30


def fit(modules: Page, counted: dict[int, int], **job: Any) -> dict[str, str]:
    """Return the text and the tone for ranks with `counted` GiB of tensors, on a device of 80 GiB."""
    stages = [{"stage": n, "memory": {"allowance": GIB}, "memory_bytes": (n + 1) * 60 * GIB} for n in range(2)]
    estimate = {"stages": stages, "axes": {"pp": 2, "dp": 1, "tp": 1}, "cluster": {"memory_bytes": 80 * GIB}}
    full = {"spec": {"dry_ranks": [0, 1]}, "estimate": estimate, "finished": False, "status": "running", **job}
    runs = [[rank, {"peak_bytes": size * GIB, "optimizer_bytes": GIB}] for rank, size in counted.items()]
    return dict(call(modules, "job/dryrun.js", "return m.fitWords(x[0], new Map(x[1]))", [full, runs]))


@pytest.mark.parametrize(
    ("counted", "text", "tone"),
    [
        ({}, "Counting rank 0.", ""),
        (
            {0: 3},
            "Does not fit: 120 GiB of 80.0 GiB on the rank with the most memory, stage 1 (planned, not counted). "
            "Counted 1 of 2 ranks.",
            "bad",
        ),
        (
            {0: 3, 1: 8},
            "Fits: 10.0 GiB of 80.0 GiB on the rank with the most memory, rank 1. "
            "This memory includes 1.00 GiB of planned overhead.",
            "good",
        ),
        (
            {0: 90, 1: 8},
            "Does not fit: 92.0 GiB of 80.0 GiB on the rank with the most memory, rank 0. "
            "This memory includes 1.00 GiB of planned overhead.",
            "bad",
        ),
    ],
)
def test_the_page_says_first_whether_the_layout_fits(
    modules: Page, counted: dict[int, int], text: str, tone: str
) -> None:
    assert fit(modules, counted) == {"text": text, "tone": tone}


def test_a_dry_run_that_failed_has_no_fit(modules: Page) -> None:
    assert fit(modules, {}, finished=True, status="failed")["text"] == "The dry run ended before it finished a rank."


@pytest.mark.parametrize(
    ("planned", "words"),
    [(10_000, "0%"), (9_999, "< 0.1%"), (10_001, "< 0.1%"), (9_900, "+1.0%"), (12_500, "\u221220%")],
)
def test_a_difference_compares_the_measurement_with_the_plan(modules: Page, planned: int, words: str) -> None:
    assert call(modules, "format.js", "return m.relativeDifference(x, 10000)", planned) == words
