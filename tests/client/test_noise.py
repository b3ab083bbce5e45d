"""Limits and noise: the mean decides, and more runs loosen no limit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshboard.gate import CheckResult, Limit, check_limits, measures, parse_limit, report
from tests.client.test_gate import changed

SECONDS = st.floats(1e-6, 1e6)
RUNS = st.lists(SECONDS, min_size=1, max_size=6)
SHARES = st.floats(-0.9, 9.0)
FEW_MS = "step_time=1ms"


def held(runs: Any, baselines: Any, limit: Limit | str, **how: bool) -> CheckResult:
    wanted = parse_limit(limit, "max") if isinstance(limit, str) else limit
    content = [[changed(name=str(time), step_time=time) for time in side] for side in (runs, baselines)]
    (row,) = check_limits(content[0], content[1], [wanted], **how)
    return row


def at_most(share: float) -> Limit:
    return Limit("step_time", "max", share, relative=True)


@pytest.mark.parametrize(
    ("runs", "baselines", "limit", "verdict", "sure"),
    [
        # Runs far beyond the limit, in which two values are too few for an interval.
        ((0.263, 0.326), (0.3, 0.31), FEW_MS, "FAIL", "FAIL"),
        ((0.263, 0.326), (), FEW_MS, "FAIL", "FAIL"),
        ((1.5793,), (0.8, 1.0, 1.25), "step_time=+10%", "FAIL", "FAIL"),
        ((1.9586, 1.2), (1.0, 0.7), "step_time=+10%", "FAIL", "FAIL"),
        # Within the limit by more than the noise, by less, and with unknown noise.
        ((0.69, 0.7, 0.71), (0.99, 1.0, 1.01), "step_time=+10%", "ok", "ok"),
        ((0.9, 1.0, 1.1), (0.9, 1.0, 1.1), "step_time=+10%", "unsure", "FAIL"),
        ((0.5,), (1.0,), "step_time=+10%", "ok", "FAIL"),
        ((0.5,), (), "step_time=1s", "ok", "FAIL"),
        ((0.5,), (0.99, 1.0, 1.01), "step_time=+10%", "ok", "ok"),
        ((1.0, 1.0), (1.0, 1.0), "step_time=+0%", "ok", "ok"),
        # An absolute limit does not use the noise of the baseline.
        ((1.0, 1.1, 1.2), (5.0, 9.0), "step_time=0.8s", "FAIL", "FAIL"),
        ((1.0, 1.1, 1.2), (5.0, 9.0), "step_time=2s", "ok", "ok"),
    ],
)
def test_mean_decides_the_verdict(runs: Any, baselines: Any, limit: str, verdict: str, sure: str) -> None:
    row = held(runs, baselines, limit)
    assert (row.verdict, row.ok) == (verdict, verdict != "FAIL")
    assert held(runs, baselines, limit, sure=True).verdict == sure


def test_result_has_a_confidence_interval() -> None:
    within, beyond = (
        "The mean is within the limit, but the margin is smaller than the noise of",
        "Submit more runs to decide.",
    )
    row = held((0.9, 1.0, 1.1), (0.9, 1.0, 1.1), "step_time=+10%")
    assert row.why == f"{within} 3 runs and 3 baseline runs."
    row = held((1.15,), (0.9, 1.0, 1.1), "step_time=+10%")
    assert (row.verdict, row.why) == (
        "FAIL",
        f"The mean exceeds the limit by less than the noise of 1 run and 3 baseline runs. {beyond}",
    )
    assert held((9.0,), (0.9, 1.0, 1.1), "step_time=+10%").why == ""
    assert held((0.5,), (1.0,), "step_time=+10%", sure=True).why == (
        "The noise of 1 run and 1 baseline run is unknown."
        " --sure needs two runs or two baseline runs, with values above 0."
    )


def test_interval_is_relative() -> None:
    """Compare with a calculation by hand, in logarithms.

    The means are 0 and the variances 0.01. With a baseline, Welch has 4 degrees of freedom (t = 2.776) and a standard
    error of sqrt(0.01/3 + 0.01/3) = 0.08165. Without one, Student has 2 (t = 4.303) and sqrt(0.01/3).
    """
    spread = [math.exp(step) for step in (-0.1, 0.0, 0.1)]
    half = 2.776 * math.sqrt(0.02 / 3)
    row = held(spread, spread, "step_time=+10%")
    assert (row.value, row.low, row.high) == (
        pytest.approx(1),
        pytest.approx(math.exp(-half), rel=1e-3),
        pytest.approx(math.exp(half), rel=1e-3),
    )
    half = 4.303 * math.sqrt(0.01 / 3)
    assert held(spread, (), "step_time=2s").high == pytest.approx(math.exp(half), rel=1e-3)
    assert held([1.0], spread, "step_time=+10%").high == pytest.approx(math.exp(4.303 * math.sqrt(0.04 / 3)), rel=1e-3)
    assert held([1.0], [1.0], "step_time=+10%").low is None


@given(RUNS, RUNS, SHARES)
def test_interval_of_times_is_positive(runs: Any, baselines: Any, share: float) -> None:
    row = held(runs, baselines, at_most(share))
    if row.low is not None and row.high is not None and row.value is not None:
        assert 0 <= row.low <= row.value * (1 + 1e-9)
        assert row.value <= row.high * (1 + 1e-9)
    assert report.format_table([row])


@given(RUNS, RUNS, SHARES, st.floats(1.0, 100.0), st.data())
def test_slower_run_passes_no_failed_limit(runs: Any, baselines: Any, share: float, factor: float, data: Any) -> None:
    which = data.draw(st.integers(0, len(runs) - 1))
    slower = [time * factor if number == which else time for number, time in enumerate(runs)]
    assert held(runs, baselines, at_most(share)).ok or not held(slower, baselines, at_most(share * 0.999)).ok


@given(RUNS, RUNS, SHARES, st.floats(1.001, 100.0))
def test_decides_clearly_if_all_runs_agree(runs: Any, baselines: Any, share: float, factor: float) -> None:
    fastest, slowest = min(runs), max(runs)
    under = [fastest / factor / (1 + share)] * len(baselines)
    over = [slowest * factor / (1 + share)] * len(baselines)
    assert not held(runs, under, at_most(share)).ok
    assert held(runs, over, at_most(share)).ok
    assert not held(runs, (), Limit("step_time", "max", fastest / factor, relative=False)).ok
    assert held(runs, (), Limit("step_time", "max", slowest * factor, relative=False)).ok


@given(RUNS, RUNS, SHARES, st.lists(st.floats(1.001, 100.0), min_size=1, max_size=4))
def test_another_slow_run_does_not_loosen_a_limit(runs: Any, baselines: Any, share: float, factors: Any) -> None:
    before = held(runs, baselines, at_most(share))
    assert before.bound is not None
    more = [*runs, *(before.bound * factor for factor in factors)]
    assert before.ok or not held(more, baselines, at_most(share)).ok
    faster = [*baselines, *(min(baselines) / factor for factor in factors)]
    assert before.ok or not held(runs, faster, at_most(share)).ok


@given(RUNS, SHARES)
def test_single_run_is_decided_by_its_value(baselines: Any, share: float) -> None:
    for factor, ok in ((0.99, True), (1.01, False)):
        usual = math.exp(sum(map(math.log, baselines)) / len(baselines))
        assert held([usual * (1 + share) * factor], baselines, at_most(share)).ok is ok


@given(RUNS, st.booleans())
def test_equal_values_are_within_zero_percent(runs: Any, sure: bool) -> None:
    one, several = [runs[0]] * len(runs), len(runs) > 1
    assert held(one, one, at_most(0.0), sure=sure).ok == (several or not sure)
    assert held(runs, runs, at_most(0.0)).ok


def test_decides_minimums_like_maximums() -> None:
    fast, slow = ([changed(tokens_per_s=rate) for rate in side] for side in ((90.0, 110.0), (1.0, 40.0)))
    floor = [parse_limit("tokens_per_s=-5%", "min")]
    assert [check_limits(ours, fast, floor)[0].verdict for ours in (fast, slow)] == ["unsure", "FAIL"]


@pytest.mark.parametrize("losses", [(0.0, 0.0), (-1.0, 2.0), (-3.0,)])
def test_values_that_are_not_positive_have_no_interval(losses: Any) -> None:
    runs = [changed(losses={1: loss}) for loss in losses]
    (row,) = check_limits(runs, [], [parse_limit("loss=0.4", "max")])
    assert (row.verdict, row.low) == ("FAIL" if sum(losses) / len(losses) > 0.4 else "ok", None)


def test_mean_of_equal_bytes_is_not_rounded() -> None:
    runs = [changed(peak_memory=153_014_273.0)] * 3
    (row,) = check_limits(runs, runs, [parse_limit("peak_memory=+0%", "max")])
    assert (row.value, row.baseline, row.verdict) == (153_014_273.0, 153_014_273.0, "ok")


def student(t: float, freedom: int) -> float:
    """The share of Student's t below t, by Simpson's rule over its density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    points = [scale * (1 + (t * i / 4000) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(4001)]
    return 0.5 + t / 12000 * (points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2]))


def test_quantiles_match_students_t() -> None:
    assert [round(student(t, freedom), 4) for freedom, t in enumerate(measures.T, 1)] == [0.975] * len(measures.T)


COUNTS = [(3, 20, (1, 1)), (1, 5, (1, 1)), (4, 4, (1, 5))]


@pytest.mark.parametrize(("num_runs", "num_baselines", "spreads"), COUNTS)
def test_false_verdicts_are_rare(num_runs: int, num_baselines: int, spreads: tuple[float, float]) -> None:
    """Drawn from a normal distribution. At a limit that holds exactly, one of forty passes where `sure`."""
    drawn = random.Random(15)
    failed = passed = 0
    for _ in range(2000):
        same, slow = ([drawn.gauss(middle, spreads[0]) for _ in range(num_runs)] for middle in (100, 110))
        usual = [drawn.gauss(100, spreads[1]) for _ in range(num_baselines)]
        failed += not held(same, usual, at_most(0.1)).ok
        passed += held(slow, usual, at_most(0.1), sure=True).ok
    assert failed == 0
    assert 0.01 < passed / 2000 < 0.035
