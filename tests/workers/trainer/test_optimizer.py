"""The learning rate keeps its shape, squares are summed, and updates are counted where tensors are."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.facts.spec import TrainSpec
from tests.parity.cases import make_spec
from workers.checkpoint.state import set_steps
from workers.trainer.optimizer import RUN, learning_rate, square_sum
from workers.trainer.proof.reference import whole_tensors
from workers.trainer.proof.whole import make_room


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
    assert float(square_sum([x])) == pytest.approx(float(x.double().square().sum()), rel=1e-7)
    assert float(square_sum([x[:5].bfloat16()])) == pytest.approx(
        float(x[:5].bfloat16().double().square().sum()), rel=1e-6
    )
    assert float(square_sum([x[:0]])) == 0.0
    several = [x[:5].bfloat16(), x[:0], x[: 2**14].view(2**7, 2**7), x]
    apart = [float(square_sum([one])) for one in several]
    assert float(square_sum(several)) == pytest.approx(sum(apart), rel=1e-12)


class Kernels(TorchDispatchMode):
    """Counts what is called and makes no view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_tensor_costs_its_host_two_kernels_at_most() -> None:
    tensors = [torch.ones(RUN + 1), torch.ones(RUN), torch.ones(5)]
    with Kernels() as once:
        square_sum(tensors)
    with Kernels() as ten_times:
        square_sum(tensors * 10)
    assert ten_times.count - once.count == 9 * 4


class Device(NamedTuple):
    """What `make_room` takes of a trainer, on torch's device without values."""

    part: SimpleNamespace
    optimizer: SimpleNamespace
    device: torch.device


@pytest.fixture
def trainer() -> Device:
    spec = make_spec("gpt", {}, 1)
    device = torch.device("meta")
    tensors = [
        SimpleNamespace(name=name, master=torch.empty(shape, device=device)) for name, shape in whole_tensors(spec)
    ]
    part = SimpleNamespace(tensors=tensors, follow_masters=lambda: None)
    return Device(part, SimpleNamespace(state=defaultdict(dict)), device)


def test_updates_are_counted_where_the_tensors_are(trainer: Any) -> None:
    """A GPU's fused AdamW takes no count from the host: no run on one was resumed, nor held to one process at its
    end."""
    set_steps(trainer.part, trainer.optimizer, 3)
    counts = [state["step"] for state in trainer.optimizer.state.values()]
    assert len(counts) == len(trainer.part.tensors)
    assert {count.device for count in counts} == {trainer.device}


def test_one_process_counts_its_updates_where_its_tensors_are(trainer: Any) -> None:
    make_room(trainer, 3)
    assert {state["step"].device for state in trainer.optimizer.state.values()} == {trainer.device}
