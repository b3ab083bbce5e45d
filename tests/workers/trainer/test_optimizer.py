"""The learning rate keeps its shape."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from planner.facts.spec import TrainSpec
from workers.trainer.optimizer import learning_rate, square_sum


def test_the_learning_rate_climbs_then_falls_along_a_cosine_to_a_tenth() -> None:
    train = TrainSpec(learning_rate=1.0, warmup_steps=4, steps=24)
    rates = [learning_rate(step, train) for step in range(24)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert learning_rate(24, train) == pytest.approx(0.1)
    assert learning_rate(0, TrainSpec(learning_rate=1.0, warmup_steps=0, steps=1)) == 1.0


def test_squares_are_summed_as_in_float64() -> None:
    x = torch.randn(3 * 2**20 + 17, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(square_sum(x)) == pytest.approx(float(x.double().square().sum()), rel=1e-7)
    assert float(square_sum(x[:5].bfloat16())) == pytest.approx(
        float(x[:5].bfloat16().double().square().sum()), rel=1e-6
    )
    assert float(square_sum(x[:0])) == 0.0
