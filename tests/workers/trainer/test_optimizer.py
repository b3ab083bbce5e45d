"""Learning rate schedule, gradient norms, and fp32 masters."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec, TrainSpec
from tests.parity.cases import SIZES, make_spec, write_data
from tests.parity.rank import make_trainer
from workers.checkpoint.state import set_optimizer_steps
from workers.meter import Recorder
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.optimizer import SUM_CHUNK, compute_square_sum, get_learning_rate
from workers.trainer.parallel.data_parallel import MasterGradients, make_master
from workers.trainer.trainer import Trainer
from workers.trainer.verification.reference import allocate_moments


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    train = TrainSpec(learning_rate=1.0, warmup_steps=4, steps=24)
    rates = [get_learning_rate(step, train) for step in range(24)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert get_learning_rate(24, train) == pytest.approx(0.1)
    assert get_learning_rate(0, TrainSpec(learning_rate=1.0, warmup_steps=0, steps=1)) == 1.0


def test_square_sums_match_float64() -> None:
    x = torch.randn(3 * 2**20 + 17, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(compute_square_sum([x])) == pytest.approx(float(x.double().square().sum()), rel=1e-7)
    assert float(compute_square_sum([x[:5].bfloat16()])) == pytest.approx(
        float(x[:5].bfloat16().double().square().sum()), rel=1e-6
    )
    assert float(compute_square_sum([x[:0]])) == 0.0
    several = [x[:5].bfloat16(), x[:0], x[: 2**14].view(2**7, 2**7), x]
    apart = [float(compute_square_sum([one])) for one in several]
    assert float(compute_square_sum(several)) == pytest.approx(sum(apart), rel=1e-12)


class Kernels(TorchDispatchMode):
    """Count the operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_square_sum_takes_at_most_two_kernels_per_tensor() -> None:
    tensors = [torch.ones(SUM_CHUNK + 1), torch.ones(SUM_CHUNK), torch.ones(5)]
    with Kernels() as once:
        compute_square_sum(tensors)
    with Kernels() as ten_times:
        compute_square_sum(tensors * 10)
    assert ten_times.count - once.count == 9 * 4


class Device(NamedTuple):
    """Store the parts of a trainer that `allocate_moments` uses."""

    model: SimpleNamespace
    optimizer: SimpleNamespace
    device: torch.device


@pytest.fixture
def trainer() -> Device:
    spec = make_spec("gpt", {}, 1)
    device = torch.device("meta")
    tensors = [
        SimpleNamespace(name=name, master=torch.empty(parameter.shape, device=device))
        for name, parameter in iter_model_parameters(spec.model)
    ]
    part = SimpleNamespace(parameters=tensors, copy_masters_to_weights=lambda: None)
    return Device(part, SimpleNamespace(state=defaultdict(dict)), device)


def test_step_counts_are_on_the_device_of_the_parameters(trainer: Any) -> None:
    """The fused AdamW of a GPU rejects step counts on the host."""
    set_optimizer_steps(trainer.model, trainer.optimizer, 3)
    counts = [state["step"] for state in trainer.optimizer.state.values()]
    assert len(counts) == len(trainer.model.parameters)
    assert {count.device for count in counts} == {trainer.device}


def test_step_counts_of_the_reference_are_on_its_device(trainer: Any) -> None:
    allocate_moments(trainer, 3)
    assert {state["step"].device for state in trainer.optimizer.state.values()} == {trainer.device}


def test_fp32_accumulation_keeps_small_gradients() -> None:
    weight = nn.Parameter(torch.zeros(1))
    master = make_master(weight, torch.bfloat16)
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    masters = MasterGradients({weight: master}, splits_backward=False)
    for gradient in (256.0, 0.5, 0.5, 0.5, 0.5):  # bf16 has 8 bits: 256.5 is 256 there
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert master.grad is not None
    assert master.grad.item() == 258.0
    held = weakref.ref(weight)
    del weight, master, masters
    gc.collect()
    assert held() is None, "after each check with a single-process reference 6 B per parameter stayed"


def trainer_of(folder: Path, **train: Any) -> Trainer:
    settings = {"global_batch": 4, "micro_batches": 2, "seq_len": 32, "warmup_steps": 0, "data": "parity.bin", **train}
    spec: JobSpec = parse_spec({"model": SIZES["llama"], "train": settings})
    return make_trainer(spec, folder, Recorder(0))


@pytest.mark.parametrize("precision", ["bf16", "bf16_gradients"])
def test_masters_accumulate_small_updates(precision: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    trainer = trainer_of(tmp_path, precision=precision, learning_rate=1e-6, weight_decay=0.0)
    (held,) = (held for held in trainer.model.parameters if held.name == "final_norm.weight")
    assert torch.equal(held.master, torch.ones_like(held.master))
    trainer.train_step(0)
    assert held.master.detach().sub(1).abs().max() == pytest.approx(1e-6, rel=0.1)
    assert torch.equal(held.weight, torch.ones_like(held.weight)), "less than the precision of bf16"
    assert all(torch.equal(h.weight, h.master.bfloat16()) for h in trainer.model.parameters)
    assert all(h.weight.grad is None and h.master.grad is None for h in trainer.model.parameters)


def test_weights_and_masters_are_one_tensor_in_fp32(tmp_path: Path) -> None:
    write_data(tmp_path)
    tensors = trainer_of(tmp_path).model.parameters
    assert all(held.weight is held.master is held.gradient_holder for held in tensors)


def test_weights_and_masters_are_one_tensor_with_bf16_state(tmp_path: Path) -> None:
    write_data(tmp_path)
    trainer = trainer_of(tmp_path, precision="bf16_state", learning_rate=1e-3)
    tensors = trainer.model.parameters
    assert all(held.weight is held.master is held.gradient_holder for held in tensors)
    before = {held.name: held.weight.clone() for held in tensors}
    trainer.train_step(0)
    assert {held.weight.dtype for held in tensors} == {torch.bfloat16}
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.numel() > 1]
    assert len(moments) == 2 * len(tensors)
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    moved = {held.name for held in tensors if not torch.equal(held.weight, before[held.name])}
    assert {held.name for held in tensors} - moved == {h.name for h in tensors if "norm" in h.name}, "ones stay ones"
