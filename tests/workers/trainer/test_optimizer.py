"""The learning rate keeps its shape."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner.spec import TrainSpec
from workers.trainer.optimizer import learning_rate


def test_the_learning_rate_climbs_then_falls_along_a_cosine_to_a_tenth() -> None:
    train = TrainSpec(learning_rate=1.0, warmup_steps=4, steps=24)
    rates = [learning_rate(step, train) for step in range(24)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(24, train) == pytest.approx(0.1)
    assert learning_rate(0, TrainSpec(learning_rate=1.0, warmup_steps=0, steps=1)) == 1.0
