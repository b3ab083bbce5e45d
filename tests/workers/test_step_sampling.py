"""Traced steps stay within the byte rate, and are subsets of those of lower levels."""

from __future__ import annotations

import pytest

from workers.step_sampling import StepSampler


def run(thinning: StepSampler, steps: range, step_bytes: int, step_s: float) -> list[int]:
    """Return the traced steps."""
    told, last = [], None
    for step in steps:
        if thinning.should_trace(step):
            told.append(step)
            thinning.record_traced_step(step_bytes, step_s)
            last = step
    assert last is not None
    return told


@pytest.mark.parametrize("step_bytes", [100, 1_000, 9_000, 100_000])
def test_traced_steps_stay_within_byte_rate(step_bytes: int) -> None:
    told = run(StepSampler(10_000), range(1, 4001), step_bytes, step_s=0.1)[10:]
    if step_bytes * 10 <= 10_000:
        assert len(told) > 3980
    rate = (len(told) - 1) * step_bytes / ((told[-1] - told[0]) * 0.1)
    assert rate <= 10_000
    assert rate > 10_000 * 0.3 or step_bytes * 10 <= 10_000, "the smallest level that fits"


def test_steps_of_higher_level_are_a_subset() -> None:
    some = run(StepSampler(10_000), range(1, 2001), 3_000, step_s=0.1)
    few = run(StepSampler(10_000), range(1, 2001), 30_000, step_s=0.1)
    assert len(few) < len(some) < 2000
    assert set(few[5:]) <= set(some)


def test_traces_all_steps_again_when_they_become_small() -> None:
    thinning = StepSampler(10_000)
    run(thinning, range(1, 500), 100_000, step_s=0.1)
    assert thinning.level > 3
    run(thinning, range(512, 4000), 100, step_s=0.1)
    assert thinning.level == 0
